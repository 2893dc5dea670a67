"""What compile processes are asked and what they answer, and what a backend module offers for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunekit.model import Footprint, Values, to_json
from tunekit.spec import Build, Implementation
from tunekit.trials import Status


class Phase(Protocol):
    """Told the name of each phase as it begins; `since` is when (``time.time()``), if not now."""

    def __call__(self, name: str, since: float | None = None) -> None: ...


@dataclass(frozen=True)
class CompileRequest:
    """One compile, as plain values: any process can do it from this alone.

    `spec` is what ``load_spec`` takes (an absolute path for files); `static` the
    static problem axes; `symbol` the exported function's name, unique per compile
    key; `out_dir` a scratch directory that receives the files; `options` what is
    added to the implementation's own compile options.
    """

    spec: str
    implementation: str
    arch: str
    static: Values
    tunables: Values
    symbol: str
    out_dir: str
    trace_only: bool = False
    options: str = ""

    def to_payload(self) -> dict[str, Any]:
        """Plain JSON."""
        payload: dict[str, Any] = to_json(self)
        return payload

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> CompileRequest:
        static, tunables = Values(payload["static"]), Values(payload["tunables"])
        return cls(**{**payload, "static": static, "tunables": tunables})

    def __str__(self) -> str:
        return f"{self.implementation} {self.tunables} on {self.arch}"


@dataclass(frozen=True)
class CompileReport:
    """How a compile ended, as a backend saw it.

    `traced` and `compiled` are the footprints read from the IR and from the machine
    code; `facts` more of the latter; `files` maps roles (``so``, ``ptx``, ``cubin``, ``library``)
    to paths in the request's `out_dir`.
    """

    status: Status
    reason: str = ""
    traced: Footprint = field(default_factory=Footprint)
    compiled: Footprint = field(default_factory=Footprint)
    facts: Values = Values()
    files: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """What a backend module offers; both functions run in a compile process only."""

    def warm(self) -> None:
        """Import and initialise all that compiles share. Must start no thread: the caller forks."""

    def compile(
        self, request: CompileRequest, implementation: Implementation, build: Build, phase: Phase
    ) -> CompileReport:
        """Build, trace and, unless `trace_only`, compile and link.

        Calls `phase` with the name of each phase as it begins, first ``trace``.
        Expected failures are reports; anything else may raise.
        """


def files_in(out_dir: Path, **roles: Path) -> dict[str, str]:
    """The files that exist, by role."""
    return {role: str(path) for role, path in roles.items() if path.is_file()}
