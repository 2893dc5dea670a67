"""Every way in which a child ends has a status and a sentence of its own."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tunekit.trials import Status


@pytest.fixture
def ending(light_pool, host_build):
    def run(build):
        (result,) = light_pool(workers=1, trace_s=20, backend_s=20).run([host_build(build)])
        return result

    return run


def test_segfault(ending):
    """Case 6: SIGSEGV is named, with where it happened."""
    result = ending("segfault")
    assert result.status is Status.COMPILE_CRASHED
    assert result.signal == signal.SIGSEGV
    assert "worker died (signal 11, SIGSEGV)" in result.reason
    assert "Segmentation fault" in result.reason
    assert "in unruly_build" in result.reason


def test_abort(ending):
    """Case 6: SIGABRT is named, with the end of stderr."""
    result = ending("abort")
    assert result.signal == signal.SIGABRT
    assert "SIGABRT" in result.reason
    assert "about to abort" in result.reason


def test_exit_0_without_a_result(ending):
    """Case 6: exit status 0 without a result is no success."""
    result = ending("exit0")
    assert result.status is Status.COMPILE_CRASHED
    assert result.exit_code == 0
    assert "exited with status 0 and left no result" in result.reason
    assert "leaving early" in result.reason


def test_recursion(ending):
    """Case 6: a RecursionError is the build's error, not a crash."""
    result = ending("recursion")
    assert result.status is Status.TRACE_ERROR
    assert "RecursionError" in result.reason


def test_the_four_reasons_differ(light_pool, host_build):
    """Case 6: four ways to end, four reasons, in one run."""
    tasks = [host_build(build) for build in ("segfault", "abort", "exit0", "recursion", "good")]
    results = list(light_pool().run(tasks))
    assert len({result.reason.partition("[")[0] for result in results}) == 5
    assert [result.id for result in results if result.ok] == [tasks[-1].id]


def test_an_empty_message_still_says_what_failed(ending):
    """Case 13: variant, DSL version, arch and exit status, where the error itself says nothing."""
    result = ending("empty_error")
    for words in ("RuntimeError", "build=empty_error", "on host", "nvidia-cutlass-dsl 4.", "exit status 0"):
        assert words in result.reason


def test_a_silent_death_still_says_what_failed(ending):
    """Case 13: the same for a worker that leaves without a word."""
    result = ending("exit9")
    for words in ("status 9", "build=exit9", "on host", "nvidia-cutlass-dsl 4.", "trace"):
        assert words in result.reason


def test_a_compiler_s_words_are_kept(ending):
    result = ending("bad_source")
    assert result.status is Status.COMPILE_ERROR
    assert "unknown type name" in result.reason
    assert result.phase == "compile"


def test_sys_exit_is_an_error(light_pool, call):
    (result,) = light_pool().run([call("call_exit")])
    assert result.status is Status.TRACE_ERROR
    assert "SystemExit" in result.reason


def test_one_of_three_workers_is_killed(light_pool, call):
    """Case 5: kill -9 of one worker: that variant is reported with the signal, the rest finish."""
    pool = light_pool(workers=3)
    tasks = [call("sleep", seconds=1.0) for _ in range(3)]
    pids = {}

    def kill_the_second(event):
        pids.setdefault(event.task, event.pid)
        if event.kind == "phase" and event.task == tasks[1].id:
            os.kill(pids[event.task], signal.SIGKILL)

    results = {result.id: result for result in pool.run(tasks, on_event=kill_the_second)}
    assert [results[task.id].status for task in tasks] == [Status.OK, Status.COMPILE_CRASHED, Status.OK]
    assert "worker died (signal 9, SIGKILL)" in results[tasks[1].id].reason


def test_without_limits_a_vanished_worker_is_reported(light_pool, call):
    """Case 5: with no limit configured, a build that calls os._exit(9) ends the wait at once."""
    pool = light_pool()
    begin = time.monotonic()
    results = list(pool.run([call("leave", code=9), call("echo")]))
    assert time.monotonic() - begin < 5
    assert {str(result.status) for result in results} == {"compile_crashed", "ok"}
    assert any("exited with status 9" in result.reason for result in results)


def test_floods_and_large_results(light_pool, call):
    """Neither 64 MiB on stderr and stdout nor a result of 4 MiB blocks anybody; the end of stderr is kept."""
    (result,) = light_pool(trace_s=30).run([call("flood", mib=64)])
    assert result.ok
    assert len(result.value["large"]) == 4 * 2**20
    assert result.stderr.endswith("the last words\n")
    assert len(result.stderr) <= 4000


def test_a_child_that_closes_its_pipe(light_pool, call):
    """No result can come any more; the supervisor neither spins nor waits for ever."""
    (result,) = light_pool(trace_s=10).run([call("close_everything", seconds=0.5)])
    assert result.status is Status.COMPILE_CRASHED
    assert "left no result" in result.reason


@pytest.mark.parametrize(("what", "words"), [("list", "returned list, not a dict"), ("nan", "not JSON compliant")])
def test_what_can_t_be_a_result(light_pool, call, what, words):
    """A wrong type or a NaN is the entry's error, in words."""
    (result,) = light_pool().run([call("return_wrongly", what=what)])
    assert result.status is Status.TRACE_ERROR
    assert words in result.reason


def test_nonsense_in_the_pipe_is_no_message(light_pool, call):
    """A task that writes into descriptors that are not its own harms no other, nor the zygote."""
    pool = light_pool(workers=2)
    zygote = pool.zygote_pid
    results = list(pool.run([call("scribble"), call("sleep", seconds=0.3), call("scribble"), call("echo")]))
    assert [result.status for result in results] == [Status.OK] * 4
    assert pool.zygote_pid == zygote
