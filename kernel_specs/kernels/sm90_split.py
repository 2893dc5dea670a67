"""Split KV on Hopper: each of ``num_splits`` CTAs walks an even part of a row block's tiles, and the results meet.

- ``merge`` = kernel: the CTAs leave partial results in the workspace (attention/workspace.py); the kernel that merges
  them (attention/merge.py) follows in the stream, its start overlapped with the end of this one.
- ``merge`` = cluster: the CTAs are a thread-block cluster and merge in shared memory (attention/cluster_merge.py): one
  launch and no workspace, but at most 16 splits. KV groups leave their results as further splits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .attention.cluster_merge import QUAD, ClusterMerge, ordered_by_columns
from .attention.merge import (
    VECTOR,
    Combine,
    finite,
    log_sum_exp,
    partial_outputs,
    partial_statistics,
    reciprocal,
    sink_term,
)
from .attention.packing import rows_view
from .attention.sequences import Sequences
from .sm90_load import first_rows
from .sm90_plan import Plan
from .sm90_softmax import first_row


def make_combine(plan: Plan) -> Combine:
    """The kernel that merges a variant's partial results."""
    p = plan.problem
    return Combine(p.heads, p.head_dim_v, plan.num_splits, p.normalize)


def make_cluster_merge(plan: Plan) -> ClusterMerge:
    """How the CTAs of a cluster merge: all their consumer warp groups take part."""
    return ClusterMerge(plan.pv_n_tile, plan.num_splits, plan.kv_groups, plan.row_blocks, plan.compact_merge)


@cute.jit
def _sum_rows(softmax):
    """The sums of a row's four threads become one, in each of them."""
    for r in cutlass.range_constexpr(2):
        softmax.total[r] = cute.arch.warp_reduction_sum(softmax.total[r], threads_in_group=4)


