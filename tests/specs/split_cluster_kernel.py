"""The cluster merge of split_cluster.py: each CTA reads what it would have computed, and the cluster merges it."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from kernel_specs.kernels.attention.cluster_merge import ROWS, ClusterMerge, ordered_by_columns
from kernel_specs.kernels.attention.merge import LOG2_E, log_sum_exp, partial_outputs, partial_statistics, reciprocal

WARP_GROUP = 128


class Merge:
    def __init__(self, p, exit_barrier, compact):
        self.p = p
        self.exit_barrier = exit_barrier
        self.threads = p.rows // 64 * WARP_GROUP
        self.merge = ClusterMerge(p.columns, p.splits, row_blocks=p.rows // 64, compact=compact)

    @cute.jit
    def __call__(self, partials, o, lse, scale, stream):
        mma = make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (64, self.p.columns)
        )
        self.kernel(partials, o, lse, scale, mma).launch(
            grid=(self.p.splits, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.p.splits, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, scale: Float32, mma: cute.TiledMma):
        p = self.p
        thread, _, _ = cute.arch.thread_idx()
        rank, _, _ = cute.arch.block_idx()
        lane, group = thread % WARP_GROUP, thread // WARP_GROUP
        scratch = SmemAllocator().allocate_array(Float32, p.rows // ROWS * self.merge.region_words, byte_alignment=1024)
        outputs = partial_outputs(partials, p.rows, p.splits, p.columns)
        statistics = partial_statistics(partials, p.rows, p.splits, p.columns)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, p.columns)), Float32)
        places = mma.get_slice(lane).partition_C(cute.make_identity_tensor((64, p.columns)))
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = outputs[places[i][1], places[i][0] + 64 * group, rank]
        maximum, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            row = 64 * group + lane // 32 * 16 + lane % 32 // 4 + 8 * r
            maximum[r], total[r] = statistics[0, rank, row], statistics[1, rank, row]
        own = self.merge.region(scratch, group, 0)
        kept = self.merge.leave(own, acc, maximum, total, rank, lane)
        self.merge.meet()
        first = self.merge.first_vector(rank, 0)
        values, highest, whole = self.merge.take(scratch, kept, group, rank, 0, lane, scale * LOG2_E)
        together = self.merge.stored_together
        for r in cutlass.range_constexpr(2):
            row = 64 * group + lane // 32 * 16 + lane % 32 // 4 + 8 * r
            factor = reciprocal(whole[r], Float32(0.0))
            pairs = cute.make_rmem_tensor(2 * self.merge.share, BFloat16)
            for v in cutlass.range_constexpr(self.merge.share):
                for c in cutlass.range_constexpr(2):
                    pairs[2 * v + c] = (values[2 * r + c, v] * factor).to(BFloat16)
            words = ordered_by_columns(cute.recast_tensor(pairs, Int32), lane, together)
            ordered = cute.recast_tensor(words, BFloat16)
            for i in cutlass.range_constexpr(0, self.merge.share, together):
                vector = first + i + lane % together
                if vector < self.merge.vectors:
                    for k in cutlass.range_constexpr(2 * together):
                        o[row, 8 * vector + 2 * (lane % 4 // together * together) + k] = ordered[2 * i + k]
            if first == 0 and lane % 4 == 0:
                lse[row] = log_sum_exp(highest[r], whole[r], scale)
        if const_expr(self.exit_barrier):
            self.merge.done_reading()
            self.merge.await_readers()


def fake_args(p):
    partials = make_fake_tensor(Float32, (cute.sym_int32(),), (1,), assumed_align=16)
    o = make_fake_tensor(BFloat16, (p.rows, p.columns), (p.columns, 1), assumed_align=16)
    lse = make_fake_tensor(Float32, (p.rows,), (1,), assumed_align=4)
    return (partials, o, lse, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
