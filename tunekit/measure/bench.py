"""Timing loaded variants: the cheap search timing, and the careful final. Part of the device half."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunekit.environment import environment
from tunekit.measure.device import Device, first_line
from tunekit.measure.final import Rules, Taken, heat, race, rejections
from tunekit.measure.gpu_state import GpuMonitor, GpuState
from tunekit.measure.inputs import Arguments
from tunekit.measure.job import RunJob, first_phase
from tunekit.measure.protocol import Cache, Method, Stage, clocks_word, protocol
from tunekit.measure.sequential import judge
from tunekit.measure.statistics import usable
from tunekit.measure.timing import (
    FLUSH_US,
    GRAPH_LIMIT_US,
    MAX_COPIES,
    Call,
    ColdPlan,
    Timer,
    Window,
    calls_per_window,
    cold_plan,
    timer,
)
from tunekit.measure.verify import Case, Oracle, wrong_outputs
from tunekit.model import Values, Variant
from tunekit.spec import KernelSpec
from tunekit.spec.inputs import draw
from tunekit.trials import Outcome, Status
from tunekit.trials import Stage as PipelineStage

COPY_GUARD_BYTES = 256

# All finalists' argument copies lie in memory at once; the rest is for inputs, flushes and checks.
FINAL_MEMORY_SHARE = 0.6

# Called with the phase, the variant's id and what is being done, in words.
Report = Callable[[str, str, str], None]


@dataclass(frozen=True)
class Loaded:
    """A job whose spec and artifact are loaded."""

    job: RunJob
    spec: KernelSpec
    function: Callable[..., Any]

    @property
    def id(self) -> str:
        return self.job.variant.id


class WrongInFinal(Exception):
    """A finalist's results were wrong after calls in quick succession."""

    def __init__(self, id: str, wrong: str) -> None:
        super().__init__(f"in the final, {wrong}")
        self.id = id


