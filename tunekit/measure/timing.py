"""Methods to time calls: CUDA events, CUDA-graph replay, and the host's clock. Part of the device half.

Nothing but calls of the kernel lies inside a timed region: artifacts are loaded,
arguments allocated and the first call made before.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tunekit.measure.device import Device
from tunekit.measure.gpu_state import GpuState
from tunekit.measure.protocol import Cache, Method

Call = Callable[[], None]
ReadState = Callable[[], GpuState]

# Caches don't replace strictly by age: with random replacement, exp(-k) of the old
# lines survive k cache sizes of other traffic; 4 leaves 2 %.
COLD_CACHES = 4
MAX_COPIES = 32
GRAPH_LIMIT_US = 500.0  # longer kernels hide the host's launch time by themselves
WINDOW_US = 5000.0
FLUSH_US = 100.0  # a flush takes less; only the sizes of batches depend on it
# A flush takes this long at least; the host's next call may take longer than its last by the slack.
LEAST_FLUSH_US = 40.0
HOST_SLACK = 1.5
MOST_FLUSHES = 50
MAX_CALLS = 1024
# A flush takes ten times as long as a short kernel, so its own scatter is a multiple of the kernel's: such kernels get
# more calls a window, and a flush's time is the median of the last windows', whichever finalist's they were. (The
# windows of H200 finals of 2026-11-30, 48 calls less their own flushes, scattered by 4 % at 4.5 us, 1.3 % at 7.6 us,
# 0.2 to 0.5 % from 10 us on; how much of that was the flush's has not been measured.)
FLUSHED_US = 1000.0
MAX_FLUSHED_CALLS = 256
LAST_FLUSHES = 9
HOST_SAMPLE_US = 20.0
# How often what a method adds by itself is measured, and over how many empty calls.
OVERHEAD_READINGS = 15
EMPTY_CALLS = 64


@dataclass(frozen=True)
class ColdPlan:
    """How calls find the L2 cache cold: by rotating over `copies` of the arguments, or by a flush before each."""

    copies: int
    flush: bool

    @property
    def cache(self) -> Cache:
        if self.flush:
            return "flush"
        return "rotate" if self.copies > 1 else "warm"


def cold_plan(argument_bytes: int, l2_bytes: int, cache: Cache, most_copies: int = MAX_COPIES) -> ColdPlan:
    """What `cache` asks for; a flush where rotating would take more copies than there may be.

    Rotation: copies that fill the cache 4 times between two uses. `most_copies` is what the memory allows.
    """
    if cache == "warm" or not l2_bytes:
        return ColdPlan(copies=1, flush=False)
    copies = max(2, math.ceil(COLD_CACHES * l2_bytes / max(1, argument_bytes)) + 1)
    if cache == "flush" or copies > min(MAX_COPIES, most_copies):
        return ColdPlan(copies=1, flush=True)
    return ColdPlan(copies, flush=False)


def calls_per_window(estimate_us: float, plan: ColdPlan, run_limit_s: float) -> int:
    """How many calls fill a window of 5 ms, or make up 1 ms between flushes: whole rounds over the copies, and a
    quarter of the run limit at most."""
    each_us = max(estimate_us, 0.1) + (FLUSH_US if plan.flush else 0.0)
    limit_us = run_limit_s * 1e6 / 4
    wanted = WINDOW_US / each_us
    if plan.flush:
        wanted = max(wanted, min(FLUSHED_US / max(estimate_us, 0.1), MAX_FLUSHED_CALLS))
    wanted = min(wanted, limit_us / each_us)
    whole = max(1, round(wanted / plan.copies)) * plan.copies
    return max(1, min(whole, int(limit_us / each_us), MAX_CALLS))


class Window(Protocol):
    """A prepared batch of calls that can be timed again and again."""

    def take(self, read: ReadState) -> tuple[float, GpuState]:
        """Microseconds a call, and the device's state while the calls ran."""


