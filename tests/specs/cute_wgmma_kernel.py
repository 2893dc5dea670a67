"""A product of one warpgroup in CuTeDSL: operands go element by element into swizzled shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .cute_wgmma import ROW_WORDS, ROWS

THREADS = 128
TYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "int8": cutlass.Int8,
}


def fake_args(n):
    tensors = [
        make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)
        for dtype, shape in ((Int32, (ROWS, ROW_WORDS)), (Int32, (n, ROW_WORDS)), (Float32, (ROWS, n)))
    ]
    return (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))


class Product:
    """D [64, n] = A [64, k] B [n, k]^T in one CTA of 128 threads; k fills 128 bytes."""

    def __init__(self, *, operand, n, a_major, b_major, swizzle, a_source):
        self.dtype = TYPES[operand]
        self.n = n
        self.k = ROW_WORDS * 32 // self.dtype.width
        self.acc = Int32 if operand == "int8" else Float32
        self.kinds = tuple(getattr(warpgroup.SmemLayoutAtomKind, f"{m}_{swizzle}") for m in (a_major, b_major))
        self.majors = tuple(getattr(OperandMajorMode, m) for m in (a_major, b_major))
        self.source = getattr(warpgroup.OperandSource, a_source)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, mma: cute.TiledMma):
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        shared = []
        for rows, kind in ((ROWS, self.kinds[0]), (self.n, self.kinds[1])):
            atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
            layout = cute.tile_to_shape(atom, (rows, self.k), (0, 1))
            tile = smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            shared.append(tile)
        for i in range(thread, ROWS * self.k, THREADS):
            shared[0][i // self.k, i % self.k] = a[i // self.k, i % self.k]
        for i in range(thread, self.n * self.k, THREADS):
            shared[1][i // self.k, i % self.k] = b[i // self.k, i % self.k]
        cute.arch.fence_view_async_shared()
        cute.arch.barrier()
        part = mma.get_slice(thread)
        operand_b = part.make_fragment_B(part.partition_B(shared[1]))
        if const_expr(self.source is warpgroup.OperandSource.SMEM):
            operand_a = part.make_fragment_A(part.partition_A(shared[0]))
        else:
            operand_a = part.make_fragment_A(part.partition_shape_A((ROWS, self.k)))
            cute.autovec_copy(part.partition_A(a), operand_a)
        acc = cute.make_rmem_tensor(part.partition_shape_C((ROWS, self.n)), self.acc)
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(cute.size(operand_b, mode=[2])):
            cute.gemm(atom, acc, operand_a[None, None, k], operand_b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        result = cute.make_rmem_tensor(acc.shape, Float32)
        result.store(acc.load().to(Float32))
        cute.autovec_copy(result, part.partition_C(d))

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream):
        mma = make_trivial_tiled_mma(
            self.dtype, self.dtype, *self.majors, self.acc, (1, 1, 1), (ROWS, self.n), a_source=self.source
        )
        operands = [cute.recast_tensor(tensor, self.dtype) for tensor in (a, b)]
        self.kernel(*operands, d, mma).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
