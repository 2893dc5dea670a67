"""Canonical layouts of a matrix in shared memory (PTX ISA 9.7.15.5.1.2 for wgmma, 9.7.16.3 and 9.7.16.4 for tcgen05).

Both families of instructions read an operand in chunks of 16 bytes, and both descriptor formats decode to one
`Place`: where the matrix starts, two strides, and a swizzle. The matrix is [mn, k], where mn is the row m of A or
the column n of B. In units of chunks, with W = swizzle.chunks:

    K-major, no swizzle    (8, m), (1, c): row (r % 8) + (r // 8) * stride, chunk column c * leading
    K-major, swizzled      (8, m), c     : (r % 8) * W + (r // 8) * stride + c
    MN-major, no swizzle   c, (8, k)     : c * stride + (k % 8) + (k // 8) * leading
    MN-major, swizzled     (W, c), (R, k): (c % W) + (c // W) * leading + (k % R) * W + (k // R) * stride

R is 8, or 4 where the swizzle moves units of 32 bytes. The swizzle then exchanges address bits. It acts on the
absolute shared-memory address, so a descriptor may start inside an atom: advancing along K by 32 bytes is an addition
to the start address.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Major: TypeAlias = Literal["k", "mn"]
Int64Array: TypeAlias = NDArray[np.int64]

CHUNK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Swizzle:
    """XOR of `bits` address bits from bit `base` with those `shift` places higher.

    chunks: width of an atom in 16-byte chunks (W above). rows: its height (R above).
    """

    name: str
    bits: int
    base: int
    shift: int
    chunks: int
    rows: int = 8

    @property
    def pattern_bytes(self) -> int:
        """After so many bytes the exchange repeats: 1024 for 128B."""
        return 1 << (self.base + self.shift + self.bits)

    def apply(self, addresses: Int64Array, base_offset: int = 0) -> Int64Array:
        """Where the bytes at the unswizzled `addresses` lie.

        base_offset: bits 7 to 9 of the address where the repeating pattern starts (PTX ISA 9.7.15.5.1.2.2); 0 if
        it starts at a multiple of `pattern_bytes`.
        """
        if not self.bits:
            return addresses
        rows = addresses - (base_offset << 7)
        return addresses ^ ((rows >> self.shift) & (((1 << self.bits) - 1) << self.base))


NONE = Swizzle("none", bits=0, base=4, shift=3, chunks=1)
SWIZZLE_32B = Swizzle("32B", bits=1, base=4, shift=3, chunks=2)
SWIZZLE_64B = Swizzle("64B", bits=2, base=4, shift=3, chunks=4)
SWIZZLE_128B = Swizzle("128B", bits=3, base=4, shift=3, chunks=8)
SWIZZLE_128B_BASE_32B = Swizzle("128B, atoms of 32B", bits=2, base=5, shift=2, chunks=8, rows=4)


@dataclass(frozen=True, slots=True)
class Place:
    """A decoded matrix descriptor: offsets in bytes from the start of the CTA's shared memory."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle
    base_offset: int = 0

    def __str__(self) -> str:
        text = f"start 0x{self.start:x}, leading {self.leading} B, stride {self.stride} B, swizzle {self.swizzle.name}"
        return f"{text}, base offset {self.base_offset}" if self.base_offset else text


@lru_cache(maxsize=256)
def _offsets(
    leading: int, stride: int, swizzle: Swizzle, rows: int, k: int, element_bits: int, major: Major
) -> Int64Array:
    """Unswizzled byte offset of each 16-byte chunk from the start."""
    along = k if major == "k" else rows
    if along * element_bits % (8 * CHUNK_BYTES):
        raise ValueError(f"{along} elements of {element_bits} bits don't fill chunks of {CHUNK_BYTES} bytes")
    chunk = np.arange(along * element_bits // (8 * CHUNK_BYTES), dtype=np.int64)
    width, unswizzled = swizzle.chunks, not swizzle.bits
    if major == "k":
        row = np.arange(rows, dtype=np.int64)
        down = (row % 8) * (width * CHUNK_BYTES) + (row // 8) * stride
        across = chunk * (leading if unswizzled else CHUNK_BYTES)
        return down[:, None] + across[None, :]
    step = np.arange(k, dtype=np.int64)
    if unswizzled:
        down, across = chunk * stride, (step % 8) * CHUNK_BYTES + (step // 8) * leading
    else:
        down = (chunk % width) * CHUNK_BYTES + (chunk // width) * leading
        across = (step % swizzle.rows) * (width * CHUNK_BYTES) + (step // swizzle.rows) * stride
    return down[:, None] + across[None, :]


@lru_cache(maxsize=4096)
def chunk_addresses(place: Place, rows: int, k: int, element_bits: int, major: Major) -> Int64Array:
    """Byte address of each 16-byte chunk of a [rows, k] matrix; read-only.

    K-major: [rows, chunks along k], a chunk holds 128/element_bits elements of one row.
    MN-major: [chunks along rows, k], a chunk holds 128/element_bits elements of one k.
    """
    offsets = _offsets(place.leading, place.stride, place.swizzle, rows, k, element_bits, major)
    found = place.swizzle.apply(place.start + offsets, place.base_offset)
    found.flags.writeable = False
    return found


def addresses(place: Place, rows: int, k: int, element_bits: int, major: Major) -> Int64Array:
    """Byte address of each element, int64[rows, k]. Elements of 4 bits share their byte in pairs, low half first."""
    chunks = chunk_addresses(place, rows, k, element_bits, major)
    within = np.arange(8 * CHUNK_BYTES // element_bits, dtype=np.int64) * element_bits // 8
    if major == "k":
        return (chunks[:, :, None] + within).reshape(rows, k)
    return (chunks[:, None, :] + within[None, :, None]).reshape(rows, k)


def elements(chunks: NDArray[np.uint8], dtype: type[np.generic], major: Major) -> NDArray[np.generic]:
    """The [rows, k] matrix in the bytes [., ., 16] found at `chunk_addresses`; dtype of 1, 2 or 4 bytes."""
    first, second = chunks.shape[:2]
    items = np.ascontiguousarray(chunks).view(dtype)
    if major == "k":
        return items.reshape(first, -1)
    return items.swapaxes(1, 2).reshape(-1, second)
