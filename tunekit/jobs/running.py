"""One running task, as its supervisor sees it: phases, clocks, memory, limits, end."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping
from typing import IO, Any

from tunekit.jobs import tree
from tunekit.jobs.channel import Reader

TRACE = ("start", "trace")
STDERR_TAIL_BYTES = 4000
STARVATION_CREDIT = 0.5


class Running:
    """A forked child and what is known of it. Times are the supervisor's: they stand still in a pause."""

    def __init__(self, task: Mapping[str, Any], pid: int, results: int, output: IO[bytes], now: float) -> None:
        self.id = str(task["id"])
        self.pid = pid
        self.results = results
        self.killed_for: str | None = None
        self._task = task
        self._reader = Reader(results)
        self._output = output
        self._started = now
        self._phase = "start"
        self._since = now
        self._seconds: dict[str, float] = {}
        self._value: Any = None
        self._error: str | None = None
        self._limit: float | None = None
        self._peak = 0
        self._starved = 0.0
        self._starved_in_trace = 0.0

    def listen(self, skew: float) -> list[tuple[str, float]]:
        """Take in the child's messages; the phases that began, with the seconds since its start.

        `skew` turns the child's monotonic clock into the supervisor's.
        """
        begun: list[tuple[str, float]] = []
        for message in self._reader.messages():
            phase, at = message.get("phase"), message.get("at")
            if isinstance(phase, str) and isinstance(at, float):
                if phase != self._phase:
                    begun.append(self._enter(phase, at - skew))
            elif isinstance(message.get("value"), dict):
                self._value = message["value"]
            elif "error" in message:
                self._error = str(message["error"])
        return begun

    @property
    def silent(self) -> bool:
        """Whether nothing more can come through the pipe."""
        return self._reader.closed

    def look(self, now: float) -> list[tuple[str, float]]:
        """The phases that began by a file's appearance; notes memory, and time without a core."""
        self._starved = tree.starved_s(self.pid)
        if self._phase in TRACE:
            self._starved_in_trace = self._starved
        self._peak = max(self._peak, tree.rss_bytes(tree.tree(self.pid)))
        begun: list[tuple[str, float]] = []
        for milestone in self._task["milestones"]:
            if milestone["after"] == self._phase and (files := glob.glob(milestone["pattern"])):
                begun.append(self._enter(milestone["phase"], now - _age(files[0])))
        return begun

    def _enter(self, phase: str, at: float) -> tuple[str, float]:
        at = max(at, self._since)
        self._spend(at)
        self._phase = phase
        return phase, at - self._started

    def _spend(self, until: float) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + max(0.0, until - self._since)
        self._since = max(until, self._since)

    def broken_limit(self, now: float) -> str | None:
        """The limit that the task has broken: ``trace``, ``backend``, ``memory``; None if none.

        Time that the child was ready to run but got no core is not counted, up to half the limit:
        a crowded machine makes fewer false timeouts, and a hang still ends in time.
        """
        limits = self._task["limits"]
        traced = sum(self._seconds.get(phase, 0.0) for phase in TRACE)
        if self._phase in TRACE:
            name, spent, starved = "trace", now - self._started, self._starved
        else:
            name, spent, starved = "backend", now - self._started - traced, self._starved - self._starved_in_trace
        allowed = limits[f"{name}_s"]
        if allowed is not None and spent - min(starved, STARVATION_CREDIT * allowed) > allowed:
            return self._breaks(name, allowed)
        memory = limits["memory_bytes"]
        if memory is not None and self._peak > memory:
            used = tree.pss_bytes(tree.tree(self.pid))
            if used > memory:
                return self._breaks("memory", memory)
        return None

    def _breaks(self, name: str, limit: float) -> str:
        self.killed_for, self._limit = name, limit
        return name

    def ending(self, now: float, status: int, peak_kib: int) -> dict[str, Any]:
        """The facts of the end, as an :class:`~tunekit.jobs.task.Ending`; closes what belonged to the task."""
        self._spend(now)
        os.close(self.results)
        died = os.WIFSIGNALED(status)
        return {
            "phase": self._phase,
            "seconds": self._seconds,
            "value": None if self.killed_for else self._value,
            "error": self._error,
            "exit_code": None if died else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if died else None,
            "killed_for": self.killed_for,
            "limit": self._limit,
            "starved_s": self._starved,
            "peak_rss_bytes": max(self._peak, peak_kib * 1024),
            "stderr": self._tail(),
        }

    def _tail(self) -> str:
        with self._output as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - STDERR_TAIL_BYTES))
            return file.read(STDERR_TAIL_BYTES).decode(errors="replace")


def _age(path: str) -> float:
    """Seconds since a file was written; 0 if it is gone again."""
    try:
        return max(0.0, time.time() - os.stat(path).st_mtime)
    except OSError:
        return 0.0
