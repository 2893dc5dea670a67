"""Compiling on the request path, for who asked for it: isolated, limited, once per key over all processes."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunekit.dispatch import background
from tunekit.dispatch.forked import Guard
from tunekit.environment import environment
from tunekit.errors import DatabaseError, TunekitError
from tunekit.model import Artifact, Values, Variant
from tunekit.settings import Settings
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore
from tunekit.trials import Outcome

if TYPE_CHECKING:
    from tunekit.compiling import Unit
    from tunekit.dispatch.resolver import Resolver
    from tunekit.store.database import Store

logger = logging.getLogger("tunekit")

AT_ONCE = 4
"""Compile servers that this process runs at a time: as many cold keys need no more memory."""
GRACE_S = 10.0
"""What a wait for another process's compile allows beyond that compile's own limits."""
_slots = Guard(lambda: threading.BoundedSemaphore(AT_ONCE))


@dataclass(frozen=True)
class Compiled:
    """What came of a compile: the artifact, or None and why; `compiled` by us, `failed` for good."""

    artifact: Artifact | None
    why: str = ""
    compiled: bool = False
    failed: bool = False


def not_compiled(outcome: Outcome) -> str:
    """Why a compile gave no artifact, in words."""
    return f"it does not compile ({outcome.status}: {outcome.reason or 'no reason given'})"


class OnRequestCompiler:
    """Compiles a variant in a process of its own, publishes the artifact and records the outcome.

    `reference` is what ``load_spec`` takes, for the compile process; `who` is this rank or process, in words. What a
    sweep or an earlier request found to hang or crash is not tried. Several threads may compile at once.
    """

    def __init__(self, reference: str, spec: KernelSpec, store: ArtifactStore, settings: Settings, who: str) -> None:
        self._reference = reference
        self._spec = spec
        self._store = store
        self._settings = settings
        self._who = who

    @property
    def wait_s(self) -> float:
        """How long to wait for another process that compiles the same: its limits, and some grace."""
        from tunekit.compiling import compile_limits

        limits = compile_limits(self._spec, self._settings)
        return (limits.trace_s or 0.0) + (limits.backend_s or 0.0) + GRACE_S

    def ask(self, key: str, variant: Variant, problem: Values, resolver: Resolver) -> str:
        """Have `resolver` compile a variant in the background, when its turn comes; says what becomes of it."""
        return background.ask(background.Job(key, variant, problem, weakref.ref(resolver)))

    def compile(self, variant: Variant, problem: Values, stopped: Callable[[], bool]) -> Compiled:
        """The artifact of `variant`, compiled now or meanwhile by another process; `stopped` ends it early."""
        from tunekit.compiling import units  # here: the compile side costs 0.2 s to import, and most servers need none

        (unit,) = units(self._spec, self._reference, problem, [variant])
        artifact = self._store.get(unit.key)
        if artifact is not None:
            return Compiled(artifact)
        unwritable = self._store.unwritable()
        if unwritable:
            return Compiled(None, f"it can't be compiled here: {unwritable}", failed=True)
        try:
            with self._only(unit) as held:
                artifact = self._store.get(unit.key)
                if artifact is not None:
                    return Compiled(artifact)
                outcome = self._run(unit, stopped) if held else None
        except TunekitError as error:
            return Compiled(None, f"it can't be compiled here: {error}", failed=True)
        if outcome is None:
            return Compiled(None, f"another process or thread has been compiling it for over {self.wait_s:g} s")
        if not outcome.ok:
            return Compiled(None, not_compiled(outcome), failed=not stopped())
        artifact = self._store.get(unit.key)
        ours = not outcome.facts.get("cached", False)
        why = "" if artifact else "its artifact vanished as soon as it was compiled"
        return Compiled(artifact, why, compiled=ours, failed=artifact is None)

    @contextlib.contextmanager
    def _only(self, unit: Unit) -> Iterator[bool]:
        """Be the only one, of all processes, that compiles this on request; whether that is so within the limits.

        Ranks that start at once would each start a compile server, to find that one of them compiles.
        """
        name = f"request-{unit.key}"
        with self._store.lock(name, timeout_s=0) as held:
            if held:
                with _slots:
                    yield True
                return
        self._tell_waiting(unit)
        with self._store.lock(name, self.wait_s) as held, _slots:
            yield held

    def _tell_waiting(self, unit: Unit) -> None:
        logger.warning(
            "%s waits for another compile of %s of %s (at most %g s)",
            self._who,
            unit.variant,
            self._spec.name,
            self.wait_s,
        )

    def _run(self, unit: Unit, stopped: Callable[[], bool]) -> Outcome | None:
        """The outcome; None where another process did not finish within its limits."""
        from tunekit.compiling import Compiler, compile_limits
        from tunekit.jobs import Pool

        backend = self._spec.implementation(unit.variant.implementation).backend
        limits = compile_limits(self._spec, self._settings)
        with Pool(workers=1, warm=(backend,), limits=limits) as pool, self._records() as records:
            compiler = Compiler(
                pool,
                self._store,
                records,
                environment(0),
                wait_s=self.wait_s,
                on_wait=self._tell_waiting,
                stopped=stopped,
            )
            done = list(compiler.compile([unit]))
        return done[0][1] if done else None

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
