"""The cold path: which variant serves a checked call, decided and loaded once per device and problem."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.dispatch.checks import Call
from tunekit.dispatch.devices import DeviceFacts, Devices
from tunekit.dispatch.ladder import Candidate, Table, walk
from tunekit.dispatch.library import Function, Library
from tunekit.dispatch.lookup import no_kernel, read_table
from tunekit.dispatch.on_request import OnRequestCompiler
from tunekit.errors import NoKernelError, TunekitError
from tunekit.model import Artifact, Choice, Level, Values
from tunekit.spec import KernelSpec

if TYPE_CHECKING:
    from tunekit.store.bundle import Bundle

logger = logging.getLogger("tunekit")

Served = tuple[Choice, Function]


class Resolver:
    """What serves the calls of one spec: the recorded winners, the artifacts and, if asked for, the compiler.

    `source` is where the winners are recorded: the user's database (beside what ships), or a bundle.
    `counts` and `warned` are for `Kernel.stats` and once-only warnings. Safe to call from several threads: one
    resolves, the others wait for it.
    """

    def __init__(
        self,
        spec: KernelSpec,
        reference: str,
        source: Path | Bundle,
        library: Library,
        compiler: OnRequestCompiler | None,
        strict: bool,
        devices: Devices,
    ) -> None:
        self.spec = spec
        self.devices = devices
        self.counts: Counter[str] = Counter()
        self._reference = reference
        self._source = source
        self._library = library
        self._compiler = compiler
        self._strict = strict
        self._tables: dict[int, tuple[DeviceFacts, Table]] = {}
        self._served: dict[tuple[int, Values], Served] = {}
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        _resolvers.add(self)

    def pick(self, call: Call) -> Served:
        """The choice for a checked call, and its function; made once per device and problem.

        Raises:
            NoKernelError: nothing can serve it; or, in strict mode, not the first choice.
        """
        known = self._served.get((call.device, call.problem))
        if known is not None:
            return known
        with self._lock:
            known = self._served.get((call.device, call.problem))
            if known is None:
                known = self._served[call.device, call.problem] = self._pick(call)
        return known

    def knows(self, call: Call) -> bool:
        """Whether `pick` would neither load nor look anything up."""
        return (call.device, call.problem) in self._served

    def forget(self) -> None:
        """Drop the choices made, and the winners read: each is looked up again when it is next asked for."""
        with self._lock:
            self._tables.clear()
            self._served.clear()
            self._library.look_again()

    def _pick(self, call: Call) -> Served:
        facts, table = self._table(call.device)
        self.counts["problems"] += 1
        done = walk(table, call.problem, lambda candidate: self._acquire(candidate, call.problem))
        if done.candidate is None or done.thing is None:
            self.counts["error"] += 1
            del self._tables[call.device]  # the next call looks again: somebody may have tuned or compiled meanwhile
            self._library.look_again()
            raise NoKernelError(no_kernel(self._library, self._reference, facts.arch, call.problem, done.missed))
        candidate, (artifact, function) = done.candidate, done.thing
        self.counts[candidate.level.value] += 1
        if candidate.level not in (Level.EXACT, Level.BUCKET):
            self._warn_once(
                f"level {candidate.level}",
                f"{self.spec.name} {call.problem} on {facts.arch} is served by {candidate.level}: {candidate.variant} "
                f"({candidate.why}); later ones of this level are only counted",
            )
        return done.choice(candidate, artifact), function

    def _acquire(self, candidate: Candidate, problem: Values) -> tuple[tuple[Artifact, Function] | None, str]:
        """A candidate's artifact, loaded; or None and what it lacks (in strict mode: raises)."""
        artifact, lacks = self._library.find(candidate, problem)
        if artifact is None:
            artifact, lacks = self._compile(candidate, problem, lacks)
        if artifact is not None:
            loaded = self._library.is_loaded(artifact)
            try:
                function = self._library.load(artifact)
            except TunekitError as error:
                lacks = str(error)
                self._library.rule_out(artifact.key, lacks)
            else:
                self.counts["loaded"] += not loaded
                return (artifact, function), ""
        self._lacking(candidate, lacks)
        if self._strict:
            self.counts["error"] += 1
            raise NoKernelError(
                f"strict mode: {self.spec.name} {problem} would be served by {candidate.level} "
                f"({candidate.variant}: {candidate.why}), but {lacks}"
            )
        return None, lacks

    def _compile(self, candidate: Candidate, problem: Values, lacks: str) -> tuple[Artifact | None, str]:
        if self.spec.implementation(candidate.variant.implementation).is_library:
            return None, lacks  # there is nothing to compile
        key = self._library.present_key(candidate, problem)
        if self._compiler is None:
            self.counts["would_compile"] += 1
            return None, lacks
        if self._library.has_failed(key):
            return None, lacks
        artifact, why = self._compiler.compile(candidate.variant, problem)
        self.counts["compiled"] = self._compiler.compiled
        if artifact is None:
            self._library.rule_out(key, why)
        else:
            self._library.add(artifact)
        return artifact, why

    def _lacking(self, candidate: Candidate, why: str) -> None:
        """Count and say, once a variant, that a recorded choice can't serve."""
        what = f"lacking {candidate.variant.id}"
        if candidate.winner is not None and what not in self._warned:
            self.counts["recovered"] += 1
            self._warn_once(what, f"{self.spec.name}: {candidate.variant} ({candidate.level}) can't serve: {why}")

    def _table(self, device: int) -> tuple[DeviceFacts, Table]:
        found = self._tables.get(device)
        if found is None:
            facts = self.devices.facts(device)
            found = self._tables[device] = facts, read_table(self.spec, facts.arch, facts.environment, self._source)
        return found

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", message)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


_resolvers: weakref.WeakSet[Resolver] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a lock that another thread held at the fork would never be given back there."""
    for resolver in _resolvers:
        resolver._after_fork()


os.register_at_fork(after_in_child=_renew_locks)
