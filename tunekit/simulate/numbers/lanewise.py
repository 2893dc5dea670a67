"""Steps that compute every lane on its own, and the table from an opcode and a type to the unit that decodes it.

A kernel is a function over whole operands, kernel(a, b, ..., out): arrays of 32 lanes (or [32, 2] for two values a
lane). It may write `out` only after it has read what it needs, because `out` may be one of the inputs; lanes that
are not active are computed too and thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tunekit.simulate.machine.decode import Decode, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx.module import Instruction, Operand

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

Kernel: TypeAlias = Callable[..., None]
At: TypeAlias = tuple[str, int]
"""A view's name and a slot in it."""

VIEWS = {
    **{t: t for t in ("u16", "s16", "u32", "s32", "f32", "u64", "s64", "f64", "f32x2", "pred")},
    **dict.fromkeys(("b8", "u8", "b16", "f16", "bf16"), "u16"),
    "s8": "s16",
    **dict.fromkeys(("b32", "tf32"), "u32"),
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2"), "h2"),
    "b64": "u64",
    "b128": "u64x2",
}
"""The view in which a unit computes a type. Half precision is computed from its bit patterns."""

_TABLES: dict[str, dict[str, Decode]] = {}


def typed(opcodes: str, types: str) -> Callable[[Decode], Decode]:
    """Registers a decoder for `opcodes` (words) where the last modifier is one of `types` (words)."""

    def register(decode: Decode) -> Decode:
        for opcode in opcodes.split():
            table = _TABLES.get(opcode)
            if table is None:
                table = _TABLES[opcode] = {}
                instruction(opcode)(_dispatcher(table))
            for type_ in types.split():
                if type_ in table:
                    raise ValueError(f"{opcode}.{type_} is registered twice")
                table[type_] = decode
        return decode

    return register


def _dispatcher(table: dict[str, Decode]) -> Decode:
    def decode(i: Instruction, d: Decoder) -> Step:
        chosen = table.get(i.modifiers[-1]) if i.modifiers else None
        if chosen is None:
            raise d.unsupported("this type")
        return chosen(i, d)

    return decode


class Modifiers:
    """The modifiers of an instruction, taken one after another; `end` refuses what nobody took."""

    def __init__(self, i: Instruction, d: Decoder) -> None:
        self._left = list(i.modifiers)
        self._decoder = d

    def take(self, name: str) -> bool:
        if name in self._left:
            self._left.remove(name)
            return True
        return False

    def choose(self, names: Iterable[str], default: str = "") -> str:
        """The one of `names` that is there, else `default`; an empty default means that one is required."""
        found = [name for name in names if name in self._left]
        if len(found) > 1 or (not found and not default):
            raise self._decoder.unsupported(f"needs exactly one of {', '.join('.' + name for name in names)}")
        if not found:
            return default
        self._left.remove(found[0])
        return found[0]

    def last(self) -> str:
        """Takes the last modifier: the type."""
        if not self._left:
            raise self._decoder.unsupported("a type is missing")
        return self._left.pop()

    def end(self) -> None:
        if self._left:
            raise self._decoder.unsupported(f"modifier .{self._left[0]} in this combination")


def source(d: Decoder, operand: Operand, type_: str) -> At:
    return VIEWS[type_], d.read(operand, type_)


def target(d: Decoder, operand: Operand, type_: str) -> At:
    return VIEWS[type_], d.write(operand, type_)


def operands(i: Instruction, d: Decoder, count: int) -> None:
    """Refuses an instruction without exactly `count` operands."""
    if len(i.operands) != count:
        raise d.unsupported(f"{len(i.operands)} operands where {count} are known")


def straight(i: Instruction, d: Decoder, kernel: Kernel, type_: str, inputs: int, result: str = "") -> Step:
    """The step of an instruction whose inputs all have type `type_`, and its result too unless said otherwise."""
    operands(i, d, inputs + 1)
    sources = [source(d, operand, type_) for operand in i.operands[1:]]
    return lanewise(kernel, target(d, i.operands[0], result or type_), *sources)


def keep(out: Any, result: Any, lanes: Lanes) -> None:
    """Writes the active lanes of a result."""
    if lanes.all:
        out[...] = result
    else:
        np.copyto(out, result, where=lanes.mask if out.ndim == 1 else lanes.mask[:, None])


def lanewise(kernel: Kernel, out: At, *inputs: At) -> Step:
    """The step that applies `kernel` to the inputs and keeps the active lanes."""
    view, o = out
    if len(inputs) == 1:
        ((view_a, a),) = inputs

        def one(w: Warp, lanes: Lanes) -> Wait | None:
            result = getattr(w, view)[o]
            if lanes.all:
                kernel(getattr(w, view_a)[a], result)
            else:
                fresh = np.empty_like(result)
                kernel(getattr(w, view_a)[a], fresh)
                keep(result, fresh, lanes)
            return None

        return one
    if len(inputs) == 2:
        (view_a, a), (view_b, b) = inputs

        def two(w: Warp, lanes: Lanes) -> Wait | None:
            result = getattr(w, view)[o]
            if lanes.all:
                kernel(getattr(w, view_a)[a], getattr(w, view_b)[b], result)
            else:
                fresh = np.empty_like(result)
                kernel(getattr(w, view_a)[a], getattr(w, view_b)[b], fresh)
                keep(result, fresh, lanes)
            return None

        return two

    def many(w: Warp, lanes: Lanes) -> Wait | None:
        result = getattr(w, view)[o]
        values = [getattr(w, name)[slot] for name, slot in inputs]
        if lanes.all:
            kernel(*values, result)
        else:
            fresh = np.empty_like(result)
            kernel(*values, fresh)
            keep(result, fresh, lanes)
        return None

    return many
