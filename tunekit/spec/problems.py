"""From the values that are given to a complete problem, and back: which of its values follow from the others.

Axes whose default is a function are filled last, each as soon as the values that it
asks for are there. Two may each be derived from the other: whichever is given fills the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.errors import SpecError, words_of
from tunekit.model import Value, Values
from tunekit.spec.axes import Axis


class NotYetError(AttributeError, KeyError):
    """An axis was asked for whose value is not known yet."""

    def __init__(self, axis: str) -> None:
        super().__init__(axis)
        self.axis = axis


class Partial(Mapping[str, Value]):
    """What is known of a problem: read like ``Values``; an axis that is not known yet raises NotYetError."""

    def __init__(self, known: Mapping[str, Value], axes: Collection[str]) -> None:
        self._known = known
        self._axes = axes

    def __getitem__(self, name: str) -> Value:
        if name in self._known:
            return self._known[name]
        if name in self._axes:
            raise NotYetError(name)
        raise KeyError(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (name not in self._known and name not in self._axes):
            raise AttributeError(f"no axis '{name}' (axes: {', '.join(self._axes)})")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class _Recorder(Partial):
    """Notes which axes are read."""

    def __init__(self, known: Mapping[str, Value], axes: Collection[str]) -> None:
        super().__init__(known, axes)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Value:
        self.read.add(name)
        return super().__getitem__(name)


class Filled(NamedTuple):
    """Values completed as far as they go. `lacking`: for each axis that is still empty and has a default, the axis
    that this default asked for (None: it gave none for these values)."""

    known: dict[str, Value]
    lacking: dict[str, str | None]


def fill(axes: Sequence[Axis], given: Mapping[str, Value]) -> Filled:
    """`given`, then the defaults that are constants, then those that are functions, as far as their needs allow.

    Raises:
        SpecError: a default's function fails or gives what its axis does not allow; it names the axis.
    """
    known = {name: value for name, value in given.items() if value is not None}
    waiting: list[Axis] = []
    for axis in axes:
        if axis.name not in known and axis.default is not None:
            if callable(axis.default):
                waiting.append(axis)
            else:
                known[axis.name] = axis.default
    view = Partial(known, [axis.name for axis in axes])
    lacking: dict[str, str | None] = {}
    while waiting:
        lacking = {}
        for axis in waiting:
            try:
                value = _derive(axis, view)
            except NotYetError as missing:
                lacking[axis.name] = missing.axis
                continue
            if value is None:
                lacking[axis.name] = None
            else:
                known[axis.name] = value
        if len(lacking) == len(waiting):
            break
        waiting = [axis for axis in waiting if axis.name in lacking]
    return Filled(known, lacking)


def complete(axes: Sequence[Axis], given: Mapping[str, Value]) -> Values:
    """`given` completed with the defaults, in the axes' order, and checked axis by axis.

    Raises:
        SpecError: a missing or disallowed value, or a default that fails; but for a missing one it names the axis.
    """
    for axis in axes:
        if given.get(axis.name) is not None:
            axis.check(given[axis.name])
    filled = fill(axes, given)
    for axis in axes:
        if axis.name not in filled.known:
            raise SpecError(f"the problem needs {_wanted(axes, filled)} (axes: {', '.join(a.name for a in axes)})")
    return Values({axis.name: filled.known[axis.name] for axis in axes})


def derived(axes: Sequence[Axis], problem: Values, keep: Collection[str] = ()) -> frozenset[str]:
    """The axes of a complete problem whose values follow from those of the others; those in `keep` count as given.

    Of two that follow from each other the later one counts as derived.
    """
    read: dict[str, set[str]] = {}
    for axis in axes:
        if callable(axis.default) and axis.name not in keep:
            view = _Recorder(problem, problem)
            if _follows(axis, problem, view):
                read[axis.name] = view.read
    found: set[str] = set()
    for name in reversed(read):
        if not _asks_for_itself(name, read, found):
            found.add(name)
    return frozenset(found)


def implied(axes: Sequence[Axis], problem: Values) -> frozenset[str]:
    """The axes of a complete problem that go without saying: those at their default, or derived; not if all are."""
    plain = {axis.name for axis in axes if _is(axis.default, problem[axis.name])}
    found = derived(axes, problem) | plain
    return found if len(found) < len(axes) else frozenset()


def bucket(axes: Sequence[Axis], problem: Values) -> Values:
    """Each axis at its bucket; what follows from others follows from their buckets, and is bucketed then."""
    own = {axis.name: axis.bucketed(problem[axis.name]) for axis in axes}
    dependent = derived(axes, problem)
    if not dependent:
        return Values(own)
    try:
        known = fill(axes, {name: value for name, value in own.items() if name not in dependent}).known
    except SpecError:  # a bucket need not be a problem that can occur
        return Values(own)
    return Values({axis.name: axis.bucketed(known.get(axis.name, own[axis.name])) for axis in axes})


def _derive(axis: Axis, view: Mapping[str, Value]) -> Value | None:
    """The value that an axis's function gives, checked."""
    if not callable(axis.default):
        return axis.default
    try:
        value: Value | None = axis.default(view)
    except NotYetError:
        raise
    except (Exception, SystemExit) as error:  # a spec's own code
        raise SpecError(f"its default fails for {Values(view)}: {words_of(error)}", field=axis.name) from error
    if value is not None:
        try:
            axis.check(value)
        except SpecError as error:
            raise SpecError(f"by default, for {Values(view)}: {error.message}", field=axis.name) from None
    return value


def _follows(axis: Axis, problem: Values, view: Partial) -> bool:
    """Whether an axis's value is what its function makes of the complete problem, read through `view`."""
    try:
        value = _derive(axis, view)
    except SpecError:
        return False
    return _is(value, problem[axis.name])


def _is(one: object, other: object) -> bool:
    """Whether two values are the same, True being none of 1."""
    return type(one) is type(other) and one == other


def _asks_for_itself(name: str, read: Mapping[str, set[str]], found: set[str]) -> bool:
    """Whether an axis's function needs, directly or through those in `found`, the axis itself."""
    pending, seen = [*read[name]], set[str]()
    while pending:
        asked = pending.pop()
        if asked == name:
            return True
        if asked in found and asked not in seen:
            seen.add(asked)
            pending += read[asked]
    return False


def _wanted(axes: Sequence[Axis], filled: Filled) -> str:
    """What to give, in words: the axes that nothing can fill; or, where each follows from another, any of those."""
    missing = [axis.name for axis in axes if axis.name not in filled.known]
    plain = [name for name in missing if name not in filled.lacking or filled.lacking[name] is None]
    if plain:
        return plain[0]
    circle = [missing[0]]
    while True:
        asked = filled.lacking[circle[-1]]
        if asked is None or asked in circle:
            return " or ".join(circle[circle.index(asked) :] if asked in circle else circle)
        circle.append(asked)
