"""Tensor memory (PTX ISA 9.7.16.1): 128 lanes by 512 columns of 32-bit cells in each CTA, allocated by columns.

The history of accesses is kept for groups of 16 lanes of one column, which is what every instruction that touches
tensor memory moves, but for tcgen05.shift, tcgen05.cp.4x256b and tcgen05.mma with disabled lanes. Which cells hold a
value is known for each cell.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Access, Agent
from tunekit.simulate.history.shadow import Report, Shadow

LANES = 128
COLUMNS = 512
GROUP = 16
GROUPS = LANES // GROUP

Index = NDArray[np.int64]
Words = NDArray[np.uint32]
# What may stand for lanes and for columns: arrays that broadcast, or a slice each.
Where: TypeAlias = Index | slice


def groups(lanes: Index, columns: Index) -> Index:
    """The groups that hold these cells, each once; lanes and columns may be of any shapes that fit together."""
    return np.unique(lanes // GROUP * COLUMNS + columns)


def _describe(group: int) -> str:
    first = group // COLUMNS * GROUP
    return f"tmem lanes {first}-{first + GROUP - 1}, column {group % COLUMNS}"


class TensorMemory:
    """One CTA's tensor memory."""

    name = "tmem"

    def __init__(self, agents: list[Agent], report: Report) -> None:
        self.words: Words = np.zeros((LANES, COLUMNS), dtype=np.uint32)
        self.initialised: NDArray[np.bool_] = np.zeros((LANES, COLUMNS), dtype=np.bool_)
        self._report = report
        self._history = Shadow(
            GROUPS * COLUMNS, agents, _describe, report, initialised=np.ones(GROUPS * COLUMNS, dtype=np.bool_)
        )

    def read(self, lanes: Where, columns: Where, touched: Index, access: Access | None) -> Words:
        """The cells at lanes and columns, not to be written to; touched: their `groups`."""
        if access is not None:
            held = self.initialised[lanes, columns]
            if not held.all():
                self._missing(lanes, columns, held, access)
            self._history.read(touched, access)
        return self.words[lanes, columns]

    def _missing(self, lanes: Where, columns: Where, held: NDArray[np.bool_], access: Access) -> None:
        cells = np.arange(LANES * COLUMNS).reshape(LANES, COLUMNS)[lanes, columns]
        first = int(cells[~held].flat[0])
        self._report(
            FaultKind.UNINITIALISED,
            f"reads tmem lane {first // COLUMNS}, column {first % COLUMNS}, which nothing has written "
            f"({int(np.count_nonzero(~held))} of {held.size} cells)",
            access,
        )

    def write(self, lanes: Where, columns: Where, values: Words, touched: Index, access: Access | None) -> None:
        """Writes the cells at lanes and columns; touched: their `groups`."""
        if access is not None:
            self._history.write(touched, access)
        self.words[lanes, columns] = values
        self.initialised[lanes, columns] = True

    def release(self, column: int, count: int, access: Access | None) -> None:
        """The columns are given back: all work on them must be over, and what they held is gone."""
        touched = groups(np.arange(0, LANES, GROUP)[:, None], np.arange(column, column + count)[None, :])
        if access is not None:
            self._history.write(touched, access)
        self._history.forget(touched)
        self._history.initialised[touched] = True
        self.initialised[:, column : column + count] = False
