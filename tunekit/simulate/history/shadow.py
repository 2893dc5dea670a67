"""The history of each cell of memory: was it written, by whom last, and who has read it since.

From it come three findings: reads of what nobody wrote, races (two accesses, at least one a write, with no order
between them), and missing fences (an order, but not one that the reader's proxy can rely on).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Access, Agent

Cells = NDArray[np.int64]
Report = Callable[[FaultKind, str, Access], None]


class Shadow:
    """History of `cells` cells.

    `describe` turns a cell index into the text of its address; `report` takes findings. `initialised` may be given
    when it lives elsewhere (global buffers share theirs among processes).
    """

    def __init__(
        self,
        cells: int,
        agents: list[Agent],
        describe: Callable[[int], str],
        report: Report,
        initialised: NDArray[np.bool_] | None = None,
    ) -> None:
        self._agents = agents
        self._describe = describe
        self._report = report
        self.initialised = np.zeros(cells, dtype=np.bool_) if initialised is None else initialised
        self._writer = np.zeros(cells, dtype=np.uint16)
        self._epoch = np.zeros(cells, dtype=np.uint32)
        self._line = np.zeros(cells, dtype=np.uint32)
        self._strong = np.zeros(cells, dtype=np.bool_)
        # Rows of reads, an agent's strong ones apart from its others: a strong write races with the others only. Each
        # is an array of its own: zeros take memory only where they are written, and to copy one would touch it all.
        self._readers: list[int] = []
        self._strong_rows: list[bool] = []
        self._row_of: dict[tuple[int, bool], int] = {}
        self._reads: list[NDArray[np.uint32]] = []
        self._read_lines: list[NDArray[np.uint32]] = []

    def read(self, cells: Cells, access: Access) -> None:
        """A read of `cells` (any shape): checked and remembered."""
        fresh = self.initialised[cells]
        if not fresh.all():
            cell = int(cells[~fresh].flat[0])
            missing = int(fresh.size - np.count_nonzero(fresh))
            self._report(
                FaultKind.UNINITIALISED,
                f"reads {self._describe(cell)}, which nothing has written ({missing} of {fresh.size} cells)",
                access,
            )
        self._after_writes(cells, access, "reads")
        row = self._row(access)
        self._reads[row][cells] = access.epoch
        self._read_lines[row][cells] = _line(access)

    def write(self, cells: Cells, access: Access) -> None:
        """A write of `cells`: checked and remembered."""
        self._after_writes(cells, access, "writes")
        self._after_reads(cells, access)
        self.initialised[cells] = True
        self._writer[cells] = access.agent.index
        self._epoch[cells] = access.epoch
        self._line[cells] = _line(access)
        self._strong[cells] = access.strong

    def forget(self, cells: Cells | slice) -> None:
        """Back to never written and never read (memory that is given back, such as freed TMEM columns)."""
        self.initialised[cells] = False
        self._epoch[cells] = 0
        for row in self._reads:
            row[cells] = 0

    def _after_writes(self, cells: Cells, access: Access, verb: str) -> None:
        writers = self._writer[cells]
        epochs = self._epoch[cells]
        known = access.known
        if self._agents[-1].index >= known.size:
            known = _widened(known, len(self._agents))
        behind = known[writers] < epochs
        if not behind.any():
            return
        if access.strong:
            behind &= ~self._strong[cells]
            if not behind.any():
                return
        happened = _widened(access.happened, len(self._agents))
        unordered = behind & (happened[writers] < epochs)
        chosen, kind = (unordered, FaultKind.RACE) if unordered.any() else (behind, access.blame or FaultKind.RACE)
        cell = int(cells[chosen].flat[0])
        other = self._agents[int(self._writer[cell])]
        relation = "has no order with" if kind is FaultKind.RACE else "is ordered after, but not fenced from,"
        self._report(
            kind,
            f"{verb} {self._describe(cell)}; that {relation} the write by {other.name} (PTX line "
            f"{int(self._line[cell])}); {int(np.count_nonzero(chosen))} of {cells.size} cells",
            access,
        )

    def _after_reads(self, cells: Cells, access: Access) -> None:
        if not self._readers:
            return
        if self._within_reads(cells, access, access.happened, FaultKind.RACE):
            return
        # A tcgen05 fence is needed after reads too; a proxy fence is not.
        if access.blame is FaultKind.MISSING_TENSOR_FENCE and access.known is not access.happened:
            self._within_reads(cells, access, access.known, access.blame)

    def _within_reads(self, cells: Cells, access: Access, row: NDArray[np.uint32], kind: FaultKind) -> bool:
        """Reports, as `kind`, a write to cells that agents beyond `row` read; whether there were any."""
        limits = _widened(row, len(self._agents))[self._readers]
        late = np.stack([epochs[cells] for epochs in self._reads]) > limits.reshape((-1,) + (1,) * cells.ndim)
        for strong in (False, True):
            own = self._row_of.get((access.agent.index, strong))
            if own is not None:
                late[own] = False
        if access.strong:
            late[self._strong_rows] = False
        if not late.any():
            return False
        first = int(np.flatnonzero(late.reshape(len(self._readers), -1).any(axis=1))[0])
        cell = int(cells[late[first]].flat[0])
        other = self._agents[self._readers[first]]
        self._report(
            kind,
            f"writes {self._describe(cell)} while {other.name} may still be reading it (PTX line "
            f"{int(self._read_lines[first][cell])}); {int(np.count_nonzero(late[first]))} of {cells.size} cells",
            access,
        )
        return True

    def _row(self, access: Access) -> int:
        key = access.agent.index, access.strong
        row = self._row_of.get(key)
        if row is None:
            row = len(self._readers)
            self._readers.append(access.agent.index)
            self._strong_rows.append(access.strong)
            self._row_of[key] = row
            for rows in (self._reads, self._read_lines):
                rows.append(np.zeros(self._epoch.size, dtype=np.uint32))
        return row


def _widened(row: NDArray[np.uint32], agents: int) -> NDArray[np.uint32]:
    if row.size >= agents:
        return row
    wide = np.zeros(agents, dtype=np.uint32)
    wide[: row.size] = row
    return wide


def _line(access: Access) -> int:
    instruction: Any = access.site[1]
    return instruction.line if instruction is not None else 0
