"""The measuring worker as its users see it: ask about jobs, get outcomes, whatever happens to the child."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tunekit.child import Stopped
from tunekit.errors import SpecError, TunekitError, UserError
from tunekit.measure.final import DEFAULT_ROUNDS, Rules
from tunekit.measure.job import RunJob, outcome_from_payload, positive_int
from tunekit.measure.lock import lock_path, turn
from tunekit.measure.process import Child
from tunekit.measure.protocol import DEFAULT_CACHE, Cache
from tunekit.measure.silence import silence
from tunekit.model import Values, to_json
from tunekit.settings import DEFAULT_RUN_LIMIT_S
from tunekit.trials import Outcome, Stage, Status

PREPARE_LIMIT_S = 600.0
# Sets of random inputs of a verification.
SEEDS = 3
# Of the first call of a library, which may compile what it runs.
FIRST_CALL_LIMIT_S = 300.0


@dataclass(frozen=True)
class LateFault:
    """A fault that appeared in another variant's turn and did not recur in a fresh process.

    `suspect` is the variant that had run last before it; `reason` is what was seen.
    """

    suspect: RunJob
    reason: str


class MeasuringWorker:
    """Verifies and times variants on one device, in a child process that is killed and replaced as needed.

    The child starts with the first request; one thread at a time may ask.

    `device` is a CUDA index or ``"host"``. `run_limit_s` bounds each launch and each timed
    window (but a library's first call has 300 s); loading, inputs and the oracle have
    `prepare_limit_s` a step. On a GPU every request takes its turn with other tuners (see
    lock); `on_wait` hears when that takes time.

    A fault is blamed on a variant only if it shows in a process that ran nothing else
    before: in a used process the request is repeated in a fresh one. If it does not
    recur there, `late_faults` names the variant that had run before.
    """

    def __init__(
        self,
        device: int | Literal["host"],
        run_limit_s: float = DEFAULT_RUN_LIMIT_S,
        *,
        prepare_limit_s: float = PREPARE_LIMIT_S,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        if device != "host":
            positive_int("device", device, least=0)
        for name, limit in (("run_limit_s", run_limit_s), ("prepare_limit_s", prepare_limit_s)):
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not (0 < limit < math.inf):
                raise UserError(f"{name} is {limit!r}; it must be a positive number of seconds")
        self.device = device
        self.run_limit_s = run_limit_s
        self.late_faults: list[LateFault] = []
        first_s = max(run_limit_s, FIRST_CALL_LIMIT_S)
        self._limits_s = {"prepare": prepare_limit_s, "check": prepare_limit_s, "first": first_s, "run": run_limit_s}
        self._on_wait = on_wait
        self._lock: Path | None = None
        self._child: Child | None = None
        self._last: RunJob | None = None  # what the present child ran last; None: nothing yet

    # --- requests -----------------------------------------------------------------------

    def verify(self, job: RunJob, *, seeds: int = SEEDS, edges: bool = True) -> Outcome:
        """Whether the variant is right: `seeds` sets of random inputs and, with `edges`, each edge length.

        Raises:
            UserError: the request or the spec is at fault.
        """
        request = {"kind": "verify", "seeds": positive_int("seeds", seeds), "edges": edges}
        return self._single(request, job, Stage.VERIFY)

    def time(self, job: RunJob, repetitions: int = 10, warmup: int = 2, *, cache: Cache = DEFAULT_CACHE) -> Outcome:
        """A cheap timing for searching: `repetitions` samples. One first call is always made untimed.

        With `cache` ``warm`` the L2 cache is warm, else it is flushed.

        Raises:
            UserError: the request or the spec is at fault.
        """
        request = {
            "kind": "time",
            "repetitions": positive_int("repetitions", repetitions),
            "warmup": positive_int("warm-up", warmup, least=0),
            "cache": cache,
        }
        return self._single(request, job, Stage.MEASURE)

    def final(
        self, jobs: Sequence[RunJob], rounds: int = DEFAULT_ROUNDS, *, rules: Rules | None = None, **more: Any
    ) -> dict[str, Outcome]:
        """The careful measurement of finalists against each other, by variant id.

        All outcomes that are ok come from one race in one process: their n-th samples
        were taken in the same round; a clear loser has fewer. A finalist that fails has its
        own outcome, and the race is held again without it. `more` are fields of `Rules`, whose
        `rounds` is the most; a final ends as soon as it is decided. Where other processes on this machine
        went on compiling beside it, each outcome's fact `compiling_beside` says so.

        Raises:
            UserError: the request or the spec is at fault.
        """
        held = (rules or Rules(rounds=rounds, **more)).checked()
        request = {"kind": "final", "rules": to_json(held)}
        ids = [job.variant.id for job in jobs]
        twice = sorted({id for id in ids if ids.count(id) > 1})
        if twice:
            raise UserError(f"the final lists variant {', '.join(twice)} twice")
        problems = {(job.spec, job.problem) for job in jobs}
        if len(problems) > 1:
            raise UserError("a final compares variants on one problem of one spec")
        outcomes: dict[str, Outcome] = {}
        left = list(jobs)
        with self._turn(), self._silence() as beside:
            while left:
                found, again = self._ask(request, left, Stage.MEASURE)
                outcomes.update(found)
                left = [job for job in left if job.variant.id not in found] if again else []
        noted = Values({"compiling_beside": beside}) if beside else Values()
        return {id: replace(outcomes[id], facts=outcomes[id].facts.merged(noted)) for id in ids}

    def _single(self, request: Mapping[str, Any], job: RunJob, stage: Stage) -> Outcome:
        with self._turn():
            found, _ = self._ask(request, [job], stage)
        return found[job.variant.id]

    # --- the child ----------------------------------------------------------------------

    def _ask(self, request: Mapping[str, Any], jobs: Sequence[RunJob], stage: Stage) -> tuple[dict[str, Outcome], bool]:
        """The outcomes of one request, and whether the jobs without one must be asked for again."""
        last = self._last
        found, again, fault = self._attempt(request, jobs, stage)
        if fault is None or last is None:
            return found, again
        self._stop()
        found, again, recurred = self._attempt(request, jobs, stage)
        if recurred is None:
            self.late_faults.append(LateFault(last, fault))
        return found, again

    def _attempt(
        self, request: Mapping[str, Any], jobs: Sequence[RunJob], stage: Stage
    ) -> tuple[dict[str, Outcome], bool, str | None]:
        """As `_ask`, without repeating; the third value is a fault of device or process, in words."""
        child = self._started()
        self._last = jobs[-1]
        try:
            reply = child.ask({**request, "jobs": [job.to_payload() for job in jobs]})
        except Stopped as stopped:
            self._stop()
            return self._of_stopped(stopped, jobs, stage)
        except BaseException:  # Ctrl-C: the reply that is still to come must not answer another request
            self._stop()
            raise
        if reply.get("lost"):
            self._stop()
        if "error" in reply:
            self._raise(reply["error"])
        if "stale" in reply:
            outcome = Outcome(stage, Status.DEVICE_FAULT, f"before its first run: {reply['stale']}")
            return {jobs[0].variant.id: outcome}, len(jobs) > 1, str(reply["stale"])
        found = {id: outcome_from_payload(payload) for id, payload in reply["outcomes"].items()}
        fault = next(iter(found.values())).reason if reply.get("lost") else None
        again = bool(reply.get("again") or reply.get("lost")) and len(found) < len(jobs)
        return found, again, fault

    def _of_stopped(
        self, stopped: Stopped, jobs: Sequence[RunJob], stage: Stage
    ) -> tuple[dict[str, Outcome], bool, str | None]:
        ids = [job.variant.id for job in jobs]
        id = stopped.at.variant if stopped.at.variant in ids else ids[0]
        again = len(jobs) > 1
        timeout = stopped.limit_s is not None
        status = Status.RUN_TIMEOUT if timeout else Status.DEVICE_FAULT
        outcome = Outcome(stage, status, str(stopped), seconds=Values({stopped.at.phase: stopped.seconds}))
        return {id: outcome}, again, None if timeout else str(stopped)

    @staticmethod
    def _raise(error: Mapping[str, Any]) -> None:
        if error["field"] or error["where"]:
            raise SpecError(error["message"], field=error["field"], where=error["where"])
        raise UserError(error["message"])

    def _started(self) -> Child:
        if self._child is None:
            self._last = None
            try:
                self._child = self._new_child()
            except TunekitError as error:
                if isinstance(error, UserError):
                    raise
                self._child = self._new_child()  # what killed it may have been no fault of its own
        return self._child

    def _new_child(self) -> Child:
        child = Child(self.device, self.run_limit_s, self._limits_s)
        try:
            child.start()
        except BaseException:  # whatever ends the start, no child stays behind
            child.close()
            raise
        return child

    def _stop(self) -> None:
        child, self._child, self._last = self._child, None, None
        if child is not None:
            child.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self.device == "host":
            yield
            return
        if self._lock is None:
            self._lock = lock_path(int(self.device))
        with turn(self._lock, self._on_wait):
            yield

    @contextlib.contextmanager
    def _silence(self) -> Iterator[str]:
        if self.device == "host":
            yield ""
            return
        with silence(on_wait=self._on_wait) as beside:
            yield beside

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._child.pid if self._child else None

    def close(self) -> None:
        """End the child."""
        self._stop()

    def __enter__(self) -> MeasuringWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
