"""Calls: however one is written, by position, keyword or shuffled, it is brought into one normal form.

What a way of writing calls means is worked out once, and is an `Order`; after that only values are moved, and no
argument is looked at that the call leaves out. Checks are in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tunekit.errors import UserError
from tunekit.model import Value
from tunekit.spec import KernelSpec, TensorArg
from tunekit.spec.problems import NotYetError, Partial, fill

Slots = tuple[Any, ...]
"""An argument per entry of the signature, None where it was not given."""
Way = tuple[Any, ...]
"""A way to write calls: the number of positional arguments, then the keywords' names in their order."""
Given = tuple[tuple[str, type, Value], ...]
"""The problem axes given as keywords, in the spec's order: name, type, value."""
MAX_KEPT = 4096
"""Ways of writing kept, and orders under flags; past it all are dropped and found again, for memory stays bounded."""


@dataclass(frozen=True)
class Present:
    """The slots that a call may have filled: all others are None."""

    tensors: tuple[int, ...]
    scalars: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """How the values of a call become slots: its arguments by position, then those by keyword, without the axes.

    `places` has, for each slot, which of the values fills it, -1 where none does; None where that depends on
    which values are None.
    """

    arranged: Callable[[tuple[Any, ...]], Slots]
    present: Present
    places: tuple[int, ...] | None

    def slots(self, values: tuple[Any, ...]) -> Slots:
        return self.arranged((*values, None))


@dataclass(frozen=True)
class _Writing:
    """A way to write calls: so many positions and these keywords. `axes`: which of the values are axes.

    `values` picks the others, all values where it is None. `order` is None where what positions stand for depends
    on the flags' values.
    """

    axes: tuple[tuple[str, int], ...]
    values: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None
    order: Order | None


