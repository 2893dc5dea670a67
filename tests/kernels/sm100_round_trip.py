"""A spec whose kernel loads tensor memory into registers and stores it back `times` times, for test_fmha_sm100.py.

The load and the store are the attention kernel's own (ThreadColumns): what comes out must be the bits that went in.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator, TmemAllocator

from kernel_specs.kernels.sm100_plan import GROUP
from kernel_specs.kernels.sm100_views import ThreadColumns
from tunekit.spec import Axis, Build, Implementation, KernelSpec, TensorArg, Tunable

COLUMNS = 64


class RoundTrip:
    """x -> tensor memory -> (registers -> tensor memory) `times` times -> y."""

    def __init__(self, times: int):
        self.times = times
        self.barrier = pipeline.NamedBarrier(1, GROUP)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        base = SmemAllocator().allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        tmem = TmemAllocator(base.iterator, barrier_for_retrieve=self.barrier, allocator_warp_id=0)
        tmem.allocate(COLUMNS)
        tmem.relinquish_alloc_permit()
        tmem.wait_for_alloc()
        pointer = tmem.retrieve_ptr(Float32)
        columns = ThreadColumns(pointer, thread)
        registers = cute.make_rmem_tensor(COLUMNS, Float32)
        cute.autovec_copy(x[thread, None], registers)
        columns.store(registers, 0)
        cute.arch.fence_view_async_tmem_store()
        for _ in cutlass.range_constexpr(self.times):
            loaded = columns.load(0, COLUMNS)
            cute.arch.fence_view_async_tmem_load()
            columns.store(loaded, 0)
            cute.arch.fence_view_async_tmem_store()
        result = columns.load(0, COLUMNS)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(result, y[thread, None])
        self.barrier.arrive_and_wait()
        tmem.free(pointer)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(GROUP, 1, 1), stream=stream)


def build(b: Build):
    x, y = (
        make_fake_compact_tensor(Float32, (GROUP, COLUMNS), stride_order=(1, 0), assumed_align=16) for _ in range(2)
    )
    return RoundTrip(b.tunables.times), (x, y, make_fake_stream(use_tvm_ffi_env_stream=True))


round_trip = KernelSpec(
    name="round_trip",
    version=1,
    axes=(Axis("rows", values=(GROUP,), static=True, default=GROUP),),
    signature=(
        TensorArg("x", ("rows", COLUMNS), "float32"),
        TensorArg("y", ("rows", COLUMNS), "float32", role="output"),
    ),
    implementations=(
        Implementation(
            name="tmem",
            requires={"tcgen05"},
            tunables=(Tunable("times", (3, 0)),),
            defaults=({"times": 3},),
            build=build,
        ),
    ),
    reference=lambda problem, inputs: {"y": inputs["x"].double()},
)
