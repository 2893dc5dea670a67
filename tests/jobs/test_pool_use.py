"""The pool as its users see it: order, events, pauses, cancelling, a dead zygote, growth."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tunekit.errors import TunekitError
from tunekit.jobs import Limits, Pool
from tunekit.jobs.tree import descendants_of_this_process
from tunekit.trials import Status


def test_results_come_as_they_finish(light_pool, call):
    slow, quick = call("sleep", seconds=1.0), call("sleep", seconds=0.1)
    assert [result.id for result in light_pool(workers=2).run([slow, quick])] == [quick.id, slow.id]


def test_tasks_are_drawn_as_there_is_room(light_pool, call):
    """A search can decide late: no more than two tasks a worker are drawn ahead."""
    drawn = []

    def tasks():
        for index in range(20):
            drawn.append(index)
            yield call("nothing")

    results = light_pool(workers=2).run(tasks())
    next(results)
    assert len(drawn) <= 5
    assert len(list(results)) == 19


def test_work_goes_on_while_a_result_is_handled(light_pool, call):
    results = light_pool(workers=1).run([call("nothing"), call("sleep", seconds=0.5)])
    next(results)
    time.sleep(0.8)
    begin = time.monotonic()
    assert next(results).ok
    assert time.monotonic() - begin < 0.3


def test_events_tell_the_phases(light_pool, call):
    events = []
    task = call("phases", phases=[("trace", 0.1), ("mlir", 0.2)])
    list(light_pool().run([task], on_event=events.append))
    assert [(event.kind, event.phase) for event in events] == [
        ("started", "start"),
        ("phase", "trace"),
        ("phase", "mlir"),
        ("finished", "mlir"),
    ]
    assert 0.1 <= events[2].seconds < events[3].seconds


def test_running_shows_a_stuck_task(light_pool, call):
    seen = []
    pool = light_pool(trace_s=1.5)
    tasks = [call("hang", id="stuck"), call("sleep", seconds=0.8)]
    list(pool.run(tasks, on_event=lambda _: seen.extend(pool.running())))
    assert any(event.task == "stuck" and event.phase == "trace" and event.seconds > 0.7 for event in seen)
    assert pool.running() == []


def test_a_pause_stops_at_once_and_costs_no_limit(light_pool, call):
    """Finals pause compiling: no CPU is used, the limits stand still, and then the work goes on."""
    pool = light_pool(workers=1, trace_s=1.5)
    results = pool.run([call("nothing"), call("busy", seconds=0.6), call("nothing")])
    next(results)
    time.sleep(0.2)
    pool.pause()
    before = cpu_of_descendants()
    time.sleep(2.0)
    assert cpu_of_descendants() - before < 0.2
    pool.resume()
    assert [result.status for result in results] == [Status.OK, Status.OK]


def cpu_of_descendants():
    """CPU seconds of the zygotes' children: what compiles use."""
    ticks = 0
    for pid in descendants_of_this_process():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_leaving_early_cancels_the_rest(light_pool, call, tmp_path, wait_for, all_gone):
    pids = tmp_path / "pids"
    pool = light_pool(workers=2)
    for result in pool.run([call("hang", pids=str(pids)), call("nothing"), call("hang"), call("hang")]):
        assert result.ok
        running = wait_for(pids)  # on a busy machine it may start later than the other one ends
        break
    all_gone(running, within_s=0.5)
    assert [result.ok for result in pool.run([call("echo")])] == [True]


def test_a_run_hears_of_its_own_tasks_only(light_pool, call):
    """Events that nobody listened to, or of a run that was left, are dropped with their run."""
    pool = light_pool(workers=1)
    list(pool.run([call("nothing", id="silent")]))
    for _ in pool.run([call("nothing", id="left"), call("hang", id="cancelled")]):
        break
    events = []
    list(pool.run([call("nothing", id="heard")], events.append))
    assert {event.task for event in events} == {"heard"}


