"""What samples say: which ones count, and which variant they choose. No GPU code.

The test is that of `sequential`: intervals of paired ratios, at fixed looks, with one bound on
the error of them all. The choice on top of it:

winner
    every other finalist is slower. The leader it is.
tie
    those that are not slower are equivalent to the leader, within the margin. The tie rule
    picks their representative: the incumbent; else the cheapest (registers, shared memory,
    compile time); else the default; else the lowest median.
undecided
    the rounds are spent, and some finalist's interval still says neither. The tie rule picks
    among the leader and those not slower whose *estimate* is within the margin of it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunekit.measure.sequential import (
    DEFAULT_CONFIDENCE,
    DEFAULT_MARGIN,
    RESOLUTION_US,
    Comparison,
    Judgement,
    Result,
    judge,
    margin_against,
)


@dataclass(frozen=True)
class Standing:
    """One variant's place in a final: `median_us`, `spread_us` (interquartile range), `samples`.

    `behind` is by how much it is slower than the leader (a ratio minus 1; 0 for the leader itself),
    `low` and `high` its interval, None where the rounds are too few for one. All of these are of
    round `rounds`, where a dropped one was dropped; `verdict` is what they say.
    """

    median_us: float
    spread_us: float
    samples: int
    verdict: str
    behind: float
    low: float | None
    high: float | None
    rounds: int


@dataclass(frozen=True)
class Decision:
    """The outcome of a final.

    `winner` is None where no variant has a usable sample; it represents the tie where `outcome` is
    ``tie``. `tied` lists the tie set, or those between which it is undecided, the winner among
    them, when there is more than one. `margin` is the runner-up's time over the winner's in the same
    rounds, typically, minus 1; None without a runner-up, and negative where a tie went to a slightly
    slower variant. `confidence` is that of the outcome: of a winner, the greatest at which all
    others are still slower; of a tie, the test's; None where it is undecided. `tie_rule` says
    why the winner got it. `excluded` tells why a variant did not take part.
    """

    winner: str | None
    outcome: Result = "undecided"
    tied: tuple[str, ...] = ()
    margin: float | None = None
    confidence: float | None = None
    runner_up: str | None = None
    rounds: int = 0
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
    confidence: float = DEFAULT_CONFIDENCE,
) -> Decision:
    """The winner of a final, from each variant's samples in microseconds, one a round; a pure function of them.

    The n-th samples of all variants belong to the same round and are compared with
    each other only; those of a dropped variant end where it was dropped. `cheaper` has a tuple a
    variant (registers, shared memory, compile seconds); one without comes last.

    A variant with a sample that is no time (0, NaN, inf, negative, None, text) never
    wins: such a sample means that its measuring went wrong.

    Raises:
        UserError: a margin or confidence that is none.
    """
    method = method_words(margin, confidence)
    excluded = {name: why for name, taken in samples.items() if (why := _unusable(taken))}
    timed = {name: [float(s) for s in taken] for name, taken in samples.items() if name not in excluded}
    protected = [name for name in (incumbent, default) if name is not None]
    judged = judge(timed, protected=protected, margin=margin, confidence=confidence)
    if not judged.leader:
        return Decision(None, method=method, excluded=excluded)
    standings = {name: _standing(timed[name], judged.comparisons[name]) for name in timed if name in judged.comparisons}
    left = _left(judged, margin_against(timed[judged.leader][: judged.rounds], margin))
    winner, rule = _break_tie(left, judged.leader, standings, incumbent, default, cheaper or {})
    others = [name for name in standings if name != winner]
    runner_up = min(others, key=lambda name: (standings[name].behind, name)) if others else None
    return Decision(
        winner=winner,
        outcome=judged.result,
        tied=tuple(sorted(left, key=lambda name: standings[name].behind)) if len(left) > 1 else (),
        margin=None if runner_up is None else _apart(timed[runner_up], timed[winner]),
        confidence=_confidence(judged, confidence),
        runner_up=runner_up,
        rounds=judged.rounds,
        method=method,
        tie_rule=_rule_words(rule, judged.result),
        standings=standings,
        excluded={**excluded, **{name: "it ended before the first look" for name in timed if name not in standings}},
    )


def method_words(margin: float, confidence: float) -> str:
    """The test in words, as a winner's record keeps it."""
    return (
        f"signed-rank intervals of paired rounds, margin {100 * margin:g} % or {RESOLUTION_US:g} us, "
        f"confidence {100 * confidence:g} %"
    )


def _rule_words(rule: str, result: Result) -> str:
    if result != "undecided":
        return rule
    return "undecided: the lowest estimate" if rule == "fastest" else f"undecided, as a {rule}"


def _unusable(taken: Sequence[Any]) -> str | None:
    if not taken:
        return "it has no samples"
    bad = [sample for sample in taken if not usable(sample)]
    return f"{len(bad)} of {len(taken)} samples are no times (first: {bad[0]!r})" if bad else None


def _standing(taken: Sequence[float], compared: Comparison) -> Standing:
    bounded = math.isfinite(compared.low) and math.isfinite(compared.high)
    return Standing(
        median_us=statistics.median(taken),
        spread_us=spread(taken),
        samples=len(taken),
        verdict=compared.verdict,
        behind=compared.behind,
        low=compared.low if bounded else None,
        high=compared.high if bounded else None,
        rounds=compared.rounds,
    )


def _left(judged: Judgement, margin: float) -> list[str]:
    """Those between which the tie rule decides: see the module's words on each outcome."""
    found = judged.comparisons
    standing = [name for name in found if found[name].verdict != "slower"]
    if judged.result == "undecided":
        standing = [name for name in standing if name == judged.leader or found[name].behind <= margin]
    return standing


def _confidence(judged: Judgement, confidence: float) -> float | None:
    others = [compared for name, compared in judged.comparisons.items() if name != judged.leader]
    if judged.result == "winner" and others:
        return min(compared.sure for compared in others)
    return confidence if judged.result == "tie" else None


def _apart(taken: Sequence[float], other: Sequence[float]) -> float:
    """The median of paired ratios minus 1, over the rounds that both have."""
    rounds = min(len(taken), len(other))
    return statistics.median(taken[i] / other[i] for i in range(rounds)) - 1


def _break_tie(
    tied: Sequence[str],
    leader: str,
    standings: Mapping[str, Standing],
    incumbent: str | None,
    default: str | None,
    cheaper: Mapping[str, tuple[float, ...]],
) -> tuple[str, str]:
    """The tie's winner and the rule that decided it."""
    if len(tied) == 1:
        return leader, "fastest"
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
    return min(tied, key=lambda name: (standings[name].median_us, name)), "tie: the lowest median"
