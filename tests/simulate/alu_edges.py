"""Operands where a rounding is decided by little: next to the smallest normal number, next to ties, and NaN.

Values are Fractions until they become bit patterns, so each operand is exactly what is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
# Bits in all, precision, exponents of the smallest and of the largest normal numbers
SHAPES = {
    "f16": (16, 11, -14, 15),
    "bf16": (16, 8, -126, 127),
    "f32": (32, 24, -126, 127),
    "f64": (64, 53, -1022, 1023),
}
TWO = Fraction(2)


def bits_of(value: Fraction, kind: str) -> int:
    """The pattern of a value that the format represents (ValueError otherwise)."""
    bits, precision, least, most = SHAPES[kind]
    magnitude = abs(value)
    exponent = least
    if magnitude:
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        exponent = max(exponent - (magnitude < TWO**exponent), least)
    scaled = magnitude / TWO ** (exponent - precision + 1)
    if scaled.denominator != 1 or exponent > most:
        raise ValueError(f"{value} is no {kind}")
    code = scaled.numerator + ((exponent - least) << (precision - 1))
    return code | ((value < 0) << (bits - 1))


def patterns(values: Iterable[Fraction], kind: str) -> Array:
    return np.array([bits_of(v, kind) for v in values], f"u{SHAPES[kind][0] // 8}")


def _factors(product: Fraction, kind: str, rng: random.Random) -> tuple[Fraction, Fraction] | None:
    """Two normal numbers whose product comes near `product`, None if these exponents have none."""
    _, precision, least, most = SHAPES[kind]
    one = 1 << (precision - 1)
    first = rng.randrange(one, 2 * one)
    wanted = abs(product) / first
    power = wanted.numerator.bit_length() - wanted.denominator.bit_length() - precision
    second = round(wanted / TWO**power)
    if second < one:
        power -= 1
        second = round(wanted / TWO**power)
    if second >= 2 * one:
        return None
    # first and second are whole: their exponents are precision - 1 below those of their values
    total = power + 2 * (precision - 1)
    low, high = max(least, total - most), min(most, total - least)
    if low > high:
        return None
    share = rng.randint(low, high)
    sign = rng.choice((1, -1))
    return sign * first * TWO ** (share - precision + 1), sign * (1 if product > 0 else -1) * second * TWO ** (
        total - share - precision + 1
    )


def near_smallest_normal(kind: str, addend: bool, count: int, seed: int = 0) -> list[Array]:
    """a, b (and c): a * b + c lies within some 2^-8 to 2^-60 of the smallest normal number, of both signs."""
    rng = random.Random(seed)
    _, precision, least, _ = SHAPES[kind]
    smallest = TWO**least
    rows: list[tuple[Fraction, ...]] = []
    while len(rows) < count:
        off = rng.choice((-1, -1, -1, 1)) * TWO ** -rng.randint(precision - 4, 2 * precision + 12)
        result = smallest * (1 + off * Fraction(rng.randint(4, 8), 4))
        c = Fraction(0)
        if addend and rng.random() < 0.8:
            steps = rng.choice((0, 0, rng.randint(0, 4), rng.randrange(1 << (precision - 1))))
            c = rng.choice((1, 1, -1)) * smallest * (1 + steps * TWO ** (1 - precision))
        pair = _factors(result - c, kind, rng) if result != c else None
        if pair is not None:
            sign = rng.choice((1, -1))
            rows.append((sign * pair[0], pair[1], sign * c))
    columns = [patterns(column, kind) for column in zip(*rows, strict=True)]
    return columns if addend else columns[:2]


def quotients_near_smallest_normal(count: int, seed: int = 0) -> list[Array]:
    """a, b: a / b lies next to the smallest normal float32."""
    rng = random.Random(seed)
    tops, bottoms = [], []
    for _ in range(count):
        bottom = rng.randrange(1 << 23, 1 << 24)
        top = bottom - rng.choice((1, 1, 2, 3, rng.randrange(64), -1))
        share = rng.randint(-120, -24)
        tops.append(rng.choice((1, -1)) * min(max(top, 1 << 23), (1 << 24) - 1) * TWO**share)
        bottoms.append(rng.choice((1, -1)) * bottom * TWO ** (share + 126))
    return [patterns(tops, "f32"), patterns(bottoms, "f32")]


def reciprocals_near_smallest_normal(count: int) -> list[Array]:
    """a: 1 / a lies next to the smallest normal float32."""
    steps = np.arange(count, dtype=np.uint32) // 2
    return [np.uint32(0x7E800000) - np.uint32(16) + steps + (np.arange(count, dtype=np.uint32) % 2 << np.uint32(31))]


def doubles_near_smallest_single(count: int, seed: int = 0) -> list[Array]:
    rng = random.Random(seed)
    values = []
    for _ in range(count):
        off = rng.choice((-1, -1, -1, 1)) * TWO ** -rng.randint(20, 30) * Fraction(rng.randint(4, 8), 4)
        values.append(rng.choice((1, -1)) * TWO**-126 * (1 + off))
    return [patterns(values, "f64")]


def next_to_ties(kind: str, count: int, seed: int = 0) -> list[Array]:
    """a, b, c: a * b lies halfway between two numbers and c is tiny or 0, or c is ordinary and a * b is half its last
    place, a little more or less."""
    rng = random.Random(seed)
    _, precision, least, most = SHAPES[kind]
    rows: list[tuple[Fraction, ...]] = []
    while len(rows) < count:
        sign = rng.choice((1, -1))
        if rng.random() < 0.6:
            width = rng.randint(2, precision - 1)
            a = rng.randrange(1 << (width - 1), 1 << width) | 1
            b = rng.randrange(1 << (precision + 1 - width), 1 << (precision + 2 - width)) | 1
            # Halfway if the product has one bit more than a number has, or if the numbers there are subnormal.
            exponent = rng.randint(max(least - precision, -60), min(most - 2 * precision, 20))
            share = rng.randint(-precision, 0)
            c = rng.choice((1, -1)) * TWO ** (least - precision + 1) * rng.choice((0, 1, 2, 47, 1 << (precision - 1)))
            row = (sign * a * TWO**share, b * TWO ** (exponent - share), c)
        else:
            exponent = rng.randint(least, min(most - precision, 20))
            c = sign * (rng.randrange(1 << precision) * TWO ** (exponent - precision + 1))
            share = rng.randint(-precision, 0)
            step = TWO ** (1 - precision)
            a = (1 + rng.randint(0, 2) * step) * TWO**share
            b = (1 + rng.randint(0, 2) * step) * TWO ** (exponent - precision - share)
            row = (rng.choice((1, -1)) * a, b, c)
        try:
            for value in row:
                bits_of(Fraction(value), kind)
        except ValueError:  # beyond the format's range
            continue
        rows.append(row)
    return [patterns(map(Fraction, column), kind) for column in zip(*rows, strict=True)]


def nans(kind: str) -> Array:
    """NaN of both signs, quiet and signalling, with payloads at every place that a narrower format could cut at."""
    bits, precision, _, _ = SHAPES[kind]
    quiet = 1 << (precision - 2)
    infinity = ((1 << (bits - 1)) - 1) ^ (2 * quiet - 1)
    ones = 2 * quiet - 1
    payloads = [quiet, quiet | 1, 1, quiet >> 1, quiet | (quiet >> 1), ones, ones ^ quiet, ones ^ 1]
    payloads += [quiet | (ones & 0x5A5A5A5A5A5A5A5A), (ones ^ quiet) & 0xA5A5A5A5A5A5A5A5]
    # What remains of 52 or 23 bits after a cut to 23, 10 or 7 bits may be nothing.
    places = {64: (28, 29, 41, 42, 44, 45), 32: (12, 13, 15, 16), 16: (2, 3, 5)}[bits]
    payloads += [1 << place for place in places]
    positive = [infinity | payload for payload in payloads]
    return np.array([*positive, *(p | (1 << (bits - 1)) for p in positive)], f"u{bits // 8}")


def with_nans(kinds: Sequence[str]) -> list[Array]:
    """Operands of which one is NaN, or the first two, or all."""
    tables = [nans(kind) for kind in kinds]
    ones = [bits_of(Fraction(1), kind) for kind in kinds]
    rows: list[list[int]] = []
    for place, table in enumerate(tables):
        rows += [[int(n) if k == place else one for k, one in enumerate(ones)] for n in table]
    if len(kinds) > 1:
        shifted = [np.roll(table, 5 * k) for k, table in enumerate(tables)]
        rows += [[int(a), int(b), *ones[2:]] for a, b in zip(shifted[0], shifted[1], strict=False)]
    if len(kinds) > 2:
        rows += [[int(n) for n in row] for row in zip(*shifted, strict=False)]
    rows += [ones] * (-len(rows) % 32)
    return [np.array(column, table.dtype) for column, table in zip(zip(*rows, strict=True), tables, strict=True)]
