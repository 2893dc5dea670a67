"""Atomics and reductions on memory (PTX ISA 9.7.13): atom and red, scalar, packed and vector.

Lanes act one after the other, in lane order. Each operation holds the machine's lock, so that it is atomic towards
other processes that simulate other clusters of the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.history.patterns import Flags, Patterns
from tunekit.simulate.machine.decode import TYPE_BITS, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.transfer import Bytes, Elements, destinations, sources
from tunekit.simulate.numbers.reduction import STORAGE, combine, supports
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.units.load_store import Addresses, flag_addresses

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_OPERATIONS = frozenset(("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max"))
_ORDERS = frozenset(("relaxed", "acquire", "release", "acq_rel"))
_SPACES = frozenset(("global", "shared", "shared::cta", "shared::cluster"))
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_IGNORED = frozenset(("cta", "cluster", "gpu", "sys", "noftz", "L2::cache_hint"))

Update = Callable[[Bytes, Bytes], Bytes]
"""(what the locations hold, the operands), uint8[n, size] each: what they hold afterwards."""


class _Form:
    """What the modifiers say; they come in any order ("atom.global.v4.f32.add", "atom.global.add.s32")."""

    def __init__(self, i: ptx.Instruction, d: Decoder) -> None:
        self.space, self.order, self.count = "generic", "relaxed", 1
        self.operation = self.type = ""
        for word in i.modifiers:
            if word in _SPACES:
                self.space = word
            elif word in _ORDERS:
                self.order = word
            elif word in _OPERATIONS:
                self.operation = word
            elif word in _VECTORS:
                self.count = _VECTORS[word]
            elif word in TYPE_BITS:
                self.type = word
            elif word not in _IGNORED:
                raise d.unsupported(f".{word}")
        if not self.operation or not self.type:
            raise d.unsupported("no operation or no type")
        known = self.operation == "cas" or supports(self.operation, self.type)
        if not known and not (self.operation == "exch" and self.type == "b128"):
            raise d.unsupported(f".{self.operation} on .{self.type}")


@instruction("atom")
def atom(i: ptx.Instruction, d: Decoder) -> Step:
    form = _Form(i, d)
    out = destinations(d, i.operands[0], form.type)
    address = d.address(i.operands[1])
    value = sources(d, i.operands[2], form.type)
    swap = sources(d, i.operands[3], form.type) if form.operation == "cas" else None
    return _step(form, address.of, out, value, swap)


@instruction("red")
def red(i: ptx.Instruction, d: Decoder) -> Step:
    form = _Form(i, d)
    address = d.address(i.operands[0])
    return _step(form, address.of, None, sources(d, i.operands[1], form.type), None)


def _step(
    form: _Form,
    address_of: Callable[[Warp, Lanes], Addresses],
    out: Elements | None,
    value: Elements,
    swap: Elements | None,
) -> Step:
    if len(value.slots) != form.count:
        raise ValueError(f"{len(value.slots)} registers for {form.count} elements")
    space = form.space

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        addresses = address_of(w, lanes)
        operands = value.gather(w, lanes)
        if swap is not None:
            operands = np.concatenate([operands, swap.gather(w, lanes)], axis=1)
        local = space.startswith("shared")
        update = updater(form.operation, form.type, flush=not local)
        with nullcontext() if local else w.cta.cluster.lock:
            old = _apply(w, space, addresses, value.total, operands, update, lanes)
        if out is not None:
            out.scatter(w, lanes, old)
        synchronise(w, space, addresses, form.order)
        return None

    return step


def _apply(
    w: Warp, space: str, addresses: Addresses, size: int, operands: Bytes, update: Update, lanes: Lanes
) -> Bytes:
    """Reads, updates and writes; lanes that share an address go one after the other. Returns what each lane read.

    What stays the same is not written, so that a lock that spins changes nothing.
    """
    _, first, place = np.unique(addresses, return_index=True, return_inverse=True)
    if first.size == addresses.size:
        old = before = w.load(space, addresses, size, lanes, strong=True)
        after, where, some = update(old, operands), addresses, lanes
    else:
        order = np.argsort(first)
        first, place = first[order], np.argsort(order)[place.reshape(-1)]
        where, some = addresses[first], _subset(lanes, first)
        before = w.load(space, where, size, some, strong=True)
        after = before.copy()
        old = np.empty((addresses.size, size), dtype=np.uint8)
        for k, at in enumerate(place):
            old[k] = after[at]
            after[at] = update(old[k : k + 1], operands[k : k + 1])[0]
    changed = np.flatnonzero((after != before).any(axis=1))
    if changed.size:
        w.store(space, where[changed], after[changed], _subset(some, changed), strong=True)
    return old


def _subset(lanes: Lanes, which: NDArray[np.int64]) -> Lanes:
    """The lanes at some places among the active ones."""
    return Lanes.of(int(np.bitwise_or.reduce(np.left_shift(1, lanes.indices[which]))))


def updater(operation: str, type_: str, *, flush: bool) -> Update:
    """The update of one operation on one type. cas takes comparand and new value side by side."""
    if operation == "cas":
        return _compare_and_swap
    if operation == "exch":
        return lambda old, operands: operands
    dtype = STORAGE[type_]

    def update(old: Bytes, operands: Bytes) -> Bytes:
        new = combine(operation, type_, old.view(dtype), np.ascontiguousarray(operands).view(dtype), flush=flush)
        return np.ascontiguousarray(new.astype(dtype, copy=False)).view(np.uint8)

    return update


def _compare_and_swap(old: Bytes, operands: Bytes) -> Bytes:
    size = old.shape[1]
    same = (old == operands[:, :size]).all(axis=1)
    return np.where(same[:, None], operands[:, size:], old)


def synchronise(w: Warp, space: str, addresses: Addresses, order: str) -> None:
    """The acquire and the release side of an atomic read-modify-write."""
    flags, patterns = w.cta.cluster.part(Flags), w.part(Patterns)
    places = flag_addresses(w, space, addresses)
    for where in places:
        patterns.acquire(order, flags.read(where))
    known = patterns.release(order)
    for where in places:
        flags.update(where, known)
