"""Barriers of a CTA (PTX ISA 9.7.13): bar and barrier with .sync, .arrive and .red; bar.warp.sync.

Who has arrived is kept in tunekit.simulate.barrier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.barrier import NamedBarrier
from tunekit.simulate.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.faults import FaultKind
from tunekit.simulate.lanes import FULL, Lanes
from tunekit.simulate.ptx import module as ptx

if TYPE_CHECKING:
    from tunekit.simulate.cta import Cta
    from tunekit.simulate.warp import Warp

BARRIERS = 16


class NamedBarriers:
    """The sixteen barriers of a CTA: `cta.part(NamedBarriers)`."""

    def __init__(self, cta: Cta) -> None:
        warps = range(len(cta.warps))
        self.each = [NamedBarrier(n, warps, lambda warp: cta.warps[warp].live) for n in range(BARRIERS)]


@instruction("bar", "barrier")
def barrier(i: ptx.Instruction, d: Decoder) -> Step:
    words = [word for word in i.modifiers if word not in ("cta", "aligned")]
    aligned = i.opcode == "bar" or "aligned" in i.modifiers
    kind = words[0]
    if kind not in ("sync", "arrive", "red"):
        raise d.unsupported(f".{kind}")
    operands = list(i.operands)
    out = operands.pop(0) if kind == "red" else None
    vote = d.predicate(operands.pop()) if kind == "red" else None
    number = d.read(operands[0], "b32")
    threads = d.read(operands[1], "b32") if len(operands) > 1 else -1
    reduction = words[1] if kind == "red" else ""
    result = -1 if out is None else d.write(out, "b32" if reduction == "popc" else "pred")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        if aligned:
            wait = w.converge(i, lanes)
            if wait is not None:
                return wait
        which, count = _operands(w, lanes, i, number, threads)
        if which is None:
            return None
        votes = None
        if vote is not None:
            mask = w.pred[vote[0]][lanes.indices]
            votes = [bool(one) != vote[1] for one in mask]
        one = w.cta.part(NamedBarriers).each[which]
        known = w.cta.cluster.order.knowledge()
        w.release(known)
        w.cta.cluster.changes += 1
        arrived = FULL if aligned else lanes.bits
        waits = kind != "arrive"
        now = one.arrive(
            w.number, arrived, count, known, lambda kind, text: w.fault(kind, text), votes=votes, waits=waits
        )
        if not waits:
            return None

        def resume() -> None:
            if now.known is not None:
                w.acquire(now.known)
            if reduction == "popc":
                w.u32[result][lanes.indices] = now.votes
            elif reduction:
                w.pred[result][lanes.indices] = now.votes == now.voters if reduction == "and" else now.votes > 0

        if now.done:
            resume()
            return None
        return Wait(lambda: one.awaited(now), lambda: one.settle(now), resume)

    return step


def _operands(w: Warp, lanes: Lanes, i: ptx.Instruction, number: int, threads: int) -> tuple[int | None, int | None]:
    """The barrier and the thread count: the same in all lanes."""
    numbers = w.u32[number][lanes.indices]
    counts = w.u32[threads][lanes.indices] if threads >= 0 else None
    if (numbers != numbers[0]).any() or (counts is not None and (counts != counts[0]).any()):
        w.fault(FaultKind.BARRIER, f"{i.dotted} names different barriers or counts in the lanes of one warp", lanes)
    if numbers[0] >= BARRIERS:
        w.fault(FaultKind.BARRIER, f"barrier {int(numbers[0])}: a CTA has barriers 0 to {BARRIERS - 1}", lanes)
        return None, None
    return int(numbers[0]), None if counts is None else int(counts[0])


@instruction("bar.warp.sync")
def bar_warp_sync(i: ptx.Instruction, d: Decoder) -> Step:
    """The lanes of the mask meet. Memory among them is in order already: a warp is one agent."""
    members = d.read(i.operands[0], "b32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        masks = w.u32[members][lanes.indices]
        mask = int(masks[0])
        if (masks != mask).any() or np.any(np.left_shift(1, lanes.indices) & mask == 0):
            w.fault(FaultKind.BARRIER, f"bar.warp.sync: the mask {mask:#010x} is not that of all its lanes", lanes)
            return None
        return w.converge(i, lanes, mask)

    return step
