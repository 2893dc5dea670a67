"""What is kept of many: the entries that were used last, so that memory is bounded whatever is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tunekit.dispatch.forked import Guard

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """A mapping of at most `most` entries; past that the one that was used longest ago goes. For several threads."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._guard = Guard()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        with self._guard:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        with self._guard:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self.most:
                self._entries.popitem(last=False)

    def pop(self, key: K) -> V | None:
        with self._guard:
            return self._entries.pop(key, None)

    def drop(self, unwanted: Callable[[K, V], bool]) -> None:
        """Drop every entry that is unwanted."""
        with self._guard:
            for key, value in list(self._entries.items()):
                if unwanted(key, value):
                    del self._entries[key]
