"""Time and memory limits: what is killed, when, and what is left."""

from __future__ import annotations

import time

import pytest

from tunekit.jobs import Limits, Milestone, Task
from tunekit.jobs.tree import descendants_of_this_process
from tunekit.trials import Status


def by_id(results):
    return {result.id: result for result in results}


def test_native_hang_in_the_middle(light_pool, host_build):
    """Case 1: the hanging variant costs one limit, the others are compiled, and no child survives."""
    before = set(descendants_of_this_process())  # the test runner may have some of its own
    pool = light_pool(workers=1, trace_s=2.0, backend_s=30.0)
    pool.warm_up  # noqa: B018  # its time isn't the sweep's
    begin = time.monotonic()
    results = list(pool.run([host_build("good"), host_build("hang"), host_build("also_good")]))
    spent = time.monotonic() - begin
    assert [result.status for result in results] == [Status.OK, Status.COMPILE_TIMEOUT, Status.OK]
    assert results[1].reason.startswith("killed in trace at the trace limit of 2 s")
    assert "build=hang" in results[1].reason
    assert 2.0 <= spent < 6.0
    pool.close()
    assert not set(descendants_of_this_process()) - before


def test_seconds_are_kept_and_slow_is_a_timeout(light_pool, call):
    """Case 2: the seconds of quick builds are stored; the slow one is a timeout, not an error."""
    pool = light_pool(trace_s=1.5)
    tasks = [call("sleep", seconds=0.3), call("sleep", seconds=0.4), call("sleep", seconds=120)]
    results = by_id(pool.run(tasks))
    quick, other, slow = (results[task.id] for task in tasks)
    assert 0.3 <= quick.seconds["trace"] < 1.5
    assert 0.4 <= other.seconds["trace"] < 1.5
    assert slow.status is Status.COMPILE_TIMEOUT
    assert 1.4 <= slow.seconds["trace"] < 4


def test_children_in_other_sessions_are_killed(light_pool, call, tmp_path, wait_for, all_gone):
    """Case 3: a hanging child's children, also one in a session of its own, die at the limit; no pipe blocks."""
    pids = tmp_path / "pids"
    pool = light_pool(trace_s=1.0)
    hang = call("hang", pids=str(pids), children=[["sleep", "600"], ["setsid", "sleep", "601"]])
    begin = time.monotonic()
    (result,) = pool.run([hang])
    assert result.status is Status.COMPILE_TIMEOUT
    assert time.monotonic() - begin < 5
    all_gone(wait_for(pids, 3), within_s=0.5)


def test_what_a_finished_task_left_is_killed(light_pool, call, tmp_path, wait_for, all_gone):
    """Case 11: a task that ends well leaves no daemon, and no fork that holds its pipes."""
    pids = tmp_path / "pids"
    pool = light_pool()
    results = list(pool.run([call("daemonise", pids=str(pids)), call("fork_holding_pipes", pids=str(pids))]))
    assert [result.status for result in results] == [Status.OK, Status.OK]
    all_gone(wait_for(pids, 2), within_s=0.5)


def test_trace_and_backend_have_limits_of_their_own(light_pool, call):
    """The trace limit ends with the trace; the back end's covers all phases after it together."""
    pool = light_pool(workers=3, trace_s=0.8, backend_s=1.6)
    long_trace = call("phases", phases=[("trace", 5.0)])
    long_backend = call("phases", phases=[("trace", 0.1), ("mlir", 1.0), ("ptxas", 5.0)])
    within = call("phases", phases=[("trace", 0.4), ("mlir", 0.7), ("export", 0.5)])
    results = by_id(pool.run([long_trace, long_backend, within]))
    assert "killed in trace at the trace limit of 0.8 s" in results[long_trace.id].reason
    assert "killed in ptxas at the backend limit of 1.6 s" in results[long_backend.id].reason
    assert 0.9 < results[long_backend.id].seconds["mlir"] < 1.4
    assert results[within.id].ok
    assert list(results[within.id].seconds) == ["start", "trace", "mlir", "export"]


@pytest.mark.parametrize("where", ["pool", "task"])
def test_limits_by_the_interface(light_pool, call, where):
    """Case 63: a limit given to the pool, or to one task, kills at that limit; the task's wins."""
    limits = Limits(trace_s=0.5)
    pool = light_pool(trace_s=0.5 if where == "pool" else 50.0)
    (result,) = pool.run([call("hang", limits=limits if where == "task" else None)])
    assert "limit of 0.5 s" in result.reason
    assert result.seconds["trace"] < 2


def test_no_false_timeouts_in_a_queue(light_pool, call):
    """Case 9: the clock starts when the child starts, so waiting for a worker costs no limit."""
    pool = light_pool(workers=2, trace_s=1.2)
    results = list(pool.run(call("busy", seconds=0.2) for _ in range(16)))
    assert [result.status for result in results] == [Status.OK] * 16


@pytest.mark.slow
def test_no_false_timeouts_in_a_long_queue(light_pool, call):
    """Case 9 as it was met: 40 variants of 2 s of CPU, 2 workers, a limit of 10 s."""
    pool = light_pool(workers=2, trace_s=10.0)
    results = list(pool.run(call("busy", seconds=2.0) for _ in range(40)))
    assert [result.status for result in results] == [Status.OK] * 40


def test_a_grandchild_s_memory_counts(light_pool, call, tmp_path, wait_for, all_gone):
    """Case 7: a grandchild that goes for 3 GB under a limit of 1 GB is stopped; the next variant runs."""
    pids = tmp_path / "pids"
    pool = light_pool(workers=1, memory_bytes=10**9)
    eater, next_one = call("grandchild_eats", pids=str(pids), mib=3000), call("echo")
    results = by_id(pool.run([eater, next_one]))
    assert results[eater.id].status is Status.COMPILE_OUT_OF_MEMORY
    assert "MiB of memory > 953 MiB" in results[eater.id].reason
    assert results[eater.id].peak_rss_bytes > 10**9
    assert results[next_one.id].ok
    all_gone(wait_for(pids), within_s=0.5)


def test_shared_memory_counts_once(light_pool, call):
    """Four forks that share 300 MiB use 300 MiB, not 1500."""
    pool = light_pool(workers=1, memory_bytes=800 * 2**20)
    (result,) = pool.run([call("forks_share_memory", seconds=0.5)])
    assert result.ok, result.reason


def test_a_file_s_appearance_begins_a_phase(light_pool, tmp_path):
    """Native code that can't report is still known to be past the file that it writes."""
    pool = light_pool(trace_s=5.0, backend_s=1.2)
    file = tmp_path / "kernel.ptx"
    task = Task(
        "t",
        {"file": str(file), "then": 60},
        entry="jobs_entries:milestone",
        milestones=(Milestone("ptxas", "mlir", str(tmp_path / "*.ptx")),),
    )
    (result,) = pool.run([task])
    assert result.phase == "ptxas"
    assert 0.2 < result.seconds["mlir"] < 0.8
    assert "killed in ptxas" in result.reason
