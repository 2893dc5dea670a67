"""formats.py against a definition in fractions, and against torch where the two agree."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from tunekit.simulate.numbers.formats import FORMATS, decode, encode

# exponent bits, mantissa bits, bias, has infinity, has NaN: from the formats' definitions (OCP FP8 and MX, IEEE 754)
SHAPES = {
    "f16": (5, 10, 15, True, True),
    "bf16": (8, 7, 127, True, True),
    "e4m3": (4, 3, 7, False, True),
    "e5m2": (5, 2, 15, True, True),
    "e2m3": (2, 3, 1, False, False),
    "e3m2": (3, 2, 3, False, False),
    "e2m1": (2, 1, 1, False, False),
}
SMALL = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]


def value(pattern: int, name: str) -> Fraction | float:
    """A pattern's value: a Fraction, or an infinity or a NaN."""
    exponent_bits, mantissa_bits, bias, infinities, nans = SHAPES[name]
    sign = -1 if pattern >> (exponent_bits + mantissa_bits) else 1
    exponent = (pattern >> mantissa_bits) % 2**exponent_bits
    fraction = pattern % 2**mantissa_bits
    if exponent == 2**exponent_bits - 1:
        if infinities:
            return sign * math.inf if fraction == 0 else math.nan
        if nans and fraction == 2**mantissa_bits - 1:
            return math.nan
    if exponent == 0:
        return sign * Fraction(fraction, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(fraction, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


@cache
def finite_values(name: str) -> list[tuple[Fraction, int]]:
    """The non-negative finite values, ascending, each with its pattern."""
    exponent_bits, mantissa_bits, *_ = SHAPES[name]
    found = [(value(p, name), p) for p in range(2 ** (exponent_bits + mantissa_bits))]
    return [(v, p) for v, p in found if isinstance(v, Fraction)]


def rounded(x: Fraction, name: str, mode: str) -> int:
    """Pattern of x >= 0 after rounding by a search among all values; beyond the largest: that value's pattern + 1."""
    table = finite_values(name)
    at = bisect_right(table, x, key=lambda t: t[0])
    low = table[at - 1]
    step = table[-1][0] - table[-2][0]
    high = table[at] if at < len(table) else (table[-1][0] + step, table[-1][1] + 1)
    if low[0] == x or mode == "rz":
        return low[1]
    if mode == "away" or x >= high[0]:
        return high[1]
    if x - low[0] != high[0] - x:
        return low[1] if x - low[0] < high[0] - x else high[1]
    if mode == "rna":
        return high[1]
    return low[1] if low[1] % 2 == 0 else high[1]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_16_bit_pattern_decodes_exactly(name: str) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    got = decode(patterns, name)
    assert got.dtype == np.float32
    want = np.array([float(value(p, name)) for p in range(65536)])
    np.testing.assert_array_equal(got, want.astype(np.float32))
    assert np.signbit(got[0x8000]) and not np.signbit(got[0])
    theirs = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    theirs = theirs.view(torch.float16 if name == "f16" else torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(got, theirs)


@pytest.mark.parametrize("name", SMALL)
def test_every_small_pattern_decodes_exactly(name: str) -> None:
    bits = FORMATS[name].bits
    got = decode(np.arange(256, dtype=np.uint8), name)
    want = np.array([float(value(p % 2**bits, name)) for p in range(256)])
    np.testing.assert_array_equal(got.astype(np.float64), want)
    assert all(math.copysign(1, got[p]) == (-1 if p >> (bits - 1) else 1) for p in range(2**bits) if got[p] == 0)
    torch_type = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(name)
    if torch_type is not None:
        theirs = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch_type).to(torch.float32).numpy()
        np.testing.assert_array_equal(got, theirs)


def test_scales_decode() -> None:
    patterns = np.arange(256, dtype=np.uint8)
    powers = decode(patterns, "ue8m0")
    assert [float(v) for v in powers[:255]] == [2.0 ** (p - 127) for p in range(255)] and math.isnan(powers[255])
    unsigned = decode(patterns[:128], "ue4m3")
    np.testing.assert_array_equal(unsigned, decode(patterns[:128], "e4m3"))


def test_tf32_ignores_the_low_13_bits() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 1000, dtype=np.uint32)
    bits = bits[(bits >> 23) % 256 != 255]
    for pattern, got in zip(bits.tolist(), decode(bits, "tf32").tolist(), strict=True):
        assert got == float(np.array(pattern >> 13 << 13, np.uint32).view(np.float32))


def samples(name: str, rng: np.random.Generator) -> np.ndarray:
    """float32 values around every kind of boundary of a format: its values, the midpoints, and their neighbours."""
    table = finite_values(name)
    picked = table if len(table) < 200 else [table[i] for i in rng.integers(0, len(table) - 1, 120)] + table[:4]
    points = [v for v, _ in picked] + [(v + table[p + 1][0]) / 2 for v, p in picked if p + 1 < len(table)]
    top = table[-1][0]
    points += [top + (top - table[-2][0]) * Fraction(k, 4) for k in range(1, 9)]
    exact = np.array([float(p) for p in points if p < 2**128], np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))])
    wide = rng.standard_normal(200).astype(np.float32) * np.exp2(rng.integers(-30, 20, 200)).astype(np.float32)
    tiny = np.array([0.0, 1e-45, 1.1754944e-38, 3.4028235e38], np.float32)
    every = np.concatenate([near, np.abs(wide), tiny])
    every = every[np.isfinite(every)]
    return np.concatenate([every, -every])


