"""``tunekit simulate``: exit statuses and the report's text; one real kernel all the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunekit.model import Values
from tunekit.simulate.client import Simulator
from tunekit.simulate.faults import Fault, FaultKind, Place, abridged
from tunekit.simulate.job import Simulation
from tunekit.simulate.report import Launched, Refusal, Report, ScheduleResult
from tunekit.trials import Outcome, Stage, Status

SPECS = Path(__file__).resolve().parents[1] / "specs"
SOFTMAX = f"{SPECS / 'cute_softmax.py'}:cute_softmax"
ASKED = ("--arch", "sm_90a", "--problem", "rows=3", "columns=1024")
LAUNCHED = Launched("kernel_" + "x" * 200, (4, 2, 1), (128, 1, 1), (2, 1, 1), 2048, 8)
RAN = ScheduleResult(5, "done", 30_000, 2.0)
FIGURES = Values(cases=1, cosine=0.9999991, relative_norm=1.5e-3, max_abs_error=2e-4, rounding_ratio=1.07)
RACE = Fault(
    FaultKind.RACE,
    "warp 1 reads shared 0x480; that has no order with the write by warp 0 (PTX line 30)\nsecond line",
    Place((1, 0, 0), 1, 41, "ld.shared.b32 %r1, [kernel_" + "y" * 100 + "]", ("fmha.py", 120)),
    (0, 1, 2, 3),
    12,
)


@pytest.fixture
def simulated(tunekit, monkeypatch):
    """The command with a given simulation in the simulator's place, and nothing compiled."""

    def run(simulation: Simulation | Outcome, *arguments: str):
        files = {"so": "k.so", "ptx": "k.ptx", "symbol": "k"}
        found = simulation if isinstance(simulation, Outcome) else files
        monkeypatch.setattr(
            "tunekit.cli.simulate._compiled", lambda spec, ref, problem, variants, *_: [(v, found) for v in variants]
        )
        jobs = []
        monkeypatch.setattr(Simulator, "simulate", lambda self, job, tell: jobs.append(job) or simulation)
        return tunekit("simulate", SOFTMAX, *ASKED, *arguments), jobs

    return run


def report(*faults: Fault, ran: ScheduleResult = RAN, launched: Launched = LAUNCHED, **more) -> Simulation:
    return Simulation(Report((launched,), (ran,), faults, **more), FIGURES)


def test_clean(simulated):
    done, jobs = simulated(report(notes=("lane 0 says hello\n",)))
    assert done.status == 0
    figures = "cosine 0.99999910, relative norm error 1.50e-03, 1.07 times the rounded oracle's, largest error 2.00e-04"
    assert f"clean: the results agree with the oracle ({figures})" in done.out
    assert "grid 4x2x1, clusters of 2x1x1, 128 threads, 2,048 B dynamic smem; all 8 CTAs simulated" in done.out
    assert "1 schedule (seed 5): 30,000 warp instructions in 2.00 s, 15,000 a second" in done.out
    assert "note: lane 0 says hello" in done.out and "  PTX: k.ptx" in done.out
    assert max(len(line) for line in done.out.splitlines()) < 200
    (job,) = jobs
    assert (job.schedules, job.seed, job.ctas, job.jobs, job.time_limit_s) == (1, 0, "all", None, None)
    assert not job.strict


def test_what_is_asked_arrives(simulated):
    options = ("--schedules", "5", "--seed", "9", "--ctas", "0-3,7", "--jobs", "2", "--time-limit", "5m", "--strict")
    _, (job,) = simulated(report(), *options)
    assert (job.schedules, job.seed, job.ctas, job.jobs, job.time_limit_s) == (5, 9, "0-3,7", 2, 300.0)
    assert job.strict
    _, jobs = simulated(report(), "--tunables", "threads=64", "vector=2")
    assert [dict(job.variant.tunables) for job in jobs] == [{"threads": 64, "vector": 2}]
    _, jobs = simulated(report(), "--implementation", "one_row_a_cta")
    assert len(jobs) > 3


