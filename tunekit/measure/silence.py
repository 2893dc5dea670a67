"""Finals and compiles of one machine keep apart, whichever processes they are in: by two lock files.

A final holds ``tunekit-finals.lock`` shared, so that finals on several GPUs run side by side;
whoever compiles holds ``tunekit-compiles.lock`` shared. Each first takes its own, then looks
whether somebody holds the other: a compiler gives way (what it runs is stopped where it is),
a final waits for that. A compiler that doesn't give way, such as another version's, does not
hold up a final for ever: the final goes on, and its record says what ran beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from tunekit.measure.lock import open_lock

FINALS, COMPILES = "tunekit-finals.lock", "tunekit-compiles.lock"
WAIT_S = 30.0
STEP_S = 0.1

Tell = Callable[[str], None]


def _path(name: str, directory: Path | None) -> Path:
    return (directory or Path(tempfile.gettempdir())) / name


def held(path: Path) -> bool:
    """Whether some process holds the lock file; one that can't be opened is held by nobody."""
    try:
        handle = open_lock(path)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def silence(directory: Path | None = None, *, wait_s: float = WAIT_S, on_wait: Tell | None = None) -> Iterator[str]:
    """Hold a final: ask compilers to give way, and wait for it; yields what went on beside it, in words, or nothing."""
    finals, compiles = _path(FINALS, directory), _path(COMPILES, directory)
    try:
        handle = open_lock(finals)
    except OSError as error:
        yield f"whether others compile is unknown: {finals}: {error.strerror or error}"
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        until, told = time.monotonic() + wait_s, False
        while (busy := held(compiles)) and time.monotonic() < until:
            if on_wait and not told:
                on_wait("the final waits for another process's compiles to pause")
                told = True
            time.sleep(STEP_S)
        yield f"another process compiled on this machine, and had not paused after {wait_s:g} s" if busy else ""
    finally:
        os.close(handle)


class Compiles:
    """A compiler's side; a context manager around its compiles, which begins once no final is held."""

    def __init__(self, directory: Path | None = None, on_wait: Tell | None = None) -> None:
        self._finals, self._compiles = _path(FINALS, directory), _path(COMPILES, directory)
        self._on_wait = on_wait
        self._handle: int | None = None

    def __enter__(self) -> Compiles:
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def give_way(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Where a final is held on this machine: pause, and resume when it has ended."""
        if not held(self._finals):
            return
        pause()
        self._release()
        try:
            self._wait()
        finally:
            resume()

    def _wait(self) -> None:
        told = False
        while True:
            with contextlib.suppress(OSError):
                self._handle = open_lock(self._compiles)
                fcntl.flock(self._handle, fcntl.LOCK_SH)
            if not held(self._finals):
                return
            self._release()
            if self._on_wait and not told:
                self._on_wait("compiling pauses: a final is held on this machine")
                told = True
            time.sleep(STEP_S)

    def _release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
