"""A database and an artifact store that a test fills with host kernels, without the rest of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tunekit import space
from tunekit.backends import symbol_of
from tunekit.backends.contract import CompileRequest
from tunekit.backends.entry import run
from tunekit.environment import environment
from tunekit.identity import variant as make_variant
from tunekit.measure.protocol import protocol
from tunekit.model import Artifact, Environment, Values, Variant, Winner
from tunekit.spec import KernelSpec, load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store

SPECS = Path(__file__).parent.parent / "specs"
HOST_SCALE = f"{SPECS / 'host_scale.py'}:host_scale"
PROTOCOL = protocol("final", "perf_counter", cache="warm", own_inputs=False, clocks="host")
PROTOCOL_OWN_INPUTS = protocol("final", "perf_counter", cache="warm", own_inputs=True, clocks="host")


@dataclass
class Tuned:
    """One cache directory: `database`, `artifacts` and what a sweep would have put there."""

    root: Path
    reference: str = HOST_SCALE
    specs: Path = SPECS

    @property
    def database(self) -> Path:
        return self.root / "tunekit.db"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def spec(self) -> KernelSpec:
        return load_spec(self.reference)

    @property
    def places(self) -> dict[str, Path]:
        return {"database": self.database, "artifacts": self.artifacts}

    def variant(self, arch: str = "host", **tunables: Any) -> Variant:
        spec = self.spec
        implementation = spec.implementations[0]
        chosen = Values({**implementation.defaults[0], **tunables})
        return make_variant(spec.name, spec.version, implementation.name, arch, chosen)

    def key(self, variant: Variant, **problem: Any) -> str:
        return space.compile_key(self.spec, variant, self.spec.problem(problem))

    def compile(self, variant: Variant, **problem: Any) -> Artifact:
        """Compile a variant in this process and publish it."""
        spec, key = self.spec, self.key(variant, **problem)
        store = ArtifactStore(self.artifacts)
        with store.scratch() as scratch:
            static = spec.static(spec.problem(problem))
            request = CompileRequest(
                self.reference, variant.implementation, "host", static, variant.tunables, symbol_of(key), str(scratch)
            )
            report = run(request.to_payload())
            assert report["status"] == "ok", report["reason"]
            return store.put(key, request.symbol, {role: Path(path) for role, path in report["files"].items()})

    def winner(self, variant: Variant, problem: dict[str, Any], **changes: Any) -> Winner:
        """The record that says that `variant` won for `problem`, here, unless `changes` say otherwise."""
        spec = self.spec
        complete = spec.problem(problem)
        key = self.key(variant, **problem)
        made = Winner(
            variant=variant,
            problem=complete,
            bucket=spec.bucket(complete),
            environment=environment(0),
            protocol=PROTOCOL if spec.inputs is None else PROTOCOL_OWN_INPUTS,
            artifact=key,
            symbol=symbol_of(key),
            median_us=10.0,
            spread_us=0.1,
            samples=20,
        )
        return replace(made, **changes)

    def put(self, winner: Winner) -> Winner:
        with Store.open(self.database) as store:
            store.put_winner(winner)
        return winner

    def tune(
        self, problem: dict[str, Any], *, compiled: bool = True, environment: Environment | None = None, **tunables: Any
    ) -> Winner:
        """What a sweep leaves: an artifact and a winner."""
        variant = self.variant(**tunables)
        if compiled:
            self.compile(variant, **problem)
        changes = {} if environment is None else {"environment": environment}
        return self.put(self.winner(variant, problem, **changes))


@pytest.fixture
def tuned(tmp_path: Path) -> Tuned:
    (tmp_path / "cache").mkdir()
    return Tuned(tmp_path / "cache")
