"""D = A B + D as tcgen05.mma computes it here: exact products, summed in float64, rounded once.

The ISA leaves the precision of the sum open (9.7.16.10 names none). The hardware keeps fewer bits than float64 while
it adds, so its last bit can differ: results agree to within float32 rounding of the largest terms, not bit by bit.
Integer results are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.matrix.layout import Major
from tunekit.simulate.numbers.formats import CANONICAL_NAN, decode, encode

Words = NDArray[np.uint32]
Float64 = NDArray[np.float64]

_WIDTHS = {"e2m1": 4, "e2m3": 6, "e3m2": 6}
_INTEGERS: dict[str, Any] = {"u8": np.uint8, "s8": np.int8}


def chunk_bytes(element: str, container_bits: int) -> int:
    """How many bytes of a chunk of 16 hold elements; behind them is padding, which nothing need have written."""
    return 16 if container_bits == 4 else 2 * _WIDTHS.get(element, 8)


def from_chunks(chunks: NDArray[np.uint8], element: str, container_bits: int, major: Major) -> Float64:
    """The operand [rows, k] in the chunks [., ., chunk_bytes] of shared memory, as `layout.chunk_addresses` finds them.

    container_bits: 8 for elements of 4 and 6 bits of the f8f6f4 kinds, which come 16 to a chunk with the padding
    behind them (9.7.16.10.4.4); 4 for the mxf4 kinds, 32 to a chunk.
    """
    first, second = chunks.shape[:2]
    values = _numbers(np.ascontiguousarray(chunks), element, container_bits)
    if major == "k":
        return values.reshape(first, -1)
    return values.swapaxes(1, 2).reshape(-1, second)


def _numbers(chunks: NDArray[np.uint8], element: str, container_bits: int) -> Float64:
    """float64[., ., elements of a chunk]."""
    width = _WIDTHS.get(element, 8)
    if container_bits == 4:
        return _decoded(nibbles(chunks), element)
    if width == 4:
        return _decoded(nibbles(chunks), element)
    if width == 6:
        return _decoded(sextets(chunks), element)
    return _decoded(_typed(chunks, element), element)


def from_words(words: Words, element: str, container_bits: int) -> Float64:
    """The operand [rows, k] in the cells [rows, 8] of tensor memory (9.7.16.10.4).

    In containers of 8 bits an e2m1 takes bits 2-5, an e2m3 or e3m2 bits 0-5.
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if container_bits == 4:
        return _decoded(nibbles(octets), element)
    if element == "e2m1":
        return _decoded(octets >> 2, element)
    return _decoded(_typed(octets, element), element)


def _typed(octets: NDArray[np.uint8], element: str) -> NDArray[Any]:
    if element in ("f16", "bf16"):
        return octets.view(np.uint16)
    if element == "tf32":
        return octets.view(np.uint32)
    return octets


def _decoded(bits: NDArray[Any], element: str) -> Float64:
    if element in _INTEGERS:
        values = bits.view(_INTEGERS[element])
    elif element == "f16":
        values = bits.view(np.float16)
    else:
        values = decode(bits, element)
    wide: Float64 = values.astype(np.float64)
    return wide


def nibbles(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two elements of 4 bits from each byte, the low half first."""
    halves = np.stack([octets & 15, octets >> 4], axis=-1)
    return halves.reshape(*octets.shape[:-1], -1)


def sextets(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Four elements of 6 bits from each 3 bytes, the lowest bits first."""
    triples = octets.reshape(*octets.shape[:-1], -1, 3).astype(np.uint32)
    joined = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    shifts = np.array([0, 6, 12, 18], dtype=np.uint32)
    parts = (joined[..., None] >> shifts & 0x3F).astype(np.uint8)
    return parts.reshape(*octets.shape[:-1], -1)


# OpenBLAS spreads larger products over threads, which on a busy machine costs more than they are worth.
_MOST_PRODUCTS = 1 << 17


def multiply(a: Float64, b: Float64) -> Float64:
    """a[rows, k] times the transpose of b[columns, k]."""
    rows, k = a.shape
    columns = b.shape[0]
    step = max(1, _MOST_PRODUCTS // (rows * k))
    product = np.empty((rows, columns), dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, columns, step):
            np.matmul(a, b[first : first + step].T, out=product[:, first : first + step])
    return product


def accumulate(product: Float64, before: Words | None, result: str, scale: int, saturate: bool) -> Words:
    """The cells of D: `product` plus what D held, times 2^-scale, rounded to `result` ("f32", "f16" or "s32").

    An f16 takes the low half of its cell, above it are zeros.
    """
    if result == "s32":
        return _integers(product, before, saturate)
    total = product
    if before is not None:
        held = before.view(np.float32) if result == "f32" else before.astype(np.uint16).view(np.float16)
        total = held.astype(np.float64)
        if scale:
            total *= 2.0**-scale
        total += product
    if result == "f16":
        halves: Words = encode(total, "f16").astype(np.uint32)
        return halves
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = total.astype(np.float32)
    bits: Words = rounded.view(np.uint32)
    odd = np.isnan(rounded)
    if odd.any():
        bits[odd] = CANONICAL_NAN
    return bits


def _integers(product: Float64, before: Words | None, saturate: bool) -> Words:
    total = product.astype(np.int64)
    if before is not None:
        total += before.view(np.int32)
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    wrapped: Words = total.astype(np.uint64).astype(np.uint32)
    return wrapped
