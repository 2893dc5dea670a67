"""Counts of what kernels did: by level, and by problem where somebody records them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tunekit.dispatch.entries import Entry
from tunekit.dispatch.tables import Table
from tunekit.model import Level, Values

MOST_PROBLEMS = 200_000
"""Problems that are counted apart while they are recorded; calls of further ones are one number."""


class Counters:
    """The calls of one kernel beyond those that its tables count: of tables that are gone, and cold ones.

    `problems` has them by problem while they are recorded, `beyond` those of more problems than are counted apart;
    else `problems` is None, and what is kept is a sum a level.
    """

    def __init__(self) -> None:
        self.levels: Counter[Level] = Counter()
        self.problems: Counter[Values] | None = None
        self.beyond = 0

    def record(self, tables: Iterable[Table]) -> None:
        """Count by problem from now on, from nothing: what `tables` have counted so far is taken off."""
        self.beyond = 0
        self.problems = Counter()
        for entry, calls in _called(tables):
            self.problems[entry.kind.call.problem] -= calls

    def stop(self) -> None:
        self.problems = None

    def gone(self, table: Table) -> None:
        """A table is dropped: its calls still count."""
        for entry, calls in table.called():
            self.levels[entry.choice.level] += calls
            self._note(entry.kind.call.problem, calls)

    def cold(self, problem: Values) -> None:
        """A call took the cold path, whatever came of it."""
        self._note(problem, 1)

    def by_level(self, tables: Iterable[Table]) -> Counter[Level]:
        """The calls that found an entry, those of `tables` too."""
        total = Counter(self.levels)
        for entry, calls in _called(tables):
            total[entry.choice.level] += calls
        return total

    def by_problem(self, tables: Iterable[Table]) -> Counter[Values]:
        """All calls since recording began, by problem, those of `tables` too."""
        total = Counter(self.problems or {})
        for entry, calls in _called(tables):
            total[entry.kind.call.problem] += calls
        return total

    def _note(self, problem: Values, calls: int) -> None:
        if self.problems is None or not calls:
            return
        if problem in self.problems or len(self.problems) < MOST_PROBLEMS:
            self.problems[problem] += calls
        else:
            self.beyond += calls


def _called(tables: Iterable[Table]) -> Iterable[tuple[Entry, int]]:
    for table in tables:
        yield from table.called()
