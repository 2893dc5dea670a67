"""What spares tests of other things the start of processes and the compiling of C (see nursery and c_cache)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import c_cache
import pytest
from nursery import Nursery, install

HERE = Path(__file__).resolve().parent
# What starts processes, or compiles, is what these test; and a GPU's context must not meet a fork.
ITSELF = {"jobs", "check", "backends", "gpu", "peers", "architecture"}
ITSELF_FILES = {"test_compile_commands.py", "test_cuda_methods.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unspared", action="store_true", help="start processes and compile C as users do, in all tests")


@pytest.fixture(scope="session")
def compiled_c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled C is kept for the run."""
    return tmp_path_factory.mktemp("c")


@pytest.fixture(scope="session")
def nurseries(compiled_c: Path) -> Iterator[Callable[[str], Nursery]]:
    """The warm process of each kind, started when it is first asked for."""
    found: dict[str, Nursery] = {}

    def nursery(kind: str) -> Nursery:
        if kind not in found:
            found[kind] = Nursery(kind, compiled_c)
        return found[kind]

    yield nursery
    for each in found.values():
        each.close()


@pytest.fixture(scope="module", autouse=True)
def spared(request: pytest.FixtureRequest, compiled_c: Path, nurseries: Callable[[str], Nursery]) -> Iterator[None]:
    """Spares the modules that do not test just this."""
    itself = request.path.relative_to(HERE).parts[0] in ITSELF or request.path.name in ITSELF_FILES
    if itself or request.config.getoption("unspared"):
        yield
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, nurseries)
        c_cache.Cache(compiled_c).install(monkeypatch)
        yield


@pytest.fixture
def new_interpreter(spared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has measuring and simulating processes started as a user's are, also where they are spared."""
    monkeypatch.setattr("tunekit.child.subprocess", subprocess)
