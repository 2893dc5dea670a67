"""Tensor maps as bits: the 128-byte TMA descriptor, decoded and encoded (PTX ISA 5.5.8 leaves it opaque).

The layout was found by experiment, from descriptors that the driver's ``cuTensorMapEncode*`` functions made on an
H200 (CUDA 13.0) and those that CuTeDSL 4.8.1's host code writes bit by bit, the same for sm_90a and sm_100a. Sixteen
little-endian words of 64 bits:

    word 0   bits 4-56   global address / 16
    word 1   bit 0       im2col
             bit 1       set by CuTeDSL, not by the driver     bits 4-6    rank - 1
             bits 7-10   element type                          bit 16      of it: rounded to TF32
             bits 11-12  interleave: none, 16, 32 bytes        bits 13-14  swizzle span: none, 32, 64, 128 bytes
             bits 19-20  swizzle atom: 16, 32, 32 with flip, 64 bytes (seen from CuTeDSL only: Hopper knows no other)
             bit 15      out of bounds is NaN                  bits 17-18  L2 promotion: none, 64, 128, 256 bytes
             bit 21      set by CuTeDSL if the tensor spans 128 KiB or more, not by the driver
             bits 32-63  stride of dimension 1 / 16
    word 2   strides of dimensions 2 and 3 / 16, 32 bits each
    word 3   bits 0-31   stride of dimension 4 / 16            bits 32-47  bits 36-39 of the four strides
    word 4   sizes - 1 of dimensions 0 and 1, 32 bits each     word 5      of dimensions 2 and 3
    word 6   bits 0-31   size - 1 of dimension 4               bits 32-46  element strides - 1, 3 bits each
             bits 56-63  box size - 1 of dimension 0 (im2col: channels - 1)
    word 7   tiled       box sizes - 1 of dimensions 1 to 4, 8 bits each
             im2col      lower corner in bits 0-15, upper in bits 16-31, signed, 16 bits if there is one dimension
                         between channels and batch, 8 each for two, 5 each for three; pixels - 1 in bits 32-41
    word 8   bytes of the box, word 9 the alignment that the swizzle needs in shared memory; the others 0. Written by
             the driver alone, so nothing here reads them: CuTeDSL leaves the second half of the descriptor undefined
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from tunekit.simulate.tma.swizzle import PATTERNS, Swizzle
from tunekit.simulate.tma.tensor_map import Element, Im2col, TensorMap, TensorMapError

Key = TypeVar("Key")
Value = TypeVar("Value")

BYTES = 128
MAX_RANK = 5
ADDRESS_MASK = ((1 << 57) - 1) & ~15
LARGE_TENSOR_BYTES = 128 * 1024

_HALF = struct.Struct("<8Q")
_WORDS = struct.Struct("<16Q")
_SWIZZLE_BITS = {  # (span, atom)
    Swizzle.NONE: (0, 0),
    Swizzle.B32: (1, 0),
    Swizzle.B64: (2, 0),
    Swizzle.B128: (3, 0),
    Swizzle.B128_ATOM_32B: (3, 1),
    Swizzle.B128_ATOM_32B_FLIP_8B: (3, 2),
    Swizzle.B128_ATOM_64B: (3, 3),
}
_SWIZZLES = {bits: swizzle for swizzle, bits in _SWIZZLE_BITS.items()}
_ELEMENTS = {(element.code, element.tf32): element for element in Element}
_INTERLEAVE_BYTES = (0, 16, 32)
_L2_PROMOTION_BYTES = (0, 64, 128, 256)
_CORNER_BITS = {3: 16, 4: 8, 5: 5}  # of each dimension of an im2col corner, by rank
# Bits of known meaning, in the words where that is not all of them.
_KNOWN_BITS = {
    0: ADDRESS_MASK,
    1: 0xFFFF_FFFF_003F_FFF3,
    3: 0x0000_FFFF_FFFF_FFFF,
    6: 0xFF00_7FFF_FFFF_FFFF,
    7: 0x0000_03FF_FFFF_FFFF,
}


class Writer(enum.Enum):
    """Who writes a descriptor: the bits without a meaning for the copy tell them apart."""

    DRIVER = "cuTensorMapEncode* on an H200, CUDA 13.0"
    CUTEDSL = "CuTeDSL 4.8.1"


def decode(data: bytes) -> TensorMap:
    """The tensor map in `data` (64 bytes or more; what follows is ignored).

    Raises:
        TensorMapError: it has bits of unknown meaning, or values that none of its fields may have.
    """
    if len(data) < _HALF.size:
        raise TensorMapError(f"a tensor map has {BYTES} bytes, not {len(data)}")
    words = _HALF.unpack_from(data)
    if not any(words):
        raise TensorMapError(f"no tensor map: {_HALF.size} bytes of zeros")
    for index, known in _KNOWN_BITS.items():
        if words[index] & ~known:
            raise TensorMapError(
                f"no known tensor map: unknown bits {words[index] & ~known:#x} are set in word {index}"
            )
    rank = _bits(words[1], 4, 3) + 1
    im2col = bool(_bits(words[1], 0, 1))
    if rank > MAX_RANK:
        raise TensorMapError(f"no tensor map: its rank is {rank}, more than {MAX_RANK}")
    if im2col and rank not in _CORNER_BITS:
        raise TensorMapError(f"no tensor map: an im2col one of rank {rank}, less than 3")
    if not im2col and words[7] >> 32:
        raise TensorMapError(f"no known tensor map: a tiled one with bits {words[7]:#x} in word 7")
    low = (words[1] >> 32, words[2], words[2] >> 32, words[3])
    strides = ((_bits(part, 0, 32) | _bits(words[3], 32 + 4 * d, 4) << 32) << 4 for d, part in enumerate(low))
    sizes = (_bits(words[4 + d // 2], 32 * (d % 2), 32) + 1 for d in range(MAX_RANK))
    box = (_bits(words[6], 56, 8) + 1, *(1 if im2col else _bits(words[7], 8 * d, 8) + 1 for d in range(4)))
    return TensorMap(
        address=words[0],
        element=_known("element type", _ELEMENTS, (_bits(words[1], 7, 4), _bits(words[1], 16, 1))),
        sizes=tuple(sizes)[:rank],
        strides=tuple(strides)[: rank - 1],
        box=box[:rank],
        element_strides=tuple(_bits(words[6], 32 + 3 * d, 3) + 1 for d in range(rank)),
        swizzle=_known("swizzle", _SWIZZLES, (_bits(words[1], 13, 2), _bits(words[1], 19, 2))),
        interleave_bytes=_known("interleave", dict(enumerate(_INTERLEAVE_BYTES)), _bits(words[1], 11, 2)),
        l2_promotion_bytes=_L2_PROMOTION_BYTES[_bits(words[1], 17, 2)],
        nan_fill=bool(_bits(words[1], 15, 1)),
        im2col=_im2col(words[7], rank) if im2col else None,
    )


def _known(what: str, table: Mapping[Key, Value], code: Key) -> Value:
    if code not in table:
        raise TensorMapError(f"no known tensor map: {what} {code}")
    return table[code]


def _im2col(word: int, rank: int) -> Im2col:
    width, half = _CORNER_BITS[rank], 1 << _CORNER_BITS[rank] - 1

    def corner(low: int) -> tuple[int, ...]:
        values = (_bits(word, low + width * d, width) for d in range(rank - 2))
        return tuple((value ^ half) - half for value in values)

    return Im2col(corner(0), corner(16), _bits(word, 32, 10) + 1)


def encode(tensor: TensorMap, writer: Writer = Writer.DRIVER) -> bytes:
    """The 128 bytes of `tensor`, as `writer` would write them (what CuTeDSL leaves undefined is 0).

    Raises:
        TensorMapError: a field does not fit its bits.
    """
    for what, value, limit in _fields(tensor):
        if not 0 <= value < limit:
            raise TensorMapError(f"the {what} is {value}; it must be from 0 to {limit - 1} to be encoded")
    span, atom = _SWIZZLE_BITS[tensor.swizzle]
    missing = [0] * (MAX_RANK - tensor.rank)
    strides = [stride >> 4 for stride in tensor.strides] + missing
    sizes = [size - 1 for size in tensor.sizes] + missing
    words = [0] * 16
    words[0] = tensor.address
    words[1] = (
        int(tensor.im2col is not None)
        | (tensor.rank - 1) << 4
        | tensor.element.code << 7
        | _INTERLEAVE_BYTES.index(tensor.interleave_bytes) << 11
        | span << 13
        | int(tensor.nan_fill) << 15
        | tensor.element.tf32 << 16
        | _L2_PROMOTION_BYTES.index(tensor.l2_promotion_bytes) << 17
        | atom << 19
        | (strides[0] & 0xFFFFFFFF) << 32
    )
    words[2] = strides[1] & 0xFFFFFFFF | (strides[2] & 0xFFFFFFFF) << 32
    words[3] = strides[3] & 0xFFFFFFFF | _joined([stride >> 32 for stride in strides], 4) << 32
    words[4] = sizes[0] | sizes[1] << 32
    words[5] = sizes[2] | sizes[3] << 32
    words[6] = sizes[4] | _joined([step - 1 for step in tensor.element_strides], 3) << 32 | tensor.box[0] - 1 << 56
    if tensor.im2col is None:
        words[7] = _joined([size - 1 for size in tensor.box[1:]], 8)
    else:
        width = _CORNER_BITS[tensor.rank]
        lower, upper = (
            _joined([value & ((1 << width) - 1) for value in corner], width)
            for corner in (tensor.im2col.lower, tensor.im2col.upper)
        )
        words[7] = lower | upper << 16 | tensor.im2col.pixels - 1 << 32
    if writer is Writer.DRIVER:
        words[8] = _box_bytes(tensor)
        words[9] = PATTERNS[tensor.swizzle].period_bytes
    else:
        words[1] |= 1 << 1 | int(tensor.span_bytes >= LARGE_TENSOR_BYTES) << 21
    return _WORDS.pack(*words)


def _box_bytes(tensor: TensorMap) -> int:
    """The driver's account of a box. It rounds down where the copy itself rounds up, and strides dimension 0."""
    if tensor.im2col:
        return tensor.transaction_bytes
    elements = 1
    for size, step in zip(tensor.box, tensor.element_strides, strict=True):
        elements *= size // step
    return elements * tensor.element.bits // 8


