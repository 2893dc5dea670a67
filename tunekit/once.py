"""What an object computes when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class computed_once(Generic[T]):
    """functools.cached_property without its lock: up to Python 3.11 it has one for the class, and a child forked while
    a thread holds it waits without end. Threads that ask at once may compute twice; the first result stays."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, thing: None, owner: type) -> computed_once[T]: ...
    @overload
    def __get__(self, thing: object, owner: type) -> T: ...
    def __get__(self, thing: object | None, owner: type) -> computed_once[T] | T:
        if thing is None:
            return self
        found: T = vars(thing).setdefault(self._name, self._compute(thing))
        return found
