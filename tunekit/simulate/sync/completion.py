"""How asynchronous work says that it is done: by an mbarrier (PTX ISA 9.7.9, "mbarrier-based completion mechanism").

Copies and tensor-core instructions take a Signal when they are issued and use it when they complete:

    signal = Signal.of(w, "shared::cluster", address)        # None: the fault is reported, there is nothing to signal
    agent = signal.agent("async")                             # whose work it is: the mbarrier's own
    agent.epoch += 1
    access = w.async_access(agent)
    def complete() -> None:
        memory.write(offsets, data, access)
        signal.complete_tx(size, completed(order, access))
    cluster.engine.submit(complete, None, what)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import HAPPENED, Access, Agent, Knowledge, Order
from tunekit.simulate.machine.memory import RANK_SHIFT, SHARED_BASE
from tunekit.simulate.sync.mbarrier import Mbarrier, Mbarriers

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp
    from tunekit.simulate.ptx.module import Instruction


def completed(order: Order, *accesses: Access) -> Knowledge:
    """What whoever sees the completion of some work knows: the work itself, and nothing that came before its issue."""
    known = order.knowledge()
    for access in accesses:
        index = access.agent.index
        known.room(index + 1)
        known.rows[HAPPENED, index] = max(int(known.rows[HAPPENED, index]), access.epoch)
    return known


class CtaMbarriers(Mbarriers):
    """The mbarriers of a CTA, and the agents that their transactions belong to: `cta.part(CtaMbarriers)`."""

    def __init__(self, cta: Cta) -> None:
        super().__init__(cta.shared.data, cta.shared.name)
        self._cta = cta
        self._agents: dict[tuple[int, str], Agent] = {}

    def agent(self, offset: int, proxy: str) -> Agent:
        """The agent of the work that completes on the mbarrier at `offset` through a proxy ("async", "generic")."""
        agent = self._agents.get((offset, proxy))
        if agent is None:
            name = f"asynchronous work of the {self.name(offset)}"
            agent = self._agents[offset, proxy] = self._cta.cluster.order.agent(name, proxy)
        return agent

    def deadlocked(self) -> None:
        for line in self.stuck():
            self._cta.fault(FaultKind.TRANSACTIONS, line)

    def finish(self) -> None:
        for line, wrong in self.leftovers():
            if wrong:
                self._cta.fault(FaultKind.TRANSACTIONS, line)


class Signal:
    """An mbarrier that an instruction of a warp names. Faults are reported at that instruction."""

    __slots__ = ("_instruction", "_warp", "cta", "offset")

    def __init__(self, warp: Warp, cta: Cta, offset: int, instruction: Instruction) -> None:
        self._warp = warp
        self._instruction = instruction
        self.cta = cta
        self.offset = offset

    @classmethod
    def of(cls, w: Warp, space: str, address: int) -> Signal | None:
        """The mbarrier at `address` in "shared", "shared::cta", "shared::cluster" or "generic" space.

        Checked: the CTA exists and has not exited; a valid object lies there; its mbarrier.init is known to the
        warp. None, and a fault, where there is no object.
        """
        place = locate(w, space, address, "an mbarrier")
        if place is None:
            return None
        signal = cls(w, place[0], place[1], w.instruction)
        one = signal.mbarrier()
        if one is None:
            return None
        agent, epoch = one.initialised_by
        row = w.known.rows[HAPPENED]
        if agent >= row.size or row[agent] < epoch:
            name = w.cta.cluster.order.agents[agent].name
            w.fault(FaultKind.RACE, f"uses the {one.place}, but has no order with its initialisation by {name}")
        return signal

    def mbarrier(self) -> Mbarrier | None:
        """The object as it is now; None, and a fault, if it has gone."""
        return self.cta.part(CtaMbarriers).get(self.offset, self._report)

    def agent(self, proxy: str = "async") -> Agent:
        return self.cta.part(CtaMbarriers).agent(self.offset, proxy)

    def at(self, cta: Cta) -> Signal:
        """The mbarrier at the same offset in another CTA of the cluster (multicast)."""
        return Signal(self._warp, cta, self.offset, self._instruction)

    def arrive(self, count: int, known: Knowledge | None) -> None:
        """An arrive-on operation; `known` is released into the phase."""
        if self.cta.done and self.cta.cluster.strict:
            # CUTLASS's attention leaves with its last commit in flight.
            self._report(FaultKind.UNFINISHED, "an arrival reaches the shared memory of a CTA that has exited")
            return
        one = self.mbarrier()
        if one is not None:
            one.arrive(count, known, self._report)
            self._changed()

    def expect_tx(self, size: int) -> None:
        """An expect-tx operation of `size` bytes."""
        one = self.mbarrier()
        if one is not None:
            one.expect_tx(size, self._report)
            self._changed()

    def complete_tx(self, size: int, known: Knowledge | None) -> None:
        """A complete-tx operation of `size` bytes; `known` is released into the phase."""
        if self.cta.done:
            self._report(FaultKind.UNFINISHED, f"{size} bytes arrive in the shared memory of a CTA that has exited")
            return
        one = self.mbarrier()
        if one is not None:
            one.complete_tx(size, known, self._report)
            self._changed()

    def _changed(self) -> None:
        self.cta.cluster.changes += 1

    def _report(self, kind: FaultKind, text: str) -> None:
        self._warp.fault(kind, text, instruction=self._instruction)


def locate(w: Warp, space: str, address: int, what: str) -> tuple[Cta, int] | None:
    """The CTA and the offset that a shared address means; None, and a fault, if there is no such CTA any more."""
    if space == "generic":
        if address >> 56 != SHARED_BASE >> 56:
            w.fault(FaultKind.OUT_OF_BOUNDS, f"{what} at generic address {address:#x}, which is not in shared memory")
            return None
        address -= SHARED_BASE
    rank, offset = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
    cluster = w.cta.cluster
    if not 0 <= rank < cluster.size or (space in ("shared", "shared::cta") and rank != w.cta.rank):
        w.fault(FaultKind.OUT_OF_BOUNDS, f"{what} at shared address {address:#x}, outside the window of {space}")
        return None
    cta = cluster.ctas[rank]
    if cta is not w.cta and (cta.exited or cta.done):
        w.fault(FaultKind.OUT_OF_BOUNDS, f"{what} in the shared memory of cta {rank}, which has exited")
        return None
    return cta, offset
