"""The pipeline end to end on the host backend: what wins, what fails, what is kept."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sweep.conftest import Cache, ids, reference
from tunekit.arch import ARCHES
from tunekit.compiling import Compiler, Unit
from tunekit.errors import UserError
from tunekit.jobs import TaskResult
from tunekit.measure import OUT_OF_MEMORY, MeasuringWorker
from tunekit.model import Values, Variant
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.sweep import SweepOptions
from tunekit.sweep.measuring import Measurer
from tunekit.sweep.options import check_named, choose_target, restrict
from tunekit.sweep.problem import ProblemRun
from tunekit.trials import Outcome, Stage, Status, Trial

SCALE = reference("host_scale", "host_scale")
FAULTY = reference("host_scale", "host_faulty")
BUILD = reference("host_scale", "host_build")
MANY = reference("host_many", "host_many")
ROWS = {"rows": 64}


def statuses(report: Any) -> dict[Any, str]:
    (problem,) = report.problems
    return {next(iter(row.variant.tunables.values())): row.status for row in problem.rows}


def test_the_fastest_correct_variant_wins_and_everything_is_kept(cache: Cache) -> None:
    report = cache.run(SCALE, ROWS)
    (problem,) = report.problems
    winner = problem.winner
    assert winner is not None and report.state == "done"
    assert winner.variant.tunables.delay_us == 0, "a variant that pauses 200 us can't win"
    assert winner.protocol.startswith("final/") and winner.samples >= 2
    with cache.store() as store:
        assert [w.variant.id for w in store.winners("host_scale", "host")] == [winner.variant.id]
        measured = store.trials(spec="host_scale", stage=Stage.MEASURE, variant=winner.variant.id)
        assert {t.protocol.split("/")[0] for t in measured} == {"search", "final"}
        assert all(t.outcome.samples_us for t in measured)
        assert store.sweeps("host_scale")[0].state == "done"


def test_wrong_variants_never_win_however_fast(cache: Cache) -> None:
    """Case 44: half the output, NaN, one element, the second launch, odd sizes; only 1 ulp off may win."""
    wrong = ("half", "nan", "one_element", "second_launch", "odd_rows")
    report = cache.run(FAULTY, ROWS, variants=ids(FAULTY, ROWS, fault=(*wrong, "ulp")))
    (problem,) = report.problems
    assert problem.winner is not None and problem.winner.variant.tunables.fault == "ulp"
    assert {fault: statuses(report)[fault] for fault in wrong} == dict.fromkeys(wrong, "wrong_result")
    assert all(row.reason for row in problem.rows if not row.ok)


def test_a_variant_that_spins_or_crashes_is_named_and_the_rest_are_measured(cache: Cache) -> None:
    """Cases 49, 50 without a GPU: the middle ones take their process along, nobody else."""
    cache.limits["run_limit_s"] = 0.5
    report = cache.run(FAULTY, ROWS, variants=ids(FAULTY, ROWS, fault=("none", "spin", "crash", "ulp")))
    assert statuses(report) == {"none": "ok", "spin": "run_timeout", "crash": "device_fault", "ulp": "ok"}


@pytest.mark.slow
def test_a_sweep_may_verify_the_problem_alone_and_a_full_one_does_it_again(cache: Cache) -> None:
    """What is wrong at odd sizes passes one draw of an even one; its time there is none for a full verification."""
    chosen = ids(FAULTY, ROWS, fault=("none", "odd_rows"))
    assert statuses(cache.run(FAULTY, ROWS, variants=chosen, cases="problem")) == {"none": "ok", "odd_rows": "ok"}
    assert statuses(cache.run(FAULTY, ROWS, variants=chosen)) == {"none": "ok", "odd_rows": "wrong_result"}
    with cache.store() as store:
        verified = store.trials(spec="host_faulty", stage=Stage.VERIFY)
    assert [trial.outcome.facts.get("cases", 0) for trial in verified if trial.outcome.ok] == [1, 1, 5]
    again = cache.run(FAULTY, ROWS, variants=chosen[:1], cases="problem")
    assert again.problems[0].winner is not None
    with cache.store() as store:
        assert len(store.trials(spec="host_faulty", stage=Stage.VERIFY)) == len(verified), "the full one is enough"
    cache.run(FAULTY, ROWS, variants=chosen, cases="problem", retry_failed=True)
    with cache.store() as store:
        retried = store.trials(spec="host_faulty", stage=Stage.VERIFY)[len(verified) :]
    assert [trial.variant.tunables["fault"] for trial in retried] == ["odd_rows"], "its time is older than its failure"


def test_a_variant_is_for_one_of_the_problems_at_least(cache: Cache) -> None:
    """An id that a problem has no variant for is passed over there; one that no problem has is a mistake."""
    spec = load_spec(SCALE)
    here = expand(spec, ARCHES["host"], spec.problem(ROWS))
    first, second = (variant.id for variant in here.variants[:2])
    less = replace(here, variants=here.variants[1:])
    assert [variant.id for variant in restrict(less, (first, second)).variants] == [second]
    check_named([less, here], (first, second))
    with pytest.raises(UserError, match="no variant id begins with"):
        restrict(less, (first,))
    with pytest.raises(UserError, match="no variant id begins with 'zz' for these problems"):
        check_named([less, here], (second, "zz"))
    with pytest.raises(UserError, match="no variant id begins with 'zz'"):
        cache.run(SCALE, ROWS, variants=(second, "zz"))


def test_where_all_variants_fail_nothing_is_stored_as_a_winner(cache: Cache) -> None:
    """Case 46: an earlier winner stays as it was."""
    cache.run(FAULTY, ROWS, variants=ids(FAULTY, ROWS, fault=("none",)))
    with cache.store() as store:
        (before,) = store.winners("host_faulty", "host")
    report = cache.run(FAULTY, ROWS, variants=ids(FAULTY, ROWS, fault=("half", "nan")), force=True)
    (problem,) = report.problems
    assert problem.winner is None and problem.why_no_winner == "no variant was both right and measured"
    with cache.store() as store:
        assert store.winners("host_faulty", "host") == [before]


def test_a_build_that_hangs_natively_costs_one_limit(cache: Cache) -> None:
    """Case 1: three variants, the middle one hangs with the GIL held."""
    cache.limits |= {"trace_limit_s": 2.0, "jobs": 1}
    wanted = ids(BUILD, ROWS, build=("good", "hang", "also_good"))
    before = set(psutil.Process().children(recursive=True))
    began = time.monotonic()
    report = cache.run(BUILD, ROWS, variants=wanted, verify="none")
    took = time.monotonic() - began
    assert statuses(report) == {"good": "ok", "hang": "compile_timeout", "also_good": "ok"}
    assert 2.0 <= took < 8.0
    assert not set(psutil.Process().children(recursive=True)) - before


def test_what_hung_is_remembered_and_skipped_until_it_is_asked_for(cache: Cache) -> None:
    cache.limits |= {"trace_limit_s": 1.0}
    wanted = ids(BUILD, ROWS, build=("good", "hang", "segfault"))
    cache.run(BUILD, ROWS, variants=wanted, verify="none")
    began = time.monotonic()
    again = cache.run(BUILD, ROWS, variants=wanted, verify="none")
    assert statuses(again) == {"good": "ok", "hang": "known_bad", "segfault": "known_bad"}
    assert time.monotonic() - began < 1.0 and cache.compiled() == 0
    assert all("--retry-failed" in row.reason for row in again.problems[0].rows if row.status == "known_bad")
    retried = cache.run(BUILD, ROWS, variants=wanted, verify="none", retry_failed=True)
    assert statuses(retried) == {"good": "ok", "hang": "compile_timeout", "segfault": "compile_crashed"}


def test_an_exception_in_the_seventh_build_leaves_the_others(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 69."""
    monkeypatch.setenv("TUNEKIT_TEST_FAIL_SEVENTH", "1")
    report = cache.run(MANY, {"n": 64}, variants=ids(MANY, {"n": 64}, number=range(1, 11)), verify="none")
    assert [number for number, status in statuses(report).items() if status != "ok"] == [7]
    with cache.store() as store:
        kept = {t.variant.tunables.number: t.outcome.status for t in store.trials(spec="host_many")}
    assert len(kept) == 10 and kept[7] is Status.TRACE_ERROR


