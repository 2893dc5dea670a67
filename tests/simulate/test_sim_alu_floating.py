"""f32, f64 and f32x2 arithmetic to the last bit, against fractions; approximations against their stated errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import alu_reference as ref
import numpy as np
import pytest
from alu_lanes import float_corners, on_lanes

MODES = ["rn", "rz", "rm", "rp"]
OPERATIONS: dict[str, Callable[..., float]] = {
    "add": ref.add,
    "sub": lambda a, b, mode, shape, ftz: ref.add(a, -b, mode, shape, ftz),
    "mul": ref.mul,
    "fma": ref.fma,
    "div": ref.div,
}


def wanted(
    operation: str, inputs: list[np.ndarray[Any, Any]], mode: str, ftz: bool = False, sat: bool = False
) -> np.ndarray[Any, Any]:
    """Bits of a float32 operation from its definition."""
    results = []
    for patterns in zip(*(x.tolist() for x in inputs), strict=True):
        values = [ref.single(p) for p in patterns]
        if ftz:
            values = [ref.flush(v) for v in values]
        result = OPERATIONS[operation](*values, mode, ref.SINGLE, ftz)
        results.append(ref.single_bits(ref.saturate(result) if sat else result))
    return np.array(results, np.uint32)


def close_calls(seed: int) -> list[np.ndarray[Any, Any]]:
    """a, b, c where a * b + c lies at, or a trifle beside, the middle between two float32 values."""
    rng = np.random.default_rng(seed)
    c = rng.standard_normal(512).astype(np.float32)
    half = np.spacing(np.abs(c)).astype(np.float64) / 2
    a = (1 + rng.integers(-2, 3, 512) * 2.0**-23).astype(np.float32)
    b = (half * rng.choice([-1.0, 1.0, 3.0], 512) * (1 + rng.integers(-2, 3, 512) * 2.0**-23)).astype(np.float32)
    tiny_c = (rng.integers(-9, 9, 512) * 2.0**-149).astype(np.float32)
    tiny_a = np.full(512, 2.0**-75, np.float32)
    tiny_b = (2.0**-75 * (1 + rng.integers(-2, 3, 512) * 2.0**-23) * rng.choice([-1.0, 1.0], 512)).astype(np.float32)
    parts = np.concatenate([a, tiny_a]), np.concatenate([b, tiny_b]), np.concatenate([c, tiny_c])
    return [x.view(np.uint32) for x in parts]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma", "div"])
def test_single_precision_rounds_once(operation: str, mode: str) -> None:
    inputs = [float_corners(seed=k) for k in range(3 if operation == "fma" else 2)]
    letters = ", ".join(f"{{{c}}}" for c in "abc"[: len(inputs)])
    (got,) = on_lanes(f"{operation}.{mode}.f32 {{x}}, {letters};", inputs)
    np.testing.assert_array_equal(got, wanted(operation, inputs, mode))
    if operation != "div":
        (got,) = on_lanes(f"{operation}.{mode}.ftz.sat.f32 {{x}}, {letters};", inputs)
        np.testing.assert_array_equal(got, wanted(operation, inputs, mode, ftz=True, sat=True))
    (got,) = on_lanes(f"{operation}.{mode}.ftz.f32 {{x}}, {letters};", inputs)
    np.testing.assert_array_equal(got, wanted(operation, inputs, mode, ftz=True))


@pytest.mark.parametrize("mode", MODES)
def test_fma_near_the_middle_of_two_values(mode: str) -> None:
    inputs = close_calls(5)
    (got,) = on_lanes(f"fma.{mode}.f32 {{x}}, {{a}}, {{b}}, {{c}};", inputs)
    want = wanted("fma", inputs, mode)
    np.testing.assert_array_equal(got, want)
    if mode == "rn":
        # These inputs do need care: rounding through float64 gets some of them wrong.
        a, b, c = (x.view(np.float32).astype(np.float64) for x in inputs)
        assert ((a * b + c).astype(np.float32).view(np.uint32) != want).any()


def test_default_rounding_is_nearest() -> None:
    a, b = float_corners(seed=1), float_corners(seed=2)
    for operation in ("add", "sub", "mul"):
        (got,) = on_lanes(f"{operation}.f32 {{x}}, {{a}}, {{b}};", [a, b])
        np.testing.assert_array_equal(got, wanted(operation, [a, b], "rn"))


@pytest.mark.parametrize("mode", MODES)
def test_pairs_are_two_single_operations(mode: str) -> None:
    inputs = [float_corners(512, seed=k) for k in range(3)]
    wide = [x.view(np.uint64) for x in inputs]
    for operation, count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
        letters = ", ".join(f"{{{c}}}" for c in "abc"[:count])
        for ftz in (False, True):
            suffix = ".ftz" if ftz else ""
            (got,) = on_lanes(f"{operation}.{mode}{suffix}.f32x2 {{x}}, {letters};", wide[:count], "b64")
            np.testing.assert_array_equal(got.view(np.uint32), wanted(operation, inputs[:count], mode, ftz=ftz))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma", "div"])
def test_double_precision_rounds_once(operation: str, mode: str) -> None:
    inputs = [float_corners(256, seed=k, dtype=np.float64) for k in range(3 if operation == "fma" else 2)]
    letters = ", ".join(f"{{{c}}}" for c in "abc"[: len(inputs)])
    (got,) = on_lanes(f"{operation}.{mode}.f64 {{x}}, {letters};", inputs, "b64")
    functions = {
        "add": ref.add,
        "sub": lambda a, b, m, s: ref.add(a, -b, m, s),
        "mul": ref.mul,
        "fma": ref.fma,
        "div": ref.div,
    }
    for k, patterns in enumerate(zip(*(x.tolist() for x in inputs), strict=True)):
        want = functions[operation](*map(ref.double, patterns), mode, ref.DOUBLE)
        value = ref.double(int(got[k]))
        assert (value == want and ref.sign(value) == ref.sign(want)) or (math.isnan(value) and math.isnan(want)), (
            patterns
        )


@pytest.mark.parametrize("mode", MODES)
def test_roots_and_reciprocals(mode: str) -> None:
    a = float_corners(512, seed=3)
    values = [ref.single(p) for p in a.tolist()]
    (got,) = on_lanes(f"sqrt.{mode}.f32 {{x}}, {{a}};", [a])
    np.testing.assert_array_equal(got, np.array([ref.single_bits(ref.sqrt(v, mode)) for v in values], np.uint32))
    (got,) = on_lanes(f"rcp.{mode}.f32 {{x}}, {{a}};", [a])
    np.testing.assert_array_equal(got, np.array([ref.single_bits(ref.div(1.0, v, mode)) for v in values], np.uint32))
    a = float_corners(256, seed=4, dtype=np.float64)
    (roots,) = on_lanes(f"sqrt.{mode}.f64 {{x}}, {{a}};", [a], "b64")
    (inverses,) = on_lanes(f"rcp.{mode}.f64 {{x}}, {{a}};", [a], "b64")
    for pattern, root, inverse in zip(a.tolist(), roots.tolist(), inverses.tolist(), strict=True):
        v = ref.double(pattern)
        assert np.array_equal(ref.double(root), ref.sqrt(v, mode, ref.DOUBLE), equal_nan=True)
        assert np.array_equal(ref.double(inverse), ref.div(1.0, v, mode, ref.DOUBLE), equal_nan=True)


# Function, inputs that are ordinary, largest relative error that the ISA states
APPROXIMATIONS: dict[str, tuple[Callable[[float], float], tuple[float, float], float]] = {
    "ex2": (lambda x: 2.0**x, (-126, 128), 2.0**-22.5),
    "lg2": (math.log2, (1e-30, 1e30), 2.0**-22.6),
    "rcp": (lambda x: 1 / x, (1e-30, 1e30), 2.0**-23),
    "rsqrt": (lambda x: x**-0.5, (1e-30, 1e30), 2.0**-22.9),
    "sqrt": (math.sqrt, (1e-30, 1e30), 2.0**-23),
    "sin": (math.sin, (-math.pi, math.pi), 2.0**-20.5),
    "cos": (math.cos, (-math.pi, math.pi), 2.0**-20.5),
    "tanh": (math.tanh, (-9, 9), 2.0**-11),
}


@pytest.mark.parametrize("name", sorted(APPROXIMATIONS))
def test_approximations_are_within_their_error(name: str) -> None:
    function, (low, high), error = APPROXIMATIONS[name]
    rng = np.random.default_rng(9)
    span = np.exp(rng.uniform(math.log(low), math.log(high), 1024)) if low > 0 else rng.uniform(low, high, 1024)
    a = span.astype(np.float32)
    for suffix in ("",) if name == "tanh" else ("", ".ftz"):
        (got,) = on_lanes(f"{name}.approx{suffix}.f32 {{x}}, {{a}};", [a.view(np.uint32)])
        want = np.array([function(float(v)) for v in a])
        assert np.all(np.abs(got.view(np.float32) - want) <= np.maximum(error * np.abs(want), 2.0**-140))


def test_approximations_at_special_values() -> None:
    inf, nan = math.inf, math.nan
    x = np.array([0.0, -0.0, inf, -inf, nan, -1.0, 1e-45, -1e-45] * 4, np.float32)
    rows: dict[str, list[float]] = {
        "ex2.approx": [1, 1, inf, 0, nan, 0.5, 1, 1],
        "lg2.approx": [-inf, -inf, inf, nan, nan, nan, -149, nan],
        "lg2.approx.ftz": [-inf, -inf, inf, nan, nan, nan, -inf, -inf],
        "rcp.approx": [inf, -inf, 0.0, -0.0, nan, -1, inf, -inf],
        "rsqrt.approx": [inf, -inf, 0, nan, nan, nan, 2.0**74.5, nan],
        "rsqrt.approx.ftz": [inf, -inf, 0, nan, nan, nan, inf, -inf],
        "sqrt.approx": [0.0, -0.0, inf, nan, nan, nan, 2.0**-74.5, nan],
        "sqrt.approx.ftz": [0.0, -0.0, inf, nan, nan, nan, 0.0, -0.0],
        "sin.approx": [0.0, -0.0, nan, nan, nan, math.sin(-1), 1e-45, -1e-45],
        "cos.approx": [1, 1, nan, nan, nan, math.cos(1), 1, 1],
        "tanh.approx": [0.0, -0.0, 1, -1, nan, math.tanh(-1), 1e-45, -1e-45],
    }
    for name, row in rows.items():
        (got,) = on_lanes(f"{name}.f32 {{x}}, {{a}};", [x.view(np.uint32)])
        want = np.array(row * 4, np.float32).view(np.uint32)
        want[np.isnan(want.view(np.float32))] = 0x7FFFFFFF
        np.testing.assert_array_equal(got, want, err_msg=name)
    a = np.array([-127.5, -149.0, -150.5, 128.0] * 8, np.float32).view(np.uint32)
    (got,) = on_lanes("ex2.approx.f32 {x}, {a};", [a])
    np.testing.assert_allclose(got.view(np.float32)[:4], [2.0**-127.5, 2.0**-149, 0, inf], atol=1e-45)
    (got,) = on_lanes("ex2.approx.ftz.f32 {x}, {a};", [a])
    assert got.view(np.float32)[:4].tolist() == [0, 0, 0, inf]


def test_quick_division() -> None:
    a, b = float_corners(seed=5), float_corners(seed=6)
    (got,) = on_lanes("div.full.f32 {x}, {a}, {b};", [a, b])
    np.testing.assert_array_equal(got, wanted("div", [a, b], "rn"))
    numbers = np.array([1.0, 2.0, math.inf, 3e38] * 8, np.float32).view(np.uint32)
    divisors = np.array([3.0, 2.0**127, 2.0**127, 0.0] * 8, np.float32).view(np.uint32)
    (got,) = on_lanes("div.approx.f32 {x}, {a}, {b};", [numbers, divisors])
    third, huge, lost, zero = got.view(np.float32)[:4].tolist()
    assert abs(third - 1 / 3) < 1e-7 and huge == 0 and math.isnan(lost) and zero == math.inf


def lesser(a: float, b: float) -> bool:
    return a < b or (a == b and ref.sign(a) < ref.sign(b))


@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes(name: str) -> None:
    a, b, c = (float_corners(seed=k) for k in (7, 8, 9))
    b[:200] = a[:200] ^ np.uint32(0x80000000)

    def pick(x: float, y: float, nan: bool = False) -> float:
        if math.isnan(x) or math.isnan(y):
            return math.nan if nan or (math.isnan(x) and math.isnan(y)) else (y if math.isnan(x) else x)
        return x if lesser(x, y) == (name == "min") else y

    rows = [[ref.single(p) for p in x.tolist()] for x in (a, b, c)]
    plain = [ref.single_bits(pick(x, y)) for x, y, _ in zip(*rows, strict=True)]
    strict = [ref.single_bits(pick(x, y, True)) for x, y, _ in zip(*rows, strict=True)]
    flushed = [ref.single_bits(pick(ref.flush(x), ref.flush(y))) for x, y, _ in zip(*rows, strict=True)]
    three = [ref.single_bits(pick(pick(x, y), z)) for x, y, z in zip(*rows, strict=True)]
    magnitudes = [ref.single_bits(pick(pick(abs(x), abs(y)), abs(z))) for x, y, z in zip(*rows, strict=True)]
    for text, want, inputs in (
        (f"{name}.f32 {{x}}, {{a}}, {{b}};", plain, [a, b]),
        (f"{name}.NaN.f32 {{x}}, {{a}}, {{b}};", strict, [a, b]),
        (f"{name}.ftz.f32 {{x}}, {{a}}, {{b}};", flushed, [a, b]),
        (f"{name}.f32 {{x}}, {{a}}, {{b}}, {{c}};", three, [a, b, c]),
        (f"{name}.abs.f32 {{x}}, {{a}}, {{b}}, {{c}};", magnitudes, [a, b, c]),
    ):
        (got,) = on_lanes(text, inputs)
        np.testing.assert_array_equal(got, np.array(want, np.uint32), err_msg=text)
    (got,) = on_lanes(f"{name}.xorsign.abs.f32 {{x}}, {{a}}, {{b}};", [a, b])
    for k, (x, y, _) in enumerate(zip(*rows, strict=True)):
        want = pick(abs(x), abs(y))
        if not math.isnan(want):
            signs = (int(a[k]) ^ int(b[k])) >> 31
            assert int(got[k]) == ref.single_bits(-want if signs else want)


def test_extremes_of_doubles() -> None:
    a = np.array([0.0, -0.0, 1.0, math.nan, math.nan, -math.inf] * 16, np.float64)
    b = np.array([-0.0, 0.0, 2.0, 3.0, math.nan, 5.0] * 16, np.float64)
    (low,) = on_lanes("min.f64 {x}, {a}, {b};", [a.view(np.uint64), b.view(np.uint64)], "b64")
    (high,) = on_lanes("max.f64 {x}, {a}, {b};", [a.view(np.uint64), b.view(np.uint64)], "b64")
    assert [str(v) for v in low.view(np.float64)[:6].tolist()] == ["-0.0", "-0.0", "1.0", "3.0", "nan", "-inf"]
    assert [str(v) for v in high.view(np.float64)[:6].tolist()] == ["0.0", "0.0", "2.0", "3.0", "nan", "5.0"]


def test_signs_and_tests() -> None:
    a, b = float_corners(seed=10), float_corners(seed=11)
    real = ~np.isnan(a.view(np.float32))
    (got,) = on_lanes("abs.f32 {x}, {a};", [a])
    np.testing.assert_array_equal(got, np.where(real, a & 0x7FFFFFFF, 0x7FFFFFFF))
    (got,) = on_lanes("neg.f32 {x}, {a};", [a])
    np.testing.assert_array_equal(got, np.where(real, a ^ 0x80000000, 0x7FFFFFFF))
    (got,) = on_lanes("neg.ftz.f32 {x}, {a};", [a])
    flushed = [ref.single_bits(-ref.flush(ref.single(p))) for p in a.tolist()]
    np.testing.assert_array_equal(got, np.array(flushed, np.uint32))
    (got,) = on_lanes("copysign.f32 {x}, {a}, {b};", [a, b])
    np.testing.assert_array_equal(got, a & 0x80000000 | b & 0x7FFFFFFF)
    wide = float_corners(seed=12, dtype=np.float64)
    (got,) = on_lanes("abs.f64 {x}, {a};", [wide], "b64")
    quiet = wide | np.uint64(1 << 51)
    np.testing.assert_array_equal(got, np.where(np.isnan(wide.view(np.float64)), quiet, wide & (2**63 - 1)))
    values = [ref.single(p) for p in a.tolist()]
    tests = {
        "finite": math.isfinite,
        "infinite": math.isinf,
        "number": lambda v: v == v,
        "notanumber": lambda v: v != v,
        "normal": lambda v: math.isfinite(v) and (v == 0 or abs(v) >= 2.0**-126),
        "subnormal": lambda v: 0 < abs(v) < 2.0**-126,
    }
    for name, test in tests.items():
        (got,) = on_lanes(f"testp.{name}.f32 {{x}}, {{a}};", [a], "pred")
        assert got.tolist() == [int(test(v)) for v in values], name


def test_coarse_reciprocals_of_doubles() -> None:
    a = np.array([3.0, -0.0, 0.0, math.inf, math.nan, 1e-310, -7.0, 1.5] * 4)
    (got,) = on_lanes("rcp.approx.ftz.f64 {x}, {a};", [a.view(np.uint64)], "b64")
    values = got.view(np.float64)[:8]
    assert abs(values[0] - 1 / 3) < 2.0**-20 and got[0] & 0xFFFFFFFF == 0
    assert [str(v) for v in values[1:6].tolist()] == ["-inf", "inf", "0.0", "nan", "inf"]
    (got,) = on_lanes("rsqrt.approx.ftz.f64 {x}, {a};", [a.view(np.uint64)], "b64")
    values = got.view(np.float64)[:8]
    assert abs(values[7] - 1.5**-0.5) < 2.0**-20 and math.isnan(values[6]) and values[5] == math.inf
