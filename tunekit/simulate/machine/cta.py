"""A CTA: its warps, its shared memory, and the state that units keep for it (tensor memory among it)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from tunekit.simulate.faults import FaultKind, Place
from tunekit.simulate.history.order import Access
from tunekit.simulate.history.shadow import Shadow
from tunekit.simulate.machine.lanes import WARP
from tunekit.simulate.machine.memory import Memory
from tunekit.simulate.machine.warp import Warp
from tunekit.simulate.ptx.module import Instruction

if TYPE_CHECKING:
    from tunekit.simulate.machine.cluster import Cluster

P = TypeVar("P")


class Cta:
    """One CTA of a cluster. `rank` is its place in the cluster, `coordinates` its place in the grid."""

    cluster: Cluster
    rank: int
    coordinates: tuple[int, int, int]

    def __init__(self, cluster: Cluster, rank: int, coordinates: tuple[int, int, int]) -> None:
        self.cluster = cluster
        self.rank = rank
        self.coordinates = coordinates
        self.warps: list[Warp] = []
        self._parts: dict[type, Any] = {}
        size = cluster.program.symbols.shared_bytes
        name = "shared" if cluster.size == 1 else f"shared of cta {rank}"
        shadow = Shadow(size, cluster.order.agents, lambda cell: f"{name} {cell:#x}", cluster.report)
        self.shared = Memory(name, np.full(size, 0xFF, dtype=np.uint8), shadow)
        self.exited = False

    def start(self) -> None:
        x, y, z = self.cluster.launch.block
        threads = x * y * z
        count = -(-threads // WARP)
        for number in range(count):
            live = (1 << min(WARP, threads - number * WARP)) - 1
            self.warps.append(Warp(self, number, live, self.cluster.program))

    @property
    def threads(self) -> int:
        x, y, z = self.cluster.launch.block
        return x * y * z

    def part(self, kind: type[P]) -> P:
        """This CTA's instance of a unit's state, made on first use as kind(cta). If it has `finish()`, that is
        called when the CTA has ended and nothing is in flight any more."""
        part = self._parts.get(kind)
        if part is None:
            part = self._parts[kind] = kind(self)  # type: ignore[call-arg]
        return cast(P, part)

    def fault(self, kind: FaultKind, message: str, instruction: Instruction | None = None) -> None:
        """Collects a fault of the CTA as a whole."""
        i = instruction
        place = Place(self.coordinates, None, i.line if i else None, i.text if i else "", i.source if i else None)
        self.cluster.faults.add(kind, message, place)

    def finish(self) -> None:
        self._tell("finish")

    def deadlocked(self) -> None:
        """Lets the units' states that have `deadlocked()` say what they know of it."""
        self._tell("deadlocked")

    def _tell(self, event: str) -> None:
        for part in list(self._parts.values()):
            hear = getattr(part, event, None)
            if hear is not None:
                hear()

    @property
    def done(self) -> bool:
        return not any(warp.fragments for warp in self.warps)


def place_of(access: Access) -> Place:
    """Where an access comes from."""
    warp, instruction = access.site
    if warp is None:
        return Place(
            (0, 0, 0), None, instruction.line if instruction else None, instruction.text if instruction else ""
        )
    found: Place = warp.place(instruction)
    return found
