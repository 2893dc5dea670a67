"""The final's schedule: heat, rounds in changing order, windows taken again after throttling. No GPU code.

In every round each finalist that still races is timed once. The order is drawn anew for every two
rounds, the second of which runs backwards: a clock that drifts meets all alike, and nobody
keeps its neighbours. The windows of one round are what the choice pairs (see sequential).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tunekit.errors import UserError
from tunekit.measure.gpu_state import GpuState
from tunekit.measure.job import positive_int
from tunekit.measure.protocol import CACHES, DEFAULT_CACHE, Cache
from tunekit.measure.sequential import DEFAULT_CONFIDENCE, DEFAULT_MARGIN, LOOKS
from tunekit.measure.statistics import usable
from tunekit.model import Value, Values

# The most rounds and seconds of a final that can't be decided earlier.
DEFAULT_ROUNDS = LOOKS[-1]
DEFAULT_SECONDS = 120.0
MAX_RETAKES = 4
HEAT_MIN_S = 0.3
HEAT_MAX_S = 3.0
STEADY_READINGS = 5
STEADY_RATIO = 0.01
TIMELESS = "it gave no time in a later round"


class Contestant(Protocol):
    """A finalist that is ready to be timed."""

    @property
    def id(self) -> str: ...

    def take(self) -> tuple[float, GpuState]:
        """Time one window: microseconds a call, and the GPU's state meanwhile."""


@dataclass(frozen=True)
class Taken:
    """One window of a final; `rejected` says why it does not count, empty if it does."""

    id: str
    round: int
    us: float
    state: GpuState
    rejected: str = ""

    def values(self) -> Values:
        """As plain values: us, round, kept or why not, and the GPU's state. A time that is none is left out."""
        found: dict[str, Value] = {"round": self.round, "kept": not self.rejected}
        if usable(self.us):
            found["us"] = self.us
        if self.rejected:
            found["rejected"] = self.rejected
        return Values(found).merged(self.state.values())


@dataclass(frozen=True)
class Rules:
    """How a final is held, as plain values: its budget, what is in the L2 cache, the test, and who is not dropped."""

    rounds: int = DEFAULT_ROUNDS
    seconds: float = DEFAULT_SECONDS
    cache: Cache = DEFAULT_CACHE
    margin: float = DEFAULT_MARGIN
    confidence: float = DEFAULT_CONFIDENCE
    protected: tuple[str, ...] = ()

    def checked(self) -> Rules:
        """These rules.

        Raises:
            UserError: one that is none.
        """
        even_rounds(self.rounds)
        if self.cache not in CACHES:
            raise UserError(f"unknown cache '{self.cache}' (known: {', '.join(CACHES)})")
        for name, value, most in (
            ("seconds", self.seconds, math.inf),
            ("margin", self.margin, 1.0),
            ("confidence", self.confidence, 1.0),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < most):
                raise UserError(f"{name} of the final is {value!r}; it must be a number above 0 and below {most:g}")
        return self


def even_rounds(rounds: object) -> int:
    """`rounds` as an even count, so that both directions come equally often, within what the looks allow.

    Raises:
        UserError: it is no even int from 2, or more than the last look.
    """
    count = positive_int("rounds", rounds, least=2)
    if count % 2:
        raise UserError(f"rounds is {count}; it must be even: finalists run forwards and backwards equally often")
    if count > LOOKS[-1]:
        raise UserError(f"rounds is {count}; a final has {LOOKS[-1]} at most, over which its error is shared out")
    return count


