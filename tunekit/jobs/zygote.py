"""The zygote: a warm process that forks a child for each task and supervises it.

Started fresh by the pool (``python -m tunekit.jobs.zygote FD``), it imports and
initialises what all tasks share, starts no thread, and runs no task itself, so it
always has time to enforce limits. It ends, with every descendant, when the pool's end
of its socket closes or the pool's process is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from typing import Any, NoReturn

from tunekit.errors import words_of
from tunekit.jobs import child, tree
from tunekit.jobs.channel import Reader, Writer, encoded
from tunekit.jobs.running import Running

# How often limits and memory are looked at while something runs, and the parent's life while nothing does.
TICK_S = 0.05
IDLE_TICK_S = 0.5
# How long to wait for a killed process to be gone.
ORPHANS_LIMIT_S = 2.0


def main() -> None:
    """Warm up, then serve until the pool goes."""
    pool = socket.socket(fileno=int(sys.argv[1]))
    parent = os.getppid()
    start = _first_message(pool)
    sys.path[:] = start["path"]
    tree.become_subreaper()
    _end_with(pool)
    began = time.monotonic()
    try:
        _warm(start["warm"])
    except Exception as error:
        # The edge of the warm-up: an import may raise anything, and the pool must hear of it.
        pool.sendall(encoded({"event": "failed", "reason": words_of(error)}))
        return
    _outlive(pool)
    zygote = Zygote(pool, parent, int(start["workers"]))
    threads = len(os.listdir("/proc/self/task"))
    zygote.tell({"event": "ready", "threads": threads, "seconds": time.monotonic() - began})
    zygote.serve()


def _first_message(pool: socket.socket) -> dict[str, Any]:
    reader = Reader(pool.fileno())
    while not reader.closed:
        messages = reader.messages()
        if messages:
            return messages[0]
    sys.exit(0)


def _warm(backends: list[str]) -> None:
    import tunekit.backends.entry  # noqa: F401  # so that children need not
    from tunekit.backends import backend

    for name in backends:
        backend(name).warm()


def _end_with(pool: socket.socket) -> None:
    """Until _outlive, have the kernel end this process when the pool goes.

    Imports hold the GIL for seconds, so no Python code could see it in time; the
    pool sends nothing during the warm-up, and SIGIO's default action is to terminate.
    """
    fcntl.fcntl(pool, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pool, fcntl.F_SETFL, fcntl.fcntl(pool, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if not pool.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            sys.exit(0)  # it went before the signal was armed


def _outlive(pool: socket.socket) -> None:
    flags = fcntl.fcntl(pool, fcntl.F_GETFL)
    fcntl.fcntl(pool, fcntl.F_SETFL, flags & ~os.O_ASYNC)


class Zygote:
    """The loop: tasks in, children forked, limits kept, endings out."""

    def __init__(self, pool: socket.socket, parent: int, workers: int) -> None:
        pool.setblocking(False)
        self._inbox = Reader(pool.fileno())
        self._outbox = Writer(pool.fileno())
        self._parent = parent
        self._workers = workers
        self._queue: deque[dict[str, Any]] = deque()
        self._running: dict[int, Running] = {}
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._guard: int | None = None
        self._lifeline: int | None = None
        self._next_look = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(pool, selectors.EVENT_READ)
        self._pool = pool
        self._wakeup = _wakeup_pipe()
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def tell(self, message: dict[str, Any]) -> None:
        self._outbox.send(message)

    def serve(self) -> NoReturn:
        while not self._inbox.closed and os.getppid() == self._parent:
            for message in self._inbox.messages():
                self._obey(message)
            self._drain_wakeups()
            self._reap()
            self._supervise()
            self._start_tasks()
            self._wait()
        self._kill_everything()
        os._exit(0)

    def _obey(self, message: dict[str, Any]) -> None:
        op = message.get("op")
        if op == "task":
            self._queue.append(message)
        elif op == "pause":
            self._pause()
            self.tell({"event": "paused"})
        elif op == "resume":
            self._resume()
            self.tell({"event": "resumed"})
        elif op == "cancel":
            self._queue.clear()
            for task in self._running.values():
                task.killed_for = "cancel"
            tree.kill_trees(self._running)
            self._resume()
            self.tell({"event": "cancelled", "running": len(self._running)})

    # Time stands still in a pause, so that a stopped task loses none of its limit.

    def _now(self) -> float:
        return (time.monotonic() if self._paused_at is None else self._paused_at) - self._paused_s

    def _pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()
            self._guard = self._fork_guard()
            tree.stop_trees(self._running)

    def _resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None
            for pid in self._running:
                for member in tree.tree(pid):
                    tree.send(member, signal.SIGCONT)
            if self._guard is not None:
                tree.send(self._guard, signal.SIGKILL)
                self._guard = None

    def _fork_guard(self) -> int | None:
        """A process that outlives this one, should that be killed, by as long as it takes to end what it has stopped.

        A child dies with the zygote, but not what a child has started: stopped, it would stay for ever
        where the pool is gone as well.
        """
        read_end, write_end = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # without a guard: the pool is one, too
            os.close(read_end)
            os.close(write_end)
            return None
        if pid == 0:
            try:
                os.setsid()
                self._abandon(write_end)
                signal.set_wakeup_fd(-1)
                os.read(read_end, 1)  # ends with the last process that has the other end: the zygote
                tree.kill_marked(f"{tree.MARKER}={os.environ[tree.MARKER]}")
            finally:
                os._exit(0)
        os.close(read_end)
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._lifeline = write_end
        return pid

    def _start_tasks(self) -> None:
        while self._queue and len(self._running) < self._workers and self._paused_at is None:
            task = self._queue.popleft()
            try:
                running = self._fork(task, self._now())
            except OSError as error:  # no process, memory or disk left: this task's misfortune alone
                self.tell({"event": "finished", "id": task["id"], "ending": _unborn(error)})
                continue
            self._running[running.pid] = running
            self._selector.register(running.results, selectors.EVENT_READ)
            self.tell({"event": "started", "id": running.id, "pid": running.pid})

    def _fork(self, task: dict[str, Any], now: float) -> Running:
        output = tempfile.TemporaryFile(prefix="tunekit-stderr-")  # noqa: SIM115  # closed by Running.ending
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._abandon(read_end)
            child.run(task, write_end, output.fileno(), zygote)
        os.close(write_end)
        return Running(task, pid, read_end, output, now)

    def _abandon(self, read_end: int) -> None:
        """In the child: close what is the zygote's, so that no descendant keeps it open."""
        os.close(read_end)
        for running in self._running.values():
            os.close(running.results)
        self._selector.close()
        self._pool.close()
        os.close(self._wakeup)
        if self._lifeline is not None:
            os.close(self._lifeline)

    def _supervise(self) -> None:
        now = self._now()
        due = now >= self._next_look
        if due:
            self._next_look = now + TICK_S
        for running in self._running.values():
            self._announce(running, running.listen(self._paused_s))
            if running.silent:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(running.results)
            if self._paused_at is not None or not due:
                continue
            self._announce(running, running.look(now))
            if running.killed_for is None and running.broken_limit(now):
                tree.kill_trees([running.pid])

    def _announce(self, running: Running, phases: list[tuple[str, float]]) -> None:
        for phase, seconds in phases:
            self.tell({"event": "phase", "id": running.id, "phase": phase, "seconds": seconds})

    def _reap(self) -> None:
        """Collect the dead. What an ended task left behind has become this process's child: end it."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            running = self._running.pop(pid, None)
            if running is None:
                continue
            self._kill_orphans()
            self._announce(running, running.listen(self._paused_s))
            with contextlib.suppress(KeyError):
                self._selector.unregister(running.results)
            ending = running.ending(self._now(), status, usage.ru_maxrss)
            self.tell({"event": "finished", "id": running.id, "ending": ending})
        self._kill_orphans()

    def _orphans(self) -> list[int]:
        """Children that are neither a task nor the guard: what tasks have left behind."""
        return [pid for pid in tree.children(os.getpid()) if pid not in self._running and pid != self._guard]

    def _kill_orphans(self) -> None:
        orphans = self._orphans()
        deadline = time.monotonic() + ORPHANS_LIMIT_S
        while orphans:
            tree.kill_trees(orphans)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            left = self._orphans()
            if left and time.monotonic() > deadline:
                return  # in an uninterruptible wait: it dies when that ends, and is reaped then
            if left == orphans:
                time.sleep(0.001)
            orphans = left

    def _kill_everything(self) -> None:
        tree.kill_trees(self._running)
        self._running.clear()
        self._kill_orphans()

    def _wait(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox.waiting else 0)
        self._selector.modify(self._pool, events)
        self._selector.select(TICK_S if self._running else IDLE_TICK_S)
        self._outbox.flush()

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup, 4096):
                pass


def _unborn(error: OSError) -> dict[str, Any]:
    """The ending of a task whose child could not be started."""
    return {"phase": "start", "seconds": {}, "error": f"can't start a worker: {error}"}


def _wakeup_pipe() -> int:
    """A file descriptor that becomes readable when a child ends or SIGTERM asks to."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return read_end


if __name__ == "__main__":
    main()
