"""What lets a peer package's own public functions run on a machine without a GPU.

They are called unchanged, with CPU tensors. Three things are answered for them: that a
tensor is a CUDA tensor (to Python and in its DLPack capsule), how many clusters the GPU
holds, and what ``cute.compile`` returns: a stand-in that hands the call over to the
simulator.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

KDL_CUDA = 2
DEVICE_OFFSET = 8  # of DLTensor.device, in a DLManagedTensor
OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled kernel: an object file with TVM-FFI's calling convention, and its PTX."""

    name: str
    object: Path
    ptx: Path
    symbol: str
    seconds: float


Call = Callable[[Compiled, Sequence[Any]], None]


@contextlib.contextmanager
def no_gpu(arch: str, directory: Path, name: str, *, clusters: int, call: Call) -> Iterator[None]:
    """Within it, kernels are compiled for `arch` into `directory`, and their calls go to `call`.

    The GPU has room for `clusters` clusters at once: a persistent kernel's grid follows
    from that. A kernel that is already in `directory` is not compiled again.
    """
    prepare(arch, clusters)
    import cutlass
    import torch
    from cutlass import cute

    class HardwareInfo:
        def __init__(self, device_id: int = 0) -> None:
            pass

        def get_max_active_clusters(self, cluster_size: int, stream: object = None) -> int:
            return clusters

        def get_device_multiprocessor_count(self) -> int:
            return clusters

    made: list[Compiled] = []
    compile_really = cute.compile

    class Compile:
        """Stands for ``cute.compile``, also in its form ``cute.compile[options](...)``: the options here win."""

        def __getitem__(self, options: object) -> Compile:
            return self

        def __call__(
            self, function: Any, *arguments: Any, options: str = "", **keywords: Any
        ) -> Callable[..., None]:
            compiled = _files(directory, name if not made else f"{name}_{len(made)}")
            if not compiled.object.exists():
                compiled = _compile(compiled, compile_really, function, arguments, options, keywords)
            made.append(compiled)
            return lambda *values: call(compiled, values)

    def _compile(compiled: Compiled, compile_really: Any, function: Any, arguments: Any, options: Any, keywords: Any) -> Compiled:
            started = time.perf_counter()
            dump = directory / f"{compiled.name}.dump"
            shutil.rmtree(dump, ignore_errors=True)
            dump.mkdir(parents=True)
            everything = f"{options} --gpu-arch {arch} --dump-dir {dump} {OPTIONS}"
            kernel = compile_really(function, *arguments, options=everything, **keywords)
            (found,) = dump.glob("*.ptx")
            found.rename(compiled.ptx)
            part = compiled.object.with_suffix(".part.o")
            kernel.export_to_c(str(part), function_name=compiled.symbol)
            part.rename(compiled.object)
            shutil.rmtree(dump)
            return dataclasses.replace(compiled, seconds=time.perf_counter() - started)

    from_dlpack_really = cute.runtime.from_dlpack

    def from_dlpack(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        return from_dlpack_really(OnGpu(tensor), *arguments, **keywords)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cute.runtime, "from_dlpack", from_dlpack))
        stack.enter_context(mock.patch.object(cute, "compile", Compile()))
        stack.enter_context(mock.patch.object(cutlass.utils, "HardwareInfo", HardwareInfo))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True), create=True))
        yield


class OnGpu:
    """A CPU tensor whose DLPack capsule says that it is on GPU 0: a kernel's types name the device."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + DEVICE_OFFSET).value = KDL_CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (KDL_CUDA, 0)


def _files(directory: Path, name: str) -> Compiled:
    return Compiled(name, directory / f"{name}.o", directory / f"{name}.ptx", f"peer_{name}", 0.0)


def prepare(arch: str, clusters: int) -> None:
    """Set what the packages read when they are imported. Call it before any of them is."""
    number = arch.rstrip("af")
    os.environ.update(
        CUTE_DSL_ARCH=arch,
        FLASH_ATTENTION_ARCH=number,
        FLASH_ATTENTION_NUM_SMS=str(clusters),
        QUACK_ARCH=number,
        QUACK_CACHE_ENABLED="0",
    )
    if importlib.util.find_spec("triton") is None:
        import torch

        torch.compile(lambda x: x)  # imports what quack's own torch.compile would: torch must not meet the stand-in
        # quack imports Triton for its autotuner and one kernel of its own; neither is used here.
        triton: Any = types.ModuleType("triton")
        triton.runtime = types.SimpleNamespace(cache=types.SimpleNamespace(FileCacheManager=object))
        triton.jit, triton.language = lambda function: function, mock.MagicMock()
        sys.modules.update({"triton": triton, "triton.language": triton.language})