@pytest.mark.parametrize("mode", ["rn", "rna", "rz", "rp", "rm"])
@pytest.mark.parametrize("name", [*SMALL, "f16", "bf16"])
def test_rounding_is_a_search_among_the_values(name: str, mode: str) -> None:
    f = FORMATS[name]
    x = samples(name, np.random.default_rng(7))
    table = finite_values(name)
    saturated = encode(x, name, mode, satfinite=True)
    free = encode(x, name, mode) if f.nan is not None else None
    in_double = encode(x.astype(np.float64), name, mode, satfinite=True)
    largest = table[-1][1]
    sign_bit = 1 << (f.bits - 1)
    for i, v in enumerate(x.tolist()):
        negative = math.copysign(1, v) < 0
        outward = (mode == "rp" and not negative) or (mode == "rm" and negative)
        search = {"rp": "away" if outward else "rz", "rm": "away" if outward else "rz"}.get(mode, mode)
        want = rounded(abs(Fraction(v)), name, search)
        sign = sign_bit if negative else 0
        assert saturated[i] == min(want, largest) | sign, (v, mode)
        assert in_double[i] == saturated[i]
        if free is not None:
            if want > largest:
                want = largest if search == "rz" else f.infinity if f.infinity is not None else f.nan
            assert free[i] == want | sign, (v, mode)


@pytest.mark.parametrize("name", ["f16", "bf16", *SMALL])
def test_what_decodes_encodes_back(name: str) -> None:
    f = FORMATS[name]
    patterns = np.arange(1 << f.bits, dtype=f.dtype)
    values = decode(patterns, name)
    real = ~np.isnan(values)
    for mode in ("rn", "rna", "rz", "rp", "rm"):
        saturate = f.nan is None
        np.testing.assert_array_equal(encode(values, name, mode, satfinite=saturate)[real], patterns[real])
    if f.nan is not None:
        assert set(encode(values, name)[~real].tolist()) == {f.nan}


