"""Compiling through the store: what is held while it goes on, and what is said of what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.conftest import Cache, reference
from tunekit import space
from tunekit.arch import ARCHES
from tunekit.compiling import Compiler, Unit, compile_limits, compile_outcome, units
from tunekit.environment import environment
from tunekit.jobs import Pool, TaskResult
from tunekit.model import Footprint, Values
from tunekit.probe import DISAGREEMENT
from tunekit.settings import Settings
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.trials import Stage, Status

MANY = reference("host_many", "host_many")
SCALE = reference("cute_small", "cute_scale")


@pytest.fixture
def wanted() -> list[Unit]:
    spec = load_spec(MANY)
    problem = spec.problem({"n": 64})
    return units(spec, MANY, problem, expand(spec, ARCHES["host"], problem).variants)[:9]


def test_few_locks_and_scratch_directories_are_held_at_once(tmp_path: Path, wanted: list[Unit]) -> None:
    """A lock is an open file: a sweep of a thousand variants would need more than a process may have."""
    artifacts = ArtifactStore(tmp_path)
    most_open = most_scratch = 0
    with Pool(workers=1, warm=()) as pool:
        for _, outcome in Compiler(pool, artifacts, None, environment(0)).compile(wanted):
            assert outcome.ok
            names = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
            most_open = max(most_open, sum(name.endswith(".lock") for name in names))
            most_scratch = max(most_scratch, len(list(tmp_path.glob("scratch/*/*"))))
    assert most_open <= 2 and most_scratch <= 2
    assert len(artifacts.keys()) == len(wanted)
    assert not list(tmp_path.glob("scratch/*"))


def test_a_compile_that_is_cut_short_lets_go_of_its_locks(tmp_path: Path, wanted: list[Unit]) -> None:
    artifacts = ArtifactStore(tmp_path)
    with Pool(workers=1, warm=()) as pool:
        going = Compiler(pool, artifacts, None, environment(0)).compile(wanted)
        next(going)
        going.close()
    for unit in wanted:
        with artifacts.lock(unit.key, timeout_s=0) as held:
            assert held


def test_what_another_process_compiles_is_waited_for_and_not_compiled_twice(tmp_path: Path, wanted: list[Unit]) -> None:
    """Case 34, from inside: the locked unit comes last, from the store."""
    artifacts = ArtifactStore(tmp_path)
    first, *rest = wanted[:3]
    with Pool(workers=1, warm=()) as pool:
        compiler = Compiler(pool, artifacts, None, environment(0))
        with artifacts.lock(first.key):
            going = compiler.compile(wanted[:3])
            assert [next(going)[0].key for _ in rest] == [unit.key for unit in rest]
            other = ArtifactStore(tmp_path)
            source = artifacts.get(rest[0].key)
            assert source is not None
            other.put(first.key, first.symbol, {"so": artifacts.path(source)})
        ((unit, outcome),) = going
    assert unit.key == first.key and outcome.facts["cached"] is True


@pytest.mark.parametrize(
    ("traced", "compiled", "stage"),
    [({"smem_bytes": 300_000}, {}, Stage.PROBE), ({"smem_bytes": 4}, {"registers": 256}, Stage.COMPILE)],
    ids=["by its trace", "by its machine code"],
)
def test_over_budget_ends_where_it_was_found(traced: dict[str, int], compiled: dict[str, int], stage: Stage) -> None:
    value = {"traced": traced, "compiled": compiled}
    result = TaskResult("a", Status.OVER_BUDGET, "too much", value=value, seconds=Values(trace=1.0))
    outcome = compile_outcome(result, Footprint(**traced))
    assert (outcome.stage, outcome.status) == (stage, Status.OVER_BUDGET)
    assert outcome.footprint == Footprint(**{**traced, **compiled}) and DISAGREEMENT not in outcome.facts


def test_readings_that_part_are_recorded() -> None:
    value = {
        "traced": {"smem_bytes": 4, "threads": 32},
        "compiled": {"smem_bytes": 8, "threads": 32},
        "facts": {"a": 1},
    }
    outcome = compile_outcome(TaskResult("a", Status.OK, value=value), Footprint(smem_bytes=4, threads=64))
    assert outcome.facts["a"] == 1 and outcome.footprint == Footprint(smem_bytes=8, threads=32)
    words = "smem: declared 4, traced 4, compiled 8; threads: declared 64, traced 32, compiled 32"
    assert outcome.facts[DISAGREEMENT] == words


def test_a_sweep_says_so_where_a_spec_declares_what_its_kernel_does_not_do(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three readings must agree: a real kernel, its arithmetic 16 bytes off; also when it comes from the store."""
    right = space.declared_footprint

    def wrong(*point: Any) -> Footprint:
        declared = right(*point)
        return dataclasses.replace(declared, smem_bytes=(declared.smem_bytes or 0) + 16)

    monkeypatch.setattr("tunekit.compiling.declared_footprint", wrong)
    spec = load_spec(SCALE)
    problem = spec.problem({})
    variant = expand(spec, ARCHES["sm_90a"], problem).variants[0]
    for _ in range(2):
        report = cache.run(SCALE, dict(problem), arch="sm_90a", variants=(variant.id,), verify="none")
        (note,) = (note for note in report.notes if "disagree" in note)
        assert "smem: declared" in note and str(variant) in note
        assert note in [event.text for event in cache.events if event.kind == "note"]


@pytest.mark.parametrize("server_died", [True, False])
def test_a_dead_compile_server_is_no_variants_fault(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, wanted: list[Unit], server_died: bool
) -> None:
    """Only a compile that crashed by itself is skipped from then on."""
    ended = TaskResult(wanted[0].key, Status.COMPILE_CRASHED, "gone", signal=9, server_died=server_died)
    with Pool(workers=1, warm=()) as pool, cache.store() as store:
        monkeypatch.setattr(pool, "run", lambda tasks, *_: [ended for _ in tasks])
        compiler = Compiler(pool, ArtifactStore(cache.settings.artifacts), store, environment(0))
        ((_, outcome),) = compiler.compile(wanted[:1])
        assert outcome.status is Status.COMPILE_CRASHED
        assert (store.known_bad(wanted[0].key) is None) == server_died


@pytest.mark.parametrize(
    ("given", "of_spec", "wanted"),
    [
        ({}, None, (60.0, 300.0)),
        ({"compile_limit_s": 5.0}, None, (5.0, 5.0)),
        ({"compile_limit_s": 500.0}, 7.0, (60.0, 500.0)),
        ({}, 7.0, (7.0, 7.0)),
        ({"compile_limit_s": 5.0, "trace_limit_s": 9.0}, 7.0, (9.0, 5.0)),
    ],
)
def test_limits_of_trace_and_back_end(
    given: dict[str, float], of_spec: float | None, wanted: tuple[float, float]
) -> None:
    """Case 63: this run's limit, else the spec's, else the default; the trace's own one is never shortened."""
    spec = dataclasses.replace(load_spec(MANY), compile_limit_s=of_spec)
    limits = compile_limits(spec, Settings(Path("db"), Path("artifacts"), **given))
    assert (limits.trace_s, limits.backend_s, limits.memory_bytes) == (*wanted, 4 * 2**30)
