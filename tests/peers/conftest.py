"""Running a peer's case in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME_LIMIT_S = 900


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels are kept; TUNEKIT_PEERS_DIRECTORY keeps them for later runs."""
    kept = os.environ.get("TUNEKIT_PEERS_DIRECTORY")
    return Path(kept) if kept else tmp_path_factory.mktemp("peers")


@pytest.fixture
def agrees(compiled: Path) -> Callable[..., None]:
    """Asserts that a case's kernel runs to its oracle's answer, without a fault but those of a `known` kind.

    Options are drive.py's.
    """

    def check(peer: str, case: str, known: str = "", **options: Any) -> None:
        command = [sys.executable, str(HERE / "drive.py"), peer, case, "--directory", str(compiled)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = json.loads(done.stdout.splitlines()[-1])
        for kernel in said["kernels"]:
            report = kernel["report"]
            faults = [fault for fault in report["faults"] if fault["kind"] != known]
            assert faults == [], faults[0]
            assert report["ok"] or known, report
        assert {name: wrong(output) for name, output in said["outputs"].items() if wrong(output)} == {}

    return check


def wrong(output: Mapping[str, float]) -> str:
    """What is wrong with an output, or ""."""
    if output["missing"]:
        return f"{output['missing']:.0f} of {output['of']:.0f} elements were not written"
    if output["relative_norm"] > output["limit"]:
        return f"relative norm of the error {output['relative_norm']:.2e} > {output['limit']:.0e}"
    return ""
