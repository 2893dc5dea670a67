"""Small kernels that are right, and edits that plant one fault each: the kernel itself is the repaired twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunekit.simulate.faults import FaultKind

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Base:
    """A kernel that is right.

    buffers() makes its buffers (the same at each call), parameters are in order (a buffer's name, or bytes), expected()
    gives what the named buffers must hold afterwards; those count as unwritten before.
    """

    name: str
    text: str
    buffers: Callable[[], Arrays]
    parameters: Sequence[str | bytes | Callable[[Mapping[str, int]], bytes]]
    expected: Callable[[], Arrays]
    block: tuple[int, int, int] = (32, 1, 1)
    grid: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0


@dataclass(frozen=True)
class Plant:
    """One fault: `edits` (old text, new text) applied to a base, and the findings one of which must name it.

    wrong: a wrong result counts as found: the fault is one of values alone, or may be. at: a piece of the PTX line that
    the finding must point to. Each schedule must find it, unless `some` says that one is enough.
    """

    name: str
    base: Base
    edits: tuple[tuple[str, str], ...]
    finds: frozenset[FaultKind] = field(default_factory=frozenset)
    wrong: bool = False
    at: str = ""
    some: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        text = self.base.text
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {text.count(old)} times in {self.base.name}")
            text = text.replace(old, new)
        return text


def plant(
    name: str, base: Base, *edits: tuple[str, str], finds: FaultKind | Sequence[FaultKind] = (), **more: Any
) -> Plant:
    kinds = frozenset((finds,) if isinstance(finds, FaultKind) else finds)
    return Plant(name, base, edits, kinds, **more)
