"""Counts of what kernels did: by level, and by problem where somebody records them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tunekit.dispatch.entries import Entry
from tunekit.dispatch.tables import Table
from tunekit.model import Level, Values


class Counters:
    """The calls of one kernel beyond those that its tables count: of tables that are gone, and cold ones.

    `problems` has them by problem, while they are recorded; else it is None, and what is kept is a sum a level.
    """

    def __init__(self) -> None:
        self.levels: Counter[Level] = Counter()
        self.problems: Counter[Values] | None = None

    def gone(self, table: Table) -> None:
        """A table is dropped: its calls still count."""
        for _, entry, calls in table.called():
            self._add(entry, calls)

    def cold(self, problem: Values) -> None:
        """A call took the cold path, whatever came of it."""
        if self.problems is not None:
            self.problems[problem] += 1

    def by_level(self, tables: Iterable[Table]) -> Counter[Level]:
        """The calls that found an entry, those of `tables` too."""
        total = Counter(self.levels)
        for table in tables:
            for _, entry, calls in table.called():
                total[entry.choice.level] += calls
        return total

    def by_problem(self, tables: Iterable[Table]) -> Counter[Values]:
        """All calls by problem since recording began, and those of `tables` since these were made."""
        total = Counter(self.problems or {})
        for table in tables:
            for _, entry, calls in table.called():
                total[entry.kind.call.problem] += calls
        return total

    def _add(self, entry: Entry, calls: int) -> None:
        self.levels[entry.choice.level] += calls
        if self.problems is not None:
            self.problems[entry.kind.call.problem] += calls
