"""Small CuTeDSL kernels for tests: with every kind of footprint, and with every way to fail."""

from __future__ import annotations

import resource
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int8, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator, SmemPartition

ELEMENTS = 1024


def fake_args(with_scale: bool = True):
    """x, y of 1024 floats, the scale, and the caller's stream."""
    tensors = [make_fake_compact_tensor(Float32, (ELEMENTS,), assumed_align=16) for _ in range(2)]
    scale = [Float32(0.0)] if with_scale else []
    return (*tensors, *scale, make_fake_stream(use_tvm_ffi_env_stream=True))


class Scale:
    """y = scale * x through shared memory, with as many bytes, TMEM columns and CTAs as asked for."""

    def __init__(self, *, smem_bytes, smem_align, static_bytes, tmem, cluster, threads):
        self.smem_bytes = smem_bytes
        self.smem_align = smem_align
        self.static_bytes = static_bytes
        self.tmem = tmem
        self.cluster = cluster
        self.threads = threads

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        if const_expr(self.tmem > 0):
            slot = cute.recast_ptr(smem.allocate(4, 4), dtype=Int32)
            second_slot = cute.recast_ptr(smem.allocate(4, 4), dtype=Int32) if const_expr(self.tmem > 512) else slot
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            if warp == 0:
                cute.arch.alloc_tmem(min(self.tmem, 512), slot)
                if const_expr(self.tmem > 512):
                    cute.arch.alloc_tmem(self.tmem - 512, second_slot)
                cute.arch.relinquish_tmem_alloc_permit()
        if const_expr(self.static_bytes > 0):
            static = cute.arch.alloc_smem(Float32, self.static_bytes // 4, alignment=16)
            shelf = cute.make_tensor(static, cute.make_layout(self.static_bytes // 4))
            shelf[thread] = x[thread]
            cute.arch.barrier()
            y[thread] = shelf[self.threads - 1 - thread] * scale
        if const_expr(self.smem_bytes > 0):
            layout = cute.make_layout(self.smem_bytes // 4)
            tile = smem.allocate_tensor(Float32, layout, byte_alignment=self.smem_align)
            for i in range(thread, ELEMENTS, self.threads):
                tile[i % 32] = x[i]
                y[i] = tile[i % 32] * scale
        if const_expr(self.tmem > 0):
            cute.arch.barrier()
            if warp == 0:
                cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, slot), min(self.tmem, 512))

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, stream):
        self.kernel(x, y, scale).launch(
            grid=(self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if const_expr(self.cluster > 1) else None,
            stream=stream,
        )


class Layout:
    """Allocations in a given order: (bytes, alignment, partition or "branch"), for the probe's arithmetic."""

    def __init__(self, allocations, merge=False, launch_smem=None):
        self.allocations = allocations
        self.merge = merge
        self.launch_smem = launch_smem

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(len(self.allocations)):
            count, align, where = self.allocations[i]
            if const_expr(where == "branch"):
                in_branches(thread, count, align)
            else:
                touch(SmemAllocator().allocate(count, align, partition=SmemPartition(where)), count, thread)
        y[thread] = x[thread]

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(
            grid=(1, 1, 1),
            block=(128, 1, 1),
            smem=self.launch_smem,
            smem_merge_branch_allocs=self.merge,
            stream=stream,
        )


@cute.jit
def touch(pointer: cute.Pointer, count: cutlass.Constexpr, thread: Int32):
    tensor = cute.make_tensor(pointer, cute.make_layout(count))
    tensor[thread] = Int8(thread)


@cute.jit
def in_branches(thread: Int32, count: cutlass.Constexpr, align: cutlass.Constexpr):
    if thread > 5:
        touch(SmemAllocator().allocate(count, align), count, thread)
    else:
        touch(SmemAllocator().allocate(2 * count, align), count, thread)


class TwoKernels:
    """A jit function that launches two kernels, each with a need of its own."""

    def __init__(self):
        self.first = Layout([(3000, 128, 1)])
        self.second = Layout([(100, 16, 1)])

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.first.kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
        self.second.kernel(x, y).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)


@cute.jit
def nested(x: Float32, depth: cutlass.Constexpr):
    """As many nested dynamic branches as asked for: traced in a second or two, lowered in minutes to hours."""
    if const_expr(depth > 0):
        if x > Float32(depth):
            x = nested(x * Float32(1.5), depth - 1)
        else:
            x = x - Float32(1.0)
    return x


class NestedIfs:
    def __init__(self, depth):
        self.depth = depth

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        y[thread] = nested(x[thread], self.depth)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


class WholeTileInOneThread:
    """A fragment that nobody partitioned: traced at once, and its back end takes seconds (128 x 8) to days."""

    def __init__(self, rows, columns):
        self.shape = (rows, columns)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        fragment = cute.make_rmem_tensor(self.shape, Float32)
        cute.autovec_copy(x, fragment)
        values = fragment.load()
        values = cute.math.exp2(values * values + values, fastmath=True)
        fragment.store(values * values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0))
        cute.autovec_copy(fragment, y)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)

    def args(self):
        tensors = [make_fake_compact_tensor(Float32, self.shape, assumed_align=16) for _ in range(2)]
        return (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))


class GarbagePtx:
    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        llvm.inline_asm(None, [], "this is no instruction;", "", has_side_effects=True, asm_dialect=0)
        y[thread] = x[thread]

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


class BadRegisterCount:
    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.setmaxregister_increase(264)
        y[thread] = x[thread]

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def on_small_stack(kib):
    """Lower this process's stack limit: the back end's native recursion then ends it by SIGSEGV."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (kib * 1024, hard))


def with_little_memory(mib):
    """Lower this process's address space to `mib` above what it uses: LLVM then aborts without a word."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
