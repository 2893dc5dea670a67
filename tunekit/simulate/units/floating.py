"""Floating-point instructions on f32 and f64 (PTX ISA 9.7.3).

The .approx forms are computed in double precision and rounded once, so they lie nearer to the exact result than the
errors that the ISA allows (ex2 2^-22.5 relative, rcp and sqrt 1 ulp, rsqrt 2^-22.9, lg2 2^-22.6, sin and cos 2^-20.9
absolute, tanh 2^-11 relative): a GPU's last bits differ from these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tunekit.simulate.machine.decode import Decoder, Step, instruction
from tunekit.simulate.numbers.doubles import exact_f64, quiet_f64
from tunekit.simulate.numbers.formats import Array
from tunekit.simulate.numbers.ieee import (
    ROUNDINGS,
    Kernel,
    add_f32,
    div_f32,
    flush,
    flushed,
    fma_f32,
    mul_f32,
    settle,
    sqrt_f32,
)
from tunekit.simulate.numbers.lanewise import Modifiers, straight, typed
from tunekit.simulate.ptx.module import Instruction

_SIGN = np.uint32(0x80000000)
_SIGN_64 = np.uint64(1 << 63)


@typed("add sub mul", "f32")
def binary_f32(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    ftz, sat, rounding = m.take("ftz"), m.take("sat"), m.choose(ROUNDINGS, "rn")
    m.end()
    kernel = mul_f32(rounding, ftz, sat) if i.opcode == "mul" else add_f32(i.opcode == "sub", rounding, ftz, sat)
    return straight(i, d, kernel, "f32", 2)


@typed("fma mad", "f32")
def fused_f32(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    ftz, sat, rounding = m.take("ftz"), m.take("sat"), m.choose(ROUNDINGS)
    m.end()
    return straight(i, d, fma_f32(rounding, ftz, sat), "f32", 3)


@typed("add sub mul fma mad div rcp sqrt", "f64")
def double(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    if i.opcode == "rcp" and m.take("approx"):
        if not m.take("ftz"):
            raise d.unsupported("rcp.approx.f64 exists with .ftz only")
        m.end()
        return straight(i, d, coarse_f64(lambda x: 1.0 / x), "f64", 1)
    optional = i.opcode in ("add", "sub", "mul")
    rounding = m.choose(ROUNDINGS, "rn") if optional else m.choose(ROUNDINGS)
    m.end()
    inputs = {"fma": 3, "mad": 3, "rcp": 1, "sqrt": 1}.get(i.opcode, 2)
    kernel = exact_f64({"mad": "fma", "rcp": "div"}.get(i.opcode, i.opcode), rounding)
    if i.opcode == "rcp":
        return straight(i, d, lambda a, out: kernel(np.ones_like(a), a, out), "f64", 1)
    return straight(i, d, kernel, "f64", inputs)


def coarse_f64(function: Callable[[Array], Array]) -> Kernel:
    """The rough .approx.ftz.f64 forms: they read and write the upper 32 bits of a double only.

    Their NaN is all ones there (found on an H200).
    """

    def kernel(a: Array, out: Array) -> None:
        upper = (a.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
        tiny = np.abs(upper) < np.finfo(np.float64).tiny
        result = function(np.where(tiny, np.copysign(0.0, upper), upper))
        result = np.where(np.abs(result) < np.finfo(np.float64).tiny, np.copysign(0.0, result), result)
        bits = result.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
        bits[np.isnan(result)] = 0x7FFFFFFF00000000
        out[...] = bits.view(np.float64)

    return kernel


@typed("div", "f32")
def div(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    ftz = m.take("ftz")
    rounding = m.choose((*ROUNDINGS, "approx", "full"))
    m.end()
    if rounding != "approx":
        return straight(i, d, div_f32("rn" if rounding == "full" else rounding, ftz), "f32", 2)
    exact = div_f32("rn", ftz)

    def kernel(a: Array, b: Array, out: Array) -> None:
        # a * (1 / b): where |b| lies above 2^126 the reciprocal is 0, so an infinite a gives NaN (ISA, div.approx).
        huge = np.abs(b) > np.float32(2.0**126)
        fresh = np.empty_like(out)
        exact(a, b, fresh)
        if huge.any():
            fresh[huge & np.isfinite(a)] = 0
            fresh[huge & np.isinf(a)] = np.nan
        out[...] = fresh
        settle(out)

    return straight(i, d, kernel, "f32", 2)


@cache
def approximate(name: str, ftz: bool) -> Kernel:
    """Functions of one float32, through float64."""
    functions: dict[str, Any] = {
        "rcp": np.reciprocal,
        "sqrt": np.sqrt,
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "ex2": np.exp2,
        "lg2": np.log2,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
    }
    function = functions[name]
    # Subnormal inputs of ex2, sin (to within its error), cos and tanh need no care for the result's sake except sin's.
    flushes_input = ftz and name != "ex2" and name != "cos"

    def kernel(a: Array, out: Array) -> None:
        x = (flushed(a) if flushes_input else a).astype(np.float64)
        if name == "rsqrt":
            result = np.where(x == 0, np.copysign(np.inf, x), function(x))
        else:
            result = function(x)
        out[...] = result
        if ftz:
            flush(out)
        settle(out)

    return kernel


@typed("rcp sqrt", "f32")
def root_or_reciprocal(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    ftz = m.take("ftz")
    rounding = m.choose((*ROUNDINGS, "approx"))
    m.end()
    if rounding == "approx":
        return straight(i, d, approximate(i.opcode, ftz), "f32", 1)
    if i.opcode == "sqrt":
        return straight(i, d, sqrt_f32(rounding, ftz), "f32", 1)
    quotient = div_f32(rounding, ftz)
    one = np.ones(32, np.float32)
    return straight(i, d, lambda a, out: quotient(one, a, out), "f32", 1)


@typed("rsqrt ex2 lg2 sin cos tanh", "f32")
def approximation(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    m.choose(("approx",))
    ftz = i.opcode != "tanh" and m.take("ftz")
    m.end()
    return straight(i, d, approximate(i.opcode, ftz), "f32", 1)


@typed("rsqrt", "f64")
def rsqrt_f64(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    m.choose(("approx",))
    ftz = m.take("ftz")
    m.end()

    def function(x: Array) -> Array:
        return np.where(x == 0, np.copysign(np.inf, x), 1.0 / np.sqrt(x))

    def kernel(a: Array, out: Array) -> None:
        out[...] = function(a)

    return straight(i, d, coarse_f64(function) if ftz else kernel, "f64", 1)


@typed("abs neg", "f32")
def sign_f32(i: Instruction, d: Decoder) -> Step:
    """NaN of either sign becomes the canonical one (found on an H200; the ISA leaves it open)."""
    m = Modifiers(i, d)
    m.last()
    ftz = m.take("ftz")
    m.end()
    function: Any = np.abs if i.opcode == "abs" else np.negative

    def kernel(a: Array, out: Array) -> None:
        function(flushed(a) if ftz else a, out)
        settle(out)

    return straight(i, d, kernel, "f32", 1)


@typed("abs neg", "f64")
def sign_f64(i: Instruction, d: Decoder) -> Step:
    """NaN keeps its sign and payload and becomes quiet (found on an H200; the ISA leaves it open)."""
    Modifiers(i, d).choose(("f64",))
    if len(i.modifiers) > 1:
        raise d.unsupported("modifiers on f64")
    absolute = i.opcode == "abs"

    def kernel(a: Array, out: Array) -> None:
        changed = a & ~_SIGN_64 if absolute else a ^ _SIGN_64
        out[...] = np.where(np.isnan(a.view(np.float64)), quiet_f64(a), changed)

    return straight(i, d, kernel, "b64", 1)


@typed("copysign", "f32 f64")
def copysign(i: Instruction, d: Decoder) -> Step:
    """The sign of a, the rest of b."""
    sign, type_ = (_SIGN, "b32") if i.modifiers == ("f32",) else (_SIGN_64, "b64")
    if len(i.modifiers) != 1:
        raise d.unsupported("modifiers on copysign")

    def kernel(a: Array, b: Array, out: Array) -> None:
        out[...] = (a & sign) | (b & ~sign)

    return straight(i, d, kernel, type_, 2)


@instruction("testp")
def testp(i: Instruction, d: Decoder) -> Step:
    test, type_ = i.modifiers
    if type_ not in ("f32", "f64"):
        raise d.unsupported("this type")
    smallest = np.finfo(np.float32 if type_ == "f32" else np.float64).tiny
    tests: dict[str, Callable[[Array], Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= smallest) | (x == 0)),
        "subnormal": lambda x: (np.abs(x) < smallest) & (x != 0),
    }
    chosen = tests[test]

    def kernel(a: Array, out: Array) -> None:
        out[...] = chosen(a)

    return straight(i, d, kernel, type_, 1, "pred")


@cache
def extreme_f32(largest: bool, nan: bool, ftz: bool, xorsign: bool = False, absolute: bool = False) -> Kernel:
    """min or max of two; -0 is less than +0. nan: a NaN input wins, else it loses."""
    operation: Any = {
        (True, False): np.fmax,
        (False, False): np.fmin,
        (True, True): np.maximum,
        (False, True): np.minimum,
    }[largest, nan]

    def kernel(a: Array, b: Array, out: Array) -> None:
        if ftz:
            a, b = flushed(a), flushed(b)
        signs = (a.view(np.uint32) ^ b.view(np.uint32)) & _SIGN if xorsign else None
        if xorsign or absolute:
            a, b = np.abs(a), np.abs(b)
        result = operation(a, b)
        if np.count_nonzero(result) != result.size:
            # Zeros compare equal: their signs are combined here.
            combine: Any = np.bitwise_and if largest else np.bitwise_or
            both = (a == 0) & (b == 0)
            bits = result.view(np.uint32)
            bits[both] = combine(a.view(np.uint32), b.view(np.uint32))[both]
        if signs is not None:
            result.view(np.uint32)[...] ^= signs
        out[...] = result
        settle(out)

    return kernel


@typed("min max", "f32")
def extreme(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    ftz, nan, xorsign, absolute = m.take("ftz"), m.take("NaN"), m.take("xorsign"), m.take("abs")
    m.end()
    inputs = len(i.operands) - 1
    allowed = {2: ((False, False), (True, True)), 3: ((False, False), (False, True))}
    if (xorsign, absolute) not in allowed.get(inputs, ()):
        raise d.unsupported("this combination of .abs, .xorsign and operands")
    kernel = extreme_f32(i.opcode == "max", nan, ftz, xorsign, absolute and not xorsign)
    if inputs == 2:
        return straight(i, d, kernel, "f32", 2)

    def of_three(a: Array, b: Array, c: Array, out: Array) -> None:
        first = np.empty_like(out)
        kernel(a, b, first)
        kernel(first, c, out)

    return straight(i, d, of_three, "f32", 3)


@typed("min max", "f64")
def extreme_f64(i: Instruction, d: Decoder) -> Step:
    """Of two NaN b is passed on, quiet (found on an H200)."""
    if i.modifiers != ("f64",):
        raise d.unsupported("modifiers on f64")
    largest = i.opcode == "max"
    operation: Any = np.fmax if largest else np.fmin
    combine: Any = np.bitwise_and if largest else np.bitwise_or

    def kernel(a: Array, b: Array, out: Array) -> None:
        result = operation(a, b)
        both = (a == 0) & (b == 0)
        bits = result.view(np.uint64)
        bits[both] = combine(a.view(np.uint64), b.view(np.uint64))[both]
        nan = np.isnan(result)
        bits[nan] = quiet_f64(b.view(np.uint64)[nan])
        out[...] = result

    return straight(i, d, kernel, "f64", 2)
