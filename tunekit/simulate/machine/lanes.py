"""Sets of lanes: the 32 bits of a mask with the forms that NumPy wants, made once each."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

WARP = 32
FULL = (1 << WARP) - 1


class Lanes:
    """A set of lanes of a warp."""

    __slots__ = ("all", "bits", "count", "first", "indices", "mask", "where")

    _made: ClassVar[dict[int, Lanes]] = {}

    def __init__(self, bits: int) -> None:
        self.bits = bits
        raw = np.frombuffer(bits.to_bytes(4, "little"), dtype=np.uint8)
        self.mask: NDArray[np.bool_] = np.unpackbits(raw, bitorder="little").astype(np.bool_)
        self.mask.flags.writeable = False
        self.indices: NDArray[np.int64] = np.flatnonzero(self.mask).astype(np.int64)
        self.count = int(self.indices.size)
        self.first = int(self.indices[0]) if self.count else -1
        self.all = bits == FULL
        self.where: Any = True if self.all else self.mask

    @classmethod
    def of(cls, bits: int) -> Lanes:
        """The set with these bits; the same object each time."""
        lanes = cls._made.get(bits)
        if lanes is None:
            lanes = cls._made[bits] = cls(bits)
        return lanes

    @classmethod
    def of_mask(cls, mask: NDArray[np.bool_]) -> Lanes:
        return cls.of(bits_of(mask))


def bits_of(mask: NDArray[np.bool_]) -> int:
    """The 32 bits of a bool[32]."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
