"""Sweeps that are ended from outside, and sweeps side by side: as a user's own processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.sweep.conftest import SPECS, Cache
from tunekit.settings import Settings
from tunekit.store.database import Store
from tunekit.trials import Stage

MANY = f"{SPECS / 'host_many'}.py"
ROOT = SPECS.parents[1]


@pytest.fixture
def start(cache: Cache) -> Callable[..., subprocess.Popen[str]]:
    def run(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tunekit", "sweep", MANY, "--problem", "n=64", "--jobs", "1", *more]
        env = {**os.environ, "TUNEKIT_CACHE": str(cache.root), "PYTHONPATH": str(ROOT), "CI": "true"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    return run


def compiles(settings: Settings) -> int:
    """How many compiles are on record."""
    if not settings.database.exists():
        return 0
    with Store.open(settings.database) as store:
        return len(store.trials(spec="host_many", stage=Stage.COMPILE))


def wait_for(count: int, settings: Settings) -> None:
    deadline = time.monotonic() + 60
    while compiles(settings) < count:
        assert time.monotonic() < deadline, "the sweep makes no progress"
        time.sleep(0.05)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(  # every signal: tests/cli/test_real_sweep.py
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_keeps_what_is_done_and_the_next_run_goes_on(
    start: Callable[..., subprocess.Popen[str]], cache: Cache, number: signal.Signals, status: int
) -> None:
    """Case 59: prompt back in 2 s, no traceback, no process left, and only what is missing is done again."""
    process = start("--verify", "none")
    wait_for(5, cache.settings)
    children = descendants(process)
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 2.0
    assert process.returncode == status, err
    assert "Traceback" not in out + err
    assert "interrupted" in out
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    done = compiles(cache.settings)
    assert 5 <= done < 20
    with cache.store() as store:
        assert store.sweeps("host_many")[0].state == "interrupted"
    again = start("--verify", "none", "--json")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert compiles(cache.settings) == 20, "what was done is not done again"
    assert len(json.loads(out)["problems"][0]["rows"]) == 20


def test_a_killed_sweep_loses_the_variant_in_flight_at_most(
    start: Callable[..., subprocess.Popen[str]], cache: Cache
) -> None:
    """Cases 4 and 28: SIGKILL after compile k; every descendant goes, the next run finishes."""
    process = start("--verify", "none")
    wait_for(4, cache.settings)
    children = descendants(process)
    process.kill()
    process.communicate(timeout=20)
    psutil.wait_procs(children, timeout=2.0)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    done = compiles(cache.settings)
    again = start("--verify", "none")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert done >= 4 and compiles(cache.settings) in (20, 21)


def test_two_sweeps_at_once_compile_each_variant_once(
    start: Callable[..., subprocess.Popen[str]], cache: Cache
) -> None:
    """Case 34: the second finds what the first is compiling locked, waits, and takes it from the store."""
    both = [start("--verify", "none") for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert compiles(cache.settings) == 20


def test_a_cache_that_cannot_be_written_is_said_plainly(
    start: Callable[..., subprocess.Popen[str]], cache: Cache
) -> None:
    """Case 31: also as root, to whom no mode forbids writing: a file stands where the directory should."""
    cache.root.mkdir(parents=True)
    Path(cache.root / "artifacts").write_text("in the way")
    process = start()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(err.strip().splitlines()) == 1 and "artifacts" in err
