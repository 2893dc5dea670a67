"""The shared-memory matrix descriptor of tcgen05 (PTX ISA 9.7.16.4.1)."""

from __future__ import annotations

from functools import lru_cache

from tunekit.simulate.matrix.layout import (
    NONE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_128B_BASE_32B,
    Place,
    Swizzle,
)

_SWIZZLES: dict[int, Swizzle] = {
    0: NONE,
    1: SWIZZLE_128B_BASE_32B,
    2: SWIZZLE_128B,
    4: SWIZZLE_64B,
    6: SWIZZLE_32B,
}


class DescriptorError(ValueError):
    """A descriptor with a wrong field. `field` names it as the ISA's table does."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


def _field(descriptor: int, low: int, bits: int) -> int:
    return (descriptor >> low) & ((1 << bits) - 1)


@lru_cache(maxsize=8192)
def decode(descriptor: int) -> Place:
    """The 64-bit descriptor's fields; DescriptorError names the first wrong one.

    Bits 14-15 and 30-31 lie between fields and are not defined by the ISA: they must be 0 here, since an address or
    an offset that reaches into them is one that did not fit.
    """
    for name, low in (("matrix start address", 14), ("leading dimension byte offset", 30)):
        if _field(descriptor, low, 2):
            raise DescriptorError(name, f"bits {low}-{low + 1} are set: the value does not fit its 14 bits")
    if _field(descriptor, 46, 3) != 0b001:
        raise DescriptorError("fixed constant", f"bits 46-48 are {_field(descriptor, 46, 3):#05b}, must be 0b001")
    if _field(descriptor, 52, 1):
        raise DescriptorError("leading dimension stride mode", "bit 52 (absolute address) is for K tiles of 48 bytes")
    if _field(descriptor, 53, 8):
        raise DescriptorError("fixed constant", f"bits 53-60 are {_field(descriptor, 53, 8):#04x}, must be 0")
    swizzle = _SWIZZLES.get(_field(descriptor, 61, 3))
    if swizzle is None:
        raise DescriptorError("swizzling mode", f"bits 61-63 are {_field(descriptor, 61, 3)}, not one of 0, 1, 2, 4, 6")
    place = Place(
        start=_field(descriptor, 0, 14) << 4,
        leading=_field(descriptor, 16, 14) << 4,
        stride=_field(descriptor, 32, 14) << 4,
        swizzle=swizzle,
        base_offset=_field(descriptor, 49, 3),
    )
    if swizzle is SWIZZLE_128B_BASE_32B and place.start % 32:
        raise DescriptorError("matrix start address", f"{place.start:#x} is not a multiple of the 32-byte atom")
    return place


def encode(place: Place) -> int:
    """The descriptor of `place`."""
    mode = next(mode for mode, swizzle in _SWIZZLES.items() if swizzle is place.swizzle)
    return (
        (place.start & 0x3FFFF) >> 4
        | ((place.leading & 0x3FFFF) >> 4) << 16
        | ((place.stride & 0x3FFFF) >> 4) << 32
        | 0b001 << 46
        | place.base_offset << 49
        | mode << 61
    )
