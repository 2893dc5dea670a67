"""What lets a peer package's own public functions run on a machine without a GPU.

They are called unchanged, with CPU tensors. Three things are answered for them: that a
tensor is a CUDA tensor (to Python and in its DLPack capsule), how many clusters the GPU
holds, and what ``cute.compile`` returns: a stand-in that hands each call over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tunekit.simulate.launch.dlpack import DeviceTensor

OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled kernel: an object file with TVM-FFI's calling convention, and its PTX."""

    name: str
    object: Path
    ptx: Path
    symbol: str
    seconds: float = 0.0


Call = Callable[[Compiled, Sequence[Any]], None]


@dataclasses.dataclass
class Compiler:
    """Stands for ``cute.compile``: compiles for `arch` into `directory`; a call of the result goes to `call`.

    A kernel that is already in `directory` is not compiled again.
    """

    really: Any
    arch: str
    directory: Path
    name: str
    call: Call
    made: int = 0

    def __getitem__(self, options: object) -> Compiler:
        """``cute.compile[options](...)``: the options here win."""
        return self

    def __call__(self, function: Any, *arguments: Any, options: str = "", **keywords: Any) -> Callable[..., None]:
        name = f"{self.name}_{self.made}" if self.made else self.name
        self.made += 1
        compiled = Compiled(name, self.directory / f"{name}.o", self.directory / f"{name}.ptx", f"peer_{name}")
        if not compiled.object.exists():
            started = time.perf_counter()
            self._compile(compiled, function, arguments, options, keywords)
            compiled = dataclasses.replace(compiled, seconds=time.perf_counter() - started)
        return lambda *values: self.call(compiled, values)

    def _compile(
        self, compiled: Compiled, function: Any, arguments: Sequence[Any], options: str, keywords: Mapping[str, Any]
    ) -> None:
        dump = self.directory / f"{compiled.name}.dump"
        shutil.rmtree(dump, ignore_errors=True)
        dump.mkdir(parents=True)
        options = f"{options} --gpu-arch {self.arch} --dump-dir {dump} {OPTIONS}"
        kernel = self.really(function, *arguments, options=options, **keywords)
        (ptx,) = dump.glob("*.ptx")
        ptx.rename(compiled.ptx)
        part = compiled.object.with_suffix(".part.o")
        kernel.export_to_c(str(part), function_name=compiled.symbol)
        part.rename(compiled.object)
        shutil.rmtree(dump)


@contextlib.contextmanager
def no_gpu(arch: str, directory: Path, name: str, *, room: int, call: Call) -> Iterator[None]:
    """Within it, kernels are compiled for `arch` and their calls go to `call`; see Compiler.

    The GPU has room for that many clusters at once: a persistent kernel's grid follows from it.
    """
    os.environ.update(CUTE_DSL_ARCH=arch, **_environment(arch.rstrip("af"), room))
    _without_triton()
    import cutlass
    import torch
    from cutlass import cute

    from_dlpack_really = cute.runtime.from_dlpack
    kept: list[DeviceTensor] = []  # each must outlive what is made of it

    def from_dlpack(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        kept.append(on_gpu(tensor))
        return from_dlpack_really(kept[-1], *arguments, **keywords)

    compiler = Compiler(cute.compile, arch, directory, name, call)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cute.runtime, "from_dlpack", from_dlpack))
        stack.enter_context(mock.patch.object(cute, "compile", compiler))
        stack.enter_context(
            mock.patch.multiple(
                cutlass.utils.HardwareInfo,
                __init__=lambda self, device_id=0: None,
                get_max_active_clusters=lambda self, cluster_size, stream=None: room,
                get_device_multiprocessor_count=lambda self: room,
            )
        )
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True), create=True))
        yield


def on_gpu(tensor: Any) -> DeviceTensor:
    """A CPU tensor's memory under the name of GPU 0: a kernel's types name the device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return DeviceTensor(tensor.data_ptr(), dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _environment(chip: str, room: int) -> dict[str, str]:
    """What the packages offer for compiling without a GPU, read when they are imported."""
    return {
        "FLASH_ATTENTION_ARCH": chip,
        "FLASH_ATTENTION_NUM_SMS": str(room),
        "QUACK_ARCH": chip,
        "QUACK_CACHE_ENABLED": "0",
    }


def _without_triton() -> None:
    """quack imports Triton for its autotuner and for one kernel of its own; neither is used here."""
    if importlib.util.find_spec("triton") is not None:
        return
    import torch

    torch.compile(lambda x: x)  # imports what quack's own torch.compile would: torch must not meet the stand-in
    triton: Any = types.ModuleType("triton")
    triton.runtime = types.SimpleNamespace(cache=types.SimpleNamespace(FileCacheManager=object))
    triton.jit, triton.language = lambda function: function, mock.MagicMock()
    sys.modules.update({"triton": triton, "triton.language": triton.language})
