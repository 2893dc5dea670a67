"""mov with its packing forms, cvta, isspacep, and the registers that tell the time (PTX ISA 9.7.9 and 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.machine.decode import TYPE_BITS, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.memory import CONST_BASE, LOCAL_BASE, PARAM_BASE, RANK_SHIFT, SHARED_BASE
from tunekit.simulate.numbers.formats import Array
from tunekit.simulate.numbers.lanewise import VIEWS, keep, lanewise, operands
from tunekit.simulate.ptx.module import Instruction, Special, Vector

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_NUMBERS = tuple(f"{kind}{bits}" for kind in "bus" for bits in (16, 32, 64))
_MOVABLE = ("pred", *_NUMBERS, "f32", "f64", "b128")
_UNSIGNED = {1: "pred", 16: "u16", 32: "u32", 64: "u64", 128: "u64x2"}
CLOCKS = {
    "%clock": 32,
    "%clock_hi": 32,
    "%clock64": 64,
    "%globaltimer": 64,
    "%globaltimer_lo": 32,
    "%globaltimer_hi": 32,
}


def _view(bits: int) -> str:
    """The unsigned view of a width; 8-bit values live in 16-bit registers."""
    return _UNSIGNED[max(bits, 16) if bits > 1 else 1]


@instruction("mov", moves=True)
def mov(i: Instruction, d: Decoder) -> Step:
    operands(i, d, 2)
    if len(i.modifiers) != 1 or i.modifiers[0] not in _MOVABLE:
        raise d.unsupported("this type")
    type_ = i.modifiers[0]
    to, value = i.operands
    if isinstance(value, Special) and value.name in CLOCKS:
        return tell_time(i, d, value.name)
    if isinstance(value, Vector) and isinstance(to, Vector):
        raise d.unsupported("two vectors")
    if isinstance(value, Vector):
        return pack(i, d, type_, value)
    if isinstance(to, Vector):
        return unpack(i, d, type_, to)
    view = _view(TYPE_BITS[type_])
    a, o = d.read(value, type_), d.write(to, type_)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        values = getattr(w, view)
        keep(values[o], values[a], lanes)
        return None

    return step


def _part(d: Decoder, type_: str, vector: Vector) -> tuple[str, int]:
    """(type, number) of the parts of a packed value."""
    count = len(vector.items)
    bits = TYPE_BITS[type_] // count if count in (2, 4) else 0
    if bits not in (8, 16, 32, 64):
        raise d.unsupported(f"a vector of {count}")
    return f"b{bits}", count


def _parts_of(bits: int, whole: int) -> str:
    """The view of a whole register as its two halves, where there is one."""
    return {(16, 32): "h2", (32, 64): "u32x2", (64, 128): "u64x2"}.get((bits, whole), "")


def pack(i: Instruction, d: Decoder, type_: str, vector: Vector) -> Step:
    """The first item becomes the least significant part."""
    part, count = _part(d, type_, vector)
    whole, bits = TYPE_BITS[type_], TYPE_BITS[part]
    items = [d.read(item, part) for item in vector.items]
    o = d.write(i.operands[0], type_)
    halves, view = _parts_of(bits, whole), _view(bits)
    if count == 2 and halves:
        low, high = items

        def two(w: Warp, lanes: Lanes) -> Wait | None:
            out, values = getattr(w, halves)[o], getattr(w, view)
            if lanes.all:
                out[:, 0] = values[low]
                out[:, 1] = values[high]
            else:
                np.copyto(out[:, 0], values[low], where=lanes.mask)
                np.copyto(out[:, 1], values[high], where=lanes.mask)
            return None

        return two
    if whole == 128:
        raise d.unsupported("a vector of four in 128 bits")
    kind = np.dtype(f"u{whole // 8}")
    mask = kind.type((1 << bits) - 1)

    def many(w: Warp, lanes: Lanes) -> Wait | None:
        values = getattr(w, view)
        result = np.zeros(32, kind)
        for k, item in enumerate(items):
            result |= (values[item].astype(kind) & mask) << kind.type(k * bits)
        keep(getattr(w, _view(whole))[o], result, lanes)
        return None

    return many


def unpack(i: Instruction, d: Decoder, type_: str, vector: Vector) -> Step:
    part, count = _part(d, type_, vector)
    whole, bits = TYPE_BITS[type_], TYPE_BITS[part]
    a = d.read(i.operands[1], type_)
    items = [(k, d.write(item, part)) for k, item in enumerate(vector.items) if not d.sink(item)]
    halves, view = _parts_of(bits, whole), _view(bits)
    if count == 2 and halves:

        def two(w: Warp, lanes: Lanes) -> Wait | None:
            value, outs = getattr(w, halves)[a], getattr(w, view)
            for k, o in items:
                if lanes.all:
                    outs[o][...] = value[:, k]
                else:
                    np.copyto(outs[o], value[:, k], where=lanes.mask)
            return None

        return two
    if whole == 128:
        raise d.unsupported("a vector of four in 128 bits")
    mask = (1 << bits) - 1

    def many(w: Warp, lanes: Lanes) -> Wait | None:
        value, outs = getattr(w, _view(whole))[a], getattr(w, view)
        for k, o in items:
            field = (value >> value.dtype.type(k * bits)) & value.dtype.type(mask)
            keep(outs[o], field.astype(outs[o].dtype), lanes)
        return None

    return many


class Clock:
    """A warp's clock. It is no measure of time: it counts instructions and readings, and never stands still."""

    def __init__(self, w: Warp) -> None:
        self._warp = w
        self._readings = 0

    def read(self) -> int:
        self._readings += 1
        return self._warp.executed + self._readings


