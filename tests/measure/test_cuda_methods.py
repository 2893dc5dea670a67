"""The CUDA half's arithmetic and its order of work, on a simulated stream: no GPU."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")

from tunekit.measure.device import Device  # noqa: E402
from tunekit.measure.gpu_state import GpuState  # noqa: E402
from tunekit.measure.timing import CudaTimer  # noqa: E402

FLUSH_US, GAP_US = 60.0, 1.0


class Stream:
    """A GPU's clock that work moves on; while `recording` is a list, work is captured in it instead."""

    def __init__(self):
        self.now_us, self.recording, self.log = 0.0, None, []
        self.host_us = 0.0  # work begins when the host has enqueued it, if the GPU is idle by then

    def work(self, name, us):
        if self.recording is not None:
            self.recording.append((name, us))
        else:
            self.now_us = max(self.now_us, self.host_us) + us + GAP_US
            self.log.append(name)


class Event:
    def __init__(self, stream):
        self._stream, self._at = stream, None

    def record(self):
        assert self._stream.recording is None, "events are not recorded inside a graph"
        self._at = self._stream.now_us

    def elapsed_time(self, end):
        return (end._at - self._at) / 1000


class Graph:
    def __init__(self, stream):
        self._stream, self.nodes = stream, []

    def replay(self):
        for name, us in self.nodes:
            self._stream.work(name, us)


@pytest.fixture
def stream(monkeypatch):
    simulated = Stream()

    @contextlib.contextmanager
    def capture(graph, capture_error_mode):
        assert capture_error_mode == "thread_local"
        simulated.recording = graph.nodes
        yield
        simulated.recording = None

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(simulated))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(simulated))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(CudaTimer, "flush", lambda self: simulated.work("flush", FLUSH_US))
    return simulated


def test_the_hosts_time_to_enqueue_a_call_is_not_the_calls(stream, monkeypatch):
    """A library's Python takes longer than one flush: the search timed such a call by its host, and it never raced."""
    monkeypatch.setattr("tunekit.measure.timing.time.perf_counter", lambda: stream.host_us / 1e6)
    timer = CudaTimer(Device(None), cold=True)

    def call():
        stream.host_us += 80.0
        stream.work("kernel", 16.0)

    def synchronize(*_):
        stream.now_us = stream.host_us = max(stream.now_us, stream.host_us)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    synchronize()
    assert timer.samples(call, 3) == pytest.approx([16.0] * 3, abs=2 * GAP_US)


def kernel(stream, name, us):
    return lambda: stream.work(name, us)


def read():
    return GpuState(sm_mhz=1980)


def test_the_flush_is_subtracted(stream):
    """A graph of flushes and calls, less a graph of the flushes alone, is the call and its gap."""
    window = CudaTimer(Device(None), cold=True).window([kernel(stream, "k", 5.0)], 40, True, "cuda_graph")
    us, state = window.take(read)
    assert us == pytest.approx(5.0 + GAP_US)
    assert state.sm_mhz == 1980
    assert stream.log.count("k") == 40, "each call once, none outside the graph"


def test_rotation_uses_every_copy_equally_and_subtracts_nothing(stream):
    copies = [kernel(stream, name, 10.0) for name in "abc"]
    window = CudaTimer(Device(None), cold=True).window(copies, 12, False, "cuda_graph")
    stream.log.clear()
    us, _ = window.take(read)
    assert us == pytest.approx(10.0 + GAP_US)
    assert "".join(stream.log) == "flush" + "abc" * 4, "one flush keeps the GPU busy while the graph is enqueued"


def test_events_time_the_calls_only(stream):
    window = CudaTimer(Device(None), cold=True).window([kernel(stream, "k", 700.0)], 3, True, "events")
    us, _ = window.take(read)
    assert us == pytest.approx(700.0 + GAP_US)


def test_samples_are_cold_or_warm(stream):
    cold = CudaTimer(Device(None), cold=True)
    stream.log.clear()
    assert cold.samples(kernel(stream, "k", 7.0), 2) == pytest.approx([8.0, 8.0])
    assert stream.log == ["k"] * 2 + ["flush", "k"] * 2, "the host's time to enqueue one is measured first"
    warm = CudaTimer(Device(None), cold=False)
    stream.log.clear()
    assert warm.samples(kernel(stream, "k", 7.0), 1) == pytest.approx([8.0])
    assert stream.log == ["k"] * 2 + ["flush", "k", "k"], "an untimed call first"


def test_what_a_method_adds_is_taken_off(monkeypatch, stream):
    """Of each call between events, an empty pair; of a graph, what starting one takes. A flush is a graph's twin."""
    monkeypatch.setattr(CudaTimer, "_bare_pair_us", lambda self: 0.5)
    monkeypatch.setattr(CudaTimer, "_graph_start_us", lambda self: 6.0)
    timer = CudaTimer(Device(None), cold=True)
    calls = [kernel(stream, "k", 7.0)]
    assert timer.samples(calls[0], 2) == pytest.approx([7.5, 7.5])
    assert timer.window(calls, 3, True, "events").take(read)[0] == pytest.approx(7.5)
    assert timer.window(calls, 12, False, "cuda_graph").take(read)[0] == pytest.approx(8.0 - 6.0 / 12)
    assert timer.window(calls, 12, True, "cuda_graph").take(read)[0] == pytest.approx(8.0)


def test_starting_a_graph_is_told_from_its_nodes(monkeypatch, stream):
    timer = CudaTimer(Device(None), cold=True)
    monkeypatch.setattr(timer, "_between_events_us", lambda work: 5.0 + 1.5 * next(nodes))
    nodes = iter((1, 65))
    assert timer.added_us("cuda_graph") == pytest.approx(5.0)


def test_a_flushs_time_is_that_of_the_last_windows(monkeypatch, stream):
    """One window of flushes alone that takes long shifts no time: the median of the last nine is taken off."""
    timer = CudaTimer(Device(None), cold=True)
    windows = [timer.window([kernel(stream, name, 7.0)], 10, True, "cuda_graph") for name in "ab"]
    for window in windows * 3:
        assert window.take(read)[0] == pytest.approx(7.0 + GAP_US)
    windows[0]._flushes.nodes[0] = ("flush", FLUSH_US + 50.0)
    assert windows[0].take(read)[0] == pytest.approx(7.0 + GAP_US)
    assert timer.flush_us(FLUSH_US + GAP_US) == pytest.approx(FLUSH_US + GAP_US)
