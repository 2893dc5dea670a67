"""Sweeps for an architecture whose GPU is not here: what the simulator says is kept, and never wins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sweep.conftest import Cache, reference
from tunekit.arch import ARCHES
from tunekit.environment import environment
from tunekit.errors import TunekitError, UserError
from tunekit.model import Values
from tunekit.progress import Row, SweepReport
from tunekit.simulate.client import Simulator
from tunekit.simulate.job import Simulation, SimulationJob
from tunekit.simulate.report import Launched, Refusal, Report, ScheduleResult
from tunekit.space import default_variant
from tunekit.spec import load_spec
from tunekit.sweep import SweepOptions
from tunekit.sweep.options import choose_target
from tunekit.trials import Stage, Status

SOFTMAX = reference("cute_softmax", "cute_softmax")
PROBLEM = {"rows": 9, "columns": 1024}
LAUNCHED = Launched("k", (9, 1, 1), (128, 1, 1), (1, 1, 1), 0, 4)


def answer(state: str = "done", wrong: str = "", refusal: Refusal | None = None) -> Simulation:
    report = Report((LAUNCHED,), (ScheduleResult(0, state, 100, 0.1, wrong),), (), (), refusal)
    return Simulation(report, Values(cosine=1.0))


RIGHT = answer()
WRONG = answer(wrong="y: NaN at [0, 1]")
REFUSED = answer("not modelled", refusal=Refusal("tex.1d", "not modelled", 12, "tex.1d"))
SLOW = answer("time limit")


@pytest.fixture
def simulated(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sweep of the softmax's default variant with a given answer of the simulator; returns report, row and jobs."""
    monkeypatch.setattr("tunekit.sweep.options.environment", lambda device: environment(999))
    spec = load_spec(SOFTMAX)
    default = default_variant(spec, ARCHES["sm_90a"], spec.problem(PROBLEM))
    assert default is not None

    def run(said: Simulation | Exception, verify: str = "auto", **options: Any) -> tuple[SweepReport, Row, list[Any]]:
        jobs: list[SimulationJob] = []

        def simulate(self: Simulator, job: SimulationJob) -> Simulation:
            jobs.append(job)
            if isinstance(said, Exception):
                raise said
            return said

        monkeypatch.setattr(Simulator, "simulate", simulate)
        report = cache.run(SOFTMAX, PROBLEM, arch="sm_90a", verify=verify, variants=(default.id,), **options)
        (row,) = report.problems[0].rows
        return report, row, jobs

    return run


def test_a_right_variant_passes_and_does_not_win(cache: Cache, simulated: Any) -> None:
    report, row, (job,) = simulated(RIGHT)
    assert row.ok and row.median_us is None
    (problem,) = report.problems
    assert problem.winner is None
    assert "nothing was measured" in problem.why_no_winner and "was simulated" in problem.why_no_winner
    assert job.ctas == "sample" and job.time_limit_s and job.problem == load_spec(SOFTMAX).problem(PROBLEM)
    with cache.store() as store:
        (trial,) = store.trials(spec="cute_softmax", stage=Stage.SIMULATE)
        assert trial.outcome.ok and trial.outcome.facts.simulated is True and not trial.outcome.samples_us
        assert trial.problem == job.problem and trial.protocol == ""
        assert store.trials(spec="cute_softmax", stage=Stage.VERIFY) == []
        assert store.trials(spec="cute_softmax", stage=Stage.MEASURE) == []
        assert store.winners("cute_softmax", "sm_90a") == []


def test_what_was_simulated_is_not_simulated_again(simulated: Any) -> None:
    simulated(WRONG)
    _, row, jobs = simulated(RIGHT)
    assert row.status == "wrong_result" and jobs == []
    _, row, jobs = simulated(RIGHT, force=True)
    assert row.ok and len(jobs) == 1


def test_a_wrong_variant_fails(simulated: Any) -> None:
    _, row, _ = simulated(WRONG)
    assert row.status == "wrong_result" and row.reason == "y: NaN at [0, 1] [schedule seed=0]"


@pytest.mark.parametrize("said", [REFUSED, SLOW, TunekitError("the simulator failed in cluster 3")], ids=str)
def test_what_the_simulator_cannot_say_fails_only_where_it_was_demanded(simulated: Any, said: Any) -> None:
    report, row, _ = simulated(said)
    assert row.ok, "auto: the compile's word stands"
    assert any("left 1 variants undecided" in note for note in report.notes)
    report, row, jobs = simulated(said, verify="simulate")
    assert not any("undecided" in note for note in report.notes), "it is a failure then, and listed as one"
    assert not row.ok and len(jobs) == 1, "an undecided simulation is no reason not to try again"
    assert row.status in ("not_modelled", "run_timeout")


def test_none_simulates_nothing(simulated: Any) -> None:
    _, row, jobs = simulated(RIGHT, verify="none")
    assert row.ok and jobs == []


def test_a_spec_whose_reference_fails_ends_the_sweep(simulated: Any) -> None:
    with pytest.raises(UserError, match="no oracle"):
        simulated(UserError("no oracle"))


def test_simulating_is_for_gpus() -> None:
    host = load_spec(reference("host_scale", "host_scale"))
    with pytest.raises(UserError, match="run as they are"):
        choose_target(host, SweepOptions(arch="host", verify="simulate"))
    with pytest.raises(UserError, match="auto, gpu, simulate, none"):
        choose_target(host, SweepOptions(arch="host", verify="maybe"))
    target = choose_target(load_spec(SOFTMAX), SweepOptions(arch="sm_100a", verify="simulate"))
    assert target.simulated and target.device is None


def test_statuses_of_simulations() -> None:
    assert RIGHT.outcome().status is Status.OK
    assert [said.outcome().stage for said in (RIGHT, WRONG, SLOW)] == [Stage.SIMULATE] * 3
