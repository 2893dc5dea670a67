"""Loads and stores (PTX ISA 9.7.9): ld, ldu, st, st.bulk.

Cache operators, eviction priorities, prefetch sizes and cache policies are hints: accepted, without effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.patterns import Flags, Patterns
from tunekit.simulate.machine.decode import TYPE_BITS, AddressOf, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.memory import RANK_SHIFT, SHARED_BASE
from tunekit.simulate.machine.transfer import Elements, destinations, sources
from tunekit.simulate.ptx import module as ptx

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "const",
    "param",
    "param::entry",
    "param::func",
)
_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_HINTS = ("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "mmio", "unified")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}

Addresses = NDArray[np.int64]


class Form:
    """What the modifiers of a load or store say."""

    def __init__(self, i: ptx.Instruction, d: Decoder) -> None:
        *words, self.type = i.modifiers
        self.space = "generic"
        self.order = "weak"
        self.count = 1
        if self.type not in TYPE_BITS:
            raise d.unsupported(f"type .{self.type}")
        for word in words:
            if word in SPACES:
                self.space = word
            elif word in _ORDERS:
                self.order = word
            elif word in _VECTORS:
                self.count = _VECTORS[word]
            elif word not in _SCOPES and word not in _HINTS and not word.startswith(("L1::", "L2::")):
                raise d.unsupported(f".{word}")

    @property
    def strong(self) -> bool:
        return self.order != "weak"


def space_of(form: Form, d: Decoder, operand: ptx.Operand) -> str:
    """The space that is really meant: parameters of a call live in local memory."""
    if form.space.startswith("param") and isinstance(operand, ptx.Address) and isinstance(operand.base, ptx.Symbol):
        place = d.symbols.places.get(operand.base.name)
        if place is not None:
            return place.space
    return form.space


@instruction("ld", "ldu")
def ld(i: ptx.Instruction, d: Decoder) -> Step:
    form = Form(i, d)
    out = destinations(d, _wanted(i, form), form.type)
    address = d.address(i.operands[1])
    space = space_of(form, d, i.operands[1])
    if len(out.slots) != form.count:
        raise d.unsupported(f"{len(out.slots)} registers for {form.count} elements")
    if space.startswith("param") or space == "const":
        return _uniform_load(space, address, out)
    if not all(out.present):
        return _partial_load(space, address, out, form)
    size, order, strong = out.total, form.order, form.strong

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        addresses = address.of(w, lanes)
        out.scatter(w, lanes, w.load(space, addresses, size, lanes, strong=strong))
        if strong:
            observe(w, space, addresses, order)
        return None

    return step


def _wanted(i: ptx.Instruction, form: Form) -> ptx.Operand:
    """The destination, with `_` for the elements of which no byte is used (pragma "used_bytes_mask")."""
    out = i.operands[0]
    if i.used_bytes is None or not isinstance(out, ptx.Vector):
        return out
    size = TYPE_BITS[form.type] // 8
    element = (1 << size) - 1
    used = [i.used_bytes >> (k * size) & element for k in range(len(out.items))]
    return ptx.Vector(tuple(item if use else ptx.Sink() for item, use in zip(out.items, used, strict=True)))


def _uniform_load(space: str, address: AddressOf, out: Elements) -> Step:
    """Parameters and constants: mostly one address for the whole warp, read once."""

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        addresses = address.of(w, lanes)
        if lanes.count > 1 and (addresses == addresses[0]).all():
            one = w.load(space, addresses[:1], out.total, Lanes.of(1 << lanes.first))
            out.scatter(w, lanes, np.repeat(one, lanes.count, axis=0))
        else:
            out.scatter(w, lanes, w.load(space, addresses, out.total, lanes))
        return None

    return step


def _partial_load(space: str, address: AddressOf, out: Elements, form: Form) -> Step:
    """A vector with `_`: what is not wanted is not read."""

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        addresses = address.of(w, lanes)
        data = np.zeros((lanes.count, out.total), dtype=np.uint8)
        _check_vector(w, addresses, out.total, lanes)
        for k in np.flatnonzero(out.present):
            at = int(k) * out.size
            data[:, at : at + out.size] = w.load(space, addresses + at, out.size, lanes, strong=form.strong)
        out.scatter(w, lanes, data)
        if form.strong:
            observe(w, space, addresses, form.order)
        return None

    return step


@instruction("st")
def st(i: ptx.Instruction, d: Decoder) -> Step:
    form = Form(i, d)
    address = d.address(i.operands[0])
    value = sources(d, i.operands[1], form.type)
    space = space_of(form, d, i.operands[0])
    if len(value.slots) != form.count:
        raise d.unsupported(f"{len(value.slots)} registers for {form.count} elements")
    if space == "const" or space == "param":
        raise d.unsupported(f"a store to .{space}")
    order, strong = form.order, form.strong
    if not all(value.present):
        return _partial_store(space, address, value, form)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        addresses = address.of(w, lanes)
        w.store(space, addresses, value.gather(w, lanes), lanes, strong=strong)
        if strong:
            pass_on(w, space, addresses, order)
        return None

    return step


def _partial_store(space: str, address: AddressOf, value: Elements, form: Form) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        addresses = address.of(w, lanes)
        data = value.gather(w, lanes)
        _check_vector(w, addresses, value.total, lanes)
        for k in np.flatnonzero(value.present):
            at = int(k) * value.size
            w.store(space, addresses + at, data[:, at : at + value.size], lanes, strong=form.strong)
        if form.strong:
            pass_on(w, space, addresses, form.order)
        return None

    return step


def _check_vector(w: Warp, addresses: Addresses, total: int, lanes: Lanes) -> None:
    odd = addresses % total != 0
    if odd.any():
        where = int(addresses[odd][0])
        w.fault(FaultKind.MISALIGNED, f"a vector of {total} bytes at {where:#x}", lanes)


@instruction("st.bulk")
def st_bulk(i: ptx.Instruction, d: Decoder) -> Step:
    """Fills a region of shared memory with zeros."""
    space = "shared" if any(word.startswith("shared") for word in i.modifiers) else "generic"
    address = d.address(i.operands[0])
    size = d.read(i.operands[1], "b64", relaxed=True)
    narrow = d.widths[size] == 32
    if not isinstance(i.operands[2], ptx.Immediate) or i.operands[2].value != 0:
        raise d.unsupported("an initial value other than 0")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        addresses = address.of(w, lanes)
        sizes = (w.u32 if narrow else w.u64)[size][lanes.indices]
        for lane, start, length in zip(lanes.indices, addresses, sizes, strict=True):
            one = Lanes.of(1 << int(lane))
            if int(start) % 8 or int(length) % 8:
                w.fault(FaultKind.MISALIGNED, f"st.bulk of {int(length)} bytes at {int(start):#x}: multiples of 8", one)
                continue
            if int(length) > w.cta.shared.data.size:  # before as many zeros are made
                w.fault(FaultKind.OUT_OF_BOUNDS, f"st.bulk of {int(length)} bytes at {int(start):#x}", one)
                continue
            w.store(space, np.array([start]), np.zeros((1, int(length)), dtype=np.uint8), one, align=8)
        return None

    return step


def observe(w: Warp, space: str, addresses: Addresses, order: str) -> None:
    """A strong read has seen what the writes at these addresses pass on."""
    flags, patterns = w.cta.cluster.part(Flags), w.part(Patterns)
    for where in flag_addresses(w, space, addresses):
        patterns.acquire(order, flags.read(where))


def pass_on(w: Warp, space: str, addresses: Addresses, order: str) -> None:
    """A strong write passes on what the warp knows, or what it knew at its last fence."""
    known = w.part(Patterns).release(order)
    flags = w.cta.cluster.part(Flags)
    for where in flag_addresses(w, space, addresses):
        flags.write(where, known)


def flag_addresses(w: Warp, space: str, addresses: Addresses) -> list[int]:
    """Generic addresses, each once: the keys of Flags."""
    if space.startswith("shared"):
        addresses = addresses + SHARED_BASE
        if space != "shared::cluster":
            addresses = addresses & ((1 << RANK_SHIFT) - 1) | SHARED_BASE | (w.cta.rank << RANK_SHIFT)
    return [int(where) for where in np.unique(addresses)]
