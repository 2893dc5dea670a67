"""A sweep begins with what the cost model predicts, says so, and loses nothing by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.conftest import Cache, reference
from tunekit.arch import ARCHES
from tunekit.model import Footprint, Variant
from tunekit.search.cost_model import parse_cost_model
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.store.shipped import shipped_cost_model
from tunekit.sweep.predicting import Predictor, cost_model_of
from tunekit.sweep.problem import ProblemRun

PREDICTED = reference("host_predicted", "host_predicted")
UNPREDICTABLE = reference("host_predicted", "host_unpredictable")
NEAREST = sorted(range(2, 21), key=lambda number: (abs(number - 12), number))


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a sweep evaluates, in order; nothing is compiled."""
    evaluated: list[int] = []

    def take(run: ProblemRun, batch: list[Variant], measurer: object) -> None:
        evaluated.extend(int(v.tunables["number"]) for v in batch)

    monkeypatch.setattr(ProblemRun, "_evaluate", take)
    return evaluated


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ships a model of one coefficient for a spec: a microsecond a step."""
    raw = parse_cost_model(shipped_cost_model("fmha", "sm_90a")).to_json()
    monkeypatch.setattr("tunekit.store.shipped.shipped_directory", lambda: tmp_path)

    def ship(name: str, **changes: Any) -> None:
        made = {**raw, "spec": name, "version": 1, "arch": "host", "coefficients": {"launch": 1.0, "step": 1.0}}
        (tmp_path / f"{name}.host.cost.json").write_text(json.dumps({**made, **changes}))

    return ship


@pytest.mark.usefixtures("shipped")
def test_without_a_model_the_order_is_the_declared_one(cache: Cache, numbers: list[int]) -> None:
    report = cache.run(PREDICTED, {"n": 64}, verify="none")
    assert numbers == list(range(1, 21))
    assert not any("cost model" in note for note in report.notes)


def test_the_default_comes_first_and_then_what_is_predicted_fastest(
    cache: Cache, numbers: list[int], shipped: Any
) -> None:
    shipped("host_predicted")
    report = cache.run(PREDICTED, {"n": 64}, verify="none")
    assert numbers == [1, *NEAREST]
    (note,) = [note for note in report.notes if "cost model" in note]
    assert "orders the first evaluations: fitted on 1352 trials of an NVIDIA H200" in note
    assert "Spearman 0.9" in note and "over the best" in note


def test_the_surrogate_begins_with_three_of_them(cache: Cache, numbers: list[int], shipped: Any) -> None:
    shipped("host_predicted")
    cache.run(PREDICTED, {"n": 64}, verify="none", search="surrogate", budget="8")
    assert numbers[:4] == [1, *NEAREST[:3]] and len(set(numbers)) == 8


def test_a_random_search_goes_by_its_seed_alone(cache: Cache, numbers: list[int], shipped: Any) -> None:
    cache.run(PREDICTED, {"n": 64}, verify="none", search="random")
    plain = numbers.copy()
    numbers.clear()
    shipped("host_predicted")
    report = cache.run(PREDICTED, {"n": 64}, verify="none", search="random")
    assert numbers == plain
    assert not any("cost model" in note for note in report.notes)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"arch": "sm_90a"},
        {"spec": "another"},
        {"coefficients": {"launch": -1.0}},
        {"rankings": []},
    ],
    ids=str,
)
def test_a_model_of_something_else_or_a_poor_one_orders_nothing(
    cache: Cache, numbers: list[int], shipped: Any, change: dict[str, Any]
) -> None:
    shipped("host_predicted", **change)
    cache.run(PREDICTED, {"n": 64}, verify="none")
    assert numbers == list(range(1, 21))


def test_a_work_function_that_fails_costs_the_order_alone(cache: Cache, numbers: list[int], shipped: Any) -> None:
    shipped("host_unpredictable")
    report = cache.run(UNPREDICTABLE, {"n": 64}, verify="none")
    assert numbers == list(range(1, 21))
    (note,) = [note for note in report.notes if "cost model" in note]
    assert "the cost model orders nothing" in note and "work fails for n=64 number=20" in note


def test_a_predicted_sweep_measures_everything_and_has_a_winner(cache: Cache, shipped: Any) -> None:
    shipped("host_predicted")
    (problem,) = cache.run(PREDICTED, {"n": 64}).problems
    assert problem.winner is not None
    assert {row.status for row in problem.rows} == {"ok"} and len(problem.rows) == 20
    measured = [e.variant for e in cache.events if e.kind == "started" and e.text == "measure" and e.variant]
    distances = [abs(int(v.tunables["number"]) - 12) for v in measured]
    assert distances == sorted(distances)  # equal ones as their compiles ended


def test_the_shipped_model_is_of_todays_spec() -> None:
    """A new version of the spec makes the model nobody's: fit it anew."""
    assert shipped_cost_model("fmha", "sm_90a") is not None
    assert cost_model_of(load_spec("fmha"), "sm_90a") is not None
    assert cost_model_of(load_spec("fmha"), "sm_100a") is None


def test_what_a_compile_found_out_comes_before_what_is_declared() -> None:
    """Registers that leave room for one CTA on an SM make a variant slower that was declared for two."""
    spec = load_spec("fmha")
    problem = spec.problem({"batch": 128, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 64})
    variants = expand(spec, ARCHES["sm_90a"], problem, "sm90").variants
    two = next(v for v in variants if v.tunables["ctas_per_sm"] == 2 and v.tunables["m_tile"] == 64)
    predictor = Predictor(spec, problem, cost_model_of(spec, "sm_90a"))
    declared = predictor.predict_us(two)
    assert declared is not None
    assert predictor.predict_us(two, Footprint(registers=128)) == declared
    slower = predictor.predict_us(two, Footprint(registers=248))
    assert slower is not None and slower > declared
