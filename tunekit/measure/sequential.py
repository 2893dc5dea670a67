"""When a final is decided: pairs of finalists compared at fixed looks, with the error of all looks together bounded.

The windows of one round are a pair: what counts is the logarithm of a finalist's time over
the leader's in the same round, so a clock that drifts or steps, and an offset of the whole
process, cancel. At each look in `LOOKS` every finalist is held against the leader (the lowest
median of its rounds' ratios to the field) by an exact interval (see signed_rank):

slower
    the interval lies above 0 and the estimate is at least the margin. It is dropped there,
    by how much is kept; only those that are protected race on.
equivalent
    the interval lies within the margin on either side (two one-sided tests).
open
    neither yet: the final goes on.

It ends as a ``winner`` when all but the leader are slower, as a ``tie`` when all that are
not slower are equivalent to it, and as ``undecided`` when the rounds are spent before.

The bound: with the probability `confidence`, all intervals of any one finalist against all
others at all looks hold. So the truly fastest one is found slower, and lost, in at most
1 - confidence of all finals, however many finalists and looks there are (Bonferroni over both;
the first look takes half, for ten pairs can say something to twelve finalists only so).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunekit.errors import UserError
from tunekit.measure.signed_rank import Shift, shift

DEFAULT_MARGIN = 0.01
DEFAULT_CONFIDENCE = 0.95
# The margin is this time a call at least, whatever share of a short kernel that is: where code and arguments
# happen to lie moves a variant by as much from one process to the next, and no round within one process shows it.
# (H200, 2026-11-30, a kernel of 6 us: two sweeps from empty found two variants apart by 1.2 and by -3.0 %.)
RESOLUTION_US = 0.2
# Complete rounds after which the finalists are compared; even, for odd rounds run backwards.
LOOKS = (10, 14, 20, 28, 40, 56, 80, 112, 160)
FIRST_SHARE = 0.5

Verdict = Literal["leader", "slower", "equivalent", "open"]
Result = Literal["winner", "tie", "undecided"]


@dataclass(frozen=True)
class Comparison:
    """A finalist against `leader` after `rounds` rounds: slower by `behind`, and by `low` to `high`, as ratios minus 1.

    `sure` is the confidence at which it is slower, over all finalists and looks; 0 where it may not be.
    Of one that was dropped, all is as it was then.
    """

    verdict: Verdict
    leader: str
    rounds: int
    behind: float = 0.0
    low: float = 0.0
    high: float = 0.0
    sure: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """What a final's samples say so far. `leader` is empty where there is no finalist at all.

    `racing` are those to be timed on: not dropped, or protected.
    """

    result: Result
    leader: str
    rounds: int
    comparisons: Mapping[str, Comparison]
    racing: tuple[str, ...]

    @property
    def decided(self) -> bool:
        return self.result != "undecided"


def looks(rounds: int) -> tuple[int, ...]:
    """The looks of a final of at most `rounds` rounds: the planned ones before its end, and its end."""
    return (*(look for look in LOOKS if look < rounds), rounds) if rounds > 0 else ()


def error(index: int, finalists: int, confidence: float) -> float:
    """The one-sided error that one pair may make at the look with this index; 0 after the planned ones."""
    if index >= len(LOOKS):
        return 0.0
    share = FIRST_SHARE if index == 0 else (1 - FIRST_SHARE) / (len(LOOKS) - 1)
    return (1 - confidence) / 2 * share / max(1, finalists - 1)


def judge(
    samples: Mapping[str, Sequence[float]],
    *,
    protected: Collection[str] = (),
    margin: float = DEFAULT_MARGIN,
    confidence: float = DEFAULT_CONFIDENCE,
) -> Judgement:
    """What samples, one a complete round and finalist, say at the last look; a pure function of them.

    All looks are held again, so samples taken after a decision change nothing. A dropped
    finalist's samples end where it was dropped; one whose samples end earlier is not
    compared any more, and stays what it was.

    Raises:
        UserError: a margin or a confidence that is none.
    """
    if not (0 <= margin < math.inf):
        raise UserError(f"margin is {margin}; it must be a number from 0")
    if not (0 < confidence < 1):
        raise UserError(f"confidence is {confidence}; it must be between 0 and 1")
    if not samples:
        return Judgement("undecided", "", 0, {}, ())
    logs = {id: [math.log(us) for us in taken] for id, taken in samples.items()}
    found: dict[str, Comparison] = {}
    slower: set[str] = set()
    judgement: Judgement | None = None
    for index, rounds in enumerate(looks(max(len(taken) for taken in samples.values()))):
        here = [id for id in samples if len(samples[id]) >= rounds]
        leading = [id for id in here if id not in slower]
        if not leading:
            break
        leader = _leader({id: logs[id][:rounds] for id in leading})
        allowed = error(index, len(samples), confidence)
        for id in here:
            if id == leader:
                found[id] = Comparison("leader", leader, rounds)
                continue
            apart = shift([own - its for own, its in zip(logs[id][:rounds], logs[leader][:rounds], strict=True)])
            compared = _compared(
                apart, leader, rounds, allowed, margin_against(samples[leader][:rounds], margin), confidence
            )
            if id in slower:
                # Protected, it only races on for the record: what was found stays found.
                compared = _still_slower(compared, found[id])
            elif compared.verdict == "slower":
                slower.add(id)
            found[id] = compared
        judgement = Judgement(
            _result(found, slower, leader), leader, rounds, dict(found), _racing(samples, slower, protected)
        )
        if judgement.decided:
            break
    return judgement or Judgement("undecided", "", 0, {}, tuple(samples))


def margin_against(leader_us: Sequence[float], margin: float) -> float:
    """The margin to a leader with these times: `margin`, or what `RESOLUTION_US` is of them, if that is more."""
    return max(margin, RESOLUTION_US / statistics.median(leader_us))


def _racing(
    samples: Mapping[str, Sequence[float]], slower: Collection[str], protected: Collection[str]
) -> tuple[str, ...]:
    return tuple(id for id in samples if id not in slower or id in protected)


def _leader(logs: Mapping[str, Sequence[float]]) -> str:
    """The finalist that is the least behind the median of its rounds, typically; the first by name of equals."""
    field = [statistics.median(times) for times in zip(*logs.values(), strict=True)]
    typical = {
        id: statistics.median(own - its for own, its in zip(times, field, strict=True)) for id, times in logs.items()
    }
    return min(typical, key=lambda id: (typical[id], id))


def _compared(apart: Shift, leader: str, rounds: int, allowed: float, margin: float, confidence: float) -> Comparison:
    low, high = (_ratio(bound) for bound in apart.bounds(allowed))
    behind = _ratio(apart.estimate)
    verdict: Verdict = "open"
    if low > 0 and behind >= margin:
        verdict = "slower"
    elif -margin < low and high < margin:
        verdict = "equivalent"
    sure = max(0.0, 1 - apart.p_above() / allowed * (1 - confidence)) if allowed else 0.0
    return Comparison(verdict, leader, rounds, behind, low, high, sure)


def _still_slower(now: Comparison, before: Comparison) -> Comparison:
    return Comparison("slower", now.leader, now.rounds, now.behind, now.low, now.high, max(now.sure, before.sure))


def _ratio(log: float) -> float:
    return math.expm1(log) if log < 700 else math.inf


def _result(found: Mapping[str, Comparison], slower: Collection[str], leader: str) -> Result:
    left = [comparison for id, comparison in found.items() if id not in slower and id != leader]
    if any(comparison.leader != leader or comparison.verdict != "equivalent" for comparison in left):
        return "undecided"
    return "tie" if left else "winner"