def test_nearest_agrees_with_torch() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:65536] = np.arange(65536, dtype=np.uint32) << 16 | 0x8000  # every tie of bf16
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    theirs = torch.from_numpy(x.copy())
    for name, torch_type in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        want = theirs.to(torch_type).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(encode(x, name), want)
    small = np.concatenate([x[np.abs(x) < 400], rng.standard_normal(50_000).astype(np.float32)])
    theirs = torch.from_numpy(small.copy())
    np.testing.assert_array_equal(encode(small, "e4m3"), theirs.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    np.testing.assert_array_equal(encode(small, "e5m2"), theirs.to(torch.float8_e5m2).view(torch.uint8).numpy())


def test_doubles_are_rounded_once() -> None:
    # just above a tie: a step through float32 would land on the tie and go down to even
    x = np.array([1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-11 + 2.0**-40])
    assert encode(x, "bf16")[0] == 0x3F81
    assert encode(x, "f16")[1] == 0x3C01


def test_tf32_rounds_to_ten_bits_of_mantissa() -> None:
    x = np.array([1 + 2.0**-11, 1 + 2.0**-10 + 2.0**-11, -(1 + 2.0**-11), 3.4028235e38], np.float32)
    one, last = 0x3F800000, 0x2000
    assert encode(x, "tf32", "rna").tolist() == [one + last, one + 2 * last, 0x80000000 | (one + last), 0x7F800000]
    assert encode(x, "tf32", "rn").tolist() == [one, one + 2 * last, 0x80000000 | one, 0x7F800000]
    assert encode(x, "tf32", "rz").tolist() == [one, one + last, 0x80000000 | one, 0x7F7FE000]
    assert encode(x, "tf32", "rna", satfinite=True)[3] == 0x7F7FE000
    assert encode(np.float32(np.nan), "tf32", "rna") == 0x7FFFE000


def test_saturation_nan_and_relu() -> None:
    x = np.array([np.inf, -np.inf, np.nan, -np.nan, -1.0, -0.0], np.float32)
    assert encode(x, "e4m3", satfinite=True).tolist() == [0x7E, 0xFE, 0x7F, 0x7F, 0xB8, 0x80]
    assert encode(x, "e5m2", satfinite=True).tolist() == [0x7B, 0xFB, 0x7F, 0x7F, 0xBC, 0x80]
    assert encode(x, "e4m3").tolist()[:2] == [0x7F, 0xFF]
    assert encode(x, "e5m2").tolist()[:2] == [0x7C, 0xFC]
    assert encode(x, "e2m1", satfinite=True).tolist() == [7, 15, 7, 7, 10, 8]
    assert encode(x, "e4m3", satfinite=True, relu=True).tolist() == [0x7E, 0, 0x7F, 0x7F, 0, 0]
    assert encode(x, "bf16", relu=True).tolist() == [0x7F80, 0, 0x7FFF, 0x7FFF, 0, 0]
    assert encode(x, "bf16", satfinite=True).tolist() == [0x7F7F, 0xFF7F, 0x7FFF, 0x7FFF, 0xBF80, 0x8000]
    with pytest.raises(ValueError, match="satfinite"):
        encode(x, "e2m1")
    with pytest.raises(ValueError, match="rounding"):
        encode(x, "bf16", "rx")


def test_powers_of_two() -> None:
    x = np.array([1.0, 1.5, -1.5, 2.0**-127, 1.5 * 2.0**-127, 1e-45, 0.0, 3e38, np.inf, np.nan], np.float32)
    assert encode(x, "ue8m0", "rz").tolist() == [127, 127, 127, 0, 0, 0, 0, 254, 255, 255]
    assert encode(x, "ue8m0", "rp").tolist() == [127, 128, 128, 0, 1, 0, 0, 255, 255, 255]
    assert encode(x, "ue8m0", "rp", satfinite=True).tolist() == [127, 128, 128, 0, 1, 0, 0, 254, 254, 255]
    with pytest.raises(ValueError, match="ue8m0"):
        encode(x, "ue8m0", "rn")


def test_shapes_are_kept() -> None:
    x = np.ones((2, 3, 4), np.float32)
    for name in FORMATS:
        bits = encode(x, name, "rz", satfinite=True)
        assert bits.shape == x.shape and bits.dtype == FORMATS[name].dtype
        np.testing.assert_array_equal(decode(bits, name), x)
        assert np.shape(encode(np.float32(1), name, "rz", satfinite=True)) == ()
        assert np.shape(decode(np.uint8(1), name)) == ()
