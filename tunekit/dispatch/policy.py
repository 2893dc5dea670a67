"""What a served kernel may do where its best variant isn't there."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from tunekit.errors import UserError
from tunekit.model import Level

Compile = Literal["never", "allow", "background"]
LEVELS = tuple(Level)


class Policy(NamedTuple):
    """`fallback` is the last level of the ladder that may serve, `strict` allows the first choice alone.

    `compile` says what happens to a missing artifact: ``never`` compiled; compiled while the call waits (``allow``);
    compiled in the ``background`` while a fallback serves.
    """

    fallback: Level = Level.DEFAULT
    strict: bool = False
    compile: Compile = "never"

    def allows(self, level: Level) -> bool:
        """Whether a level may serve."""
        return LEVELS.index(level) <= LEVELS.index(self.fallback)


def policy(
    fallback: str, strict: bool, compile: str, all_or_nothing: bool = False, watch_s: float | None = None
) -> Policy:
    """A policy from what a caller says.

    Raises:
        UserError: an unknown word, a value of another type, or words that exclude each other.
    """
    for name, value in (("strict", strict), ("all_or_nothing", all_or_nothing)):
        if not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}; it must be True or False")
    if compile not in get_args(Compile):
        raise UserError(f"compile is {compile!r}; it must be 'never', 'allow' or 'background'")
    if strict and compile != "never":
        raise UserError(f"strict mode never compiles: leave out strict=True or compile={compile!r}")
    if watch_s is not None and not (isinstance(watch_s, (int, float)) and 0 < watch_s < math.inf):
        raise UserError(f"watch_s is {watch_s!r}; it must be a positive number of seconds")
    by_itself = "compile='background'" if compile == "background" else "watch_s" if watch_s is not None else ""
    if all_or_nothing and by_itself:
        raise UserError(f"with all_or_nothing=True no rank may change its choice by itself: leave out {by_itself}")
    if fallback not in [level.value for level in LEVELS]:
        raise UserError(f"fallback is {fallback!r}; it must be one of {', '.join(LEVELS)}")
    return Policy(Level(fallback), strict, compile)  # type: ignore[arg-type]  # checked above
