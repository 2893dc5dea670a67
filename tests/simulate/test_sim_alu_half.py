"""Half precision to the last bit, against fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import alu_edges as edges
import alu_reference as ref
import numpy as np
import pytest
from alu_lanes import float_corners, on_lanes

Array = np.ndarray[Any, Any]
READ: dict[str, Callable[[int], float]] = {"f16": ref.half, "bf16": ref.bfloat}
WRITE: dict[str, Callable[[float], int]] = {"f16": ref.half_bits, "bf16": ref.bfloat_bits}
SHAPE = {"f16": ref.HALF, "bf16": ref.BFLOAT}
OPERATIONS: dict[str, Callable[..., float]] = {
    "add": lambda a, b, shape, ftz: ref.add(a, b, "rn", shape, ftz),
    "sub": lambda a, b, shape, ftz: ref.add(a, -b, "rn", shape, ftz),
    "mul": lambda a, b, shape, ftz: ref.mul(a, b, "rn", shape, ftz),
    "fma": lambda a, b, c, shape, ftz: ref.fma(a, b, c, "rn", shape, ftz),
}


def patterns(format: str, seed: int, count: int = 256) -> Array:
    if format == "f16":
        return float_corners(count, seed, np.float16)
    return (float_corners(count, seed) >> np.uint32(16)).astype(np.uint16)


def wanted(operation: str, format: str, inputs: list[Array], flags: str = "") -> Array:
    shape = SHAPE[format]
    results = []
    for lane in zip(*(x.tolist() for x in inputs), strict=True):
        values = [READ[format](p) for p in lane]
        if "ftz" in flags:
            values = [ref.flush(v, shape) for v in values]
        result = OPERATIONS[operation](*values, shape, "ftz" in flags)
        if "sat" in flags:
            result = ref.saturate(result)
        if "relu" in flags and result <= 0:
            result = 0.0
        results.append(WRITE[format](result))
    return np.array(results, np.uint16)


@pytest.mark.parametrize("format", ["f16", "bf16"])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_arithmetic_rounds_once(operation: str, format: str) -> None:
    inputs = [patterns(format, k) for k in range(3 if operation == "fma" else 2)]
    letters = ", ".join(f"{{{c}}}" for c in "abc"[: len(inputs)])
    for flags in ("", ".ftz", ".sat", ".ftz.sat", ".relu"):
        if (flags == ".relu" and operation != "fma") or (format == "bf16" and flags not in ("", ".relu")):
            continue
        want = wanted(operation, format, inputs, flags)
        (got,) = on_lanes(f"{operation}.rn{flags}.{format} {{x}}, {letters};", inputs, "b16")
        np.testing.assert_array_equal(got, want)
        pairs = [x.view(np.uint32) for x in inputs]
        (got,) = on_lanes(f"{operation}.rn{flags}.{format}x2 {{x}}, {letters};", pairs)
        np.testing.assert_array_equal(got.view(np.uint16), want)


@pytest.mark.parametrize("format", ["f16", "bf16"])
def test_fma_near_the_middle_of_two_values(format: str) -> None:
    """c plus a product of half its last place, or a trifle more or less."""
    rng = np.random.default_rng(4)
    precision = SHAPE[format][0]
    c = 1 + rng.integers(0, 2 ** (precision - 1), 512) * 2.0 ** (1 - precision)
    a = 1 + rng.integers(-1, 2, 512) * 2.0 ** (1 - precision)
    b = 2.0**-precision * (1 + rng.integers(-1, 2, 512) * 2.0 ** (1 - precision)) * rng.choice([-1, 1], 512)
    inputs = [np.array([WRITE[format](float(v)) for v in x], np.uint16) for x in (a, b, c)]
    (got,) = on_lanes(f"fma.rn.{format} {{x}}, {{a}}, {{b}}, {{c}};", inputs, "b16")
    np.testing.assert_array_equal(got, wanted("fma", format, inputs))


@pytest.mark.parametrize("format", ["f16", "bf16"])
@pytest.mark.parametrize("flags", ["", ".relu", ".sat", ".ftz"])
def test_fma_next_to_ties(format: str, flags: str) -> None:
    """A product that lies halfway, with an addend too small for float64 to hold beside it, and other near misses."""
    if format == "bf16" and flags in (".sat", ".ftz"):
        pytest.skip("bf16 has neither")
    for seed in range(2):
        inputs = edges.next_to_ties(format, 512, seed)
        want = wanted("fma", format, inputs, flags)
        (got,) = on_lanes(f"fma.rn{flags}.{format} {{x}}, {{a}}, {{b}}, {{c}};", inputs, "b16")
        np.testing.assert_array_equal(got, want)
        pairs = [x.view(np.uint32) for x in inputs]
        (got,) = on_lanes(f"fma.rn{flags}.{format}x2 {{x}}, {{a}}, {{b}}, {{c}};", pairs)
        np.testing.assert_array_equal(got.view(np.uint16), want)
    example = [np.full(32, v, np.uint16) for v in (0xAA10, 0x3DCC, 0x2F)]
    (got,) = on_lanes("fma.rn.bf16 {x}, {a}, {b}, {c};", example, "b16")
    assert set(got.tolist()) == {0xA865}  # measured on an H200


@pytest.mark.parametrize("format", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes(name: str, format: str) -> None:
    a, b = patterns(format, 5), patterns(format, 6)
    b[:100] = a[:100] ^ np.uint16(0x8000)

    def pick(x: float, y: float, strict: bool) -> float:
        if math.isnan(x) or math.isnan(y):
            return math.nan if strict or (math.isnan(x) and math.isnan(y)) else (y if math.isnan(x) else x)
        first = (x, ref.sign(x)) <= (y, ref.sign(y))
        return x if first == (name == "min") else y

    for nan in ("", ".NaN"):
        rows = zip(a.tolist(), b.tolist(), strict=True)
        want = [WRITE[format](pick(READ[format](p), READ[format](q), bool(nan))) for p, q in rows]
        (got,) = on_lanes(f"{name}{nan}.{format} {{x}}, {{a}}, {{b}};", [a, b], "b16")
        assert got.tolist() == want
        (got,) = on_lanes(f"{name}{nan}.{format}x2 {{x}}, {{a}}, {{b}};", [a.view(np.uint32), b.view(np.uint32)])
        assert got.view(np.uint16).tolist() == want
    (got,) = on_lanes(f"{name}.xorsign.abs.{format} {{x}}, {{a}}, {{b}};", [a, b], "b16")
    for p, q, r in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        result = pick(READ[format](p & 0x7FFF), READ[format](q & 0x7FFF), False)
        if not math.isnan(result):
            assert r == WRITE[format](result) | (p ^ q) & 0x8000


@pytest.mark.parametrize("format", ["f16", "bf16"])
def test_signs(format: str) -> None:
    a = patterns(format, 7)
    real = [not math.isnan(READ[format](p)) for p in a.tolist()]
    (got,) = on_lanes(f"neg.{format} {{x}}, {{a}};", [a], "b16")
    np.testing.assert_array_equal(got, np.where(real, a ^ 0x8000, 0x7FFF))
    (got,) = on_lanes(f"abs.{format}x2 {{x}}, {{a}};", [a.view(np.uint32)])
    np.testing.assert_array_equal(got.view(np.uint16), np.where(real, a & 0x7FFF, 0x7FFF))
    if format == "f16":
        (got,) = on_lanes("neg.ftz.f16 {x}, {a};", [a], "b16")
        want = [ref.half_bits(-ref.flush(ref.half(p), ref.HALF)) for p in a.tolist()]
        np.testing.assert_array_equal(got, np.array(want, np.uint16))


def test_approximations() -> None:
    """ex2: the ISA bounds the error by 2^-9.9 (f16) and 2^-7 (bf16), relative; tanh: 2^-10.987 and 2^-8, absolute."""
    rng = np.random.default_rng(8)
    x = rng.uniform(-10, 10, 512)
    for format, ex2, ex2_error, tanh_error in (
        ("f16", "ex2.approx", 2.0**-9.9, 2.0**-10.9),
        ("bf16", "ex2.approx.ftz", 2.0**-7, 2.0**-8),
    ):
        a = np.array([WRITE[format](ref.rounded_float(float(v), SHAPE[format])) for v in x], np.uint16)
        values = np.array([READ[format](p) for p in a.tolist()])
        for suffix, size in (("", "b16"), ("x2", "b32")):
            operand = a if size == "b16" else a.view(np.uint32)
            (got,) = on_lanes(f"{ex2}.{format}{suffix} {{x}}, {{a}};", [operand], size)
            powers = np.array([READ[format](p) for p in got.view(np.uint16).tolist()])
            assert np.all(np.abs(powers - 2.0**values) <= ex2_error * 2.0**values)
            (got,) = on_lanes(f"tanh.approx.{format}{suffix} {{x}}, {{a}};", [operand], size)
            tangents = np.array([READ[format](p) for p in got.view(np.uint16).tolist()])
            assert np.all(np.abs(tangents - np.tanh(values)) <= tanh_error)


@pytest.mark.parametrize("format", ["f16", "bf16"])
def test_mixed_with_single_precision(format: str) -> None:
    a, b, c = patterns(format, 9), patterns(format, 10), float_corners(seed=11)
    rows = list(zip(*(x.tolist() for x in (a, b, c)), strict=True))
    for mode in ("rn", "rz"):
        (got,) = on_lanes(f"add.{mode}.f32.{format} {{x}}, {{a}}, {{b}};", [a, c])
        assert got.tolist() == [ref.single_bits(ref.add(READ[format](p), ref.single(r), mode)) for p, _, r in rows]
        (got,) = on_lanes(f"fma.{mode}.f32.{format} {{x}}, {{a}}, {{b}}, {{c}};", [a, b, c])
        want = [ref.single_bits(ref.fma(READ[format](p), READ[format](q), ref.single(r), mode)) for p, q, r in rows]
        assert got.tolist() == want