def test_long_vectors_are_abridged():
    registers = ", ".join(f"%r{n}" for n in range(32))
    assert abridged(f"tcgen05.ld.x32.b32 {{{registers}}}, [%r9]") == "tcgen05.ld.x32.b32 {%r0, ..., %r31}, [%r9]"
    assert abridged("ld.v4.b32 {%r1,%r2, %r3, %r4}, [%rd1]") == "ld.v4.b32 {%r1,%r2, %r3, %r4}, [%rd1]"


def test_faults(simulated):
    done, _ = simulated(report(RACE, launched=Launched("k", (4, 2, 1), (128, 1, 1), (1, 1, 1), 0, 3)))
    assert done.status == 1
    lines = done.out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("========= data race: warp 1 reads"))
    assert lines[start + 1] == "=========   second line"
    assert lines[start + 2] == "=========   in cta (1, 0, 0), warp 1, lanes 0-3"
    assert lines[start + 3].startswith("=========   at PTX line 41: ld.shared.b32 %r1, [kernel_yyy")
    assert lines[start + 4] == "=========   from fmha.py:120"
    assert lines[start + 5] == "=========   seen 12 times at this instruction"
    assert "3 of 8 CTAs simulated" in done.out
    assert "1 fault; what these CTAs wrote agrees with the oracle" in done.out


@pytest.mark.parametrize(
    ("simulation", "status", "said"),
    [
        (report(ran=ScheduleResult(5, "done", 1, 1.0, "y: NaN at [0, 1]")), 1, "wrong_result: y: NaN at [0, 1]"),
        (report(ran=ScheduleResult(5, "done", 1, 1.0, "", "y: 4 bytes differ")), 1, "not_deterministic: y: 4 bytes"),
        (report(ran=ScheduleResult(5, "time limit", 1, 1.0)), 1, "run_timeout: the simulation's time limit passed"),
        (
            report(
                ran=ScheduleResult(5, "not modelled", 1, 1.0),
                refusal=Refusal("tex.1d", "not modelled", 12, "tex.1d {%r1}, [%rd1]", ("k.py", 7)),
            ),
            3,
            "  not modelled: tex.1d at PTX line 12, k.py:7 (tex.1d {%r1}, [%rd1])",
        ),
        (Simulation(None, status=Status.LAUNCH_ERROR, failure="no grid"), 1, "launch_error: no grid"),
        (Outcome(Stage.COMPILE, Status.COMPILE_ERROR, "no such layout"), 1, "compile_error: no such layout"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else None,
)  # fmt: skip
def test_what_went_wrong_and_its_exit_status(simulated, simulation, status, said):
    done, _ = simulated(simulation)
    assert done.status == status
    assert said in done.out


def test_json(simulated):
    done, _ = simulated(report(RACE), "--json")
    (found,) = json.loads(done.out)
    assert found["status"] == "device_fault" and found["reason"].startswith("data race: warp 1 reads shared 0x480")
    assert found["problem"] == {"rows": 3, "columns": 1024}
    assert found["report"]["faults"][0]["place"]["line"] == 41
    assert found["report"]["ok"] is False and found["figures"]["cosine"] == 0.9999991


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((f"{SPECS / 'host_scale.py'}:host_scale", "--arch", "host", "-p", "rows=8"), "nothing is simulated"),
        ((SOFTMAX, *ASKED, "--schedules", "0"), "--schedules"),
        ((SOFTMAX, *ASKED, "--variant", "zzz"), "no variant id begins with 'zzz'"),
        ((SOFTMAX, *ASKED, "--tunables", "threads=64"), "vector"),
    ],
)
def test_mistakes(tunekit, arguments, said):
    done = tunekit("simulate", *arguments)
    assert done.status == 2 and said in done.err and done.out == ""


@pytest.mark.slow
def test_a_real_kernel(tunekit):
    """Compiled, launched, simulated under two schedules, compared; the second time from the store."""
    for asked in (("--schedules", "2"), ("--ctas", "2")):
        done = tunekit("simulate", SOFTMAX, *ASKED, *asked)
        assert done.status == 0, done.out + done.err
        assert "clean: " in done.out
    assert "1 of 3 CTAs simulated" in done.out
    done = tunekit("simulate", SOFTMAX, *ASKED, "--ctas", "0-3")
    assert done.status == 2 and "the grid has 3, numbered from 0" in done.err
