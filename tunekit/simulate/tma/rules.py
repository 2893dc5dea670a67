"""What the hardware asks of tensor maps, coordinates and shared addresses.

The rules are those of the driver's ``cuTensorMapEncodeTiled``, of the table in CUDA C++ Programming Guide 10.29, and
of PTX ISA 9.7.9.27.1 (restrictions on tensor copies).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunekit.simulate.tma.swizzle import PATTERNS, Swizzle
from tunekit.simulate.tma.tensor_map import Element, TensorMap

SHARED_ALIGNMENT = 128
COORDINATE_BYTES = 16
# Shared memory of one CTA on sm_90 and sm_100. The driver refuses a box of 256 KiB and takes one of 187.
SHARED_BYTES = 232448


def problems(tensor: TensorMap) -> list[str]:
    """What is wrong with `tensor`, a sentence each; empty if all is well."""
    found = []
    element, inner_bytes = tensor.element, tensor.row_bytes
    alignment = 32 if element.padded or tensor.interleave_bytes == 32 else 16
    if tensor.address % alignment:
        found.append(f"the global address {tensor.address:#x} is not aligned to {alignment} bytes")
    if tensor.address >> 57:
        found.append(f"the global address {tensor.address:#x} is not below 2^57")
    for dimension, stride in enumerate(tensor.strides, start=1):
        if stride % alignment:
            found.append(f"the stride of dimension {dimension}, {stride} bytes, is not a multiple of {alignment}")
        if stride >= 1 << 40:
            found.append(f"the stride of dimension {dimension}, {stride} bytes, is not below 2^40")
    for dimension in range(tensor.rank):
        if not 1 <= tensor.sizes[dimension] <= 1 << 32:
            found.append(f"the size of dimension {dimension}, {tensor.sizes[dimension]}, is not from 1 to 2^32")
        if not 1 <= tensor.box[dimension] <= 256:
            found.append(f"the box is {tensor.box[dimension]} long in dimension {dimension}; it may be 1 to 256")
        if not 1 <= tensor.element_strides[dimension] <= 8:
            step = tensor.element_strides[dimension]
            found.append(f"the element stride of dimension {dimension} is {step}; it may be 1 to 8")
    if not tensor.interleave_bytes and tensor.extent[0] * element.bits % (8 * 16):
        found.append(f"the box's rows of {inner_bytes} bytes are no multiple of 16 bytes")
    span = PATTERNS[tensor.swizzle].span_bytes
    if span and not tensor.interleave_bytes and inner_bytes > span:
        found.append(f"the box's rows of {inner_bytes} bytes are longer than the {span} bytes that the swizzle spans")
    if tensor.transaction_bytes > SHARED_BYTES:
        found.append(f"a box of {tensor.transaction_bytes} bytes does not fit shared memory, {SHARED_BYTES} bytes")
    if tensor.interleave_bytes and tensor.rank < 3:
        found.append(f"an interleaved layout needs rank 3 or more, not {tensor.rank}")
    if tensor.nan_fill and not element.floating:
        found.append(f"elements out of bounds can't be NaN in a tensor of {element.name.lower()}")
    found += _problems_of_packed(tensor)
    return found


def _problems_of_packed(tensor: TensorMap) -> Iterator[str]:
    element = tensor.element
    if element is Element.B4X16 and tensor.sizes[0] % 2:
        yield f"a size of {tensor.sizes[0]} 4-bit elements in dimension 0 is no whole number of bytes"
    if element.padded:
        if tensor.box[0] != 128:
            yield f"the box must hold 128 {element.name.lower()} elements in dimension 0, not {tensor.box[0]}"
        if tensor.sizes[0] % 128:
            yield f"the size of dimension 0, {tensor.sizes[0]} {element.name.lower()} elements, is no multiple of 128"
        if tensor.swizzle not in (Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B, Swizzle.B128_ATOM_64B):
            yield f"{element.name.lower()} allows no swizzle or a 128-byte one without flip, not {tensor.swizzle.name}"


def misplaced(tensor: TensorMap, shared_address: int) -> str | None:
    """Why a box may not lie at `shared_address`, in a sentence, or None."""
    if shared_address % SHARED_ALIGNMENT:
        return f"the box's shared address {shared_address:#x} is not aligned to {SHARED_ALIGNMENT} bytes"
    return None


def off_coordinates(tensor: TensorMap, coordinates: Sequence[int]) -> str | None:
    """Why a copy may not start at `coordinates`, in a sentence, or None.

    The rules of packed types are the ISA's (9.7.9.27.1.1). That a row starts at a multiple of 16 bytes is not in the
    ISA: it was found on an H200 (driver 13.0), where every other copy or prefetch, also one outside its tensor, ends in
    CUDA_ERROR_ILLEGAL_INSTRUCTION. The coordinates of the other dimensions, and of gathered rows, are free.
    """
    first = coordinates[0]
    if tensor.element.padded and first % 128:
        return f"the first coordinate {first} is no multiple of 128, as {tensor.element.name.lower()} needs"
    if tensor.element.packed and first * tensor.element.bits % 8:
        return f"the first coordinate {first} is no whole byte of {tensor.element.name.lower()} elements"
    if first * tensor.element.bits % (8 * COORDINATE_BYTES):
        size = f"{tensor.element.bits // 8} bytes" if tensor.element.bits % 8 == 0 else f"{tensor.element.bits} bits"
        text = f"the first coordinate {first} times the {size} of a {tensor.element.name.lower()} element"
        return f"{text} is no multiple of {COORDINATE_BYTES} bytes"
    return None
