"""The reference compile: a small fixed kernel whose compile time says how fast this machine is just now.

Kernels are compared by their compile time over the reference's. Editing this file
makes all baselines worthless: `FORMAT` in baseline.py must then go up. (No
postponed annotations here: CuTeDSL evaluates those of the functions below.)
"""

from typing import Any

from tunekit.spec import Axis, Build, Implementation, KernelSpec, TensorArg, Tunable

THREADS = 128
STEPS = 1024

HOST_SOURCE = """
#include "tunekit_host.h"

#define STEP(i) v = v * x[(j + i) % n] + (float)i;
#define STEPS8(i) STEP(i) STEP(i + 1) STEP(i + 2) STEP(i + 3) STEP(i + 4) STEP(i + 5) STEP(i + 6) STEP(i + 7)
#define STEPS64(i) \\
    STEPS8(i) STEPS8(i + 8) STEPS8(i + 16) STEPS8(i + 24) STEPS8(i + 32) STEPS8(i + 40) STEPS8(i + 48) STEPS8(i + 56)

TUNEKIT_KERNEL(args, count) {
    if (count != 2) return fail("expects x, y");
    const float *x = data_arg(args, 0);
    float *y = data_arg(args, 1);
    const int64_t n = tensor_arg(args, 0)->shape[0];
    for (int64_t j = 0; j < n; ++j) {
        float v = 0.0f;
        STEPS64(0) STEPS64(64)
        y[j] = v;
    }
    return 0;
}
"""


def build_cutedsl(build: Build) -> tuple[Any, tuple[Any, ...]]:
    """A chain of `STEPS` multiply-adds an element, unrolled when traced: y = chain(x)."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    @cute.kernel  # type: ignore[untyped-decorator]  # cutlass is not typed
    def chain(x: cute.Tensor, y: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * THREADS + thread
        if index < cute.size(x):
            value = x[index]
            for step in cutlass.range_constexpr(STEPS):
                value = value * x[index] + cutlass.Float32(step)
            y[index] = value

    @cute.jit  # type: ignore[untyped-decorator]
    def launch(x: cute.Tensor, y: cute.Tensor, stream: Any) -> None:
        blocks = (cute.size(x) + THREADS - 1) // THREADS
        chain(x, y).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    n = cute.sym_int()
    tensors = [make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2)]
    return launch, (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))


def _not_run(problem: Any, inputs: Any) -> dict[str, Any]:
    raise NotImplementedError("the reference is compiled and never run")


def _only(name: str, backend: str, feature: str, build: Any) -> Implementation:
    return Implementation(
        name=name,
        requires=frozenset({feature}),
        tunables=(Tunable("steps", (STEPS,)),),
        build=build,
        defaults=({"steps": STEPS},),
        backend=backend,
    )


reference = KernelSpec(
    name="reference",
    version=1,
    axes=(Axis("n"),),
    signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
    implementations=(
        _only("cutedsl", "cutedsl", "tma", build_cutedsl),
        _only("host", "host", "host", lambda build: HOST_SOURCE),
    ),
    reference=_not_run,
    examples=({"n": 1024},),
    description="a fixed kernel that calibrates the check of compile times",
)
