"""A variant's workspace in simulated memory: poisoned, checked like an output, and no result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tunekit.arch import ARCHES
from tunekit.compiling import units
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.simulate.client import Simulator
from tunekit.simulate.job import SimulationJob
from tunekit.simulate.launch.arguments import arguments_of
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.trials import Status

SPECS = Path(__file__).parents[1] / "specs"
SPLIT_SUM = f"{SPECS / 'cute_split_sum.py'}:cute_split_sum"
PROBLEM = {"rows": 3}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[bool, SimulationJob]:
    """The two kernels of the split sum, compiled here, by whether they forget to write a part of the workspace."""
    spec = load_spec(SPLIT_SUM)
    problem = spec.problem(PROBLEM)
    variants = [v for v in expand(spec, ARCHES["sm_90a"], problem).variants if v.tunables.splits > 1]
    made = units(spec, SPLIT_SUM, problem, variants)
    tasks = [compile_task(unit.request(tmp_path_factory.mktemp("split_sum")), id=unit.key) for unit in made]
    found = {}
    with Pool(limits=Limits(trace_s=60.0, backend_s=100.0, memory_bytes=4 * 2**30), workers=1) as pool:
        results = {result.id: result for result in pool.run(tasks)}
    for unit, variant in zip(made, variants, strict=True):
        files = results[unit.key].value["files"]
        job = SimulationJob(SPLIT_SUM, problem, variant, files["so"], files["ptx"], unit.symbol, jobs=2, schedules=2)
        found[variant.tunables.forgets] = job
    return found


def test_one_kernel_hands_its_results_to_the_next_through_the_workspace(jobs):
    with Simulator() as simulator:
        outcome = simulator.simulate(jobs[False]).outcome()
        assert outcome.status is Status.OK, outcome.reason
        forgot = simulator.simulate(jobs[True])
    assert forgot.outcome().status is Status.DEVICE_FAULT
    (fault,) = forgot.report.faults
    assert "workspace+0xc, which nothing has written" in fault.message


def test_a_workspace_is_poisoned_and_no_output():
    spec = load_spec(f"{SPECS / 'host_pages.py'}:host_pages")
    problem = spec.problem({"cols": 8, "batch": 2, "page": 8, "table_pages": 3})
    plain, split = expand(spec, ARCHES["host"], problem).variants
    assert [b.name for b in arguments_of(spec, problem, 0, plain).call if hasattr(b, "name")] == ["x", "table", "y"]
    arguments = arguments_of(spec, problem, 0, split)
    scratch = arguments.call[-1]
    assert (scratch.name, scratch.shape, scratch.dtype) == ("workspace", (2 * 2 * 8,), "float32")
    assert set(arguments.outputs()) == {"y"} and set(arguments.inputs()) == {"x", "table"}
    assert torch.isnan(arguments.scratch()["workspace"]).all()
    assert not arguments.buffers.initialised_of(scratch).any()