class Bench:
    """Times variants on one device, under its run limit a launch or window."""

    def __init__(self, device: Device, oracle: Oracle, run_limit_s: float, report: Report) -> None:
        self._device, self._oracle = device, oracle
        self._run_limit_s, self._report = run_limit_s, report
        self._monitor = GpuMonitor(device.index)
        self._timers: dict[bool, Timer] = {}

    def time(self, loaded: Loaded, repetitions: int, warmup: int, cache: Cache) -> Outcome:
        """`repetitions` samples after one untimed first call and `warmup` more; cold ones after a flush each."""
        begin = time.monotonic()
        method: Method = "events" if self._device.is_gpu else "perf_counter"
        cold = cache != "warm"
        clock = self._timer(cold)
        self._report("prepare", loaded.id, "arguments")
        inputs = draw(loaded.spec, loaded.job.problem, 0, self._device.torch)
        arguments = self._arguments(loaded, inputs)
        call = self._first_calls(loaded, [arguments])[0]
        self._report("run", loaded.id, "estimate")
        estimate_us = clock.estimate_us(call)
        batch = max(1, int(self._run_limit_s * 1e6 / 4 / (estimate_us + FLUSH_US)))
        samples: list[float] = []
        for count, timed in [(warmup, False), (repetitions, True)]:
            for done in range(0, count, batch):
                self._report("run", loaded.id, f"timing, {min(batch, count - done)} calls")
                taken = clock.samples(call, min(batch, count - done))
                samples += taken if timed else []
        state = self._monitor.read()
        return self._outcome(
            samples=[sample for sample in samples if usable(sample)],
            why_not=f"none of {len(samples)} samples is a time",
            seconds=Values(measure=time.monotonic() - begin),
            protocol=self._protocol("search", method, loaded.spec, "flush" if cold else "warm"),
            windows=(state.values(),) if state.values() else (),
            facts=Values(
                dropped_samples=sum(not usable(sample) for sample in samples), host_us=round(clock.added_us(method), 3)
            ),
        )

    def final(self, finalists: Sequence[Loaded], rules: Rules) -> dict[str, Outcome]:
        """Every finalist's samples, one a round, after heating up; and one more window whose results are checked.

        It goes on until the finalists are told apart, or the rounds or seconds of `rules` are spent; a clear loser
        is dropped before.

        Raises:
            WrongInFinal: a finalist's results were wrong; the others' windows are void.
        """
        begin = time.monotonic()
        racers, not_captured = self._racers(finalists, rules.cache)
        heat_s = heat(racers)

        def decide(samples: Mapping[str, Sequence[float]]) -> Collection[str]:
            judged = judge(samples, protected=rules.protected, margin=rules.margin, confidence=rules.confidence)
            left = () if judged.decided else judged.racing
            self._report("check", judged.leader, f"round {judged.rounds}: {len(left)} of {len(racers)} race on")
            return left

        windows = race(racers, rules.rounds, decide, max_s=rules.seconds)
        outcomes: dict[str, Outcome] = {}
        for racer in racers:
            wrong = racer.check(self._oracle)
            if wrong:
                raise WrongInFinal(racer.id, wrong)
            own = [window for window in windows if window.id == racer.id]
            outcome = self._of_windows(racer, own, windows, heat_s, time.monotonic() - begin)
            if not_captured:
                outcome = dataclasses.replace(outcome, facts=outcome.facts.merged({"not_captured": not_captured}))
            outcomes[racer.id] = outcome
        return outcomes

    def _of_windows(
        self, racer: Racer, own: list[Taken], all_windows: list[Taken], heat_s: float, wall_s: float
    ) -> Outcome:
        timeless = any(not usable(window.us) for window in own)
        return self._outcome(
            samples=[window.us for window in own if not window.rejected],
            why_not=f"no complete round: {rejections(own if timeless else all_windows)}",
            seconds=Values(measure=wall_s, heat=heat_s),
            protocol=self._protocol("final", racer.method, racer.loaded.spec, racer.plan.cache),
            windows=tuple(window.values() for window in own),
            facts=Values(
                calls_per_window=racer.count,
                argument_copies=racer.plan.copies,
                flushed=racer.plan.flush,
                host_us=round(racer.added_us, 3),
                rejected_windows=sum(bool(window.rejected) for window in own),
            ),
        )

    def _outcome(
        self,
        samples: list[float],
        why_not: str,
        seconds: Values,
        protocol: str,
        windows: tuple[Values, ...],
        facts: Values,
    ) -> Outcome:
        # No sample at all is the device's doing: a variant that fails has said so before.
        status, reason = (Status.OK, "") if samples else (Status.DEVICE_FAULT, why_not)
        return Outcome(
            PipelineStage.MEASURE,
            status,
            reason,
            seconds=seconds,
            facts=facts,
            samples_us=tuple(samples),
            protocol=protocol,
            windows=windows,
        )

    def _racers(self, finalists: Sequence[Loaded], cache: Cache) -> tuple[list[Racer], str]:
        """The finalists with private argument copies, first calls made; one method and one plan's kind for all.

        The second value says whose calls no CUDA graph can hold, so that events time all; else it is empty.
        """
        clock = self._timer(cache != "warm")
        free = self._device.free_bytes()
        share = None if free is None else int(FINAL_MEMORY_SHARE * free / max(1, len(finalists)))
        firsts = [self._first_arguments(loaded) for loaded in finalists]
        plans = [self._plan(first, cache, share) for first in firsts]
        if any(plan.flush for plan in plans):  # where one can't rotate, none does: they are compared
            plans = [ColdPlan(copies=1, flush=True)] * len(plans)
        racers = [self._racer(*racer, clock) for racer in zip(finalists, firsts, plans, strict=True)]
        short = all(racer.estimate_us < GRAPH_LIMIT_US for racer in racers)
        method: Method = ("cuda_graph" if short else "events") if self._device.is_gpu else "perf_counter"
        trying: Variant | None = None
        try:
            for racer in racers:
                trying = racer.loaded.job.variant
                racer.prepare(clock, method)
        except RuntimeError as error:
            # Some launch can't be captured (it synchronises or allocates): events serve all.
            if method != "cuda_graph" or self._device.fault():
                raise
            for racer in racers:
                racer.prepare(clock, "events")
            return racers, f"{trying}: {first_line(error)}"
        return racers, ""

    def _first_arguments(self, loaded: Loaded) -> Arguments:
        self._report("prepare", loaded.id, "arguments")
        return self._arguments(loaded, draw(loaded.spec, loaded.job.problem, 0, self._device.torch))

    def _plan(self, first: Arguments, cache: Cache, share_bytes: int | None) -> ColdPlan:
        most = MAX_COPIES if share_bytes is None else share_bytes // max(1, first.nbytes)
        return cold_plan(first.nbytes, self._device.l2_bytes, cache, most)

    def _racer(self, loaded: Loaded, first: Arguments, plan: ColdPlan, clock: Timer) -> Racer:
        self._report("prepare", loaded.id, "argument copies")
        copies = [first, *(self._arguments(loaded, first.drawn) for _ in range(plan.copies - 1))]
        calls = self._first_calls(loaded, copies)
        self._report("run", loaded.id, "estimate")
        estimate_us = clock.estimate_us(calls[0])
        count = calls_per_window(estimate_us, plan, self._run_limit_s)
        return Racer(loaded, copies, calls, plan, estimate_us, count, self._device, self._monitor, self._report)

    def _arguments(self, loaded: Loaded, inputs: Mapping[str, torch.Tensor]) -> Arguments:
        """One set of arguments of its own for a variant's calls."""
        job = loaded.job
        return Arguments(loaded.spec, job.problem, inputs, self._device.torch, COPY_GUARD_BYTES, job.variant)

    def _first_calls(self, loaded: Loaded, copies: Sequence[Arguments]) -> list[Call]:
        """A call for each copy, made once: whatever loads lazily is loaded now."""
        calls = [_bind(loaded.function, arguments) for arguments in copies]
        self._device.synchronize()
        first = first_phase(loaded.spec.implementation(loaded.job.variant.implementation))
        for call in calls:
            self._report(first if call is calls[0] else "run", loaded.id, "first call")
            call()
            self._device.synchronize()
        return calls

    def _timer(self, cold: bool) -> Timer:
        if cold not in self._timers:
            self._timers[cold] = timer(self._device, cold)
        return self._timers[cold]

    def _protocol(self, stage: Stage, method: Method, spec: KernelSpec, cache: Cache) -> str:
        index = self._device.index
        clocks = "host" if index is None else clocks_word(environment(index).clocks_policy)
        return protocol(
            stage,
            method,
            cache=cache if self._device.is_gpu else "warm",
            own_inputs=spec.inputs is not None,
            clocks=clocks,
        )


