"""What the attention spec declares of a kernel is what its trace allocates and what its machine code uses.

``make test-slow`` traces a sample that meets every value of every static axis and tunable. ``make test-fit`` traces
every variant for problems that meet every static value: one of each declared footprint whole, the others until they
have allocated what is declared (allocations.py says why that is enough); and it compiles a larger sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.kernels import allocations
from tests.kernels.covering import Choice, Kernel, Space, choose
from tunekit.arch import ARCHES
from tunekit.cli.problems import read_workload
from tunekit.compiling import Unit, units
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Footprint, Values, Variant
from tunekit.probe import Probe
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.spec.load import shipped_directory
from tunekit.trials import Status

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
BATCH = 64  # kernels that one process traces until they have allocated
SHOWN = 8  # disagreements, after which no more are looked for


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(limits=LIMITS) as pool:
        yield pool


@functools.cache
def choice(arch: str, implementation: str, count: int, over_tunables: bool = True) -> Choice:
    built = SPEC.implementation(implementation)
    return choose(Space(SPEC, built, ARCHES[arch], PROBLEMS, over_tunables=over_tunables), count)


def compiles(kernels: Iterable[Kernel]) -> list[Unit]:
    """The different compiles of the kernels."""
    by_problem: dict[Values, list[Variant]] = {}
    for problem, variant in kernels:
        by_problem.setdefault(problem, []).append(variant)
    wanted = {u.key: u for problem, variants in by_problem.items() for u in units(SPEC, "fmha", problem, variants)}
    return list(wanted.values())


def whole_space(arch: str, implementation: str) -> list[Unit]:
    """The compiles of all variants, for the examples and for problems that meet every static value. Those that are
    declared not to fit are among them: a term too large would leave out variants that do."""
    problems = [problem for problem, _ in choice(arch, implementation, 0, False).kernels]
    every: dict[Values, Values] = {SPEC.static(p): p for p in (*(SPEC.problem(e) for e in SPEC.examples), *problems)}
    return compiles(
        (problem, variant)
        for problem in every.values()
        for variant in expand(SPEC, ARCHES[arch], problem, implementation).variants
    )


def one_of_each_footprint(wanted: Sequence[Unit]) -> list[Unit]:
    """A random one of those that declare the same."""
    alike: dict[Footprint, list[Unit]] = {}
    for unit in wanted:
        alike.setdefault(unit.declared, []).append(unit)
    chosen = random.Random(0)
    return [chosen.choice(group) for group in alike.values()]


def expected(unit: Unit) -> Status:
    """How a compile ends, or its trace."""
    return Status.OK if unit.declared.misfit(ARCHES[unit.variant.arch]) is None else Status.OVER_BUDGET


def disagreements(pool: Pool, wanted: Sequence[Unit], root: Path, *, trace_only: bool) -> dict[str, str]:
    """What is wrong with the compiles, by their names: of the first ``SHOWN`` that are."""
    by_key = {unit.key: unit for unit in wanted}
    tasks = (compile_task(u.request(root / u.key[:16], trace_only=trace_only), id=u.key) for u in wanted)
    wrong: dict[str, str] = {}
    with contextlib.closing(pool.run(tasks)) as results:
        for result in results:
            unit = by_key[result.id]
            name = f"{unit.variant} [{unit.static}]"
            unknown = [field for field in FIELDS if getattr(unit.declared, field) is None]
            if unknown:
                wrong[name] = f"declares no {', '.join(unknown)}"
            elif result.value and (parted := Probe.of_report(result.value, unit.declared).disagreements()):
                wrong[name] = "; ".join(parted)
            elif result.status is not expected(unit):
                wrong[name] = f"{result.status}: {result.reason}"
            if len(wrong) >= SHOWN:
                break
    return wrong


def not_seen_to_hold(pool: Pool, wanted: Sequence[Unit], root: Path) -> list[Unit]:
    """Those that a trace until their allocations doesn't show to allocate what they declare: they, and what was to be
    traced after them in the same process, have yet to be traced whole."""
    batches = {str(at): wanted[at : at + BATCH] for at in range(0, len(wanted), BATCH)}
    tasks = (allocations.task(id, batch, str(root / "allocations")) for id, batch in batches.items())
    left: list[Unit] = []
    for result in pool.run(tasks):
        held = (result.value or {}).get("held", 0) if result.ok else 0
        left += batches[result.id][held:]
    return left


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
    wanted = compiles(choice(arch, implementation, SAMPLE).kernels)
    assert wanted and not disagreements(pool, wanted, tmp_path, trace_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "implementation"), BUILT)
def test_a_trace_until_the_allocations_finds_what_is_declared_wrongly(
    pool: Pool, arch: str, implementation: str, tmp_path: Path
) -> None:
    right = compiles(choice(arch, implementation, SAMPLE).kernels)[:2]
    assert not_seen_to_hold(pool, right, tmp_path) == []
    for field in FIELDS:
        changed = {field: getattr(right[1].declared, field) + 1}
        wrong = dataclasses.replace(right[1], declared=dataclasses.replace(right[1].declared, **changed))
        assert not_seen_to_hold(pool, [right[0], wrong], tmp_path) == [wrong]


@pytest.mark.slow
@pytest.mark.fit
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(("arch", "implementation"), BUILT)
def test_every_variant_traces_as_declared(pool: Pool, arch: str, implementation: str, tmp_path: Path) -> None:
    """For the examples and for problems that meet every static value: thousands."""
    begun = time.monotonic()
    wanted = whole_space(arch, implementation)
    sample = one_of_each_footprint(wanted)
    wrong = disagreements(pool, sample, tmp_path, trace_only=True)
    assert not wrong
    sampled = time.monotonic()
    whole = {unit.key for unit in sample}
    left = not_seen_to_hold(pool, [unit for unit in wanted if unit.key not in whole], tmp_path)
    wrong = disagreements(pool, left, tmp_path, trace_only=True)
    over = sum(expected(unit) is Status.OVER_BUDGET for unit in wanted)
    print(
        f"{arch} {implementation}: {len(wanted)} kernels, {over} of them over budget; one of each of {len(sample)} "
        f"footprints traced whole in {sampled - begun:.0f} s, the others until their allocations in "
        f"{time.monotonic() - sampled:.0f} s, {len(left)} of them whole after all"
    )
    assert not wrong


@pytest.mark.slow
@pytest.mark.fit
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize(("arch", "implementation"), BUILT)
def test_a_larger_sample_compiles_as_declared(pool: Pool, arch: str, implementation: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    chosen = choice(arch, implementation, COMPILED)
    wanted = compiles(chosen.kernels)
    wrong = disagreements(pool, wanted, tmp_path, trace_only=False)
    pairs = f"{chosen.pairs} of {chosen.all_pairs} pairs of values met"
    print(f"{arch} {implementation}: {len(wanted)} kernels compiled in {time.monotonic() - begun:.0f} s, {pairs}")
    assert not wrong
