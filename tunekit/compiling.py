"""Compiling through the store: units of work, deduplicated, locked, isolated and published.

A *unit* is one compile: a variant with the static part of a problem. Several
processes that want the same unit compile it once: the first holds its lock,
the others wait and find the artifact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.backends import symbol_of
from tunekit.backends.contract import CompileRequest
from tunekit.jobs import Event, Limits, Pool, Task, TaskResult, compile_task
from tunekit.measure.silence import Compiles
from tunekit.model import Artifact, Environment, Footprint, Values, Variant
from tunekit.probe import DISAGREEMENT, Probe
from tunekit.settings import (
    DEFAULT_COMPILE_LIMIT_S,
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_TRACE_LIMIT_S,
    Settings,
    limit_s,
)
from tunekit.space import compile_key, declared_footprint
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore, NothingToKeep
from tunekit.store.database import Store
from tunekit.trials import KnownBad, Outcome, Stage, Status, Trial

REMEMBERED = frozenset({Status.COMPILE_TIMEOUT, Status.COMPILE_CRASHED, Status.COMPILE_OUT_OF_MEMORY})


@dataclass(frozen=True)
class Unit:
    """One compile. `key` is its identity; `reference` is what loads the spec in another process;
    `declared` is the footprint by the spec's own arithmetic; `options` is added to the
    implementation's compile options."""

    key: str
    variant: Variant
    static: Values
    reference: str
    declared: Footprint = field(default_factory=Footprint)
    options: str = ""

    @property
    def symbol(self) -> str:
        """The exported function's name, unique per key."""
        return symbol_of(self.key)

    def request(self, out_dir: Path, *, trace_only: bool = False) -> CompileRequest:
        return CompileRequest(
            spec=self.reference,
            implementation=self.variant.implementation,
            arch=self.variant.arch,
            static=self.static,
            tunables=self.variant.tunables,
            symbol=self.symbol,
            out_dir=str(out_dir),
            trace_only=trace_only,
            options=self.options,
        )


def units(
    spec: KernelSpec, reference: str, problem: Values, variants: Sequence[Variant], options: str = ""
) -> list[Unit]:
    """The compiles that `variants` need for a problem, in order; `options` is added to their compile options."""
    static = spec.static(problem)
    sources = {
        name: identity.fingerprint(spec.implementation(name).build) for name in {v.implementation for v in variants}
    }
    return [
        Unit(
            compile_key(spec, v, problem, sources=sources[v.implementation], options=options),
            v,
            static,
            reference,
            declared_footprint(spec.implementation(v.implementation), parse_arch(v.arch), problem, v.tunables),
            options,
        )
        for v in variants
    ]


def compile_limits(spec: KernelSpec, settings: Settings) -> Limits:
    """A spec's compile limits: what was set for this run, else the spec's own, else the defaults.

    Where no trace limit was set, the back end's holds for the trace too if it is shorter:
    who allows a compile 5 s does not mean 60 s for its first half.
    """
    backend_s = limit_s(None, settings.compile_limit_s, spec.compile_limit_s, DEFAULT_COMPILE_LIMIT_S)
    return Limits(
        trace_s=settings.trace_limit_s or min(DEFAULT_TRACE_LIMIT_S, backend_s),
        backend_s=backend_s,
        memory_bytes=settings.memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES,
    )


class _Stopped(Exception):
    """Whoever asked for the compiles wants them no more."""


