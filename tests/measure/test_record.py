"""A final's record, its decision made again, and times that can't be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tunekit import identity
from tunekit.errors import UserError
from tunekit.measure import Rules
from tunekit.measure.plausible import implausible, peak_of
from tunekit.measure.record import decide_again, noted, parted
from tunekit.model import Cost, Environment, Values, Winner
from tunekit.trials import Outcome, Stage, Status

COSTS = {"a": (0.0, 168.0, 4096.0, 2.0), "b": (0.0, 96.0, 4096.0, 2.0), "slow": (0.0, 16.0, 0.0, 0.1)}


def finalists(incumbent: str | None = None, default: str | None = None) -> dict[str, Outcome]:
    generator = random.Random(4)
    found = {}
    for id, us in {"a": 20.0, "b": 20.05, "slow": 25.0}.items():
        taken = tuple(us * generator.gauss(1, 0.002) for _ in range(20))
        outcome = Outcome(Stage.MEASURE, Status.OK, samples_us=taken, facts=Values(calls_per_window=40))
        named = {"final": "f1", "incumbent": incumbent, "default": default, "cost": COSTS[id]}
        found[id] = noted(outcome, id, **named, margin=0.01, confidence=0.95)
    return found


def winner_of(decision, id):
    variant = replace(identity.variant("s", 1, "i", "sm_90a", Values(x=1)), id=id)
    return Winner(
        variant=variant, problem=Values(n=1), bucket=Values(n=1), environment=Environment(), protocol="p", artifact="k",
        symbol="s", median_us=20.0, spread_us=0.1, samples=20, runner_up=decision.runner_up, margin=decision.margin,
        confidence=decision.confidence, tied=decision.tied, outcome=decision.outcome, rounds=decision.rounds,
    )  # fmt: skip


def test_a_decision_is_repeated_from_the_trials_alone():
    for incumbent, default, expected in ((None, None, "b"), ("a", None, "a"), (None, "a", "b"), ("slow", "a", "b")):
        stored = finalists(incumbent, default)
        decision = decide_again(stored)
        assert (decision.outcome, decision.winner, set(decision.tied)) == ("tie", expected, {"a", "b"})
        assert parted(winner_of(decision, decision.winner), decide_again(dict(reversed(stored.items())))) == []


def test_what_comes_out_otherwise_is_named():
    stored = finalists()
    recorded = winner_of(decide_again(stored), "b")
    stored["b"] = replace(stored["b"], samples_us=tuple(1.05 * us for us in stored["b"].samples_us))
    differs = parted(recorded, decide_again(stored))
    assert "winner: recorded b, now a" in differs and "outcome: recorded tie, now winner" in differs


def test_a_failed_finalist_takes_no_part():
    stored = finalists()
    stored["a"] = replace(stored["a"], status=Status.DEVICE_FAULT, reason="gone", samples_us=())
    assert decide_again(stored).winner == "b"
    assert decide_again({"a": stored["a"]}).winner is None and decide_again({}).winner is None


BAD_FACTS = [
    (name, value) for name in ("final_margin", "final_confidence", "tie_registers") for value in (None, "many")
]


@pytest.mark.parametrize(
    ("name", "value"), [*BAD_FACTS, ("final_margin", -1.0), ("final_confidence", 0.0), ("final_confidence", 7.0)]
)
def test_a_damaged_record_is_named(name: str, value: object):
    stored = finalists()
    for id, outcome in stored.items():
        facts = {key: known for key, known in outcome.facts.items() if key != name}
        stored[id] = replace(outcome, facts=Values(facts if value is None else {**facts, name: value}))
    with pytest.raises(ValueError, match=name.rpartition("_")[2]):
        decide_again(stored)


def test_a_time_faster_than_the_roofline_is_refused_with_both_numbers():
    """A spec's declared FLOPs and bytes, on this GPU: faster than that is no time, whatever the clock said."""
    matmul = Cost(flops=2 * 8192**3, bytes=3 * 2 * 8192**2)
    why = implausible(500.0, matmul, "NVIDIA H200", Values(dtype="bfloat16"), "flush")
    assert (
        why == "implausible: 500 us is faster than a H200 can be, which takes 1111 us for 1.1e+12 FLOPs at 990 TFLOP/s"
    )
    assert implausible(1150.0, matmul, "NVIDIA H200", Values(dtype="bfloat16"), "flush") is None
    assert implausible(600.0, matmul, "NVIDIA H200", Values(dtype="float8_e4m3fn"), "flush") is None, "twice the peak"
    copy = Cost(flops=0, bytes=4.8e9)
    assert "4.74e+09 of 4.8e+09 bytes at 4.8 TB/s" in implausible(500.0, copy, "NVIDIA H200", Values(), "rotate")
    assert implausible(500.0, copy, "NVIDIA H200", Values(), "warm") is None, "what L2 holds costs no memory time"
    assert implausible(5.0, Cost(0, 30e6), "NVIDIA H200", Values(), "flush") is None, "L2 may keep what is written"
    for gpu, cost in ((None, matmul), ("NVIDIA RTX 9999", matmul), ("NVIDIA H200", None)):
        assert implausible(0.1, cost, gpu, Values(), "flush") is None, "nothing is known"
    assert peak_of("NVIDIA H200 NVL").name == "H200" and peak_of("NVIDIA GH200-480GB").name == "GH200"
    assert peak_of("NVIDIA B200 MIG 1g.23gb").name == "B200"


@pytest.mark.parametrize(
    ("field", "value"),
    [("rounds", 3), ("seconds", 0), ("seconds", float("inf")), ("cache", "cold"), ("margin", 0.0), ("confidence", 1.0)],
)
def test_rules_are_checked(field, value):
    with pytest.raises(UserError, match=field if field != "cache" else "unknown cache 'cold'"):
        Rules(**{field: value}).checked()
