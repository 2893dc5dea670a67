"""Spaces to search in tests: plain, constrained, conditional, failing, recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tunekit import identity
from tunekit.model import Values, Variant
from tunekit.search import Budget, Told, make_strategy
from tunekit.trials import Status

# The recorded public spaces lie beside a checkout; they are not the project's to ship.
RECORDED = Path(__file__).resolve().parents[3] / "shared" / "data" / "searchspaces"


def recorded(name: str) -> Path:
    path = RECORDED / f"{name}.t4.json.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout (../shared/data/searchspaces)")
    return path


def space(*sizes: int) -> list[Variant]:
    """Variants over tunables a, b, c ... of the given sizes, in declaration order."""
    points: list[dict[str, int]] = [{}]
    for name, size in zip("abcdef", sizes, strict=False):
        points = [{**point, name: value} for point in points for value in range(size)]
    return [identity.variant("toy", 1, "only", "sm_90a", Values(point)) for point in points]


def conditional() -> list[Variant]:
    """Two implementations with a tunable in common, one of their own each, names among the values."""
    one = [Values(tile=t, swizzle=s) for t in (64, 128, 256) for s in ("none", "row", "column")]
    other = [Values(tile=t, stages=s, split=b) for t in (64, 128, 256) for s in (2, 3, 4) for b in (True, False)]
    return [identity.variant("toy", 1, "one", "sm_90a", v) for v in one] + [
        identity.variant("toy", 1, "other", "sm_90a", v) for v in other
    ]


def cost(variant: Variant) -> float:
    numbers = [float(v) for v in variant.tunables.values() if not isinstance(v, str)]
    return 10.0 + sum((number - 2) ** 2 for number in numbers)


def run(
    name: str,
    candidates: Sequence[Variant],
    budget: int,
    *,
    outcome: Callable[[Variant], Told] | None = None,
    seed: int = 0,
    batch: int = 4,
    told: Sequence[Told] = (),
) -> list[Variant]:
    """Search until the budget or the space ends; the proposals in order."""
    strategy = make_strategy(name, candidates, Budget(evaluations=budget), seed)
    strategy.tell(told)
    asked: list[Variant] = []
    while len(asked) < budget:
        proposed = strategy.ask(min(batch, budget - len(asked)))
        if not proposed:
            break
        asked += proposed
        strategy.tell([outcome(v) if outcome else Told(v, cost(v), Status.OK) for v in proposed])
    return asked
