"""A ring of shared-memory slots between a producer warp group and its consumers, in mbarriers, for Hopper.

Everything that passes through a ring has a *position*, counted from 0: it lies in slot ``position % slots`` and is the
``position // slots``-th thing there. Who knows the order of the loads can wait for any of them, and release it.
"""

from copy import copy

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

BARRIERS_PER_SLOT = 2


class PartRing:
    """`barriers`: 2 * `slots` of them, the full ones first. A slot is full when `bytes_filled` bytes and `fills`
    arrivals have come, and empty when `releases` warps of each of the `sharers` CTAs that fill it together have let go
    of it; the CTAs are every `rank_step`-th rank of the cluster from `first_rank` on."""

    def __init__(self, barriers, *, slots, bytes_filled, fills=1, releases=4, sharers=1, first_rank=0, rank_step=1):
        self.barriers = barriers
        self.slots = slots
        self.bytes_filled = bytes_filled
        self.fills = fills
        self.releases = releases
        self.sharers = sharers
        self.rank_step = rank_step
        self.first_rank = Int32(first_rank)

    def __extract_mlir_values__(self):
        return [self.barriers, self.first_rank]

    def __new_from_mlir_values__(self, values):
        new = copy(self)
        new.barriers, new.first_rank = values
        return new

    def initialise(self):
        """To be called by one thread, before a fence and a barrier."""
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self.barriers + slot, self.fills)
            cute.arch.mbarrier_init(self.barriers + self.slots + slot, self.releases * self.sharers)

    def slot(self, position):
        """Where it lies."""
        return position % self.slots

    def full(self, position):
        """The barrier that its load completes."""
        return self.barriers + position % self.slots

    def wait_full(self, position):
        """Until it has been loaded."""
        cute.arch.mbarrier_wait(self.full(position), position // self.slots % 2)

    def wait_empty(self, position):
        """Until what was in its slot before is no longer needed; at once in the first round."""
        empty = self.barriers + self.slots + position % self.slots
        cute.arch.mbarrier_wait(empty, (position // self.slots + 1) % 2)

    @cute.jit
    def expect(self, position):
        """Announce the bytes of its load by TMA, which then makes the slot full: by one thread of the warp."""
        with cute.arch.elect_one():
            if const_expr(self.fills > 1):
                cute.arch.mbarrier_arrive(self.full(position), arrive_count=self.fills - 1)
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(position), self.bytes_filled)

    @cute.jit
    def release(self, position, count: cutlass.Constexpr[int] = 1):
        """Let go of it: by each warp that reads it, once it has; in the name of ``count`` warps, where the others do
        not read it."""
        empty = self.barriers + self.slots + position % self.slots
        if const_expr(self.sharers == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty, arrive_count=count)
        else:
            lane = cute.arch.lane_idx()
            if lane < self.sharers:
                cute.arch.mbarrier_arrive(empty, self.first_rank + lane * self.rank_step)
