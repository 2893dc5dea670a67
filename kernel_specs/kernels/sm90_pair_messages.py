"""What the warp groups of a pair of CTAs hand over: P of a tile, from the one that scored it to the two that multiply.

A thread's P is the A operand of the thread of its own number in the other warp group, register by register. So a
*message* is kept as [vector of four words][thread]: no bank conflict, no swizzle, no matrix instruction. To the other
CTA it goes by st.async, which needs no fence: its bytes complete that CTA's barrier. (The own CTA by st.async too took
200 cycles more. H200, 2026-11-30.) After the last tile comes one more, the *end*, with the rows' sums.
"""

from copy import copy

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .fmha_sm90_pair_space import BLOCK_ROWS, END_BYTES, KV_TILE, MESSAGE_BYTES, MESSAGES
from .sm90_pair_plan import CTAS
from .sm90_plan import WARP_GROUP_THREADS, WARPS_PER_GROUP

QUAD = 4  # threads that hold a row
VECTOR = 4  # words
WORDS = BLOCK_ROWS * KV_TILE // 2 // WARP_GROUP_THREADS  # of P, a thread
P_WORDS = CTAS * MESSAGES * WORDS * WARP_GROUP_THREADS
START_WORDS = CTAS * MESSAGES * BLOCK_ROWS
END_WORDS = CTAS * END_BYTES // 4
FULL, EMPTY, ENDED = 0, CTAS * MESSAGES, (CTAS + 1) * MESSAGES  # the barriers, from their first on


