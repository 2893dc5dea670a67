"""``tunekit.start_cuda``: a context is made beside the import of torch, and nothing of it can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

import tunekit
from tests.dispatch.fake_driver import Driver
from tunekit.dispatch import graphs, starting
from tunekit.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FRESH = """
import ctypes, sys, time
import tunekit
ctypes.CDLL("libcuda.so.1").let_init(700, 0)
began = time.monotonic()
tunekit.start_cuda()
assert time.monotonic() - began < 0.3, "it returns at once"
assert not {"torch", "tvm_ffi", "numpy"} & set(sys.modules)
import atexit
atexit.register(lambda: print(ctypes.CDLL("libcuda.so.1").retained_so_far(0)))
"""


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Driver:
    made = Driver(tmp_path / "libcuda.so.1")
    monkeypatch.setattr(graphs, "DRIVER", str(made.path))
    monkeypatch.setattr(starting, "_starter", starting.Starter())
    return made


def started() -> list[threading.Thread]:
    """The threads that start a device, ended."""
    threads = [thread for thread in threading.enumerate() if thread.name == "tunekit-start"]
    for thread in threads:
        thread.join(20)
    return threads


def test_each_device_is_started_once_in_another_thread(driver):
    driver.let_init(take_s=0.05)
    for device in (0, 0, 1, 0, 1):
        tunekit.start_cuda(device)
    assert len(started()) == 2
    assert driver.retained == [1, 1] and driver.inits == 2
    assert driver.initialising_thread != threading.get_native_id()
    tunekit.start_cuda()
    assert started() == [] and driver.retained == [1, 1]


def test_the_process_goes_on_while_the_driver_starts(driver):
    driver.let_init(take_s=1.0)
    began = time.monotonic()
    tunekit.start_cuda()
    turns = 0
    while time.monotonic() < began + 0.3:
        turns += 1
    assert time.monotonic() - began < 0.9 and turns > 100 and driver.inits == 0
    started()
    assert driver.retained == [1, 0]


def test_the_context_waits_for_the_libraries_of_a_torch_that_is_being_imported(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch_half_imported := ModuleType("torch"))
    monkeypatch.delitem(sys.modules, "torch.nn", raising=False)
    tunekit.start_cuda()
    time.sleep(0.3)
    assert driver.inits == 1 and driver.retained == [0, 0], "the driver starts meanwhile"
    monkeypatch.setitem(sys.modules, "torch.nn", torch_half_imported)
    started()
    assert driver.retained == [1, 0]


@pytest.mark.parametrize("ends", ["the import fails", "it takes too long", "torch is blocked"])
def test_the_context_waits_for_no_torch_that_does_not_come(driver, monkeypatch, ends):
    blocked = ends == "torch is blocked"
    monkeypatch.setitem(sys.modules, "torch", None if blocked else ModuleType("torch"))
    monkeypatch.delitem(sys.modules, "torch.nn", raising=False)
    monkeypatch.setattr(starting, "LONGEST_WAIT_S", 0.1 if ends == "it takes too long" else 60.0)
    tunekit.start_cuda()
    if ends == "the import fails":
        time.sleep(0.2)
        assert driver.retained == [0, 0]
        monkeypatch.delitem(sys.modules, "torch")
    started()
    assert driver.retained == [1, 0]


@pytest.mark.parametrize("fault", ["no driver", "another library", "the driver fails", "no such device"])
def test_what_fails_is_left_to_the_first_real_use(driver, tmp_path, monkeypatch, capfd, fault):
    device = 0
    if fault == "no driver":
        monkeypatch.setattr(graphs, "DRIVER", str(tmp_path / "none.so"))
    elif fault == "another library":
        monkeypatch.setattr(graphs, "DRIVER", "libc.so.6")
    elif fault == "the driver fails":
        driver.let_init(code=100)
    else:
        device = 7
    tunekit.start_cuda(device)
    started()
    assert driver.retained == [0, 0]
    assert capfd.readouterr() == ("", "")


def test_a_broken_nvml_is_left_to_the_first_real_use_too(driver, monkeypatch):
    raised: list[object] = []

    def broken(device: int) -> None:
        raise RuntimeError("another pynvml")

    monkeypatch.setattr(starting, "environment", broken)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    tunekit.start_cuda()
    started()
    assert driver.retained == [1, 0] and raised == []


def test_no_thread_to_be_had_is_no_error(driver, monkeypatch):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    tunekit.start_cuda()
    assert driver.inits == 0


@pytest.mark.parametrize("device", [-1, "0", None, True, 2**32, 2**64])
def test_a_device_that_is_no_index_is_said(driver, device):
    with pytest.raises(UserError, match=r"device is .*; it must be CUDA's index of a GPU"):
        tunekit.start_cuda(device)
    assert started() == []


def test_a_forked_child_may_ask_for_itself(driver):
    tunekit.start_cuda()
    started()
    pid = os.fork()
    if pid == 0:
        tunekit.start_cuda()
        started()
        os._exit(driver.retained[0])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2, "the child's is the second"
    assert driver.retained == [1, 0]


def test_a_process_that_ends_meanwhile_waits_for_the_driver(driver):
    """An end amid the driver's start could crash; and nothing heavy is imported for it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(driver.path.parent)}
    done = subprocess.run(
        [sys.executable, "-c", FRESH], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_a_process_that_ends_amid_an_import_of_torch_does_not_wait_for_it(driver):
    stuck = FRESH.replace("tunekit.start_cuda()", "sys.modules['torch'] = sys; tunekit.start_cuda()")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(driver.path.parent)}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", stuck.replace('{"torch", ', "{")],
        env=env, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert time.monotonic() - began < starting.LONGEST_WAIT_S / 2
