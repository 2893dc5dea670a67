"""Integer, bit-field, logic and shift instructions against Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from alu_lanes import corners, each, on_lanes, on_lanes_unguarded

TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def bits_of(type_: str) -> int:
    return int(type_[1:])


def unsigned(type_: str) -> Any:
    return np.dtype(f"u{bits_of(type_) // 8}").type


def number(pattern: int, type_: str) -> int:
    bits = bits_of(type_)
    return pattern - (1 << bits) if type_[0] == "s" and pattern >> (bits - 1) else pattern


def check(text: str, function: Callable[..., int], types: list[str], result: str, seed: int = 0) -> None:
    """Runs `text` on corner values; `function` takes and returns Python integers."""
    inputs = [corners(unsigned(t), seed=seed + k) for k, t in enumerate(types)]
    check_on(text, function, inputs, types, result)


def check_on(text: str, function: Callable[..., int], inputs: list[Any], types: list[str], result: str) -> None:
    (got,) = on_lanes(text, inputs, f"b{bits_of(result)}")
    want = each(lambda *v: function(*(number(x, t) for x, t in zip(v, types, strict=True))), *inputs)
    mask = (1 << bits_of(result)) - 1
    assert got.tolist() == [w & mask for w in want], text


@pytest.mark.parametrize("t", TYPES)
def test_sums_products_and_extremes(t: str) -> None:
    check(f"add.{t} {{x}}, {{a}}, {{b}};", lambda a, b: a + b, [t, t], t)
    check(f"sub.{t} {{x}}, {{a}}, {{b}};", lambda a, b: a - b, [t, t], t)
    check(f"mul.lo.{t} {{x}}, {{a}}, {{b}};", lambda a, b: a * b, [t, t], t)
    check(f"mul.hi.{t} {{x}}, {{a}}, {{b}};", lambda a, b: a * b >> bits_of(t), [t, t], t)
    check(f"mad.lo.{t} {{x}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: a * b + c, [t, t, t], t)
    check(f"mad.hi.{t} {{x}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: (a * b >> bits_of(t)) + c, [t, t, t], t)
    if t in WIDE:
        wide = WIDE[t]
        check(f"mul.wide.{t} {{x}}, {{a}}, {{b}};", lambda a, b: a * b, [t, t], wide)
        check(f"mad.wide.{t} {{x}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: a * b + c, [t, t, wide], wide)
    check(f"min.{t} {{x}}, {{a}}, {{b}};", min, [t, t], t)
    check(f"max.{t} {{x}}, {{a}}, {{b}};", max, [t, t], t)
    check(f"sad.{t} {{x}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: c + abs(a - b), [t, t, t], t)
    if t[0] == "s":
        check(f"abs.{t} {{x}}, {{a}};", abs, [t], t)
        check(f"neg.{t} {{x}}, {{a}};", lambda a: -a, [t], t)


def clamp32(v: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, v))


def test_saturating_forms() -> None:
    check("add.sat.s32 {x}, {a}, {b};", lambda a, b: clamp32(a + b), ["s32", "s32"], "s32")
    check("sub.sat.s32 {x}, {a}, {b};", lambda a, b: clamp32(a - b), ["s32", "s32"], "s32")
    three = ["s32", "s32", "s32"]
    check("mad.hi.sat.s32 {x}, {a}, {b}, {c};", lambda a, b, c: clamp32((a * b >> 32) + c), three, "s32")
    check("min.relu.s32 {x}, {a}, {b};", lambda a, b: max(0, min(a, b)), ["s32", "s32"], "s32")
    check("max.relu.s32 {x}, {a}, {b};", lambda a, b: max(0, a, b), ["s32", "s32"], "s32")


@pytest.mark.parametrize("t", TYPES)
def test_division_truncates(t: str) -> None:
    a, b = corners(unsigned(t), seed=1), corners(unsigned(t), seed=2)
    b[b == 0] = 3

    def quotient(x: int, y: int) -> int:
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    check_on(f"div.{t} {{x}}, {{a}}, {{b}};", quotient, [a, b], [t, t], t)
    check_on(f"rem.{t} {{x}}, {{a}}, {{b}};", lambda x, y: x - y * quotient(x, y), [a, b], [t, t], t)


def test_division_by_zero_ends() -> None:
    a, b = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    (got,) = on_lanes("div.u32 {x}, {a}, {b};", [a, b])
    assert set(got.tolist()) == {0xFFFFFFFF}
    (got,) = on_lanes("rem.s32 {x}, {a}, {b};", [a, b])
    assert got.tolist() == a.tolist()


def halves(v: int, signed: bool) -> tuple[int, int]:
    kind = "s16" if signed else "u16"
    return number(v & 0xFFFF, kind), number(v >> 16, kind)


@pytest.mark.parametrize("t", ["u16x2", "s16x2"])
def test_pairs_of_halves(t: str) -> None:
    def pairwise(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def apply(a: int, b: int) -> int:
            low, high = (
                function(x, y) & 0xFFFF for x, y in zip(halves(a, t[0] == "s"), halves(b, t[0] == "s"), strict=True)
            )
            return high << 16 | low

        return apply

    check(f"add.{t} {{x}}, {{a}}, {{b}};", pairwise(lambda x, y: x + y), ["u32", "u32"], "u32")
    check(f"min.{t} {{x}}, {{a}}, {{b}};", pairwise(min), ["u32", "u32"], "u32")
    check(f"max.{t} {{x}}, {{a}}, {{b}};", pairwise(max), ["u32", "u32"], "u32")
    if t == "s16x2":
        check(f"max.relu.{t} {{x}}, {{a}}, {{b}};", pairwise(lambda x, y: max(0, x, y)), ["u32", "u32"], "u32")


@pytest.mark.parametrize("t", ["u32", "s32"])
def test_24_bit_products(t: str) -> None:
    def low24(v: int) -> int:
        v &= 0xFFFFFF
        return v - (1 << 24) if t == "s32" and v >> 23 else v

    check(f"mul24.lo.{t} {{x}}, {{a}}, {{b}};", lambda a, b: low24(a) * low24(b), [t, t], t)
    check(f"mul24.hi.{t} {{x}}, {{a}}, {{b}};", lambda a, b: low24(a) * low24(b) >> 16, [t, t], t)
    check(f"mad24.lo.{t} {{x}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: low24(a) * low24(b) + c, [t, t, t], t)
    check(f"mad24.hi.{t} {{x}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: (low24(a) * low24(b) >> 16) + c, [t, t, t], t)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["add", "sub"])
def test_carries_join_words(name: str, bits: int) -> None:
    """Three words of a sum or a difference, the carry going through all of them."""
    words = [corners(unsigned(f"u{bits}"), seed=k) for k in range(4)]
    t, mask = f"u{bits}", (1 << bits) - 1
    text = f"{name}.cc.{t} {{x}}, {{a}}, {{c}}; {name}c.cc.{t} {{y}}, {{b}}, {{e}}; {name}c.{t} {{z}}, 0, 0;"
    low, middle, high = on_lanes_unguarded(text, words, f"b{bits} b{bits} b{bits}")
    for k, (a, b, c, e) in enumerate(zip(*(w.tolist() for w in words), strict=True)):
        x, y = a | b << bits, c | e << bits
        total = x + y if name == "add" else x - y
        got = (int(low[k]), int(middle[k]), int(high[k]))
        assert got == (total & mask, total >> bits & mask, total >> (2 * bits) & mask)


@pytest.mark.parametrize("bits", [32, 64])
def test_long_multiplication(bits: int) -> None:
    """A product of two two-word numbers, as the ISA's example for madc writes it."""
    words = [corners(unsigned(f"u{bits}"), seed=k) for k in range(4)]
    t, mask = f"u{bits}", (1 << bits) - 1
    text = (
        f"mul.lo.{t} {{x}}, {{a}}, {{c}}; mul.hi.{t} {{y}}, {{a}}, {{c}}; mad.lo.cc.{t} {{y}}, {{b}}, {{c}}, {{y}};"
        f" madc.hi.{t} {{z}}, {{b}}, {{c}}, 0; mad.lo.cc.{t} {{y}}, {{a}}, {{e}}, {{y}};"
        f" madc.hi.cc.{t} {{z}}, {{a}}, {{e}}, {{z}}; addc.{t} {{w}}, 0, 0;"
        f" mad.lo.cc.{t} {{z}}, {{b}}, {{e}}, {{z}}; madc.hi.{t} {{w}}, {{b}}, {{e}}, {{w}};"
    )
    got = on_lanes_unguarded(text, words, " ".join([f"b{bits}"] * 4))
    for k, (a, b, c, e) in enumerate(zip(*(w.tolist() for w in words), strict=True)):
        product = (a | b << bits) * (c | e << bits)
        assert [int(word[k]) for word in got] == [product >> (bits * n) & mask for n in range(4)]


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
def test_dot_products(a_type: str, b_type: str) -> None:
    def fields(v: int, bits: int, t: str) -> list[int]:
        parts = [v >> (bits * k) & ((1 << bits) - 1) for k in range(32 // bits)]
        return [p - (1 << bits) if t == "s32" and p >> (bits - 1) else p for p in parts]

    def four(a: int, b: int, c: int) -> int:
        return c + sum(x * y for x, y in zip(fields(a, 8, a_type), fields(b, 8, b_type), strict=True))

    def two(first: int) -> Callable[[int, int, int], int]:
        return lambda a, b, c: (
            c + sum(x * y for x, y in zip(fields(a, 16, a_type), fields(b, 8, b_type)[first:], strict=False))
        )

    three = ["u32", "u32", "u32"]
    check(f"dp4a.{a_type}.{b_type} {{x}}, {{a}}, {{b}}, {{c}};", four, three, "u32")
    check(f"dp2a.lo.{a_type}.{b_type} {{x}}, {{a}}, {{b}}, {{c}};", two(0), three, "u32")
    check(f"dp2a.hi.{a_type}.{b_type} {{x}}, {{a}}, {{b}}, {{c}};", two(2), three, "u32")


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_and_finding(bits: int) -> None:
    u, s = f"u{bits}", f"s{bits}"
    check(f"popc.b{bits} {{x}}, {{a}};", lambda a: a.bit_count(), [u], "u32")
    check(f"clz.b{bits} {{x}}, {{a}};", lambda a: bits - a.bit_length(), [u], "u32")
    check(f"brev.b{bits} {{x}}, {{a}};", lambda a: int(f"{a:0{bits}b}"[::-1], 2), [u], u)
    check(f"bfind.{u} {{x}}, {{a}};", lambda a: a.bit_length() - 1, [u], "u32")
    check(f"bfind.{s} {{x}}, {{a}};", lambda a: (~a if a < 0 else a).bit_length() - 1, [s], "u32")

    def amount(a: int) -> int:
        return bits - a.bit_length() if a else -1

    check(f"bfind.shiftamt.{u} {{x}}, {{a}};", amount, [u], "u32")


def small(count: int, seed: int) -> Any:
    """Positions and lengths: mostly small, some beyond every width, some whose upper bits are to be ignored."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.8, rng.integers(0, 70, count), rng.integers(0, 1 << 32, count)).astype(
        np.uint32
    )


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_fields(t: str) -> None:
    top = bits_of(t) - 1
    a, b = corners(unsigned(t), seed=1), corners(unsigned(t), seed=2)
    position, length = small(256, 3), small(256, 4)

    def extract(v: int, pos: int, count: int) -> int:
        pos, count = pos & 255, count & 255
        fill = v >> min(pos + count - 1, top) & 1 if t[0] == "s" and count else 0
        return sum((v >> (pos + k) & 1 if k < count and pos + k <= top else fill) << k for k in range(top + 1))

    check_on(f"bfe.{t} {{x}}, {{a}}, {{b}}, {{c}};", extract, [a, position, length], [f"u{top + 1}", "u32", "u32"], t)
    if t[0] == "u":

        def insert(v: int, into: int, pos: int, count: int) -> int:
            pos, count = pos & 255, count & 255
            for k in range(count):
                if pos + k <= top:
                    into = into & ~(1 << (pos + k)) | (v >> k & 1) << (pos + k)
            return into

        text = f"bfi.b{top + 1} {{x}}, {{a}}, {{b}}, {{c}}, {{e}};"
        check_on(text, insert, [a, b, position, length], [t, t, "u32", "u32"], t)


def test_nth_set_bit() -> None:
    rng = np.random.default_rng(5)
    base, offset = rng.integers(0, 32, 256).astype(np.uint32), rng.integers(-6, 7, 256).astype(np.int32)

    def find(mask: int, start: int, nth: int) -> int:
        if nth == 0:
            return start if mask >> start & 1 else -1
        position, left, step = start, abs(nth) - 1, 1 if nth > 0 else -1
        while 0 <= position < 32:
            if mask >> position & 1:
                if left == 0:
                    return position
                left -= 1
            position += step
        return -1

    inputs = [corners(np.uint32, seed=6), base, offset.view(np.uint32)]
    check_on("fns.b32 {x}, {a}, {b}, {c};", find, inputs, ["u32", "u32", "s32"], "u32")


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_extension_and_masks(mode: str) -> None:
    a, n = corners(np.uint32, seed=7), small(256, 8)

    def extend(t: str) -> Callable[[int, int], int]:
        def apply(v: int, count: int) -> int:
            if count >= 32 and mode == "clamp":
                return v
            count &= 31
            kept = v & ((1 << count) - 1)
            return kept - (1 << count) if t == "s32" and count and kept >> (count - 1) else kept

        return apply

    for t in ("u32", "s32"):
        check_on(f"szext.{mode}.{t} {{x}}, {{a}}, {{b}};", extend(t), [a, n], ["u32", "u32"], "u32")

    def mask(start: int, width: int) -> int:
        if mode == "wrap":
            start, width = start & 31, width & 31
        return sum(1 << k for k in range(start, min(start + width, 32)))

    check_on(f"bmsk.{mode}.b32 {{x}}, {{a}}, {{b}};", mask, [small(256, 9), n], ["u32", "u32"], "u32")


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(bits: int) -> None:
    t = f"u{bits}"
    check(f"and.b{bits} {{x}}, {{a}}, {{b}};", lambda a, b: a & b, [t, t], t)
    check(f"or.b{bits} {{x}}, {{a}}, {{b}};", lambda a, b: a | b, [t, t], t)
    check(f"xor.b{bits} {{x}}, {{a}}, {{b}};", lambda a, b: a ^ b, [t, t], t)
    check(f"not.b{bits} {{x}}, {{a}};", lambda a: ~a, [t], t)
    check(f"cnot.b{bits} {{x}}, {{a}};", lambda a: int(a == 0), [t], t)


def test_logic_of_predicates() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 2, 64).astype(np.bool_) for _ in range(2))
    for name, want in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        (got,) = on_lanes(f"{name}.pred {{x}}, {{a}}, {{b}};", [a, b], "pred")
        np.testing.assert_array_equal(got != 0, want)
    (got,) = on_lanes("not.pred {x}, {a};", [a], "pred")
    np.testing.assert_array_equal(got != 0, ~a)


def test_every_function_of_three_bits() -> None:
    inputs = [corners(np.uint32, 32, seed=k) for k in range(3)]
    for first in range(0, 256, 4):
        text = "".join(f"lop3.b32 {{{d}}}, {{a}}, {{b}}, {{c}}, {first + k};" for k, d in enumerate("xyzw"))
        for k, got in enumerate(on_lanes_unguarded(text, inputs, "b32 b32 b32 b32")):
            want = each(
                lambda a, b, c, t=first + k: sum(
                    (t >> ((a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)) & 1) << bit for bit in range(32)
                ),
                *inputs,
            )
            assert got.tolist() == want


def test_lop3_with_a_predicate() -> None:
    a, b, c = (corners(np.uint32, seed=k) & np.uint32(1) for k in range(3))
    q = np.random.default_rng(2).integers(0, 2, 256).astype(np.bool_)
    value, truth = on_lanes("lop3.and.b32 {x}|{y}, {a}, {b}, {c}, 0x80, {e};", [a, b, c, q], "b32 pred")
    np.testing.assert_array_equal(value, a & b & c)
    np.testing.assert_array_equal(truth != 0, (a & b & c != 0) & q)
    (truth,) = on_lanes("lop3.or.b32 _|{x}, {a}, {b}, {c}, 0xFE, {e};", [a, b, c, q], "pred")
    np.testing.assert_array_equal(truth != 0, (a | b | c != 0) | q)


@pytest.mark.parametrize("t", TYPES)
def test_shifts_stop_at_the_width(t: str) -> None:
    bits = bits_of(t)
    a, n = corners(unsigned(t), seed=1), small(256, 2)
    check_on(f"shr.{t} {{x}}, {{a}}, {{b}};", lambda v, k: v >> min(k, bits), [a, n], [t, "u32"], t)
    for amount in (0, 1, bits - 1, bits, bits + 5):
        check_on(f"shr.{t} {{x}}, {{a}}, {amount};", lambda v, k=amount: v >> k, [a], [t], t)
    if t[0] == "u":
        check_on(f"shl.b{bits} {{x}}, {{a}}, {{b}};", lambda v, k: v << min(k, bits), [a, n], [t, "u32"], t)
        check_on(f"shr.b{bits} {{x}}, {{a}}, {{b}};", lambda v, k: v >> min(k, bits), [a, n], [t, "u32"], t)
        for amount in (0, 1, bits - 1, bits, bits + 5):
            check_on(f"shl.b{bits} {{x}}, {{a}}, {amount};", lambda v, k=amount: v << k, [a], [t], t)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shifts(mode: str) -> None:
    a, b, n = corners(np.uint32, seed=1), corners(np.uint32, seed=2), small(256, 3)

    def count(k: int) -> int:
        return min(k, 32) if mode == "clamp" else k & 31

    three = ["u32", "u32", "u32"]
    check_on(
        f"shf.l.{mode}.b32 {{x}}, {{a}}, {{b}}, {{c}};",
        lambda v, w, k: (w << 32 | v) << count(k) >> 32,
        [a, b, n],
        three,
        "u32",
    )
    check_on(
        f"shf.r.{mode}.b32 {{x}}, {{a}}, {{b}}, {{c}};",
        lambda v, w, k: (w << 32 | v) >> count(k),
        [a, b, n],
        three,
        "u32",
    )


def test_byte_permutation() -> None:
    a, b, c = (corners(np.uint32, seed=k) for k in range(3))

    def permute(v: int, w: int, selectors: int) -> int:
        octets, result = (w << 32 | v).to_bytes(8, "little"), 0
        for k in range(4):
            selector = selectors >> (4 * k) & 15
            octet = octets[selector & 7]
            result |= ((255 if octet >> 7 else 0) if selector & 8 else octet) << (8 * k)
        return result

    check_on("prmt.b32 {x}, {a}, {b}, {c};", permute, [a, b, c], ["u32", "u32", "u32"], "u32")
    for literal in (0x5410, 0x7632, 0x0123, 0x3340, 0xBA98):
        text = f"prmt.b32 {{x}}, {{a}}, {{b}}, {literal};"
        check_on(text, lambda v, w, c=literal: permute(v, w, c), [a, b], ["u32", "u32"], "u32")
    # The ISA's table, bytes from the highest: selector value to source bytes.
    tables = {
        "f4e": ["3210", "4321", "5432", "6543"],
        "b4e": ["5670", "6701", "7012", "0123"],
        "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["3210", "3211", "3222", "3333"],
        "ecr": ["0000", "1110", "2210", "3210"],
        "rc16": ["1010", "3232", "1010", "3232"],
    }
    for mode, rows in tables.items():

        def pick(v: int, w: int, selector: int, rows: list[str] = rows) -> int:
            octets = (w << 32 | v).to_bytes(8, "little")
            return int.from_bytes(bytes(octets[int(digit)] for digit in rows[selector & 3]), "big")

        check_on(f"prmt.b32.{mode} {{x}}, {{a}}, {{b}}, {{c}};", pick, [a, b, c], ["u32", "u32", "u32"], "u32")


def test_literals_are_operands() -> None:
    check("add.s32 {x}, {a}, -7;", lambda a: a - 7, ["s32"], "s32")
    check("mad.lo.s64 {x}, {a}, 4294967296, -1;", lambda a: (a << 32) - 1, ["s64"], "s64")
