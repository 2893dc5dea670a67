"""The ask/tell protocol, and the budget that ends a search.

A strategy chooses among the candidates that it is given, all of them valid, and
proposes each at most once; so duplicates and invalid points can't cost an
evaluation. It is asked for batches whose size does not depend on the number of
workers, and told in the order asked: the same seed gives the same proposals.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tunekit.errors import UserError
from tunekit.model import Variant
from tunekit.trials import Status

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Told:
    """What an evaluation gave: microseconds a call, or None.

    `status` says why there is none. Without one it is a failure; `ok` without a time is neither
    (a variant that was compiled and, with no GPU here, not measured). A time that is no finite
    number over 0 is a failure, whoever said it.
    """

    variant: Variant
    time_us: float | None
    status: Status | None = None

    def __post_init__(self) -> None:
        time = self.time_us
        if time is not None and not (math.isfinite(time) and time > 0):
            object.__setattr__(self, "time_us", None)
            object.__setattr__(self, "status", None if self.status is Status.OK else self.status)
        elif time is not None and self.status not in (None, Status.OK):
            object.__setattr__(self, "time_us", None)

    @property
    def failed(self) -> bool:
        return self.time_us is None and self.status is not Status.OK


class Strategy(Protocol):
    """One search over a fixed set of candidates, each of them valid.

    What it has proposed or was told of, it doesn't propose again. `tests/search` holds every strategy to that.
    """

    @property
    def name(self) -> str: ...

    def ask(self, most: int) -> list[Variant]:
        """Up to `most` candidates not proposed or told before; empty when none is left."""

    def tell(self, results: Sequence[Told]) -> None:
        """The outcomes of candidates, proposed or not, in a fixed order; a second outcome of one changes nothing.

        A failure teaches that the point fails; it never counts as slow or fast.
        """


@dataclass(frozen=True)
class Budget:
    """When a search ends: after so many evaluations, or so many seconds, or neither (None)."""

    evaluations: int | None = None
    seconds: float | None = None

    def left(self, done: int) -> float:
        """How many evaluations are left after `done`."""
        return math.inf if self.evaluations is None else max(0, self.evaluations - done)


def parse_budget(text: str | None) -> Budget:
    """A budget from ``40`` (evaluations) or ``90s``, ``10m``, ``2h`` (time).

    Raises:
        UserError: anything else.
    """
    if text is None:
        return Budget()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    number = float(match[1]) if match else 0.0
    if match is None or number <= 0:
        raise UserError(f"budget '{text}' is neither a count (40) nor a time (90s, 10m, 2h)")
    if match[2]:
        return Budget(seconds=number * _UNITS[match[2]])
    if number != int(number):
        raise UserError(f"budget '{text}' is not a whole number of evaluations")
    return Budget(evaluations=int(number))
