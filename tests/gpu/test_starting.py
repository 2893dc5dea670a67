"""``tunekit.start_cuda`` on a GPU: the context that torch then uses, made before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU: torch.cuda is not available", allow_module_level=True)

from tests.gpu.test_dispatch import DOUBLE, ROOT, tune  # noqa: E402

pytestmark = pytest.mark.gpu

STARTED = """
import ctypes, os, sys, threading
import tunekit

def active():
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    flags, found = ctypes.c_uint(), ctypes.c_int()
    assert driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(found)) == 0
    return found.value

tunekit.start_cuda()
for thread in threading.enumerate():
    if thread.name == "tunekit-start":
        thread.join()
assert "torch" not in sys.modules and active() == 1, "there is a context, and no torch"
import torch
pid = os.fork()
if pid == 0:
    os._exit(int(torch.ones(7).sum()))  # a child that keeps to the CPU
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
kernel = tunekit.load(sys.argv[1])
x, y = torch.ones(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
kernel(x, y)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kernel(x, y)
x.fill_(3.0)
graph.replay()
print(float(y.sum()) / (1 << 20), kernel.stats()["exact"])
"""
HIDDEN = "import tunekit; tunekit.start_cuda(); tunekit.start_cuda(1); import torch; print(torch.cuda.is_available())"


def run(code: str, *arguments: str, **environ: str) -> str:
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, **environ}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


def test_torch_uses_the_context_that_was_started(tmp_path: Path) -> None:
    tune(DOUBLE, tmp_path, {"n": 1 << 20})
    assert run(STARTED, DOUBLE, TUNEKIT_CACHE=str(tmp_path), TUNEKIT_DB="") == "6.0 1"


def test_a_device_that_is_hidden_is_not_started() -> None:
    assert run(HIDDEN, CUDA_VISIBLE_DEVICES="") == "False"
