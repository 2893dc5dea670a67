"""Memory: regions of bytes with their history, and the windows through which generic addresses reach them.

Generic addresses (64 bits): global memory lies at the real addresses of the host's buffers; the other spaces have
windows far above what a host uses. A 32-bit shared address is (CTA rank << 24) + offset, for a CTA's own memory
too: kernels clear bit 24 to reach the other CTA of a pair, as they do on the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.history.order import Access
from tunekit.simulate.history.shadow import Shadow

if TYPE_CHECKING:
    from tunekit.simulate.claims import Claims

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]

SHARED_BASE = 1 << 56
LOCAL_BASE = 2 << 56
PARAM_BASE = 3 << 56
CONST_BASE = 4 << 56
RANK_SHIFT = 24
RANK_BYTES = 1 << RANK_SHIFT
# The first KiB of shared memory belongs to the system from sm_90 on (CUDA programming guide, technical
# specifications: 1 KiB reserved a thread block), so nothing of a kernel lies at offset 0.
RESERVED_SHARED_BYTES = 1024


class Region(Protocol):
    """Somewhere with bytes. Offsets are the region's own: 0-based, or addresses for global memory."""

    name: str

    def within(self, offsets: Offsets, size: int) -> NDArray[np.bool_]: ...

    def read(self, offsets: Offsets, size: int, access: Access | None) -> Bytes: ...

    def write(self, offsets: Offsets, data: Bytes, access: Access | None) -> None: ...

    def where(self, offset: int) -> str: ...


class Memory:
    """One region: a CTA's shared memory, a warp's local memory, the parameters."""

    def __init__(self, name: str, data: Bytes, shadow: Shadow | None = None, base: int = 0) -> None:
        self.name = name
        self.data = data
        self.shadow = shadow
        self.base = base

    def where(self, offset: int) -> str:
        return f"{self.name} {offset + self.base:#x}"

    def within(self, offsets: Offsets, size: int) -> NDArray[np.bool_]:
        """Which accesses of `size` bytes at `offsets` lie inside."""
        return (offsets >= 0) & (offsets + size <= self.data.size)

    def read(self, offsets: Offsets, size: int, access: Access | None) -> Bytes:
        """uint8[..., size] at `offsets` of any shape; all of them inside."""
        cells = _cells(offsets, size)
        if self.shadow is not None and access is not None:
            self.shadow.read(cells, access)
        return self.data[cells]

    def write(self, offsets: Offsets, data: Bytes, access: Access | None) -> None:
        """Writes uint8[..., size] at `offsets`; all of them inside."""
        cells = _cells(offsets, data.shape[-1])
        if self.shadow is not None and access is not None:
            self.shadow.write(cells, access)
        self.data[cells] = data

    def touch(self, offsets: Offsets, size: int, access: Access, *, write: bool) -> None:
        """Records an access without moving bytes (work that reads later what it may rely on now)."""
        if self.shadow is not None:
            (self.shadow.write if write else self.shadow.read)(_cells(offsets, size), access)


@dataclass
class Buffer:
    """A device buffer: real address, bytes, which of them hold a value, and what to call it in a report.

    read_only buffers are inputs: a write to one is a fault only if the caller says so (in-place outputs exist).
    output: the kernel may write it, so reads count from the first one on. owner: the number of the cluster that wrote
    each byte last, plus one (0: none), kept where clusters are compared.
    """

    name: str
    address: int
    data: Bytes
    initialised: NDArray[np.bool_]
    written: NDArray[np.bool_] | None = None
    owner: NDArray[np.int32] | None = None
    output: bool = False


class GlobalMemory:
    """All buffers of a launch, by their real addresses.

    The history of an input starts with its first write, which is a fault already: reads before it are not remembered.
    """

    name = "global"

    def __init__(self, buffers: Sequence[Buffer], shadow_of: Any, claims: Claims | None = None) -> None:
        self._buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self._starts = np.array([buffer.address for buffer in self._buffers], dtype=np.int64)
        self._ends = np.array([buffer.address + buffer.data.size for buffer in self._buffers], dtype=np.int64)
        self._shadow_of = shadow_of
        self._claims = claims
        self._shadows: dict[int, Shadow] = {}

    @property
    def buffers(self) -> Sequence[Buffer]:
        return self._buffers

    def _index(self, addresses: Offsets) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, addresses, side="right") - 1

    def within(self, offsets: Offsets, size: int) -> NDArray[np.bool_]:
        if not self._buffers:
            return np.zeros(offsets.shape, dtype=np.bool_)
        index = self._index(offsets)
        inside: NDArray[np.bool_] = (index >= 0) & (offsets + size <= self._ends[np.maximum(index, 0)])
        return inside

    def where(self, offset: int) -> str:
        index = int(self._index(np.array([offset], dtype=np.int64))[0])
        best: str | None = None
        for near in (index, index + 1):
            if 0 <= near < len(self._buffers):
                buffer = self._buffers[near]
                distance = offset - buffer.address
                if 0 <= distance < buffer.data.size:
                    return f"global {buffer.name}+{distance:#x}"
                if distance >= 0:
                    best = f"global {offset:#x}, {distance - buffer.data.size} bytes after the end of {buffer.name}"
                elif best is None:
                    best = f"global {offset:#x}, {-distance} bytes before {buffer.name}"
        return best or f"global {offset:#x}"

    def read(self, offsets: Offsets, size: int, access: Access | None) -> Bytes:
        out = np.empty((*offsets.shape, size), dtype=np.uint8)
        if access is not None and self._claims is not None:
            self._claims.read(access)
        for number, chosen in self._split(offsets):
            buffer = self._buffers[number]
            cells = _cells(offsets[chosen] - buffer.address, size)
            if access is not None and (buffer.output or number in self._shadows or not buffer.initialised[cells].all()):
                self._shadow(number).read(cells, access)
            out[chosen] = buffer.data[cells]
        return out

    def write(self, offsets: Offsets, data: Bytes, access: Access | None) -> None:
        for number, chosen in self._split(offsets):
            buffer = self._buffers[number]
            cells = _cells(offsets[chosen] - buffer.address, data.shape[-1])
            if access is not None:
                self._shadow(number).write(cells, access)
                if self._claims is not None:
                    self._claims.write(buffer, cells, data[chosen], access)
            if buffer.written is not None:
                buffer.written[cells] = True
            buffer.initialised[cells] = True
            buffer.data[cells] = data[chosen]

    def _shadow(self, number: int) -> Shadow:
        shadow = self._shadows.get(number)
        if shadow is None:
            shadow = self._shadows[number] = self._shadow_of(self._buffers[number])
        return shadow

    def _split(self, offsets: Offsets) -> list[tuple[int, Any]]:
        """Which buffer each address lies in: one entry a buffer."""
        if offsets.size == 0:
            return []
        index = self._index(offsets)
        first = int(index.flat[0])
        if (index == first).all():
            return [(first, ...)]
        return [(int(number), index == number) for number in np.unique(index)]


def _cells(offsets: Offsets, size: int) -> NDArray[np.int64]:
    return offsets[..., None] + _STEPS[size] if size in _STEPS else offsets[..., None] + np.arange(size)


_STEPS: dict[int, NDArray[np.int64]] = {size: np.arange(size, dtype=np.int64) for size in (1, 2, 4, 8, 16, 32)}
