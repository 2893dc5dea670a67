"""Methods to time calls: CUDA events, CUDA-graph replay, and the host's clock. Part of the device half.

Nothing but calls of the kernel lies inside a timed region: artifacts are loaded,
arguments allocated and the first call made before.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tunekit.measure.device import Device
from tunekit.measure.gpu_state import GpuState
from tunekit.measure.protocol import Method

Call = Callable[[], None]
ReadState = Callable[[], GpuState]

# Caches don't replace strictly by age: with random replacement, exp(-k) of the old
# lines survive k cache sizes of other traffic; 4 leaves 2 %.
COLD_CACHES = 4
MAX_COPIES = 32
GRAPH_LIMIT_US = 500.0  # longer kernels hide the host's launch time by themselves
WINDOW_US = 5000.0
FLUSH_US = 100.0  # a flush takes less; only the sizes of batches depend on it
MAX_CALLS = 1024
HOST_SAMPLE_US = 20.0


@dataclass(frozen=True)
class ColdPlan:
    """How calls find the L2 cache cold: by rotating over `copies` of the arguments, or by a flush before each."""

    copies: int
    flush: bool


def cold_plan(argument_bytes: int, l2_bytes: int, cold: bool, most_copies: int = MAX_COPIES) -> ColdPlan:
    """Rotation where few enough copies make the arguments fill the cache 4 times between two uses; else a flush.

    Both leave as little behind; rotation has nothing to subtract, so less noise.
    `most_copies` is what the memory allows.
    """
    if not cold or not l2_bytes:
        return ColdPlan(copies=1, flush=False)
    copies = max(2, math.ceil(COLD_CACHES * l2_bytes / max(1, argument_bytes)) + 1)
    if copies <= min(MAX_COPIES, most_copies):
        return ColdPlan(copies, flush=False)
    return ColdPlan(copies=max(1, min(2, most_copies)), flush=True)


def calls_per_window(estimate_us: float, plan: ColdPlan, run_limit_s: float) -> int:
    """How many calls fill a window of 5 ms: whole rounds over the copies, and a quarter of the run limit at most."""
    each_us = max(estimate_us, 0.1) + (FLUSH_US if plan.flush else 0.0)
    limit_us = run_limit_s * 1e6 / 4
    wanted = min(WINDOW_US, limit_us) / each_us
    whole = max(1, round(wanted / plan.copies)) * plan.copies
    return max(1, min(whole, int(limit_us / each_us), MAX_CALLS))


class Window(Protocol):
    """A prepared batch of calls that can be timed again and again."""

    def take(self, read: ReadState) -> tuple[float, GpuState]:
        """Microseconds a call, and the device's state while the calls ran."""


class Timer(Protocol):
    """Times calls on one device."""

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

    def flush(self) -> None:
        """Read 4 L2 sizes of other memory: about 60 us on an H200."""
        torch.sum(self._filler, dim=1, out=self._sums)

    def estimate_us(self, call: Call) -> float:
        return self.samples(call, 1)[0]

    def samples(self, call: Call, repetitions: int) -> list[float]:
        pairs = [_pair() for _ in range(repetitions)]
        for begin, end in pairs:
            self.flush()  # also keeps the GPU busy while the host enqueues the call
            if not self._cold:
                call()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [1000 * begin.elapsed_time(end) for begin, end in pairs]

    def window(self, calls: Sequence[Call], count: int, flush: bool, method: Method) -> Window:
        if method == "cuda_graph":
            return _GraphWindow(self, calls, count, flush)
        return _EventsWindow(self, calls, count, flush)


class _GraphWindow:
    """`count` calls in one CUDA graph; where flushes lie between them, a graph of the flushes alone is subtracted."""

    def __init__(self, timer: CudaTimer, calls: Sequence[Call], count: int, flush: bool) -> None:
        self._timer, self._count = timer, count
        in_turn = [calls[i % len(calls)] for i in range(count)]
        if flush:
            self._graph = _capture([call for timed in in_turn for call in (timer.flush, timed)])
            self._flushes: torch.cuda.CUDAGraph | None = _capture([timer.flush] * count)
        else:
            self._graph, self._flushes = _capture(in_turn), None

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
        elapsed_ms = begin.elapsed_time(end)
        if self._flushes:
            elapsed_ms -= flushes[0].elapsed_time(flushes[1])
        return 1000 * elapsed_ms / self._count, state


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
        return 1000 * statistics.median(begin.elapsed_time(end) for begin, end in pairs), state


def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return begin, end


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

    def estimate_us(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return max(1e6 * (time.perf_counter() - begin), 0.1)

    def samples(self, call: Call, repetitions: int) -> list[float]:
        count = max(1, min(MAX_CALLS, int(HOST_SAMPLE_US / self.estimate_us(call))))
        window = _HostWindow([call], count)
        return [window.take(GpuState)[0] for _ in range(repetitions)]

    def window(self, calls: Sequence[Call], count: int, flush: bool, method: Method) -> Window:
        return _HostWindow(calls, count)


class _HostWindow:
    def __init__(self, calls: Sequence[Call], count: int) -> None:
        self._calls = [calls[i % len(calls)] for i in range(count)]

    def take(self, read: ReadState) -> tuple[float, GpuState]:
        collecting = gc.isenabled()
        gc.disable()
        try:
            begin = time.perf_counter()
            for call in self._calls:
                call()
            elapsed_s = time.perf_counter() - begin
        finally:
            if collecting:
                gc.enable()
        return 1e6 * elapsed_s / len(self._calls), read()
