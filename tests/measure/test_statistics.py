"""The choice among samples, without a device."""

from __future__ import annotations

import math
import random

import pytest

from tunekit.errors import UserError
from tunekit.measure import choose, spread, usable

NO_TIMES = [0, 0.0, -1, math.nan, math.inf, -math.inf, None, "fast", True, [1.0]]


@pytest.mark.parametrize("sample", NO_TIMES, ids=repr)
def test_what_is_no_time_never_wins(sample):
    """Case 41: a time of 0, NaN, inf, -1, None or "fast" is never a winner."""
    assert not usable(sample)
    decision = choose({"broken": [sample, sample], "good": [10.0, 11.0]})
    assert decision.winner == "good"
    assert "broken" in decision.excluded and "no times" in decision.excluded["broken"]
    assert choose({"broken": [1.0, sample]}).winner is None


def test_one_bad_sample_excludes_a_variant():
    """Case 41: a variant whose measuring went wrong once is not trusted with the rest."""
    decision = choose({"a": [1.0, 1.0, math.nan], "b": [5.0, 5.0, 5.0]})
    assert decision.winner == "b"
    assert "1 of 3" in decision.excluded["a"]


def test_no_samples_no_winner():
    """Case 46, the choosing side: all variants failed, so nothing is chosen."""
    assert choose({}).winner is None
    decision = choose({"a": [], "b": []})
    assert decision.winner is None
    assert set(decision.excluded) == {"a", "b"}


def noisy(us: float, rounds: int, seed: int, jitter: float = 0.003) -> list[float]:
    generator = random.Random(seed)
    return [us * generator.gauss(1, jitter) for _ in range(rounds)]


def test_a_clear_winner_has_its_margin_and_confidence():
    decision = choose({"a": noisy(10, 10, 0), "b": noisy(12, 10, 1)}, incumbent="b", default="b")
    assert (decision.winner, decision.outcome) == ("a", "winner")
    assert decision.tied == ()
    assert decision.runner_up == "b"
    assert decision.margin == pytest.approx(0.2, abs=0.01)
    assert decision.confidence is not None and decision.confidence >= 0.95
    assert decision.rounds == 10
    assert decision.tie_rule == "fastest"
    standing = decision.standings["b"]
    assert standing.samples == 10 and standing.verdict == "slower"
    assert standing.low < 0.2 < standing.high


def test_few_rounds_choose_but_decide_nothing():
    """Four rounds can't tell anything with confidence: the best estimate is named, and that it is one."""
    decision = choose({"a": [10.0, 10.2, 9.9, 10.1], "b": [12.0, 12.1, 11.9, 12.2]}, incumbent="b")
    assert (decision.winner, decision.outcome, decision.confidence) == ("a", "undecided", None)
    assert decision.standings["b"].low is None, "no interval"
    assert decision.tie_rule.startswith("undecided")
    alone = choose({"a": [10.0, 10.1]})
    assert (alone.winner, alone.outcome, alone.runner_up, alone.confidence) == ("a", "winner", None, None)


def test_a_tie_goes_to_the_incumbent_then_the_cheaper_then_the_default():
    samples = {"a": [10.0] * 10, "b": [10.05] * 10, "c": [10.02] * 10, "slow": [15.0] * 10}
    cheaper = {"a": (168, 4096, 2.0), "b": (96, 8192, 9.0), "c": (96, 4096, 1.0), "slow": (16, 0, 0.1)}
    first = choose(samples, incumbent="b", cheaper=cheaper)
    assert (first.winner, first.outcome, first.confidence) == ("b", "tie", 0.95)
    chosen = choose(samples, incumbent="slow", cheaper=cheaper)
    assert chosen.winner == "c"
    assert set(chosen.tied) == {"a", "b", "c"}
    assert "cheapest" in chosen.tie_rule
    assert chosen.margin is not None and chosen.margin < 0, "the winner is the slower one of a tie, and says so"
    assert choose(samples, default="b").winner == "b"
    assert choose(samples).winner == "a"


def test_rounds_are_compared_as_pairs():
    """A drift by 30 % over the rounds would hide a gap of 3 % from unpaired medians."""
    drift = [1.0 + 0.3 * i / 15 for i in range(16)]
    generator = random.Random(0)
    a = [100.0 * d * generator.gauss(1, 0.002) for d in drift]
    b = [103.0 * d * generator.gauss(1, 0.002) for d in drift]
    decision = choose({"b": b, "a": a}, incumbent="b")
    assert decision.winner == "a" and decision.outcome == "winner" and decision.tied == ()
    assert decision.standings["b"].behind == pytest.approx(0.03, abs=0.005)


def test_one_wild_sample_changes_nothing():
    decision = choose({"a": [10.0, 10.0, 10.0, 10.0, 900.0], "b": [11.0, 11.0, 11.0, 11.0, 0.5]})
    assert decision.winner == "a"


def test_the_order_of_listing_does_not_matter():
    samples = {"a": [10.0, 10.0], "b": [10.0, 10.0], "c": [10.0, 10.0]}
    backwards = dict(reversed(samples.items()))
    assert choose(samples).winner == choose(backwards).winner
    assert choose(samples, cheaper={"b": (1,), "c": (1,)}).winner == "b"


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
def test_margin_must_be_a_number(margin):
    with pytest.raises(UserError, match="margin"):
        choose({"a": [1.0]}, margin=margin)


@pytest.mark.parametrize("confidence", [0, 1, -1, math.nan])
def test_confidence_must_be_between_0_and_1(confidence):
    with pytest.raises(UserError, match="confidence"):
        choose({"a": [1.0]}, confidence=confidence)


def test_spread():
    assert spread([5.0]) == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