class CallForm:
    """The call form of one spec: its arguments by position and name, its problem axes by name."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.names = tuple(arg.name for arg in spec.signature)
        conditional = [slot for slot, arg in enumerate(spec.signature) if arg.when is not None]
        self._leading = min(conditional, default=len(self.names))
        """How many arguments exist for every problem before one does not: of these, position i is slot i."""
        self._slot = {name: slot for slot, name in enumerate(self.names)}
        self._axes = tuple(axis.name for axis in spec.axes)
        self._writings: dict[Way, _Writing] = {}
        self._orders: dict[tuple[Way, Given], Order] = {}

    def read(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Way, Given, tuple[Any, ...]]:
        """How a call is written, the axes that it gives, and its other values.

        Raises:
            UserError: an unknown argument, or an axis that is no plain value.
        """
        way: Way = (len(args), *keywords)
        writing = self._writings.get(way)
        if writing is None:
            writing = self._writing(len(args), tuple(keywords))
            if len(self._writings) >= MAX_KEPT:
                self._writings.clear()
            self._writings[way] = writing
        values = (*args, *keywords.values())
        if writing.values is None:
            return way, (), values
        given = tuple([(name, type(value), value) for name, at in writing.axes if (value := values[at]) is not None])
        try:
            hash(given)
        except TypeError:
            said(self.spec, given)  # says what is wrong with it
            raise
        return way, given, writing.values(values)

    def order(self, way: Way, given: Given) -> Order:
        """The order of the values of a call that `read` has read.

        Raises:
            UserError: a repeated argument, or too many of them.
        """
        writing = self._writings.get(way) or self._writing(way[0], way[1:])
        if writing.order is not None:
            return writing.order
        found = self._orders.get((way, given))
        if found is None:
            found = self._order(self._existing(given), *_count_and_names(way, {name for name, _ in writing.axes}))
            if len(self._orders) >= MAX_KEPT:
                self._orders.clear()
            self._orders[way, given] = found
        return found

    def arrange(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Slots, Given]:
        """The normal form of a call.

        Raises:
            UserError: an unknown or repeated argument, or too many of them.
        """
        way, given, values = self.read(args, keywords)
        return self.order(way, given).slots(values), given

    def _writing(self, count: int, keywords: tuple[str, ...]) -> _Writing:
        for name in keywords:
            if name not in self._slot and name not in self._axes:
                known = ", ".join((*self.names, *self._axes))
                raise UserError(f"{self.spec.name} has no argument '{name}' (arguments and problem axes: {known})")
        places = {name: count + place for place, name in enumerate(keywords)}
        axes = tuple((name, places[name]) for name in self._axes if name in places)
        others = [place for place in range(count + len(keywords)) if place not in {place for _, place in axes}]
        order = None
        if count <= self._leading:
            order = self._order(tuple(range(count)), *_count_and_names((count, *keywords), {name for name, _ in axes}))
        return _Writing(axes, select(others) if axes else None, order)

    def _order(self, positions: tuple[int, ...], count: int, names: tuple[str, ...]) -> Order:
        """`positions`: the slots that positions stand for; `names`: the arguments given by keyword, in order."""
        if count > len(positions):
            takes = ", ".join(self.names[slot] for slot in positions)
            raise UserError(f"{self.spec.name} takes {len(positions)} arguments ({takes}), not {count}")
        nothing = count + len(names)
        source = [nothing] * len(self.names)
        twice: list[tuple[int, int]] = []
        for place, slot in enumerate(positions[:count]):
            source[slot] = place
        for place, name in enumerate(names, count):
            slot = self._slot[name]
            if source[slot] != nothing:
                twice.append((slot, source[slot]))
            source[slot] = place
        pick = select(source)
        filled = [slot for slot, place in enumerate(source) if place != nothing]
        places = None if twice else tuple(-1 if place == nothing else place for place in source)
        return Order(self._either(pick, twice) if twice else pick, self._present(filled), places)

    def _either(
        self, pick: Callable[[tuple[Any, ...]], Slots], twice: list[tuple[int, int]]
    ) -> Callable[[tuple[Any, ...]], Slots]:
        """`pick` where arguments are given by position and by keyword: one of the two must be None."""

        def picked(values: tuple[Any, ...]) -> Slots:
            slots = list(pick(values))
            for slot, place in twice:
                if values[place] is not None:
                    if slots[slot] is not None:
                        name = self.names[slot]
                        raise UserError(f"{self.spec.name} got '{name}' twice, by position and by keyword")
                    slots[slot] = values[place]
            return tuple(slots)

        return picked

    def _present(self, slots: list[int]) -> Present:
        tensors = [slot for slot in slots if isinstance(self.spec.signature[slot], TensorArg)]
        return Present(tuple(tensors), tuple(slot for slot in slots if slot not in tensors))

    def _existing(self, given: Given) -> tuple[int, ...]:
        """The slots that positions stand for: of the arguments that exist under the flags given.

        An argument that depends on more than flags and defaults ends the list: it and
        all after it go by keyword.
        """
        known = fill(self.spec.axes, said(self.spec, given)).known
        values = Partial(known, self.spec.axis)
        slots: list[int] = []
        for slot, arg in enumerate(self.spec.signature):
            try:
                exists = arg.when is None or arg.when(values)
            except NotYetError:
                break
            if exists:
                slots.append(slot)
        return tuple(slots)


def _count_and_names(way: Way, axes: set[str]) -> tuple[int, tuple[str, ...]]:
    """How many arguments a call gives by position, and which by keyword."""
    return way[0], tuple(name for name in way[1:] if name not in axes)


def said(spec: KernelSpec, given: Given) -> dict[str, Value]:
    """The axes that a call gives by keyword.

    Raises:
        SpecError: a value that its axis does not allow.
    """
    for name, _, value in given:
        spec.axis[name].check(value)
    return {name: value for name, _, value in given}


def select(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What picks the values at these places, as a tuple also where it is one or none."""
    if not places:
        return lambda given: ()
    if len(places) == 1:
        only = places[0]
        return lambda given: (given[only],)
    return itemgetter(*places)
