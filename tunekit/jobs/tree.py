"""Process trees: who descends from whom, what they use, and how to end all of them.

Read from /proc. Descendants that left the process group or the session count: a
task's child is a subreaper, so whatever it starts stays below it while it lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

# The variable of the environment by which a pool's processes are found.
MARKER = "TUNEKIT_POOL"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def children(pid: int) -> list[int]:
    """The direct children of a process; empty if it is gone."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return _children_by_scan(pid)  # a kernel without CONFIG_PROC_CHILDREN
        except OSError:
            continue
    return found


def _children_by_scan(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid ...", and the name may hold anything
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    found.append(int(entry.name))
    return found


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants, parents first."""
    found = [pid]
    for member in found:
        found.extend(child for child in children(member) if child not in found)
    return found


def kill_trees(pids: Iterable[int]) -> None:
    """SIGKILL processes with all their descendants, also those that fork while they are hunted.

    Everything is stopped first, until a look finds nobody new: a stopped process
    starts no other. Does not reap.
    """
    for member in stop_trees(pids):
        send(member, signal.SIGKILL)


def stop_trees(pids: Iterable[int]) -> set[int]:
    """SIGSTOP processes with all their descendants, also those that are forked meanwhile; who they are."""
    roots = list(pids)
    stopped: set[int] = set()
    while True:
        fresh = {member for root in roots for member in tree(root)} - stopped
        if not fresh:
            return stopped
        for member in fresh:
            send(member, signal.SIGSTOP)
        stopped |= fresh


def send(pid: int, number: int) -> None:
    """Send a signal, to nobody if the process is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory, pages shared between the processes counted once for each: cheap, never too low."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                total += int(file.read().split()[1]) * PAGE_BYTES
        except (OSError, IndexError):
            continue
    return total


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional memory: shared pages split among those who share them. Milliseconds a process."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                match = _PSS.search(file.read())
        except OSError:
            continue
        total += int(match[1]) * 1024 if match else 0
    return total


def starved_s(pid: int) -> float:
    """Seconds that a process's main thread was ready to run and no core was free; 0 if not known."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def become_subreaper() -> None:
    """From now on this process, not init, inherits its descendants' orphans."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent's thread ends; at once if it already has."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def marked(marker: str) -> list[int]:
    """Processes of this user whose environment, as they were started, holds `marker`."""
    found: list[int] = []
    needle = marker.encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def kill_marked(marker: str, within_s: float = 2.0) -> None:
    """SIGKILL what carries `marker` until nothing does."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = marked(marker)
        if not found:
            return
        kill_trees(found)
        time.sleep(0.01)


def descendants_of_this_process() -> list[int]:
    """All living descendants of the calling process."""
    return [pid for pid in tree(os.getpid()) if pid != os.getpid()]
