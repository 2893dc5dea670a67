"""Compiles in the background, for all kernels of a process: one thread, one compile at a time, a bounded queue.

The thread waits for a compile process that has its limits (see jobs); it never holds what a call waits for. It ends
when nothing is left to do, and with the interpreter: the compile under way is then given up, and the end of this
process ends its compile process in any case.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunekit.dispatch.forked import Guard, renew
from tunekit.errors import TunekitError
from tunekit.model import Values, Variant

if TYPE_CHECKING:
    from tunekit.dispatch.resolver import Resolver

logger = logging.getLogger("tunekit")

MOST_JOBS = 64
"""Compiles that may wait for their turn."""
EXIT_S = 5.0
"""How long the interpreter's end waits for the thread's."""


@dataclass(frozen=True)
class Job:
    """One compile that `resolver` wants, by its key; dropped where that is gone when its turn comes."""

    key: str
    variant: Variant
    problem: Values
    resolver: weakref.ref[Resolver]


class Queue:
    """The jobs of this process and the thread that does them. A job's key is in it once."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._jobs: deque[Job] = deque()
        self._asked: set[tuple[str, weakref.ref[Resolver]]] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._told_full = False
        renew(self)
        atexit.register(self.stop)

    def ask(self, job: Job) -> str:
        """Have it compiled when its turn comes; says what becomes of it."""
        with self._guard:
            if (job.key, job.resolver) in self._asked:
                return "it is being compiled in the background"
            if self._stopping:
                return "this process is ending"
            if len(self._jobs) >= MOST_JOBS:
                full = f"the queue of background compiles is full ({MOST_JOBS})"
                if not self._told_full:
                    self._told_full = True
                    logger.warning("%s: %s and what follows wait until they are asked for again", full, job.variant)
                return full
            self._asked.add((job.key, job.resolver))
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tunekit-compile", daemon=True)
                self._thread.start()
        return "it is being compiled in the background"

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is left to do; whether that was within the time."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self._thread is None

    def stop(self) -> None:
        """Give up what is under way and take nothing more."""
        with self._guard:
            self._stopping = True
            self._jobs.clear()
            thread = self._thread
        if thread is not None:
            thread.join(EXIT_S)

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._jobs:
                    self._thread, self._told_full = None, False
                    return
                job = self._jobs.popleft()
            try:
                self._do(job)
            finally:
                with self._guard:
                    self._asked.discard((job.key, job.resolver))

    def _do(self, job: Job) -> None:
        resolver = job.resolver()
        if resolver is None or self._stopping:
            return
        artifact, why = resolver.compile_now(job.key, job.variant, job.problem, lambda: self._stopping)
        if self._stopping:
            return
        if artifact is None:
            logger.warning("%s: %s was not compiled in the background: %s", resolver.spec.name, job.variant, why)
        try:
            resolver.arrived(job.variant)
        except TunekitError as error:  # a lost GPU, say: the next call tells
            logger.warning("%s: %s could not be put in place: %s", resolver.spec.name, job.variant, error)

    def after_fork(self) -> None:
        """A child has none of its parent's threads, and leaves the parent's jobs to the parent."""
        self._jobs.clear()
        self._asked.clear()
        self._thread = None


_queue = Queue()
ask = _queue.ask
wait = _queue.wait
