"""Compiles host variants for the tests, each once a run; benchmarks/ has the simulated GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.backends import entry, symbol_of
from tunekit.backends.contract import CompileRequest
from tunekit.measure import MeasuringWorker, RunJob
from tunekit.space import expand
from tunekit.spec import load_spec

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

SPECS = Path(__file__).resolve().parent.parent / "specs"


class Compiler:
    """Turns (spec file, spec name, problem, tunables) into a RunJob on the host."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def job(self, file: str, name: str, problem: dict, **tunables) -> RunJob:
        reference = f"{SPECS / file}.py:{name}"
        spec = load_spec(reference)
        complete = spec.problem(problem)
        variants = expand(spec, parse_arch("host"), complete).variants
        wanted = {**variants[0].tunables, **tunables}
        (variant,) = [v for v in variants if dict(v.tunables) == wanted]
        static = spec.static(complete)
        symbol = symbol_of(identity.digest([name, variant.id, dict(static)]))
        out = self._root / symbol
        so = out / "kernel.so"
        if not so.exists():
            request = CompileRequest(
                reference, variant.implementation, "host", static, variant.tunables, symbol, str(out)
            )
            report = entry.run(request.to_payload())
            assert report["status"] == "ok", report["reason"]
        return RunJob(reference, complete, variant, str(so), symbol)


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    return Compiler(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="session")
def shared_worker():
    """One worker for the tests that need no fresh process: starting one imports torch."""
    with MeasuringWorker("host", run_limit_s=2.0) as worker:
        yield worker
