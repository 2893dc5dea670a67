"""What the attention spec declares of a kernel is what its trace allocates and what its machine code uses.

``make test-slow`` traces a sample that meets every value of every static axis and tunable; ``make test-fit`` traces
every variant for problems that meet every static value, and compiles a larger sample.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.kernels.covering import Choice, Kernel, Space, choose
from tunekit.arch import ARCHES
from tunekit.cli.problems import read_workload
from tunekit.compiling import units
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Values, Variant
from tunekit.probe import Probe
from tunekit.space import expand, misfit
from tunekit.spec import load_spec
from tunekit.spec.load import shipped_directory

SPEC = load_spec("fmha")
WORKLOADS = sorted((shipped_directory() / "workloads").glob("*.jsonl"))
PROBLEMS = [SPEC.problem(example) for example in SPEC.examples] + [p for w in WORKLOADS for p in read_workload(SPEC, w)]
BUILT = [
    (arch, implementation.name)
    for arch in ("sm_90a", "sm_100a")
    for implementation in SPEC.implementations
    if implementation.backend == "cutedsl" and implementation.unsupported(ARCHES[arch]) is None
]
LIMITS = Limits(trace_s=120.0, backend_s=300.0, memory_bytes=4 * 2**30)
FIELDS = ("smem_bytes", "tmem_columns", "threads", "cluster")
# How the names of constraints begin that stand for what an implementation is still to learn.
NOT_YET = "not_yet_"
SAMPLE, COMPILED = 5, 32


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(limits=LIMITS) as pool:
        yield pool


@functools.cache
def choice(arch: str, implementation: str, count: int, over_tunables: bool = True) -> Choice:
    built = SPEC.implementation(implementation)
    return choose(Space(SPEC, built, ARCHES[arch], PROBLEMS, over_tunables=over_tunables), count)


def disagreements(pool: Pool, kernels: Iterable[Kernel], root: Path, *, trace_only: bool) -> tuple[dict[str, str], int]:
    """What is wrong with the kernels, by their names, and how many different ones there were."""
    by_problem: dict[Values, list[Variant]] = {}
    for problem, variant in kernels:
        by_problem.setdefault(problem, []).append(variant)
    wanted = {u.key: u for problem, variants in by_problem.items() for u in units(SPEC, "fmha", problem, variants)}
    tasks = (compile_task(u.request(root / u.key[:16], trace_only=trace_only), id=u.key) for u in wanted.values())
    wrong: dict[str, str] = {}
    for result in pool.run(tasks):
        unit = wanted[result.id]
        name = f"{unit.variant} [{unit.static}]"
        unknown = [field for field in FIELDS if getattr(unit.declared, field) is None]
        if unknown:
            wrong[name] = f"declares no {', '.join(unknown)}"
        elif not result.ok:
            wrong[name] = f"{result.status}: {result.reason}"
        elif parted := Probe.of_report(result.value or {}, unit.declared).disagreements():
            wrong[name] = "; ".join(parted)
    return wrong, len(wanted)


@pytest.mark.parametrize(("arch", "implementation"), BUILT)
def test_every_value_of_a_tunable_has_a_kernel(arch: str, implementation: str) -> None:
    tunables = {tunable.name for tunable in SPEC.implementation(implementation).tunables}
    barred = choice(arch, implementation, SAMPLE).barred
    assert {meeting: rules for meeting, rules in barred.items() if meeting[0] in tunables} == {}


@pytest.mark.parametrize("arch", sorted({arch for arch, _ in BUILT}))
def test_every_problem_s_flags_and_sizes_have_a_kernel(arch: str) -> None:
    """By some implementation of the architecture, but for what a constraint says is yet to come."""
    barred = [choice(arch, implementation, SAMPLE).barred for on, implementation in BUILT if on == arch]
    static = {axis.name for axis in SPEC.axes if axis.static}
    never = {meeting for meeting in barred[0] if meeting[0] in static and all(meeting in other for other in barred)}
    assert [m for m in never if not any(rule.startswith(NOT_YET) for other in barred for rule in other[m])] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("arch", "implementation"), BUILT)
def test_a_sample_that_meets_every_value_traces_as_declared(
    pool: Pool, arch: str, implementation: str, tmp_path: Path
) -> None:
    kernels = choice(arch, implementation, SAMPLE).kernels
    wrong, count = disagreements(pool, kernels, tmp_path, trace_only=True)
    assert count > 0 and not wrong


@pytest.mark.slow
@pytest.mark.fit
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(("arch", "implementation"), BUILT)
def test_every_variant_traces_as_declared(pool: Pool, arch: str, implementation: str, tmp_path: Path) -> None:
    """All that fit, for the examples and for problems that meet every static value: thousands of traces."""
    built = SPEC.implementation(implementation)
    problems = [problem for problem, _ in choice(arch, implementation, 0, False).kernels]
    every: dict[Values, Values] = {SPEC.static(p): p for p in (*(SPEC.problem(e) for e in SPEC.examples), *problems)}
    for problem in every.values():
        begun = time.monotonic()
        kernels = [
            (problem, variant)
            for variant in expand(SPEC, ARCHES[arch], problem, implementation).variants
            if misfit(built, ARCHES[arch], problem, variant.tunables) is None
        ]
        wrong, count = disagreements(pool, kernels, tmp_path, trace_only=True)
        seconds = time.monotonic() - begun
        print(f"{arch} {implementation} {SPEC.static(problem)}: {count} kernels traced in {seconds:.0f} s")
        assert not wrong


@pytest.mark.slow
@pytest.mark.fit
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(("arch", "implementation"), BUILT)
def test_a_larger_sample_compiles_as_declared(pool: Pool, arch: str, implementation: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    chosen = choice(arch, implementation, COMPILED)
    wrong, count = disagreements(pool, chosen.kernels, tmp_path, trace_only=False)
    pairs = f"{chosen.pairs} of {chosen.all_pairs} pairs of values met"
    print(f"{arch} {implementation}: {count} kernels compiled in {time.monotonic() - begun:.0f} s, {pairs}")
    assert not wrong
