"""setp, set, selp and slct, and the moves: against Python's comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import alu_reference as ref
import numpy as np
import pytest
from alu_lanes import corners, float_corners, on_lanes, on_lanes_unguarded

Array = np.ndarray[Any, Any]
ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def floating(name: str) -> Callable[[float, float], bool]:
    """The ordered operators are false with a NaN, those with a u are true."""
    if name in ("num", "nan"):
        return lambda a, b: (math.isnan(a) or math.isnan(b)) == (name == "nan")
    if name[-1] == "u" and name != "u":
        return lambda a, b: math.isnan(a) or math.isnan(b) or ORDER[name[:-1]](a, b)
    return lambda a, b: not (math.isnan(a) or math.isnan(b)) and ORDER[name](a, b)


def signed(v: int, bits: int) -> int:
    return v - (1 << bits) if v >> (bits - 1) else v


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_integers(bits: int) -> None:
    kind = np.dtype(f"u{bits // 8}").type
    a, b = corners(kind, seed=1), corners(kind, seed=2)
    b[::3] = a[::3]
    rows = list(zip(a.tolist(), b.tolist(), strict=True))
    for name, test in ORDER.items():
        (got,) = on_lanes(f"setp.{name}.u{bits} {{x}}, {{a}}, {{b}};", [a, b], "pred")
        assert got.tolist() == [int(test(x, y)) for x, y in rows]
        (got,) = on_lanes(f"setp.{name}.s{bits} {{x}}, {{a}}, {{b}};", [a, b], "pred")
        assert got.tolist() == [int(test(signed(x, bits), signed(y, bits))) for x, y in rows]
    for name, plain in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        (got,) = on_lanes(f"setp.{name}.u{bits} {{x}}, {{a}}, {{b}};", [a, b], "pred")
        assert got.tolist() == [int(ORDER[plain](x, y)) for x, y in rows]
    for name in ("eq", "ne"):
        (got,) = on_lanes(f"setp.{name}.b{bits} {{x}}, {{a}}, {{b}};", [a, b], "pred")
        assert got.tolist() == [int(ORDER[name](x, y)) for x, y in rows]


FLOATING = [*ORDER, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.parametrize("type_", ["f32", "f64", "f16", "bf16"])
def test_floats(type_: str) -> None:
    if type_ == "bf16":
        a, b = ((float_corners(256, k) >> np.uint32(16)).astype(np.uint16) for k in (1, 2))
    else:
        kind = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[type_]
        a, b = (float_corners(256, k, kind) for k in (1, 2))
    b[::3] = a[::3]
    read = {"f32": ref.single, "f64": ref.double, "f16": ref.half, "bf16": ref.bfloat}[type_]
    rows = [(read(x), read(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    for name in FLOATING:
        (got,) = on_lanes(f"setp.{name}.{type_} {{x}}, {{a}}, {{b}};", [a, b], "pred")
        assert got.tolist() == [int(floating(name)(x, y)) for x, y in rows], name
    if type_ == "f32":
        (got,) = on_lanes("setp.lt.ftz.f32 {x}, {a}, {b};", [a, b], "pred")
        assert got.tolist() == [int(floating("lt")(ref.flush(x), ref.flush(y))) for x, y in rows]
    if type_ in ("f16", "bf16"):
        low, high = on_lanes(
            f"setp.leu.{type_}x2 {{x}}|{{y}}, {{a}}, {{b}};", [a.view(np.uint32), b.view(np.uint32)], "pred pred"
        )
        want = [int(floating("leu")(x, y)) for x, y in rows]
        assert low.tolist() == want[::2] and high.tolist() == want[1::2]


@pytest.mark.parametrize("combine", ["and", "or", "xor"])
def test_a_second_predicate_holds_the_complement(combine: str) -> None:
    a, b = corners(np.uint32, seed=3), corners(np.uint32, seed=4)
    c = np.random.default_rng(5).integers(0, 2, len(a)).astype(np.bool_)
    operation = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine]
    for text, other in (("{c}", c), ("!{c}", ~c)):
        p, q = on_lanes(f"setp.lt.{combine}.u32 {{x}}|{{y}}, {{a}}, {{b}}, {text};", [a, b, c], "pred pred")
        np.testing.assert_array_equal(p != 0, operation(a < b, other))
        np.testing.assert_array_equal(q != 0, operation(a >= b, other))
        (p,) = on_lanes(f"setp.lt.{combine}.u32 {{x}}, {{a}}, {{b}}, {text};", [a, b, c], "pred")
        np.testing.assert_array_equal(p != 0, operation(a < b, other))
        (d,) = on_lanes(f"set.lt.{combine}.u32.u32 {{x}}, {{a}}, {{b}}, {text};", [a, b, c])
        np.testing.assert_array_equal(d, np.where(operation(a < b, other), 0xFFFFFFFF, 0))
    p, q = on_lanes("setp.ge.u32 {x}|{y}, {a}, {b};", [a, b], "pred pred")
    np.testing.assert_array_equal(p != 0, a >= b)
    np.testing.assert_array_equal(q != 0, a < b)
    (p,) = on_lanes("setp.ge.u32 _|{x}, {a}, {b};", [a, b], "pred")
    np.testing.assert_array_equal(p != 0, a < b)


def test_set_writes_ones_or_one() -> None:
    a, b = float_corners(256, 6), float_corners(256, 7)
    with np.errstate(invalid="ignore"):
        less = a.view(np.float32) < b.view(np.float32)
    (got,) = on_lanes("set.lt.s32.f32 {x}, {a}, {b};", [a, b])
    np.testing.assert_array_equal(got, np.where(less, 0xFFFFFFFF, 0))
    (got,) = on_lanes("set.lt.f32.f32 {x}, {a}, {b};", [a, b])
    np.testing.assert_array_equal(got, np.where(less, 0x3F800000, 0))
    halves = [float_corners(512, k, np.float16) for k in (8, 9)]
    with np.errstate(invalid="ignore"):
        truth = halves[0].view(np.float16) >= halves[1].view(np.float16)
    (got,) = on_lanes("set.ge.f16x2.f16x2 {x}, {a}, {b};", [h.view(np.uint32) for h in halves])
    np.testing.assert_array_equal(got.view(np.uint16), np.where(truth, 0x3C00, 0))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_selection(bits: int) -> None:
    kind = np.dtype(f"u{bits // 8}").type
    a, b = corners(kind, seed=1), corners(kind, seed=2)
    c = np.random.default_rng(3).integers(0, 2, len(a)).astype(np.bool_)
    c[:32], c[32:64] = True, False
    for type_ in (f"b{bits}", f"s{bits}", *([f"f{bits}"] if bits > 16 else [])):
        (got,) = on_lanes(f"selp.{type_} {{x}}, {{a}}, {{b}}, {{c}};", [a, b, c], f"b{bits}")
        np.testing.assert_array_equal(got, np.where(c, a, b))
    n = corners(np.uint32, seed=4)
    (got,) = on_lanes(f"slct.u{bits}.s32 {{x}}, {{a}}, {{b}}, {{c}};", [a, b, n], f"b{bits}")
    np.testing.assert_array_equal(got, np.where(n.view(np.int32) >= 0, a, b))
    f = float_corners(len(a), 5)
    (got,) = on_lanes(f"slct.u{bits}.f32 {{x}}, {{a}}, {{b}}, {{c}};", [a, b, f], f"b{bits}")
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, np.where(f.view(np.float32) >= 0, a, b))
    (got,) = on_lanes("selp.f32 {x}, 0f3F800000, {a}, {b};", [n, c])
    np.testing.assert_array_equal(got, np.where(c, 0x3F800000, n))


def test_moves() -> None:
    for bits, type_ in ((16, "b16"), (32, "f32"), (64, "u64")):
        a = corners(np.dtype(f"u{bits // 8}").type)
        (got,) = on_lanes(f"mov.{type_} {{x}}, {{a}};", [a], f"b{bits}")
        np.testing.assert_array_equal(got, a)
    c = np.random.default_rng(3).integers(0, 2, 64).astype(np.bool_)
    (got,) = on_lanes("mov.pred {x}, {a};", [c], "pred")
    np.testing.assert_array_equal(got != 0, c)
    (got,) = on_lanes("mov.b32 {x}, 0f40490FDB;", [corners(np.uint32)])
    assert set(got.tolist()) == {0x40490FDB}
    (got,) = on_lanes("mov.s64 {x}, -2;", [corners(np.uint32)], "b64")
    assert set(got.tolist()) == {2**64 - 2}


def test_packing_and_unpacking() -> None:
    a, b = corners(np.uint32, seed=1), corners(np.uint32, seed=2)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    (got,) = on_lanes("mov.b64 {x}, {{{a}, {b}}};", [a, b], "b64")
    np.testing.assert_array_equal(got, both)
    low, high = on_lanes("mov.b64 {{{x}, {y}}}, {a};", [both], "b32 b32")
    np.testing.assert_array_equal(low, a)
    np.testing.assert_array_equal(high, b)
    (high,) = on_lanes("mov.b64 {{_, {x}}}, {a};", [both])
    np.testing.assert_array_equal(high, b)
    h = [corners(np.uint16, seed=k) for k in range(4)]
    (got,) = on_lanes("mov.b32 {x}, {{{a}, {b}}};", h[:2])
    np.testing.assert_array_equal(got, h[0] | h[1].astype(np.uint32) << np.uint32(16))
    four = sum(v.astype(np.uint64) << np.uint64(16 * k) for k, v in enumerate(h))
    (got,) = on_lanes("mov.b64 {x}, {{{a}, {b}, {c}, {e}}};", h, "b64")
    np.testing.assert_array_equal(got, four)
    parts = on_lanes("mov.b64 {{{x}, {y}, {z}, {w}}}, {a};", [four], "b16 b16 b16 b16")
    for part, want in zip(parts, h, strict=True):
        np.testing.assert_array_equal(part, want)
    # A register keeps its bits when it packs itself.
    (got,) = on_lanes_unguarded("mov.b32 {x}, {a}; mov.b32 {{%rs1, %rs2}}, {x}; mov.b32 {x}, {{%rs2, %rs1}};", [a])
    np.testing.assert_array_equal(got, a >> np.uint32(16) | a << np.uint32(16))
    text = ".reg .b8 %h<4>; mov.b32 {{%h0, %h1, %h2, %h3}}, {a}; mov.b32 {x}, {{%h3, %h2, %h1, %h0}};"
    (got,) = on_lanes_unguarded(text, [a])
    np.testing.assert_array_equal(got, a.byteswap())
    text = ".reg .b128 %q; mov.b128 %q, {{{a}, {b}}}; mov.b128 {{{y}, {x}}}, %q;"
    x, y = on_lanes_unguarded(text, [both, both[::-1].copy()], "b64 b64")
    np.testing.assert_array_equal(y, both)
    np.testing.assert_array_equal(x, both[::-1])


def test_special_registers_and_clocks() -> None:
    (got,) = on_lanes_unguarded("mov.u32 {x}, %laneid;", [corners(np.uint32, 64)])
    assert got.tolist() == list(range(32)) * 2
    first, second = on_lanes_unguarded(
        "mov.u64 {x}, %clock64; mov.u64 {y}, %clock64;", [corners(np.uint32, 32)], "b64 b64"
    )
    assert np.all(second > first)
    first, second = on_lanes_unguarded(
        "mov.u64 {x}, %globaltimer; mov.u64 {y}, %globaltimer;", [corners(np.uint32, 32)], "b64 b64"
    )
    assert np.all(second > first)


def test_generic_addresses(run_ptx: Any, ptx_kernel: Any) -> None:
    """An address in shared memory survives the way to a generic one and back, and lies in one window only."""
    body = """
    ld.param.b64 %rd9, [out];
    mov.u64 %rd1, room;
    cvta.shared.u64 %rd2, %rd1;
    cvta.to.shared.u64 %rd3, %rd2;
    isspacep.shared %p1, %rd2;
    isspacep.global %p2, %rd2;
    isspacep.global %p3, %rd9;
    isspacep.shared::cluster %p4, %rd2;
    isspacep.local %p5, %rd2;
    sub.u64 %rd4, %rd3, %rd1;
    selp.b64 %rd5, 1, 0, %p1;
    selp.b64 %rd6, 1, 0, %p2;
    selp.b64 %rd7, 1, 0, %p3;
    selp.b64 %rd8, 1, 0, %p4;
    selp.b64 %rd10, 1, 0, %p5;
    cvta.to.global.u64 %rd11, %rd9;
    st.global.b64 [%rd11], %rd4;
    st.global.b64 [%rd11+8], %rd5;
    st.global.b64 [%rd11+16], %rd6;
    st.global.b64 [%rd11+24], %rd7;
    st.global.b64 [%rd11+32], %rd8;
    st.global.b64 [%rd11+40], %rd10;
    mov.u32 %r1, 7;
    st.b32 [%rd2], %r1;
    ld.shared.b32 %r2, [room];
    st.global.b32 [%rd11+48], %r2;
    ret;
    """
    text = ptx_kernel(body, ".param .u64 out", variables=".shared .align 16 .b8 room[64];")
    ran = run_ptx(text, {"out": np.zeros(8, np.uint64)}, ["out"], block=(1, 1, 1))
    assert not ran.faults
    assert ran.buffers["out"].tolist() == [0, 1, 0, 1, 1, 0, 7, 0]
