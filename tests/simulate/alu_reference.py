"""IEEE arithmetic from its definition: exact fractions, rounded once."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

# Precision in bits, exponent of the last subnormal place, largest finite value
SINGLE = (24, -149, Fraction(2) ** 128 - Fraction(2) ** 104)
DOUBLE = (53, -1074, Fraction(2) ** 1024 - Fraction(2) ** 971)
HALF = (11, -24, Fraction(65504))
BFLOAT = (8, -133, Fraction(2) ** 128 - Fraction(2) ** 120)
Shape = tuple[int, int, Fraction]


def rounded(exact: Fraction, mode: str, shape: Shape, ftz: bool = False) -> float:
    """A nonzero fraction in one of the formats.

    ftz: 0 if it stays below the smallest normal number when the exponent has no lower bound.
    """
    precision, least, largest = shape
    if ftz:
        smallest = Fraction(2) ** (least + precision - 1)
        if abs(rounded(exact, mode, (precision, -5000, largest))) < smallest:
            return -0.0 if exact < 0 else 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = max(exponent - precision + 1, least)
    scaled = magnitude / Fraction(2) ** quantum
    whole = math.floor(scaled)
    rest = scaled - whole
    negative = exact < 0
    outward = (mode == "rp" and not negative) or (mode == "rm" and negative)
    if (mode == "rn" and (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2))) or (outward and rest):
        whole += 1
    value = whole * Fraction(2) ** quantum
    if value > largest:
        result = math.inf if mode == "rn" or outward else float(largest)
    else:
        result = float(value)
    return -result if negative else result


def sign(x: float) -> int:
    return -1 if math.copysign(1, x) < 0 else 1


def total(x: Fraction, y: Fraction, signs: set[int], mode: str, shape: Shape, ftz: bool = False) -> float:
    """x + y; `signs` are those of the two terms, which decide the sign of an exact zero."""
    if x + y:
        return rounded(x + y, mode, shape, ftz)
    if len(signs) == 1:
        return 0.0 * signs.pop()
    return -0.0 if mode == "rm" else 0.0


def add(a: float, b: float, mode: str = "rn", shape: Shape = SINGLE, ftz: bool = False) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    return total(Fraction(a), Fraction(b), {sign(a), sign(b)}, mode, shape, ftz)


def mul(a: float, b: float, mode: str = "rn", shape: Shape = SINGLE, ftz: bool = False) -> float:
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return rounded(Fraction(a) * Fraction(b), mode, shape, ftz)


def fma(a: float, b: float, c: float, mode: str = "rn", shape: Shape = SINGLE, ftz: bool = False) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan if math.isnan(a * b) else a * b + c
    if not math.isfinite(c):
        return c
    return total(Fraction(a) * Fraction(b), Fraction(c), {sign(a) * sign(b), sign(c)}, mode, shape, ftz)


def div(a: float, b: float, mode: str = "rn", shape: Shape = SINGLE, ftz: bool = False) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan
    if b == 0:
        return math.nan if a == 0 else math.inf * sign(a) * sign(b)
    if math.isinf(a) or math.isinf(b) or a == 0:
        return a / b
    return rounded(Fraction(a) / Fraction(b), mode, shape, ftz)


def sqrt(a: float, mode: str = "rn", shape: Shape = SINGLE) -> float:
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    # Enough bits of the root, with a last one that says whether more follow.
    x = Fraction(a) * Fraction(4) ** 1200
    root = math.isqrt(x.numerator * 4 // x.denominator)
    exact = root * root * x.denominator == x.numerator * 4
    value = Fraction(root if exact else 2 * root + 1, 2 if exact else 4) / Fraction(2) ** 1200
    return rounded(value, mode, shape)


def flush(x: float, shape: Shape = SINGLE) -> float:
    precision, least, _ = shape
    return math.copysign(0.0, x) if abs(x) < 2.0 ** (least + precision - 1) else x


def saturate(x: float) -> float:
    return 0.0 if math.isnan(x) or x <= 0 else min(x, 1.0)


def single(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def double(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def half(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def bfloat(bits: int) -> float:
    return single(bits << 16)


def single_bits(x: float) -> int:
    return 0x7FFFFFFF if math.isnan(x) else int(struct.unpack("<I", struct.pack("<f", x))[0])


def double_bits(x: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", x))[0])


def half_bits(x: float) -> int:
    return 0x7FFF if math.isnan(x) else int(struct.unpack("<H", struct.pack("<e", x))[0])


def bfloat_bits(x: float) -> int:
    return 0x7FFF if math.isnan(x) else single_bits(x) >> 16


def rounded_float(x: float, shape: Shape) -> float:
    return rounded(Fraction(x), "rn", shape) if x and math.isfinite(x) else x
