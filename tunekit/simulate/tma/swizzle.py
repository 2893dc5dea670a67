"""Swizzling modes of tensor copies (PTX ISA 5.5.7): which byte of shared memory holds which byte of a box.

The pattern is a function of the absolute shared-memory address: some bits of a byte's address are flipped by higher
ones that number its 128-byte line. So a box that starts off the pattern's period is swizzled as if the pattern had
started at the period's boundary before it (the ISA's "base offset"), and applying a pattern twice undoes it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

CHUNK_BYTES = 16


class Swizzle(enum.IntEnum):
    """The modes, numbered like the driver's ``CUtensorMapSwizzle``."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6


@dataclass(frozen=True)
class Pattern:
    """One mode. `flips` are (address bits flipped, how far above them lie the bits that flip them)."""

    span_bytes: int  # a box's inner dimension may be this long
    period_bytes: int  # the pattern repeats
    flips: tuple[tuple[int, int], ...] = ()
    piece_bytes: int = CHUNK_BYTES  # bytes that stay together


PATTERNS = {
    Swizzle.NONE: Pattern(span_bytes=0, period_bytes=CHUNK_BYTES),
    Swizzle.B32: Pattern(span_bytes=32, period_bytes=256, flips=((0x10, 3),)),
    Swizzle.B64: Pattern(span_bytes=64, period_bytes=512, flips=((0x30, 3),)),
    Swizzle.B128: Pattern(span_bytes=128, period_bytes=1024, flips=((0x70, 3),)),
    Swizzle.B128_ATOM_32B: Pattern(span_bytes=128, period_bytes=512, flips=((0x60, 2),)),
    # Every other 128-byte line also has the halves of its 16-byte chunks exchanged.
    Swizzle.B128_ATOM_32B_FLIP_8B: Pattern(128, 512, flips=((0x60, 2), (0x08, 4)), piece_bytes=8),
    Swizzle.B128_ATOM_64B: Pattern(span_bytes=128, period_bytes=256, flips=((0x40, 1),)),
}


def swizzled(addresses: Int64Array, swizzle: Swizzle) -> Int64Array:
    """Where the bytes that an unswizzled copy would put at `addresses` lie: shared-memory byte addresses, same shape.

    `addresses` count from the start of the CTA's shared memory window, or of anything aligned to 1024 bytes.
    """
    result = addresses
    for bits, distance in PATTERNS[swizzle].flips:
        result = result ^ ((addresses >> distance) & bits)
    return result
