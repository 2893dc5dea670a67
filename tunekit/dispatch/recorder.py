"""What a real run asks for, as a workload for ``tunekit sweep``: recorded by ``tunekit.capture``, or by its command.

The tables count calls as they always do; recording only reads these counts by problem. Under ``tunekit capture`` each
process writes a part of its own, at its end and every few seconds, so that one which is killed loses little.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

from tunekit.dispatch.forked import Guard, renew
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.spec import KernelSpec
from tunekit.spec.workloads import counted_problems, workload_text
from tunekit.store import files

DIRECTORY = "TUNEKIT_CAPTURE"
"""The environment variable by which the command tells processes where their parts go."""
EVERY_S = 2.0


class Recorded(Protocol):
    """A kernel, as far as it is recorded."""

    spec: KernelSpec

    def record(self, on: bool) -> None: ...

    def problems(self) -> tuple[Counter[Values], int]:
        """Calls by problem since recording began; and how many more there were of problems beyond count."""
        ...


class Recorder:
    """Records all kernels of this process, those loaded later too; it keeps them alive meanwhile."""

    def __init__(self, kernels: Iterable[Recorded]) -> None:
        self._kernels: list[Recorded] = []
        for kernel in kernels:
            self.note(kernel)

    def note(self, kernel: Recorded) -> None:
        kernel.record(True)
        self._kernels.append(kernel)

    def restart(self) -> None:
        """Count from nothing again."""
        for kernel in self._kernels:
            kernel.record(True)

    def stop(self) -> None:
        for kernel in self._kernels:
            kernel.record(False)

    def text(self) -> str:
        """What was asked for so far, as a workload file; empty where nothing was."""
        total: Counter[tuple[str, Values]] = Counter()
        beyond = 0
        for kernel in list(self._kernels):
            problems, more = kernel.problems()
            beyond += more
            for problem, calls in problems.items():
                total[kernel.spec.name, problem] += calls
        if not +total:
            return ""
        remark = f"{len(+total)} problems, {(+total).total()} calls"
        return workload_text(total, remark + (f"; {beyond} calls of further problems" if beyond else ""))


class Part:
    """The part of this process under ``tunekit capture``."""

    def __init__(self, directory: Path, recorder: Recorder) -> None:
        self._directory = directory
        self._recorder = recorder
        self._guard = Guard()
        self._file = directory
        self._written = ""
        renew(self)
        atexit.register(self.write)
        self._begin()
        self._at_sigterm()
        self._at_the_end_of_forked_workers()

    def write(self) -> None:
        with self._guard:
            text = self._recorder.text()
            if text and text != self._written:
                with contextlib.suppress(OSError):  # the run goes on; the command says how many parts it has
                    files.publish(text.encode(), self._file, self._directory)
                    self._written = text

    def after_fork(self) -> None:
        """A child has a part of its own, without what its parent did."""
        self._recorder.restart()
        self._begin()

    def _begin(self) -> None:
        self._written = ""
        self._file = self._directory / f"{files.fresh_name()}.jsonl"
        threading.Thread(target=self._every, args=(os.getpid(),), name="tunekit-capture", daemon=True).start()

    def _every(self, process: int) -> None:
        never = threading.Event()
        while not never.wait(EVERY_S) and os.getpid() == process:
            self.write()

    def _at_sigterm(self) -> None:
        """Write before SIGTERM ends this process, where nobody else handles it."""

        def end(number: int, frame: FrameType | None) -> None:
            self.write()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end)

    def _at_the_end_of_forked_workers(self) -> None:
        """multiprocessing ends its forked workers without atexit; it has its own."""
        from multiprocessing import util

        util.register_after_fork(self, lambda part: util.Finalize(None, part.write, exitpriority=0))


_active: list[Recorder] = []
_parts: list[Part] = []
_guard = Guard()


def note(kernel: Recorded, environ: str | None) -> None:
    """A kernel was loaded: record it, where something is being recorded or `environ` names a directory for parts."""
    with _guard:
        if _active:
            _active[0].note(kernel)
        elif environ:
            _active.append(Recorder([kernel]))
            _parts.append(Part(Path(environ), _active[0]))


def check_output(path: Path) -> None:
    """Refuse, before anything runs, a file that couldn't be written after it.

    Raises:
        UserError: why it can't.
    """
    why = files.unwritable(path.parent) if path.parent.is_dir() else f"{path.parent} is no directory"
    if path.is_dir():
        why = "it is a directory"
    if why:
        raise UserError(f"can't write the workload {path}: {why}")


@contextlib.contextmanager
def capture(path: str | Path) -> Iterator[None]:
    """Record what this process asks kernels for, into a workload file for ``tunekit sweep --workload``.

    Calls count from here to the end of the context, by problem, of all kernels; those that failed for want of a kernel
    too. Not seen: functions that came from `bind`, and what a CUDA graph replays.

    Raises:
        UserError: the file can't be written, nothing was called, or a capture is under way already.
    """
    from tunekit.dispatch.stats import living

    path = Path(path).absolute()
    check_output(path)
    with _guard:
        if _active:
            raise UserError("a capture is under way in this process already")
        recorder = Recorder(living())
        _active.append(recorder)
    try:
        yield
    finally:
        _active.remove(recorder)
        text = recorder.text()
        recorder.stop()
    if not text:
        raise UserError(f"{path} is not written: no kernel was called")
    files.publish(text.encode(), path, path.parent)


def merge(parts: Path) -> tuple[Counter[tuple[str, Values]], int]:
    """The calls of all parts by spec and problem; and how many parts there were."""
    total: Counter[tuple[str, Values]] = Counter()
    found = sorted(parts.glob("*.jsonl"))
    for part in found:
        total.update(counted_problems(part))
    return total, len(found)