class Timer(Protocol):
    """Times calls on one device."""

    def added_us(self, method: Method) -> float:
        """What the method adds: to each call, by ``cuda_graph`` to each graph. It is taken off every time here."""

    def estimate_us(self, call: Call) -> float:
        """The time of one call, roughly."""

    def samples(self, call: Call, repetitions: int) -> list[float]:
        """Cheap: the time of each of `repetitions` calls."""

    def window(self, calls: Sequence[Call], count: int, flush: bool, method: Method) -> Window:
        """A window of `count` calls, in turn from `calls`."""


def timer(device: Device, cold: bool) -> Timer:
    return CudaTimer(device, cold) if device.is_gpu else HostTimer()


# --- the CUDA half ----------------------------------------------------------------------


class CudaTimer:
    """Times on the GPU's own clock."""

    def __init__(self, device: Device, cold: bool) -> None:
        self._cold = cold
        # Flushing reads: written lines would have to be written back during the timed call.
        columns = 4096
        rows = max(1, COLD_CACHES * device.l2_bytes // (4 * columns))
        self._filler = torch.ones(rows, columns, dtype=torch.float32, device=device.torch)
        self._sums = torch.empty(rows, dtype=torch.float32, device=device.torch)
        self.flush()  # its first call loads the kernel, which a graph capture forbids
        torch.cuda.synchronize()
        self._added_us: dict[Method, float] = {"events": self._bare_pair_us()}
        self._flushes_us: deque[float] = deque(maxlen=LAST_FLUSHES)

    def flush_us(self, taken_us: float) -> float:
        """What a flush takes lately, after one more reading of it."""
        self._flushes_us.append(taken_us)
        return statistics.median(self._flushes_us)

    def added_us(self, method: Method) -> float:
        if method not in self._added_us:
            self._added_us[method] = self._graph_start_us()
        return self._added_us[method]

    def _bare_pair_us(self) -> float:
        """The time between two events with nothing in between, on a busy stream."""
        return self._between_events_us(lambda: None)

    def _graph_start_us(self) -> float:
        """What starting a graph takes, whatever is in it: one node's graph, less a node of a graph of many."""
        tick = torch.zeros(1, device=self._sums.device)
        tick.add_(1)  # its first call loads the kernel
        torch.cuda.synchronize()

        def empty() -> None:
            tick.add_(1)

        one, many = (self._between_events_us(_capture([empty] * count).replay) for count in (1, 1 + EMPTY_CALLS))
        return max(0.0, one - (many - one) / EMPTY_CALLS)

    def _between_events_us(self, work: Call) -> float:
        pairs = [_pair() for _ in range(OVERHEAD_READINGS)]
        for begin, end in pairs:
            self.flush()
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return _median_us(pairs)

    def flush(self) -> None:
        """Read 4 L2 sizes of other memory: about 60 us on an H200."""
        torch.sum(self._filler, dim=1, out=self._sums)

    def estimate_us(self, call: Call) -> float:
        return self.samples(call, 1)[0]

    def samples(self, call: Call, repetitions: int) -> list[float]:
        pairs = [_pair() for _ in range(repetitions)]
        flushes = self._flushes_to_enqueue(call)
        for begin, end in pairs:
            for _ in range(flushes):
                self.flush()
            if not self._cold:
                call()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [1000 * begin.elapsed_time(end) - self.added_us("events") for begin, end in pairs]

    def _flushes_to_enqueue(self, call: Call) -> int:
        """How many flushes keep the GPU busy until the host has enqueued a call: one, or more for a library's.

        What the GPU waits for the host would count as the call's time. (flash-attn-4's decode of 16 us, whose Python
        takes 80 us, was timed at 26 us after one flush, and so never raced. H200, 2026-11-30.)
        """
        enqueuing = min(_loop_us([call]) for _ in range(2))  # the first may load a module
        torch.cuda.synchronize()
        return max(1, min(MOST_FLUSHES, math.ceil(HOST_SLACK * enqueuing / LEAST_FLUSH_US)))

    def window(self, calls: Sequence[Call], count: int, flush: bool, method: Method) -> Window:
        if method == "cuda_graph":
            return _GraphWindow(self, calls, count, flush)
        return _EventsWindow(self, calls, count, flush)


class _GraphWindow:
    """`count` calls in one CUDA graph, less what starting it takes; where flushes lie between the calls, less
    what a flush takes in graphs of flushes alone, lately."""

    def __init__(self, timer: CudaTimer, calls: Sequence[Call], count: int, flush: bool) -> None:
        self._timer, self._count = timer, count
        in_turn = [calls[i % len(calls)] for i in range(count)]
        if flush:
            self._graph = _capture([call for timed in in_turn for call in (timer.flush, timed)])
            self._flushes: torch.cuda.CUDAGraph | None = _capture([timer.flush] * count)
        else:
            self._graph, self._flushes = _capture(in_turn), None
        self._start_us = timer.added_us("cuda_graph")

    def take(self, read: ReadState) -> tuple[float, GpuState]:
        begin, end = _pair()
        self._timer.flush()  # the GPU is busy until the host has enqueued the graph
        begin.record()
        self._graph.replay()
        end.record()
        flushes = _pair()
        if self._flushes:
            self._timer.flush()
            flushes[0].record()
            self._flushes.replay()
            flushes[1].record()
        state = read()
        torch.cuda.synchronize()
        state = state.joined(read())
        each_us = self._each_us(begin, end)
        if self._flushes:
            each_us -= self._timer.flush_us(self._each_us(*flushes))
        return each_us, state

    def _each_us(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return (1000 * float(begin.elapsed_time(end)) - self._start_us) / self._count


class _EventsWindow:
    """`count` calls, each between two events; what is between the calls is not timed."""

    def __init__(self, timer: CudaTimer, calls: Sequence[Call], count: int, flush: bool) -> None:
        self._timer, self._flush = timer, flush
        self._calls = [calls[i % len(calls)] for i in range(count)]

    def take(self, read: ReadState) -> tuple[float, GpuState]:
        pairs = [_pair() for _ in self._calls]
        self._timer.flush()
        for call, (begin, end) in zip(self._calls, pairs, strict=True):
            if self._flush:
                self._timer.flush()
            begin.record()
            call()
            end.record()
        state = read()
        torch.cuda.synchronize()
        state = state.joined(read())
        return _median_us(pairs) - self._timer.added_us("events"), state


def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return begin, end


def _median_us(pairs: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    return 1000 * statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs)


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A graph of `calls`, one after another."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: NVML and other threads may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


# --- the host half ----------------------------------------------------------------------


class HostTimer:
    """Times with the host's monotonic clock; a sample is the mean over enough calls to outlast the clock's step."""

    def __init__(self) -> None:
        empty = [lambda: None] * EMPTY_CALLS
        self._added_us = statistics.median(_loop_us(empty) for _ in range(OVERHEAD_READINGS)) / EMPTY_CALLS

    def added_us(self, method: Method) -> float:
        return self._added_us

    def estimate_us(self, call: Call) -> float:
        return max(_loop_us([call]), 0.1)

    def samples(self, call: Call, repetitions: int) -> list[float]:
        count = max(1, min(MAX_CALLS, int(HOST_SAMPLE_US / self.estimate_us(call))))
        window = _HostWindow(self, [call], count)
        return [window.take(GpuState)[0] for _ in range(repetitions)]

    def window(self, calls: Sequence[Call], count: int, flush: bool, method: Method) -> Window:
        return _HostWindow(self, calls, count)


class _HostWindow:
    def __init__(self, timer: HostTimer, calls: Sequence[Call], count: int) -> None:
        self._timer = timer
        self._calls = [calls[i % len(calls)] for i in range(count)]

    def take(self, read: ReadState) -> tuple[float, GpuState]:
        collecting = gc.isenabled()
        gc.disable()
        try:
            elapsed_us = _loop_us(self._calls)
        finally:
            if collecting:
                gc.enable()
        return elapsed_us / len(self._calls) - self._timer.added_us("perf_counter"), read()


def _loop_us(calls: Sequence[Call]) -> float:
    """The time of all calls, one after another."""
    begin = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - begin)