def _fields(tensor: TensorMap) -> Iterator[tuple[str, int, int]]:
    """(name, value as encoded, limit) of every number that may be too large for its bits."""
    yield "address / 16", tensor.address >> 4, 1 << 53
    yield "rest of the address / 16", tensor.address % 16, 1
    yield "rank - 1", tensor.rank - 1, MAX_RANK
    for dimension in range(tensor.rank):
        yield f"size - 1 of dimension {dimension}", tensor.sizes[dimension] - 1, 1 << 32
        yield f"box size - 1 of dimension {dimension}", tensor.box[dimension] - 1, 1 << 8
        yield f"element stride - 1 of dimension {dimension}", tensor.element_strides[dimension] - 1, 1 << 3
    if tensor.im2col:
        yield "rank - 3 of an im2col map", tensor.rank - 3, 3
        yield "number of pixels - 1", tensor.im2col.pixels - 1, 1 << 10
        limit = 1 << _CORNER_BITS.get(tensor.rank, 1)
        for value in (*tensor.im2col.lower, *tensor.im2col.upper):
            yield f"corner {value} + {limit // 2}", value + limit // 2, limit
    for dimension, stride in enumerate(tensor.strides, start=1):
        yield f"stride / 16 of dimension {dimension}", stride >> 4, 1 << 36
        yield f"rest of the stride / 16 of dimension {dimension}", stride % 16, 1


def _bits(word: int, low: int, count: int) -> int:
    return (word >> low) & ((1 << count) - 1)


def _joined(values: Sequence[int], width: int) -> int:
    return sum(value << width * place for place, value in enumerate(values))
