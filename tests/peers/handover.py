"""A call's arguments on their way to the process that simulates it: tensors in files, the rest in JSON.

Launch capture wants a process without CuTeDSL's own runtime library, and the simulator needs
neither torch nor CuTeDSL: so the peer runs in one process, the simulator in another.
"""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# A peer whose host code passes tensors as pointers puts them here.
passed_by_pointer: list[Any] = []


def write(values: Sequence[Any], outputs: Sequence[int], directory: Path) -> Callable[[], None]:
    """Write a call's arguments into `directory`; the result copies the outputs back into the tensors.

    `outputs` are the positions of the arguments that the kernel writes: they hold no value before.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tensors: list[tuple[Any, Path, bool]] = []

    def described(value: Any, output: bool) -> Any:
        if isinstance(value, tuple):
            return [described(item, output) for item in value]
        if hasattr(value, "data_ptr"):
            path = directory / f"{len(tensors)}.bin"
            tensors.append((value, path, output))
            if not output:
                path.write_bytes(memory_of(value).tobytes())
            dtype = str(value.dtype).removeprefix("torch.")
            return {
                "file": path.name,
                "dtype": dtype,
                "shape": [*value.shape],
                "strides": [*value.stride()],
                "output": output,
            }
        if hasattr(value, "__tvm_ffi_opaque_ptr__"):
            address = value.__tvm_ffi_opaque_ptr__()
            (tensor,) = (t for t in passed_by_pointer if t.data_ptr() == address)
            return {"address_of": described(tensor, output)}
        if type(value).__name__ == "CUstream":
            return {"pointer": int(value)}
        return getattr(value, "value", value)  # a CuTeDSL number

    call = [described(value, position in outputs) for position, value in enumerate(values)]
    (directory / "call.json").write_text(json.dumps(call))

    def copy_back() -> None:
        for tensor, path, output in tensors:
            if output:
                memory_of(tensor)[:] = np.fromfile(path, np.uint8)

    return copy_back


def memory_of(tensor: Any) -> Any:
    """The bytes of a CPU torch tensor from its first element to its last, writable."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    return np.frombuffer((ctypes.c_uint8 * size).from_address(tensor.data_ptr()), np.uint8)
