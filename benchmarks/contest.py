"""Contestants that compute the same thing, timed in turns on this GPU. Part of benchmarks/attention.py.

Each is called once and checked, called in a plain Python loop for the host's time, and captured in a CUDA graph whose
calls lie between flushes of the L2; then all take turns for an even number of rounds, the order reversed every other
round, as in the final of a sweep. One that refuses has its reason for a row. One that breaks the process's context, or
hangs, costs that process: `rounds_of` starts another one, which leaves it out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tunekit.errors import TunekitError
from tunekit.measure.device import Device, first_line
from tunekit.measure.final import heat, race
from tunekit.measure.gpu_state import GpuMonitor, GpuState
from tunekit.measure.protocol import Method
from tunekit.measure.statistics import spread
from tunekit.measure.timing import ColdPlan, CudaTimer, Window, calls_per_window

Call = Callable[[], Any]
Row = dict[str, Any]
# What a call may raise by way of saying no; AssertionError is flash-attn-4's.
REFUSALS = (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError, TunekitError)
RUN_LIMIT_S = 20.0
HEAT_S = 1.0
HOST_CALLS, HOST_LIMIT_US = 40, 20_000.0
SILENCE_S = 240.0
"""A process that says nothing for so long hangs; compiling one contestant takes tens of seconds."""
FAULTS = 3
"""Contestants that one problem may lose to faults before it is given up."""


class Fault(Exception):
    """A contestant broke the context of this process."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Racer:
    """A contestant that is ready to be timed; what tunekit.measure.final calls one."""

    id: str
    window: Window
    read: Callable[[], GpuState]

    def take(self) -> tuple[float, GpuState]:
        try:
            return self.window.take(self.read)
        except RuntimeError as error:
            raise Fault(self.id, first_line(error)) from error


@dataclass
class Contest:
    """One problem's contestants. `say` hears the name of each before anything of it runs."""

    say: Callable[[str], None]
    timer: CudaTimer = field(default_factory=lambda: CudaTimer(Device(0), cold=True))
    monitor: GpuMonitor = field(default_factory=lambda: GpuMonitor(0))

    def rows(
        self,
        calls: Mapping[str, Call],
        check: Callable[[str, Any], Row],
        rounds: int,
        without: Mapping[str, str],
    ) -> dict[str, Row]:
        """A row for each name. `check` makes its beginning of what a call returned; `without` are left out, and why.

        Raises:
            Fault: a contestant broke the context; nothing more can be timed in this process.
        """
        rows: dict[str, Row] = {}
        racers: list[Racer] = []
        for name, call in calls.items():
            if name in without:
                rows[name] = {"refused": without[name]}
                continue
            self.say(name)
            rows[name], window = self._prepared(name, call, check)
            if window is not None:
                racers.append(Racer(name, window, self.monitor.read))
        self.say("")  # whose fault a hang is while they take turns, nobody can say
        heat(racers, max_s=HEAT_S)
        taken = race(racers, rounds)
        for racer in racers:
            own = [window for window in taken if window.id == racer.id]
            samples = [window.us for window in own if not window.rejected]
            rows[racer.id] |= {"samples_us": samples, "rejected_windows": len(own) - len(samples)}
            if samples:
                rows[racer.id] |= {"median_us": statistics.median(samples), "spread_us": spread(samples)}
        return rows

    def _prepared(self, name: str, call: Call, check: Callable[[str, Any], Row]) -> tuple[Row, Window | None]:
        try:
            out = call()
            torch.cuda.synchronize()
            row = check(name, out)
            estimate_us = self.timer.estimate_us(call)
            row["host_us"] = host_us(call, estimate_us)
            count = calls_per_window(estimate_us, ColdPlan(copies=1, flush=True), RUN_LIMIT_S)
            window, row["method"] = self._window(call, count)
            window.take(self.monitor.read)
            return row, window
        except REFUSALS as refusal:
            words = first_line(refusal)[:160] or type(refusal).__name__
            if is_broken():
                raise Fault(name, words) from refusal
            return {"refused": words}, None

    def _window(self, call: Call, count: int) -> tuple[Window, Method]:
        """Graph replay; events where no graph can hold the call."""
        warm_capture_stream(call)
        try:
            return self.timer.window([call], count, True, "cuda_graph"), "cuda_graph"
        except RuntimeError:
            if is_broken():
                raise
            return self.timer.window([call], count, True, "events"), "events"


def is_broken() -> bool:
    """Whether the context takes no more work."""
    try:
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def warm_capture_stream(call: Call) -> None:
    """Call once on the stream that graphs are captured on: cuBLAS keeps a workspace a stream, which must not lie in
    the memory of the first graph that needs it."""
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    stream = torch.cuda.graph.default_capture_stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()


def host_us(call: Call, estimate_us: float) -> float:
    """Microseconds a call in a loop that waits once, at its end: the host's or the kernel's, whichever is longer."""
    calls = max(3, min(HOST_CALLS, int(HOST_LIMIT_US / max(estimate_us, 1.0))))
    best = math.inf
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    return best


# --- the processes ------------------------------------------------------------------------


@dataclass
class Todo:
    """A problem of a table, and the contestants that it has lost, each with the reason."""

    table: str
    given: dict[str, Any]
    without: dict[str, str] = field(default_factory=dict)


def serve(text: str, compare: Callable[[Todo, Callable[[str], None]], Row]) -> None:
    """The measuring process: each problem of `text` in turn, a JSON object a line to stdout."""

    def tell(message: Row) -> None:
        print(json.dumps(message), flush=True)

    for one in json.loads(text):
        try:
            tell({"result": compare(Todo(**one), lambda name: tell({"begin": name}))})
        except Fault as fault:
            tell({"fault": fault.name, "reason": fault.reason})
            os._exit(1)  # a broken context can hang in its own clean-up


def rounds_of(command: Sequence[str], todo: Sequence[Todo], silence_s: float = SILENCE_S) -> Iterator[tuple[Todo, Row]]:
    """Each problem with its result, or with {"failed": reason}, as they come. `command` and what is left as JSON start
    the measuring process."""
    left = list(todo)
    while left:
        begun, reason = "", ""
        for message in _messages([*command, json.dumps([dataclasses.asdict(one) for one in left])], silence_s):
            if "result" in message:
                yield left.pop(0), message["result"]
                begun = reason = ""
            elif "begin" in message:
                begun = message["begin"]
            else:
                begun, reason = message.get("fault", begun), reason or message["reason"]
        if left:
            one = left[0]
            if begun and begun not in one.without and len(one.without) < FAULTS:
                one.without[begun] = f"faulted: {reason or 'its process ended'}"
            else:
                yield left.pop(0), {"failed": reason or "its process ended"}


def _messages(command: Sequence[str], silence_s: float) -> Iterator[Row]:
    """What a process says, a JSON object a line; at the end {"reason": ...} if it failed, or said nothing for long."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        silent = threading.Event()

        def end() -> None:
            silent.set()
            child.kill()

        while True:
            watch = threading.Timer(silence_s, end)
            watch.daemon = True  # one that an interrupt leaves behind must not keep this process
            watch.start()
            line = child.stdout.readline()
            watch.cancel()
            if not line:
                break
            if line.startswith("{"):
                yield json.loads(line)
        if child.wait():
            errors.seek(0)
            words = errors.read().strip().splitlines() or [f"exit status {child.returncode}"]
            sys.stderr.write("\n".join(words[-20:]) + "\n")
            yield {"reason": f"nothing for {silence_s:g} s" if silent.is_set() else words[-1][:200]}
