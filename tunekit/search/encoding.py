"""What a search sees of its candidates: codes, distances between values, neighbours.

Each candidate is a row of integer codes, one a coordinate. The coordinates are
the implementation, the tunables, and products of two sizes: a kernel's speed
often follows a product (threads are block_x times block_y, work per thread
tile_x times tile_y), and authors declare the factors side by side, so the sizes
are taken two by two in the order declared. Where a size has many values that
are no powers of two, the power that divides each is a coordinate too: warps,
banks and cache lines favour it. Only the first `tunables` coordinates say what is a neighbour.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tunekit.model import Value, Variant

Codes = NDArray[np.int16]
Floats = NDArray[np.float64]

T = TypeVar("T")
_ABSENT = object()
# Sizes of fewer values get no coordinate for their alignment: the results tell those few apart.
_MANY = 8


def in_order(items: Sequence[T], predicted: Sequence[float | None]) -> list[T]:
    """The items by predicted time, equal ones as they were; those without a prediction keep their places."""
    known = [(time, place) for place, time in enumerate(predicted) if time is not None]
    ordered = list(items)
    for (_, place), (_, chosen) in zip(sorted(known, key=lambda each: each[1]), sorted(known), strict=True):
        ordered[place] = items[chosen]
    return ordered


@dataclass(frozen=True)
class Coordinate:
    """A coordinate's name and the distances between its values, from 0 to 1: all 1 where they have no order."""

    name: str
    distance: Floats

    @property
    def ordered(self) -> bool:
        return bool(((self.distance > 0) & (self.distance < 1)).any())


class Space(Sequence[Variant]):
    """The candidates of a search, in order and without repeats; encoded once, when it is first asked for.

    `predicted` microseconds by id, where a cost model knows them: an opinion on where to begin.
    """

    def __init__(self, candidates: Iterable[Variant], predicted: Mapping[str, float] | None = None) -> None:
        self._variants = list({variant.id: variant for variant in candidates}.values())
        self._predicted = dict(predicted or {})
        self.place = {variant.id: number for number, variant in enumerate(self._variants)}

    def __len__(self) -> int:
        return len(self._variants)

    @overload
    def __getitem__(self, index: int) -> Variant: ...
    @overload
    def __getitem__(self, index: slice) -> list[Variant]: ...
    def __getitem__(self, index: int | slice) -> Variant | list[Variant]:
        return self._variants[index]

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._variants)

    def by_prediction(self) -> list[Variant]:
        """The candidates, those with a prediction fastest first in the places that they have among the others."""
        return in_order(self._variants, [self._predicted.get(variant.id) for variant in self._variants])

    def likely(self, most: int) -> list[int]:
        """Up to so many candidates, by number: those predicted fastest."""
        known = [variant.id for variant in self._variants if variant.id in self._predicted]
        return [self.place[id] for id in sorted(known, key=lambda id: self._predicted[id])[:most]]

    @property
    def codes(self) -> Codes:
        """One row a candidate, one column a coordinate."""
        return self._encoded[0]

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        return self._encoded[1]

    @property
    def tunables(self) -> int:
        """How many of the coordinates are tunables (the implementation among them); the rest are products."""
        return self._encoded[2]

    def neighbours(self, of: int, among: NDArray[np.bool_]) -> NDArray[np.intp]:
        """The candidates, of those marked in `among`, that differ from one in a single tunable."""
        open_ = np.flatnonzero(among)
        base = self.codes[:, : self.tunables]
        near: NDArray[np.intp] = open_[(base[open_] != base[of]).sum(axis=1) == 1]
        return near

    @functools.cached_property
    def _encoded(self) -> tuple[Codes, tuple[Coordinate, ...], int]:
        names = list(dict.fromkeys(name for variant in self._variants for name in variant.tunables))
        columns: list[tuple[str, list[Any]]] = [("implementation", [v.implementation for v in self._variants])]
        columns += [(name, [v.tunables.get(name, _ABSENT) for v in self._variants]) for name in names]
        columns = [(name, column) for name, column in columns if _varies(column)]
        count = len(columns)
        numeric = [(name, np.log([float(x) for x in column])) for name, column in columns if _sizes(column)]
        encoded = [(name, *_encode(column)) for name, column in columns]
        for (first, left), (second, right) in zip(numeric[::2], numeric[1::2]):  # noqa: B905 - an odd last one has no pair
            encoded.append((f"{first} * {second}", *_encode_logs(np.round(left + right, 9))))
        for name, column in columns:
            if _aligns(column):
                encoded.append((f"alignment of {name}", *_encode_logs(np.log([_alignment(x) for x in column]))))
        codes = np.array([codes for _, codes, _ in encoded], dtype=np.int16).reshape(len(encoded), len(self)).T
        return np.ascontiguousarray(codes), tuple(Coordinate(name, d) for name, _, d in encoded), count


def _varies(column: Sequence[object]) -> bool:
    return any(type(value) is not type(column[0]) or value != column[0] for value in column)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sizes(column: Sequence[Any]) -> bool:
    """Whether a column holds sizes: numbers over 0, at least three of them."""
    return all(_is_number(value) and value > 0 for value in column) and len(set(column)) > 2


def _aligns(column: Sequence[Any]) -> bool:
    """Whether a column holds whole sizes, many of them, that aren't all powers of two."""
    if not _sizes(column) or len(set(column)) < _MANY or not all(float(value).is_integer() for value in column):
        return False
    return any(_alignment(value) != value for value in column)


def _alignment(value: float) -> float:
    """The largest power of two that divides a whole number over 0."""
    return float(int(value) & -int(value))


def _encode(column: Sequence[Any]) -> tuple[NDArray[np.intp], Floats]:
    """The codes of a column of values, and the distances between those.

    Numbers lie on a line: half by rank and half by logarithm (by rank alone where one is not
    over 0), because either is sometimes the even scale. Of anything else, two values are equal or 1 apart.
    """
    if all(_is_number(value) for value in column):
        values, codes = np.unique(np.asarray(column, dtype=float), return_inverse=True)
        ranks = np.linspace(0.0, 1.0, len(values))
        positions = 0.5 * (ranks + _unit(np.log(values))) if values[0] > 0 else ranks
        return codes, np.abs(positions[:, None] - positions[None, :])
    order: dict[tuple[type, Value | object], int] = {}
    codes = np.array([order.setdefault((type(value), value), len(order)) for value in column])
    return codes, 1.0 - np.eye(len(order))


def _encode_logs(logs: Floats) -> tuple[NDArray[np.intp], Floats]:
    values, codes = np.unique(logs, return_inverse=True)
    positions = _unit(values)
    return codes, np.abs(positions[:, None] - positions[None, :])


def _unit(values: Floats) -> Floats:
    """Ascending values, moved and scaled to [0, 1]; zeros where there is but one."""
    span = values[-1] - values[0]
    return np.zeros_like(values) if span == 0 else (values - values[0]) / span