def tell_time(i: Instruction, d: Decoder, name: str) -> Step:
    """%clock and its like from the warp's clock; %globaltimer (ns) runs a thousand times faster, from a fixed start."""
    bits = CLOCKS[name]
    o = d.write(i.operands[0], f"b{bits}")
    view = _view(bits)
    shift = 32 if name.endswith("_hi") else 0

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        now = w.part(Clock).read()
        if name.startswith("%globaltimer"):
            now = now * 1000 + (1 << 60)
        out = getattr(w, view)[o]
        keep(out, np.full(32, (now >> shift) & ((1 << bits) - 1), out.dtype), lanes)
        return None

    return step


# Distance from an address within a state space to its generic address. Addresses of parameters, constants and global
# variables are generic already.
_BASES = {
    "shared": SHARED_BASE,
    "shared::cta": SHARED_BASE,
    "shared::cluster": SHARED_BASE,
    "local": LOCAL_BASE,
    "global": 0,
    "const": 0,
    "param": 0,
    "param::entry": 0,
}


@instruction("cvta", moves=True)
def cvta(i: Instruction, d: Decoder) -> Step:
    operands(i, d, 2)
    *names, size = i.modifiers
    back = names[0] == "to"
    spaces = names[1:] if back else names
    if size != "u64" or len(spaces) != 1 or spaces[0] not in _BASES:
        raise d.unsupported("this space or size (addresses are 64 bits wide)")
    base = np.uint64(_BASES[spaces[0]])

    def kernel(a: Array, out: Array) -> None:
        if back:
            np.subtract(a, base, out)
        else:
            np.add(a, base, out)

    return lanewise(kernel, (VIEWS["b64"], d.write(i.operands[0], "b64")), (VIEWS["b64"], d.read(i.operands[1], "b64")))


@instruction("isspacep")
def isspacep(i: Instruction, d: Decoder) -> Step:
    operands(i, d, 2)
    (space,) = i.modifiers
    if space not in _BASES:
        raise d.unsupported("this space")
    window = np.uint64(56)
    bases = {**_BASES, "param": PARAM_BASE, "param::entry": PARAM_BASE, "const": CONST_BASE}
    number = np.uint64(bases[space] >> 56)
    p, a = d.write(i.operands[0], "pred"), d.read(i.operands[1], "u64")
    own = space in ("shared", "shared::cta")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        address = w.u64[a]
        top = address >> window
        if space == "global":
            # The window of parameters lies within global memory's (ISA, isspacep).
            inside = (top == 0) | (top == np.uint64(PARAM_BASE >> 56))
        else:
            inside = top == number
        if own:
            rank = (address >> np.uint64(RANK_SHIFT)) & np.uint64((1 << (56 - RANK_SHIFT)) - 1)
            inside = inside & (rank == np.uint64(w.cta.rank))
        keep(w.pred[p], inside, lanes)
        return None

    return step
