"""Number formats of the tensor core and of cvt: bit patterns to float32 and back (PTX ISA 5.2.2, 5.2.3 and 9.7.9, cvt).

Widths and NaN patterns are PTX's: conversions make the canonical NaN, positive with all ones (f16 and bf16 0x7FFF,
e4m3 and e5m2 0x7F, ue8m0 0xFF; tf32 0x7FFFE000, as found on an H200). e2m1, e2m3 and e3m2 have neither NaN nor
infinity.
Formats under a byte take the low bits of a uint8; tf32 takes the upper 19 bits of a uint32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[Any]

CANONICAL_NAN = 0x7FFFFFFF
"""The float32 NaN that every single-precision operation produces."""


@dataclass(frozen=True)
class Format:
    """One format: `bits` are stored, of which the lowest `unused` are zero.

    infinity and nan are bit patterns, None where the format has none; nan is the canonical one.
    largest is the pattern of the largest finite value.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int
    infinity: int | None
    nan: int | None
    signed: bool = True
    unused: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The unsigned NumPy type that holds a pattern."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)

    @property
    def smallest_exponent(self) -> int:
        """Of the smallest normal value, which is also the one that subnormals are counted in."""
        return 1 - self.bias


FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("f16", 16, 5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
        Format("bf16", 16, 8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
        Format("tf32", 32, 8, 10, 127, 0x7F7FE000, 0x7F800000, 0x7FFFE000, unused=13),
        Format("e4m3", 8, 4, 3, 7, 0x7E, None, 0x7F),
        Format("e5m2", 8, 5, 2, 15, 0x7B, 0x7C, 0x7F),
        Format("e2m3", 6, 2, 3, 1, 0x1F, None, None),
        Format("e3m2", 6, 3, 2, 3, 0x1F, None, None),
        Format("e2m1", 4, 2, 1, 1, 0x7, None, None),
        Format("ue8m0", 8, 8, 0, 127, 0xFE, None, 0xFF, signed=False),
        Format("ue4m3", 7, 4, 3, 7, 0x7E, None, 0x7F, signed=False),
    )
}

ROUNDINGS = ("rn", "rna", "rz", "rp", "rm")


def decode(bits: ArrayLike, format: str) -> NDArray[np.float32]:
    """The values of `bits` in `format`, exactly. Any shape; bits above the format's width are ignored.

    A NaN comes back as a NaN: canonical for formats of a byte or less, with its payload for the wider ones.
    tf32: the lowest 13 bits are not looked at.
    """
    patterns = np.asarray(bits)
    if format == "bf16":
        shifted: NDArray[np.uint32] = np.left_shift(patterns, 16, dtype=np.uint32, casting="unsafe")
        return np.asarray(shifted).view(np.float32)
    if format == "f16":
        return patterns.astype(np.uint16, copy=False).view(np.float16).astype(np.float32)
    if format == "tf32":
        kept: NDArray[np.uint32] = np.bitwise_and(patterns, np.uint32(0xFFFFE000), dtype=np.uint32, casting="unsafe")
        return np.asarray(kept).view(np.float32)
    table = _table(format)
    found: NDArray[np.float32] = table[np.bitwise_and(patterns, len(table) - 1).astype(np.intp)]
    return found


@cache
def _table(name: str) -> NDArray[np.float32]:
    """Every value of a format of at most a byte."""
    f = FORMATS[name]
    patterns = np.arange(1 << f.bits, dtype=np.int64)
    if name == "ue8m0":
        values = np.ldexp(1.0, np.minimum(patterns, f.largest) - f.bias)
    else:
        magnitude = patterns & ((1 << (f.exponent_bits + f.mantissa_bits)) - 1)
        exponent = magnitude >> f.mantissa_bits
        fraction = magnitude & ((1 << f.mantissa_bits) - 1)
        significand = np.where(exponent > 0, fraction + (1 << f.mantissa_bits), fraction)
        values = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - f.bias - f.mantissa_bits)
        if f.infinity is not None:
            values[magnitude == f.infinity] = np.inf
        if f.signed:
            values[patterns != magnitude] *= -1.0
    table: NDArray[np.float32] = values.astype(np.float32)
    if f.nan is not None:
        first = f.nan if f.infinity is None else f.infinity + 1
        sign = 1 << (f.bits - 1) if f.signed else 0
        table.view(np.uint32)[(patterns & ~sign) >= first] = CANONICAL_NAN
    table.flags.writeable = False
    return table


