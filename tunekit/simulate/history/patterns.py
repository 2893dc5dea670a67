"""Release and acquire patterns (PTX ISA chapter 8): what fences and strong operations pass from warp to warp.

A release pattern is a release operation, or a release fence with a later relaxed write; an acquire pattern is the
mirror image. A warp therefore remembers what it knew at its last fence (relaxed writes pass that on), and what its
relaxed reads have seen (its next fence learns it). Scopes are not told apart: a too narrow scope is not found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunekit.simulate.history.order import HAPPENED, Agent, Knowledge

if TYPE_CHECKING:
    from tunekit.simulate.machine.cluster import Cluster
    from tunekit.simulate.machine.warp import Warp

RELEASES = frozenset(("release", "acq_rel", "sc"))
ACQUIRES = frozenset(("acquire", "acq_rel", "sc"))


class Patterns:
    """A warp's half-made patterns: `w.part(Patterns)`."""

    def __init__(self, w: Warp) -> None:
        self._w = w
        self.released: Knowledge | None = None
        self.observed: Knowledge | None = None
        self._initialiser: Agent | None = None

    def release(self, semantics: str) -> Knowledge | None:
        """What a write with these semantics ("release", "acq_rel", "relaxed") passes on; None for nothing."""
        if semantics in RELEASES:
            given = self._w.cta.cluster.order.knowledge()
            self._w.release(given)
            return given
        return self.released

    def acquire(self, semantics: str, known: Knowledge | None) -> None:
        """A read with these semantics sees what a write has passed on."""
        if known is None:
            return
        if semantics in ACQUIRES:
            self._w.acquire(known)
        elif self.observed is None:
            self.observed = known.copy()
        else:
            self.observed.join(known)

    def fence(self, semantics: str) -> None:
        """A thread fence: "acquire", "release", "acq_rel" or "sc"."""
        if semantics in ACQUIRES and self.observed is not None:
            self._w.acquire(self.observed)
        if semantics == "sc":
            total = self._w.cta.cluster.part(FenceOrder).known
            self._w.acquire(total)
            self._w.release(total)
        if semantics in RELEASES:
            self.released = self.release("release")

    def proxy_fence(self, *rows: int) -> None:
        """A fence between the generic and the async proxy, for the spaces that `rows` stand for."""
        for row in rows:
            self._w.known.fence(row)
        self.new_epoch()

    def new_epoch(self) -> None:
        """What the warp does from now on is later than what it has done."""
        w = self._w
        w.agent.epoch += 1
        w.known.rows[HAPPENED, w.agent.index] = w.agent.epoch

    @property
    def initialiser(self) -> Agent:
        """The agent of the warp's mbarrier.init: apart from the warp, so that fence.mbarrier_init can publish these
        operations and no others."""
        if self._initialiser is None:
            order = self._w.cta.cluster.order
            self._initialiser = order.agent(self._w.agent.name, "generic")
            self._initialiser.epoch = 0
        return self._initialiser

    def initialises(self) -> tuple[int, int]:
        """A new epoch of the initialiser, known to this warp."""
        agent = self.initialiser
        agent.epoch += 1
        self._w.known.room(agent.index + 1)
        self._w.known.rows[HAPPENED, agent.index] = agent.epoch
        return agent.index, agent.epoch

    def publish_initialisations(self) -> None:
        """fence.mbarrier_init: later relaxed writes pass on this warp's mbarrier.init operations."""
        order = self._w.cta.cluster.order
        given = order.knowledge() if self.released is None else self.released.copy()
        agent = self.initialiser
        given.room(agent.index + 1)
        given.rows[HAPPENED, agent.index] = agent.epoch
        self.released = given


class FenceOrder:
    """The total order of fence.sc, each synchronising with those before it: `cluster.part(FenceOrder)`."""

    def __init__(self, cluster: Cluster) -> None:
        self.known = cluster.order.knowledge()


class Flags:
    """What the last strong write of each location passes on: `cluster.part(Flags)`, by generic address."""

    def __init__(self, cluster: Cluster) -> None:
        self._at: dict[int, Knowledge] = {}

    def read(self, address: int) -> Knowledge | None:
        return self._at.get(address)

    def write(self, address: int, known: Knowledge | None) -> None:
        """A plain write begins anew."""
        if known is None:
            self._at.pop(address, None)
        else:
            self._at[address] = known

    def update(self, address: int, known: Knowledge | None) -> None:
        """An atomic read-modify-write keeps what it read in the chain (chapter 8, observation order)."""
        before = self._at.get(address)
        if known is None:
            return
        if before is None:
            self._at[address] = known
        else:
            joined = before.copy()
            joined.join(known)
            self._at[address] = joined