class Messages:
    """`words`, `starts`, `ends`: pointers to Int32 shared memory of P_WORDS, START_WORDS and END_WORDS; `barriers`;
    `rank`: the CTA's; `lane`: the thread's number in its warp group."""

    def __init__(self, words, starts, ends, barriers, rank, lane):
        self.words, self.starts, self.ends, self.barriers = words, starts, ends, barriers
        self.rank, self.lane = rank, lane

    def __extract_mlir_values__(self):
        return [self.words, self.starts, self.ends, self.barriers, self.rank, self.lane]

    def __new_from_mlir_values__(self, values):
        new = copy(self)
        new.words, new.starts, new.ends, new.barriers, new.rank, new.lane = values
        return new

    def initialise(self):
        """To be called by one thread, before a fence and a barrier of the cluster."""
        for owner in range(CTAS):
            # The own warps arrive; for the other CTA's, one does, and announces the bytes.
            arrivals = WARPS_PER_GROUP - (WARPS_PER_GROUP - 1) * Int32(self.rank != owner)
            for number in range(MESSAGES):
                cute.arch.mbarrier_init(self.barriers + FULL + owner * MESSAGES + number, arrivals)
        for number in range(MESSAGES):
            cute.arch.mbarrier_init(self.barriers + EMPTY + number, CTAS * WARPS_PER_GROUP)
        cute.arch.mbarrier_init(self.barriers + ENDED, CTAS)

    # ---- the sender ------------------------------------------------------------------------------------------------

    @cute.jit
    def send(self, pair, p, starts):
        """Leave the own tile of a pair for both CTAs: P as `WORDS` words of a thread, and where its two rows' exponents
        start from."""
        number, turn = pair % MESSAGES, pair // MESSAGES
        cute.arch.mbarrier_wait(self.barriers + EMPTY + number, (turn + 1) % 2)
        message, other = self.rank * MESSAGES + number, 1 - self.rank
        full = self.barriers + FULL + message
        words, both = cute.recast_tensor(p, Int32), cute.recast_tensor(starts, Int32)
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, MESSAGE_BYTES, other)
        for v in cutlass.range_constexpr(WORDS // VECTOR):
            vector = tuple(words[VECTOR * v + i] for i in range(VECTOR))
            target = self._vectors(message) + v * (WARP_GROUP_THREADS * VECTOR)
            cute.arch.store_async_dsmem(target, vector, full, other)
        if self.lane % QUAD == 0:
            cute.arch.store_async_dsmem(self._starts(message), (both[0], both[1]), full, other)
        here = self._message(message)
        for v in cutlass.range_constexpr(WORDS // VECTOR):
            vector = cute.make_tensor(words.iterator + VECTOR * v, cute.make_layout(VECTOR))
            cute.autovec_copy(vector, here[None, v])
        if self.lane % QUAD == 0:
            cute.autovec_copy(both, cute.make_tensor(self._starts(message), cute.make_layout(2)))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def send_end(self, starts, totals, exact):
        """Leave for both CTAs, after all tiles, where the rows' exponents start from in the end, and two sums of each:
        of P as it was sent, and of what it was rounded from."""
        ended = self.barriers + ENDED
        if self.lane < CTAS:
            cute.arch.mbarrier_arrive_and_expect_tx(ended, END_BYTES, self.lane)
        if self.lane % QUAD == 0:
            start, total, whole = (cute.recast_tensor(values, Int32) for values in (starts, totals, exact))
            for cta in cutlass.range_constexpr(CTAS):
                first, second = (start[0], start[1], total[0], total[1]), (whole[0], whole[1])
                cute.arch.store_async_dsmem(self._ends(self.rank), first, ended, Int32(cta))
                cute.arch.store_async_dsmem(self._exact(self.rank), second, ended, Int32(cta))

    # ---- the receivers ---------------------------------------------------------------------------------------------

    @cute.jit
    def receive(self, pair, owner: cutlass.Constexpr[int], p, starts):
        """Wait for a pair's tile that CTA ``owner`` scored, take it into registers, and let go of the message."""
        number, turn = pair % MESSAGES, pair // MESSAGES
        message = owner * MESSAGES + number
        cute.arch.mbarrier_wait(self.barriers + FULL + message, turn % 2)
        words = cute.recast_tensor(p, Int32)
        here = self._message(message)
        for v in cutlass.range_constexpr(WORDS // VECTOR):
            target = cute.make_tensor(words.iterator + VECTOR * v, cute.make_layout(VECTOR))
            cute.autovec_copy(here[None, v], target)
        both = cute.make_tensor(self._starts(message), cute.make_layout(2))
        cute.autovec_copy(both, cute.recast_tensor(starts, Int32))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers + EMPTY + number, Int32(owner))

    @cute.jit
    def receive_ends(self):
        """Wait for both ends: of the thread's two rows the starts, the sums, the exact sums, each (row, owner)."""
        cute.arch.mbarrier_wait(self.barriers + ENDED, 0)
        ends, exact = (cute.make_rmem_tensor((count, CTAS), Float32) for count in (VECTOR, 2))
        for owner in cutlass.range_constexpr(CTAS):
            for found, place in ((ends, self._ends(owner)), (exact, self._exact(owner))):
                there = cute.make_tensor(place, cute.make_layout(cute.size(found, mode=[0])))
                cute.autovec_copy(there, cute.recast_tensor(found, Int32)[None, owner])
        sums = cute.make_tensor(ends.iterator + 2, cute.make_layout((2, CTAS), stride=(1, VECTOR)))
        return ends, sums, exact

    # ---- places, of a thread ---------------------------------------------------------------------------------------

    def _vectors(self, message):
        offset = message * (WORDS * WARP_GROUP_THREADS) + self.lane * VECTOR
        return self.words + cute.assume(Int32(offset), divby=VECTOR)

    def _message(self, message):
        """A message's words of a thread, as (word of a vector, vector)."""
        layout = cute.make_layout((VECTOR, WORDS // VECTOR), stride=(1, WARP_GROUP_THREADS * VECTOR))
        return cute.make_tensor(self._vectors(message), layout)

    def _starts(self, message):
        return self.starts + cute.assume(Int32(message * BLOCK_ROWS + self.lane // QUAD * 2), divby=2)

    def _ends(self, owner):
        return self.ends + cute.assume(Int32(owner * 2 * BLOCK_ROWS + self.lane // QUAD * VECTOR), divby=VECTOR)

    def _exact(self, owner):
        first = CTAS * 2 * BLOCK_ROWS
        return self.ends + cute.assume(Int32(first + owner * BLOCK_ROWS + self.lane // QUAD * 2), divby=2)
