"""The kernel that warms a process up. CuTeDSL takes kernels from files only, so it has its own."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.memory import SmemAllocator

from tunekit.spec import Build, Implementation

THREADS = 32


@cute.kernel  # type: ignore[untyped-decorator]
def _scale_kernel(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32):  # type: ignore[no-untyped-def]
    thread, _, _ = cute.arch.thread_idx()
    tile = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), byte_alignment=16)
    tile[thread] = source[thread]
    cute.arch.barrier()
    for i in range(thread, THREADS, THREADS):
        if i < THREADS:
            target[i] = tile[i] * factor


@cute.jit  # type: ignore[untyped-decorator]
def _scale(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32, stream):  # type: ignore[no-untyped-def]
    _scale_kernel(source, target, factor).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def _build(build: Build) -> Any:
    tensors = [cute.runtime.make_fake_compact_tensor(cutlass.Float32, (THREADS,)) for _ in range(2)]
    return _scale, (*tensors, cutlass.Float32(0.0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))


WARM_UP = Implementation(name="warm_up", requires=frozenset(), tunables=(), build=_build, defaults=({},))
