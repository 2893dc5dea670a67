"""The register file of a warp: every slot's 32 lanes, seen as each type of its width."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.machine.decode import Decoder
from tunekit.simulate.machine.lanes import FULL, WARP

_STORAGE = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.uint64}
# What an undefined register holds: a pattern that shows in results.
_POISON = {1: True, 16: 0xDEAD, 32: 0xDEADBEEF, 64: 0xDEADBEEFDEADBEEF, 128: 0xDEADBEEFDEADBEEF}


class Registers:
    """Views by type. Each is a list with one array a slot, None where the width differs:

    pred bool[32]; u16 s16 f16 [32]; u32 s32 f32 [32], h2 uint16[32, 2]; u64 s64 f64 [32], f32x2 float32[32, 2],
    u32x2 uint32[32, 2]; u64x2 uint64[32, 2].

    defined[slot] holds the lanes (as bits) whose value somebody wrote.
    """

    def __init__(self, decoder: Decoder) -> None:
        slots = len(decoder.widths)
        self.defined: list[int] = [0] * slots
        self.pred: list[Any] = [None] * slots
        self.u16: list[Any] = [None] * slots
        self.s16: list[Any] = [None] * slots
        self.f16: list[Any] = [None] * slots
        self.u32: list[Any] = [None] * slots
        self.s32: list[Any] = [None] * slots
        self.f32: list[Any] = [None] * slots
        self.h2: list[Any] = [None] * slots
        self.u64: list[Any] = [None] * slots
        self.s64: list[Any] = [None] * slots
        self.f64: list[Any] = [None] * slots
        self.f32x2: list[Any] = [None] * slots
        self.u32x2: list[Any] = [None] * slots
        self.u64x2: list[Any] = [None] * slots
        counts = {width: decoder.widths.count(width) for width in _STORAGE}
        blocks: dict[int, NDArray[Any]] = {
            width: np.full((count, WARP * (2 if width == 128 else 1)), _POISON[width], dtype=_STORAGE[width])
            for width, count in counts.items()
        }
        self._blocks = tuple(blocks.values())
        self._words = blocks[32]
        self._rows: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._row: list[int] = []
        used = dict.fromkeys(_STORAGE, 0)
        for slot, width in enumerate(decoder.widths):
            storage = blocks[width][used[width]]
            self._row.append(used[width])
            used[width] += 1
            self._see(slot, width, storage)
        for slot, bits in decoder.constants.items():
            self.fill(slot, decoder.widths[slot], bits)

    def _see(self, slot: int, width: int, storage: NDArray[Any]) -> None:
        if width == 1:
            self.pred[slot] = storage
        elif width == 16:
            self.u16[slot] = storage
            self.s16[slot] = storage.view(np.int16)
            self.f16[slot] = storage.view(np.float16)
        elif width == 32:
            self.u32[slot] = storage
            self.s32[slot] = storage.view(np.int32)
            self.f32[slot] = storage.view(np.float32)
            self.h2[slot] = storage.view(np.uint16).reshape(WARP, 2)
        elif width == 64:
            self.u64[slot] = storage
            self.s64[slot] = storage.view(np.int64)
            self.f64[slot] = storage.view(np.float64)
            self.f32x2[slot] = storage.view(np.float32).reshape(WARP, 2)
            self.u32x2[slot] = storage.view(np.uint32).reshape(WARP, 2)
        else:
            self.u64x2[slot] = storage.reshape(WARP, 2)

    def fill(self, slot: int, width: int, bits: int | NDArray[Any]) -> None:
        """Sets all lanes of a slot (a constant, a special register, an address) and defines them."""
        if width == 1:
            self.pred[slot][:] = np.asarray(bits) != 0
        elif width == 128:
            value = int(bits)
            self.u64x2[slot][:] = np.array([value & (2**64 - 1), value >> 64], dtype=np.uint64)
        else:
            view = {16: self.u16, 32: self.u32, 64: self.u64}[width][slot]
            view[:] = np.asarray(bits, dtype=view.dtype) if not isinstance(bits, int) else view.dtype.type(bits)
        self.defined[slot] = FULL

    def contents(self) -> tuple[bytes, ...]:
        """All that the registers hold, to compare with what they hold at another time."""
        return tuple(block.tobytes() for block in self._blocks)

    def words(self, slots: tuple[int, ...]) -> NDArray[np.uint32]:
        """A copy of many 32-bit slots at once: uint32[slots, 32]."""
        return self._words[self._rows_of(slots)]

    def set_words(self, slots: tuple[int, ...], values: NDArray[np.uint32]) -> None:
        """Writes all lanes of many 32-bit slots: uint32[slots, 32]."""
        self._words[self._rows_of(slots)] = values

    def _rows_of(self, slots: tuple[int, ...]) -> NDArray[np.int64]:
        rows = self._rows.get(slots)
        if rows is None:
            rows = self._rows[slots] = np.array([self._row[slot] for slot in slots], dtype=np.int64)
        return rows

    def array(self, slot: int) -> NDArray[Any]:
        """The storage of a slot as unsigned numbers ([32], or [32, 2] for 128 bits), or as bool for predicates."""
        for view in (self.u32, self.u64, self.pred, self.u16, self.u64x2):
            if view[slot] is not None:
                return np.asarray(view[slot])
        raise ValueError(f"slot {slot} has no storage")
