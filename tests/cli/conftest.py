"""Running the command line: in this process, or as a user would in a new one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import tunekit
from tunekit.cli import main

PACKAGE = str(Path(tunekit.__file__).resolve().parents[1])  # the checkout, or the wheel under test
SPECS = Path(__file__).resolve().parents[2] / "tests" / "specs" / "host_scale.py"


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


@pytest.fixture
def scale() -> str:
    """A reference to a small host spec with one constraint."""
    return f"{SPECS}:host_scale"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing of the user's own cache is read or written."""
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    for name in ("TUNEKIT_DB", "TUNEKIT_JOBS", "CI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(name="tunekit")
def run_tunekit(capsys):
    """Run the command line in this process: ``tunekit("list", "--json")``."""

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run


@pytest.fixture
def shell(tmp_path):
    """Run a command line of a new process, its output captured: ``shell("-m", "tunekit", "list")``."""

    def run(*arguments: str, **environ: str) -> Done:
        env = {**os.environ, "PYTHONPATH": PACKAGE, **environ}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
