"""Counting, finding and moving fields of bits (the integer instructions of PTX ISA 9.7.1 that look at single bits)."""

from __future__ import annotations

import numpy as np

from tunekit.simulate.machine.decode import TYPE_BITS, Decoder, Step, instruction
from tunekit.simulate.numbers.formats import Array
from tunekit.simulate.numbers.lanewise import Modifiers, lanewise, operands, source, straight, target
from tunekit.simulate.ptx.module import Instruction


def _type(i: Instruction, d: Decoder, allowed: str) -> str:
    """The only modifier, one of `allowed`."""
    if len(i.modifiers) != 1 or i.modifiers[0] not in allowed.split():
        raise d.unsupported("this type")
    return i.modifiers[0]


def highest(a: Array) -> Array:
    """Position of the most significant one of unsigned numbers, -1 for zero (int64)."""
    upper = (a >> np.uint64(32)).astype(np.int64) if a.dtype == np.uint64 else np.zeros(a.shape, np.int64)
    lower = (a & a.dtype.type(0xFFFFFFFF)).astype(np.int64)
    # frexp is exact for 32-bit numbers: its exponent is the position plus one, and 0 for zero.
    in_upper, in_lower = (np.frexp(x.astype(np.float64))[1].astype(np.int64) for x in (upper, lower))
    return np.asarray(np.where(upper > 0, in_upper + 31, in_lower - 1))


@instruction("popc")
def popc(i: Instruction, d: Decoder) -> Step:
    def kernel(a: Array, out: Array) -> None:
        octets = a.view(np.uint8).reshape(len(a), -1)
        out[...] = np.unpackbits(octets, axis=1).sum(axis=1)

    return straight(i, d, kernel, _type(i, d, "b32 b64"), 1, "b32")


@instruction("clz")
def clz(i: Instruction, d: Decoder) -> Step:
    type_ = _type(i, d, "b32 b64")
    bits = TYPE_BITS[type_]

    def kernel(a: Array, out: Array) -> None:
        out[...] = bits - 1 - highest(a)

    return straight(i, d, kernel, type_, 1, "b32")


@instruction("bfind")
def bfind(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_, shift_amount = m.last(), m.take("shiftamt")
    m.end()
    if type_ not in ("u32", "s32", "u64", "s64"):
        raise d.unsupported("this type")
    top = TYPE_BITS[type_] - 1
    unsigned = np.uint32 if top == 31 else np.uint64

    def kernel(a: Array, out: Array) -> None:
        magnitude = np.where(a < 0, ~a, a).view(unsigned)
        found = highest(magnitude)
        if shift_amount:
            found = np.where(found < 0, found, top - found)
        out[...] = found.astype(np.uint32)

    return straight(i, d, kernel, type_, 1, "b32")


@instruction("brev")
def brev(i: Instruction, d: Decoder) -> Step:
    def kernel(a: Array, out: Array) -> None:
        octets = a.view(np.uint8).reshape(len(a), -1)
        reversed_ = np.packbits(np.unpackbits(octets, axis=1, bitorder="little"), axis=1, bitorder="big")
        # Reversed within each byte; the bytes change places too.
        out[...] = np.ascontiguousarray(reversed_[:, ::-1]).view(a.dtype)[:, 0]

    return straight(i, d, kernel, _type(i, d, "b32 b64"), 1)


def _field(i: Instruction, d: Decoder, type_: str, values: int) -> list[tuple[str, int]]:
    """Sources of bfe and bfi: `values` of the type, then position and length as u32."""
    operands(i, d, values + 3)
    types = [type_] * values + ["u32", "u32"]
    return [source(d, x, t) for x, t in zip(i.operands[1:], types, strict=True)]


def _ones(length: Array) -> Array:
    """A uint64 with the lowest `length` (0 to 64) bits set."""
    n = length.astype(np.uint64)
    full = ~np.uint64(0)
    return np.where(n >= 64, full, (np.uint64(1) << np.minimum(n, 63)) - np.uint64(1))


@instruction("bfe")
def bfe(i: Instruction, d: Decoder) -> Step:
    type_ = _type(i, d, "u32 s32 u64 s64")
    bits = TYPE_BITS[type_]
    signed = type_[0] == "s"

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        position, length = (b & 0xFF).astype(np.int64), (c & 0xFF).astype(np.int64)
        value = a.view(f"u{bits // 8}").astype(np.uint64)
        there = np.clip(np.minimum(length, bits - position), 0, bits)
        field = (value >> np.minimum(position, 63).astype(np.uint64)) & _ones(there)
        if signed:
            last = np.minimum(position + length - 1, bits - 1)
            sign = (value >> np.maximum(last, 0).astype(np.uint64)) & np.uint64(1)
            fill = (sign == 1) & (length > 0)
            field = np.where(fill, field | ~_ones(there), field)
        out[...] = field.astype(f"u{bits // 8}").view(out.dtype)

    return lanewise(kernel, target(d, i.operands[0], type_), *_field(i, d, type_, 1))


@instruction("bfi")
def bfi(i: Instruction, d: Decoder) -> Step:
    type_ = _type(i, d, "b32 b64")
    bits = TYPE_BITS[type_]

    def kernel(a: Array, b: Array, c: Array, length_of: Array, out: Array) -> None:
        position, length = (c & 0xFF).astype(np.int64), (length_of & 0xFF).astype(np.int64)
        there = np.clip(np.minimum(length, bits - position), 0, bits)
        shift = np.minimum(position, 63).astype(np.uint64)
        mask = _ones(there) << shift
        merged = (b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << shift) & mask)
        out[...] = merged.astype(out.dtype)

    return lanewise(kernel, target(d, i.operands[0], type_), *_field(i, d, type_, 2))


@instruction("fns")
def fns(i: Instruction, d: Decoder) -> Step:
    _type(i, d, "b32")

    def find(mask: int, base: int, offset: int) -> int:
        if base > 31:
            return 0xFFFFFFFF
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        places = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [place for place in places if mask >> place & 1]
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        lanes = zip(a.tolist(), b.tolist(), c.view(np.int32).tolist(), strict=True)
        out[...] = [find(mask, base, offset) for mask, base, offset in lanes]

    return straight(i, d, kernel, "b32", 3)


@instruction("szext")
def szext(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_, clamp = m.last(), m.choose(("clamp", "wrap")) == "clamp"
    m.end()
    if type_ not in ("u32", "s32"):
        raise d.unsupported("this type")

    def kernel(a: Array, b: Array, out: Array) -> None:
        n = (b & 0x1F).astype(np.uint64)
        low = ((np.uint64(1) << n) - np.uint64(1)).astype(np.uint32)
        result = a & low
        if type_ == "s32":
            sign = (n > 0) & ((a >> np.maximum(n.astype(np.int64) - 1, 0).astype(np.uint32)) & 1 == 1)
            result = np.where(sign, result | ~low, result)
        out[...] = np.where(b >= 32, a, result) if clamp else result

    return straight(i, d, kernel, "b32", 2)


@instruction("bmsk")
def bmsk(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.choose(("b32",))
    clamp = m.choose(("clamp", "wrap")) == "clamp"
    m.end()

    def kernel(a: Array, b: Array, out: Array) -> None:
        start, width = a.astype(np.uint64), b.astype(np.uint64)
        if clamp:
            start, width = np.minimum(start, np.uint64(32)), np.minimum(width, np.uint64(32))
        else:
            start, width = start & np.uint64(31), width & np.uint64(31)
        out[...] = (_ones(width) << start).astype(np.uint32)

    return straight(i, d, kernel, "b32", 2)