def test_a_second_sweep_does_nothing_twice_but_the_final(cache: Cache) -> None:
    """Cases 19 and 28: artifacts, times and failures are taken from the store."""
    wanted = ids(FAULTY, ROWS, fault=("none", "ulp", "half"))
    first = cache.run(FAULTY, ROWS, variants=wanted)
    second = cache.run(FAULTY, ROWS, variants=wanted)
    assert cache.compiled() == 0
    assert statuses(second) == statuses(first)
    with cache.store() as store:
        latest = max(t.sweep or 0 for t in store.trials(spec="host_faulty"))
        again = store.trials(spec="host_faulty", sweep=latest)
    assert {t.protocol.partition("/")[0] for t in again} == {"final"}, "only the final is held again"


def failing_final(monkeypatch: pytest.MonkeyPatch, fault: Any, outcome: Outcome) -> None:
    """Have every final end with `outcome` for the variant of that fault, and as it does for the others."""
    held = MeasuringWorker.final

    def final(worker: MeasuringWorker, jobs: Any, *more: Any, **options: Any) -> dict[str, Outcome]:
        found = held(worker, [job for job in jobs if job.variant.tunables.fault != fault], *more, **options)
        return found | {job.variant.id: outcome for job in jobs if job.variant.tunables.fault == fault}

    monkeypatch.setattr(MeasuringWorker, "final", final)


