"""Compiling through the store: what is held while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep.conftest import reference
from tunekit.arch import ARCHES
from tunekit.compiling import Compiler, Unit, units
from tunekit.environment import environment
from tunekit.jobs import Pool
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.store.artifacts import ArtifactStore

MANY = reference("host_many", "host_many")


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
