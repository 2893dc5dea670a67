"""Threads of ours beside a CUDA graph that another thread captures: what they load disturbs nothing."""

from __future__ import annotations

import threading

import pytest

from tunekit.dispatch.graphs import beside_captures

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU: torch.cuda is not available", allow_module_level=True)

from tests.gpu.test_dispatch import DOUBLE, load, tune  # noqa: E402

pytestmark = pytest.mark.gpu


def in_a_thread(function) -> list[BaseException]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return errors


def test_a_refresh_beside_a_capture_loads_and_both_are_right(tmp_path):
    """As the watcher and the background compiles do it; then a function that was loaded so is captured unwarmed."""
    tune(DOUBLE, tmp_path, {"n": 1 << 20})
    kernel = load(DOUBLE, tmp_path)
    x, y = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    kernel(x, y)
    before = kernel.choice(x).artifact
    tune(DOUBLE, tmp_path, {"n": 1 << 20}, smem_bytes=1024)
    torch.cuda.synchronize()

    def refresh() -> None:
        with beside_captures() as allowed:
            assert allowed, "the driver takes a thread's capture mode"
            kernel.reread()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y)
        errors = in_a_thread(refresh)
        kernel(y, x)  # by the new artifact, whose first call this is
    assert errors == []
    assert kernel.choice(x).artifact != before
    x.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 10.0).all() and (x == 20.0).all()


@pytest.mark.parametrize(("stream", "cycles"), [("the default stream", 8000), ("a stream of its own", 80_000)])
def test_a_cold_call_beside_a_capture_breaks_nothing_and_both_are_right(tmp_path, stream, cycles):
    """In CUDA's global mode: an artifact's load, its first launch, and memory that torch must ask the driver for."""
    served, cold = 1 << 20, 1 << 26  # the cold output takes 256 MiB, which no block of torch's cache holds
    tune(DOUBLE, tmp_path, {"n": served})
    kernel = load(DOUBLE, tmp_path)
    x, y = torch.randn(served, device="cuda"), torch.empty(served, device="cuda")
    kernel(x, y)
    tune(DOUBLE, tmp_path, {"n": cold}, cycles=cycles)  # an artifact that no other test has loaded
    other = load(DOUBLE, tmp_path)
    z = torch.randn(cold, device="cuda")
    own = torch.cuda.Stream() if stream == "a stream of its own" else torch.cuda.default_stream()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    results = []

    def call() -> None:
        with torch.cuda.stream(own):
            results.append(other(z))

    reserved = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        kernel(x, y)
        errors = in_a_thread(call)
        kernel(y, x)
    assert errors == []
    assert other.stats()["loaded"] == 1, "the load was beside the capture"
    assert torch.cuda.memory_reserved() - reserved >= 4 * cold, "so was the driver's allocation"
    x.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 10.0).all() and (x == 20.0).all()
    torch.testing.assert_close(results[0], 2 * z)
