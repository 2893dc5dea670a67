"""What tcgen05 keeps: each CTA's tensor memory with its allocations, and each warp's asynchronous work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import HAPPENED, TENSOR, TENSOR_ISSUED, Access, Agent, Knowledge
from tunekit.simulate.machine.tensor_memory import COLUMNS, LANES, TensorMemory
from tunekit.simulate.ptx.module import Instruction

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp


@dataclass(frozen=True)
class Allocation:
    """Columns that tcgen05.alloc handed out, and by which instruction."""

    column: int
    count: int
    cta_group: int
    instruction: Instruction


class CtaTensor:
    """The tensor memory of one CTA and who holds which columns."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self.memory = TensorMemory(cta.cluster.order.agents, cta.cluster.report)
        self.allocations: dict[int, Allocation] = {}
        self.freed: dict[int, Instruction] = {}
        self.relinquished: Instruction | None = None
        self.last_count = COLUMNS
        self.cta_group = 0
        self._held: NDArray[np.bool_] = np.zeros(COLUMNS, dtype=np.bool_)

    def room(self, count: int) -> int | None:
        """The lowest column from which `count` columns are free."""
        for column in range(0, COLUMNS - count + 1, 32):
            if not self._held[column : column + count].any():
                return column
        return None

    def holds(self, column: int, count: int) -> bool:
        """Whether any of these columns is taken."""
        return bool(self._held[column : column + count].any())

    @property
    def free_columns(self) -> int:
        return int(COLUMNS - np.count_nonzero(self._held))

    def take(self, allocation: Allocation) -> None:
        self.allocations[allocation.column] = allocation
        self.freed.pop(allocation.column, None)
        self.last_count = allocation.count
        self._held[allocation.column : allocation.column + allocation.count] = True

    def give(self, column: int, access: Access | None, instruction: Instruction) -> None:
        allocation = self.allocations.pop(column)
        self.freed[column] = instruction
        self._held[column : column + allocation.count] = False
        self.memory.release(column, allocation.count, access)

    def trouble(self, lane: int, lanes: int, columns: slice) -> str | None:
        """Why an access to `lanes` lanes from `lane` in these columns is not allowed, or None."""
        if lane < 0 or lane + lanes > LANES:
            return f"lanes {lane}-{lane + lanes - 1} of tensor memory, which has {LANES}"
        if columns.start < 0 or columns.stop > COLUMNS:
            return f"columns {columns.start}-{columns.stop - 1} of tensor memory, which has {COLUMNS}"
        held = self._held[columns]
        if held.all():
            return None
        loose = columns.start + np.flatnonzero(~held)
        names = [f"{a.column}-{a.column + a.count - 1}" for a in self.allocations.values()]
        return (
            f"columns {int(loose[0])}-{int(loose[-1])} of tensor memory, which are not allocated "
            f"(allocated: {', '.join(names) or 'none'})"
        )

    def finish(self) -> None:
        """The CTA has ended: what it allocated must have been freed (9.7.16.7.1)."""
        for allocation in self.allocations.values():
            self._cta.fault(
                FaultKind.TMEM_LEAK,
                f"columns {allocation.column}-{allocation.column + allocation.count - 1}, allocated here, "
                "are not freed at the CTA's exit",
                allocation.instruction,
            )


class WarpTensor:
    """The asynchronous tcgen05 work of one warp: loads, stores, and what goes down the tensor core's pipe.

    relied: what the pipe's operations so far rely on, without the warp's own work, which they don't complete.

    The ISA asks for tcgen05.fence::before_thread_sync and ::after_thread_sync around the synchronisation of threads
    (9.7.16.6.4). CUTLASS and what is built on it leave them out where the operation before has completed (a
    tcgen05.wait, or a commit that was waited for) and the mbarrier wait acquires, and run correctly; so they are
    demanded in the strict mode only. Waits and commits are always demanded, but for a wait::ld whose load's registers
    have been used.
    """

    def __init__(self, w: Warp) -> None:
        self._w = w
        order = w.cta.cluster.order
        self.loads = order.agent(f"{w.agent.name} tcgen05.ld", "tensor")
        self.stores = order.agent(f"{w.agent.name} tcgen05.st", "tensor")
        self.pipe = order.agent(f"{w.agent.name} tcgen05 pipe", "tensor")
        self.relied: Knowledge | None = None

    def access(self, agent: Agent, instruction: Instruction) -> Access:
        """An access to tensor memory by `agent`, relying on what the warp's tcgen05 instructions may rely on now."""
        known = self._w.known
        known.room(self._w.cta.cluster.order.capacity)
        # A tcgen05 fence orders also across synchronisation that is relaxed, which teaches nothing else.
        happened = np.maximum(known.rows[HAPPENED], known.rows[TENSOR])
        relied = known.rows[TENSOR].copy() if self._w.cta.cluster.strict else happened
        if agent is self.pipe:
            # Operations of the pipe follow those of other threads that were issued before (9.7.16.6.4.3).
            for row in (happened, relied):
                np.maximum(row, known.rows[TENSOR_ISSUED], out=row)
        for row in (happened, relied):
            # Its own earlier operations go first: the pipe is one, and each ld and st is checked against the others
            # of its kind only through what they touch.
            row[agent.index] = agent.epoch
        blame = FaultKind.MISSING_TENSOR_FENCE
        return Access(agent, agent.epoch, relied, happened, (self._w, instruction), blame)

    def complete(self, agent: Agent, epoch: int) -> None:
        """The warp knows that `agent`'s work up to `epoch` is over."""
        known = self._w.known
        known.room(self._w.cta.cluster.order.capacity)
        rows, index = known.rows, agent.index
        rows[HAPPENED, index] = max(int(rows[HAPPENED, index]), epoch)
        rows[TENSOR, index] = max(int(rows[TENSOR, index]), epoch)

    def rely(self) -> None:
        """The pipe takes an operation: it relies on what the warp knows now."""
        known = self._w.known.copy()
        known.rows[:, self._w.agent.index] = 0
        self.relied = known


def tensor(cta: Cta) -> CtaTensor:
    return cta.part(CtaTensor)


def check_group(w: Warp, i: Instruction, group: int) -> None:
    """All tcgen05 instructions of a kernel name the same cta_group (9.7.16.5)."""
    state = tensor(w.cta)
    if state.cta_group and state.cta_group != group:
        w.fault(
            FaultKind.ILLEGAL, f"cta_group::{group} in a kernel that has used cta_group::{state.cta_group} before it"
        )
    state.cta_group = group


def group_of(i: Instruction) -> int:
    """1 or 2, from .cta_group::N."""
    return 2 if "cta_group::2" in i.modifiers else 1


def pair(w: Warp) -> tuple[Any, ...]:
    """The CTAs of the pair, the even one first (9.7.16.5.1); the CTA alone where it has no peer."""
    even = w.cta.rank & ~1
    return tuple(w.cta.cluster.ctas[even : even + 2])
