"""The worker's child: killed, replaced, and the right variant blamed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tunekit.errors import UserError
from tunekit.measure import MeasuringWorker
from tunekit.measure.device import first_line, is_out_of_memory
from tunekit.measure.process import Child
from tunekit.trials import Status

ROWS = {"rows": 8}


def gone(pid: int, within_s: float = 2.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_five_variants_with_a_faulty_one_in_the_middle(compiler):
    """Case 49, on the host: a crash is the faulty variant's own; the four others are measured as usual."""
    names = [{"unroll": 1}, {"unroll": 2}, None, {"unroll": 4}, {"unroll": 8}]
    jobs = [
        compiler.job("host_scale", "host_faulty", ROWS, fault="crash")
        if tunables is None
        else compiler.job("host_scale", "host_scale", ROWS, delay_us=0, **tunables)
        for tunables in names
    ]
    with MeasuringWorker("host", run_limit_s=2.0) as worker:
        outcomes = [worker.verify(job, seeds=1) for job in jobs]
        assert [outcome.ok for outcome in outcomes] == [True, True, False, True, True]
        assert outcomes[2].status is Status.DEVICE_FAULT
        assert "signal 11, SIGSEGV" in outcomes[2].reason and "run (launch 1" in outcomes[2].reason
        assert worker.late_faults == []
        assert all(worker.time(job, 2).ok for job in (jobs[0], jobs[4]))


def test_a_kernel_that_never_ends_is_killed_at_the_run_limit(compiler):
    """Case 50, on the host: 0.5 s works, and the next variant runs in a new process."""
    with MeasuringWorker("host", run_limit_s=0.5) as worker:
        good = compiler.job("host_scale", "host_scale", ROWS)
        assert worker.verify(good).ok
        first = worker.pid
        begin = time.monotonic()
        outcome = worker.verify(compiler.job("host_scale", "host_faulty", ROWS, fault="spin"))
        assert time.monotonic() - begin < 3.0
        assert outcome.status is Status.RUN_TIMEOUT
        assert "took over 0.5 s in run (launch 1 on rows=8" in outcome.reason
        assert 0.5 <= outcome.seconds["run"] < 1.5
        assert gone(first, 0.2)
        slow_to_check = compiler.job("host_scale", "host_scale", {"rows": 1000, "cols": 1024}, delay_us=1000)
        outcome = worker.verify(slow_to_check, seeds=5)
        assert outcome.ok, "the limit is for launches: inputs, oracle and checks are not charged to the variant"
        assert outcome.seconds["prepare"] + outcome.seconds["check"] > 0.5
        assert worker.pid != first


def test_a_fault_that_surfaces_in_anothers_turn(compiler):
    """Case 49: the first variant sets a bomb that goes off while the second runs; the second is not blamed.

    And case 11: an exception in the caller's code leaves no process.
    """
    with pytest.raises(ZeroDivisionError), MeasuringWorker("host", run_limit_s=2.0) as worker:
        bomb = compiler.job("host_measure", "host_guard", ROWS, fault="alarm")
        victim = compiler.job("host_scale", "host_scale", ROWS, delay_us=1000)
        assert worker.time(bomb, 1).ok
        outcome = worker.time(victim, 600)
        assert outcome.ok and len(outcome.samples_us) == 600
        (late,) = worker.late_faults
        assert late.suspect == bomb
        assert "SIGALRM" in late.reason
        pid = worker.pid
        raise ZeroDivisionError
    assert gone(pid, 0.1)
    assert worker.pid is None
    worker.close()


@pytest.mark.slow
def test_finalists_that_fail_in_the_race(compiler):
    """Cases 49 and 50 in the final: each has its own outcome, and the others race on."""
    expected = {
        "none": (Status.OK, ""),
        "crash_later": (Status.DEVICE_FAULT, "SIGSEGV"),
        "error_later": (Status.LAUNCH_ERROR, "ran out of luck"),
        "spin_later": (Status.RUN_TIMEOUT, "took over 2 s in run"),
        "seventh_launch": (Status.WRONG_RESULT, "in the final, y: mismatch at [0, 0]"),
        "slow": (Status.OK, ""),
    }
    jobs = {fault: compiler.job("host_measure", "host_guard", ROWS, fault=fault) for fault in expected}
    with MeasuringWorker("host", run_limit_s=2.0) as worker:
        outcomes = worker.final(list(jobs.values()), 2)
    assert list(outcomes) == [job.variant.id for job in jobs.values()]
    for fault, (status, words) in expected.items():
        outcome = outcomes[jobs[fault].variant.id]
        assert outcome.status is status and words in outcome.reason, fault
        assert len(outcome.samples_us) == (2 if outcome.ok else 0)


def test_the_parents_death_ends_the_worker(compiler, tmp_path):
    """Case 4 for the measuring child: kill -9 on the parent, while native code holds the child."""
    job = compiler.job("host_scale", "host_faulty", ROWS, fault="spin")
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, threading
        from tunekit.measure import MeasuringWorker, RunJob
        from tunekit.measure.job import RunJob
        job = RunJob.from_payload(json.loads({__import__("json").dumps(job.to_payload())!r}))
        worker = MeasuringWorker("host", run_limit_s=60.0)
        starter = threading.Thread(target=worker._started)   # it must outlive the thread that started it
        starter.start(); starter.join()
        print(worker.pid, flush=True)
        worker.verify(job)
        """)
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    try:
        child = int(parent.stdout.readline())
        time.sleep(0.5)
        assert psutil.pid_exists(child)
        parent.send_signal(signal.SIGKILL)
        assert gone(child), "the child outlived its parent"
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_a_device_that_is_not_there(new_interpreter):
    with MeasuringWorker(99) as worker, pytest.raises(UserError, match=r"device 99 can't be used: torch .* sees \d"):
        worker._started()


def test_a_child_that_dies_at_its_start_says_why(new_interpreter, monkeypatch):
    from tunekit.errors import TunekitError

    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    child = Child("host", 1.0, {})
    with pytest.raises(TunekitError, match=r"did not start: .*exit status 1"):
        child.start()
    child.close()


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_a_run_limit_is_a_positive_number(limit):
    with pytest.raises(UserError, match="run_limit_s"):
        MeasuringWorker("host", run_limit_s=limit)


@pytest.mark.parametrize("device", [-1, "cuda:0", 1.5, None])
def test_a_device_is_an_index_or_host(device):
    with pytest.raises(UserError, match="device"):
        MeasuringWorker(device)


def test_an_error_whose_words_can_t_be_had():
    """An oracle may raise an exception with a message method that fails in turn."""

    class Mute(RuntimeError):
        def __str__(self):
            raise OSError

    assert first_line(Mute()) == "(its message fails with OSError)"
    assert not is_out_of_memory(Mute())


def test_a_child_killed_while_it_starts_is_replaced_once(compiler, monkeypatch):
    """What kills it then (the kernel, short of memory; a stray kill -9) ends no sweep."""
    start, killed = Child.start, []

    def shot(child):
        if not killed:
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)
        start(child)

    monkeypatch.setattr(Child, "start", shot)
    with MeasuringWorker("host", run_limit_s=2.0) as worker:
        assert worker.verify(compiler.job("host_scale", "host_scale", ROWS), seeds=1).ok
        assert killed and worker.pid != killed[0]
