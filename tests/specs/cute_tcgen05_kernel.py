"""A product of one tcgen05 tile in CuTeDSL: operands go element by element into swizzled shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.utils.blackwell_helpers import make_trivial_tiled_mma

from .cute_tcgen05 import ROW_WORDS

THREADS = 128
TYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "int8": cutlass.Int8,
    "float32": cutlass.TFloat32,
}


def fake_args(m, n):
    tensors = [
        make_fake_compact_tensor(dtype, shape, stride_order=(1, 0), assumed_align=16)
        for dtype, shape in ((Int32, (m, ROW_WORDS)), (Int32, (n, ROW_WORDS)), (Float32, (m, n)))
    ]
    return (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))


class Product:
    """D [m, n] = A [m, k] B [n, k]^T by one CTA of 128 threads, or by a pair; k fills 128 bytes."""

    def __init__(self, *, operand, m, n, a_major, b_major, swizzle, ctas):
        self.dtype = TYPES[operand]
        self.tile = (m, n, ROW_WORDS * 32 // self.dtype.width)
        self.acc = Int32 if operand == "int8" else Float32
        self.majors = (a_major, b_major)
        self.kinds = tuple(getattr(tcgen05.SmemLayoutAtomKind, f"{major}_{swizzle}") for major in self.majors)
        self.ctas = ctas
        self.group = tcgen05.CtaGroup.ONE if ctas == 1 else tcgen05.CtaGroup.TWO

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, mma: cute.TiledMma):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        m, n, k = self.tile
        part = mma.get_slice(rank)
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        base = smem.allocate_array(Int32, 1)
        shared = []
        for source, shape, kind, major in (
            (part.partition_A(a), mma.partition_shape_A((m, k)), self.kinds[0], self.majors[0]),
            (part.partition_B(b), mma.partition_shape_B((n, k)), self.kinds[1], self.majors[1]),
        ):
            atom = tcgen05.make_smem_layout_atom(kind, self.dtype)
            layout = tcgen05.tile_to_mma_shape(atom, shape, order=(1, 2) if const_expr(major == "K") else (2, 1))
            tile = smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for i in range(thread, cute.size(shape), THREADS):
                tile[i] = source[i]
            shared.append(tile)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(512, base, is_two_cta=self.ctas == 2)
        cute.arch.fence_view_async_shared()
        if const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        cute.arch.barrier()
        pointer = cute.arch.retrieve_tmem_ptr(self.acc, 16, base)
        fragment = mma.make_fragment_C(mma.partition_shape_C((m, n)))
        acc = cute.make_tensor(pointer, fragment.layout)
        left, right = mma.make_fragment_A(shared[0]), mma.make_fragment_B(shared[1])
        if warp == 0 and rank == 0:
            for step in cutlass.range_constexpr(cute.size(right, mode=[2])):
                mma.set(tcgen05.Field.ACCUMULATE, step != 0)
                cute.gemm(mma, acc, left[None, None, step], right[None, None, step], acc)
            with cute.arch.elect_one():
                tcgen05.commit(barrier, 3 if self.ctas == 2 else None, self.group)
        cute.arch.mbarrier_wait(barrier, 0)
        rows = m // self.ctas
        # 64 rows of one CTA lie in 16 lanes of each quarter; those of a pair are folded over all lanes.
        half = rows == 64 and self.ctas == 1
        if const_expr(half):
            load = tcgen05.Ld16x256bOp(tcgen05.Repetition.x1)
        else:
            load = tcgen05.Ld32x32bOp(tcgen05.Repetition.x8)
        tile = acc[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(load, self.acc), tile)
        mine = copy.get_slice(thread)
        out = mine.partition_D(part.partition_C(d)[(None, None), 0, 0])
        loaded = cute.make_rmem_tensor(out.shape, self.acc)
        cute.copy(copy, mine.partition_S(tile), loaded)
        cute.arch.fence_view_async_tmem_load()
        result = cute.make_rmem_tensor(out.shape, Float32)
        result.store(loaded.load().to(Float32))
        cute.autovec_copy(result, out)
        cute.arch.barrier()
        if const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
            cute.arch.dealloc_tmem(pointer, 512, is_two_cta=self.ctas == 2)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream):
        m, n, _ = self.tile
        modes = [getattr(OperandMajorMode, major) for major in self.majors]
        mma = make_trivial_tiled_mma(self.dtype, self.dtype, *modes, self.acc, self.group, (m, n))
        operands = [cute.recast_tensor(tensor, self.dtype) for tensor in (a, b)]
        self.kernel(*operands, d, mma).launch(
            grid=(self.ctas, 1, 1), block=(THREADS, 1, 1), cluster=(self.ctas, 1, 1), stream=stream
        )