def encode(
    values: ArrayLike, format: str, rounding: str = "rn", *, satfinite: bool = False, relu: bool = False
) -> Array:
    """`values` (float32 or float64, any shape) rounded once to `format`; returns patterns of the format's dtype.

    rounding: rn (ties to even), rna (ties away from zero), rz, rp, rm. What lies beyond the largest value becomes
    infinity, or NaN where there is none, unless `rounding` leads back to the largest; with satfinite it becomes the
    largest with the sign kept. NaN becomes the canonical NaN, and in e2m1, e2m3 and e3m2 the largest positive value.
    relu: what is negative becomes +0.

    ue8m0 holds powers of two from 2^-127: the sign is dropped, what is smaller becomes 2^-127, and only rz and rp
    exist. ue4m3 turns what is negative into 0. ValueError for a rounding or a saturation that the format lacks.
    """
    f = FORMATS[format]
    x = np.asarray(values)
    if x.dtype != np.float32 and x.dtype != np.float64:
        x = x.astype(np.float64)
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r} is not one of {', '.join(ROUNDINGS)}")
    if f.nan is None and not satfinite:
        raise ValueError(f"{format} has neither infinity nor NaN: it is encoded with satfinite only")
    if format == "ue8m0":
        return _encode_ue8m0(x, rounding, satfinite)
    if rounding == "rn" and not satfinite and not relu:
        if format == "bf16" and x.dtype == np.float32:
            return _nearest_bf16(x)
        if format == "f16":
            return _nearest_f16(x)
    nan = np.isnan(x)
    negative = np.signbit(x)
    magnitude = np.abs(x, dtype=np.float64)
    infinite = np.isinf(magnitude)
    codes = _round(np.where(nan | infinite, 0.0, magnitude), negative, f, rounding)
    over = codes > (f.largest >> f.unused)
    if satfinite:
        codes = np.where(over | infinite, f.largest >> f.unused, codes)
    else:
        beyond = (f.nan or 0 if f.infinity is None else f.infinity) >> f.unused
        towards_zero = {"rz": np.ones_like(over), "rp": negative, "rm": ~negative}.get(rounding, np.zeros_like(over))
        codes = np.where(over, np.where(towards_zero, f.largest >> f.unused, beyond), codes)
        codes = np.where(infinite, beyond, codes)
    result = codes << f.unused
    if f.signed:
        result = result | (negative.astype(np.int64) << (f.bits - 1))
    if relu or not f.signed:
        result = np.where(negative, 0, result)
    return np.where(nan, f.largest if f.nan is None else f.nan, result).astype(f.dtype)


def _round(magnitude: Array, negative: Array, f: Format, rounding: str) -> Array:
    """Magnitudes (finite float64) as codes: exponent and mantissa fields side by side, without bounds (int64).

    A code counts the representable magnitudes from zero, so a carry out of the mantissa needs no care.
    """
    _, exponent = np.frexp(magnitude)
    exponent = np.maximum(exponent.astype(np.int64) - 1, f.smallest_exponent)
    exponent = np.where(magnitude == 0, f.smallest_exponent, exponent)
    scaled = np.ldexp(magnitude, f.mantissa_bits - exponent)
    down = np.floor(scaled)
    if rounding == "rn":
        whole = np.rint(scaled)
    elif rounding == "rna":
        whole = down + (scaled - down >= 0.5)
    elif rounding == "rz":
        whole = down
    else:
        away = ~negative if rounding == "rp" else negative
        whole = np.where(away, np.ceil(scaled), down)
    return np.asarray(whole.astype(np.int64) + ((exponent - f.smallest_exponent) << f.mantissa_bits))


def _encode_ue8m0(x: Array, rounding: str, satfinite: bool) -> Array:
    if rounding not in ("rz", "rp"):
        raise ValueError(f"ue8m0 rounds by rz or rp, not {rounding}")
    magnitude = np.abs(x, dtype=np.float64)
    fraction, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))
    power = exponent.astype(np.int64) - 1
    if rounding == "rp":
        power += fraction > 0.5
    power = np.where(magnitude == 0, -127, power)
    codes = np.clip(power + 127, 0, 254 if satfinite else 255)
    codes = np.where(np.isinf(magnitude), 254 if satfinite else 255, codes)
    return np.where(np.isnan(magnitude), 255, codes).astype(np.uint8)


def _nearest_bf16(x: NDArray[np.float32]) -> Array:
    """Nearest-even by integers: half of the last place is added, and a tie then gives up its odd bit."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = np.asarray((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = 0x7FFF
    return rounded


def _nearest_f16(x: Array) -> Array:
    """NumPy rounds float32 and float64 to float16 once, to nearest even."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.asarray(x.astype(np.float16)).view(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        rounded[nan] = 0x7FFF
    return rounded
