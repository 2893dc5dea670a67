"""The final's schedule: heat, alternating rounds, and windows taken again after throttling. No GPU code.

In every round each finalist is timed once; odd rounds run backwards, so that a clock
that drifts meets all alike. The windows of one round are what the choice pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tunekit.errors import UserError
from tunekit.measure.gpu_state import GpuState
from tunekit.measure.job import positive_int
from tunekit.measure.statistics import usable
from tunekit.model import Value, Values

DEFAULT_ROUNDS = 16
MAX_RETAKES = 4
HEAT_MIN_S = 0.3
HEAT_MAX_S = 3.0
STEADY_READINGS = 5
STEADY_RATIO = 0.01


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


def even_rounds(rounds: object) -> int:
    """`rounds` as an even count, so that both directions come equally often.

    Raises:
        UserError: it is no even int from 2.
    """
    count = positive_int("rounds", rounds, least=2)
    if count % 2:
        raise UserError(f"rounds is {count}; it must be even: finalists run forwards and backwards equally often")
    return count


def order(count: int, round_index: int) -> list[int]:
    """The order in which `count` finalists run in a round: forwards, then backwards, by turns."""
    forwards = list(range(count))
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


def race(
    contestants: Sequence[Contestant],
    rounds: int,
    *,
    max_retakes: int = MAX_RETAKES,
    pause: Callable[[float], None] = time.sleep,
) -> list[Taken]:
    """All windows of a final, the rejected ones too, in the order taken.

    A window that was throttled, or gave no time, is taken again up to `max_retakes`
    times, after growing pauses. Where that fails the whole round is rejected: rounds
    are compared as pairs, so all finalists keep the same ones.
    """
    taken: list[Taken] = []
    for round_index in range(rounds):
        this_round: list[Taken] = []
        complete = True
        for index in order(len(contestants), round_index):
            for attempt in range(1 + max_retakes):
                if attempt:
                    pause(0.05 * 2**attempt)
                us, state = contestants[index].take()
                rejected = _rejected(us, state)
                this_round.append(Taken(contestants[index].id, round_index, us, state, rejected))
                if not rejected:
                    break
            else:
                complete = False
                break
        taken += this_round if complete else [_with_reason(window, "round incomplete") for window in this_round]
    return taken


def _rejected(us: float, state: GpuState) -> str:
    if state.disturbed:
        return "throttled: " + "+".join(state.disturbed)
    return "" if usable(us) else f"no time: {us!r}"


def _with_reason(window: Taken, reason: str) -> Taken:
    return window if window.rejected else Taken(window.id, window.round, window.us, window.state, reason)


def rejections(windows: Sequence[Taken]) -> str:
    """Why no window counted, in words: ``throttled: hw_thermal_slowdown (40 of 40 windows)``."""
    reasons = [window.rejected for window in windows if window.rejected]
    counted = sorted({(reasons.count(reason), reason) for reason in reasons}, reverse=True)
    return "; ".join(f"{reason} ({count} of {len(windows)} windows)" for count, reason in counted)
