"""Asynchronous stores and reductions to other CTAs (PTX ISA 9.7.9, 9.7.13): st.async and red.async.

Each lane's operation happens at a time of its own and then counts its bytes on an mbarrier in the same CTA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import HAPPENED, Access
from tunekit.simulate.machine.decode import TYPE_BITS, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.memory import RANK_SHIFT, SHARED_BASE
from tunekit.simulate.machine.reach import Place, reach
from tunekit.simulate.machine.transfer import Bytes, sources
from tunekit.simulate.numbers.reduction import supports
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.completion import Signal, completed
from tunekit.simulate.units.atomic import Update, updater

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_COMPLETION = "mbarrier::complete_tx::bytes"
_REDUCTIONS = frozenset(("add", "inc", "dec", "min", "max", "and", "or", "xor"))


@instruction("st.async", "red.async")
def store_async(i: ptx.Instruction, d: Decoder) -> Step:
    if _COMPLETION not in i.modifiers:
        raise d.unsupported(f"without .{_COMPLETION}")
    type_ = i.modifiers[-1]
    space = "shared::cluster" if "shared::cluster" in i.modifiers else "generic"
    address, mbarrier = d.address(i.operands[0]), d.address(i.operands[2])
    value = sources(d, i.operands[1], type_)
    if value.size not in (4, 8) or value.total > 16:
        raise d.unsupported(f"{len(value.slots)} elements of .{type_}")
    update: Update | None = None
    if i.opcode == "red":
        operation = next((word for word in i.modifiers if word in _REDUCTIONS), "")
        if not operation or not supports(operation, type_) or TYPE_BITS[type_] not in (32, 64):
            raise d.unsupported(f".{operation} on .{type_}")
        update = updater(operation, type_, flush=False)
    what = f"{i.dotted} at PTX line {i.line}"

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        data = value.gather(w, lanes)
        addresses, barriers = address.of(w, lanes), mbarrier.of(w, lanes)
        for k, lane in enumerate(lanes.indices):
            one = Lanes.of(1 << int(lane))
            signal = Signal.of(w, space, int(barriers[k]))
            places = reach(w, space, addresses[k : k + 1], value.total, one)
            if signal is None or not places:
                continue
            if int(addresses[k]) % SHARED_BASE >> RANK_SHIFT != signal.cta.rank:
                w.fault(FaultKind.ILLEGAL, f"{i.dotted}: the data and the mbarrier are in different CTAs", one)
            _submit(w, signal, places[0], data[k : k + 1], update, what)
        w.cta.cluster.changes += 1
        return None

    return step


def _submit(w: Warp, signal: Signal, place: Place, data: Bytes, update: Update | None, what: str) -> None:
    agent = signal.agent("generic")
    agent.epoch += 1
    row = w.known.rows[HAPPENED].copy()
    access = Access(agent, agent.epoch, row, row, (w, w.instruction), strong=update is not None)
    order = w.cta.cluster.order

    def act() -> None:
        new = data
        if update is not None:
            new = update(place.region.read(place.offsets, data.shape[1], access), np.ascontiguousarray(data))
        place.region.write(place.offsets, new, access)
        signal.complete_tx(data.shape[1], completed(order, access))

    w.cta.cluster.engine.submit(act, None, what)
