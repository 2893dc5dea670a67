"""cvt between every pair of types, the packed formats and cvt.pack, against fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import alu_reference as ref
import numpy as np
import pytest
from alu_lanes import corners, float_corners, on_lanes, on_lanes_unguarded

from tunekit.simulate.faults import Unsupported
from tunekit.simulate.numbers.formats import decode, encode

Array = np.ndarray[Any, Any]
INTEGERS = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"]
FLOATS = ["f16", "bf16", "f32", "f64"]
READ: dict[str, Callable[[int], float]] = {"f16": ref.half, "bf16": ref.bfloat, "f32": ref.single, "f64": ref.double}
WRITE = {"f16": ref.half_bits, "bf16": ref.bfloat_bits, "f32": ref.single_bits, "f64": ref.double_bits}
SHAPE = {"f16": ref.HALF, "bf16": ref.BFLOAT, "f32": ref.SINGLE, "f64": ref.DOUBLE}
MODES = ["rn", "rz", "rm", "rp"]


def bits_of(type_: str) -> int:
    return int(type_.lstrip("busf"))


def register_of(type_: str) -> int:
    """Bits of the register that holds a type: bytes lie in 16 bits."""
    return max(16, bits_of(type_))


def number(pattern: int, type_: str) -> int:
    bits = bits_of(type_)
    pattern &= (1 << bits) - 1
    return pattern - (1 << bits) if type_[0] == "s" and pattern >> (bits - 1) else pattern


def limits(type_: str) -> tuple[int, int]:
    bits = bits_of(type_)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)


def values(type_: str, seed: int, count: int = 128) -> Array:
    if type_ in INTEGERS:
        return corners(np.dtype(f"u{register_of(type_) // 8}").type, count, seed)
    if type_ == "bf16":
        return (float_corners(count, seed) >> np.uint32(16)).astype(np.uint16)
    return float_corners(count, seed, {"f16": np.float16, "f32": np.float32, "f64": np.float64}[type_])


def run_cvt(text: str, a: Array, to: str) -> list[int]:
    (got,) = on_lanes(text, [a], f"b{register_of(to)}")
    return got.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("from_", INTEGERS)
def test_integers_to_integers(from_: str) -> None:
    a = values(from_, 1)
    for to in INTEGERS:
        mask = (1 << register_of(to)) - 1
        wrapped = [number(number(p, from_), to) & mask for p in a.tolist()]
        assert run_cvt(f"cvt.{to}.{from_} {{x}}, {{a}};", a, to) == wrapped, to
        low, high = limits(to)
        if limits(from_)[0] < low or limits(from_)[1] > high:
            clamped = [max(low, min(high, number(p, from_))) & mask for p in a.tolist()]
            assert run_cvt(f"cvt.sat.{to}.{from_} {{x}}, {{a}};", a, to) == clamped, to


def test_registers_wider_than_the_type() -> None:
    a = corners(np.uint32)
    for from_, to, register in (("s8", "s32", 32), ("u8", "u32", 32), ("u16", "u32", 32), ("s16", "s64", 64)):
        (got,) = on_lanes(f"cvt.{to}.{from_} {{x}}, {{a}};", [a], f"b{register}")
        assert got.tolist() == [number(p, from_) & ((1 << register) - 1) for p in a.tolist()]
    (got,) = on_lanes("cvt.s8.s32 {x}, {a};", [a], "b32")
    assert got.tolist() == [number(p, "s8") & 0xFFFFFFFF for p in a.tolist()]


def to_integer(x: float, mode: str, from_: str, to: str) -> int:
    low, high = limits(to)
    if math.isnan(x):
        return 0 if from_ != "f64" and bits_of(to) < 64 else 1 << (bits_of(to) - 1)
    if math.isinf(x):
        return high if x > 0 else low
    exact = Fraction(x)
    down = math.floor(exact)
    whole = {"rmi": down, "rpi": math.ceil(exact), "rzi": math.trunc(exact), "rni": round(exact)}[mode]
    return max(low, min(high, whole))


@pytest.mark.parametrize("from_", FLOATS)
def test_floats_to_integers(from_: str) -> None:
    a = values(from_, 2)
    wide = np.array(
        [
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            2.0**31,
            -(2.0**31),
            2.0**32,
            2.0**62,
            2.0**63,
            -(2.0**63),
            2.0**64,
            127.5,
            255.5,
            1e19,
            32767.5,
        ]
    )
    a[:16] = [WRITE[from_](ref.rounded_float(float(v), SHAPE[from_])) for v in wide]
    for to in INTEGERS:
        for mode in ("rni", "rzi", "rmi", "rpi"):
            mask = (1 << register_of(to)) - 1
            want = [number(to_integer(READ[from_](p), mode, from_, to), to) & mask for p in a.tolist()]
            assert run_cvt(f"cvt.{mode}.{to}.{from_} {{x}}, {{a}};", a, to) == want, (to, mode)
    if from_ == "f32":
        got = run_cvt("cvt.rpi.ftz.s32.f32 {x}, {a};", a, "s32")
        assert got == [to_integer(ref.flush(ref.single(p)), "rpi", "f32", "s32") & 0xFFFFFFFF for p in a.tolist()]


@pytest.mark.parametrize("to", FLOATS)
def test_integers_to_floats(to: str) -> None:
    for from_ in INTEGERS:
        a = values(from_, 3)
        if from_ in ("u64", "s64"):  # beside a tie of float32 in the last of 64 bits
            a[:4] = [
                (1 << 62) + (1 << 38) + 1,
                (1 << 62) + (1 << 38),
                (1 << 62) + (1 << 38) - 1,
                (1 << 62) + 3 * (1 << 38),
            ]
        for mode in MODES:
            numbers = [number(p, from_) for p in a.tolist()]
            want = [WRITE[to](ref.rounded(Fraction(v), mode, SHAPE[to]) if v else 0.0) for v in numbers]
            assert run_cvt(f"cvt.{mode}.{to}.{from_} {{x}}, {{a}};", a, {"bf16": "f16"}.get(to, to)) == want, (
                from_,
                mode,
            )


def nan_of(from_: str, to: str, pattern: int) -> int:
    """What an H200 makes of NaN: from f64 sign and upper payload stay, and bf16 to f32 is a shift."""
    if from_ == "f64":
        fraction = SHAPE[to][0] - 1
        bits = 32 if to == "f32" else 16
        ones = (1 << (bits - 1)) - (1 << (fraction - 1))  # the exponent, and quiet
        return (pattern >> 63) << (bits - 1) | ones | (pattern >> (52 - fraction) & ((1 << fraction) - 1))
    return pattern << 16 if (from_, to) == ("bf16", "f32") else WRITE[to](math.nan)


@pytest.mark.parametrize("from_", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_floats_to_floats(from_: str, to: str) -> None:
    a = values(from_, 4)
    rows = [READ[from_](p) for p in a.tolist()]
    kind = {"bf16": "f16"}.get(to, to)
    exact = from_ == to or to == "f64" or (to == "f32" and from_ != "f64")
    for mode in [""] if exact else MODES:

        def convert(v: float, mode: str = mode) -> float:
            return ref.rounded(Fraction(v), mode or "rn", SHAPE[to]) if v and math.isfinite(v) else v

        dotted = f".{mode}" if mode else ""
        got = run_cvt(f"cvt{dotted}.{to}.{from_} {{x}}, {{a}};", a, kind)
        for p, v, g in zip(a.tolist(), rows, got, strict=True):
            assert math.isnan(READ[to](g)) if math.isnan(v) else g == WRITE[to](convert(v)), (v, mode)
            if math.isnan(v) and to != "f64" and from_ != to:
                assert g == nan_of(from_, to, p)
        if to != "bf16":
            if from_ == "bf16":
                continue
            got = run_cvt(f"cvt{dotted}.sat.{to}.{from_} {{x}}, {{a}};", a, kind)
            assert got == [WRITE[to](ref.saturate(convert(v))) for v in rows]
    if from_ == to:
        for mode, whole in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
            got = run_cvt(f"cvt.{mode}.{to}.{to} {{x}}, {{a}};", a, kind)
            for v, g in zip(rows, got, strict=True):
                if math.isfinite(v):
                    assert g == WRITE[to](math.copysign(float(whole(v)), v)), (v, mode)


def test_flushing_conversions() -> None:
    a = float_corners(seed=5)
    rows = [ref.single(p) for p in a.tolist()]
    assert run_cvt("cvt.ftz.f32.f32 {x}, {a};", a, "f32") == [ref.single_bits(ref.flush(v)) for v in rows]
    got = run_cvt("cvt.ftz.f64.f32 {x}, {a};", a, "f64")
    assert all(g == ref.double_bits(ref.flush(v)) for v, g in zip(rows, got, strict=True) if v == v)


def test_nearest_integers_of_ordinary_numbers_are_python_s() -> None:
    a = np.array([0.5, 1.5, 2.5, -2.5, 1e9, 3.49] * 16, np.float32)[:64]
    (got,) = on_lanes("cvt.rni.s32.f32 {x}, {a};", [a.view(np.uint32)])
    assert got.view(np.int32).tolist() == [round(float(v)) for v in a]


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_pairs_of_halves(half: str) -> None:
    a, b = float_corners(seed=6), float_corners(seed=7)
    b[:40] = np.arange(40, dtype=np.uint32) << np.uint32(16) | np.uint32(0x3F808000)  # ties of bf16
    for mode in ("rn", "rz"):
        for flags in ("", ".relu", ".satfinite", ".relu.satfinite"):
            (got,) = on_lanes(f"cvt.{mode}{flags}.{half}x2.f32 {{x}}, {{a}}, {{b}};", [a, b])
            for column, inputs in ((0, b), (1, a)):
                for p, g in zip(inputs.tolist(), got.view(np.uint16).reshape(-1, 2)[:, column].tolist(), strict=True):
                    v = ref.single(p)
                    result = ref.rounded(Fraction(v), mode, SHAPE[half]) if v and math.isfinite(v) else v
                    if "satfinite" in flags and math.isinf(result):
                        result = math.copysign(float(SHAPE[half][2]), v)
                    if "relu" in flags and result <= 0:
                        result = 0.0
                    assert g == WRITE[half](result), (v, mode, flags)
            (one,) = on_lanes(f"cvt.{mode}{flags}.{half}.f32 {{x}}, {{b}};", [a, b], "b16")
            np.testing.assert_array_equal(one, got.view(np.uint16)[::2])


def test_stochastic_bf16() -> None:
    """The random bits are added below the last place: a carry moves away from zero."""
    a, b, bits = float_corners(seed=8), float_corners(seed=9), corners(np.uint32, 256, 10)
    (got,) = on_lanes("cvt.rs.bf16x2.f32 {x}, {a}, {b}, {c};", [a, b, bits])
    for p, q, r, g in zip(*(v.tolist() for v in (a, b, bits, got)), strict=True):
        for pattern, random, result in ((p, r >> 16, g >> 16), (q, r & 0xFFFF, g & 0xFFFF)):
            if math.isnan(ref.single(pattern)):
                assert result == 0x7FFF
            elif pattern & 0x7FFFFFFF == 0x7F800000:
                assert result == pattern >> 16
            else:
                assert result == pattern + random >> 16


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode: str) -> None:
    a = float_corners(seed=11)
    a[:32] = np.arange(32, dtype=np.uint32) << np.uint32(12) | np.uint32(0x3F800000)
    (got,) = on_lanes(f"cvt.{mode}.tf32.f32 {{x}}, {{a}};", [a])
    shape = (11, -136, ref.SINGLE[2])
    for p, g in zip(a.tolist(), got.tolist(), strict=True):
        v = ref.single(p)
        if math.isnan(v):
            assert g == (p & 0xFFFFE000 if mode == "rna" else 0x7FFFE000)
        elif mode == "rna":
            assert g == (p if math.isinf(v) else p + 0x1000 & 0xFFFFE000)
        else:
            result = ref.rounded(Fraction(v), mode, shape) if v and math.isfinite(v) else v
            if mode == "rz" and math.isfinite(v):
                assert g == p & 0xFFFFE000
            elif abs(result) <= 2.0**127:
                assert g == ref.single_bits(result)


SMALL = {"e4m3": 8, "e5m2": 8, "e2m3": 8, "e3m2": 8, "e2m1": 4}


@pytest.mark.parametrize("format", sorted(SMALL))
def test_pairs_of_small_formats(format: str) -> None:
    """The rounding itself is tested with the formats: here it is which value goes where."""
    width = SMALL[format]
    rng = np.random.default_rng(12)
    a, b = ((rng.standard_normal(64) * 3).astype(np.float32) for _ in range(2))
    a[:4] = [np.nan, np.inf, -np.inf, -0.0]
    for relu in (False, True):
        flag = ".relu" if relu else ""
        high, low = (encode(v, format, satfinite=True, relu=relu).astype(np.uint32) for v in (a, b))
        if format == "e2m1":
            text = f".reg .b8 %h; cvt.rn.satfinite{flag}.e2m1x2.f32 %h, {{a}}, {{b}};"
            text += "mov.b32 {x}, {{%h, %h, %h, %h}};"
            (got,) = on_lanes_unguarded(text, [a.view(np.uint32), b.view(np.uint32)])
            np.testing.assert_array_equal(got & 0xFF, high << np.uint32(4) | low)
            text = (
                f".reg .b8 %h, %i, %j, %k; mov.b32 {{{{%h, %i, %j, %k}}}}, {{a}}; cvt.rn{flag}.f16x2.e2m1x2 {{x}}, %h;"
            )
            (back,) = on_lanes_unguarded(text, [got])
        else:
            (got,) = on_lanes(
                f"cvt.rn.satfinite{flag}.{format}x2.f32 {{x}}, {{a}}, {{b}};",
                [a.view(np.uint32), b.view(np.uint32)],
                "b16",
            )
            np.testing.assert_array_equal(got, high << np.uint32(width) | low)
            (back,) = on_lanes(f"cvt.rn{flag}.f16x2.{format}x2 {{x}}, {{a}};", [got])
        pairs = back.view(np.float16).reshape(-1, 2)
        np.testing.assert_array_equal(pairs[:, 1], decode(high, format))
        np.testing.assert_array_equal(pairs[:, 0], decode(low, format))
    if format in ("e4m3", "e5m2"):
        halves = np.stack([b, a], axis=1).astype(np.float16)
        (got,) = on_lanes(f"cvt.rn.satfinite.{format}x2.f16x2 {{x}}, {{a}};", [halves.view(np.uint32)[:, 0]], "b16")
        codes = encode(halves.astype(np.float32), format, satfinite=True).astype(np.uint32)
        np.testing.assert_array_equal(got, codes[:, 1] << np.uint32(8) | codes[:, 0])


def test_scales() -> None:
    a = np.exp2(np.linspace(-130, 127.5, 64)).astype(np.float32)
    b = -a[::-1].copy()
    for mode, function in (("rz", math.floor), ("rp", math.ceil)):
        (got,) = on_lanes(
            f"cvt.{mode}.satfinite.ue8m0x2.f32 {{x}}, {{a}}, {{b}};", [a.view(np.uint32), b.view(np.uint32)], "b16"
        )
        for v, w, g in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
            high, low = (max(0, min(254, function(math.log2(abs(x))) + 127)) for x in (v, w))
            assert g == high << 8 | low
        halves = (np.stack([a.view(np.uint32) >> np.uint32(16), b.view(np.uint32) >> np.uint32(16)], axis=1)).astype(
            np.uint16
        )
        (got,) = on_lanes(f"cvt.{mode}.ue8m0x2.bf16x2 {{x}}, {{a}};", [halves.view(np.uint32)[:, 0]], "b16")
        (back,) = on_lanes("cvt.rn.bf16x2.ue8m0x2 {x}, {a};", [got])
        want = np.stack([decode(got & 255, "ue8m0"), decode(got >> np.uint16(8), "ue8m0")], axis=1)
        np.testing.assert_array_equal(decode(back.view(np.uint16).reshape(-1, 2), "bf16"), want)


def test_packing_integers() -> None:
    a, b, c = corners(np.uint32, seed=1), corners(np.uint32, seed=2), corners(np.uint32, seed=3)
    signed = [[number(p, "s32") for p in x.tolist()] for x in (a, b)]
    for kind in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
        bits = int(kind[1:])
        low, high = limits(kind)
        pairs = [[max(low, min(high, v)) & ((1 << bits) - 1) for v in x] for x in signed]
        if bits == 16:
            (got,) = on_lanes(f"cvt.pack.sat.{kind}.s32 {{x}}, {{a}}, {{b}};", [a, b])
            assert got.tolist() == [x << 16 | y for x, y in zip(*pairs, strict=True)]
        else:
            (got,) = on_lanes(f"cvt.pack.sat.{kind}.s32.b32 {{x}}, {{a}}, {{b}}, {{c}};", [a, b, c])
            want = [(z << 2 * bits | x << bits | y) & 0xFFFFFFFF for x, y, z in zip(*pairs, c.tolist(), strict=True)]
            assert got.tolist() == want


@pytest.mark.parametrize(
    "text",
    [
        "cvt.f16.f32 %rs1, %r1;",  # the rounding is missing
        "cvt.rn.f32.f16 %r1, %rs1;",  # nothing to round
        "cvt.rn.s32.f32 %r1, %r1;",  # no rounding to an integer
        "cvt.rn.e4m3x2.f32 %rs1, %r1, %r1;",  # without .satfinite
        "cvt.rs.f16x2.f32 %r1, %r1, %r1, %r1;",
        "cvt.rn.relu.f32.f64 %r1, %rd1;",
        "add.rn.sat.f64 %rd1, %rd1, %rd1;",
        "max.xorsign.f32 %r1, %r1, %r1;",
        "fma.f32 %r1, %r1, %r1, %r1;",
        "add.frob.f32 %r1, %r1, %r1;",
        "vadd.s32.s32.s32 %r1, %r1, %r1;",
        "mul.s32 %r1, %r1, %r1;",
        "setp.lo.s32 %p1, %r1, %r1;",
        "add.f32 %r1, %rd1, %r1;",  # a register of the wrong width
    ],
)
def test_what_is_not_in_the_isa_is_refused_when_it_is_reached(run_ptx: Any, ptx_kernel: Any, text: str) -> None:
    fill = "mov.u32 %r1, 0; mov.u64 %rd1, 0; mov.u16 %rs1, 0; "
    assert not run_ptx(ptx_kernel(f"{fill} bra DONE; {text} DONE: ret;")).faults
    with pytest.raises(Unsupported):
        run_ptx(ptx_kernel(f"{fill} {text} ret;"))
