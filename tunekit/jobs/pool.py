"""The pool: the caller's side of the zygote."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tunekit.errors import TunekitError
from tunekit.jobs import tree
from tunekit.jobs.channel import Reader, encoded
from tunekit.jobs.machine import worker_count
from tunekit.jobs.task import SERVER, Ending, Event, Limits, Task, TaskResult, conclude
from tunekit.launch import module_command

WARM_UP_LIMIT_S = 120.0
CLOSE_LIMIT_S = 2.0
TICK_S = 1.0
# A zygote that dies this often in a row without finishing anything is not started again.
MOST_DEATHS = 3
# Threads of numerical libraries would be running when the zygote forks.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GPU_BLIND = {"CUDA_VISIBLE_DEVICES": ""}

OnEvent = Callable[[Event], None]


class Pool:
    """Runs tasks in forked children, `workers` at a time; a context manager.

    `warm` names the backends that the zygote initialises; `limits` hold for tasks
    without their own. `why` says how the number of workers came about. Used by one
    thread; :meth:`running` may be called from another. Leaving the context, or this
    process's death, ends every descendant.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        warm: tuple[str, ...] = ("cutedsl",),
        limits: Limits | None = None,
    ) -> None:
        self.workers, self.why = worker_count(workers)
        self._warm = warm
        self._limits = limits or Limits()
        self._results: deque[TaskResult] = deque()
        self._events: deque[Event] = deque()
        self._tasks: dict[str, Task] = {}
        self._started: dict[str, tuple[float, str]] = {}
        self._awaited: str | None = None
        self._bereaved: set[str] = set()  # tasks that have lost a zygote
        self._paused = False
        self._deaths = 0
        self._closed = False
        self._zygote = _Zygote(self._warm, self.workers)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        tasks: Iterable[Task],
        on_event: OnEvent | None = None,
        between: Callable[[], None] | None = None,
    ) -> Iterator[TaskResult]:
        """The results of `tasks`, each as it is finished.

        Tasks are drawn as there is room, one a worker ahead. While the caller holds a
        result, what was drawn goes on. Leaving the iteration early cancels the rest. `between` is
        called about once a second while results are awaited; it may pause the pool for a while.

        Raises:
            ValueError: two unfinished tasks with one id.
            TunekitError: the warm-up failed, or the zygote keeps dying.
        """
        source = iter(tasks)
        drained = False
        try:
            while True:
                while not drained and len(self._tasks) < 2 * self.workers:
                    task = next(source, None)
                    if task is None:
                        drained = True
                    else:
                        self._submit(task)
                if not self._tasks and not self._results:
                    return
                while not self._results:
                    if between is not None:
                        between()
                    self._pump(on_event, None if between is None else TICK_S)
                yield self._results.popleft()
        finally:
            if self._tasks and not self._closed:
                self._cancel()
            self._results.clear()
            self._events.clear()

    def running(self) -> list[Event]:
        """What runs now: each task's phase, and the seconds since its child started."""
        now = time.monotonic()
        started = list(self._started.items())
        return [Event(task, "phase", phase, now - since) for task, (since, phase) in started]

    def pause(self) -> None:
        """Stop all children where they are, at once; their limits stand still. No task starts before resume()."""
        self._paused = True
        if self._zygote.ready:
            self._ask("pause", "paused")

    def resume(self) -> None:
        self._paused = False
        if self._zygote.ready:
            self._ask("resume", "resumed")

    def close(self) -> None:
        """End the zygote and every descendant, and wait until they are gone. May be called again."""
        if not self._closed:
            self._closed = True
            self._zygote.close()
            self._started.clear()

    @property
    def warm_up(self) -> dict[str, Any]:
        """How the warm-up went, waiting for its end: ``seconds``, and ``threads`` there are now."""
        self._await_ready()
        return self._zygote.facts

    @property
    def zygote_pid(self) -> int:
        """The process that forks the children, for whoever measures it."""
        return self._zygote.pid

    def _submit(self, task: Task) -> None:
        if task.id in self._tasks:
            raise ValueError(f"two unfinished tasks are called {task.id!r}")
        self._tasks[task.id] = task
        self._await_ready()
        self._zygote.send(self._message(task))

    def _message(self, task: Task) -> dict[str, Any]:
        return {
            "op": "task",
            "id": task.id,
            "entry": task.entry,
            "payload": dict(task.payload),
            "limits": dataclasses.asdict(task.limits or self._limits),
            "milestones": [dataclasses.asdict(milestone) for milestone in task.milestones],
        }

    def _await_ready(self) -> None:
        if self._closed:
            raise TunekitError("the pool is closed")
        if not self._zygote.ready:
            self._zygote.await_ready()
            if self._paused:
                self._zygote.send({"op": "pause"})

    def _ask(self, op: str, answer: str) -> None:
        self._awaited = answer
        self._zygote.send({"op": op})
        while self._awaited is not None:
            self._pump(None)

    def _cancel(self) -> None:
        self._tasks.clear()  # so that a zygote that dies now begins nothing again
        self._bereaved.clear()
        if not self._zygote.ready:  # it was told of no task yet, and its next message is "ready"
            return
        self._ask("cancel", "cancelled")
        while self._started:
            self._pump(None)

    def _pump(self, on_event: OnEvent | None, timeout_s: float | None = None) -> None:
        """Take in what the zygote says; wait for it if there is nothing, for `timeout_s` at most."""
        messages = self._zygote.receive(timeout_s)
        if messages is None:
            self._mourn()
            return
        for message in messages:
            event = self._note(message)
            if event is not None:
                self._events.append(event)
        while on_event is not None and self._events:
            on_event(self._events.popleft())

    def _note(self, message: dict[str, Any]) -> Event | None:
        kind = message["event"]
        if kind in ("paused", "resumed", "cancelled"):
            if self._awaited == kind:
                self._awaited = None
            return None
        name = str(message["id"])
        if kind == "started":
            self._started[name] = (time.monotonic(), "start")
            return Event(name, "started", "start", pid=message["pid"])
        if kind == "phase":
            since, _ = self._started.get(name, (time.monotonic(), ""))
            self._started[name] = (since, message["phase"])
            return Event(name, "phase", message["phase"], message["seconds"])
        ending = Ending(**message["ending"])
        self._finish(name, ending)
        self._deaths = 0
        return Event(name, "finished", ending.phase, sum(ending.seconds.values()))

    def _finish(self, name: str, ending: Ending) -> None:
        self._started.pop(name, None)
        self._bereaved.discard(name)
        task = self._tasks.pop(name, None)
        if task is not None:
            self._results.append(conclude(task, ending))

    def _mourn(self) -> None:
        """The zygote is dead: what it had not begun goes to a new one, and so, once, does what it ran.

        Which of its tasks killed it, if any, shows when one is in a second zygote that dies.
        """
        code = self._zygote.bury()
        how = f"the compile server died (signal {-code})" if code < 0 else f"the compile server exited with {code}"
        for name, (since, phase) in list(self._started.items()):
            if name not in self._bereaved:
                self._bereaved.add(name)
                del self._started[name]
                continue
            spent = {phase: time.monotonic() - since}
            self._finish(name, Ending(phase=phase, seconds=spent, killed_for=SERVER, stderr=how))
        self._deaths += 1
        if self._deaths >= MOST_DEATHS:
            raise TunekitError(f"{how}, {self._deaths} times in a row; its last words: {self._zygote.last_words}")
        self._zygote = _Zygote(self._warm, self.workers)
        self._awaited = None
        for task in list(self._tasks.values()):
            self._await_ready()
            self._zygote.send(self._message(task))


