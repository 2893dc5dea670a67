"""Comparison and selection (PTX ISA 9.7.6 and 9.7.7): setp, set, selp, slct."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.numbers.formats import Array, decode
from tunekit.simulate.numbers.ieee import flushed
from tunekit.simulate.numbers.lanewise import VIEWS, At, Modifiers, keep, lanewise, operands, source, typed
from tunekit.simulate.ptx.module import Immediate, Instruction, Operand, Pair
from tunekit.simulate.units.half import flush

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

Compare = Callable[[Any, Any], Any]

ORDERED: dict[str, Compare] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNORDERED: dict[str, Compare] = {
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
INTEGER: dict[str, Compare] = {**ORDERED, "ne": np.not_equal}
UNSIGNED: dict[str, Compare] = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}

INTEGERS = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def comparison(type_: str, m: Modifiers, d: Decoder) -> Compare:
    """The comparison of two operands as they lie in registers, for the operators that `type_` has."""
    if type_ in INTEGERS:
        untyped: dict[str, Compare] = {"eq": np.equal, "ne": np.not_equal}
        known = {"b": untyped, "s": INTEGER, "u": {**INTEGER, **UNSIGNED}}[type_[0]]
        return known[m.choose(known)]
    known = {**ORDERED, **UNORDERED}
    compare = known[m.choose(known)]
    ftz = type_ not in ("f64", "bf16", "bf16x2") and m.take("ftz")
    if type_ in HALVES:
        format = type_.removesuffix("x2")

        def half(a: Array, b: Array) -> Any:
            if ftz:
                a, b = flush(a, format), flush(b, format)
            return compare(decode(a, format), decode(b, format))

        return half
    if type_ not in ("f32", "f64"):
        raise d.unsupported("this type")
    if ftz:
        return lambda a, b: compare(flushed(a), flushed(b))
    return compare


def _condition(i: Instruction, d: Decoder, m: Modifiers, first: int) -> tuple[Any, int, bool]:
    """(BoolOp or None, slot, negated) of a comparison's last operand."""
    combine = m.choose(COMBINE, "none")
    if combine == "none":
        operands(i, d, first)
        return None, -1, False
    operands(i, d, first + 1)
    last = i.operands[first]
    if isinstance(last, Immediate):
        return COMBINE[combine], d.constant(int(last.value != 0), 1), False
    return COMBINE[combine], *d.predicate(last)