def _bind(function: Callable[..., Any], arguments: Arguments) -> Call:
    values = arguments.call

    def call() -> None:
        function(*values)

    return call


class Racer:
    """A finalist: its argument copies and its window."""

    def __init__(
        self,
        loaded: Loaded,
        copies: Sequence[Arguments],
        calls: Sequence[Call],
        plan: ColdPlan,
        estimate_us: float,
        count: int,
        device: Device,
        monitor: GpuMonitor,
        report: Report,
    ) -> None:
        self.loaded, self.plan, self.estimate_us, self.count = loaded, plan, estimate_us, count
        self.method: Method = "perf_counter"
        self.added_us = 0.0
        self._copies, self._calls = copies, calls
        self._device, self._monitor, self._report = device, monitor, report
        self._window: Window | None = None

    @property
    def id(self) -> str:
        return self.loaded.id

    def prepare(self, clock: Timer, method: Method) -> None:
        """Build the window: for ``cuda_graph``, capture it."""
        self._report("run", self.id, "window")
        self.method = method
        self._window = clock.window(self._calls, self.count, self.plan.flush, method)
        self.added_us = clock.added_us(method)

    def take(self) -> tuple[float, GpuState]:
        """One window. In-place arguments begin it as they were drawn."""
        if self._window is None:
            raise RuntimeError("take() before prepare()")
        for arguments in self._copies:
            arguments.restore_in_place()
        self._device.synchronize()
        self._report("run", self.id, f"window of {self.count} calls")
        taken = self._window.take(self._monitor.read)
        self._report("check", self.id, "between windows")  # a pause before a retake is not the variant's time
        return taken

    def check(self, oracle: Oracle) -> str | None:
        """What calls in quick succession got wrong, in words: each copy is poisoned, run in a window and compared.

        In-place arguments have been updated many times by then: a spec that has any is not checked.
        """
        spec, problem = self.loaded.spec, self.loaded.job.problem
        arguments = self._copies[0]
        if any(guarded.argument.role == "inout" for guarded in arguments.guarded.values()):
            return None
        for copy in self._copies:
            copy.reset(1)
        self.take()
        self._report("check", self.id, "the results of the last window")
        wanted = oracle.outputs(self.loaded.job.spec, spec, Case(problem, 0), arguments.drawn)
        for copy in self._copies[: self.count]:
            wrong = copy.damage() or wrong_outputs(spec, problem, copy, wanted, 1)
            if wrong:
                return wrong
        return None
