"""Walking a space without visiting every point: what a constraint drops early, it drops with all that follows.

A point is made one tunable at a time, in the order of the declaration. A constraint decides as soon as the tunables
that it reads have values; a prefix that breaks one is counted, not walked. The counts are those of the full walk: a
point that breaks several constraints counts for the first of them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.model import Value, Values
from tunekit.spec import Constraint, Tunable

Verdict = Callable[[Constraint, Values], bool]
"""Whether a constraint holds for a point; what goes wrong in it is the caller's to word."""


class Undecided(BaseException):
    """A constraint read a tunable that has no value yet. No constraint may catch it, so it is no Exception."""


class Prefix(Values):
    """A point whose last tunables have no values yet: reading one of them, or all names at once, is undecided."""

    __slots__ = ("_open",)
    _open: frozenset[str]

    def __init__(self, known: dict[str, Value], open_names: frozenset[str]) -> None:
        super().__init__(known)
        object.__setattr__(self, "_open", open_names)

    def __getitem__(self, name: str) -> Value:
        if name in self._open:
            raise Undecided
        return super().__getitem__(name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._open:
            raise Undecided
        return super().__getattr__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._open or super().__contains__(name)

    def merged(self, other: Mapping[str, Value]) -> Values:
        """As ever; what `other` gives is open no more, and the rest still is."""
        return Prefix({**self._items, **other}, self._open - other.keys())

    def _whole(self) -> None:
        if self._open:
            raise Undecided

    def __iter__(self) -> Iterator[str]:
        self._whole()
        return super().__iter__()

    def __len__(self) -> int:
        self._whole()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._whole()
        return super().__eq__(other)

    def __hash__(self) -> int:
        self._whole()
        return super().__hash__()


class Kept(NamedTuple):
    """A point that breaks no constraint."""

    tunables: Values


class Dropped(NamedTuple):
    """`points` of which `constraint` is the first that each breaks."""

    constraint: Constraint
    points: int


def walk(
    tunables: Sequence[Tunable], constraints: Sequence[Constraint], problem: Values, holds: Verdict
) -> Iterator[Kept | Dropped]:
    """Every point of a space, the last tunable varying fastest: kept ones singly, dropped ones in numbers."""
    return _Walk(tuple(tunables), problem, holds).below({}, list(constraints), None)


class _Walk:
    def __init__(self, tunables: tuple[Tunable, ...], problem: Values, holds: Verdict) -> None:
        self._tunables, self._problem, self._holds = tunables, dict(problem), holds
        self._open = [frozenset(t.name for t in tunables[depth:]) for depth in range(len(tunables) + 1)]
        self._below = [math.prod(len(t.values) for t in tunables[depth:]) for depth in range(len(tunables) + 1)]

    def below(
        self, chosen: dict[str, Value], undecided: list[Constraint], broken: Constraint | None
    ) -> Iterator[Kept | Dropped]:
        """The points that begin with `chosen`. `undecided` are the constraints that still count: where one is `broken`
        already, those declared before it."""
        depth = len(chosen)
        point = Prefix({**self._problem, **chosen}, self._open[depth])
        left: list[Constraint] = []
        for constraint in undecided:
            try:
                holds = self._holds(constraint, point)
            except Undecided:
                left.append(constraint)
                continue
            if not holds:
                broken = constraint
                break
        if broken is not None and not left:
            yield Dropped(broken, self._below[depth])
        elif depth == len(self._tunables):
            yield Kept(Values(chosen))
        else:
            tunable = self._tunables[depth]
            for value in tunable.values:
                yield from self.below({**chosen, tunable.name: value}, left, broken)