@instruction("setp")
def setp(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    combine, c, negated = _condition(i, d, m, 3)
    compare = comparison(type_, m, d)
    m.end()
    pair = type_.endswith("x2")
    destination = i.operands[0]
    if isinstance(destination, Pair):
        if type_ in ("f16", "bf16"):
            raise d.unsupported("two predicates for one comparison of this type")
        p, q = d.write(destination.first, "pred"), d.write(destination.second, "pred")
    else:
        if pair:
            raise d.unsupported("one predicate for two comparisons")
        p, q = d.write(destination, "pred"), -1
    (view, a), (_, b) = (source(d, x, type_) for x in i.operands[1:3])
    if q < 0 and combine is None:
        if isinstance(compare, np.ufunc):

            def plain(x: Array, y: Array, out: Array) -> None:
                compare(x, y, out)

            return lanewise(plain, ("pred", p), (view, a), (view, b))

        def assigned(x: Array, y: Array, out: Array) -> None:
            out[...] = compare(x, y)

        return lanewise(assigned, ("pred", p), (view, a), (view, b))

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        values = getattr(w, view)
        truth = compare(values[a], values[b])
        first, second = (truth[:, 0], truth[:, 1]) if pair else (truth, ~truth)
        if combine is not None:
            other = ~w.pred[c] if negated else w.pred[c]
            first, second = combine(first, other), combine(second, other)
        keep(w.pred[p], first, lanes)
        if q >= 0:
            keep(w.pred[q], second, lanes)
        return None

    return step


# What `set` writes for true, by destination type. u32 and s32 of two halves take 0xFFFF for each.
_TRUE = {
    **dict.fromkeys(("u32", "s32"), 0xFFFFFFFF),
    **dict.fromkeys(("u16", "s16"), 0xFFFF),
    "f32": 0x3F800000,
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "f16x2": 0x3C00,
    "bf16x2": 0x3F80,
}


def _results(type_: str) -> tuple[str, ...]:
    """Destination types of `set` by the type it compares."""
    if type_.endswith("x2"):
        return (type_, "u32", "s32")
    halves = ("bf16",) if type_ == "bf16" else ("f16", "bf16")
    return (*halves, "u32", "s32", *(("u16", "s16") if type_ in HALVES else ("f32",)))


@instruction("set")
def set_(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    type_ = m.last()
    result = m.last()
    combine, c, negated = _condition(i, d, m, 3)
    compare = comparison(type_, m, d)
    m.end()
    pair = type_.endswith("x2")
    if result not in _results(type_) or (result == "bf16" and "ftz" in i.modifiers):
        raise d.unsupported("this pair of types")
    view = "h2" if pair else {"f32": "u32", "s32": "u32", "s16": "u16"}.get(result, VIEWS[result])
    o = d.write(i.operands[0], result)
    (view_a, a), (_, b) = (source(d, x, type_) for x in i.operands[1:3])
    true = _TRUE[result] & 0xFFFF if pair else _TRUE[result]

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        values = getattr(w, view_a)
        truth = compare(values[a], values[b])
        if combine is not None:
            other = ~w.pred[c] if negated else w.pred[c]
            truth = combine(truth, other[:, None] if pair else other)
        out = getattr(w, view)[o]
        keep(out, np.where(truth, out.dtype.type(true), out.dtype.type(0)), lanes)
        return None

    return step


_ALL = b"\1" * 32
_NONE = b"\0" * 32
_SELECTABLE = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"


def _as_written(d: Decoder, operand: Operand, type_: str) -> At:
    """A source copied bit by bit: literals are read in the instruction's type, all in the unsigned view."""
    return f"u{VIEWS[type_][1:]}", d.read(operand, type_)


@typed("selp", _SELECTABLE)
def selp(i: Instruction, d: Decoder) -> Step:
    operands(i, d, 4)
    type_ = i.modifiers[0]
    if len(i.modifiers) != 1:
        raise d.unsupported("modifiers on selp")
    view, a = _as_written(d, i.operands[1], type_)
    _, b = _as_written(d, i.operands[2], type_)
    p, negated = d.predicate(i.operands[3])
    o = d.write(i.operands[0], type_)
    if negated:
        a, b = b, a

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        values = getattr(w, view)
        chosen = w.pred[p]
        if lanes.all:
            # Usually all lanes agree, and a copy costs a third of a selection.
            octets = chosen.tobytes()
            if octets == _ALL:
                values[o][...] = values[a]
            elif octets == _NONE:
                values[o][...] = values[b]
            else:
                values[o][...] = np.where(chosen, values[a], values[b])
        else:
            keep(values[o], np.where(chosen, values[a], values[b]), lanes)
        return None

    return step


@instruction("slct")
def slct(i: Instruction, d: Decoder) -> Step:
    """c >= 0 selects a. A NaN compares false, so b is taken; -0 counts as zero."""
    m = Modifiers(i, d)
    by, type_ = m.last(), m.last()
    ftz = by == "f32" and m.take("ftz")
    m.end()
    operands(i, d, 4)
    if by not in ("s32", "f32") or type_ not in _SELECTABLE.split():
        raise d.unsupported("this type")
    a, b = (_as_written(d, x, type_) for x in i.operands[1:3])

    def kernel(x: Array, y: Array, c: Array, out: Array) -> None:
        out[...] = np.where((flushed(c) if ftz else c) >= 0, x, y)

    return lanewise(kernel, _destination(d, i.operands[0], type_), a, b, source(d, i.operands[3], by))


def _destination(d: Decoder, operand: Operand, type_: str) -> At:
    return f"u{VIEWS[type_][1:]}", d.write(operand, type_)
