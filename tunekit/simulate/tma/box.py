"""Boxes: which bytes of global and of shared memory one tensor copy moves (PTX ISA 5.5.2, 5.5.4 and 5.5.7).

A box is a stack of rows along dimension 0. A row is contiguous in global memory. In shared memory the rows follow one
another, dimension 1 fastest, before the swizzle moves their pieces: without gaps where there is no swizzle; with one,
each begins as many bytes after the one before as the swizzle spans, so that a shorter row leaves a gap. Whether an
element is inside the tensor is a matter of its row and of its place in the row, so two masks of one dimension each say
it for all.

Not in the ISA, and found on an H200 (driver 13.0):
  - what lies outside the tensor reads as the NaN 0x7FF7 in every 16 bits, whatever the type, if the map asks for NaN;
  - loads as TF32 and TF32_FTZ round to the nearest of 10 bits, ties to even, beyond the largest to infinity; each NaN
    becomes 0x7FFFE000, and subnormal inputs are not taken for zeros (whether TF32_FTZ flushes a result that is
    subnormal after rounding was not seen: here it does not). F32_FTZ loads, and all stores, move the bits as they are;
  - copies and reductions out of shared memory are cut at the tensor's end in dimension 0 by pieces of 16 bytes: where
    a row of the tensor ends within one, all of it is written, into the bytes behind the row's end (`Box.margin`).
    In the other dimensions nothing outside the tensor is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.tma.swizzle import CHUNK_BYTES, PATTERNS, Int64Array, swizzled
from tunekit.simulate.tma.tensor_map import Element, NotModelled, TensorMap, TensorMapError

Bytes = NDArray[np.uint8]

GATHERED_ROWS = 4
OUTSIDE_NAN = 0x7FF7
TF32_NAN = 0x7FFFE000
_TF32_DROPPED_BITS = 13
# Bytes in shared memory of sixteen elements, and those of them that a copy writes.
_PADDED_CHUNKS = {Element.B4X16_P64: (16, 8), Element.B6X16_P32: (16, 12)}


@dataclass(frozen=True)
class Box:
    """One placed box.

    rows        int64[r], global byte address of the first element of each row, wherever that may be
    inside      bool[r], rows that lie in the tensor
    row_bytes   length of a row in global memory; bytes `first` to `last` (exclusive) of it lie in the tensor
    """

    tensor: TensorMap
    rows: Int64Array
    inside: NDArray[np.bool_]
    row_bytes: int
    first: int
    last: int

    @property
    def empty(self) -> bool:
        """All of it lies outside the tensor."""
        return self.first >= self.last or not self.inside.any()

    @property
    def addresses(self) -> Int64Array:
        """Global byte address of the first byte inside, of each row inside: int64[rows inside]."""
        return self.rows[self.inside] + self.first

    @property
    def inner_bytes(self) -> int:
        """Bytes of each row inside the tensor."""
        return max(self.last - self.first, 0)

    @property
    def transaction_bytes(self) -> int:
        """What the copy adds to the mbarrier's transaction count: the whole box."""
        return len(self.rows) * self.row_bytes

    def image(self, data: Bytes) -> Bytes:
        """The box as it arrives, before swizzle and padding: uint8[r, row_bytes], filled where outside the tensor.

        data: uint8[rows inside, inner_bytes], what lies at `addresses`.
        """
        result = _filled(self.tensor, len(self.rows), self.row_bytes)
        if not self.empty:
            if self.tensor.element.tf32:
                data = _rounded_to_tf32(data)
            if self.inside.all():
                result[:, self.first : self.last] = data
            else:
                result[self.inside, self.first : self.last] = data
        return result

    def cut(self, image: Bytes) -> Bytes:
        """The part of `image`, uint8[r, row_bytes], that lies in the tensor: uint8[rows inside, inner_bytes]."""
        return image[self.inside, self.first : max(self.last, self.first)]

    @property
    def margin_bytes(self) -> int:
        """Bytes behind the tensor's end, in each row inside, that copies out of shared memory write too."""
        return 0 if self.empty else -self.last % CHUNK_BYTES

    def margin(self, image: Bytes) -> tuple[Int64Array, Bytes]:
        """Those bytes of `image` by elements, at least a byte each: their addresses int64[n], uint8[n, each]."""
        each = max(self.tensor.element.bits // 8, 1)
        end = self.last + self.margin_bytes
        steps = np.arange(self.last, end, each, dtype=np.int64)
        addresses = (self.rows[self.inside][:, None] + steps).reshape(-1)
        return addresses, np.ascontiguousarray(image[self.inside, self.last : end]).reshape(-1, each)


def tile(tensor: TensorMap, coordinates: Sequence[int]) -> Box:
    """The box at `coordinates` (elements, one a dimension, dimension 0 first; may be negative).

    Raises:
        TensorMapError: the number of coordinates is not the rank, or the map is one that is not modelled.
    """
    if len(coordinates) != tensor.rank:
        raise TensorMapError(f"{len(coordinates)} coordinates for a tensor map of rank {tensor.rank}")
    _check_modelled(tensor)
    rows = np.zeros(1, np.int64)
    inside = np.ones(1, np.bool_)
    for dimension in range(1, tensor.rank):
        steps = np.arange(tensor.extent[dimension], dtype=np.int64) * tensor.element_strides[dimension]
        places = coordinates[dimension] + steps
        within = (places >= 0) & (places < tensor.sizes[dimension])
        rows = (places[:, None] * tensor.strides[dimension - 1] + rows).reshape(-1)
        inside = (within[:, None] & inside).reshape(-1)
    return _box(tensor, coordinates[0], rows, inside)


def gather4(tensor: TensorMap, coordinates: Sequence[int]) -> Box:
    """Four rows of a matrix in the modes tile::gather4 and tile::scatter4: {column, row 0, row 1, row 2, row 3}.

    The map's box is one row high; the rows may be any four, also the same one several times (PTX ISA 5.5.4.1).

    Raises:
        TensorMapError: not five coordinates, the map is no matrix of single-row boxes, or it is not modelled.
    """
    if len(coordinates) != 1 + GATHERED_ROWS:
        raise TensorMapError(f"{len(coordinates)} coordinates where a column and {GATHERED_ROWS} rows belong")
    if tensor.rank != 2 or tensor.extent[1] != 1:
        raise TensorMapError(f"gather4 and scatter4 need a matrix and a box one row high, not {tensor}")
    _check_modelled(tensor)
    places = np.array(coordinates[1:], np.int64)
    inside = (places >= 0) & (places < tensor.sizes[1])
    return _box(tensor, coordinates[0], places * tensor.strides[0], inside)


def _check_modelled(tensor: TensorMap) -> None:
    if tensor.interleave_bytes:
        raise NotModelled(f"an interleaved layout: {tensor}")
    if tensor.im2col:
        raise TensorMapError(f"a copy in tile mode with an im2col map: {tensor}")


def _box(tensor: TensorMap, column: int, offsets: Int64Array, inside: NDArray[np.bool_]) -> Box:
    bits, row_bytes = tensor.element.bits, tensor.row_bytes
    if column * bits % 8:
        raise TensorMapError(f"the coordinate {column} of dimension 0 is no whole byte in {tensor}")
    start = column * bits // 8
    return Box(
        tensor=tensor,
        rows=tensor.address + start + offsets,
        inside=inside,
        row_bytes=row_bytes,
        first=min(max(-start, 0), row_bytes),
        last=max(min(tensor.sizes[0] * bits // 8 - start, row_bytes), 0),
    )


def _filled(tensor: TensorMap, rows: int, row_bytes: int) -> Bytes:
    if not tensor.nan_fill:
        return np.zeros((rows, row_bytes), np.uint8)
    return np.full((rows, row_bytes // 2), OUTSIDE_NAN, "<u2").view(np.uint8)


def _rounded_to_tf32(data: Bytes) -> Bytes:
    """float32 values as a load of them in TF32 leaves them."""
    bits = np.ascontiguousarray(data).view("<u4")
    odd = bits >> _TF32_DROPPED_BITS & 1
    half = np.uint32((1 << _TF32_DROPPED_BITS - 1) - 1)
    rounded = (bits + half + odd) >> _TF32_DROPPED_BITS << _TF32_DROPPED_BITS
    return np.where(np.isnan(bits.view("<f4")), np.uint32(TF32_NAN), rounded).astype("<u4").view(np.uint8)


@dataclass(frozen=True)
class Place:
    """Where a box lies in shared memory: `addresses` int64[pieces], each of `piece_bytes`, in the order of the image.

    A gap that no copy touches follows each piece of a padded type, and each row shorter than the swizzle's span.
    total_bytes: from the box's start to the end of its last row, gaps included.
    """

    addresses: Int64Array
    piece_bytes: int
    total_bytes: int


def place(tensor: TensorMap, rows: int, shared_address: int) -> Place:
    """Where the pieces of a box of `rows` rows lie that is copied to or from `shared_address` (unswizzled start)."""
    offsets, piece, total = _offsets(tensor, rows, shared_address % max(PATTERNS[tensor.swizzle].period_bytes, 1))
    return Place(offsets + shared_address, piece, total)


@lru_cache(maxsize=512)
def _offsets(tensor: TensorMap, rows: int, phase: int) -> tuple[Int64Array, int, int]:
    """(swizzled offsets from the box's start, bytes of a piece, bytes with gaps), for a start `phase` into the pattern.

    The offsets depend on the map only by few fields, but a kernel has few maps.
    """
    pattern = PATTERNS[tensor.swizzle]
    if tensor.element.padded:
        pitch, piece = _PADDED_CHUNKS[tensor.element]
        chunks = tensor.extent[0] // CHUNK_BYTES
    else:
        pitch = piece = pattern.piece_bytes
        chunks = tensor.row_bytes // piece
        if not pattern.flips:  # one run of bytes
            pitch = piece = rows * tensor.row_bytes
            rows = chunks = 1
    row_pitch = max(chunks * pitch, pattern.span_bytes)
    linear = np.arange(rows, dtype=np.int64)[:, None] * row_pitch + np.arange(chunks, dtype=np.int64) * pitch
    offsets = swizzled(linear.reshape(-1) + phase, tensor.swizzle) - phase
    offsets.setflags(write=False)
    return offsets, piece, rows * row_pitch


def pieces(image: Bytes, placed: Place) -> Bytes:
    """The image uint8[r, row_bytes] of a box as the pieces of `placed`: uint8[pieces, piece_bytes]."""
    return np.ascontiguousarray(image).reshape(-1, placed.piece_bytes)


def packed(tensor: TensorMap, rows: int, data: Bytes) -> Bytes:
    """The reverse of `pieces` for a copy out of shared memory: the image uint8[rows, row_bytes].

    data: uint8[pieces, piece_bytes], what lies at the place of the box; for 6-bit types see `store_place`.
    """
    if tensor.element is Element.B6X16_P32:
        return _without_top_bits(data).reshape(rows, tensor.row_bytes)
    return data.reshape(rows, tensor.row_bytes)


def store_place(tensor: TensorMap, rows: int, shared_address: int) -> Place:
    """`place` of the source of a copy out of shared memory.

    It differs for 6-bit elements: there a store takes each from a byte of its own (b6p2x16).

    Raises:
        TensorMapError: the type can't be stored (PTX ISA 9.7.9.27.1.1).
    """
    if tensor.element is Element.B4X16_P64:
        raise TensorMapError(f"b4x16_p64 elements can't be copied out of shared memory: {tensor}")
    placed = place(tensor, rows, shared_address)
    if tensor.element is Element.B6X16_P32:
        return Place(placed.addresses, CHUNK_BYTES, placed.total_bytes)
    return placed


def _without_top_bits(data: Bytes) -> Bytes:
    """Sixteen 6-bit elements, each in a byte, as 12 bytes: uint8[n, 16] -> uint8[n, 12]."""
    quads = data.reshape(-1, 4).astype(np.uint32) & 0x3F
    words = quads[:, 0] | quads[:, 1] << 6 | quads[:, 2] << 12 | quads[:, 3] << 18
    return words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1, 12)
