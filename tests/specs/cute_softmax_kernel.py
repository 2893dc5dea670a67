"""A row softmax in CuTeDSL: small, but a whole kernel (vector loads, warp and CTA reductions)."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

WARP = 32


class RowSoftmax:
    """y[r, :] = softmax(x[r, :]); a CTA a row, each thread holding `columns / threads` values in registers."""

    def __init__(self, *, columns, threads, vector):
        self.columns = columns
        self.threads = threads
        self.vector = vector
        self.vectors = columns // (threads * vector)
        self.warps = threads // WARP

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        scratch = SmemAllocator().allocate_tensor(Float32, cute.make_layout((2, self.warps)), byte_alignment=16)
        source = cute.zipped_divide(x[row, None], (self.vector,))
        target = cute.zipped_divide(y[row, None], (self.vector,))
        fragment = cute.make_rmem_tensor((self.vector, self.vectors), Float32)
        for i in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(source[None, thread + i * self.threads], fragment[None, i])
        values = fragment.load()
        largest = values.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        largest = self.over_cta(largest, scratch, 0, thread)
        exponentials = cute.math.exp2((values - largest) * math.log2(math.e), fastmath=True)
        total = exponentials.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = self.over_cta(total, scratch, 1, thread)
        fragment.store(exponentials / total)
        for i in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(fragment[None, i], target[None, thread + i * self.threads])

    @cute.jit
    def over_cta(self, value: Float32, scratch: cute.Tensor, which: cutlass.Constexpr, thread: cutlass.Int32):
        """The maximum (which = 0) or the sum (1) over all threads, in every thread."""
        for step in cutlass.range_constexpr(5):
            value = self.combined(value, cute.arch.shuffle_sync_bfly(value, offset=1 << step), which)
        if thread % WARP == 0:
            scratch[which, thread // WARP] = value
        cute.arch.barrier()
        value = scratch[which, 0]
        for warp in cutlass.range_constexpr(1, self.warps):
            value = self.combined(value, scratch[which, warp], which)
        return value

    @cute.jit
    def combined(self, a: Float32, b: Float32, which: cutlass.Constexpr):
        if const_expr(which == 0):
            a = cute.arch.fmax(a, b)
        else:
            a = a + b
        return a

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(x.shape[0], 1, 1), block=(self.threads, 1, 1), stream=stream)


def fake_args(columns):
    rows = cute.sym_int()
    tensors = [
        make_fake_compact_tensor(Float32, (rows, columns), stride_order=(1, 0), assumed_align=16) for _ in range(2)
    ]
    return (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))
