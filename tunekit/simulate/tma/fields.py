"""Replacing one field of a tensor map in place, as ``tensormap.replace`` does (PTX ISA 9.7.9.28).

The bits are edited one field at a time, so that a map may be inconsistent between two replacements.
"""

from __future__ import annotations

from tunekit.simulate.tma.descriptor import ADDRESS_MASK, BYTES, MAX_RANK
from tunekit.simulate.tma.tensor_map import Element, TensorMapError

# Table 33 numbers the element types like the descriptor does, up to bf16; then come these.
_LATER_ELEMENTS = {
    11: Element.TF32,
    12: Element.TF32_FTZ,
    13: Element.B4X16,
    14: Element.B4X16_P64,
    15: Element.B6X16_P32,
}
# (lowest bit of word 1, bits, values) of the fields that take an immediate.
_CHOICES = {
    "interleave_layout": (11, 2, 3),
    "swizzle_mode": (13, 2, 4),
    "swizzle_atomicity": (19, 2, 4),
    "fill_mode": (15, 1, 2),
}


def replaced(data: bytes, field: str, value: int, ordinal: int = 0) -> bytes:
    """`data`, 128 bytes, with `field` (its PTX name) set to `value`; `ordinal` counts dimensions or strides from 0.

    Sizes, box sizes and element strides are as they are meant, the rank is one less, strides are in bytes.

    Raises:
        TensorMapError: no such field, or a value that it can't take.
    """
    words = [int.from_bytes(data[8 * n : 8 * n + 8], "little") for n in range(BYTES // 8)]

    def put(word: int, low: int, bits: int, number: int) -> None:
        if not 0 <= number < 1 << bits:
            raise TensorMapError(f"tensormap.replace of {field} {ordinal} by {value}: it has {bits} bits")
        words[word] = words[word] & ~(((1 << bits) - 1) << low) | number << low

    dimensions = MAX_RANK - 1 if field == "global_stride" else MAX_RANK
    if not 0 <= ordinal < dimensions:
        raise TensorMapError(f"tensormap.replace of {field} {ordinal}: there are {dimensions}")
    if field == "global_address":
        words[0] = words[0] & ~ADDRESS_MASK | _multiple_of_16(field, value)
    elif field == "rank":
        put(1, 4, 3, value)
    elif field == "global_dim":
        put(4 + ordinal // 2, 32 * (ordinal % 2), 32, (value - 1) & 0xFFFFFFFF)
    elif field == "global_stride":
        sixteenths = _multiple_of_16(field, value) >> 4
        put(*((1, 32), (2, 0), (2, 32), (3, 0))[ordinal], 32, sixteenths & 0xFFFFFFFF)
        put(3, 32 + 4 * ordinal, 4, sixteenths >> 32)
    elif field == "box_dim":
        put(*((6, 56) if ordinal == 0 else (7, 8 * (ordinal - 1))), 8, value - 1)
    elif field == "element_stride":
        put(6, 32 + 3 * ordinal, 3, value - 1)
    elif field == "elemtype":
        element = _LATER_ELEMENTS.get(value)
        put(1, 7, 4, element.code if element else value)
        put(1, 16, 1, element.tf32 if element else 0)
    elif field in _CHOICES:
        low, bits, values = _CHOICES[field]
        if value >= values:
            raise TensorMapError(f"tensormap.replace of {field} by {value} is not modelled")
        put(1, low, bits, value)
    else:
        raise TensorMapError(f"tensormap.replace of {field} is not modelled")
    return b"".join(word.to_bytes(8, "little") for word in words)


def _multiple_of_16(field: str, value: int) -> int:
    if value & ~ADDRESS_MASK:
        raise TensorMapError(f"tensormap.replace of {field} by {value:#x}, which is no multiple of 16 below 2^57")
    return value
