"""What a forked child does: set its house in order, run the entry, say how it went."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import resource
import signal
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from tunekit.errors import words_of
from tunekit.jobs.channel import encoded
from tunekit.jobs.tree import become_subreaper, die_with_parent

STDERR_FD = 2
# No compile writes a file of this size: it stops a print loop before it fills the disk.
LARGEST_FILE_BYTES = 2**30
# Among processes short of memory, let the kernel take a compile before anything else of the user's.
OOM_SCORE = "500"


def run(task: Mapping[str, Any], results: int, output: int, parent: int) -> NoReturn:
    """Run a task and leave. `results` is the pipe back, `output` the file for stdout and stderr."""
    try:
        _settle(output, parent)
        message = encoded(_call(task, results))
    except BaseException as error:
        # The process's edge: whatever is thrown here ends as words in the result, SystemExit included.
        message = encoded({"error": words_of(error)})
        traceback.print_exc()
    _write(results, message)
    os._exit(0)


def _settle(output: int, parent: int) -> None:
    """A session, a subreaper's duty, default signals, and limits of its own."""
    os.setsid()
    die_with_parent(parent)
    become_subreaper()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    for fd in (1, STDERR_FD):
        os.dup2(output, fd)
    faulthandler.enable(STDERR_FD)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = LARGEST_FILE_BYTES if hard == resource.RLIM_INFINITY else min(hard, LARGEST_FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)


def _call(task: Mapping[str, Any], results: int) -> dict[str, Any]:
    def phase(name: str) -> None:
        _write(results, encoded({"phase": name, "at": time.monotonic()}))

    module, _, function = str(task["entry"]).partition(":")
    entry = getattr(importlib.import_module(module), function)
    value = entry(task["payload"], phase)
    if not isinstance(value, dict):
        raise TypeError(f"{task['entry']} returned {type(value).__name__}, not a dict")
    return {"value": value}


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
