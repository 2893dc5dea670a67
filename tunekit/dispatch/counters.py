"""Counts of what kernels did: by level, and by problem where somebody records them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tunekit.dispatch.entries import Entry
from tunekit.dispatch.forked import Guard
from tunekit.dispatch.tables import Table
from tunekit.model import Level, Values

MOST_PROBLEMS = 200_000
"""Problems that are counted apart while they are recorded; calls of further ones are one number."""


class Counters:
    """The calls of one kernel: what its `tables` count, and those of tables that are gone, and cold ones.

    `problems` has them by problem while they are recorded, `beyond` those of more problems than are counted apart;
    else `problems` is None, and what is kept is a sum a level. Whoever changes the tables holds `guard`.
    """

    def __init__(self, tables: Mapping[Any, Table], guard: Guard) -> None:
        self._tables = tables
        self._guard = guard
        self.levels: Counter[Level] = Counter()
        self.problems: Counter[Values] | None = None
        self.beyond = 0

    def record(self) -> None:
        """Count by problem from now on, from nothing: what the tables have counted so far is taken off."""
        with self._guard:
            self.beyond = 0
            self.problems = Counter()
            for entry, calls in self._called():
                self.problems[entry.kind.call.problem] -= calls

    def stop(self) -> None:
        """Count by problem no more."""
        with self._guard:
            self.problems = None

    def gone(self, table: Table) -> None:
        """A table is dropped: its calls still count."""
        for entry, calls in table.called():
            self.levels[entry.choice.level] += calls
            self._note(entry.kind.call.problem, calls)

    def cold(self, problem: Values) -> None:
        """A call took the cold path, whatever came of it."""
        with self._guard:
            self._note(problem, 1)

    def by_level(self) -> Counter[Level]:
        """The calls that found an entry."""
        with self._guard:
            total = Counter(self.levels)
            for entry, calls in self._called():
                total[entry.choice.level] += calls
            return total

    def by_problem(self) -> tuple[Counter[Values], int]:
        """All calls since recording began, by problem; and how many more there were, of problems beyond count."""
        with self._guard:
            total = Counter(self.problems or {})
            for entry, calls in self._called():
                total[entry.kind.call.problem] += calls
            return total, self.beyond

    def _note(self, problem: Values, calls: int) -> None:
        if self.problems is None or not calls:
            return
        if problem in self.problems or len(self.problems) < MOST_PROBLEMS:
            self.problems[problem] += calls
        else:
            self.beyond += calls

    def _called(self) -> Iterator[tuple[Entry, int]]:
        for table in self._tables.values():
            yield from table.called()
