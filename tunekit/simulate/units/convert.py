"""cvt between single numbers: integers, f16, bf16, tf32, f32 and f64 (PTX ISA 9.7.9, cvt).

A register may be wider than the type: sources give their low bits, results are sign- or zero-extended.
NaN is the canonical one but where the functions below say otherwise. What becomes of NaN, and that .ftz does nothing
to cvt.f16.f32, is as found on an H200; the ISA leaves most of it open.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from tunekit.simulate.machine.decode import TYPE_BITS, Decoder, Step, instruction
from tunekit.simulate.numbers.doubles import rounded_f64
from tunekit.simulate.numbers.formats import FORMATS, Array, decode, encode
from tunekit.simulate.numbers.ieee import (
    ROUNDINGS,
    Kernel,
    directed,
    flush_result,
    flushed,
    saturate,
    settle,
)
from tunekit.simulate.numbers.lanewise import At, Modifiers, lanewise, operands
from tunekit.simulate.ptx.module import Instruction, Operand
from tunekit.simulate.units.narrow import PACKED, pack_integers, packed

INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64))
FLOATS = ("f16", "bf16", "f32", "f64")
# Significant bits and bits of exponent: what a conversion loses is seen from these.
_PRECISION = {"f16": (11, 5), "bf16": (8, 8), "f32": (24, 8), "f64": (53, 11)}
_TO_INTEGER: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def cvt(i: Instruction, d: Decoder) -> Step:
    if i.modifiers[0] == "pack":
        return pack_integers(i, d)
    if any(name in PACKED for name in i.modifiers):
        return packed(i, d)
    m = Modifiers(i, d)
    from_, to = m.last(), m.last()
    operands(i, d, 2)
    if to == "tf32":
        return to_tf32(i, d, m, from_)
    if from_ not in (*INTEGERS, *FLOATS) or to not in (*INTEGERS, *FLOATS):
        raise d.unsupported("this pair of types")
    ftz, sat = m.take("ftz"), m.take("sat")
    if sat and "bf16" in (from_, to):
        raise d.unsupported(".sat with bf16")
    if ftz and "f32" not in (from_, to):
        raise d.unsupported(".ftz without f32")
    if from_ in INTEGERS:
        rounding = "" if to in INTEGERS else m.choose(ROUNDINGS)
        if sat and to in INTEGERS and _range(to)[0] <= _range(from_)[0] and _range(from_)[1] <= _range(to)[1]:
            raise d.unsupported(".sat where nothing can saturate")
        kernel = _integer_to_integer(from_, to, sat) if to in INTEGERS else _integer_to_float(from_, to, rounding, sat)
    elif to in INTEGERS:
        kernel = _float_to_integer(from_, to, m.choose(_TO_INTEGER), ftz)
    else:
        kernel = _float_to_float(d, m, from_, to, ftz, sat)
    m.end()
    return lanewise(kernel, _target(d, i.operands[0], to), _source(d, i.operands[1], from_))


def _view(type_: str, bits: int) -> str:
    """The view of a register of `bits` bits for a type: floats as patterns unless they are f32 or f64."""
    if type_ in ("f32", "f64"):
        return type_
    kind = "s" if type_[0] == "s" else "u"
    return f"{kind}{max(bits, 16)}"


def _source(d: Decoder, operand: Operand, type_: str) -> At:
    return _view(type_, d.width(operand) or TYPE_BITS[type_]), d.read(operand, type_, relaxed=type_ in INTEGERS)


def _target(d: Decoder, operand: Operand, type_: str) -> At:
    return _view(type_, d.width(operand) or TYPE_BITS[type_]), d.write(operand, type_, relaxed=type_ in INTEGERS)


def _dtype(type_: str) -> np.dtype[Any]:
    return np.dtype(f"{'i' if type_[0] == 's' else 'u'}{TYPE_BITS[type_] // 8}")


def _range(type_: str) -> tuple[int, int]:
    limits = np.iinfo(_dtype(type_))
    return int(limits.min), int(limits.max)


def _integer_to_integer(from_: str, to: str, sat: bool) -> Kernel:
    source, result = _dtype(from_), _dtype(to)
    (low, high), (least, most) = _range(from_), _range(to)

    def kernel(a: Array, out: Array) -> None:
        value = a.astype(source, copy=False)
        if sat:
            value = np.clip(value, max(low, least), min(high, most))
        out[...] = value.astype(result, copy=False)

    return kernel


def _wide(a: Array, type_: str, ftz: bool = False) -> Array:
    """A float operand as float64, exactly."""
    if type_ in ("f16", "bf16"):
        return decode(a, type_).astype(np.float64)
    if ftz and type_ == "f32":
        a = flushed(a)
        settle(a)
    return a.astype(np.float64)


def _float_to_integer(from_: str, to: str, rounding: str, ftz: bool) -> Kernel:
    """Values beyond the range give its ends. NaN gives 0, or the top bit alone if a 64-bit type is involved."""
    result = _dtype(to)
    least, most = _range(to)
    bits = TYPE_BITS[to]
    nan = 0 if from_ != "f64" and bits < 64 else 1 << (bits - 1)
    function = _TO_INTEGER[rounding]

    def kernel(a: Array, out: Array) -> None:
        value = function(_wide(a, from_, ftz))
        high, low, none = value >= float(most), value <= float(least), np.isnan(value)
        inside = np.where(high | low | none, 0.0, value).astype(np.uint64 if result.kind == "u" else np.int64)
        whole = inside.astype(result)
        whole[high] = most
        whole[low] = least
        whole[none] = np.array(nan, np.uint64).astype(result)
        out[...] = whole

    return kernel


def _sticky(a: Array) -> Array:
    """64-bit integers as float64 that any narrower format rounds right: lost bits leave a one in the last place."""
    negative = a < 0
    magnitude = np.where(negative, -a, a).astype(np.uint64)
    low = magnitude & np.uint64(0xFFF)
    kept = (magnitude - low) | ((low != 0).astype(np.uint64) << np.uint64(12))
    value = np.where(magnitude >> np.uint64(53) == 0, magnitude, kept).astype(np.float64)
    return np.where(negative, -value, value)


def _integer_to_float(from_: str, to: str, rounding: str, sat: bool) -> Kernel:
    source = _dtype(from_)

    def kernel(a: Array, out: Array) -> None:
        value = a.astype(source, copy=False)
        if to == "f64":
            result = value.astype(np.float64) if rounding == "rn" or source.itemsize < 8 else _each(value, rounding)
        elif to == "f32" and rounding == "rn":
            result = value.astype(np.float32)
        else:
            exact = _sticky(value.astype(np.int64) if source != np.uint64 else value)
            if to != "f32":
                out[...] = encode(saturate(exact) if sat else exact, to, rounding)
                return
            nearest = exact.astype(np.float32)
            result = directed(nearest, exact - nearest, rounding)
        out[...] = saturate(result) if sat else result

    return kernel


def _each(values: Array, rounding: str) -> Array:
    return np.array([rounded_f64(Fraction(v), rounding) if v else 0.0 for v in values.tolist()])


def _float_to_float(d: Decoder, m: Modifiers, from_: str, to: str, ftz: bool, sat: bool) -> Kernel:
    """NaN: from f64, and from f32 to f64 without .ftz, the sign and the upper bits of the payload stay, and it
    becomes quiet."""
    precision, range_ = _PRECISION[to]
    loses = precision < _PRECISION[from_][0] or range_ < _PRECISION[from_][1]
    integral = m.choose(_TO_INTEGER, "none") if from_ == to else "none"
    relu, satfinite = m.take("relu"), m.take("satfinite")
    # From bf16 a rounding is allowed where there is nothing to round.
    rounding = m.choose(ROUNDINGS) if loses else m.choose(ROUNDINGS, "rn") if from_ == "bf16" and to != from_ else "rn"
    if (relu or satfinite) and (
        from_ != "f32" or to not in ("f16", "bf16") or rounding not in ("rn", "rz") or ftz or sat
    ):
        raise d.unsupported(".relu and .satfinite belong to cvt.rn or .rz from f32 to f16 or bf16")
    function = _TO_INTEGER.get(integral)

    def kernel(a: Array, out: Array) -> None:
        if from_ == "f32" and to == "f16" and rounding == "rn" and not (ftz or sat or relu or satfinite):
            out[...] = encode(a, "f16")
            return
        value = _wide(a, from_, ftz and to != "f16")
        if function is not None:
            value = function(value)
        if sat:
            value = saturate(value)
        if to in ("f16", "bf16"):
            codes = encode(value, to, rounding, satfinite=satfinite, relu=relu)
            if from_ == "f64":
                nan = np.isnan(value)
                codes[nan] = _narrow_nan(value[nan], to)
            out[...] = codes
        elif to == "f64":
            out[...] = value
        else:
            nearest = value.astype(np.float32)
            result = nearest if rounding == "rn" else directed(nearest, value - nearest, rounding)
            if ftz:
                flush_result(result, lambda: value, rounding)
            out[...] = result
            if from_ != "f64":
                settle(out)

    if from_ == "f32" and to == "bf16" and rounding == "rn" and not ftz:
        return lambda a, out: _assign(out, encode(a, "bf16", satfinite=satfinite, relu=relu))
    if to == "f32" and from_ in ("f16", "bf16") and not (ftz or sat):
        return lambda a, out: _widened(a, from_, out)
    return kernel


def _narrow_nan(values: Array, format: str) -> Array:
    """The quiet NaN of a 16-bit format with the sign and the upper payload of float64 NaN."""
    f = FORMATS[format]
    bits = values.view(np.uint64)
    quiet = np.uint64((f.infinity or 0) | 1 << (f.mantissa_bits - 1))
    payload = (bits >> np.uint64(52 - f.mantissa_bits)) & np.uint64((1 << f.mantissa_bits) - 1)
    return ((bits >> np.uint64(63)) << np.uint64(15) | quiet | payload).astype(np.uint16)


def _assign(out: Array, value: Array) -> None:
    out[...] = value


def _widened(a: Array, from_: str, out: Array) -> None:
    out[...] = decode(a, from_)
    if from_ == "f16":
        settle(out)  # from bf16 it is a shift, and a NaN keeps its bits


def to_tf32(i: Instruction, d: Decoder, m: Modifiers, from_: str) -> Step:
    """NaN: .rna only cuts off its low bits, and .rna.satfinite then takes one from the last place, as it does with
    infinity (found on an H200: a NaN with a small payload becomes infinity, or finite)."""
    rounding, satfinite = m.choose(("rna", "rn", "rz")), m.take("satfinite")
    relu = rounding != "rna" and m.take("relu")
    m.end()
    if from_ != "f32":
        raise d.unsupported("this pair of types")

    def kernel(a: Array, out: Array) -> None:
        codes = encode(a, "tf32", rounding, satfinite=satfinite, relu=relu)
        if rounding == "rna":
            nan = np.isnan(a)
            codes[nan] = (a.view(np.uint32)[nan] & np.uint32(0xFFFFE000)) - np.uint32(0x2000 if satfinite else 0)
        out[...] = codes

    return lanewise(kernel, ("u32", d.write(i.operands[0], "b32")), ("f32", d.read(i.operands[1], "f32")))
