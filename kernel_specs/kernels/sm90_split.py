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

from .attention.cluster_merge import ClusterMerge
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
from .sm90_plan import BLOCK_ROWS, WARP_GROUP_THREADS, Plan
from .sm90_softmax import first_row


def make_combine(plan: Plan) -> Combine:
    """The kernel that merges a variant's partial results."""
    p = plan.problem
    return Combine(p.heads, p.head_dim_v, plan.num_splits, p.normalize)


def make_cluster_merge(plan: Plan) -> ClusterMerge:
    """How the CTAs of a cluster merge: all their consumer warp groups take part."""
    rows = plan.row_blocks * BLOCK_ROWS
    threads = plan.consumers * WARP_GROUP_THREADS
    return ClusterMerge(rows, plan.pv_n_tile, plan.num_splits, threads, plan.kv_groups)


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

    def write(self, consumer, scratch, queries):
        """Merge and write. All consumer threads of the cluster call this; its other threads call `accompany`.

        ``scratch``: a pointer to float32 shared memory of which the consumers have read everything. The splits of the
        row block are the cluster's ranks from `place.first_rank` on.
        """
        softmax, merge = consumer.softmax, make_cluster_merge(self.plan)
        _sum_rows(softmax)
        consumer.meet()
        part, first = merge.part(scratch, consumer.group), consumer.row_block * BLOCK_ROWS
        merge.leave(part, consumer.acc_o, softmax.maximum, softmax.total, first, consumer.lane)
        merge.meet()
        merged = []
        for turn in range(merge.turns):
            exists, row, chunk = merge.chunk(turn, consumer.merge_thread, self.place.split)
            parts = merge.take(scratch, row, chunk, softmax.scale_log2, self.place.first_rank)
            merged.append((exists, row, chunk, *parts))
        merge.done_reading()
        for exists, row, chunk, values, maximum, total in merged:
            self._put(exists, values, maximum, total, row, chunk, softmax, queries)
        merge.await_readers()

    def accompany(self):
        """What the threads of the cluster do that hold no rows."""
        merge = make_cluster_merge(self.plan)
        merge.meet()
        merge.done_reading()
        merge.await_readers()

    @cute.jit
    def _put(self, exists, values, maximum: Float32, total: Float32, row: Int32, chunk: Int32, softmax, queries):
        """Finish and write four columns of a row of the CTA's tile, and its statistics with the first ones."""
        plan, packing = self.plan, self.plan.packing
        row_block, row_inside = row // BLOCK_ROWS, row % BLOCK_ROWS
        head_block, position_block = packing.coordinates(self.place.first_block + row_block, self.place.kv_head)
        head, position = packing.head(row_inside, head_block), packing.position(row_inside, position_block)
        if exists and position < queries:
            if const_expr(plan.problem.normalize):
                extra = Float32(0.0)
                if const_expr(plan.problem.has_sink):
                    extra = sink_term(self.arguments["sink"][head], finite(maximum), softmax.scale_log2)
                values.store(values.load() * reciprocal(total, extra))
            rounded = cute.make_rmem_tensor(VECTOR, plan.element)
            rounded.store(values.load().to(plan.element))
            view = first_rows(plan, self.sequences, rows_view(self.arguments["o"]), self.place.batch)
            target = cute.zipped_divide(view[(head, position), None], (VECTOR,))
            cute.autovec_copy(rounded, target[None, self.place.column_slice * (plan.pv_n_tile // VECTOR) + chunk])
            if const_expr(plan.writes_lse):
                if chunk == 0 and self.place.column_slice == 0:
                    self._statistic("lse", head, position, log_sum_exp(maximum, total, softmax.scale))
                    if const_expr(not plan.problem.normalize):
                        self._statistic("row_max", head, position, maximum)

    def _statistic(self, name: str, head, position, value):
        """Write one number of [batch, heads, t], or of the packed [heads, total_t]."""
        if const_expr(self.plan.problem.varlen):
            self.arguments[name][head, self.sequences.first_query(self.place.batch) + position] = value
        else:
            self.arguments[name][self.place.batch, head, position] = value
