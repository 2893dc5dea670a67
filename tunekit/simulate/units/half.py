"""Half-precision instructions: f16, f16x2, bf16 and bf16x2, and sums that mix them with f32 (PTX ISA 9.7.4, 9.7.5).

Values are computed from bit patterns: widened exactly, computed in float32 (sums and products: its 24 bits are more
than twice the operands' plus two, so rounding twice rounds right) or float64 (fused multiply-add, where a bit that is
odd stands for what the sum lost), rounded back.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tunekit.simulate.machine.decode import Decoder, Step
from tunekit.simulate.numbers.formats import Array, decode, encode
from tunekit.simulate.numbers.ieee import ROUNDINGS, Kernel, add_f32, fma_f32, is_flushed, sticky_sum
from tunekit.simulate.numbers.lanewise import Modifiers, lanewise, operands, source, straight, target, typed
from tunekit.simulate.ptx.module import Instruction
from tunekit.simulate.units.floating import approximate, extreme_f32

HALVES = "f16 f16x2 bf16 bf16x2"
_SIGN = np.uint16(0x8000)
_EXPONENT = {"f16": np.uint16(0x7C00), "bf16": np.uint16(0x7F80)}


def flush(bits: Array, format: str) -> Array:
    """Subnormal patterns become zeros of their sign."""
    return np.where(bits & _EXPONENT[format] == 0, bits & _SIGN, bits)


# Zero in a float64 that lies halfway between two bf16 values, or that has fewer bits still.
_BELOW_HALFWAY = np.int64((1 << 44) - 1)


def fused_bf16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64 values of bf16, as patterns, rounded once to nearest."""
    product = a * b  # exact
    total = product + c
    if np.count_nonzero(total.view(np.int64) & _BELOW_HALFWAY) != np.count_nonzero(total):
        total = sticky_sum(product, c, total)
    single = total.astype(np.float32)
    if ((single.view(np.uint32) & 0xFFFF) == 0x8000).any():
        # float32 may have made a tie that there is not.
        return encode(total, "bf16")
    return encode(single, "bf16")


@cache
def arithmetic_kernel(operation: str, format: str, ftz: bool, sat: bool, relu: bool) -> Kernel:
    """add, sub, mul or fma on patterns. ftz (f16 only) flushes by the rule of ieee.is_flushed."""

    def kernel(*arrays: Array) -> None:
        *inputs, out = arrays
        if ftz:
            inputs = [flush(x, format) for x in inputs]
        values = [decode(x, format) for x in inputs]
        if operation == "fma" and format == "bf16":
            result = fused_bf16(*(v.astype(np.float64) for v in values))
        else:
            if operation == "fma":
                # Where this sum is inexact its terms lie so far apart that it cannot come near a halfway point.
                a, b, c = (v.astype(np.float64) for v in values)
                exact = a * b + c
            else:
                function: Any = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation]
                exact = function(*values)
            result = encode(exact, format)
            if ftz:
                result = np.where(is_flushed(exact, "rn", 11, 2.0**-14), result & _SIGN, result)
        if sat or relu:
            wide = decode(result, format)
            zero = ~(wide > 0) if sat else wide <= 0
            result = np.where(zero, np.uint16(0), result)
            if sat:
                result = np.where(wide > 1, encode(np.float32(1), format), result)
        out[...] = result

    return kernel


@typed("add sub mul fma", HALVES)
def arithmetic(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    format = type_.removesuffix("x2")
    if m.take("f32"):
        return mixed(i, d, m, format)
    ftz = format == "f16" and m.take("ftz")
    sat = format == "f16" and m.take("sat")
    relu = i.opcode == "fma" and m.take("relu")
    if i.opcode == "fma":
        m.choose(("rn",))
    else:
        m.choose(("rn",), "rn")
    m.end()
    if sat and relu:
        raise d.unsupported(".sat with .relu")
    kernel = arithmetic_kernel(i.opcode, format, ftz, sat, relu)
    return straight(i, d, kernel, type_, 3 if i.opcode == "fma" else 2)


def mixed(i: Instruction, d: Decoder, m: Modifiers, format: str) -> Step:
    """add.f32.bf16 d, a, c and fma.rn.f32.bf16 d, a, b, c: the narrow operands are widened first."""
    sat = m.take("sat")
    rounding = m.choose(ROUNDINGS) if i.opcode == "fma" else m.choose(ROUNDINGS, "rn")
    m.end()
    if i.modifiers[-1] != format or i.opcode == "mul":
        raise d.unsupported("mixed precision of this instruction")
    types = (format, format, "f32") if i.opcode == "fma" else (format, "f32")
    operands(i, d, len(types) + 1)
    wide = fma_f32(rounding, False, sat) if i.opcode == "fma" else add_f32(i.opcode == "sub", rounding, False, sat)

    def kernel(*arrays: Array) -> None:
        *narrow_, last, out = arrays
        wide(*(decode(x, format) for x in narrow_), last, out)

    sources = [source(d, operand, t) for operand, t in zip(i.operands[1:], types, strict=True)]
    return lanewise(kernel, target(d, i.operands[0], "f32"), *sources)


@typed("abs neg", HALVES)
def sign(i: Instruction, d: Decoder) -> Step:
    """NaN of either sign becomes the canonical one (found on an H200; the ISA leaves it open)."""
    m = Modifiers(i, d)
    type_ = m.last()
    format = type_.removesuffix("x2")
    ftz = format == "f16" and m.take("ftz")
    m.end()
    absolute = i.opcode == "abs"

    def kernel(a: Array, out: Array) -> None:
        if ftz:
            a = flush(a, format)
        nan = a & ~_SIGN > _EXPONENT[format]
        out[...] = np.where(nan, ~_SIGN, a & ~_SIGN if absolute else a ^ _SIGN)

    return straight(i, d, kernel, type_, 1)


@typed("min max", HALVES)
def extreme(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    format = type_.removesuffix("x2")
    ftz = format == "f16" and m.take("ftz")
    nan, xorsign, absolute = m.take("NaN"), m.take("xorsign"), m.take("abs")
    m.end()
    if xorsign != absolute:
        raise d.unsupported(".xorsign comes with .abs")
    wide = extreme_f32(i.opcode == "max", nan, False, xorsign)

    def kernel(a: Array, b: Array, out: Array) -> None:
        if ftz:
            a, b = flush(a, format), flush(b, format)
        result = np.empty(out.shape, np.float32)
        wide(decode(a, format), decode(b, format), result)
        out[...] = encode(result, format)

    return straight(i, d, kernel, type_, 2)


@typed("ex2 tanh", HALVES)
def approximation(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    format = type_.removesuffix("x2")
    m.choose(("approx",))
    # The ISA has ex2.approx.f16 without and ex2.approx.ftz.bf16 with .ftz, nothing else.
    ftz = i.opcode == "ex2" and format == "bf16"
    if ftz:
        m.choose(("ftz",))
    m.end()
    wide = approximate(i.opcode, False)

    def kernel(a: Array, out: Array) -> None:
        result = np.empty(out.shape, np.float32)
        wide(decode(flush(a, format) if ftz else a, format), result)
        bits = encode(result, format)
        out[...] = flush(bits, format) if ftz else bits

    return straight(i, d, kernel, type_, 1)
