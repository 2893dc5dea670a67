"""What the measuring child does (see start): one a device, serial, meant to be killed.

It reads requests from stdin, a JSON object a line, and writes to its reply pipe: phase
messages as it goes (the parent's clock follows them), then one reply. Whatever a
kernel prints goes to stderr, never into the pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tunekit.backends.load import load_artifact
from tunekit.errors import SpecError, TunekitError, UserError
from tunekit.measure.bench import Bench, Loaded, WrongInFinal
from tunekit.measure.device import Device, first_line, is_out_of_memory
from tunekit.measure.final import Rules
from tunekit.measure.job import OUT_OF_MEMORY, RunJob
from tunekit.measure.verify import Verifier
from tunekit.model import Values, to_json
from tunekit.spec import load_spec
from tunekit.trials import Outcome, Stage, Status

Result = TypeVar("Result")


class DeviceLost(Exception):
    """The process's device context is broken; `outcome` says by whom."""

    def __init__(self, id: str, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.id, self.outcome = id, outcome


class Unfit(Exception):
    """A finalist failed and the device is well: the final must be held again without it."""

    def __init__(self, id: str, outcome: Outcome) -> None:
        super().__init__(outcome.reason)
        self.id, self.outcome = id, outcome


class Reporter:
    """Writes messages to the parent and remembers the phase, whose it is and how long each took."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.phase = "start"
        self.variant = ""
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def __call__(self, phase: str, variant: str, doing: str) -> None:
        self._count()
        self.phase, self.variant = phase, variant
        self.send({"phase": phase, "variant": variant, "doing": doing})

    def _count(self) -> None:
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self._since = now

    def restart(self) -> None:
        """Begin to count the phases' seconds anew."""
        self.phase, self._seconds, self._since = "prepare", {}, time.monotonic()

    def seconds(self) -> Values:
        """The seconds spent in each phase since `restart`."""
        self._count()
        return Values(self._seconds)

    def send(self, message: Mapping[str, Any]) -> None:
        data = (json.dumps(message, allow_nan=False) + "\n").encode()
        while data:
            data = data[os.write(self._handle, data) :]


class Worker:
    """Answers requests on one device."""

    def __init__(self, device: Device, run_limit_s: float, report: Reporter) -> None:
        self._device, self._report = device, report
        self._verifier = Verifier(device)
        self._bench = Bench(device, self._verifier.oracle, run_limit_s, report)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request; ``lost`` in it means that this process must be replaced."""
        self._report.restart()
        jobs = [RunJob.from_payload(payload) for payload in request["jobs"]]
        self._report("prepare", jobs[0].variant.id, "device check")
        fault = self._device.fault()
        if fault:
            return {"stale": fault, "lost": True}
        try:
            return {"outcomes": to_json(self._outcomes(request, jobs))}
        except DeviceLost as lost:
            return {"outcomes": {lost.id: to_json(lost.outcome)}, "lost": True}
        except Unfit as unfit:
            return {"outcomes": {unfit.id: to_json(unfit.outcome)}, "again": True}
        except UserError as error:
            field, message = getattr(error, "field", None), getattr(error, "message", str(error))
            return {"error": {"message": message, "field": field, "where": getattr(error, "where", None)}}

    def _outcomes(self, request: Mapping[str, Any], jobs: list[RunJob]) -> dict[str, Outcome]:
        if request["kind"] == "final":
            return self._final(request, jobs)
        (job,) = jobs
        stage = Stage.VERIFY if request["kind"] == "verify" else Stage.MEASURE
        outcome = self._guarded({job.variant.id: job}, stage, lambda: self._one(request, job))
        if not isinstance(outcome, Outcome):
            _, outcome = outcome
        outcome = dataclasses.replace(outcome, seconds=self._report.seconds().merged(outcome.seconds))
        self._report("check", job.variant.id, "device check")
        fault = self._device.fault() if outcome.ok else None  # a failure has been followed by a check already
        if fault:  # it surfaced late, but before any other variant ran
            raise DeviceLost(job.variant.id, Outcome(stage, Status.DEVICE_FAULT, f"after its last run: {fault}"))
        return {job.variant.id: outcome}

    def _one(self, request: Mapping[str, Any], job: RunJob) -> Outcome:
        loaded = self._load(job)
        if request["kind"] == "time":
            return self._bench.time(loaded, request["repetitions"], request["warmup"], request["cache"])
        id = job.variant.id
        return self._verifier.verify(
            job.spec,
            loaded.spec,
            job.variant,
            loaded.job.problem,
            loaded.function,
            request["seeds"],
            request["edges"],
            lambda phase, doing: self._report(phase, id, doing),
        )

    def _final(self, request: Mapping[str, Any], jobs: list[RunJob]) -> dict[str, Outcome]:
        fields = request["rules"]
        rules = Rules(**{**fields, "protected": tuple(fields["protected"])})

        def action() -> dict[str, Outcome]:
            return self._bench.final([self._load(job) for job in jobs], rules)

        result = self._guarded({job.variant.id: job for job in jobs}, Stage.MEASURE, action)
        if isinstance(result, tuple):
            raise Unfit(*result)
        return result

    def _load(self, job: RunJob) -> Loaded:
        self._report("prepare", job.variant.id, "loading")
        spec = load_spec(job.spec)
        job = dataclasses.replace(job, problem=spec.problem(job.problem))  # so that its text is short again
        return Loaded(job, spec, load_artifact(Path(job.so), job.symbol, spec))

    def _guarded(
        self, jobs: Mapping[str, RunJob], stage: Stage, action: Callable[[], Result]
    ) -> Result | tuple[str, Outcome]:
        """`action`'s result; or, where it raised, the variant that it was busy with and what that says about it.

        Raises:
            DeviceLost: the device can't be used any more.
            UserError: the spec's own functions are at fault.
        """
        try:
            return action()
        except UserError:
            raise
        except WrongInFinal as wrong:
            return wrong.id, Outcome(stage, Status.WRONG_RESULT, str(wrong))
        except (Exception, SystemExit) as error:
            # The child's edge: a launch raises whatever its compiled host code or CUDA says, and an oracle may exit.
            caught = error
        id = self._report.variant
        return id, self._failure(jobs[id], stage, caught)

    def _failure(self, job: RunJob, stage: Stage, error: BaseException) -> Outcome:
        phase, words = self._report.phase, f"{type(error).__name__}: {first_line(error)}"
        memory = is_out_of_memory(error)
        for link in (error, error.__context__, error.__cause__):
            if link is not None:
                link.__traceback__ = None  # its frames hold the variant's tensors
        self._report("check", job.variant.id, "device check")
        fault = self._device.fault()
        if fault:
            reason = f"{words} (in {phase})" if fault in words else f"{words} (in {phase}), then {fault}"
            raise DeviceLost(job.variant.id, Outcome(stage, Status.DEVICE_FAULT, reason))
        if memory:
            left = self._device.memory_words()
            reason = f"out of memory: {words}" + (f" ({left} now)" if left else "")
            return Outcome(stage, Status.LAUNCH_ERROR, reason, facts=Values({OUT_OF_MEMORY: True}))
        if phase == "prepare" and not isinstance(error, TunekitError):
            raise SpecError(f"inputs or reference failed for {job.problem}: {words}", field="reference")
        return Outcome(stage, Status.LAUNCH_ERROR, words)


def settle_native_errors() -> None:
    """Make the first error of a kernel's host code as cheap as the later ones, and a crash end at once.

    tvm_ffi reads the debug information of every loaded library when it first raises: 0.6 s
    with the CPU build of torch, enough to turn a refused launch into a timeout. Its handler
    of SIGSEGV does so too, from inside the signal.
    """
    with contextlib.suppress(TunekitError):
        load_artifact(Path("/nonexistent/kernel.so"), "none")
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)


def serve(place: str, run_limit_s: float, pipe: int) -> None:
    """Answer requests on device `place` (an index, or ``host``) until stdin ends; replies go into `pipe`."""
    report = Reporter(pipe)
    os.dup2(2, 1)
    try:
        device = Device(None if place == "host" else int(place))
    except RuntimeError as error:
        report.send({"error": {"message": f"device {place} can't be used: {first_line(error)}"}})
        return
    settle_native_errors()
    worker = Worker(device, run_limit_s, report)
    report.send({"ready": os.getpid()})
    for line in sys.stdin:
        reply = worker.answer(json.loads(line))
        report.send({"reply": reply})
        if reply.get("lost"):
            os._exit(0)  # a broken context can hang in its own clean-up
