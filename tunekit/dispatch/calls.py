"""Calls: however one is written, by position, keyword or shuffled, it is brought into one normal form.

What a way of writing calls means is worked out once, and is an `Order`; after that only values are moved, and no
argument is looked at that the call leaves out. Checks are in `checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, Union

from tunekit.errors import UserError
from tunekit.model import Value
from tunekit.spec import KernelSpec, ScalarArg
from tunekit.spec.problems import NotYetError, Partial, fill

Slots = tuple[Any, ...]
"""An argument per entry of the signature, None where it was not given."""
Way = tuple[Any, ...]
"""A way to write calls: the number of positional arguments, then the keywords' names in their order."""
Place = Union[int, tuple[Any, ...]]
"""All that makes a call mean what it does, but for its arguments: the number of them, where all go by position; else
the way that it is written, or that with the values and the types of the axes that it gives."""
Given = tuple[tuple[str, type, Value], ...]
"""The problem axes given as keywords, in the spec's order: name, type, value."""
MAX_KEPT = 4096
"""Ways of writing kept, and orders under flags; past it all are dropped and found again, for memory stays bounded."""


def way_and_axes(place: Place) -> tuple[Way, tuple[Any, ...]]:
    """The way of writing that a place is of, and the values of the axes that it gives."""
    if isinstance(place, int):
        return (place,), ()
    return (place, ()) if isinstance(place[0], int) else (place[0], place[1])


class Present(NamedTuple):
    """The slots that a call may have filled: all others are None. `positive`: those of the scalars that must be."""

    tensors: tuple[int, ...]
    scalars: tuple[int, ...]
    positive: tuple[int, ...]


class Order(NamedTuple):
    """How the values of a call become slots: its arguments by position, then those by keyword, without the axes.

    There are `size` values. `places` has, for each slot, which of them fills it, -1 where none does; None where that
    depends on which are None.
    """

    arranged: Callable[[tuple[Any, ...]], Slots]
    present: Present
    places: tuple[int, ...] | None
    size: int

    def slots(self, values: tuple[Any, ...]) -> Slots:
        return self.arranged((*values, None))


class _Writing(NamedTuple):
    """What the values of a call are that is written in one way: `axes` picks those that are axes, named by `names`,
    `others` those that are arguments. `order` is None where what positions stand for depends on the axes."""

    names: tuple[str, ...]
    axes: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    others: Callable[[tuple[Any, ...]], tuple[Any, ...]]
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

    def read(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Place, tuple[Any, ...]]:
        """Where a call belongs, and its arguments.

        Raises:
            UserError: an unknown argument.
        """
        if not keywords:
            return len(args), args
        way: Way = (len(args), *keywords)
        writing = self._writings.get(way)
        if writing is None:
            writing = self._writing(way)
        values = (*args, *keywords.values())
        if not writing.names:
            return way, values
        axes = writing.axes(values)
        return (way, axes, *map(type, axes)), writing.others(values)

    def meaning(self, place: Place) -> tuple[Given, Order]:
        """The axes that the calls of a place give, and the order of their arguments.

        Raises:
            UserError: an unknown or repeated argument, too many of them, or an axis that is no plain value.
        """
        way, axes = way_and_axes(place)
        writing = self._writings.get(way) or self._writing(way)
        named = zip(writing.names, axes, strict=True)
        given: Given = tuple((name, type(value), value) for name, value in named if value is not None)
        try:
            found = writing.order or self._orders.get((way, given))
        except TypeError:
            said(self.spec, given)  # says what is wrong with it
            raise
        if found is None:
            found = self._order(self._existing(given), way, writing.names)
            if len(self._orders) >= MAX_KEPT:
                self._orders.clear()
            self._orders[way, given] = found
        return given, found

    def arrange(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Slots, Given]:
        """The normal form of a call.

        Raises:
            UserError: an unknown or repeated argument, or too many of them.
        """
        place, values = self.read(args, keywords)
        given, order = self.meaning(place)
        return order.slots(values), given

    def split(self, way: Way) -> tuple[list[int], list[int]]:
        """Which of a call's values are axes, in the spec's order, and which are arguments."""
        count, keywords = way[0], way[1:]
        axes = [count + keywords.index(name) for name in self._axes if name in keywords]
        return axes, [place for place in range(count + len(keywords)) if place not in axes]

    def _writing(self, way: Way) -> _Writing:
        count, keywords = way[0], way[1:]
        for name in keywords:
            if name not in self._slot and name not in self._axes:
                known = ", ".join((*self.names, *self._axes))
                raise UserError(f"{self.spec.name} has no argument '{name}' (arguments and problem axes: {known})")
        names = tuple(name for name in self._axes if name in keywords)
        axes, others = self.split(way)
        order = self._order(tuple(range(count)), way, names) if count <= self._leading else None
        writing = _Writing(names, select(axes), select(others), order)
        if count <= len(self.names):  # else it is a mistake, as long as it may be
            if len(self._writings) >= MAX_KEPT:
                self._writings.clear()
            self._writings[way] = writing
        return writing

    def _order(self, positions: tuple[int, ...], way: Way, axes: tuple[str, ...]) -> Order:
        """`positions`: the slots that positions stand for; `axes`: the keywords that are no arguments."""
        count = way[0]
        names = [name for name in way[1:] if name not in axes]
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
        return Order(self._either(pick, twice) if twice else pick, self._present(filled), places, nothing)

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
        signature = self.spec.signature
        numbers = {slot: arg for slot in slots if isinstance(arg := signature[slot], ScalarArg)}
        tensors = tuple(slot for slot in slots if slot not in numbers)
        return Present(tensors, tuple(numbers), tuple(slot for slot, arg in numbers.items() if arg.positive))

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
