"""Barriers of a CTA (PTX ISA 9.7.13): bar and barrier with .sync, .arrive and .red; bar.warp.sync.

Who has arrived is kept in tunekit.simulate.sync.barrier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import FULL, Lanes
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.barrier import NamedBarrier

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.fragments import Fragment
    from tunekit.simulate.machine.warp import Warp

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


class LaneBarrier:
    """One use of bar.warp.sync: the lanes with its mask that have come, each at whichever bar.warp.sync it likes."""

    def __init__(self, w: Warp, mask: int) -> None:
        self._w = w
        self.mask = mask
        self.bits = 0
        self._fragments: list[Fragment] = []

    def complete(self) -> bool:
        """Whether all live lanes of the mask have come."""
        need = self.mask & self._w.live
        return self.bits & need == need

    def arrive(self, lanes: Lanes) -> None:
        self.bits |= lanes.bits
        self._fragments.append(self._w.current)

    def leave(self) -> None:
        """Ends this use; lanes that came at the current fragment's instruction go on with it."""
        w = self._w
        if w.part(LaneBarriers).open.get(self.mask) is self:
            del w.part(LaneBarriers).open[self.mask]
        for other in self._fragments:
            if other is not w.current and other.wait is not None and other.pc == w.current.pc and other in w.fragments:
                w.absorb(other)
        self._fragments = []

    def text(self) -> str:
        return f"bar.warp.sync {self.mask:#010x} of lanes {self.mask & self._w.live & ~self.bits:#010x}"


class LaneBarriers:
    """A warp's uses of bar.warp.sync that are not complete, by their masks: `w.part(LaneBarriers)`."""

    def __init__(self, w: Warp) -> None:
        self.open: dict[int, LaneBarrier] = {}


@instruction("bar.warp.sync")
def bar_warp_sync(i: ptx.Instruction, d: Decoder) -> Step:
    """The lanes of the mask meet, at one such instruction or at several with this mask.

    Memory among them is in order already: a warp is one agent.
    """
    members = d.read(i.operands[0], "b32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        masks = w.u32[members][lanes.indices]
        mask = int(masks[0])
        if (masks != mask).any() or np.any(np.left_shift(1, lanes.indices) & mask == 0):
            w.fault(FaultKind.BARRIER, f"bar.warp.sync: the mask {mask:#010x} is not that of all its lanes", lanes)
            return None
        need = mask & w.live
        if w.current.lanes.bits & need == need:
            return w.converge(i, lanes, mask)
        one = w.part(LaneBarriers).open.setdefault(mask, LaneBarrier(w, mask))
        one.arrive(lanes)
        if one.complete():
            one.leave()
            return None
        return Wait(one.text, one.complete, one.leave)

    return step
