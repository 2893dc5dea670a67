"""Compiling through the store: units of work, deduplicated, locked, isolated and published.

A *unit* is one compile: a variant with the static part of a problem. Several
processes that want the same unit compile it once: the first holds its lock,
the others wait and find the artifact.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunekit import identity
from tunekit.backends import CompileRequest, symbol_of
from tunekit.jobs import Event, Pool, TaskResult, compile_task
from tunekit.model import Artifact, Environment, Footprint, KnownBad, Outcome, Stage, Status, Trial, Values, Variant
from tunekit.space import compile_key
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore, NothingToKeep
from tunekit.store.database import Store

REMEMBERED = frozenset({Status.COMPILE_TIMEOUT, Status.COMPILE_CRASHED, Status.COMPILE_OUT_OF_MEMORY})


@dataclass(frozen=True)
class Unit:
    """One compile. `key` is its identity; `reference` is what loads the spec in another process."""

    key: str
    variant: Variant
    static: Values
    reference: str

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
        )


def units(spec: KernelSpec, reference: str, problem: Values, variants: Sequence[Variant]) -> list[Unit]:
    """The compiles that `variants` need for a problem, in order."""
    static = spec.static(problem)
    sources = {
        name: identity.fingerprint(spec.implementation(name).build) for name in {v.implementation for v in variants}
    }
    return [
        Unit(compile_key(spec, v, problem, sources=sources[v.implementation]), v, static, reference) for v in variants
    ]


@dataclass
class Compiler:
    """Compiles units, and keeps what came of them.

    `force` compiles what is cached; `retry_failed` compiles what is known to hang
    or crash. `store` may be None where nothing is to be recorded.
    """

    pool: Pool
    artifacts: ArtifactStore
    store: Store | None
    environment: Environment
    force: bool = False
    retry_failed: bool = False
    sweep: int | None = None

    def compile(
        self, wanted: Sequence[Unit], on_event: Callable[[Event], None] | None = None
    ) -> Iterator[tuple[Unit, Outcome]]:
        """Each unit with its outcome, as they end: cached ones first, then compiled ones,
        then those that other processes were compiling."""
        mine: dict[str, Unit] = {}
        theirs: list[Unit] = []
        with contextlib.ExitStack() as everything:
            scratch = everything.enter_context(self.artifacts.scratch())
            locks: dict[str, contextlib.ExitStack] = {}
            for unit in {unit.key: unit for unit in wanted}.values():
                known = self._known(unit)
                if known is not None:
                    yield unit, known
                    continue
                lock = everything.enter_context(contextlib.ExitStack())
                if not lock.enter_context(self.artifacts.lock(unit.key, timeout_s=0)):
                    theirs.append(unit)
                    continue
                # Between the look-up and the lock another process may have finished.
                known = self._known(unit)
                if known is not None:
                    lock.close()
                    yield unit, known
                    continue
                mine[unit.key] = unit
                locks[unit.key] = lock
            for unit, outcome in self._compile_locked(mine, scratch, on_event, locks):
                yield unit, outcome
            for unit in theirs:
                with self.artifacts.lock(unit.key):
                    known = self._known(unit)
                    if known is not None:
                        yield unit, known
                    else:
                        yield from self._compile_locked({unit.key: unit}, scratch, on_event, {})

    def _compile_locked(
        self,
        mine: dict[str, Unit],
        scratch: Path,
        on_event: Callable[[Event], None] | None,
        locks: dict[str, contextlib.ExitStack],
    ) -> Iterator[tuple[Unit, Outcome]]:
        tasks = []
        for key, unit in mine.items():
            out_dir = scratch / key[:24]
            out_dir.mkdir(exist_ok=True)
            tasks.append(compile_task(unit.request(out_dir), id=key))
        for result in self.pool.run(tasks, on_event):
            unit = mine[result.id]
            outcome = self._keep(unit, result)
            if unit.key in locks:
                locks[unit.key].close()
            yield unit, outcome

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
        outcome = compile_outcome(result)
        if outcome.ok:
            outcome = self._stored(unit, result, outcome)
        if self.store is not None:
            self.store.record(Trial(unit.variant, unit.static, unit.key, outcome, self.environment, sweep=self.sweep))
            if outcome.status in REMEMBERED:
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
            if not isinstance(files, Mapping) or "so" not in files:
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
        return dataclasses.replace(outcome, artifact=str(artifact.files["so"]))


def cached_outcome(artifact: Artifact) -> Outcome:
    """The outcome of a compile that needn't be done: what it cost when it was."""
    return Outcome(
        Stage.COMPILE,
        Status.OK,
        seconds=artifact.seconds,
        artifact=str(artifact.files["so"]),
        footprint=artifact.footprint,
        facts=artifact.facts.merged({"cached": True}),
    )


def compile_outcome(result: TaskResult) -> Outcome:
    """A task's result as the outcome of a compile; the compiled reading completes the traced one."""
    value = result.value or {}
    traced, compiled = Footprint(**value.get("traced", {})), Footprint(**value.get("compiled", {}))
    known = {f.name: getattr(compiled, f.name) for f in dataclasses.fields(compiled)}
    footprint = dataclasses.replace(traced, **{name: v for name, v in known.items() if v is not None})
    return Outcome(
        Stage.PROBE if result.status is Status.OVER_BUDGET else Stage.COMPILE,
        result.status,
        result.reason,
        seconds=result.seconds,
        peak_rss_bytes=result.peak_rss_bytes,
        footprint=footprint,
        facts=Values(value.get("facts", {})),
    )
