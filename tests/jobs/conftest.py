"""Fixtures of the pool's tests."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from tunekit.backends.contract import CompileRequest
from tunekit.jobs import Limits, Pool, Task, compile_task
from tunekit.model import Values

SPECS = Path(__file__).resolve().parents[1] / "specs"
MARKER = "TUNEKIT_TEST"


@pytest.fixture(scope="module")
def cute_pool():
    """One warm pool for a module's CuTeDSL compiles."""
    with Pool(workers=2, limits=Limits(trace_s=60, backend_s=60, memory_bytes=4 * 2**30)) as pool:
        yield pool


@pytest.fixture
def light_pool():
    """Makes pools without a backend, which start in a fifth of a second; closed at the end."""
    pools: list[Pool] = []

    def make(workers=2, **limits):
        pools.append(Pool(workers=workers, warm=(), limits=Limits(**limits)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def call():
    """Makes tasks that call a function of jobs_entries.py."""
    counter = itertools.count()

    def make(function, limits=None, id=None, **payload):
        name = id or f"{function}-{next(counter)}"
        return Task(name, payload, entry=f"jobs_entries:{function}", limits=limits, context=f"{function}, a test")

    return make


@pytest.fixture
def host_build(tmp_path):
    """Makes compile tasks of host_scale.py's unruly build functions."""
    counter = itertools.count()

    def make(build, limits=None):
        number = next(counter)
        request = CompileRequest(
            spec=f"{SPECS / 'host_scale.py'}:host_build",
            implementation="unruly",
            arch="host",
            static=Values(cols=64, dtype="float32"),
            tunables=Values(build=build),
            symbol=f"tunekit_{build}_{number}",
            out_dir=str(tmp_path / f"{build}{number}"),
        )
        return compile_task(request, id=f"{build}{number}", limits=limits)

    return make


@pytest.fixture
def cute_task(tmp_path):
    """Makes compile tasks of cute_small.py's specs."""
    counter = itertools.count()

    def make(spec, implementation, arch, limits=None, trace_only=False, **tunables):
        number = next(counter)
        request = CompileRequest(
            spec=f"{SPECS / 'cute_small.py'}:{spec}",
            implementation=implementation,
            arch=arch,
            static=Values(n=1024),
            tunables=Values(tunables),
            symbol=f"tunekit_{spec}_{number}",
            out_dir=str(tmp_path / f"{spec}{number}"),
            trace_only=trace_only,
        )
        return compile_task(request, limits=limits)

    return make


@pytest.fixture
def all_gone():
    """Asserts that processes are gone, or only zombies, within some seconds."""

    def check(pids, within_s=2.0):
        deadline = time.monotonic() + within_s
        while left := [pid for pid in pids if alive(pid)]:
            assert time.monotonic() < deadline, f"still alive: {left}"
            time.sleep(0.02)

    return check


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def wait_for():
    """Waits for a file to hold something, and returns the integers in it."""

    def wait(path, count=1, within_s=20.0):
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            numbers = path.read_text().split() if path.exists() else []
            if len(numbers) >= count:
                return [int(number) for number in numbers]
            time.sleep(0.02)
        raise AssertionError(f"{path} did not come to hold {count} numbers")

    return wait


@pytest.fixture
def script(tmp_path):
    """Runs Python source in a new process that can import tunekit and the test entries."""
    import subprocess
    import sys

    running: list[subprocess.Popen] = []

    def run(source):
        file = tmp_path / "script.py"
        file.write_text(source)
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join((str(root), str(Path(__file__).parent)))
        running.append(
            subprocess.Popen(
                [sys.executable, str(file)],
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.wait()
