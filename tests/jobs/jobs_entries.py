"""What the pool's tests run in children."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path


def nothing(payload, phase):
    return {}


def echo(payload, phase):
    return {"payload": payload}


def sleep(payload, phase):
    note(payload)
    phase("trace")
    time.sleep(payload["seconds"])
    return {"slept": payload["seconds"]}


def phases(payload, phase):
    """Each phase of the payload for its seconds."""
    for name, seconds in payload["phases"]:
        phase(name)
        time.sleep(seconds)
    return {}


def busy(payload, phase):
    """Uses a core for some CPU seconds."""
    end = time.process_time() + payload["seconds"]
    while time.process_time() < end:
        pass
    return {"cpu_s": time.process_time()}


def hang(payload, phase):
    """Never comes back, and holds the GIL; with children inside and outside its session, if asked for."""
    note(payload)
    for command in payload.get("children", ()):
        note(payload, subprocess.Popen(command).pid)
    phase(payload.get("phase", "trace"))
    collections.deque(itertools.repeat(0), maxlen=0)


def daemonise(payload, phase):
    """Leaves behind a process in a session of its own whose parent is gone, and returns."""
    steps = ["os.fork() and os._exit(0)", "os.setsid()", "print(os.getpid(), flush=True)", "time.sleep(600)"]
    source = "; ".join(["import os, time", *steps])
    child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    note(payload, int(child.stdout.readline()))
    return {}


def fork_holding_pipes(payload, phase):
    """Forks a child that keeps every file descriptor open, and returns."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    note(payload, pid)
    return {}


def leave(payload, phase):
    os._exit(payload["code"])


def raise_error(payload, phase):
    phase(payload.get("phase", "trace"))
    raise ValueError(payload.get("message", ""))


def call_exit(payload, phase):
    sys.exit(0)


def return_wrongly(payload, phase):
    return [1] if payload["what"] == "list" else {"time": float("nan")}


def flood(payload, phase):
    """Writes some MiB to stderr and stdout, then returns a large value."""
    line = "x" * 1023 + "\n"
    for _ in range(payload["mib"] * 512):
        sys.stderr.write(line)
        sys.stdout.write(line)
    sys.stderr.write("the last words\n")
    return {"large": "y" * (4 * 2**20)}


def close_everything(payload, phase):
    """Closes the pipe to the supervisor, then hangs for a while."""
    os.closerange(3, 1000)
    time.sleep(payload["seconds"])
    return {}


def grandchild_eats(payload, phase):
    """A grandchild that allocates, and touches, 100 MiB at a time."""
    source = (
        "import time; held = []\n"
        f"for _ in range({payload['mib']} // 100): held.append(bytearray(100 * 2**20)); time.sleep(0.01)\n"
        "time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", source])
    note(payload, child.pid)
    child.wait()
    return {}


def forks_share_memory(payload, phase):
    """Allocates 300 MiB, then forks four children that share it."""
    held = bytearray(300 * 2**20)
    for _ in range(4):
        if os.fork() == 0:
            time.sleep(payload["seconds"])
            os._exit(len(held) & 1)
    for _ in range(4):
        os.wait()
    return {}


def kill_parent(payload, phase):
    os.kill(os.getppid(), 9)
    time.sleep(60)


def facts(payload, phase):
    """What a child finds in its environment."""
    return {
        "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": len(os.listdir("/proc/self/task")),
        "torch": "torch" in sys.modules,
        "fds": len(os.listdir("/proc/self/fd")),
        "ppid": os.getppid(),
    }


def milestone(payload, phase):
    """Native code that writes a file half-way."""
    phase("mlir")
    time.sleep(0.3)
    Path(payload["file"]).write_text("ptx")
    time.sleep(payload["then"])
    return {}


def note(payload, pid=None):
    if "pids" in payload:
        with open(payload["pids"], "a") as file:
            file.write(f"{os.getpid() if pid is None else pid}\n")


def scribble(payload, phase):
    """Writes what is no message, or a wrong one, into every open pipe and file."""
    words = (
        b'garbage\n[1]\n{"phase": 3}\n{"phase": "x", "at": "y"}\n{"phase": "x", "at": NaN}\n{"value": 3}\n'
        b'{"value": null}\n{"value": {"status": [], "seconds": {"a": "b"}}}\n{"error": {}}\n'
    )
    for fd in range(3, 40):
        with contextlib.suppress(OSError):
            os.write(fd, words)
    return {}
