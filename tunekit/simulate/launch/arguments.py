"""Simulated device memory for a call's arguments: one shared mapping, guarded buffers, a map of what is initialised."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunekit.errors import UserError
from tunekit.model import Values, Variant
from tunekit.simulate.launch.dlpack import contiguous, dtype_bits
from tunekit.simulate.launch.mapping import shared_mapping
from tunekit.simulate.machine import memory
from tunekit.space import workspace
from tunekit.spec import KernelSpec, ScalarArg
from tunekit.spec.declare import WORKSPACE
from tunekit.spec.inputs import draw, scalars

if TYPE_CHECKING:
    import torch

Bytes: TypeAlias = NDArray[np.uint8]
Flags: TypeAlias = NDArray[np.bool_]

# TMA wants 16 bytes, its swizzle patterns repeat every 1024; cudaMalloc gives 256 at least.
ALIGNMENT = 1024
GUARD_BYTES = 4096
# A NaN in every float dtype.
POISON = 0xFF


@dataclass(frozen=True)
class Wanted:
    """A buffer to be made. `data` (a numpy array or CPU torch tensor, contiguous) fills it; one without is an output:
    poisoned, and uninitialised until the kernel writes it. An in-place tensor has data and is an output. What is
    left in a `scratch` output is no result.

    `shape` and `strides` (default: row-major) are in elements of `dtype`, a name of dlpack.DTYPES.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    data: Any = None
    output: bool = False
    scratch: bool = False


@dataclass(frozen=True)
class Buffer:
    """A tensor in simulated device memory. `address` is real: the host's own; `offset` its place in the mapping."""

    name: str
    address: int
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    output: bool
    scratch: bool = False

    @property
    def end(self) -> int:
        return self.address + self.size