@dataclass(frozen=True)
class PartialOutput:
    """Leaves a row block's partial results in the workspace. `arguments`: the call's, by name."""

    plan: Plan
    arguments: dict
    sequences: Sequences
    place: object

    @cute.jit
    def write(self, consumer, queries):
        """Leave a consumer's rows, from its registers. A row of a wgmma accumulator lies in four threads, two columns
        in each; neighbours exchange pairs, so that each writes 16 bytes."""
        plan, packing, softmax, lane = self.plan, self.plan.packing, consumer.softmax, consumer.lane
        _sum_rows(softmax)
        head_block, position_block = packing.coordinates(
            self.place.first_block + consumer.row_block, self.place.kv_head
        )
        o = self.arguments["o"]
        rows = o.shape[0] * plan.problem.heads
        if const_expr(not plan.problem.varlen):
            rows *= o.shape[1]
        splits, columns = plan.num_splits, plan.problem.head_dim_v
        outputs = partial_outputs(self.arguments["workspace"], rows, splits, columns)
        statistics = partial_statistics(self.arguments["workspace"], rows, splits, columns)
        first_token = self.sequences.first_query(self.place.batch)
        if const_expr(not plan.problem.varlen):
            first_token = self.place.batch * o.shape[1]
        upper = lane % 2 == 1
        values = cute.make_tensor(consumer.acc_o.iterator, cute.make_layout((2, 2, 2, plan.pv_n_tile // 16)))
        for r in cutlass.range_constexpr(2):
            row = first_row(lane) + 8 * r
            head, position = packing.head(row, head_block), packing.position(row, position_block)
            exists = position < queries
            place = (first_token + position) * plan.problem.heads + head
            vector = cute.make_rmem_tensor(VECTOR, Float32)
            target = cute.zipped_divide(outputs[None, place, self.place.split], (VECTOR,))
            first = self.place.column_slice * (plan.pv_n_tile // VECTOR) + 2 * (lane % 2) + lane % 4 // 2
            for j in cutlass.range_constexpr(plan.pv_n_tile // 16):
                for i in cutlass.range_constexpr(2):
                    own, other = values[i, r, 0, j], values[i, r, 1, j]
                    given = cute.arch.shuffle_sync_bfly(own if upper else other, offset=1)
                    vector[i] = given if upper else own
                    vector[2 + i] = other if upper else given
                if exists:
                    cute.autovec_copy(vector, target[None, first + 4 * j])
            if exists and self.place.column_slice == 0 and lane % 4 == 0:
                both = cute.make_rmem_tensor(2, Float32)
                both[0], both[1] = softmax.maximum[r], softmax.total[r]
                cute.autovec_copy(both, statistics[None, self.place.split, place])


@dataclass(frozen=True)
class ClusterOutput:
    """Merges a row block over its cluster, and writes O and the statistics as the problem defines them."""

    plan: Plan
    arguments: dict
    sequences: Sequences
    place: object

    @cute.jit
    def write(self, consumer, scratch, queries):
        """Merge and write. All consumer threads of the cluster call this; its other threads call `accompany`.

        ``scratch``: a pointer to float32 shared memory of which the consumers have read everything. The splits of the
        row block are the cluster's ranks from `place.first_rank` on.
        """
        softmax, merge = consumer.softmax, make_cluster_merge(self.plan)
        _sum_rows(softmax)
        consumer.meet()
        row_block, group, lane = consumer.row_block, consumer.group, consumer.lane
        split, first_rank = self.place.split, self.place.first_rank
        own = merge.region(scratch, row_block, group)
        kept = merge.leave(own, consumer.acc_o, softmax.maximum, softmax.total, split, lane)
        merge.meet()
        merged = merge.take(scratch, kept, row_block, split, group, lane, softmax.scale_log2, first_rank)
        merge.done_reading()
        self._put(consumer, merge.first_vector(split, group), merged, queries)
        merge.await_readers()

    def accompany(self):
        """What the threads of the cluster do that hold no rows."""
        merge = make_cluster_merge(self.plan)
        merge.meet()
        merge.done_reading()
        merge.await_readers()

    @cute.jit
    def _put(self, consumer, first, merged: tuple, queries):
        """Finish and write a thread's vectors of its two rows, and the rows' statistics with the first ones."""
        plan, packing, lane = self.plan, self.plan.packing, consumer.lane
        merge, (values, maximum, total) = make_cluster_merge(plan), merged
        head_block, position_block = packing.coordinates(
            self.place.first_block + consumer.row_block, self.place.kv_head
        )
        view = first_rows(plan, self.sequences, rows_view(self.arguments["o"]), self.place.batch)
        together = merge.stored_together
        for r in cutlass.range_constexpr(2):
            row = first_row(lane) + 8 * r
            head, position = packing.head(row, head_block), packing.position(row, position_block)
            exists = position < queries
            of_row = cute.make_tensor(values.iterator + 2 * r, cute.make_layout((2, merge.share), stride=(1, 4)))
            rounded = cute.make_rmem_tensor(2 * merge.share, plan.element)
            pairs = cute.make_tensor(rounded.iterator, cute.make_layout((2, merge.share)))
            factor = self._factor(maximum[r], total[r], head, consumer.softmax)
            pairs.store((of_row.load() * factor).to(plan.element))
            words = ordered_by_columns(cute.recast_tensor(rounded, Int32), lane, together)
            if exists:
                columns = cute.zipped_divide(view[(head, position), None], (2 * together,))
                self._store(words, columns, first, lane)
                if const_expr(plan.writes_lse):
                    if first == 0 and self.place.column_slice == 0 and lane % 4 == 0:
                        self._statistic(
                            "lse", head, position, log_sum_exp(maximum[r], total[r], consumer.softmax.scale)
                        )
                        if const_expr(not plan.problem.normalize):
                            self._statistic("row_max", head, position, maximum[r])

    @cute.jit
    def _factor(self, maximum: Float32, total: Float32, head, softmax):
        """What a row's O is multiplied by."""
        factor = Float32(1.0)
        if const_expr(self.plan.problem.normalize):
            extra = Float32(0.0)
            if const_expr(self.plan.problem.has_sink):
                extra = sink_term(self.arguments["sink"][head], finite(maximum), softmax.scale_log2)
            factor = reciprocal(total, extra)
        return factor

    @cute.jit
    def _store(self, words, columns, first, lane):
        """Store a row's words: as many together as lie side by side in a thread."""
        plan, merge = self.plan, make_cluster_merge(self.plan)
        together = merge.stored_together
        for i in cutlass.range_constexpr(0, merge.share, together):
            vector = first + i + lane % together
            # A thread's words of a vector: all four of it, or two, or one.
            chunk = vector * (QUAD // together) + lane % QUAD // together
            chunk += self.place.column_slice * (plan.pv_n_tile // (2 * together))
            stored = cute.make_rmem_tensor(2 * together, plan.element)
            for k in cutlass.range_constexpr(together):
                cute.recast_tensor(stored, Int32)[k] = words[i + k]
            if vector < merge.vectors:
                cute.autovec_copy(stored, columns[None, chunk])

    def _statistic(self, name: str, head, position, value):
        """Write one number of [batch, heads, t], or of the packed [heads, total_t]."""
        if const_expr(self.plan.problem.varlen):
            self.arguments[name][head, self.sequences.first_query(self.place.batch) + position] = value
        else:
            self.arguments[name][self.place.batch, head, position] = value
