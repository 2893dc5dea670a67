"""A final as its trials keep it: all that its decision followed from, and that decision made again.

Each finalist's outcome carries, as facts, the final's name, the rules of the test, what the variant was
in it (incumbent, default) and its place in the tie rule. With the samples that is everything, and it
travels with the trials through exports and merges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from tunekit.errors import UserError
from tunekit.measure.statistics import Decision, choose
from tunekit.model import Value, Values, Winner
from tunekit.trials import Outcome

TIE_KEYS = ("tie_library", "tie_registers", "tie_smem_bytes", "tie_compile_s")
# Confidences and margins that are computed again by the same code differ, if at all, by the last digits stored.
CLOSE = 1e-6


def noted(
    outcome: Outcome,
    id: str,
    *,
    final: str,
    incumbent: str | None,
    default: str | None,
    cost: tuple[float, ...],
    margin: float,
    confidence: float,
) -> Outcome:
    """A finalist's outcome with what the decision needs to know of it; `cost` is its place in the tie rule."""
    facts: dict[str, Value] = {"final": final, "final_margin": margin, "final_confidence": confidence}
    facts |= {"incumbent": id == incumbent, "default": id == default}
    facts |= dict(zip(TIE_KEYS, cost, strict=True))
    return replace(outcome, facts=outcome.facts.merged(facts))


def decide_again(finalists: Mapping[str, Outcome]) -> Decision:
    """The decision that the stored outcomes of one final, by variant id, come to.

    Raises:
        ValueError: the facts of :func:`noted` are missing from an outcome, or are none.
    """
    timed = {id: outcome for id, outcome in finalists.items() if outcome.ok}
    facts: Values = next((outcome.facts for outcome in timed.values()), Values())
    try:
        return choose(
            {id: outcome.samples_us for id, outcome in timed.items()},
            incumbent=_marked(timed, "incumbent"),
            default=_marked(timed, "default"),
            cheaper={id: tuple(_fact(outcome.facts, key) for key in TIE_KEYS) for id, outcome in timed.items()},
            margin=_fact(facts, "final_margin") if timed else 0.0,
            confidence=_fact(facts, "final_confidence") if timed else 0.5,
        )
    except UserError as error:
        raise ValueError(str(error)) from error


def _fact(facts: Values, name: str) -> float:
    value = facts.get(name)
    if not isinstance(value, (int, float)):
        raise ValueError(f"a finalist's {name} is {value!r}")
    return float(value)


def parted(winner: Winner, again: Decision) -> list[str]:
    """How a decision made again differs from the recorded one, each in words; empty if it is the same."""
    pairs: dict[str, tuple[object, object]] = {
        "winner": (winner.variant.id, again.winner),
        "outcome": (winner.outcome, again.outcome),
        "tie set": (set(winner.tied), set(again.tied)),
        "runner-up": (winner.runner_up, again.runner_up),
        "rounds": (winner.rounds, again.rounds),
        "margin": (winner.margin, again.margin),
        "confidence": (winner.confidence, again.confidence),
    }
    return [f"{name}: recorded {a}, now {b}" for name, (a, b) in pairs.items() if not _same(a, b)]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=CLOSE)
    return one == other


def _marked(timed: Mapping[str, Outcome], name: str) -> str | None:
    return next((id for id, outcome in timed.items() if outcome.facts.get(name)), None)
