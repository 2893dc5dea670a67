"""tcgen05.mma against NumPy: kinds, shapes, majors, swizzles, CTA pairs, A in tensor memory, scale factors, masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simulate.tensor_core import TYPE_BITS, Bench, draw
from tunekit.simulate.matrix.layout import (
    NONE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_128B_BASE_32B,
    Place,
    Swizzle,
)
from tunekit.simulate.numbers.formats import decode, encode
from tunekit.simulate.units.tcgen05.data_path import data_path
from tunekit.simulate.units.tcgen05.instruction_descriptor import KINDS, Shape
from tunekit.simulate.units.tcgen05.instruction_descriptor import encode as describe

A_AT, B_AT = 0x4000, 0xC000
FLOATS8 = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")


def shape_of(kind: str, m: int, n: int, a: str, b: str, d: str = "f32", **more: Any) -> Shape:
    fields: dict[str, Any] = {"a_major": "k", "b_major": "k", "negate_a": False, "negate_b": False, **more}
    return Shape(kind=KINDS[kind], m=m, n=n, a_type=a, b_type=b, d_type=d, **fields)


def place_for(start: int, rows: int, k: int, bits: int, major: str, swizzle: Swizzle, inside: int = 0) -> Place:
    """A tile larger than the instruction's operand, so that both strides count; inside: bytes along the row."""
    if major == "k":
        if swizzle is NONE:
            return Place(start, 16 * rows + 128, 128, swizzle)
        return Place(start + inside, 16, 8 * 16 * swizzle.chunks, swizzle)
    if swizzle is NONE:
        return Place(start, 256 * -(-rows * bits // 128), 128, swizzle)
    atom = swizzle.rows * 16 * swizzle.chunks
    return Place(start, atom * -(-k // swizzle.rows), atom, swizzle)


def multiply(
    shape: Shape,
    *,
    group: int = 1,
    ws: bool = False,
    a_swizzle: Swizzle = SWIZZLE_128B,
    b_swizzle: Swizzle = SWIZZLE_128B,
    in_tensor: bool = False,
    accumulate: bool = False,
    extra: str = "",
    registers: dict[str, Any] | None = None,
    inside: int = 0,
    seed: int = 0,
) -> tuple[Bench, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Runs one instruction; returns the bench, A, B (as [n, k]), D before and D after (each float64 or int)."""
    rng = np.random.default_rng(seed)
    path = data_path(shape.m, group, ws)
    bits = shape.kind.element_bits
    a_bits, a = draw(rng, shape.m, shape.k, shape.a_type)
    shift = int(registers.pop("shift", 0)) if registers else 0
    b_bits, b = draw(rng, shape.n + shift, shape.k, shape.b_type)
    a_operand = "[%r2]" if in_tensor else "%rd1"
    form = ".ws" if ws else ""
    bench = Bench(
        f"tcgen05.mma{form}.cta_group::{group}.kind::{shape.kind.name} [%r1], {a_operand}, %rd2, %r3, {extra};",
        ctas=group,
        threads=1,
    )
    bench.allocate()
    width = shape.n // path.parts
    before = rng.integers(-50, 50, (shape.m, shape.n)).astype(np.float64)
    for cta in range(group):
        mine = slice(cta * path.rows, (cta + 1) * path.rows)
        share = slice(cta * (shape.n // group), (cta + 1) * (shape.n // group) + shift)
        b_place = place_for(B_AT, b_bits[share].shape[0], shape.k, bits, shape.b_major, b_swizzle, inside)
        put = b_bits[share]
        if shape.b_major == "mn" and put.shape[0] * bits % 128:
            put = np.concatenate([put, np.zeros((128 // bits - put.shape[0] % (128 // bits), shape.k), put.dtype)])
        b_desc = bench.matrix(b_place, put, shape.b_type, shape.b_major, cta)
        a_place = place_for(A_AT, path.rows, shape.k, bits, shape.a_major, a_swizzle, inside)
        a_desc = bench.matrix(a_place, a_bits[mine], shape.a_type, shape.a_major, cta)
        for part in range(path.parts):
            lanes = path.lanes[part][:, None]
            if in_tensor:
                bench.write_tensor(lanes, 256 + np.arange(8), packed_rows(a_bits[mine], shape), cta)
            columns = np.arange(width)
            bench.write_tensor(lanes, columns, cells_of(before[mine, part * width : (part + 1) * width], shape), cta)
    bench.set({"%r1": 0, "%r2": 256, "%r3": describe(shape), "%rd1": a_desc, "%rd2": b_desc, "%p1": accumulate})
    bench.set(registers or {})
    bench.only_the_first_issues()
    bench.run()
    after = np.empty((shape.m, shape.n))
    for cta in range(group):
        for part in range(path.parts):
            found = values_of(bench.words(cta)[path.lanes[part], :width], shape)
            after[cta * path.rows : (cta + 1) * path.rows, part * width : (part + 1) * width] = found
    return bench, a, b, before, after


def packed_rows(bits: np.ndarray, shape: Shape) -> np.ndarray:
    """A's rows as cells of tensor memory: uint32[rows, 8]."""
    if TYPE_BITS.get(shape.a_type, 8) < 8:
        bits = bits << 2 if shape.a_type == "e2m1" else bits
        return np.ascontiguousarray(bits.astype(np.uint8)).view(np.uint32)
    return np.ascontiguousarray(bits).view(np.uint32)


def cells_of(values: np.ndarray, shape: Shape) -> np.ndarray:
    if shape.d_type == "s32":
        return values.astype(np.int32).view(np.uint32)
    if shape.d_type == "f16":
        return encode(values, "f16").astype(np.uint32)
    return values.astype(np.float32).view(np.uint32)


def values_of(words: np.ndarray, shape: Shape) -> np.ndarray:
    words = np.ascontiguousarray(words)
    if shape.d_type == "s32":
        return words.view(np.int32).astype(np.float64)
    if shape.d_type == "f16":
        assert not (words >> 16).any()
        return decode(words.astype(np.uint16), "f16").astype(np.float64)
    return words.view(np.float32).astype(np.float64)


def check(after: np.ndarray, expected: np.ndarray, shape: Shape) -> None:
    if shape.d_type == "s32":
        np.testing.assert_array_equal(after, expected)
    elif shape.d_type == "f16":
        np.testing.assert_array_equal(after, decode(encode(expected, "f16"), "f16"))
    else:
        np.testing.assert_array_equal(after.astype(np.float32), expected.astype(np.float32))


SHAPES = [
    (64, 8, 1, False),
    (64, 256, 1, False),
    (128, 128, 1, False),
    (128, 24, 1, False),
    (128, 64, 2, False),
    (256, 256, 2, False),
    (256, 32, 2, False),
    (32, 64, 1, True),
    (64, 128, 1, True),
    (128, 64, 1, True),
]


@pytest.mark.parametrize("in_tensor", [False, True])
@pytest.mark.parametrize(("m", "n", "group", "ws"), SHAPES)
def test_every_shape(m: int, n: int, group: int, ws: bool, in_tensor: bool) -> None:
    shape = shape_of("f16", m, n, "bf16", "f16")
    bench, a, b, before, after = multiply(
        shape, group=group, ws=ws, in_tensor=in_tensor, accumulate=True, extra="%p1", inside=32
    )
    assert bench.faults == []
    check(after, a @ b.T + before, shape)


@pytest.mark.parametrize("swizzle", [NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B], ids=lambda s: s.name)
@pytest.mark.parametrize("majors", ["k k", "k mn", "mn k", "mn mn"])
@pytest.mark.parametrize("element", ["bf16", "e4m3"])
def test_every_major_and_swizzle(element: str, majors: str, swizzle: Swizzle) -> None:
    a_major, b_major = majors.split()
    kind = "f16" if element == "bf16" else "f8f6f4"
    shape = shape_of(kind, 128, 64, element, element, a_major=a_major, b_major=b_major)
    bench, a, b, _, after = multiply(shape, extra="%p1", a_swizzle=swizzle, b_swizzle=swizzle)
    assert bench.faults == []
    check(after, a @ b.T, shape)


@pytest.mark.parametrize("majors", ["k k", "mn mn"])
def test_tf32(majors: str) -> None:
    a_major, b_major = majors.split()
    swizzle = SWIZZLE_128B_BASE_32B if a_major == "mn" else SWIZZLE_128B
    shape = shape_of("tf32", 128, 64, "tf32", "tf32", a_major=a_major, b_major=b_major)
    bench, a, b, before, after = multiply(shape, accumulate=True, extra="%p1", a_swizzle=swizzle, b_swizzle=swizzle)
    assert bench.faults == []
    check(after, a @ b.T + before, shape)


@pytest.mark.parametrize("in_tensor", [False, True])
@pytest.mark.parametrize("pair", [(a, b) for a in FLOATS8 for b in ("e4m3", "e3m2", "e2m1")], ids=" ".join)
def test_f8f6f4(pair: tuple[str, str], in_tensor: bool) -> None:
    shape = shape_of("f8f6f4", 128, 32, *pair)
    bench, a, b, before, after = multiply(shape, accumulate=True, extra="%p1", in_tensor=in_tensor)
    assert bench.faults == []
    check(after, a @ b.T + before, shape)


def test_a_result_of_f16() -> None:
    shape = shape_of("f8f6f4", 64, 32, "e2m3", "e3m2", "f16")
    bench, a, b, before, after = multiply(shape, accumulate=True, extra="%p1")
    assert bench.faults == []
    check(after, a @ b.T + before, shape)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("pair", ["u8 s8", "s8 s8", "u8 u8"])
def test_integers(pair: str, saturate: bool) -> None:
    shape = shape_of("i8", 128, 48, *pair.split(), "s32", saturate=saturate)
    bench, a, b, before, after = multiply(shape, accumulate=True, extra="%p1")
    assert bench.faults == []
    check(after, a @ b.T + before, shape)


def test_negated_inputs() -> None:
    shape = shape_of("f16", 128, 64, "f16", "bf16", negate_a=True)
    _, a, b, before, after = multiply(shape, accumulate=True, extra="%p1")
    check(after, -(a @ b.T) + before, shape)
    both = shape_of("f16", 128, 64, "f16", "bf16", negate_a=True, negate_b=True)
    _, a, b, _, after = multiply(both, extra="%p1")
    check(after, a @ b.T, both)


def test_the_scale_of_d() -> None:
    shape = shape_of("f16", 128, 64, "f16", "f16")
    bench, a, b, before, after = multiply(shape, accumulate=True, extra="{%r10, %r11, %r12, %r13}, %p1, 3",
                                          registers=dict.fromkeys(("%r10", "%r11", "%r12", "%r13"), 0))  # fmt: skip
    assert bench.faults == []
    check(after, a @ b.T + before / 8, shape)


def test_an_enable_predicate_that_is_negated() -> None:
    shape = shape_of("f16", 128, 64, "f16", "f16")
    _, a, b, before, after = multiply(shape, accumulate=False, extra="!%p1")
    check(after, a @ b.T + before, shape)


@pytest.mark.parametrize(("m", "n", "group"), [(128, 64, 1), (256, 64, 2), (128, 64, 2), (64, 32, 1)])
def test_disabled_lanes_keep_what_they_hold(m: int, n: int, group: int) -> None:
    shape = shape_of("f16", m, n, "bf16", "bf16")
    rng = np.random.default_rng(5)
    masks = rng.integers(0, 2**32, 4 * group)
    names = [f"%r{10 + number}" for number in range(4 * group)]
    bench, a, b, before, after = multiply(
        shape, group=group, extra=f"{{{', '.join(names)}}}, %p1",
        registers={name: int(mask) for name, mask in zip(names, masks, strict=True)},
    )  # fmt: skip
    assert bench.faults == []
    off = np.unpackbits(masks.astype(np.uint32).view(np.uint8), bitorder="little").astype(bool)
    path = data_path(m, group, False)
    expected = a @ b.T
    for cta in range(group):
        for part in range(path.parts):
            rows = np.flatnonzero(off[128 * cta + path.lanes[part]]) + cta * path.rows
            columns = slice(part * n // path.parts, (part + 1) * n // path.parts)
            expected[rows, columns] = before[rows, columns]
    check(after, expected, shape)


@pytest.mark.parametrize("m", [32, 64, 128])
def test_zeroed_columns(m: int) -> None:
    shape = shape_of("f16", m, 64, "bf16", "bf16", max_shift=8)
    mask = 1 << 39 | 4 << 40 | 6 << 48 | 3 << 56 | 0b1010 << 32 | 0x01020003
    bench, a, b, _, after = multiply(shape, ws=True, extra="%p1, %rd5", registers={"%rd5": mask, "shift": 3})
    assert bench.faults == []
    width = 64 // (128 // m)
    zero = np.zeros(64, dtype=bool)
    for part in range(128 // m):
        start, first = (0x01020003 >> 8 * part) & 255, 0b1010 >> part & 1
        run = [first] * (5 if first else 7) + [1 - first] * (7 if first else 5)
        zero[part * width : (part + 1) * width] = [run[(start + c) % 12] for c in range(width)]
    used = b[3:67].copy()
    used[zero] = 0
    check(after, a @ used.T, shape)


# Block scaling


def scaled(
    kind: str, m: int, n: int, a_type: str, b_type: str, scale_type: str, blocks: int, group: int = 1,
    ids: tuple[int, int] = (0, 0), in_tensor: bool = False, named: str = "",
) -> tuple[Bench, np.ndarray, np.ndarray]:  # fmt: skip
    """(bench, D, what it should be) of one block-scaled instruction."""
    rng = np.random.default_rng(11)
    shape = shape_of(kind, m, n, a_type, b_type, scale_type=scale_type, scale_a_id=ids[0], scale_b_id=ids[1])
    path = data_path(m, group, False)
    a_bits, a = draw(rng, m, shape.k, a_type)
    b_bits, b = draw(rng, n, shape.k, b_type)
    low, high = (120, 134) if scale_type == "ue8m0" else (0, 127)
    sa = rng.integers(low, high, (m, blocks)).astype(np.uint8)
    sb = rng.integers(low, high, (n, blocks)).astype(np.uint8)
    bench = Bench(
        f"tcgen05.mma.cta_group::{group}.kind::{kind}.block_scale{named} [%r1], "
        f"{'[%r2]' if in_tensor else '%rd1'}, %rd2, %r3, [%r4], [%r5], %p1;",
        ctas=group,
        threads=1,
    )
    bench.allocate()
    width = n // path.parts
    for cta in range(group):
        mine = slice(cta * path.rows, (cta + 1) * path.rows)
        share = slice(cta * (n // group), (cta + 1) * (n // group))
        put = bench.matrix4 if shape.kind.element_bits == 4 else None
        a_place, b_place = Place(A_AT, 16, 1024, SWIZZLE_128B), Place(B_AT, 16, 1024, SWIZZLE_128B)
        a_desc = put(a_place, a_bits[mine], cta) if put else bench.matrix(a_place, a_bits[mine], a_type, "k", cta)
        b_desc = put(b_place, b_bits[share], cta) if put else bench.matrix(b_place, b_bits[share], b_type, "k", cta)
        if in_tensor:
            halves = a_bits[mine]
            rows = (halves[:, 0::2] | halves[:, 1::2] << 4) if put else halves
            words = np.ascontiguousarray(rows.astype(np.uint8)).view(np.uint32)
            for part in range(path.parts):
                bench.write_tensor(path.lanes[part][:, None], 256 + np.arange(8), words, cta)
        # By hand, from the layout of 9.7.16.10.7.2: row r in lane r % 32 of each quarter, column r / 32.
        for quarter in range(4):
            part = quarter * path.parts // 4
            for_b = sb[part * width : (part + 1) * width]
            for column, factors, first in ((300, sa[mine], ids[0]), (320, for_b, ids[1])):
                cells = rng.integers(0, 256, (128, 8, 4)).astype(np.uint8)
                for row in range(len(factors)):
                    cells[row % 32, row // 32, first : first + blocks] = factors[row]
                lanes = slice(32 * quarter, 32 * quarter + 32)
                bench.write_tensor(lanes, slice(column, column + 8), cells[:32].reshape(32, 32).view(np.uint32), cta)
    bench.set({"%r1": 0, "%r2": 256, "%r3": describe(shape), "%r4": 300, "%r5": 320 | ids[1] << 30, "%p1": 0})
    bench.set({"%rd1": a_desc, "%rd2": b_desc})
    bench.only_the_first_issues()
    bench.run()
    found = np.empty((m, n))
    for cta in range(group):
        for part in range(path.parts):
            words = np.ascontiguousarray(bench.words(cta)[path.lanes[part], :width])
            found[cta * path.rows : (cta + 1) * path.rows, part * width : (part + 1) * width] = words.view(np.float32)
    each = shape.k // blocks
    wide_a = a * np.repeat(decode(sa, scale_type).astype(np.float64), each, axis=1)
    wide_b = b * np.repeat(decode(sb, scale_type).astype(np.float64), each, axis=1)
    return bench, found, wide_a @ wide_b.T


@pytest.mark.parametrize(
    ("kind", "types", "scale", "blocks", "ids", "named"),
    [
        ("mxf8f6f4", "e4m3 e5m2", "ue8m0", 1, (0, 0), ""),
        ("mxf8f6f4", "e2m1 e3m2", "ue8m0", 1, (3, 1), ".scale_vec::1X"),
        ("mxf8f6f4", "e2m3 e4m3", "ue8m0", 1, (2, 2), ".block32"),
        ("mxf4", "e2m1 e2m1", "ue8m0", 2, (0, 2), ""),
        ("mxf4", "e2m1 e2m1", "ue8m0", 2, (2, 0), ".scale_vec::2X"),
        ("mxf4nvf4", "e2m1 e2m1", "ue8m0", 2, (2, 2), ".block32"),
        ("mxf4nvf4", "e2m1 e2m1", "ue4m3", 4, (0, 0), ".scale_vec::4X"),
        ("mxf4nvf4", "e2m1 e2m1", "ue8m0", 4, (0, 0), ".block16"),
    ],
)
@pytest.mark.parametrize(("m", "n", "group"), [(128, 128, 1), (256, 256, 2), (128, 64, 2)])
def test_block_scaling(
    kind: str, types: str, scale: str, blocks: int, ids: tuple[int, int], named: str, m: int, n: int, group: int
) -> None:
    bench, found, expected = scaled(kind, m, n, *types.split(), scale, blocks, group, ids, named=named)
    assert bench.faults == []
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["mxf8f6f4", "mxf4"])
def test_block_scaling_with_a_in_tensor_memory(kind: str) -> None:
    element, blocks = ("e4m3", 1) if kind == "mxf8f6f4" else ("e2m1", 2)
    bench, found, expected = scaled(kind, 128, 64, element, element, "ue8m0", blocks, in_tensor=True)
    assert bench.faults == []
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_nan_is_canonical_and_infinity_stays() -> None:
    shape = shape_of("f16", 128, 16, "bf16", "bf16")
    bench = Bench("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;", threads=1)
    bench.allocate()
    a, b = np.zeros((128, 16), np.uint16), np.full((16, 16), 0x3F80, np.uint16)
    a[0, 0], a[1, 0], a[2, :2] = 0x7F80, 0x7FC1, (0x7F80, 0xFF80)
    place = Place(A_AT, 16, 1024, SWIZZLE_128B)
    bench.set({"%r1": 0, "%r3": describe(shape), "%rd1": bench.matrix(place, a, "bf16"), "%p1": 0})
    bench.set({"%rd2": bench.matrix(Place(B_AT, 16, 1024, SWIZZLE_128B), b, "bf16")})
    bench.run()
    assert [hex(bench.words()[row, 0]) for row in range(4)] == ["0x7f800000", "0x7fffffff", "0x7fffffff", "0x0"]
