"""Kernels that hold a fragment of a given shape in each thread."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

THREADS = 128


class Held:
    """`how` is what is done with the fragment of `shape` and `dtype`; ``partitioned`` gives each thread its share."""

    def __init__(self, how, shape, dtype):
        self.how = how
        self.shape = shape
        self.dtype = getattr(cutlass, dtype)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        if const_expr(self.how == "copied"):
            held = cute.make_rmem_tensor(self.shape, self.dtype)
            cute.autovec_copy(x, held)
            cute.autovec_copy(held, y)
        if const_expr(self.how == "computed"):
            tile = cute.make_rmem_tensor(self.shape, self.dtype)
            cute.autovec_copy(x, tile)
            values = tile.load()
            tile.store(values * values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0))
            cute.autovec_copy(tile, y)
        if const_expr(self.how == "value"):
            y.store(x.load())
        if const_expr(self.how == "filled"):
            y.store(cute.full(self.shape, 1.0, self.dtype))
        if const_expr(self.how == "spread"):
            gaps = cute.make_rmem_tensor(cute.make_layout(self.shape[0], stride=self.shape[1]), self.dtype)
            gaps[thread % 4, 0] = x[thread]
            y[thread] = gaps[0, thread % 4]
        if const_expr(self.how == "partitioned"):
            tile = SmemAllocator().allocate_tensor(self.dtype, cute.make_layout(self.shape), byte_alignment=16)
            rows, columns = x[thread, None], tile[thread, None]
            row = cute.make_rmem_tensor(self.shape[1], self.dtype)
            cute.autovec_copy(rows, row)
            cute.autovec_copy(row, columns)
            cute.arch.barrier()
            cute.autovec_copy(tile[THREADS - 1 - thread, None], y[thread, None])

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    def args(self):
        shape = (1024,) if self.how == "spread" else self.shape
        tensors = [make_fake_compact_tensor(self.dtype, shape, assumed_align=16) for _ in range(2)]
        return (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))
