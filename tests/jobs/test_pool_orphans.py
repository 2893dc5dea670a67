"""The parent dies, is interrupted or fails: no descendant remains."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

HANGING = """
import sys
from tunekit.jobs import Limits, Pool, Task

children = [["sleep", "600"], ["setsid", "sleep", "601"]]
payload = {{"pids": {pids!r}, "children": children}}
with Pool(workers=2, warm=(), limits=Limits(trace_s=300)) as pool:
    with open({pids!r}, "a") as file:
        file.write(str(pool.zygote_pid) + "\\n")
    {before}
    tasks = [Task("a", payload, entry="jobs_entries:hang"), Task("b", {{"seconds": 0.7}}, entry="jobs_entries:sleep")]
    for result in pool.run(tasks):
        {at_result}
"""

ONE_TASK = """
from tunekit.jobs import Pool, Task
with Pool(warm=()) as pool:
    print(next(pool.run([Task("t", {}, "jobs_entries:nothing")])).ok)
"""


def hanging(pids, before="pass", at_result="pass"):
    return HANGING.format(pids=str(pids), before=before, at_result=at_result)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_parent_is_killed_in_mid_compile(script, tmp_path, wait_for, all_gone, number):
    """Case 4: kill -9 on the parent: the zygote, the hanging child and its children are gone in 2 s."""
    pids = tmp_path / "pids"
    parent = script(hanging(pids))
    numbers = wait_for(pids, 4)
    parent.send_signal(number)
    parent.wait(5)
    all_gone(numbers, within_s=2.0)
    again = script(ONE_TASK)
    assert again.communicate(timeout=10)[0].strip() == "True"


def test_the_parent_is_killed_while_the_zygote_warms_up(script, tmp_path, wait_for, all_gone):
    """Case 4: also while the zygote imports, when it can't look for its parent."""
    pids = tmp_path / "pids"
    source = "from tunekit.jobs import Pool\np = Pool()\nopen({!r}, 'w').write(str(p.zygote_pid))\ninput()"
    parent = script(source.format(str(pids)))
    (zygote,) = wait_for(pids)
    time.sleep(0.4)
    parent.kill()
    parent.wait(5)
    all_gone([zygote], within_s=2.0)


def test_the_parent_dies_and_a_fork_of_it_holds_the_socket(script, tmp_path, wait_for, all_gone):
    """Case 4: a data loader forked from the parent keeps the socket open; the descendants go all the same."""
    pids = tmp_path / "pids"
    fork = "import os, time; pid = os.fork(); (time.sleep(600) if pid == 0 else open({!r}, 'w').write(str(pid)))"
    loader = tmp_path / "loader"
    parent = script(hanging(pids, before=fork.format(str(loader))))
    numbers = wait_for(pids, 4)
    (forked,) = wait_for(loader)
    parent.kill()
    parent.wait(5)
    try:
        all_gone(numbers, within_s=2.0)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_ctrl_c(script, tmp_path, wait_for, all_gone):
    """Case 11: after SIGINT nothing is left, and the process ends by KeyboardInterrupt in 2 s."""
    pids = tmp_path / "pids"
    parent = script(hanging(pids))
    numbers = wait_for(pids, 4)
    begin = time.monotonic()
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=10)
    assert time.monotonic() - begin < 2.5
    assert "KeyboardInterrupt" in output
    all_gone(numbers, within_s=0.2)


def test_an_exception_in_user_code(script, tmp_path, wait_for, all_gone):
    """Case 11: an exception while results are handled leaves nothing behind."""
    pids = tmp_path / "pids"
    parent = script(hanging(pids, at_result="raise ValueError('in user code')"))
    output, _ = parent.communicate(timeout=20)
    assert "in user code" in output
    all_gone(wait_for(pids, 4), within_s=0.2)


def test_an_end_without_close(script, tmp_path, wait_for, all_gone):
    """Case 11: a program that never closes its pool leaves nothing either."""
    pids = tmp_path / "pids"
    source = """
from tunekit.jobs import Pool, Task
pool = Pool(warm=())
print(next(pool.run([Task("t", {}, "jobs_entries:nothing")])).ok)
open(%r, "w").write(str(pool.zygote_pid))
"""
    parent = script(source % str(pids))
    output, _ = parent.communicate(timeout=20)
    assert output.strip() == "True"
    all_gone(wait_for(pids), within_s=2.0)


def test_the_parent_and_the_zygote_are_killed_together(script, tmp_path, wait_for, all_gone):
    """Case 4: with nobody left to look after it, a hanging compile ends by the kernel's hand."""
    pids = tmp_path / "pids"
    parent = script(hanging(pids))
    zygote, *numbers = wait_for(pids, 4)
    parent.send_signal(signal.SIGSTOP)  # it must not clean up after the zygote
    os.kill(zygote, signal.SIGKILL)
    parent.kill()
    parent.wait(5)
    all_gone([numbers[0]], within_s=2.0)
    for number in numbers[1:]:  # what the compile itself had started is nobody's any more
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def test_what_is_stopped_for_a_final_does_not_stay_stopped(script, tmp_path, wait_for, all_gone):
    """The pool's process and the zygote are killed in a pause: what a compile had started goes as well."""
    pids = tmp_path / "pids"
    before = (  # the loop waits for results meanwhile
        "import threading, time; stop = lambda: (time.sleep(1.5), pool.pause()); threading.Thread(target=stop).start()"
    )
    parent = script(hanging(pids, before=before))
    zygote, *numbers = wait_for(pids, 4)
    deadline = time.monotonic() + 10
    while not all(_stopped(number) for number in numbers):
        assert time.monotonic() < deadline, "nothing was paused"
        time.sleep(0.05)
    parent.send_signal(signal.SIGSTOP)  # it must not clean up after the zygote
    os.kill(zygote, signal.SIGKILL)
    parent.kill()
    parent.wait(5)
    try:
        all_gone(numbers, within_s=3.0)
    finally:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
