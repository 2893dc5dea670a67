"""The cost model: its fit recovers a known law, its order loses nobody, what ships follows from the trials."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spaces import cost, run, space

from tunekit.model import Cost, Footprint
from tunekit.search import STRATEGIES, Budget, Told, make_strategy
from tunekit.search.cost_fit import Observed, fit, held_out, least_squares, ranking, regret, spearman, usable
from tunekit.search.cost_model import TERMS, Launch, Machine, parse_cost_model, resident, terms
from tunekit.search.encoding import Space, in_order
from tunekit.search.replay import replay
from tunekit.spec import Work, load_spec
from tunekit.store.shipped import shipped_cost_model

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine("a GPU", sms=10, smem_bytes=100_000, threads=2048, registers=65_536)
LAW = dict.fromkeys(TERMS, 0.0) | {"launch": 2.0, "arithmetic": 0.5, "latency": 0.25, "memory": 0.1, "cta": 1.5}


def launch(draw: random.Random, problem_bytes: float = 4e6) -> Launch:
    ctas, steps = draw.randint(1, 200), draw.randint(1, 64)
    work = Work(ctas, steps, draw.randint(1, 4), 1e6 * draw.randint(1, 40), 1e4 * steps, 1e4, draw.choice([1, 2, None]))
    footprint = Footprint(
        draw.choice([20_000, 45_000, 90_000]), 0, draw.choice([128, 256, 384]), draw.choice([1, 2, 4])
    )
    return Launch(Cost(1e9, problem_bytes), work, footprint)


def time_us(one: Launch) -> float:
    found = terms(one, MACHINE)
    return sum(LAW[name] * found[name] for name in TERMS)


def observed(problems: int, each: int, noise: float = 0.0) -> list[Observed]:
    draw = random.Random(1)
    found = []
    for problem in range(problems):
        for _ in range(each):
            one = launch(draw, 1e6 * (problem + 1))
            us = time_us(one) * math.exp(noise * draw.gauss(0, 1))
            found.append(Observed(str(problem), str(problem), one, us))
    return found


def test_a_known_law_is_recovered_from_its_times() -> None:
    found = fit(observed(8, 40), MACHINE)
    assert found == pytest.approx(LAW, abs=1e-3)


def test_a_law_under_noise_still_orders_problems_that_the_fit_has_not_seen() -> None:
    trials = observed(12, 40, noise=0.1)
    found = ranking(trials, held_out(trials, MACHINE), 40)
    assert found is not None and found.problems == 12
    assert found.spearman[1] > 0.9
    assert found.regret[5][1] < 1.1


def test_a_problem_is_judged_by_a_model_that_has_not_seen_it() -> None:
    """One problem follows another law; were it in its own fit, its prediction would be drawn to it."""
    trials = observed(12, 20)
    odd = [dataclasses.replace(t, time_us=50 * t.time_us) if t.problem == "3" else t for t in trials]
    predicted = held_out(odd, MACHINE)
    ratios = [p / t.time_us for p, t in zip(predicted, odd, strict=True) if t.problem == "3"]
    assert max(ratios) < 0.1


@pytest.mark.parametrize("time", [None, math.nan, math.inf, 0.0, -3.0])
def test_a_failure_teaches_nothing(time: float | None) -> None:
    trials = observed(4, 20)
    failed = dataclasses.replace(trials[0], time_us=time)
    assert usable([failed, *trials]) == trials
    assert fit([failed, *trials], MACHINE) == fit(trials, MACHINE)


def test_without_a_time_there_is_no_model() -> None:
    with pytest.raises(ValueError, match="there is none"):
        fit([dataclasses.replace(each, time_us=None) for each in observed(1, 3)], MACHINE)


def test_no_coefficient_is_below_zero_and_none_is_better() -> None:
    """The least squares with x >= 0, by its optimality: no slope where x > 0, none downhill where x = 0."""
    import numpy as np

    random_numbers = np.random.default_rng(0)
    matrix, values = random_numbers.normal(size=(30, 6)), random_numbers.normal(size=30)
    found = least_squares(matrix, values)
    slope = matrix.T @ (matrix @ found - values)
    assert (found >= 0).all() and (found == 0).any()
    assert np.abs(slope[found > 0]).max() < 1e-6
    assert slope[found == 0].min() > -1e-6


def test_the_scarcest_resource_decides_how_many_ctas_an_sm_holds() -> None:
    work = Work(1, 1, 1, 1, 1, 1)
    assert resident(Launch(None, work, Footprint()), MACHINE) == 1
    assert resident(Launch(None, work, Footprint(smem_bytes=32_000, threads=128)), MACHINE) == 3
    assert resident(Launch(None, work, Footprint(smem_bytes=1000, threads=1024)), MACHINE) == 2
    assert resident(Launch(None, work, Footprint(smem_bytes=1000, threads=128, registers=168)), MACHINE) == 3
    declared = dataclasses.replace(work, ctas_per_sm=2)
    assert resident(Launch(None, declared, Footprint(smem_bytes=1000, threads=128, registers=168)), MACHINE) == 2
    assert resident(Launch(None, declared, Footprint(smem_bytes=1_000_000)), MACHINE) == 1


def test_ranks_and_regret_are_what_their_names_say() -> None:
    import numpy as np

    up, down = np.array([1.0, 2.0, 3.0, 4.0]), np.array([4.0, 3.0, 2.0, 1.0])
    assert spearman(up, up**3) == pytest.approx(1) and spearman(up, down) == pytest.approx(-1)
    assert spearman(up, np.ones(4)) == 0
    assert regret(down, up, 1) == 4 and regret(down, up, 3) == 2 and regret(up, up, 1) == 1


@given(st.lists(st.one_of(st.none(), st.floats(1, 1e6)), max_size=20))
def test_an_order_is_a_permutation_and_the_unpredicted_keep_their_places(predicted: list[float | None]) -> None:
    items = list(range(len(predicted)))
    ordered = in_order(items, predicted)
    assert sorted(ordered) == items
    assert all(ordered[place] == place for place, time in enumerate(predicted) if time is None)
    times = [predicted[item] for item in ordered if predicted[item] is not None]
    assert times == sorted(times)


def test_an_exhaustive_search_goes_by_the_predictions() -> None:
    candidates = space(4, 3)
    predicted = {v.id: cost(v) for v in candidates}
    asked = run("exhaustive", Space(candidates, predicted), 12)
    assert [cost(v) for v in asked] == sorted(cost(v) for v in candidates)
    assert run("exhaustive", Space(candidates), 12) == candidates


@pytest.mark.parametrize("name", ["exhaustive", "random", "surrogate", "tpe"])
def test_predictions_add_and_lose_no_candidate(name: str) -> None:
    """Also where they are of strangers, or of a few candidates alone."""
    candidates = space(4, 4)
    assert name in STRATEGIES
    for predicted in ({v.id: 1.0 for v in candidates[5:9]}, {"stranger": 1.0}, {v.id: -cost(v) for v in candidates}):
        asked = run(name, Space(candidates, predicted), 100)
        assert sorted(v.id for v in asked) == sorted(v.id for v in candidates)


def test_the_surrogate_begins_with_the_likely_ones_and_goes_on_at_random() -> None:
    candidates = space(6, 6, 6)
    predicted = {v.id: cost(v) for v in candidates}
    plain = make_strategy("surrogate", candidates, Budget(evaluations=50), 3).ask(6)
    guided = make_strategy("surrogate", Space(candidates, predicted), Budget(evaluations=50), 3).ask(6)
    assert [v.id for v in guided[:3]] == sorted(predicted, key=lambda id: predicted[id])[:3]
    assert guided[3:] == [v for v in plain if v not in guided[:3]][:3]


def test_a_random_search_stays_as_it_is() -> None:
    candidates = space(5, 5)
    predicted = {v.id: cost(v) for v in candidates}
    assert run("random", Space(candidates, predicted), 25, seed=4) == run("random", candidates, 25, seed=4)


def test_a_wrong_model_costs_the_surrogate_three_evaluations_and_a_right_one_finds_the_best_at_once() -> None:
    candidates = space(6, 6, 6)
    told = {v.id: Told(v, cost(v)) for v in candidates}
    right = make_strategy("surrogate", Space(candidates, {v.id: cost(v) for v in candidates}), Budget(), 0)
    assert replay(right, told, 1).best_us[0] == 10.0
    wrong = make_strategy("surrogate", Space(candidates, {v.id: -cost(v) for v in candidates}), Budget(), 0)
    assert replay(wrong, told, 60).best_us[-1] == 10.0


@pytest.mark.parametrize(
    "change",
    [
        {"coefficients": {"launch": -1.0}},
        {"coefficients": {"launch": math.nan}},
        {"coefficients": {"made_up": 1.0}},
        {"coefficients": {}},
        {"machine": {"gpu": "a GPU"}},
        {"rankings": None},
    ],
)
def test_a_file_that_is_no_model_is_refused(change: dict[str, object]) -> None:
    raw = shipped_cost_model("fmha", "sm_90a")
    with pytest.raises(ValueError, match="no cost model"):
        parse_cost_model({**raw, **change})
    with pytest.raises(ValueError, match="no cost model"):
        parse_cost_model([])


def test_a_model_whose_order_is_poor_orders_nothing() -> None:
    model = parse_cost_model(shipped_cost_model("fmha", "sm_90a"))
    assert model.usable
    poor = dataclasses.replace(model.rankings[0], spearman=(0.3, -0.5))
    assert not dataclasses.replace(model, rankings=(model.rankings[0], poor)).usable
    assert not dataclasses.replace(model, rankings=()).usable


def test_a_missing_or_damaged_file_is_no_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert shipped_cost_model("fmha", "sm_90a", tmp_path) is None and not caplog.records
    (tmp_path / "fmha.sm_90a.cost.json").write_text("{")
    assert shipped_cost_model("fmha", "sm_90a", tmp_path) is None
    assert "no cost model is used" in caplog.text


def test_the_numbers_that_ship_are_those_of_the_trials_that_ship() -> None:
    """The coefficients, and the error that is stated, from the shipped trials and today's declared work."""
    sys.path.append(str(ROOT / "benchmarks"))
    import cost_model

    spec = load_spec("fmha")
    path = ROOT / cost_model.trials_name("fmha", "sm_90a")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    made = cost_model.fitted(lines, cost_model.measured_of(lines, spec), spec, "sm_90a")
    shipped = parse_cost_model(shipped_cost_model("fmha", "sm_90a"))
    assert shipped.coefficients == pytest.approx(made.coefficients, rel=1e-3, abs=1e-5)
    assert shipped.error == pytest.approx(made.error, abs=1e-3)
    assert shipped.trials == made.trials == sum("us" in line for line in lines)
    for stated, found in zip(shipped.rankings, made.rankings, strict=True):
        assert (stated.least_trials, stated.problems) == (found.least_trials, found.problems)
        assert stated.spearman == pytest.approx(found.spearman, abs=0.01)
        assert {k: pytest.approx(each, abs=0.01) for k, each in found.regret.items()} == stated.regret
