"""How a warp reaches memory: addresses resolved by space, checked for alignment and bounds, then read or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tunekit.simulate.faults import FaultKind, Place, Stop
from tunekit.simulate.history.order import FENCED_SHARED, HAPPENED, Access, Agent, Knowledge
from tunekit.simulate.machine.lanes import WARP, Lanes
from tunekit.simulate.machine.memory import (
    CONST_BASE,
    LOCAL_BASE,
    PARAM_BASE,
    RANK_SHIFT,
    SHARED_BASE,
    Bytes,
    Memory,
    Offsets,
    Region,
)
from tunekit.simulate.machine.program import Program
from tunekit.simulate.machine.registers import Registers
from tunekit.simulate.ptx.module import Instruction

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta


class WarpMemory(Registers):
    """A warp as far as memory and reports go: its registers, and what it reaches through addresses in them.

    known is what the warp knows of other agents' work; agent is the warp itself; instruction is the one that
    executes now.
    """

    cta: Cta
    number: int
    program: Program
    agent: Agent
    known: Knowledge
    instruction: Instruction
    _local: Memory | None = None

    # Reports

    def place(self, instruction: Instruction | None = None) -> Place:
        i = instruction or self.instruction
        return Place(self.cta.coordinates, self.number, i.line, i.text, i.source)

    def fault(
        self, kind: FaultKind, message: str, lanes: Lanes | None = None, instruction: Instruction | None = None
    ) -> None:
        """Collects a fault at the instruction that executes now; execution goes on."""
        chosen = () if lanes is None else tuple(int(lane) for lane in lanes.indices)
        self.cta.cluster.faults.add(kind, message, self.place(instruction), chosen)

    def stop(self, kind: FaultKind, message: str, lanes: Lanes | None = None) -> Stop:
        """Collects a fault after which nothing sensible can follow: `raise w.stop(...)`."""
        self.fault(kind, message, lanes)
        return Stop(message)

    # Order

    def release(self, knowledge: Knowledge) -> None:
        """Gives what this warp knows to a synchronisation object, and begins a new epoch."""
        knowledge.join(self.known)
        self.agent.epoch += 1
        self.known.rows[HAPPENED, self.agent.index] = self.agent.epoch

    def acquire(self, knowledge: Knowledge) -> None:
        """Learns what a synchronisation object holds."""
        self.known.acquire(knowledge)

    # What an access may rely on

    def access(self, *, strong: bool = False) -> Access:
        """An ordinary access by this warp, now."""
        row = self.known.rows[HAPPENED]
        return Access(self.agent, self.agent.epoch, row, row, (self, self.instruction), strong=strong)

    def async_access(self, agent: Agent, fenced: int = FENCED_SHARED) -> Access:
        """An access through the async proxy, by `agent`, relying on what this warp knows at issue.

        fenced: FENCED_SHARED or FENCED_GLOBAL, by the space it touches.
        """
        known = self.cta.cluster.order.through_async_proxy(self.known, fenced)
        happened = self.known.rows[HAPPENED].copy()
        site = (self, self.instruction)
        return Access(agent, agent.epoch, known, happened, site, FaultKind.MISSING_PROXY_FENCE)

    # Moving bytes

    def load(
        self, space: str, addresses: Offsets, size: int, lanes: Lanes, *, strong: bool = False, align: int = 0
    ) -> Bytes:
        """uint8[n, size]: what each active lane reads at its address; zeros where the address is bad.

        addresses: int64[n], one an active lane. align: 0 for natural alignment.
        """
        out = np.zeros((addresses.size, size), dtype=np.uint8)
        access = self.access(strong=strong)
        for region, offsets, chosen in self.resolve(space, addresses, lanes):
            good = self.checked(region, offsets, size, chosen, lanes, align or size)
            if good is None:
                out[chosen] = region.read(offsets, size, access)
            elif good.any():
                out[np.flatnonzero(chosen)[good]] = region.read(offsets[good], size, access)
        return out

    def store(
        self, space: str, addresses: Offsets, data: Bytes, lanes: Lanes, *, strong: bool = False, align: int = 0
    ) -> None:
        """Writes uint8[n, size] at each active lane's address; bad addresses are reported and skipped."""
        access = self.access(strong=strong)
        size = data.shape[1]
        self.cta.cluster.changes += 1
        for region, offsets, chosen in self.resolve(space, addresses, lanes):
            good = self.checked(region, offsets, size, chosen, lanes, align or size)
            if good is None:
                region.write(offsets, data[chosen], access)
            elif good.any():
                region.write(offsets[good], data[np.flatnonzero(chosen)[good]], access)

    def resolve(
        self, space: str, addresses: Offsets, lanes: Lanes
    ) -> list[tuple[Region, Offsets, np.ndarray[Any, np.dtype[np.bool_]]]]:
        """The regions that `addresses` lie in: (region, offsets in it, which of the active lanes)."""
        every = np.ones(addresses.size, dtype=np.bool_)
        cluster = self.cta.cluster
        if space in ("shared", "shared::cta", "shared::cluster"):
            return self._resolve_shared(addresses, every, own=space != "shared::cluster")
        if space == "global":
            return [(cluster.global_memory, addresses, every)]
        if space == "local":
            return [(self.local, self._local_offsets(addresses & (LOCAL_BASE - 1), lanes), every)]
        if space.startswith("param"):
            return [(cluster.parameters, addresses - PARAM_BASE, every)]
        if space == "const":
            return [(cluster.constants, addresses - CONST_BASE, every)]
        found: list[tuple[Region, Offsets, np.ndarray[Any, np.dtype[np.bool_]]]] = []
        window = addresses >> 56
        for number in np.unique(window):
            chosen = window == number
            part = addresses[chosen]
            if number == SHARED_BASE >> 56:
                found.extend(self._resolve_shared(part - SHARED_BASE, chosen, own=False))
            elif number == LOCAL_BASE >> 56:
                lane = Lanes.of(int(np.bitwise_or.reduce(np.left_shift(1, lanes.indices[chosen]))))
                found.append((self.local, self._local_offsets(part - LOCAL_BASE, lane), chosen))
            elif number == PARAM_BASE >> 56:
                found.append((cluster.parameters, part - PARAM_BASE, chosen))
            elif number == CONST_BASE >> 56:
                found.append((cluster.constants, part - CONST_BASE, chosen))
            else:
                found.append((cluster.global_memory, part, chosen))
        return found

    def _resolve_shared(
        self, addresses: Offsets, chosen: np.ndarray[Any, np.dtype[np.bool_]], own: bool
    ) -> list[tuple[Region, Offsets, np.ndarray[Any, np.dtype[np.bool_]]]]:
        ranks = addresses >> RANK_SHIFT
        rank = self.cta.rank
        offsets = addresses & ((1 << RANK_SHIFT) - 1)
        if (ranks == rank).all():
            return [(self.cta.shared, offsets, chosen)]
        found: list[tuple[Region, Offsets, np.ndarray[Any, np.dtype[np.bool_]]]] = []
        for number in np.unique(ranks):
            part = ranks == number
            which = chosen.copy()
            which[np.flatnonzero(chosen)[~part]] = False
            foreign = number != rank
            if number >= self.cta.cluster.size or number < 0 or (foreign and own):
                # Outside the window: offsets that no region holds, so that the bounds check names them.
                found.append((self.cta.shared, addresses[part] | (1 << 40), which))
            else:
                target = self.cta.cluster.ctas[int(number)]
                if foreign and (target.exited or target.done):
                    self.fault(FaultKind.OUT_OF_BOUNDS, f"shared memory of cta {number}, which has exited")
                found.append((target.shared, offsets[part], which))
        return found

    @property
    def local(self) -> Memory:
        """Local memory of the 32 lanes, one after the other."""
        if self._local is None:
            size = max(1, self.program.symbols.local_bytes)
            self._local = Memory("local", np.full(WARP * size, 0xFF, dtype=np.uint8))
        return self._local

    def _local_offsets(self, offsets: Offsets, lanes: Lanes) -> Offsets:
        size = max(1, self.program.symbols.local_bytes)
        inside = (offsets >= 0) & (offsets < size)
        return np.where(inside, offsets + lanes.indices * size, -1)

    def checked(
        self,
        region: Region,
        offsets: Offsets,
        size: int,
        chosen: np.ndarray[Any, np.dtype[np.bool_]],
        lanes: Lanes,
        align: int,
    ) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """None if all are well; else which are, the others reported."""
        good = region.within(offsets, size)
        if not good.all():
            bad = offsets[~good]
            at = Lanes.of(int(np.bitwise_or.reduce(np.left_shift(1, lanes.indices[chosen][~good]))))
            shown = int(bad[0])
            if region is not self.cta.cluster.global_memory and shown >= 0:
                shown &= ~(1 << 40)
            self.fault(FaultKind.OUT_OF_BOUNDS, f"{size} bytes at {region.where(shown)}, outside every allocation", at)
            return np.asarray(good)
        odd = offsets % align != 0
        if odd.any():
            at = Lanes.of(int(np.bitwise_or.reduce(np.left_shift(1, lanes.indices[chosen][odd]))))
            self.fault(FaultKind.MISALIGNED, f"{size} bytes at {region.where(int(offsets[odd][0]))}", at)
            return np.asarray(~odd)
        return None