def test_two_tasks_of_one_name(light_pool, call):
    with pytest.raises(ValueError, match="two unfinished tasks"):
        list(light_pool().run([call("sleep", seconds=0.2, id="same"), call("nothing", id="same")]))


def test_a_killed_zygote_is_replaced(light_pool, call, tmp_path, wait_for, all_gone):
    """What it ran is tried once more, then reported, and its children gone; the rest runs in a new one."""
    pids = tmp_path / "pids"
    pool = light_pool(workers=1)
    tasks = [call("kill_parent"), call("echo"), call("hang", pids=str(pids), children=[["setsid", "sleep", "600"]])]
    numbers = []

    def kill_twice(event):
        if event.task == tasks[2].id and event.kind == "started":
            numbers.extend(wait_for(pids, 2))
            pids.unlink()
            os.kill(pool.zygote_pid, signal.SIGKILL)

    results = pool.run(tasks, kill_twice)
    first, second = next(results), next(results)
    assert (first.id, first.status) == (tasks[0].id, Status.COMPILE_CRASHED)
    assert "the compile server died (signal 9)" in first.reason and first.server_died
    assert second.ok
    third = next(results)
    assert (third.id, third.status) == (tasks[2].id, Status.COMPILE_CRASHED)
    all_gone(numbers, within_s=1.0)


def test_an_innocent_task_survives_a_killed_zygote(light_pool, call):
    """Nothing is said against a task that merely ran when something else killed the compile server."""
    pool = light_pool(workers=2)
    tasks = [call("sleep", seconds=0.6), call("sleep", seconds=0.6)]
    killed = []

    def kill_once(event):
        if event.kind == "started" and not killed:
            killed.append(pool.zygote_pid)
            os.kill(pool.zygote_pid, signal.SIGKILL)

    assert [result.status for result in pool.run(tasks, kill_once)] == [Status.OK, Status.OK]
    assert killed


def test_an_interrupted_warm_up(light_pool, call, monkeypatch):
    """Ctrl-C while the zygote starts leaves a pool that closes, and that still works."""
    pool = light_pool()
    receive, interrupted = pool._zygote.receive, []

    def interrupt_once(*arguments):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return receive(*arguments)

    monkeypatch.setattr(pool._zygote, "receive", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        next(pool.run([call("echo")]))
    assert next(pool.run([call("echo")])).ok


def test_a_warm_up_that_fails_is_one_sentence():
    with Pool(warm=("no_such",)) as pool, pytest.raises(TunekitError, match="unknown backend 'no_such'"):
        pool.warm_up  # noqa: B018


def test_a_closed_pool_refuses():
    pool = Pool(warm=())
    pool.close()
    pool.close()
    with pytest.raises(TunekitError, match="closed"):
        pool.warm_up  # noqa: B018


def test_children_are_blind_to_the_gpu_and_alone(light_pool, call, monkeypatch):
    """Case 8: whatever the parent sees, a compile sees no GPU, and starts in one thread."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (result,) = light_pool().run([call("facts")])
    assert result.value["cuda"] == ""
    assert result.value["threads"] == 1


def test_nothing_grows_over_300_tasks(light_pool, call):
    """Case 10: threads, memory and file descriptors of zygote and children stay bounded; a fork stays quick."""
    pool = light_pool(workers=2)
    begun = []
    facts = []
    sizes = []
    for index, result in enumerate(pool.run((call("facts") for _ in range(300)), on_event=begun.append)):
        facts.append(result.value)
        if index in (50, 299):
            sizes.append(zygote_size(pool))
    assert len(facts) == 300
    assert {fact["threads"] for fact in facts} == {1}
    assert max(fact["fds"] for fact in facts[250:]) <= max(fact["fds"] for fact in facts[:50])
    early, late = sizes
    assert late["threads"] == early["threads"] == 1
    assert late["fds"] <= early["fds"] + 2
    assert late["rss"] <= early["rss"] + 2 * 2**20


def zygote_size(pool):
    pid = pool.zygote_pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def test_limits_are_optional():
    assert Limits() == Limits(trace_s=None, backend_s=None, memory_bytes=None)
