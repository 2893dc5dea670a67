"""A process that forks while its threads dispatch, as data loaders do; and one that ends while it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.dispatch.test_dispatch_processes import ROOT

FORK = """
import os, sys, threading
import torch
import tunekit
torch.set_num_threads(1)
kernel = tunekit.load(sys.argv[1], compile="background")
kernel(torch.ones(64, 64))  # what is imported late is imported now: Python's own import locks outlive a fork
done = False
def call(start):
    rows = start
    while not done:
        rows = start + (rows + 1 - start) % 100
        assert kernel(torch.ones(rows, 64))[0, 0] == 0.5
        kernel.stats()
        if rows % 50 == 0:
            kernel.refresh()
threads = [threading.Thread(target=call, args=(1 + 500 * n,)) for n in range(4)]
for thread in threads:
    thread.start()
children = []
for n in range(20):
    pid = os.fork()
    if pid == 0:
        try:
            assert kernel(torch.ones(64, 64))[0, 0] == 0.5
            assert kernel(torch.ones(5000 + n, 64))[0, 0] == 0.5
            kernel.refresh()
            assert kernel.stats()["calls"] >= 0
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    children.append(pid)
statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
done = True
for thread in threads:
    thread.join()
print(statuses)
"""

COLD = """
import os, sys, threading
sys.setswitchinterval(1e-5)
import torch
import tunekit
torch.set_num_threads(1)
kernel = tunekit.load(sys.argv[1])
kernel(torch.ones(64, 64))
def load():
    while True:
        tunekit.load(sys.argv[1])(torch.ones(8, 64))
def refresh():
    while True:
        kernel.refresh()
for target in (load, load, refresh, refresh):
    threading.Thread(target=target, daemon=True).start()
for n in range(12):
    pid = os.fork()
    if pid == 0:
        try:
            tunekit.load(sys.argv[1])(torch.ones(100 + n, 64))
            kernel.refresh()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""

END = """
import sys, torch, tunekit
kernel = tunekit.load(sys.argv[1], compile="background")
try:
    kernel(torch.ones(8))
except tunekit.errors.NoKernelError as error:
    assert "being compiled in the background" in str(error)
print("asked", flush=True)
import time
time.sleep(float(sys.argv[2]))
"""


LOCKS = """
import os, threading
from tunekit.dispatch.forked import Guard, renew

class TakesLocks:
    def __init__(self):
        renew(self)

    def after_fork(self):
        for guard in guards:
            with guard:
                pass

guards = [Guard() for _ in range(50)]
things = [TakesLocks() for _ in range(50)]
held, done = threading.Event(), threading.Event()

def hold():
    for guard in guards:
        guard.__enter__()
    held.set()
    done.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


def run(code: str, *arguments: object, tuned) -> tuple[subprocess.Popen, dict[str, str]]:
    env = {**os.environ, "TUNEKIT_CACHE": str(tuned.root), "PYTHONPATH": str(ROOT), "TUNEKIT_COMPILE_TIMEOUT": "60"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), env


def test_children_forked_from_busy_threads_dispatch(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    process, _ = run(FORK, tuned.reference, tuned=tuned)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.strip() == str([0] * 20), err


def test_children_forked_while_threads_read_the_store_read_it_too(tuned):
    """SQLite's own locks, and a lock of a class, stay as they were at the fork."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    process, _ = run(COLD, tuned.reference, tuned=tuned)
    try:
        out, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        pytest.fail(f"a child hangs after {process.communicate()[0].split()}")
    assert out.split() == ["0"] * 12, err


def test_what_begins_anew_after_a_fork_may_take_locks_that_were_held():
    """As the part of a capture does, which counts from nothing in a child."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LOCKS], env=env, timeout=20, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("after_s", [0.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_process_that_ends_while_it_compiles_leaves_nothing_behind(tuned, after_s):
    """At once, while the compile server starts, and later, while a native compile hangs."""
    tuned.reference = f"{tuned.specs / 'host_limited.py'}:unlimited"
    process, _ = run(END, tuned.reference, after_s, tuned=tuned)
    assert process.stdout.readline() == "asked\n", process.stderr.read()
    time.sleep(after_s / 2)
    descendants = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert time.monotonic() - began < after_s / 2 + 8
    assert after_s == 0.0 or descendants, "it was compiling"
    _, alive = psutil.wait_procs(descendants, timeout=3)
    assert alive == []
