"""Routes: where a call finds its table, by the way that it is written; laid out so that caller.c reads them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

from tunekit.dispatch.calls import CallForm, Place, way_and_axes
from tunekit.dispatch.tables import MISS, Table

Route = tuple[Any, ...]
"""What caller.c needs of a table: its native function and its finish, the place that they serve, and how outputs are
made (see `Native`). It is of one table, also while another takes its place."""
Fork = tuple[bytes, bytes, dict[tuple[Any, ...], Route]]
"""Where keywords give axes: which of a call's values those are, which are the others, and the routes by the axes'
values. Of values that are equal, such as 1 and True, the last has the route; its place has the types."""
NOWHERE = (lambda *arguments: MISS, lambda answer, arguments: None)
"""Stands for the table of a place that has none."""
MOST_VALUES = 256
"""Of a call that caller.c carries out: a fork has each one's number in a byte."""


class Routes:
    """The routes of one kernel. One thread at a time changes them, while others read.

    What is laid out for caller.c: `by_count` has the routes of calls by position, at their number of arguments;
    `by_names`, by the keywords' names in their order, such a list for the calls with those keywords, by the number of
    the arguments before them.
    """

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._most = len(form.names)
        self._by_place: dict[Place, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self.by_count: list[Route | None] = [None] * (self._most + 1)
        self.by_names: dict[tuple[str, ...], list[Union[Route, Fork, None]]] = {}

    def of(self, place: Place) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The function and the finish of a place's table."""
        return self._by_place.get(place, NOWHERE)

    def lay(self, place: Place, table: Table) -> None:
        """Lead the calls of a place to a table."""
        self._by_place[place] = table.function, table.finish
        if table.native is None:
            return
        function, *outputs = table.native
        route = function, table.finish, place, *outputs
        if isinstance(place, int):
            self.by_count[place] = route
            return
        way, axes = way_and_axes(place)
        count, names = way[0], way[1:]
        beside = self.by_names.setdefault(names, [None] * (self._most + 1))
        if not axes:
            beside[count] = route
            return
        fork = beside[count]
        if fork is None and count + len(names) < MOST_VALUES:
            fork = beside[count] = (*map(bytes, self._form.split(way)), {})
        if fork is not None:
            fork[2][axes] = route

    def clear(self) -> None:
        """Forget them all: in place, for caller.c may be reading."""
        self._by_place.clear()
        self.by_count[:] = [None] * len(self.by_count)
        self.by_names.clear()
