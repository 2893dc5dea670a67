"""Backends: who turns what a spec's ``build`` returns into an artifact.

A backend is named by its implementation (``cutedsl``, ``host``, ``library``) and imported only
when asked for: this module imports nothing heavy.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunekit.arch import Arch
from tunekit.errors import UserError
from tunekit.model import Footprint, Status, Values, to_json
from tunekit.spec import Build, Implementation

BACKENDS = ("cutedsl", "host", "library")
SYMBOL_DIGITS = 24
# Where under a request's out_dir the CuTeDSL backend's PTX appears when ptxas begins.
DUMP_PREFIX = "dump-"
PTX_PATTERN = f"{DUMP_PREFIX}*/*.ptx"


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


def backend(name: str) -> Backend:
    """The backend called `name`.

    Raises:
        UserError: there is none of that name.
    """
    if name not in BACKENDS:
        raise UserError(f"unknown backend '{name}' (known: {', '.join(BACKENDS)})")
    module: Any = importlib.import_module(f"tunekit.backends.{name}")
    loaded: Backend = module
    return loaded


def symbol_of(compile_key: str) -> str:
    """The exported function's name for a compile key."""
    return f"tunekit_{compile_key[:SYMBOL_DIGITS]}"


def refusal(implementation: Implementation, arch: Arch) -> str | None:
    """Why `implementation` must not be compiled for `arch`, in a sentence, or None."""
    if not implementation.is_library and (implementation.backend == "host") == arch.is_gpu:
        return f"{implementation.name} is for the {implementation.backend} backend, which can't build for {arch.name}"
    return implementation.unsupported(arch)


def files_in(out_dir: Path, **roles: Path) -> dict[str, str]:
    """The files that exist, by role."""
    return {role: str(path) for role, path in roles.items() if path.is_file()}
