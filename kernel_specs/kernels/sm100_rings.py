"""Rings of buffers between roles: a full and an empty mbarrier for each stage.

Whoever fills a stage waits until it is empty, whoever uses it until it is full. Both walk the stages in the same order,
each with its own ``Place`` (CuTeDSL's PipelineState: an index and the parity of the phase to wait for).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr, pipeline
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import tcgen05

from .sm100_plan import GROUP, WARP, Fixed

LEADER = 0  # the rank of the CTA of a pair that multiplies for both
BOTH = 0b11  # the ranks of a pair


@dataclass(frozen=True)
class Ring(Fixed):
    """``stages`` stages on the mbarriers at ``barriers`` (2 * stages: the full ones, then the empty ones), each of
    which completes after ``fills`` or ``uses`` arrivals. After them come ``boundaries`` more: where a source's last
    tile is put right before its use, its bytes are counted on one of those, and the stage is reported full later.

    Of a pair of CTAs each has the barriers, and waits for its own. The leader's MMA warp uses and fills the stages of
    both, so what threads of either report arrives at the leader's barriers, and what it commits at those of both."""

    barriers: cute.Pointer
    stages: int
    fills: int = 1
    uses: int = 1
    boundaries: int = 0

    def initialise(self):
        """By one thread, before anyone waits."""
        for i in range(self.stages):
            cute.arch.mbarrier_init(self.full(i), self.fills)
            cute.arch.mbarrier_init(self.empty(i), self.uses)

        for i in range(self.boundaries):
            cute.arch.mbarrier_init(self.boundary(i), 1)

    def filler(self):
        """Where a filling role starts: every stage is empty."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def user(self):
        """Where a using role starts: no stage is full."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)

    def full(self, index):
        """The mbarrier that says that stage `index` is full."""
        return self.barriers + index

    def empty(self, index):
        """The mbarrier that says that stage `index` is empty."""
        return self.barriers + self.stages + index

    def boundary_at(self, source: int) -> int:
        """Which of ``barriers`` counts the bytes of the source's last tile."""
        return 2 * self.stages + source

    def boundary(self, source: int):
        """That mbarrier."""
        return self.barriers + self.boundary_at(source)

    def wait_full(self, place):
        cute.arch.mbarrier_wait(self.full(place.index), place.phase)

    def wait_empty(self, place):
        cute.arch.mbarrier_wait(self.empty(place.index), place.phase)

    def drain(self, place):
        """Wait, as the filling role, until every stage was used: commits arrive in this CTA's shared memory, which must
        outlive them."""
        for _ in range(self.stages):
            self.wait_empty(place)
            place.advance()


def uses_of_groups(pair: bool) -> int:
    """Arrivals of a warp group at a ring's barrier, by `arrive_group`: of its threads, or of a pair's warps."""
    return 2 * GROUP // WARP if pair else GROUP


@cute.jit
def arrive_group(barrier, pair: cutlass.Constexpr):
    """All threads of a warp group arrive: each by itself, or, since the other CTA's memory is far, a warp at once."""
    if const_expr(pair):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            arrive(barrier, pair)
    else:
        arrive(barrier, pair)


def arrive(barrier, pair: bool):
    """Each calling thread arrives, at the barrier of the leader of a pair."""
    if pair:
        cute.arch.mbarrier_arrive(barrier, LEADER, scope=MemScopeKind.CLUSTER)
    else:
        cute.arch.mbarrier_arrive(barrier)


def expect(barrier, size: int, pair: bool):
    """One thread of the calling warp arrives, likewise; the phase also waits for `size` bytes of TMA."""
    with cute.arch.elect_one():
        if pair:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size, LEADER, scope=MemScopeKind.CLUSTER)
        else:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


def commit(barrier, pair: bool):
    """One arrival, at the barriers of both CTAs of a pair, when every tcgen05 operation that this warp issued so far is
    complete."""
    with cute.arch.elect_one():
        if pair:
            tcgen05.commit(barrier, BOTH, tcgen05.CtaGroup.TWO)
        else:
            tcgen05.commit(barrier)
