"""The conformance suite that every strategy passes (cases 64, 65, 66, 67)."""

from __future__ import annotations

import importlib.util
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spaces import conditional, cost, run, space

from tunekit.model import Variant
from tunekit.search import STRATEGIES, Budget, Told, make_strategy
from tunekit.trials import Status


@pytest.fixture(params=sorted(STRATEGIES))
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "gp" and importlib.util.find_spec("scipy") is None:
        pytest.skip("Optuna's Gaussian process needs scipy")
    return request.param


def ids(variants: list[Variant]) -> list[str]:
    return [variant.id for variant in variants]


def fail(variant: Variant) -> Told:
    return Told(variant, None, Status.COMPILE_ERROR)


def test_a_space_of_three_with_a_budget_of_a_hundred_takes_three_evaluations(name: str) -> None:
    """Case 64."""
    candidates = space(3)
    assert sorted(ids(run(name, candidates, 100))) == sorted(ids(candidates))


@pytest.mark.parametrize("count", [1, 2])
def test_the_smallest_spaces_end_cleanly(name: str, count: int) -> None:
    assert len(run(name, space(count), 10)) == count
    strategy = make_strategy(name, [], Budget(evaluations=5), 0)
    assert strategy.ask(4) == []


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**31 - 1),
    batch=st.integers(1, 9),
    kept=st.integers(1, 3),
)
def test_proposals_are_candidates_and_never_repeat(name: str, sizes, seed, batch, kept) -> None:
    """Case 65: every proposal satisfies the constraints, whatever the space, the seed and the batch."""
    candidates = [v for v in space(*sizes) if sum(int(x) for x in v.tunables.values()) % 4 <= kept]
    asked = run(name, candidates, 20, seed=seed, batch=batch)
    assert len(asked) == len(set(ids(asked))) == min(20, len(candidates))
    assert set(ids(asked)) <= set(ids(candidates))


def test_the_same_seed_gives_the_same_proposals(name: str) -> None:
    """Case 67: 1 worker and 8. Workers end in any order; batches are fixed and told in the order asked."""
    candidates = space(5, 5, 5)

    def with_workers(workers: int) -> list[str]:
        strategy = make_strategy(name, candidates, Budget(evaluations=24), 7)
        order: list[str] = []
        shuffle = random.Random(workers)
        for _ in range(3):
            batch = strategy.ask(8)
            order += ids(batch)
            finished: dict[str, float] = {}
            for start in range(0, 8, workers):
                running = batch[start : start + workers]
                shuffle.shuffle(running)
                finished |= {variant.id: cost(variant) for variant in running}
            strategy.tell([Told(variant, finished[variant.id]) for variant in batch])
        return order

    assert with_workers(1) == with_workers(8)


def test_nothing_depends_on_the_global_random_state(name: str) -> None:
    import numpy

    first = run(name, space(5, 5, 5), 24, seed=3)
    random.seed(99)
    numpy.random.seed(99)
    assert ids(run(name, space(5, 5, 5), 24, seed=3)) == ids(first)


def test_failures_cost_one_evaluation_each_and_a_good_point_is_still_found(name: str) -> None:
    """Case 66: 90 % of the space fails; nothing is evaluated twice."""
    candidates = space(10, 10)
    works = {v.id for v in candidates if v.tunables["b"] == 2}
    asked = run(name, candidates, 100, outcome=lambda v: Told(v, cost(v)) if v.id in works else fail(v))
    assert len(asked) == len(set(ids(asked)))
    assert min(cost(v) for v in asked if v.id in works) == 10.0


def test_a_space_of_failures_alone_ends(name: str) -> None:
    assert len(run(name, space(4, 4), 100, outcome=fail)) == 16


@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0, 0.0])
def test_a_time_that_is_none_is_a_failure(name: str, time: float) -> None:
    """NaN, inf and nonsense teach that a point fails; they reach no model."""
    assert Told(space(1)[0], time, Status.OK).failed
    asked = run(name, space(6, 6), 20, outcome=lambda v: Told(v, time if v.tunables["a"] == 0 else cost(v)))
    assert len(set(ids(asked))) == 20


def test_a_failure_with_a_time_is_a_failure() -> None:
    told = Told(space(1)[0], 3.0, Status.WRONG_RESULT)
    assert told.failed and told.time_us is None


def test_compiled_and_not_measured_is_no_failure(name: str) -> None:
    """Without a GPU nothing has a time: the search goes on and learns nothing."""
    assert not Told(space(1)[0], None, Status.OK).failed
    assert len(run(name, space(5, 5), 25, outcome=lambda v: Told(v, None, Status.OK))) == 25


def test_equal_times_everywhere_are_no_trouble(name: str) -> None:
    assert len(run(name, space(6, 6), 30, outcome=lambda v: Told(v, 5.0))) == 30


def test_what_was_told_before_is_not_proposed(name: str) -> None:
    """Resume from the database: earlier outcomes, the incumbent's and the default's among them."""
    candidates = space(5, 5)
    known = [Told(v, cost(v)) for v in candidates[:5]] + [fail(v) for v in candidates[5:10]]
    asked = run(name, candidates, 100, told=[*known, *known])
    assert sorted(ids(asked)) == sorted(ids(candidates[10:]))


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(name: str) -> None:
    """A sweep that resumes replays its proposals, whose outcomes the database has, and goes on from there."""
    candidates = space(5, 5, 3)
    whole = run(name, candidates, 32, seed=5)
    assert ids(run(name, candidates, 16, seed=5)) == ids(whole)[:16]
    assert ids(run(name, candidates, 32, seed=5)) == ids(whole)


def test_the_outcome_of_a_stranger_is_ignored(name: str) -> None:
    stranger = space(2, 2, 2)[0]
    assert len(run(name, space(3), 10, told=[Told(stranger, 1.0)])) == 3


def test_conditional_tunables_and_implementations_share_one_search(name: str) -> None:
    candidates = conditional()
    assert sorted(ids(run(name, candidates, 100))) == sorted(ids(candidates))


def test_repeated_candidates_count_once(name: str) -> None:
    assert len(run(name, [*space(3), *space(3)], 10)) == 3


def test_asking_for_nothing_gives_nothing(name: str) -> None:
    assert make_strategy(name, space(3), Budget(), 0).ask(0) == []
