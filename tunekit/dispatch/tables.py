"""Tables: where a call finds its entry, natively or in Python; one for each way of writing a call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from numbers import Real
from typing import Any, Protocol, Union

from tunekit.dispatch.calls import Given, Order
from tunekit.dispatch.checks import is_plain
from tunekit.dispatch.entries import LATER, Entry
from tunekit.dispatch.hot_path import HotPath
from tunekit.dispatch.kinds import is_foreign
from tunekit.spec.arguments import is_positive

MISS = -1
"""Answered for a call that has no entry."""
CAPACITY = 64
"""Of a first table; a full one is replaced by one of twice its size."""
MASK_BITS = 63
"""Of an int64 that is not negative."""

Values = tuple[Any, ...]
Native = tuple[Callable[..., Any], Union[int, None], Callable[[Any], Any], type]
"""What caller.c calls: a function that takes a call's values, if all are numbers or tensors of torch, and an output
behind them where it is known which of them that is like; this, or None; torch.empty_like; and torch.Tensor."""


class Table(Protocol):
    """The entries of one way of writing calls, under the axes given.

    `function` takes a call's values and answers what the call returns; or MISS; or, below MISS, what `finish` takes.
    `like`: which of the values has the shape and dtype of the output that is left out, if one is known. `native`
    does the same as `function`, but for tensors of other libraries.
    It is called by many threads at once, while one at a time adds entries.
    """

    given: Given
    order: Order
    capacity: int
    function: Callable[..., Any]

    @property
    def like(self) -> int | None: ...

    @property
    def native(self) -> Native | None: ...

    def add(self, key: Hashable, entry: Entry) -> bool:
        """Serve the calls of `key` by `entry`, unless there is one. False: the table is full."""
        ...

    def key(self, values: Values) -> Hashable | None:
        """The key of a call; None for one that is not kept."""
        ...

    def entry(self, values: Values) -> Entry | None:
        """What serves a call."""
        ...

    def finish(self, answer: int, values: Values) -> Any:
        """What the call returns that `function` answered with an int below MISS."""
        ...

    def items(self) -> list[tuple[Hashable, Entry]]:
        """The keys and entries in the order in which they were added."""
        ...

    def called(self) -> Iterator[tuple[Entry, int]]:
        """The entries, each with how often it was called."""
        ...


class PythonTable:
    """Entries in a dict."""

    def __init__(self, given: Given, order: Order, capacity: int) -> None:
        self.given, self.order = given, order
        self.function: Callable[..., Any] = self._call
        self.capacity = capacity
        self.like = None
        self.native = None
        self._entries: dict[Hashable, tuple[Entry, list[int]]] = {}

    def add(self, key: Hashable, entry: Entry) -> bool:
        if len(self._entries) >= self.capacity:
            return False
        self._entries.setdefault(key, (entry, [0]))
        return True

    def key(self, values: Values) -> Hashable:
        return self._key(self.order.slots(values))

    def entry(self, values: Values) -> Entry | None:
        found = self._entries.get(self.key(values))
        return found[0] if found else None

    def finish(self, answer: int, values: Values) -> Any:
        return answer

    def items(self) -> list[tuple[Hashable, Entry]]:
        return [(key, entry) for key, (entry, _) in list(self._entries.items())]

    def called(self) -> Iterator[tuple[Entry, int]]:
        for entry, calls in list(self._entries.values()):
            yield entry, calls[0]

    def _call(self, *values: Any) -> Any:
        slots = self.order.slots(values)
        found = self._entries.get(self._key(slots))
        if found is None:
            return MISS
        entry, calls = found
        calls[0] += 1
        return entry.run(slots)

    def _key(self, slots: tuple[Any, ...]) -> Hashable:
        parts: list[Any] = []
        for slot in self.order.present.tensors:
            tensor = slots[slot]
            if tensor is not None:
                parts += (slot, tensor.shape, tensor.dtype, tensor.device, is_plain(tensor))
        for slot in self.order.present.scalars:
            value = slots[slot]
            if value is not None:
                must_be = slot in self.order.present.positive
                parts += (slot, type(value), must_be and isinstance(value, Real) and is_positive(value))
        return tuple(parts)


class NativeTable:
    """Entries in a table of hot_path.c."""

    def __init__(self, given: Given, order: Order, capacity: int, hot: HotPath, like: int | None) -> None:
        import torch

        self.given, self.order = given, order
        self.capacity = capacity
        self.like = like
        self._hot = hot
        self._positive = _mask(order)
        self._handle = hot.make(capacity, self._positive)
        self.native: Native = hot.function(self._handle), like, torch.empty_like, torch.Tensor
        self.function: Callable[..., Any] = self._call
        self._plain = frozenset({torch.Tensor, torch.nn.Parameter, float, int, type(None)})
        self._entries: dict[bytes, tuple[Entry, int]] = {}
        """With their places in the native table. It may have more: those at which Ctrl-C came before they got here."""
        self._later: list[Callable[[Values], Any]] = []
        """What is left to Python of some entries' calls; the answer says which."""

    def add(self, key: Hashable, entry: Entry) -> bool:
        if not isinstance(key, bytes) or key in self._entries:
            return True
        recipe = entry.recipe
        if recipe is not None and recipe.likes and self.like not in recipe.likes:
            recipe = None
        answer = LATER if recipe is None else recipe.answer
        if answer == LATER:
            answer -= len(self._later)
            self._later.append(entry.run if recipe is None else entry.returned)
        if recipe is None:
            place = self._hot.put(self._handle, key, None, b"", answer)
        else:
            place = self._hot.put(self._handle, key, entry.function, recipe.packed, answer)
        if place == MISS:
            return False
        self._entries[key] = entry, place
        return True

    def key(self, values: Values) -> bytes | None:
        likes = () if self.like is None else (values[self.like],)
        return self._hot.key(self._positive, *values, *likes)

    def entry(self, values: Values) -> Entry | None:
        key = self.key(values)
        found = None if key is None else self._entries.get(key)
        return found[0] if found else None

    def finish(self, answer: int, values: Values) -> Any:
        return self._later[LATER - answer](self.order.slots(values))

    def _call(self, *values: Any) -> Any:
        if not self._plain.issuperset(map(type, values)) and any(map(is_foreign, values)):
            return MISS
        function, like, *_ = self.native
        if like is None:
            return function(*values)
        import torch

        tensor = output = values[like]
        if isinstance(tensor, torch.Tensor):  # else this call has no such input: it is of a key of its own
            output = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        answer = function(*values, output)
        return output if answer == len(values) else answer

    def items(self) -> list[tuple[Hashable, Entry]]:
        return [(key, entry) for key, (entry, _) in list(self._entries.items())]

    def called(self) -> Iterator[tuple[Entry, int]]:
        for entry, place in list(self._entries.values()):
            yield entry, self._hot.calls(self._handle, place)


def _mask(order: Order) -> int:
    """A bit for each of a call's values that must be positive; all where it depends on the values which is whose, or
    there are more of them than bits."""
    if order.places is None or order.size > MASK_BITS:
        return -1
    return sum(1 << order.places[slot] for slot in order.present.positive)
