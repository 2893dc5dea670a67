"""Between registers and memory: elements of PTX types as bytes (PTX ISA 9.4, operand size exceeding type size)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.machine.decode import TYPE_BITS, Decoder
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx.module import Operand, Sink

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Elements:
    """Some registers as the elements of one access of a lane.

    size is that of one element in bytes, dtype its storage, views the name of the warp's view for each register.
    present tells which elements are wanted (`_` in a vector is not).
    """

    slots: tuple[int, ...]
    views: tuple[str, ...]
    size: int
    dtype: np.dtype[Any]
    present: tuple[bool, ...]

    @property
    def total(self) -> int:
        return self.size * len(self.slots)

    def gather(self, w: Warp, lanes: Lanes) -> Bytes:
        """uint8[n, total]: each active lane's elements; of wider registers the low bits."""
        if len(self.slots) == 1:
            values = getattr(w, self.views[0])[self.slots[0]][lanes.indices].astype(self.dtype)
            return values.view(np.uint8).reshape(lanes.count, self.size)  # type: ignore[no-any-return]
        wide = 2 if self.size == 16 else 1
        out = np.empty((lanes.count, len(self.slots) * wide), dtype=self.dtype)
        for k, (slot, view) in enumerate(zip(self.slots, self.views, strict=True)):
            values = getattr(w, view)[slot][lanes.indices]
            out[:, k * wide : (k + 1) * wide] = values if wide == 2 else values[:, None]
        return out.view(np.uint8)

    def scatter(self, w: Warp, lanes: Lanes, data: Bytes) -> None:
        """Writes uint8[n, total] to each active lane's registers, extended to their width by the type's sign."""
        values = np.ascontiguousarray(data).view(self.dtype)
        wide = 2 if self.size == 16 else 1
        where: Any = slice(None) if lanes.all else lanes.indices
        for k, (slot, view) in enumerate(zip(self.slots, self.views, strict=True)):
            register = getattr(w, view)[slot]
            register[where] = values[:, 2 * k : 2 * k + 2] if wide == 2 else values[:, k]


def sources(d: Decoder, operand: Operand, type_: str) -> Elements:
    """The registers that a store takes its elements from."""
    items = d.items(operand)
    slots = tuple(
        d.constant(0, max(16, TYPE_BITS[type_])) if isinstance(item, Sink) else d.read(item, type_, relaxed=True)
        for item in items
    )
    return _elements(d, slots, type_, tuple(not isinstance(item, Sink) for item in items))


def destinations(d: Decoder, operand: Operand, type_: str) -> Elements:
    """The registers that a load writes its elements to."""
    items = d.items(operand)
    slots = tuple(d.write(item, type_, relaxed=True) for item in items)
    return _elements(d, slots, type_, tuple(not isinstance(item, Sink) for item in items))


def _elements(d: Decoder, slots: tuple[int, ...], type_: str, present: tuple[bool, ...]) -> Elements:
    bits = TYPE_BITS[type_]
    sign = "s" if type_[0] == "s" else "u"
    widths = [d.widths[slot] for slot in slots]
    if any(width < bits for width in widths):
        raise d.unsupported(f"a register narrower than .{type_}")
    views = tuple("u64x2" if width == 128 else f"{sign}{width}" for width in widths)
    dtype = np.dtype(np.uint64) if bits == 128 else np.dtype(f"{'i' if sign == 's' else 'u'}{bits // 8}")
    return Elements(slots, views, bits // 8, dtype, present)
