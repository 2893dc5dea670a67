"""Integer arithmetic (PTX ISA 9.7.1) and extended precision (9.7.2). Video instructions are not modelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tunekit.simulate.machine.decode import TYPE_BITS, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.numbers.formats import Array
from tunekit.simulate.numbers.lanewise import Modifiers, keep, lanewise, operands, source, straight, target, typed
from tunekit.simulate.ptx.module import Instruction

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

INTEGERS = "u16 u32 u64 s16 s32 s64"
PAIRS = "u16x2 s16x2"


def signed_pair(a: Array) -> Array:
    """uint16[32, 2] seen as int16."""
    return a.view(np.int16)


@typed("add sub", f"{INTEGERS} {PAIRS}")
def add(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    if m.take("cc"):
        m.end()
        return with_carry(i, d, type_, carry_in=False, carry_out=True)
    saturating = type_ == "s32" and m.take("sat")
    m.end()
    operation: Any = np.add if i.opcode == "add" else np.subtract
    if type_ in PAIRS.split() and i.opcode == "sub":
        raise d.unsupported("this type")
    if saturating:

        def saturated(a: Array, b: Array, out: Array) -> None:
            out[...] = clamp(operation(a, b, dtype=np.int64), "s32")

        return straight(i, d, saturated, type_, 2)

    def kernel(a: Array, b: Array, out: Array) -> None:
        operation(a, b, out)

    return straight(i, d, kernel, type_, 2)


def clamp(values: Array, type_: str) -> Array:
    """int64 values limited to the range of an integer type of up to 32 bits."""
    bits = TYPE_BITS[type_]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    return np.asarray(np.clip(values, low, high))


class ConditionCode:
    """CC.CF of each lane: carry out of add, borrow out of sub."""

    def __init__(self, w: Warp) -> None:
        self.carry = np.zeros(32, np.bool_)


def with_carry(i: Instruction, d: Decoder, type_: str, *, carry_in: bool, carry_out: bool) -> Step:
    """add.cc, addc, sub.cc, subc."""
    if type_ not in ("u32", "s32", "u64", "s64"):
        raise d.unsupported("this type")
    operands(i, d, 3)
    type_ = f"b{TYPE_BITS[type_]}"
    view, o = target(d, i.operands[0], type_)
    (_, a), (_, b) = (source(d, x, type_) for x in i.operands[1:])
    subtract = i.opcode.startswith("sub")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        code = w.part(ConditionCode)
        values = getattr(w, view)
        x, y = values[a], values[b]
        entering = code.carry if carry_in else np.zeros(32, np.bool_)
        if subtract:
            part = x - y
            result = part - entering
            carry = (x < y) | (part < result)
        else:
            part = x + y
            result = part + entering
            carry = (part < x) | (result < part)
        keep(values[o], result, lanes)
        if carry_out:
            keep(code.carry, carry, lanes)
        return None

    return step


@instruction("addc", "subc")
def add_carry(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    carry_out = m.take("cc")
    m.end()
    return with_carry(i, d, type_, carry_in=True, carry_out=carry_out)


def product(a: Array, b: Array, type_: str, half: str) -> Array:
    """The lo or hi half, or the whole (wide), of the product of two integers of a type."""
    bits = TYPE_BITS[type_]
    if half == "lo":
        return np.multiply(a, b)
    if bits < 64:
        whole = np.multiply(a, b, dtype=np.int64 if type_[0] == "s" else np.uint64)
        return whole if half == "wide" else np.asarray(whole >> bits)
    return high_64(a, b)


def high_64(a: Array, b: Array) -> Array:
    """Upper 64 bits of a 128-bit product, from 32-bit halves; signed numbers correct the unsigned product."""
    x, y = a.view(np.uint64), b.view(np.uint64)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x_low, x_high, y_low, y_high = x & mask, x >> shift, y & mask, y >> shift
    middle = x_high * y_low + (x_low * y_low >> shift)
    other = x_low * y_high + (middle & mask)
    high = x_high * y_high + (middle >> shift) + (other >> shift)
    if a.dtype == np.int64:
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return np.asarray(high.view(a.dtype))


WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


@typed("mul", INTEGERS)
def mul(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_, half = m.last(), m.choose(("lo", "hi", "wide"))
    m.end()
    if half == "wide" and type_ not in WIDER:
        raise d.unsupported("this type")
    if half == "lo":
        return straight(i, d, lambda a, b, out: np.multiply(a, b, out), type_, 2)

    def kernel(a: Array, b: Array, out: Array) -> None:
        out[...] = product(a, b, type_, half)

    return straight(i, d, kernel, type_, 2, WIDER[type_] if half == "wide" else type_)


@typed("mad", INTEGERS)
def mad(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_, half = m.last(), m.choose(("lo", "hi", "wide"))
    if m.take("cc"):
        m.end()
        return mad_with_carry(i, d, type_, half, carry_in=False, carry_out=True)
    saturating = type_ == "s32" and half == "hi" and m.take("sat")
    m.end()
    return multiply_add(i, d, type_, half, lambda a, b: product(a, b, type_, half), saturating)


def multiply_add(i: Instruction, d: Decoder, type_: str, half: str, multiply: Any, saturating: bool) -> Step:
    if half == "wide" and type_ not in WIDER:
        raise d.unsupported("this type")
    result = WIDER[type_] if half == "wide" else type_
    operands(i, d, 4)

    def low(a: Array, b: Array, c: Array, out: Array) -> None:
        np.add(np.multiply(a, b), c, out)

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        if saturating:
            out[...] = clamp(multiply(a, b).astype(np.int64) + c, type_)
        else:
            np.add(multiply(a, b).astype(out.dtype, copy=False), c, out)

    sources = [source(d, x, t) for x, t in zip(i.operands[1:], (type_, type_, result), strict=True)]
    simple = i.opcode == "mad" and half == "lo"
    return lanewise(low if simple else kernel, target(d, i.operands[0], result), *sources)


def mad_with_carry(i: Instruction, d: Decoder, type_: str, half: str, *, carry_in: bool, carry_out: bool) -> Step:
    if TYPE_BITS[type_] < 32 or half == "wide":
        raise d.unsupported("this type")
    operands(i, d, 4)
    view, o = target(d, i.operands[0], type_)
    (_, a), (_, b), (_, c) = (source(d, x, type_) for x in i.operands[1:])
    unsigned = np.uint32 if TYPE_BITS[type_] == 32 else np.uint64

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        code = w.part(ConditionCode)
        values = getattr(w, view)
        entering = code.carry if carry_in else np.zeros(32, np.bool_)
        x = product(values[a], values[b], type_, half).astype(values[a].dtype, copy=False).view(unsigned)
        part = x + values[c].view(unsigned)
        result = part + entering
        carry = (part < x) | (result < part)
        keep(values[o], result.view(values[o].dtype), lanes)
        if carry_out:
            keep(code.carry, carry, lanes)
        return None

    return step


@instruction("madc")
def madc(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_, half, carry_out = m.last(), m.choose(("lo", "hi")), m.take("cc")
    m.end()
    return mad_with_carry(i, d, type_, half, carry_in=True, carry_out=carry_out)


def product_24(a: Array, b: Array, type_: str, half: str) -> Array:
    """The product of the lowest 24 bits: bits 31..0 (lo) or 47..16 (hi)."""
    unused = np.int64(40)
    wide = a.astype(np.int64) << unused, b.astype(np.int64) << unused
    if type_ == "s32":
        x, y = (v >> unused for v in wide)
    else:
        x, y = ((v.view(np.uint64) >> np.uint64(40)).view(np.int64) for v in wide)
    whole = x * y
    return np.asarray((whole >> 16 if half == "hi" else whole).astype(np.uint32).view(a.dtype))


@instruction("mul24", "mad24")
def multiply_24(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_, half = m.last(), m.choose(("lo", "hi"))
    if type_ not in ("u32", "s32"):
        raise d.unsupported("this type")
    if i.opcode == "mad24":
        saturating = type_ == "s32" and half == "hi" and m.take("sat")
        m.end()
        return multiply_add(i, d, type_, half, lambda a, b: product_24(a, b, type_, half), saturating)
    m.end()

    def kernel(a: Array, b: Array, out: Array) -> None:
        out[...] = product_24(a, b, type_, half)

    return straight(i, d, kernel, type_, 2)


@typed("div rem", INTEGERS)
def divide(i: Instruction, d: Decoder) -> Step:
    """Truncating. Division by zero is unspecified in the ISA: here the quotient is all ones, the remainder is a."""
    if len(i.modifiers) != 1:
        raise d.unsupported("modifiers on an integer division")
    quotient = i.opcode == "div"

    def kernel(a: Array, b: Array, out: Array) -> None:
        zero = b == 0
        x, y = np.abs(a), np.where(zero, a.dtype.type(1), np.abs(b))
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        # |INT_MIN| is INT_MIN, which is right again as an unsigned number.
        x, y = x.view(unsigned), y.view(unsigned)
        if quotient:
            result = (x // y).view(a.dtype)
            result = np.where((a < 0) != (b < 0), -result, result)
            result[zero] = np.array(-1).astype(a.dtype)
        else:
            result = (x % y).view(a.dtype)
            result = np.where(a < 0, -result, result)
            result[zero] = a[zero]
        out[...] = result

    return straight(i, d, kernel, i.modifiers[0], 2)


@typed("abs neg", "s16 s32 s64")
def sign(i: Instruction, d: Decoder) -> Step:
    if len(i.modifiers) != 1:
        raise d.unsupported("modifiers on an integer")
    operation: Any = np.abs if i.opcode == "abs" else np.negative
    return straight(i, d, lambda a, out: operation(a, out), i.modifiers[0], 1)


@typed("min max", f"{INTEGERS} {PAIRS}")
def extreme(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    relu = type_ in ("s16x2", "s32") and m.take("relu")
    m.end()
    operation: Any = np.maximum if i.opcode == "max" else np.minimum
    view = signed_pair if type_ == "s16x2" else None

    def kernel(a: Array, b: Array, out: Array) -> None:
        if view is not None:
            a, b, out = view(a), view(b), view(out)
        operation(a, b, out=out)
        if relu:
            np.maximum(out, 0, out=out)

    return straight(i, d, kernel, type_, 2)


@typed("sad", INTEGERS)
def sad(i: Instruction, d: Decoder) -> Step:
    if len(i.modifiers) != 1:
        raise d.unsupported("modifiers on sad")

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        out[...] = c + np.where(a < b, b - a, a - b)

    return straight(i, d, kernel, i.modifiers[0], 3)


def _extended(a: Array, bits: int, count: int, signed: bool) -> list[Array]:
    """`count` fields of `bits` bits of a uint32, lowest first, sign- or zero-extended to int64."""
    fields = [(a.astype(np.int64) >> (bits * k)) & ((1 << bits) - 1) for k in range(count)]
    return [(f ^ (1 << (bits - 1))) - (1 << (bits - 1)) for f in fields] if signed else fields


@instruction("dp4a", "dp2a")
def dot_product(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_b, type_a = m.last(), m.last()
    if {type_a, type_b} - {"u32", "s32"}:
        raise d.unsupported("this type")
    first = 0
    if i.opcode == "dp2a":
        first = 2 if m.choose(("lo", "hi")) == "hi" else 0
    m.end()
    bits, count = (8, 4) if i.opcode == "dp4a" else (16, 2)

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        xs = _extended(a, bits, count, type_a == "s32")
        ys = _extended(b, 8, 4, type_b == "s32")[first : first + count]
        total = c.astype(np.int64) + sum(x * y for x, y in zip(xs, ys, strict=True))
        out[...] = total.astype(np.uint32)

    return straight(i, d, kernel, "b32", 3)
