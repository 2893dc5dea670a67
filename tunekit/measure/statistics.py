"""What samples say: which ones count, and which variant they choose. No GPU code.

The choice is deliberately plain: medians of paired rounds, and a margin under
which two variants count as equal. It claims no confidence that it has not computed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunekit.errors import UserError

DEFAULT_MARGIN = 0.01


@dataclass(frozen=True)
class Standing:
    """One variant's place in a final: `median_us`, `spread_us` (interquartile range), `samples`.

    `behind` is the median over rounds of its time divided by the fastest variant's
    in the same round, minus 1: 0 for the fastest itself.
    """

    median_us: float
    spread_us: float
    samples: int
    behind: float


@dataclass(frozen=True)
class Decision:
    """The outcome of a final.

    `winner` is None where no variant has a usable sample. `tied` lists every variant
    within the margin of the fastest, the winner among them, when there is more than one.
    `margin` is the runner-up's median over the winner's, minus 1; None without a
    runner-up, and negative where a tie went to a slightly slower variant. `tie_rule`
    says why the winner got it. `excluded` tells why a variant did not take part.
    """

    winner: str | None
    tied: tuple[str, ...] = ()
    margin: float | None = None
    runner_up: str | None = None
    method: str = ""
    tie_rule: str = ""
    standings: Mapping[str, Standing] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)


def usable(sample: Any) -> bool:
    """Whether `sample` is a time: a positive, finite int or float. NaN, inf, 0, None and text are not."""
    if isinstance(sample, bool) or not isinstance(sample, (int, float)):
        return False
    return 0 < sample < math.inf


def spread(samples: Sequence[float]) -> float:
    """The interquartile range; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def choose(
    samples: Mapping[str, Sequence[float]],
    *,
    incumbent: str | None = None,
    default: str | None = None,
    cheaper: Mapping[str, tuple[float, ...]] | None = None,
    margin: float = DEFAULT_MARGIN,
) -> Decision:
    """The winner of a final, from each variant's samples in microseconds, one a round.

    The n-th samples of all variants belong to the same round and are compared with
    each other only. Variants within `margin` of the fastest tie with it. A tie goes to
    the incumbent, else to the smallest tuple in `cheaper` (registers, shared memory,
    compile seconds; a variant without one comes last), else to the default, else to
    the lower median.

    A variant with a sample that is no time (0, NaN, inf, negative, None, text) never
    wins: such a sample means that its measuring went wrong.

    Raises:
        UserError: a margin that is negative or not finite.
    """
    if not (0 <= margin < math.inf):
        raise UserError(f"margin is {margin}; it must be a number from 0")
    method = f"median of paired rounds, margin {100 * margin:g} %"
    excluded = {name: why for name, taken in samples.items() if (why := _unusable(taken))}
    timed = {name: [float(s) for s in taken] for name, taken in samples.items() if name not in excluded}
    if not timed:
        return Decision(None, method=method, excluded=excluded)
    medians = {name: statistics.median(taken) for name, taken in timed.items()}
    fastest = min(medians, key=lambda name: (medians[name], name))
    standings = {
        name: Standing(medians[name], spread(taken), len(taken), _behind(taken, timed[fastest]))
        for name, taken in timed.items()
    }
    tied = [name for name in standings if standings[name].behind <= margin]
    winner, rule = _break_tie(tied, medians, incumbent, default, cheaper or {})
    others = [name for name in standings if name != winner]
    runner_up = min(others, key=lambda name: (medians[name], name)) if others else None
    return Decision(
        winner=winner,
        tied=tuple(sorted(tied, key=lambda name: medians[name])) if len(tied) > 1 else (),
        margin=None if runner_up is None else medians[runner_up] / medians[winner] - 1,
        runner_up=runner_up,
        method=method,
        tie_rule=rule,
        standings=standings,
        excluded=excluded,
    )


def _unusable(taken: Sequence[Any]) -> str | None:
    if not taken:
        return "it has no samples"
    bad = [sample for sample in taken if not usable(sample)]
    return f"{len(bad)} of {len(taken)} samples are no times (first: {bad[0]!r})" if bad else None


def _behind(taken: Sequence[float], fastest: Sequence[float]) -> float:
    """The median of paired ratios minus 1, over the rounds that both have."""
    rounds = min(len(taken), len(fastest))
    return statistics.median(taken[i] / fastest[i] for i in range(rounds)) - 1


def _break_tie(
    tied: Sequence[str],
    medians: Mapping[str, float],
    incumbent: str | None,
    default: str | None,
    cheaper: Mapping[str, tuple[float, ...]],
) -> tuple[str, str]:
    """The tie's winner and the rule that decided it."""
    if len(tied) == 1:
        return tied[0], "fastest"
    if incumbent is not None and incumbent in tied:
        return incumbent, "tie: the incumbent stays"
    costs = {name: cheaper[name] for name in tied if name in cheaper}
    if costs:
        least = min(costs.values())
        tied = [name for name, cost in costs.items() if cost == least]
        if len(tied) == 1:
            return tied[0], "tie: the cheapest (registers, shared memory, compile time)"
    if default is not None and default in tied:
        return default, "tie: the default"
    return min(tied, key=lambda name: (medians[name], name)), "tie: the lowest median"
