"""Global bytes that several clusters of a grid write: nothing orders CTAs, so the last writer wins by chance.

Clusters are simulated one after the other or in several processes, and each knows only its own order. What they
share is who wrote each byte. Atomic writes may meet; and a cluster that has made an atomic, volatile, acquire or
release access to global memory may have been ordered after another by it (a semaphore, a stream-K flag), so from
then on its writes are not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Access
from tunekit.simulate.machine.memory import Buffer


class Claims:
    """One cluster's writes to global memory, set against those of the others.

    number: the cluster's. name_of: a cluster's name in a report. lock: guards the owners among processes; it must
    be reentrant, since atomics hold it while they write.
    """

    def __init__(
        self,
        number: int,
        name_of: Callable[[int], str],
        report: Callable[[FaultKind, str, Access], None],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._mine = number + 1
        self._name_of = name_of
        self._report = report
        self._lock = lock
        self._synchronised = False

    def read(self, access: Access) -> None:
        """A read of global memory."""
        if access.strong:
            self._synchronised = True

    def write(self, buffer: Buffer, cells: NDArray[np.int64], data: NDArray[np.uint8], access: Access) -> None:
        """A write of `data` to bytes of `buffer` (indexes, any shape), before it is done."""
        if access.strong:
            self._synchronised = True
            return
        owner = buffer.owner
        if owner is None:
            return
        with self._lock:
            before = owner[cells]
            owner[cells] = self._mine
        if self._synchronised:
            return
        # The same value twice is no matter of chance: CTAs that share a row may all write its sum.
        foreign = (before != 0) & (before != self._mine) & (buffer.data[cells] != data)
        if not foreign.any():
            return
        cell = int(cells[foreign].flat[0])
        other = self._name_of(int(before[foreign].flat[0]) - 1)
        self._report(
            FaultKind.RACE,
            f"writes global {buffer.name}+{cell:#x}, which {other} has written too, and nothing orders them "
            f"({int(np.count_nonzero(foreign))} of {cells.size} bytes)",
            access,
        )