def test_a_variant_that_fails_in_the_final_is_shown_as_failed(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was right while searching, and as the default it races; its row and the exit status must not say ok."""
    failing_final(monkeypatch, "none", Outcome(Stage.MEASURE, Status.WRONG_RESULT, "in the final, y: mismatch at [0]"))
    report = cache.run(FAULTY, ROWS, variants=ids(FAULTY, ROWS, fault=("none", "ulp")))
    assert statuses(report) == {"none": "wrong_result", "ulp": "ok"}


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (Outcome(Stage.VERIFY, Status.WRONG_RESULT, "y: NaN"), True),
        (Outcome(Stage.MEASURE, Status.WRONG_RESULT, "in the final, y: NaN"), True),
        (Outcome(Stage.MEASURE, Status.RUN_TIMEOUT, "took over 5 s"), True),
        (Outcome(Stage.MEASURE, Status.DEVICE_FAULT, "throttled", windows=(Values(rejected="throttled"),)), False),
        (Outcome(Stage.VERIFY, Status.LAUNCH_ERROR, "out of memory", facts=Values({OUT_OF_MEMORY: True})), False),
    ],
    ids=["wrong", "wrong in the final", "spins", "throttled", "out of memory"],
)
def test_what_is_not_the_variants_own_fault_is_tried_again(cache: Cache, outcome: Outcome, kept: bool) -> None:
    """A GPU that throttled, or that others had filled, keeps no variant out of the next sweep."""
    spec = load_spec(FAULTY)
    problem = spec.problem(ROWS)
    variant = expand(spec, ARCHES["host"], problem).variants[0]
    target = choose_target(spec, SweepOptions(arch="host"))
    with cache.store() as store:
        store.record(Trial(variant, problem, "a" * 64, outcome, target.environment))
        means: Any = (spec, problem, target, None, None, store, 1)
        assert bool(Measurer(*means, resume=True, retry_failed=False).earlier()) == kept
        assert not Measurer(*means, resume=True, retry_failed=True).earlier()


def test_an_artifact_that_vanishes_before_it_is_run_fails_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collected, or found damaged and moved aside, between compile and run: one failure, and the sweep goes on."""
    good, lost = ids(FAULTY, ROWS, fault=("none", "ulp"))
    job = Measurer._job

    def one_lost(measurer: Measurer, unit: Unit) -> Any:
        if unit.variant.id == lost:
            measurer.artifacts.manifest(unit.key).unlink(missing_ok=True)
        return job(measurer, unit)

    monkeypatch.setattr(Measurer, "_job", one_lost)
    report = cache.run(FAULTY, ROWS, variants=(good, lost))
    assert statuses(report) == {"none": "ok", "ulp": "launch_error"}
    (problem,) = report.problems
    assert "its artifact is gone" in next(row.reason for row in problem.rows if not row.ok)


def test_a_compile_that_leaves_no_kernel_fails_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that removes its own directory, say: one compile error, and the sweep goes on."""
    good, lost = ids(FAULTY, ROWS, fault=("none", "ulp"))
    keep = Compiler._keep

    def one_lost(compiler: Compiler, unit: Unit, result: TaskResult) -> Outcome:
        if unit.variant.id == lost and result.value is not None:
            Path(result.value["files"]["so"]).unlink()
        return keep(compiler, unit, result)

    monkeypatch.setattr(Compiler, "_keep", one_lost)
    report = cache.run(FAULTY, ROWS, variants=(good, lost))
    assert statuses(report) == {"none": "ok", "ulp": "compile_error"}
    (problem,) = report.problems
    assert "left no kernel: can't read" in next(row.reason for row in problem.rows if not row.ok)


def test_force_beats_what_is_cached(cache: Cache) -> None:
    """Case 63."""
    wanted = ids(FAULTY, ROWS, fault=("none", "half"))
    cache.run(FAULTY, ROWS, variants=wanted)
    cache.run(FAULTY, ROWS, variants=wanted, force=True)
    assert cache.compiled() == 2


def test_a_problem_without_a_valid_variant_ends_at_once_with_the_constraint_to_blame(cache: Cache) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="odd_n"):
        cache.run(MANY, {"n": 13})
    assert time.monotonic() - began < 1.0


def test_without_a_device_for_the_architecture_it_compiles_and_says_why_nothing_won(cache: Cache) -> None:
    report = cache.run(SCALE, ROWS, verify="none")
    (problem,) = report.problems
    assert problem.winner is None and "nothing was measured" in problem.why_no_winner
    assert all(row.ok and row.compile_s for row in problem.rows)


def test_a_search_with_a_budget_stays_within_it_and_the_default_races(cache: Cache) -> None:
    report = cache.run(MANY, {"n": 64}, search="tpe", budget="5", seed=3)
    (problem,) = report.problems
    assert len(problem.rows) == 5
    assert 1 in {row.variant.tunables.number for row in problem.rows}, "the default is always evaluated"


@pytest.mark.parametrize("search", ["exhaustive", "random", "tpe", "surrogate"])
@pytest.mark.parametrize("budget", [2, 5, 19])
def test_a_budget_is_spent_whole_and_the_default_is_among_what_it_buys(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, search: str, budget: int
) -> None:
    """Whatever the strategy proposes first: proposals that the opening took cost nothing and end nothing."""
    evaluated: list[list[int]] = []

    def take(run: ProblemRun, batch: list[Variant], measurer: object) -> None:
        evaluated.append([int(v.tunables["number"]) for v in batch])

    monkeypatch.setattr(ProblemRun, "_evaluate", take)
    last = ids(MANY, {"n": 64}, number=(20,))[0]
    monkeypatch.setattr("tunekit.sweep.problem.default_variants", lambda spec, arch, problem: [by_id(last)])
    cache.run(MANY, {"n": 64}, search=search, budget=str(budget), verify="none")
    numbers = [number for batch in evaluated for number in batch]
    assert len(numbers) == len(set(numbers)) == budget
    assert numbers[0] == 20


def by_id(id: str) -> Variant:
    spec = load_spec(MANY)
    return next(v for v in expand(spec, ARCHES["host"], spec.problem({"n": 64})).variants if v.id == id)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"search": "annealing"}, "unknown search"),
        ({"budget": "soon"}, "budget 'soon'"),
        ({"arch": "sm_100"}, "did you mean sm_100a"),
        ({"arch": "sm_90a"}, "loop needs host"),
        ({"implementation": "lop"}, "unknown implementation"),
        ({"verify": "maybe"}, "unknown --verify"),
        ({"variants": ("ffffffffffff",)}, "no variant id begins with"),
    ],
)
def test_a_mistake_in_the_request_is_one_line_before_anything_runs(
    cache: Cache, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        cache.run(SCALE, ROWS, **options)
    assert "\n" not in str(caught.value)
    assert not cache.settings.database.exists()
