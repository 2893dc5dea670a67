"""Logic and shifts (PTX ISA 9.7.8): and, or, xor, not, cnot, lop3, shl, shr, shf, and prmt of 9.7.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tunekit.simulate.machine.decode import TYPE_BITS, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.numbers.formats import Array
from tunekit.simulate.numbers.lanewise import Modifiers, keep, lanewise, operands, source, straight, target, typed
from tunekit.simulate.ptx.module import Immediate, Instruction, Pair

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp


@typed("and or xor", "pred b16 b32 b64")
def binary(i: Instruction, d: Decoder) -> Step:
    _alone(i, d)
    operation: Any = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[i.opcode]

    def kernel(a: Array, b: Array, out: Array) -> None:
        operation(a, b, out)

    return straight(i, d, kernel, i.modifiers[0], 2)


@typed("not", "pred b16 b32 b64")
def negate(i: Instruction, d: Decoder) -> Step:
    _alone(i, d)

    def kernel(a: Array, out: Array) -> None:
        np.invert(a, out)

    return straight(i, d, kernel, i.modifiers[0], 1)


@typed("cnot", "b16 b32 b64")
def cnot(i: Instruction, d: Decoder) -> Step:
    _alone(i, d)

    def kernel(a: Array, out: Array) -> None:
        out[...] = a == 0

    return straight(i, d, kernel, i.modifiers[0], 1)


def _alone(i: Instruction, d: Decoder) -> None:
    if len(i.modifiers) != 1:
        raise d.unsupported("modifiers on this instruction")


# The sixteen functions of two inputs by their truth table, bit 2b + c.
_OF_TWO: tuple[Callable[[Any, Any], Any], ...] = (
    lambda b, c: b ^ b,
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: ~(b ^ b),
)


def look_up(a: Array, b: Array, c: Array, table: int) -> Array:
    """The function of three bits whose value for (a, b, c) is bit 4a + 2b + c of `table`, on all bits at once."""
    with_a, without_a = _OF_TWO[table >> 4](b, c), _OF_TWO[table & 15](b, c)
    return np.asarray((a & with_a) | (~a & without_a))


@instruction("lop3")
def lop3(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.choose(("b32",))
    combine = m.choose(("and", "or"), "none")
    m.end()
    operands(i, d, 5 if combine == "none" else 6)
    table = i.operands[4]
    if not isinstance(table, Immediate):
        raise d.unsupported("a table that is no literal")
    immediate = table.value & 0xFF
    sources = [source(d, x, "b32") for x in i.operands[1:4]]

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        out[...] = look_up(a, b, c, immediate)

    if combine == "none":
        return lanewise(kernel, target(d, i.operands[0], "b32"), *sources)
    both = i.operands[0]
    if not isinstance(both, Pair):
        raise d.unsupported("a destination without a predicate")
    (_, o), p = target(d, both.first, "b32"), d.write(both.second, "pred")
    q, negated = d.predicate(i.operands[5])
    (_, a), (_, b), (_, c) = sources

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        result = look_up(w.u32[a], w.u32[b], w.u32[c], immediate)
        other = ~w.pred[q] if negated else w.pred[q]
        truth = (result != 0) & other if combine == "and" else (result != 0) | other
        keep(w.u32[o], result, lanes)
        keep(w.pred[p], truth, lanes)
        return None

    return step


@typed("shl shr", "b16 b32 b64 u16 u32 u64 s16 s32 s64")
def shift(i: Instruction, d: Decoder) -> Step:
    """An amount beyond the width counts as the width: zeros, or sign bits, remain."""
    _alone(i, d)
    operands(i, d, 3)
    type_ = i.modifiers[0]
    if i.opcode == "shl" and type_[0] != "b":
        raise d.unsupported("this type")
    bits = TYPE_BITS[type_]
    sources = source(d, i.operands[1], type_), source(d, i.operands[2], "u32")
    out = target(d, i.operands[0], type_)
    amount = d.constants.get(sources[1][1])
    if amount is not None:
        return _by_constant(i, d, amount, bits)
    kind = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{bits // 8}")
    operation: Any = np.left_shift if i.opcode == "shl" else np.right_shift
    beyond = np.uint32(bits - 1)

    def kernel(a: Array, b: Array, result: Array) -> None:
        shifted = operation(a, np.minimum(b, beyond).astype(kind))
        if kind.kind == "u":
            shifted = np.where(b > beyond, kind.type(0), shifted)
        result[...] = shifted

    return lanewise(kernel, out, *sources)


def _by_constant(i: Instruction, d: Decoder, amount: int, bits: int) -> Step:
    type_ = i.modifiers[0]
    kind = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{bits // 8}")
    inside = np.array(min(amount, bits - 1), kind)
    gone = amount >= bits and kind.kind == "u"
    operation: Any = np.left_shift if i.opcode == "shl" else np.right_shift

    def kernel(a: Array, out: Array) -> None:
        if gone:
            out[...] = 0
        else:
            operation(a, inside, out)

    return lanewise(kernel, target(d, i.operands[0], type_), source(d, i.operands[1], type_))


@instruction("shf")
def funnel(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.choose(("b32",))
    left, clamp = m.choose(("l", "r")) == "l", m.choose(("clamp", "wrap")) == "clamp"
    m.end()

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        n = np.minimum(c, np.uint32(32)).astype(np.uint64) if clamp else (c & np.uint32(31)).astype(np.uint64)
        whole = (b.astype(np.uint64) << np.uint64(32)) | a
        out[...] = (whole << n) >> np.uint64(32) if left else (whole >> n) & np.uint64(0xFFFFFFFF)

    return straight(i, d, kernel, "b32", 3)


# Which source byte goes to result bytes 0 to 3, for each value of the two lowest bits of the selector (table of prmt).
_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def _pick(i: Instruction, d: Decoder, places: tuple[int, ...]) -> Step:
    """prmt with a selector that is known and replicates no sign: byte k of the result is byte places[k] of {b, a}."""

    def kernel(a: Array, b: Array, out: Array) -> None:
        octets = a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)
        picked = np.empty((len(a), 4), np.uint8)
        for k, place in enumerate(places):
            picked[:, k] = octets[place >> 2][:, place & 3]
        out[...] = picked.view(np.uint32)[:, 0]

    sources = [source(d, x, "b32") for x in i.operands[1:3]]
    return lanewise(kernel, target(d, i.operands[0], "b32"), *sources)


@instruction("prmt")
def prmt(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.choose(("b32",))
    mode = m.choose(_MODES, "generic")
    m.end()
    operands(i, d, 4)
    selector = i.operands[3]
    if mode == "generic" and isinstance(selector, Immediate) and not selector.value & 0x8888:
        return _pick(i, d, tuple(selector.value >> (4 * k) & 7 for k in range(4)))
    table = np.array(_MODES[mode]) if mode != "generic" else None
    nibbles = np.arange(0, 16, 4, dtype=np.uint32)

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        octets = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], axis=1)
        if table is not None:
            picked = np.take_along_axis(octets, table[c & 3], axis=1)
        else:
            selectors = (c[:, None] >> nibbles) & 15
            picked = np.take_along_axis(octets, (selectors & 7).astype(np.intp), axis=1)
            sign = np.where(picked & 0x80, np.uint8(0xFF), np.uint8(0))
            picked = np.where(selectors & 8, sign, picked)
        out[...] = np.ascontiguousarray(picked).view(np.uint32)[:, 0]

    return straight(i, d, kernel, "b32", 3)
