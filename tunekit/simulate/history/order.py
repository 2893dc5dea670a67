"""Happens-before by vector clocks: who may rely on whose work (PTX ISA chapter 8, the memory consistency model).

An *agent* is anything that touches memory by itself: a warp, or a queue of asynchronous work. Each agent counts
its own steps (epochs). What an agent knows of the others is a matrix with one column an agent and these rows:

HAPPENED        work that happens before whatever comes next, in the ordinary sense
FENCED_SHARED   generic-proxy work that lies before a fence.proxy.async for shared memory: the async proxy sees it
FENCED_GLOBAL   the same for global memory
TENSOR_BEFORE   tcgen05 work that lies before a tcgen05.fence::before_thread_sync or a tcgen05.commit
TENSOR_ISSUED   tcgen05.mma, cp and shift issued before such a fence, complete or not: others of them come after
TENSOR          tcgen05 work that the tcgen05 instructions to come may rely on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HAPPENED, FENCED_SHARED, FENCED_GLOBAL, TENSOR_BEFORE, TENSOR_ISSUED, TENSOR = range(6)
ROWS = 6

Row = NDArray[np.uint32]


class Knowledge:
    """What one agent, or one synchronisation object, knows: rows by agents, epochs as values."""

    __slots__ = ("rows",)

    def __init__(self, agents: int) -> None:
        self.rows: NDArray[np.uint32] = np.zeros((ROWS, agents), dtype=np.uint32)

    def copy(self) -> Knowledge:
        twin = Knowledge.__new__(Knowledge)
        twin.rows = self.rows.copy()
        return twin

    def room(self, agents: int) -> None:
        """Widens to at least `agents` columns."""
        have = self.rows.shape[1]
        if have < agents:
            wider = np.zeros((ROWS, agents), dtype=np.uint32)
            wider[:, :have] = self.rows
            self.rows = wider

    def join(self, other: Knowledge) -> None:
        """Learns all that `other` knows."""
        theirs = other.rows
        self.room(theirs.shape[1])
        mine = self.rows if self.rows.shape == theirs.shape else self.rows[:, : theirs.shape[1]]
        np.maximum(mine, theirs, out=mine)

    def acquire(self, other: Knowledge) -> None:
        """Learns as a thread that waited does: all rows but TENSOR, which only a tcgen05 fence raises."""
        theirs = other.rows
        self.room(theirs.shape[1])
        mine = self.rows[:TENSOR, : theirs.shape[1]]
        np.maximum(mine, theirs[:TENSOR], out=mine)

    def fence(self, row: int, source: int = HAPPENED) -> None:
        """Raises `row` to what `source` holds."""
        np.maximum(self.rows[row], self.rows[source], out=self.rows[row])


@dataclass
class Agent:
    """One that touches memory. `proxy` is "generic", "async" or "tensor"."""

    index: int
    name: str
    proxy: str
    epoch: int = 1


class Order:
    """The agents of one cluster."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self._generic: NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)

    def agent(self, name: str, proxy: str) -> Agent:
        """A new agent."""
        new = Agent(len(self.agents), name, proxy)
        self.agents.append(new)
        if new.index >= self._generic.size:
            self._generic = np.concatenate([self._generic, np.zeros(self._generic.size, dtype=np.bool_)])
        self._generic[new.index] = proxy == "generic"
        return new

    @property
    def capacity(self) -> int:
        """Columns that knowledge is made with: grows in steps, so that widening is rare."""
        return int(self._generic.size)

    def knowledge(self) -> Knowledge:
        return Knowledge(self.capacity)

    def through_async_proxy(self, known: Knowledge, fenced: int) -> Row:
        """What an access through the async proxy may rely on: generic-proxy work only where it was fenced."""
        known.room(self.capacity)
        rows = known.rows
        generic = self._generic[: rows.shape[1]]
        return np.asarray(np.where(generic, rows[fenced], rows[HAPPENED]))


@dataclass(slots=True)
class Access:
    """One access to memory, by whom, and what it may rely on.

    known     row of epochs that earlier writes must lie within
    happened  row of epochs that earlier reads must lie within (a write after a read needs no proxy fence), and that
              tells a missing fence from a race
    blame     the FaultKind value to report when `happened` covers a write and `known` does not
    site      (warp or None, instruction): for the report
    strong    an atomic, volatile, relaxed, acquire or release access: does not race with others of its kind
    """

    agent: Agent
    epoch: int
    known: Row
    happened: Row
    site: Any
    blame: Any = None
    strong: bool = False
