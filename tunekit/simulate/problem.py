"""One compiled variant on one problem: inputs, the launch, its simulation, the oracle. Runs in a process of its own.

Part of a grid is compared on what it wrote: its own elements, which nothing else would have touched.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tunekit.arch import parse_arch
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.simulate.grid import ProcessDied
from tunekit.simulate.job import Simulation, SimulationJob
from tunekit.simulate.launch.arguments import Buffer, CallArguments, arguments_of
from tunekit.simulate.launch.capture import LaunchError, capture
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.run import clusters_of, simulate
from tunekit.spec import load_spec
from tunekit.spec.inputs import draw
from tunekit.trials import Status

if TYPE_CHECKING:
    import torch

    from tunekit.oracle.reference import Expected

# Called with a phase ("prepare", "run", "check") and what is being done, in words.
Phase = Callable[[str, str], None]


def simulate_job(job: SimulationJob, phase: Phase) -> Simulation:
    """Simulates and judges.

    Raises:
        UserError: the spec, its reference or the choice of CTAs is at fault.
        TunekitError: the artifact can't be loaded.
    """
    from tunekit.oracle.judge import Figures, judge

    begin = time.monotonic()
    spec, arch = load_spec(job.spec), parse_arch(job.variant.arch)
    job = dataclasses.replace(job, problem=spec.problem(job.problem))  # so that its text is short again
    phase("prepare", f"inputs and oracle of {job.problem}")
    module = read_module(Path(job.ptx).read_text(), Path(job.ptx).name)
    arguments = arguments_of(spec, job.problem, job.seed, job.variant)
    wanted = oracle(job.spec, job.problem, job.seed)
    try:
        launches = capture(Path(job.so), job.symbol, arguments.call, arch, module)
    except LaunchError as error:
        return Simulation(None, status=Status.LAUNCH_ERROR, failure=str(error))
    prepared = time.monotonic()
    figures = Figures()
    partial = clusters_of(launches[0], None) != clusters_of(launches[0], job.ctas) if len(launches) == 1 else False

    def look(seed: int) -> str:
        phase("check", f"results of schedule seed={seed}")
        outputs = arguments.outputs()
        written = {name: written_elements(arguments, name) for name in outputs} if partial else None
        return judge(spec, job.problem, outputs, wanted, unwritten, figures, written) or ""

    try:
        report = simulate(
            launches,
            module,
            arguments.buffers,
            schedules=job.schedules,
            seed=job.seed,
            ctas=job.ctas,
            jobs=job.jobs,
            time_limit_s=job.time_limit_s,
            strict=job.strict,
            judge=look,
            on_schedule=lambda place, count: phase("run", f"schedule {place} of {count}"),
        )
    except ProcessDied as died:
        seconds = Values(prepare=prepared - begin, run=time.monotonic() - prepared)
        return Simulation(None, status=Status.DEVICE_FAULT, failure=str(died), seconds=seconds)
    seconds = Values(prepare=prepared - begin, run=time.monotonic() - prepared)
    return Simulation(report, figures.values(len(report.schedules)), seconds=seconds)


@functools.lru_cache(maxsize=1)
def oracle(reference: str, problem: Values, seed: int) -> Expected:
    """What the outputs must be for a problem's inputs, kept from one variant to the next: it can take a minute."""
    import torch

    from tunekit.oracle.reference import expected

    spec = load_spec(reference)
    return expected(spec, problem, draw(spec, problem, seed, torch.device("cpu")))


def unwritten(dtype: torch.dtype) -> int:
    """The bit pattern, as a signed integer, of a poisoned output's elements: all ones."""
    from tunekit.oracle.patterns import poisons

    if dtype not in poisons():
        raise UserError(f"outputs of {dtype} are not compared")
    return -1 if poisons()[dtype][0].is_signed else 0xFF


def written_elements(arguments: CallArguments, name: str) -> torch.Tensor:
    """Which elements of an output have a byte that the kernel wrote."""
    import torch

    buffer: Buffer = arguments.buffers[name]
    view = arguments.outputs()[name]
    flags = arguments.buffers.written_of(buffer).reshape(-1, view.element_size()).any(axis=1)
    return torch.from_numpy(np.ascontiguousarray(flags)).as_strided(buffer.shape, buffer.strides)
