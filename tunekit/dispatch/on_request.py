"""Compiling on the request path, for who asked for it: isolated, limited, once per key over all processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunekit.environment import environment
from tunekit.errors import DatabaseError
from tunekit.model import Artifact, Outcome, Values, Variant
from tunekit.settings import Settings
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore

if TYPE_CHECKING:
    from tunekit.compiling import Unit
    from tunekit.store.database import Store

logger = logging.getLogger("tunekit")


class OnRequestCompiler:
    """Compiles one variant at a time in a process of its own, publishes the artifact and records the outcome.

    `reference` is what ``load_spec`` takes, for the compile process. What a sweep or
    an earlier request found to hang or crash is not tried. `compiled` counts.
    """

    def __init__(self, reference: str, spec: KernelSpec, store: ArtifactStore, settings: Settings) -> None:
        self.compiled = 0
        self._reference = reference
        self._spec = spec
        self._store = store
        self._settings = settings

    def compile(self, variant: Variant, problem: Values) -> tuple[Artifact | None, str]:
        """The artifact of `variant`, compiled now or meanwhile by another process; or None and why not."""
        from tunekit.compiling import units  # here: the compile side costs 0.2 s to import, and most servers need none

        (unit,) = units(self._spec, self._reference, problem, [variant])
        artifact = self._store.get(unit.key)
        if artifact is not None:
            return artifact, ""
        try:
            outcome = self._run(unit)
        except DatabaseError as error:
            return None, f"it can't be compiled here: {error}"
        if not outcome.ok:
            return None, f"it does not compile ({outcome.status}: {outcome.reason or 'no reason given'})"
        self.compiled += not outcome.facts.get("cached", False)
        return self._store.get(unit.key), "its artifact vanished as soon as it was compiled"

    def _run(self, unit: Unit) -> Outcome:
        from tunekit.compiling import Compiler, compile_limits
        from tunekit.jobs import Pool

        backend = self._spec.implementation(unit.variant.implementation).backend
        limits = compile_limits(self._spec, self._settings)
        with Pool(workers=1, warm=(backend,), limits=limits) as pool, self._records() as records:
            compiler = Compiler(pool, self._store, records, environment(0))
            ((_, outcome),) = compiler.compile([unit])
        return outcome

    @contextlib.contextmanager
    def _records(self) -> Iterator[Store | None]:
        """The user's database; None, and a warning, where it can't be written."""
        from tunekit.store.database import Store

        try:
            opened = Store.open(self._settings.database)
        except DatabaseError as error:
            logger.warning("compiles on request are not recorded: %s", error)
            yield None
            return
        with opened:
            yield opened
