"""The end of a row: its sum, its sink, its statistics, and O on the way to global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync

from .attention.sequences import Sequences
from .sm90_consumer import matrix_store, warp_group_barrier
from .sm90_load import first_rows
from .sm90_plan import BLOCK_ROWS, LN_2, LOG2_E, VECTOR_ELEMENTS, WARP_GROUP_THREADS, Plan
from .sm90_softmax import first_row, scale_rows


def await_stores():
    """Wait until the copy engine has read what this thread told it to store: shared memory must outlive its reads."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class Output:
    """Writes O of a row block, and its statistics, as the problem defines them.

    `arguments`: the call's, by name; `tma`: O's (atom, view); `place`: where the CTA works.
    """

    plan: Plan
    arguments: dict
    sequences: Sequences
    tma: tuple
    place: object

    @cute.jit
    def write(self, consumer, smem_o, queries):
        """Finish a consumer's rows. ``smem_o`` (64 rows, columns): its own staging buffer; ``queries`` of the
        sequence. The sums of a row's four threads become one here, which every thread of the warp group must reach."""
        plan, softmax = self.plan, consumer.softmax
        where = plan.packing.coordinates(self.place.first_block + consumer.row_block, self.place.kv_head)
        factor = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            softmax.total[r] = cute.arch.warp_reduction_sum(softmax.total[r], threads_in_group=4)
            factor[r] = self._row_factor(softmax, r, plan.packing.head(first_row(consumer.lane) + 8 * r, where[0]))
        if const_expr(plan.writes_lse):
            self._write_statistics(consumer, where, queries)
        if const_expr(plan.problem.normalize):
            scale_rows(consumer.acc_o, factor)
        self._stage(consumer, smem_o)
        if const_expr(plan.ragged_rows):
            self._store_within(consumer, smem_o, where, queries)
        else:
            self._store_by_tma(consumer, smem_o, where)

    @cute.jit
    def _row_factor(self, softmax, r: cutlass.Constexpr[int], head):
        """What a row's O is divided by, inverted: its sum and its sink, or 0 if it has seen no key."""
        total = softmax.total[r]
        if const_expr(self.plan.problem.has_sink):
            sink = self.arguments["sink"][head] * LOG2_E
            total += cute.math.exp2(sink - softmax.maximum[r] * softmax.scale_log2, fastmath=True)
        inverse = cute.arch.rcp_approx(total)
        if const_expr(self.plan.blind_rows):
            inverse = inverse if softmax.total[r] > Float32(0.0) else Float32(0.0)
        return inverse

    @cute.jit
    def _write_statistics(self, consumer, where, queries):
        """LSE, without the sink, and the raw maximum. The first column slice's CTA writes, a thread for each row."""
        plan, softmax, lane = self.plan, consumer.softmax, consumer.lane
        if self.place.column_slice == 0 and lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                row = first_row(lane) + 8 * r
                head, position = self._head_and_position(row, where)
                if position < queries:
                    lse = softmax.maximum[r] * softmax.scale + cute.math.log2(softmax.exact[r]) * LN_2
                    self._statistic("lse", head, position, lse)
                    if const_expr(not plan.problem.normalize):
                        self._statistic("row_max", head, position, softmax.maximum[r])

    def _head_and_position(self, row, where):
        """The query head and the position of a block's row."""
        return self.plan.packing.head(row, where[0]), self.plan.packing.position(row, where[1])

    def _statistic(self, name: str, head, position, value):
        """Write one number of [batch, heads, t], or of the packed [heads, total_t]."""
        if const_expr(self.plan.problem.varlen):
            self.arguments[name][head, self.sequences.first_query(self.place.batch) + position] = value
        else:
            self.arguments[name][self.place.batch, head, position] = value

    @cute.jit
    def _stage(self, consumer, smem_o):
        """Round O into shared memory, for the warp group's own threads and for TMA."""
        if const_expr(self.plan.persistent):
            # The row block before may still be on its way out of the same buffer.
            await_stores()
            warp_group_barrier(consumer.index)
        element = self.plan.element
        rounded = cute.make_rmem_tensor(consumer.acc_o.layout, element)
        rounded.store(consumer.acc_o.load().to(element))
        store = matrix_store(consumer.mma_o, element).get_slice(consumer.lane)
        cute.copy(store, store.retile(rounded), store.partition_D(smem_o))
        cute.arch.fence_view_async_shared()
        warp_group_barrier(consumer.index)

    @cute.jit
    def _store_by_tma(self, consumer, smem_o, where):
        """Send a staged block; what lies past the tensor's end is dropped."""
        if cute.arch.make_warp_uniform(consumer.lane // 32) == 0:
            view = first_rows(self.plan, self.sequences, self.tma[1], self.place.batch)
            tile = cute.local_tile(
                view, (self.plan.packing.tile, self.plan.pv_n_tile), (where, self.place.column_slice)
            )
            shared, target = cpasync.tma_partition(
                self.tma[0], 0, cute.make_layout(1), cute.group_modes(smem_o, 0, 2), cute.group_modes(tile, 0, 2)
            )
            cute.copy(self.tma[0], shared, target)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(not self.plan.persistent):
                await_stores()

    @cute.jit
    def _store_within(self, consumer, smem_o, where, queries):
        """Send a staged block of a packed sequence, but no row past its end: there begins the next one."""
        positions = self.plan.packing.positions
        first = where[1] * positions
        if first + positions <= queries:
            self._store_by_tma(consumer, smem_o, where)
        elif first < queries:
            self._store_rows(consumer, smem_o, where, queries)

    @cute.jit
    def _store_rows(self, consumer, smem_o, where, queries):
        """Store the rows of a staged block that lie within the sequence, 16 bytes a thread at a time."""
        plan = self.plan
        vectors = plan.pv_n_tile // VECTOR_ELEMENTS  # of a row
        first_query = self.sequences.first_query(self.place.batch)
        moved = cute.make_rmem_tensor(VECTOR_ELEMENTS, plan.element)
        for i in cutlass.range(consumer.lane, BLOCK_ROWS * vectors, WARP_GROUP_THREADS, unroll=1):
            row, vector = i // vectors, i % vectors
            head, position = self._head_and_position(row, where)
            if position < queries:
                staged = cute.local_tile(smem_o, (1, VECTOR_ELEMENTS), (row, vector))
                cute.autovec_copy(cute.make_tensor(staged.iterator, moved.layout), moved)
                columns = self.arguments["o"][first_query + position, head, None]
                target = cute.local_tile(columns, (VECTOR_ELEMENTS,), (self.place.column_slice * vectors + vector,))
                cute.autovec_copy(moved, target)