class _Zygote:
    """The zygote's process and socket."""

    def __init__(self, warm: tuple[str, ...], workers: int) -> None:
        ours, theirs = socket.socketpair()
        self.ready = False
        self.facts: dict[str, Any] = {}
        self._marker = f"{tree.MARKER}={uuid.uuid4().hex}"
        self._words: IO[bytes] = tempfile.TemporaryFile(prefix="tunekit-zygote-")  # noqa: SIM115  # closed in bury()
        self._socket = ours
        self._reader = Reader(ours.fileno())
        name, _, value = self._marker.partition("=")
        package_parent = str(Path(__file__).resolve().parent.parent.parent)
        environment = {**os.environ, **ONE_THREAD, **GPU_BLIND, name: value}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                module_command("tunekit.jobs.zygote", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal is the pool's to handle
            )
        self.send({"path": sys.path, "warm": list(warm), "workers": workers})

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(encoded(message))

    def receive(self, timeout_s: float | None = None) -> list[dict[str, Any]] | None:
        """Messages, after waiting for some; None once the zygote is gone and all it said was read."""
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        messages = self._reader.messages() if readable else []
        return None if self._reader.closed and not messages else messages

    def await_ready(self) -> None:
        deadline = time.monotonic() + WARM_UP_LIMIT_S
        while time.monotonic() < deadline:
            messages = self.receive(max(0.0, deadline - time.monotonic()))
            if messages is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(CLOSE_LIMIT_S)  # so that its own status is told
                code = self.bury()
                raise TunekitError(f"the compile server ended while starting (status {code}): {self.last_words}")
            for message in messages:
                if message["event"] == "failed":
                    self.bury()
                    raise TunekitError(f"the compile server can't start: {message['reason']}")
                self.facts = message
                self.ready = True
                return
        self.bury()
        raise TunekitError(f"the compile server did not start within {WARM_UP_LIMIT_S:g} s: {self.last_words}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The end of what the zygote itself wrote to stderr."""
        self._words.seek(0)
        return self._words.read()[-2000:].decode(errors="replace").strip() or "none"

    def close(self) -> None:
        """End the zygote: it sees its socket close and takes its descendants along."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_LIMIT_S)
        self.bury()

    def bury(self) -> int:
        """Make sure that the zygote and all that it started are gone; its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        code = self._process.wait()
        tree.kill_marked(self._marker)
        return code
