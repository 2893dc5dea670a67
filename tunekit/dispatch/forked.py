"""Locks that are free in a forked child, whoever held them at the fork: data loaders fork in the middle of anything."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol


class Renewed(Protocol):
    """What has something to begin anew in a forked child."""

    def after_fork(self) -> None: ...


_renewed: weakref.WeakSet[Renewed] = weakref.WeakSet()


def renew(thing: Renewed) -> None:
    """Have `thing.after_fork()` called in every forked child, for as long as `thing` lives."""
    _renewed.add(thing)


class Guard:
    """A lock, or whatever `make` makes, made anew in a forked child: the thread that held it is not there."""

    def __init__(self, make: Callable[[], Any] = threading.RLock) -> None:
        self._make = make
        self._inner = make()
        renew(self)

    def __enter__(self) -> None:
        self._inner.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.release()

    def after_fork(self) -> None:
        self._inner = self._make()


def _after_fork() -> None:
    for thing in list(_renewed):
        thing.after_fork()


os.register_at_fork(after_in_child=_after_fork)