def order(count: int, round_index: int) -> list[int]:
    """The order in which `count` finalists run in a round: a random one, then the same backwards; always the same."""
    forwards = list(range(count))
    random.Random(round_index // 2).shuffle(forwards)
    return forwards[::-1] if round_index % 2 else forwards


def heat(
    contestants: Sequence[Contestant],
    *,
    min_s: float = HEAT_MIN_S,
    max_s: float = HEAT_MAX_S,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Run the finalists by turns, untimed, until the SM clock has settled; seconds spent.

    Settled: five readings in a row within 1 %. Without a readable clock it takes `min_s`.
    """
    begin = clock()
    readings: list[int] = []
    while contestants:
        for contestant in contestants:
            _, state = contestant.take()
            if state.sm_mhz is not None:
                readings.append(state.sm_mhz)
        spent = clock() - begin
        last = readings[-STEADY_READINGS:]
        steady = not readings or (len(last) == STEADY_READINGS and max(last) - min(last) <= STEADY_RATIO * max(last))
        if spent >= max_s or (spent >= min_s and steady):
            return spent
    return 0.0


# Told each finalist's samples of all complete rounds, it names those that race on: nobody, once it is decided.
Decide = Callable[[Mapping[str, Sequence[float]]], Collection[str]]


def race(
    contestants: Sequence[Contestant],
    rounds: int,
    decide: Decide | None = None,
    *,
    max_s: float = float("inf"),
    max_retakes: int = MAX_RETAKES,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[Taken]:
    """All windows of a final of at most `rounds` rounds and about `max_s` seconds, the rejected ones too, as taken.

    `decide` is asked at each look (see sequential); without it all rounds are run by all.

    A window that was throttled, or gave no time, is taken again up to `max_retakes`
    times, after growing pauses. Where that fails the whole round is rejected: rounds
    are compared as pairs, so all that race in one keep it or none does. Whoever gave no time though
    the GPU was not throttled leaves the race, and none of its windows counts.
    """
    taken: list[Taken] = []
    racing, complete, until = list(contestants), 0, clock() + max_s
    for round_index in range(rounds):
        this_round, whole = _round(racing, round_index, max_retakes, pause)
        taken += this_round if whole else [_with_reason(window, "round incomplete") for window in this_round]
        complete += whole
        out = "" if whole else _timeless(this_round)
        if out:
            racing = [contestant for contestant in racing if contestant.id != out]
            taken = [_with_reason(window, TIMELESS) if window.id == out else window for window in taken]
        if whole and decide and complete in LOOKS:
            left = set(decide(samples(taken)))
            racing = [contestant for contestant in racing if contestant.id in left]
            if racing:
                racing[0].take()  # deciding takes milliseconds, in which the GPU idles
        if not racing or (clock() > until and round_index % 2):
            break
    return taken


def samples(taken: Sequence[Taken]) -> dict[str, list[float]]:
    """The times that count, by finalist, one a complete round."""
    found: dict[str, list[float]] = {}
    for window in taken:
        if not window.rejected:
            found.setdefault(window.id, []).append(window.us)
    return found


def _round(
    racing: Sequence[Contestant], round_index: int, max_retakes: int, pause: Callable[[float], None]
) -> tuple[list[Taken], bool]:
    """The windows of one round, and whether each finalist has one that counts."""
    taken: list[Taken] = []
    for index in order(len(racing), round_index):
        for attempt in range(1 + max_retakes):
            if attempt:
                pause(0.05 * 2**attempt)
            us, state = racing[index].take()
            rejected = _rejected(us, state)
            taken.append(Taken(racing[index].id, round_index, us, state, rejected))
            if not rejected:
                break
        else:
            return taken, False
    return taken, True


def _rejected(us: float, state: GpuState) -> str:
    if state.disturbed:
        return "throttled: " + "+".join(state.disturbed)
    return "" if usable(us) else f"no time: {us!r}"


def _timeless(round_: Sequence[Taken]) -> str:
    """Who ended an incomplete round by giving no time at all, while the GPU was at ease; empty if throttling did."""
    id = round_[-1].id
    return "" if any(window.state.disturbed for window in round_ if window.id == id) else id


def _with_reason(window: Taken, reason: str) -> Taken:
    return window if window.rejected else Taken(window.id, window.round, window.us, window.state, reason)


def rejections(windows: Sequence[Taken]) -> str:
    """Why no window counted, in words: ``throttled: hw_thermal_slowdown (40 of 40 windows)``."""
    reasons = [window.rejected for window in windows if window.rejected]
    counted = sorted({(reasons.count(reason), reason) for reason in reasons}, reverse=True)
    return "; ".join(f"{reason} ({count} of {len(windows)} windows)" for count, reason in counted)
