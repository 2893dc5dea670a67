"""A consumer warp group of the wide Hopper attention kernel: 64 rows, half of O's columns, every other tile's S."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .sm90_consumer import issue, matrix_store, warp_group_barrier
from .sm90_plan import BARRIER_MEET, BLOCK_ROWS, WARP_GROUP_THREADS
from .sm90_ring import PartRing
from .sm90_runs import Runs, valid_keys
from .sm90_softmax import OnlineSoftmax, ScoreMask, first_row
from .sm90_tails import zero_rows
from .sm90_wide_plan import BARRIER_READY, CONSUMER_THREADS, OWN_COLUMNS, WidePlan, key_position, value_position


class WideConsumer:
    """`index`: 0 owns the even steps, 1 the odd ones. `smem`: q (rows, columns, 1); k (keys, columns, slot) and v
    (columns, keys, slot) of the ring; p (rows, keys, owner); maxima (row, owner) and sums (row r or r + 8, thread,
    owner), float32.

    `acc_o` and `softmax` are its results: un-normalised O, and the rows' maxima and partial sums.
    """

    def __init__(
        self, plan: WidePlan, index: int, smem: SimpleNamespace, ring: PartRing, mask: ScoreMask, runs: Runs, scale
    ):
        self.plan, self.index, self.ring, self.mask, self.runs = plan, index, ring, mask, runs
        self.other, self.row_block, self.group = 1 - index, 0, 0
        self.lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        self.softmax = OnlineSoftmax(plan, scale)

        self.mma_s = self._mma(plan.kv_tile)
        self.mma_o = self._mma(OWN_COLUMNS, OperandMajorMode.MN)  # all own columns: of the layout of acc_o
        own = self._mma(plan.part_columns, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        taken = self._mma(plan.part_columns, OperandMajorMode.MN)
        slice_s, slice_own, slice_taken = (mma.get_slice(0) for mma in (self.mma_s, own, taken))
        self.q = slice_s.make_fragment_A(slice_s.partition_A(smem.q[None, None, 0]))
        self.k = slice_s.make_fragment_B(slice_s.partition_B(smem.k))
        self.v = slice_own.make_fragment_B(slice_own.partition_B(smem.v))
        self.p = slice_own.make_fragment_A(slice_own.partition_shape_A((BLOCK_ROWS, plan.kv_tile)))
        p_taken = slice_taken.make_fragment_A(slice_taken.partition_A(smem.p))[None, None, None, self.other]
        self.own_product, self.taken_product = (own, self.p), (taken, p_taken)

        self.acc_s = cute.make_rmem_tensor(self.mma_s.partition_shape_C((BLOCK_ROWS, plan.kv_tile)), Float32)
        self.acc_o = cute.make_rmem_tensor(self.mma_o.partition_shape_C((BLOCK_ROWS, OWN_COLUMNS)), Float32)
        self.acc_o.fill(0.0)
        of_part = cute.make_layout(own.partition_shape_C((BLOCK_ROWS, plan.part_columns)))
        self.acc_parts = [
            cute.make_tensor(self.acc_o.iterator + part * cute.size(of_part), of_part) for part in range(plan.own_parts)
        ]
        self.store_p = matrix_store(self.mma_s, plan.element).get_slice(self.lane)
        self.shared_p = self.store_p.partition_D(smem.p[None, None, index])
        self.slots = smem.k
        self.maxima_given, self.maxima_taken = smem.maxima[None, index], smem.maxima[None, self.other]
        self.sums_given, self.sums_taken = (smem.sums[None, self.lane, owner] for owner in (index, self.other))

    def _mma(self, columns, b_major=OperandMajorMode.K, a_source=warpgroup.OperandSource.SMEM):
        """64 rows by ``columns``, of one warp group."""
        element, k_major = self.plan.element, OperandMajorMode.K
        return make_trivial_tiled_mma(
            element, element, k_major, b_major, Float32, (1, 1, 1), (BLOCK_ROWS, columns), a_source=a_source
        )

    # ---- the walk --------------------------------------------------------------------------------------------------

    @cute.jit
    def attend(self):
        """Visit all steps: the own ones as owner, the others as taker."""
        if const_expr(self.index == 0):
            self._attend_first()
        else:
            self._attend_second()

    @cute.jit
    def _attend_first(self):
        """Own a step, then take the next. (Scores of the step after it before that: its K comes into the slots that the
        own step leaves last, and waiting for it cost 4 % at batch 32, s_k 1152. H200, 2026-11-30.)"""
        steps = self.runs.steps
        for pair in cutlass.range((steps + 1) // 2, unroll=1):
            step = 2 * pair
            self._scores(step)
            self._soften(step)
            self._leave(step)
            self._give()
            self._own_values(step)
            if step + 1 < steps:
                self._take()
                self._clean(step + 1)
                self._start_values(self.taken_product, step + 1)
                self._end_values(step + 1)

    @cute.jit
    def _attend_second(self):
        """Take a step under the softmax of the own next one."""
        steps = self.runs.steps
        for pair in cutlass.range(steps // 2, unroll=1):
            step = 2 * pair + 1
            self._scores(step)
            self._take()
            self._clean(step - 1)
            self._start_values(self.taken_product, step - 1)
            self._soften(step)
            # A store stays where it stands, and what it needs stays before it: without one before the product's end,
            # the assembler moves the whole softmax behind that.
            if const_expr(self.plan.overlaps):
                self._leave(step)
                self._end_values(step - 1)
            else:
                self._end_values(step - 1)
                self._leave(step)
            self._see_next_keys(step)
            self._give()
            self._own_values(step)
        if steps % 2 == 1:
            self._take()
            self._clean(steps - 1)
            self._start_values(self.taken_product, steps - 1)
            self._end_values(steps - 1)

    @cute.jit
    def _see_next_keys(self, step):
        """Wait for the next step's K, which warp group 0 computes with once it has this step's P.

        K of the step after it, which this warp group waits for next, comes into the same slots. It must not take the
        phase before for that one, and can tell them apart only here: later K may have been replaced already. It costs
        no time: K of the next step comes before this step's V.
        """
        if const_expr(not self.plan.kv_shared):
            if step + 1 < self.runs.steps:
                for part in cutlass.range_constexpr(self.plan.parts):
                    self.ring.wait_full(key_position(self.plan, step + 1) + part)

    # ---- parts of a step -------------------------------------------------------------------------------------------

    @cute.jit
    def _scores(self, step):
        """S = Q K^T of a step's tile, a wgmma group for each part of K, which is let go as its group ends. With
        kv_shared it stays: it is V's."""
        plan, position, blocks = self.plan, key_position(self.plan, step), cute.size(self.k, mode=[2])
        for part in cutlass.range_constexpr(plan.parts):
            self._wait_full(position + part)
            keys = self.k[None, None, None, self.ring.slot(position + part)]
            issue(self.mma_s, self.acc_s, self.q, keys, part * blocks, clear=part == 0)
        for part in cutlass.range_constexpr(plan.parts):
            warpgroup.wait_group(plan.parts - 1 - part)
            if const_expr(not plan.kv_shared):
                self.ring.release(position + part)

    @cute.jit
    def _wait_full(self, position):
        """Wait for a part; gathered ones were written through the generic proxy."""
        self.ring.wait_full(position)
        if const_expr(self.plan.gather):
            cute.arch.fence_view_async_shared()

    @cute.jit
    def _soften(self, step):
        """Scores become P."""
        self.mask.apply(self.acc_s, step)
        self.softmax.step(self.acc_s)

    @cute.jit
    def _leave(self, step):
        """Round P to the A operand of the own product, and leave it and the rows' maxima in shared memory."""
        self._clean(step)
        # An accumulator's register order is the A operand's register order, 16 columns at a time.
        rounded = cute.make_tensor(self.p.iterator, self.acc_s.layout)
        rounded.store(self.acc_s.load().to(self.plan.element))
        cute.copy(self.store_p, self.store_p.retile(rounded), self.shared_p)
        given, maximum, row = self.maxima_given, self.softmax.maximum, first_row(self.lane)
        if self.lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                given[row + 8 * r] = maximum[r]

    @cute.jit
    def _give(self):
        """Tell the other warp group that P is there, and that this one has done with the P that it had taken.

        The compiler likes to repeat the rounding behind a branch, which may be behind the product's wgmma.fence, and
        then the registers change while the product reads them: so they are settled.
        """
        # wgmma reads through the async proxy.
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=BARRIER_READY + self.index, number_of_threads=CONSUMER_THREADS)
        settle(self.p)

    @cute.jit
    def _take(self):
        """Wait for the other warp group's P, and bring the sums and O to its rows' maxima."""
        cute.arch.barrier(barrier_id=BARRIER_READY + self.other, number_of_threads=CONSUMER_THREADS)
        for r in cutlass.range_constexpr(2):
            self.softmax.follow(r, self.maxima_taken[first_row(self.lane) + 8 * r])
        self.softmax.rescale(self.acc_o)

    @cute.jit
    def _own_values(self, step):
        """O += P V of an own step."""
        self.softmax.rescale(self.acc_o)
        self._start_values(self.own_product, step)
        self._end_values(step)

    @cute.jit
    def _start_values(self, product: tuple, step):
        """Start O += P V for the own columns of a step's tile."""
        mma, p = product
        position = value_position(self.plan, step) + self.index * self.plan.own_parts
        for part in cutlass.range_constexpr(self.plan.own_parts):
            self._wait_full(position + part)
        for part in cutlass.range_constexpr(self.plan.own_parts):
            values = self.v[None, None, None, self.ring.slot(position + part)]
            issue(mma, self.acc_parts[part], p, values, 0, clear=False)

    @cute.jit
    def _end_values(self, step):
        """Finish what `_start_values` started; the own columns of V are free then."""
        position = value_position(self.plan, step) + self.index * self.plan.own_parts
        for part in cutlass.range_constexpr(self.plan.own_parts):
            warpgroup.wait_group(self.plan.own_parts - 1 - part)
            self.ring.release(position + part)

    @cute.jit
    def _clean(self, step):
        """If a step's tile reaches past its sequence's end, zero those rows of the own columns. S is known by then."""
        if const_expr(self.plan.unclean_tails):
            valid = valid_keys(self.plan, self.runs, step)
            if valid < self.plan.kv_tile:
                position = value_position(self.plan, step) + self.index * self.plan.own_parts
                for part in cutlass.range_constexpr(self.plan.own_parts):
                    self._wait_full(position + part)
                    part_slot = self.slots[None, None, self.ring.slot(position + part)]
                    zero_rows(self.plan, part_slot, valid, self.lane, WARP_GROUP_THREADS)
                cute.arch.fence_view_async_shared()
                warp_group_barrier(self.index)

    # ---- the end ---------------------------------------------------------------------------------------------------

    @cute.jit
    def add_sums(self):
        """The rows' sums over both warp groups' tiles, in both. Q and the ring are spent when it returns."""
        for r in cutlass.range_constexpr(2):
            self.sums_given[r] = self.softmax.total[r]
        self.meet()
        for r in cutlass.range_constexpr(2):
            self.softmax.total[r] = self.softmax.total[r] + self.sums_taken[r]

    def meet(self):
        """Barrier of both consumer warp groups."""
        cute.arch.barrier(barrier_id=BARRIER_MEET, number_of_threads=CONSUMER_THREADS)


@cute.jit
def settle(fragment):
    """Make a fragment's registers final where this stands: what is read later is these, not the computation repeated.

    The moves have side effects as far as the compiler knows, so none is repeated; the assembler drops them.
    """
    words = cute.recast_tensor(fragment, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        moved = llvm.inline_asm(T.i32(), [words[i].ir_value()], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        words[i] = Int32(moved)