class Buffers:
    """The buffers of one call, in order, in one anonymous shared mapping.

    Forked workers write into the same memory. `memory`, `initialised` and `written` have a byte for each byte from
    `base` on; between and around the buffers lie guards of at least `GUARD_BYTES`, which no correct kernel touches.
    `written` is what the kernel wrote, `initialised` that and what was there before.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        names = [w.name for w in wanted]
        if len(set(names)) != len(names):
            raise UserError(f"two buffers have one name: {', '.join(names)}")
        sizes = [_size_bytes(w) for w in wanted]
        places: list[int] = []
        end = 0
        for size in sizes:
            places.append(-(-(end + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT)
            end = places[-1] + size
        total = -(-(end + GUARD_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = shared_mapping(3 * total)
        self.memory: Bytes = whole[:total]
        self.initialised: Flags = whole[total : 2 * total].view(np.bool_)
        self.written: Flags = whole[2 * total :].view(np.bool_)
        self.base: int = self.memory.ctypes.data
        self.buffers: tuple[Buffer, ...] = tuple(
            Buffer(
                w.name,
                self.base + place,
                place,
                size,
                w.dtype,
                tuple(w.shape),
                tuple(w.strides) or contiguous(w.shape),
                w.output or w.data is None,
                w.scratch,
            )
            for w, place, size in zip(wanted, places, sizes, strict=True)
        )
        self._by_name = {buffer.name: buffer for buffer in self.buffers}
        end = 0
        for buffer, w in zip(self.buffers, wanted, strict=True):
            self.memory[end : buffer.offset] = POISON
            end = buffer.offset + buffer.size
            if w.data is None:
                self.poison(buffer)
            else:
                self.fill(buffer, w.data)
        self.memory[end:] = POISON

    def __getitem__(self, name: str) -> Buffer:
        return self._by_name[name]

    def bytes_of(self, buffer: Buffer) -> Bytes:
        """A writable view of the buffer's bytes."""
        return self.memory[buffer.offset : buffer.offset + buffer.size]

    def initialised_of(self, buffer: Buffer) -> Flags:
        return self.initialised[buffer.offset : buffer.offset + buffer.size]

    def written_of(self, buffer: Buffer) -> Flags:
        return self.written[buffer.offset : buffer.offset + buffer.size]

    def device_memory(self) -> list[memory.Buffer]:
        """The buffers as the simulator's global memory takes them."""
        return [
            memory.Buffer(
                b.name, b.address, self.bytes_of(b), self.initialised_of(b), self.written_of(b), output=b.output
            )
            for b in self.buffers
        ]

    def poison(self, buffer: Buffer) -> None:
        """As an output is before a launch."""
        self.bytes_of(buffer)[:] = POISON
        self.initialised_of(buffer)[:] = False
        self.written_of(buffer)[:] = False

    def fill(self, buffer: Buffer, data: Any) -> None:
        """Copy a numpy array's or CPU torch tensor's bytes in.

        Raises:
            UserError: it is not contiguous or has not the buffer's size.
        """
        raw = _bytes_of_data(data)
        if raw.size != buffer.size:
            raise UserError(f"{buffer.name} has {buffer.size} bytes; its data has {raw.size}")
        self.bytes_of(buffer)[:] = raw
        self.initialised_of(buffer)[:] = True
        self.written_of(buffer)[:] = False

    def find(self, address: int) -> Buffer | None:
        """The buffer that the byte at `address` belongs to; None in a guard or outside."""
        for buffer in self.buffers:
            if buffer.address <= address < buffer.end:
                return buffer
        return None

    def torch_view(self, buffer: Buffer) -> torch.Tensor:
        """The buffer as a torch tensor on the same memory."""
        import torch

        dtype = getattr(torch, buffer.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(f"{buffer.dtype} is no dtype of torch")
        flat = torch.from_numpy(self.bytes_of(buffer)).view(dtype)
        return flat.as_strided(buffer.shape, buffer.strides)


@dataclass(frozen=True)
class CallArguments:
    """A spec's call: `call` is what `capture` takes; `drawn` are the inputs as the oracle takes them."""

    buffers: Buffers
    call: tuple[Buffer | float | int, ...]
    drawn: Mapping[str, torch.Tensor]

    def outputs(self) -> dict[str, torch.Tensor]:
        """Views of what the kernel writes, in-place tensors too, by name."""
        return {b.name: self.buffers.torch_view(b) for b in self.buffers.buffers if b.output and not b.scratch}

    def inputs(self) -> dict[str, torch.Tensor]:
        """Views of what the kernel must leave as it was drawn."""
        return {b.name: self.buffers.torch_view(b) for b in self.buffers.buffers if not b.output}

    def scratch(self) -> dict[str, torch.Tensor]:
        """Views of what the kernel takes to keep its own things in, by name."""
        return {b.name: self.buffers.torch_view(b) for b in self.buffers.buffers if b.scratch}


def arguments_of(spec: KernelSpec, problem: Values, seed: int, variant: Variant | None = None) -> CallArguments:
    """The arguments of a problem's call in simulated device memory, drawn as verifying on a GPU draws them, and last
    the variant's workspace, if it has one. Without a variant there is none."""
    import torch

    drawn = draw(spec, problem, seed, torch.device("cpu"))
    numbers = scalars(spec, problem)
    arguments = spec.arguments(problem)
    elements = workspace(spec, variant, problem) if variant is not None else 0
    scratch = [Wanted(WORKSPACE, "float32", (elements,), output=True, scratch=True)] if elements else []
    buffers = Buffers(
        [
            *(
                Wanted(
                    a.name,
                    a.dtype_of(problem),
                    a.sizes(problem),
                    data=None if a.role == "output" else drawn[a.name],
                    output=a.role != "input",
                )
                for a in arguments
                if not isinstance(a, ScalarArg)
            ),
            *scratch,
        ]
    )
    call = [numbers[a.name] if isinstance(a, ScalarArg) else buffers[a.name] for a in arguments]
    return CallArguments(buffers, (*call, *(buffers[w.name] for w in scratch)), drawn)


def _size_bytes(wanted: Wanted) -> int:
    """The bytes from the first element to the last, whatever the strides leave out between them."""
    if any(size < 0 for size in wanted.shape):
        raise UserError(f"{wanted.name}: shape {wanted.shape} has a negative side")
    if math.prod(wanted.shape) == 0:
        return 0
    strides = wanted.strides or contiguous(wanted.shape)
    if len(strides) != len(wanted.shape) or min(strides, default=0) < 0:
        raise UserError(f"{wanted.name}: strides {strides} do not fit shape {wanted.shape}")
    last = sum((size - 1) * stride for size, stride in zip(wanted.shape, strides, strict=True))
    return -(-(last + 1) * dtype_bits(wanted.dtype) // 8)


def _bytes_of_data(data: Any) -> Bytes:
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise UserError("the data of a buffer must be contiguous")
        return data.reshape(-1).view(np.uint8)
    if not data.is_contiguous():
        raise UserError("the data of a buffer must be contiguous")
    address, size = data.data_ptr(), data.numel() * data.element_size()
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8) if size else np.empty(0, np.uint8)
