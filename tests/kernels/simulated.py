"""Attention variants compiled and executed by the simulator, judged as `tunekit simulate` judges them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tunekit import identity
from tunekit.arch import ARCHES
from tunekit.compiling import units
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Values, Variant
from tunekit.simulate.client import Simulator
from tunekit.simulate.job import SimulationJob
from tunekit.space import broken, expand, misfit
from tunekit.spec import load_spec
from tunekit.trials import Outcome

SPEC = load_spec("fmha")
LIMITS = Limits(trace_s=60.0, backend_s=120.0, memory_bytes=8 * 2**30)

Run = Callable[..., Outcome]


def quick_but(names: Iterable[str], slow: set[str]) -> list[Any]:
    """Parameters of which these are for the slow run: each compiles and simulates a kernel for ten seconds."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def variant_of(arch: str, implementation: str, problem: Values, tunables: Mapping[str, Any]) -> Variant:
    """The one variant of the space with these tunables; those left out have their first fitting value."""
    kernel = SPEC.implementation(implementation)
    if len(tunables) == len(kernel.tunables):  # no need to list the space
        rule = broken(kernel, problem, Values(tunables))
        assert rule is None, f"{rule.name}: {rule.why}"
        return identity.variant(SPEC.name, SPEC.version, implementation, arch, Values(tunables))
    wanted = [
        v
        for v in expand(SPEC, ARCHES[arch], problem).variants
        if v.implementation == implementation
        and all(v.tunables[name] == value for name, value in tunables.items())
        and misfit(SPEC.implementation(implementation), ARCHES[arch], problem, v.tunables) is None
    ]
    assert wanted, f"no variant of {implementation} has {dict(tunables)} for {problem}"
    return wanted[0]


@contextlib.contextmanager
def simulating(arch: str, implementation: str, root: Path) -> Iterator[Run]:
    """run(problem, tunables, schedules=1, ...): compiles a variant below `root` once, simulates it in a child; with
    `spec`, on the inputs of that one, which is fmha with others."""
    compiled: dict[str, Mapping[str, Any]] = {}
    # A process that has loaded the CuTeDSL runtime, as another test here may have, can't stand in for the driver.
    with Pool(workers=1, warm=("cutedsl",), limits=LIMITS) as pool, Simulator() as simulator:

        def run(
            problem: Mapping[str, Any],
            tunables: Mapping[str, Any],
            schedules: int = 1,
            seed: int = 0,
            ctas: str = "all",
            strict: bool = False,
            spec: str = "fmha",
        ) -> Outcome:
            complete = SPEC.problem(problem)
            unit = units(SPEC, "fmha", complete, [variant_of(arch, implementation, complete, tunables)])[0]
            if unit.key not in compiled:
                task = compile_task(unit.request(root / unit.key[:16], trace_only=False), id=unit.key)
                (result,) = pool.run([task])
                assert result.ok and result.value is not None, f"{unit.variant}: {result.status}: {result.reason}"
                compiled[unit.key] = result.value
            value = compiled[unit.key]
            files = value["files"]
            job = SimulationJob(
                *(spec, complete, unit.variant, files["so"], files["ptx"], unit.symbol, schedules, seed, ctas),
                jobs=1,
                strict=strict,
            )
            outcome = simulator.simulate(job).outcome()
            facts = {**value["compiled"], **value["seconds"], **value["facts"]}
            return dataclasses.replace(outcome, facts=outcome.facts.merged({k: v for k, v in facts.items() if v}))

        yield run
