"""What a cold call loads beside another thread's CUDA graph capture: its thread's mode is relaxed meanwhile."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tunekit
from tests.dispatch.fake_driver import Driver
from tunekit.dispatch import graphs, library
from tunekit.errors import NoKernelError, UserError

THREAD_LOCAL, RELAXED = 1, 2


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Driver:
    """A process that uses CUDA through torch, as far as captures go; this thread's mode is no default."""
    made = Driver(tmp_path / "libcuda.so.1")
    monkeypatch.setattr(graphs, "DRIVER", str(made.path))
    graphs._exchange.cache_clear()
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: False)
    monkeypatch.setattr(graphs, "_torch_on_cuda", lambda: SimpleNamespace(cuda=cuda))
    made.mode = THREAD_LOCAL
    yield made
    graphs._exchange.cache_clear()


@pytest.fixture
def seen(driver, monkeypatch) -> list[tuple[str, int]]:
    """What was loaded and launched, each with the mode of the thread that did it."""
    found: list[tuple[str, int]] = []
    load_artifact = library.load_artifact

    def load(*arguments):
        found.append(("load", driver.mode))
        function = load_artifact(*arguments)

        def launch(*arguments):
            found.append(("launch", driver.mode))
            function(*arguments)

        return launch

    monkeypatch.setattr(library, "load_artifact", load)
    monkeypatch.setattr(library, "_loaded", {})
    return found


@pytest.fixture
def kernel(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    return tunekit.load(tuned.reference, fallback="bucket", **tuned.places)


def test_a_cold_call_is_relaxed_and_a_warm_one_is_as_it_was(kernel, driver, seen):
    x = torch.ones(64, 64)
    assert kernel(x)[0, 0] == 0.5
    assert seen == [("load", RELAXED), ("launch", RELAXED)] and driver.mode == THREAD_LOCAL
    kernel(x)
    assert seen[2:] == [("launch", THREAD_LOCAL)]


def test_only_the_cold_thread_is_relaxed(kernel, driver, seen):
    modes = []

    def cold() -> None:
        modes.append(driver.mode)
        kernel(torch.ones(64, 64))
        modes.append(driver.mode)

    thread = threading.Thread(target=cold)
    thread.start()
    thread.join(20)
    assert modes == [0, 0] and driver.mode == THREAD_LOCAL
    assert seen == [("load", RELAXED), ("launch", RELAXED)]


@pytest.mark.parametrize("what", ["choice", "bind", "refresh"])
def test_whatever_loads_is_relaxed(kernel, driver, seen, tuned, what):
    x = torch.ones(64, 64)
    if what == "choice":
        kernel.choice(x)
    elif what == "bind":
        kernel.bind({"rows": 64})
    else:
        kernel(x)
        seen.clear()
        tuned.tune({"rows": 64}, unroll=8, delay_us=0)
        kernel.refresh()
    assert seen == [("load", RELAXED)] and driver.mode == THREAD_LOCAL


def test_the_mode_is_given_back_after_an_error(kernel, driver, seen):
    with pytest.raises(NoKernelError):
        kernel(torch.ones(300, 64))
    with pytest.raises(UserError):
        kernel(torch.ones(64, 64).t()[:, ::2])
    assert driver.mode == THREAD_LOCAL and seen == []


def test_a_driver_that_does_not_take_it_serves_all_the_same(kernel, driver, seen):
    driver.refuse()
    assert kernel(torch.ones(64, 64))[0, 0] == 0.5
    assert seen == [("load", THREAD_LOCAL), ("launch", THREAD_LOCAL)]


def test_without_a_driver_nothing_is_asked(kernel, tmp_path, monkeypatch, driver, seen):
    monkeypatch.setattr(graphs, "DRIVER", str(tmp_path / "none.so"))
    graphs._exchange.cache_clear()
    assert kernel(torch.ones(64, 64))[0, 0] == 0.5
    assert seen == [("load", THREAD_LOCAL), ("launch", THREAD_LOCAL)]


def test_the_mode_is_given_back_where_ctrl_c_comes_at_the_exchange(driver, monkeypatch):
    exchange, calls = graphs._exchange(), []

    def interrupted(mode) -> int:
        exchange(mode)
        calls.append(driver.mode)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(graphs, "_exchange", lambda: interrupted)
        with pytest.raises(KeyboardInterrupt), graphs.beside_captures():
            pass
    assert calls == [RELAXED, THREAD_LOCAL] and driver.mode == THREAD_LOCAL


def test_modes_nest(driver):
    with graphs.beside_captures(), graphs.beside_captures() as allowed:
        assert allowed and driver.mode == RELAXED
    assert driver.mode == THREAD_LOCAL


def test_while_another_thread_imports_torch_cuda_is_not_in_use(monkeypatch):
    """A watcher looks then, where a kernel is loaded before torch is."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert not graphs.capturing()
    with graphs.beside_captures() as allowed:
        assert allowed


def test_a_thread_that_captures_is_refused_as_ever(kernel, driver, seen, monkeypatch):
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(graphs, "_torch_on_cuda", lambda: SimpleNamespace(cuda=cuda))
    with pytest.raises(UserError, match="first time while a CUDA graph is being captured"):
        kernel(torch.ones(64, 64))
    assert seen == [] and driver.mode == THREAD_LOCAL
