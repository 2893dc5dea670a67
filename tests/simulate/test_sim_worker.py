"""A spec's compiled kernel in the simulating process: right, wrong, faulty, refused, too slow, and gone afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

import psutil
import pytest

from tunekit.arch import ARCHES
from tunekit.compiling import units
from tunekit.errors import SpecError, TunekitError, UserError
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.simulate.client import Simulator
from tunekit.simulate.job import Simulation, SimulationJob
from tunekit.space import default_variant
from tunekit.spec import load_spec
from tunekit.trials import Stage, Status

SPEC = f"{Path(__file__).parents[1] / 'specs' / 'cute_softmax.py'}:cute_softmax"
LOG2_E = "0f3FB8AA3B"
BROKEN = """
import dataclasses, importlib.util
found = importlib.util.spec_from_file_location("softmax_of_the_tests", {path!r})
module = importlib.util.module_from_spec(found)
found.loader.exec_module(module)
def reference(problem, inputs):
    raise ValueError("no oracle today")
broken = dataclasses.replace(module.cute_softmax, name="broken", reference=reference)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> SimulationJob:
    """The row softmax for Hopper, compiled here: three CTAs of four warps."""
    spec = load_spec(SPEC)
    problem = spec.problem({"rows": 3, "columns": 1024})
    variant = default_variant(spec, ARCHES["sm_90a"], problem)
    (unit,) = units(spec, SPEC, problem, [variant])
    with Pool(limits=Limits(trace_s=60.0, backend_s=100.0, memory_bytes=4 * 2**30), workers=1) as pool:
        (result,) = pool.run([compile_task(unit.request(tmp_path_factory.mktemp("softmax")), id="k")])
    assert result.value, result.reason
    files = result.value["files"]
    return SimulationJob(SPEC, problem, variant, files["so"], files["ptx"], unit.symbol, jobs=2)


@pytest.fixture
def changed(job, tmp_path):
    """A job whose PTX has been changed: (old, new) pairs of text."""

    def change(*pairs: tuple[str, str], **fields) -> SimulationJob:
        text = Path(job.ptx).read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "changed.ptx"
        path.write_text(text)
        return dataclasses.replace(job, ptx=str(path), **fields)

    return change


@pytest.fixture(scope="module")
def simulator():
    """One process for most tests: starting one imports torch."""
    with Simulator() as simulator:
        yield simulator


@pytest.fixture
def run(simulator):
    return simulator.simulate


def test_a_right_kernel(new_interpreter, job):
    before, phases = psutil.Process().children(recursive=True), []
    with Simulator() as simulator:
        simulation = simulator.simulate(
            dataclasses.replace(job, schedules=2, seed=3), lambda phase, doing: phases.append((phase, doing))
        )
    assert psutil.Process().children(recursive=True) == before
    outcome = simulation.outcome()
    assert (outcome.stage, outcome.status, outcome.samples_us) == (Stage.SIMULATE, Status.OK, ())
    assert outcome.facts.simulated is True and outcome.facts.cosine > 0.9999
    assert [s.seed for s in simulation.report.schedules] == [3, 4]
    assert outcome.facts.ctas == outcome.facts.ctas_total == 3
    assert ("run", "schedule 2 of 2") in phases
    assert Simulation.from_payload(simulation.to_payload()) == simulation
    assert SimulationJob.from_payload(job.to_payload()) == job


def test_a_part_of_the_grid_is_compared_on_its_part(run, job, changed):
    """The rows that no CTA wrote are not missed; those that were are judged."""
    simulation = run(dataclasses.replace(job, ctas="1"))
    assert simulation.outcome().ok and simulation.outcome().facts.ctas == 1
    wrong = run(changed((LOG2_E, "0f3F800000"), ctas="1")).outcome()
    assert wrong.status is Status.WRONG_RESULT and "y: mismatch at [1, " in wrong.reason


def test_a_wrong_kernel(run, changed):
    outcome = run(changed((LOG2_E, "0f3F800000"))).outcome()
    assert outcome.status is Status.WRONG_RESULT
    assert "y: mismatch at [0, 0]" in outcome.reason and "[schedule seed=0]" in outcome.reason


def test_a_missing_barrier(run, changed):
    """The kernel's own barriers taken out: warps read each other's sums too early."""
    simulation = run(changed(("bar.sync", "// bar.sync"), schedules=3))
    kinds = {fault.kind.value for fault in simulation.report.faults}
    assert "data race" in kinds
    outcome = simulation.outcome()
    assert outcome.status is Status.DEVICE_FAULT and "PTX line" in outcome.reason


def test_an_output_that_is_not_written(run, changed):
    outcome = run(changed(("st.global", "// st.global"))).outcome()
    assert outcome.status is Status.WRONG_RESULT and "unwritten" in outcome.reason


def test_an_unknown_instruction(run, changed):
    outcome = run(changed(("bar.sync", "sync.the.bars"))).outcome()
    assert outcome.status is Status.NOT_MODELLED
    assert outcome.reason.startswith("not modelled: sync.the.bars at PTX line ")


def test_a_time_limit_ends_it(run, job):
    outcome = run(dataclasses.replace(job, time_limit_s=1e-6)).outcome()
    assert outcome.status is Status.RUN_TIMEOUT and "time limit" in outcome.reason


def test_a_process_that_hangs_is_killed(job):
    before = psutil.Process().children(recursive=True)
    with Simulator(prepare_limit_s=0.01) as simulator:
        outcome = simulator.simulate(job).outcome()
    assert outcome.status is Status.RUN_TIMEOUT and "killed" in outcome.reason
    assert psutil.Process().children(recursive=True) == before


def test_mistakes_are_raised(run, job, tmp_path):
    with pytest.raises(UserError, match="the grid has 3, numbered from 0"):
        run(dataclasses.replace(job, ctas="7"))
    with pytest.raises(TunekitError, match=r"nowhere\.so"):
        run(dataclasses.replace(job, so=str(tmp_path / "nowhere.so")))
    (tmp_path / "no.ptx").write_text("hello")
    with pytest.raises(UserError, match=r"no\.ptx:1: expected a declaration, found 'hello'"):
        run(dataclasses.replace(job, ptx=str(tmp_path / "no.ptx")))


def test_a_reference_that_fails_is_the_specs_fault(run, job, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(path=SPEC.rpartition(":")[0]))
    with pytest.raises(SpecError, match="no oracle today"):
        run(dataclasses.replace(job, spec=f"{path}:broken"))


def test_a_process_that_simulates_ctas_is_killed(new_interpreter, job, monkeypatch):
    """As by the kernel when memory runs out: an outcome of this variant, and nothing stays behind."""
    before, killed = psutil.Process().children(recursive=True), []

    def kill_one_of_many(phase: str, doing: str) -> None:
        def wait_and_kill() -> None:
            for _ in range(2000):
                for process in set(psutil.Process().children(recursive=True)) - set(before):
                    with contextlib.suppress(psutil.Error):
                        if "simulate.worker" in " ".join(process.parent().cmdline()) and not process.children():
                            process.kill()
                            killed.append(process.pid)
                            return
                time.sleep(0.005)

        if phase == "run" and not killed:
            threading.Thread(target=wait_and_kill, daemon=True).start()

    with Simulator() as simulator:
        outcome = simulator.simulate(dataclasses.replace(job, schedules=50), kill_one_of_many).outcome()
    assert killed and outcome.status is Status.DEVICE_FAULT
    assert "a process that simulates CTAs died (signal 9, SIGKILL)" in outcome.reason
    assert psutil.Process().children(recursive=True) == before
