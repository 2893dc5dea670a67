"""Compiling on the request path, for who asked for it: isolated, limited, once per key over all processes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.backends import CompileRequest, symbol_of
from tunekit.model import Artifact, Footprint, Status, Values, Variant
from tunekit.settings import (
    DEFAULT_COMPILE_LIMIT_S,
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_TRACE_LIMIT_S,
    Settings,
    limit_s,
)
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore


class OnRequestCompiler:
    """Compiles one variant at a time in a process of its own and publishes the artifact.

    `reference` is what ``load_spec`` takes, for the compile process.
    """

    def __init__(self, reference: str, spec: KernelSpec, store: ArtifactStore, settings: Settings) -> None:
        self._reference = reference
        self._spec = spec
        self._store = store
        self._settings = settings

    def compile(self, key: str, variant: Variant, problem: Values) -> tuple[Artifact | None, str]:
        """The artifact of `variant`, compiled now or meanwhile by another process; or None and why not."""
        with self._store.lock(key):
            artifact = self._store.get(key)
            if artifact is not None:
                return artifact, ""
            with tempfile.TemporaryDirectory(prefix="tunekit-") as scratch:
                request = CompileRequest(
                    self._reference,
                    variant.implementation,
                    variant.arch,
                    self._spec.static(problem),
                    variant.tunables,
                    symbol_of(key),
                    scratch,
                )
                return self._run(key, request)

    def _run(self, key: str, request: CompileRequest) -> tuple[Artifact | None, str]:
        from tunekit.jobs import Limits, Pool, Task

        settings = self._settings
        limits = Limits(
            trace_s=limit_s(None, settings.trace_limit_s, None, DEFAULT_TRACE_LIMIT_S),
            backend_s=limit_s(None, settings.compile_limit_s, self._spec.compile_limit_s, DEFAULT_COMPILE_LIMIT_S),
            memory_bytes=settings.memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES,
        )
        backend = self._spec.implementation(request.implementation).backend
        with Pool(workers=1, warm=(backend,), limits=limits) as pool:
            (result,) = pool.run([Task(key, request.to_payload())])
        value: Mapping[str, Any] = result.value or {}
        if result.status is not Status.OK or "so" not in value.get("files", {}):
            return None, f"it does not compile ({result.status}: {result.reason or 'no reason given'})"
        artifact = self._store.put(
            key,
            request.symbol,
            {role: Path(path) for role, path in value["files"].items()},
            footprint=Footprint(**value.get("compiled", {})),
            facts=Values(value.get("facts", {})),
            seconds=Values(value.get("seconds", {})),
        )
        return artifact, ""