class _Work:
    """The compiles under way. A unit is locked when the pool draws it, and until its result is kept:
    a sweep of any size holds a few locks and scratch directories, and sweeps side by side share the work."""

    def __init__(self, artifacts: ArtifactStore, scratch: Path, known: Callable[[Unit], Outcome | None]) -> None:
        self.units: dict[str, Unit] = {}
        self.theirs: list[Unit] = []
        """Units that other processes are compiling."""
        self._artifacts, self._scratch, self._known = artifacts, scratch, known
        self._locks: dict[str, contextlib.ExitStack] = {}
        self._found: list[tuple[Unit, Outcome]] = []

    def tasks(self, units: Sequence[Unit]) -> Iterator[Task]:
        """A task for each unit that can be locked and that nobody compiled since it was looked for."""
        for unit in units:
            lock = contextlib.ExitStack()
            if not lock.enter_context(self._artifacts.lock(unit.key, timeout_s=0)):
                self.theirs.append(unit)
                continue
            self._locks[unit.key] = lock
            known = self._known(unit)
            if known is None:
                yield self.task(unit)
            else:
                self._locks.pop(unit.key).close()
                self._found.append((unit, known))

    def task(self, unit: Unit) -> Task:
        self.units[unit.key] = unit
        self._directory(unit).mkdir(exist_ok=True)
        return compile_task(unit.request(self._directory(unit)), id=unit.key)

    def finished(self, unit: Unit) -> None:
        """Let go of a unit whose result is kept."""
        shutil.rmtree(self._directory(unit), ignore_errors=True)
        lock = self._locks.pop(unit.key, None)
        if lock is not None:
            lock.close()

    def close(self) -> None:
        """Let go of everything: the compiles were cut short."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def take_found(self) -> Iterator[tuple[Unit, Outcome]]:
        """What other processes turned out to have finished."""
        while self._found:
            yield self._found.pop(0)

    def _directory(self, unit: Unit) -> Path:
        return self._scratch / unit.key[:24]


@dataclass
class Compiler:
    """Compiles units, and keeps what came of them.

    `force` compiles what is cached; `retry_failed` compiles what is known to hang
    or crash. `store` may be None where nothing is to be recorded. `wait_s` is how long to
    wait for a unit that another process compiles (negative: no limit), `on_wait` is told of it;
    `stopped` is asked about once a second, and ends it all when it says so.
    """

    pool: Pool
    artifacts: ArtifactStore
    store: Store | None
    environment: Environment
    force: bool = False
    retry_failed: bool = False
    sweep: int | None = None
    wait_s: float = -1.0
    on_wait: Callable[[Unit], None] | None = None
    stopped: Callable[[], bool] | None = None

    def compile(
        self, wanted: Sequence[Unit], on_event: Callable[[Event], None] | None = None
    ) -> Iterator[tuple[Unit, Outcome]]:
        """Each unit with its outcome, as they end: cached ones first, then compiled ones,
        then those that other processes were compiling: without those that took them longer than `wait_s`.
        Compiles pause while a final is held on this machine. Stopped, it yields no more."""
        to_do: list[Unit] = []
        for unit in {unit.key: unit for unit in wanted}.values():
            known = self._known(unit)
            if known is None:
                to_do.append(unit)
            else:
                yield unit, known
        if not to_do:
            return
        with (
            self.artifacts.scratch() as scratch,
            contextlib.closing(_Work(self.artifacts, scratch, self._known)) as work,
            Compiles() as compiles,
        ):

            def between() -> None:
                if self.stopped is not None and self.stopped():
                    raise _Stopped
                compiles.give_way(self.pool.pause, self.pool.resume)

            with contextlib.suppress(_Stopped):
                yield from self._compile(work, to_do, on_event, between)

    def _compile(
        self, work: _Work, to_do: list[Unit], on_event: Callable[[Event], None] | None, between: Callable[[], None]
    ) -> Iterator[tuple[Unit, Outcome]]:
        for result in self.pool.run(work.tasks(to_do), on_event, between):
            unit = work.units[result.id]
            outcome = self._keep(unit, result)
            work.finished(unit)
            yield unit, outcome
            yield from work.take_found()
        yield from work.take_found()
        for unit in work.theirs:
            if self.on_wait is not None:
                self.on_wait(unit)
            with self.artifacts.lock(unit.key, self.wait_s) as held:
                known = self._known(unit)
                if known is None and not held and self.wait_s >= 0:
                    continue
                if known is None:
                    (result,) = self.pool.run([work.task(unit)], on_event, between)
                    known = self._keep(unit, result)
                    work.finished(unit)
            yield unit, known

    def _known(self, unit: Unit) -> Outcome | None:
        """What is known of a unit without compiling it: an artifact, or that it hangs or crashes."""
        if not self.force:
            artifact = self.artifacts.get(unit.key)
            if artifact is not None:
                return cached_outcome(artifact)
        if self.store is not None and not self.retry_failed:
            bad = self.store.known_bad(unit.key)
            if bad is not None:
                reason = f"{bad.status} in an earlier sweep ({bad.reason}); --retry-failed tries again"
                return Outcome(Stage.COMPILE, Status.KNOWN_BAD, reason)
        return None

    def _keep(self, unit: Unit, result: TaskResult) -> Outcome:
        outcome = compile_outcome(result, unit.declared)
        if outcome.ok:
            outcome = self._stored(unit, result, outcome)
        if self.store is not None:
            self.store.record(Trial(unit.variant, unit.static, unit.key, outcome, self.environment, sweep=self.sweep))
            if outcome.status in REMEMBERED and not result.server_died:
                self.store.remember_bad(
                    KnownBad(
                        unit.key,
                        unit.variant,
                        outcome.status,
                        outcome.reason,
                        result.phase,
                        sum(float(s) for s in result.seconds.values()),
                        result.peak_rss_bytes,
                        result.signal,
                    )
                )
            elif outcome.ok:
                self.store.forget_bad(compile_key=unit.key)
        return outcome

    def _stored(self, unit: Unit, result: TaskResult, outcome: Outcome) -> Outcome:
        """The outcome of a compile that calls itself ok, once its artifact is kept."""
        files = (result.value or {}).get("files")
        try:
            if not isinstance(files, Mapping) or not {"so", "library"} & set(files):
                raise NothingToKeep("it names no kernel")
            artifact = self.artifacts.put(
                unit.key,
                unit.symbol,
                {role: Path(path) for role, path in files.items()},
                footprint=outcome.footprint,
                facts=outcome.facts,
                seconds=outcome.seconds,
            )
        except NothingToKeep as error:
            reason = f"the compile ended well and left no kernel: {error}"
            return dataclasses.replace(outcome, status=Status.COMPILE_ERROR, reason=reason)
        return dataclasses.replace(outcome, artifact=str(artifact.files[artifact.role]))


def cached_outcome(artifact: Artifact) -> Outcome:
    """The outcome of a compile that needn't be done: what it cost when it was."""
    return Outcome(
        Stage.COMPILE,
        Status.OK,
        seconds=artifact.seconds,
        artifact=str(artifact.files[artifact.role]),
        footprint=artifact.footprint,
        facts=artifact.facts.merged({"cached": True}),
    )


def compile_outcome(result: TaskResult, declared: Footprint) -> Outcome:
    """A task's result as the outcome of a compile, with the best reading of the footprint that there is.

    Where the readings part, the fact `DISAGREEMENT` says how. Over budget by its trace it
    ended in the probe; by its machine code, in the compile.
    """
    value = result.value or {}
    traced, compiled = Footprint(**value.get("traced", {})), Footprint(**value.get("compiled", {}))
    parted = Probe(declared, traced, compiled).disagreements()
    facts = Values(value.get("facts", {}))
    in_probe = result.status is Status.OVER_BUDGET and compiled == Footprint()
    return Outcome(
        Stage.PROBE if in_probe else Stage.COMPILE,
        result.status,
        result.reason,
        seconds=result.seconds,
        peak_rss_bytes=result.peak_rss_bytes,
        footprint=Probe(traced=traced, compiled=compiled).footprint(),
        facts=facts.merged({DISAGREEMENT: "; ".join(parted)}) if parted else facts,
    )
