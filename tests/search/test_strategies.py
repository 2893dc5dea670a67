"""The conformance suite that every strategy passes (cases 64, 65, 66, 67)."""

from __future__ import annotations

import pytest

from tunekit import identity
from tunekit.errors import UserError
from tunekit.model import Values, Variant
from tunekit.search import STRATEGIES, Budget, Told, make_strategy, parse_budget


def space(*sizes: int) -> list[Variant]:
    """Variants over tunables a, b, c ... of the given sizes, in declaration order."""
    points: list[dict[str, int]] = [{}]
    for name, size in zip("abcdef", sizes, strict=False):
        points = [{**point, name: value} for point in points for value in range(size)]
    return [identity.variant("toy", 1, "only", "sm_90a", Values(point)) for point in points]


def cost(variant: Variant) -> float:
    return 10.0 + sum((float(value) - 2) ** 2 for value in variant.tunables.values())


def run(name: str, candidates: list[Variant], budget: int, *, fails=lambda v: False, seed: int = 0, batch: int = 4):
    """Search until the budget or the space ends; the proposals in order."""
    strategy = make_strategy(name, candidates, Budget(evaluations=budget), seed)
    asked: list[Variant] = []
    while len(asked) < budget:
        batch_now = strategy.ask(min(batch, budget - len(asked)))
        if not batch_now:
            break
        asked += batch_now
        strategy.tell([Told(v, None if fails(v) else cost(v)) for v in batch_now])
    return asked


@pytest.fixture(params=sorted(STRATEGIES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_space_of_three_with_a_budget_of_a_hundred_takes_three_evaluations(name: str) -> None:
    """Case 64."""
    candidates = space(3)
    asked = run(name, candidates, 100)
    assert sorted(v.id for v in asked) == sorted(v.id for v in candidates)


def test_proposals_are_candidates_and_never_repeat(name: str) -> None:
    """Case 65: holes in the space (constraints) are never proposed."""
    candidates = [v for v in space(4, 4, 4) if sum(v.tunables.values()) % 3]
    asked = run(name, candidates, 30)
    assert len(asked) == len({v.id for v in asked}) == 30
    assert {v.id for v in asked} <= {v.id for v in candidates}


def test_the_same_seed_gives_the_same_proposals(name: str) -> None:
    """Case 67: the batch size is fixed by the caller, not by the number of workers."""
    first, second = (run(name, space(5, 5, 5), 24, seed=7) for _ in range(2))
    assert [v.id for v in first] == [v.id for v in second]


def test_failures_cost_one_evaluation_each_and_a_good_point_is_still_found(name: str) -> None:
    """Case 66: 90 % of the space fails; nothing is evaluated twice."""
    candidates = space(10, 10)
    works = {v.id for v in candidates if v.tunables["b"] == 2}
    asked = run(name, candidates, 100, fails=lambda v: v.id not in works)
    assert len(asked) == len({v.id for v in asked})
    assert min(cost(v) for v in asked if v.id in works) == 10.0


def test_one_tunable_mixed_implementations(name: str) -> None:
    """Implementations with different tunables share one search."""
    other = [identity.variant("toy", 1, "other", "sm_90a", Values(z=value)) for value in (1, 2)]
    asked = run(name, [*space(2, 2), *other], 50)
    assert len(asked) == 6


def test_tpe_finds_the_optimum_sooner_than_the_declaration_order() -> None:
    candidates = space(6, 6, 6)
    best = min(candidates, key=cost)
    places = [[v.id for v in run("tpe", candidates, 216, seed=seed)].index(best.id) for seed in range(5)]
    assert sorted(places)[2] < [v.id for v in candidates].index(best.id)


def test_auto_is_exhaustive_only_where_the_budget_covers_the_space() -> None:
    candidates = space(3, 3)
    assert make_strategy("auto", candidates, Budget(), 0).name == "exhaustive"
    assert make_strategy("auto", candidates, Budget(evaluations=9), 0).name == "exhaustive"
    assert make_strategy("auto", candidates, Budget(evaluations=8), 0).name == "tpe"
    assert make_strategy("auto", candidates, Budget(seconds=5.0), 0).name == "tpe"


def test_an_unknown_search_is_named() -> None:
    with pytest.raises(UserError, match="unknown search 'tpee'"):
        make_strategy("tpee", space(2), Budget(), 0)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, Budget()),
        ("40", Budget(evaluations=40)),
        ("90s", Budget(seconds=90.0)),
        ("1.5h", Budget(seconds=5400.0)),
        ("10min", Budget(seconds=600.0)),
    ],
)
def test_budgets_parse(text: str | None, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "soon", "5 days", "nan", "inf"])
def test_bad_budgets_are_refused_in_a_line(text: str) -> None:
    with pytest.raises(UserError, match="budget"):
        parse_budget(text)
