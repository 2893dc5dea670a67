"""The matrix descriptor of wgmma (PTX ISA 9.7.15.5.1.2.2)."""

from __future__ import annotations

from functools import lru_cache

from tunekit.simulate.matrix.layout import (
    NONE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    Int64Array,
    Major,
    Place,
)
from tunekit.simulate.matrix.layout import addresses as _addresses

_SWIZZLES = (NONE, SWIZZLE_128B, SWIZZLE_64B, SWIZZLE_32B)


def _field(descriptor: int, low: int, bits: int) -> int:
    return (descriptor >> low) & ((1 << bits) - 1)


@lru_cache(maxsize=4096)
def decode(descriptor: int) -> Place:
    """The 64-bit descriptor's fields; addresses and offsets are kept in units of 16 bytes."""
    return Place(
        start=_field(descriptor, 0, 14) << 4,
        leading=_field(descriptor, 16, 14) << 4,
        stride=_field(descriptor, 32, 14) << 4,
        swizzle=_SWIZZLES[_field(descriptor, 62, 2)],
        base_offset=_field(descriptor, 49, 3),
    )


def encode(place: Place) -> int:
    """The descriptor of `place`."""
    return (
        (place.start & 0x3FFFF) >> 4
        | ((place.leading & 0x3FFFF) >> 4) << 16
        | ((place.stride & 0x3FFFF) >> 4) << 32
        | place.base_offset << 49
        | _SWIZZLES.index(place.swizzle) << 62
    )


def addresses(descriptor: int, rows: int, k: int, element_bits: int, major: Major) -> Int64Array:
    """Byte address of each element of the [rows, k] operand: int64[rows, k], in the CTA's shared memory."""
    return _addresses(decode(descriptor), rows, k, element_bits, major)
