"""The kernel that warms a process up. CuTeDSL takes kernels from files only, so it has its own."""

from __future__ import annotations

from pathlib import Path

import cutlass
from cutlass import cute


@cute.kernel  # type: ignore[untyped-decorator]
def _copy_kernel(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32):  # type: ignore[no-untyped-def]
    thread, _, _ = cute.arch.thread_idx()
    target[thread] = source[thread] * factor


@cute.jit  # type: ignore[untyped-decorator]
def _copy(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32, stream):  # type: ignore[no-untyped-def]
    _copy_kernel(source, target, factor).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compile_something(scratch: Path) -> None:
    """Compile and export one small kernel into `scratch`: every step of a real compile, once."""
    tensors = [cute.runtime.make_fake_compact_tensor(cutlass.Float32, (32,)) for _ in range(2)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--gpu-arch sm_90a --enable-tvm-ffi"
    kernel = cute.compile(_copy, *tensors, cutlass.Float32(0.0), stream, options=options)
    kernel.export_to_c(str(scratch / "warm.o"), function_name="tunekit_warm")
