"""A thread that looks at the database for a kernel, and refreshes it when other winners are recorded."""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.dispatch.graphs import beside_captures
from tunekit.errors import TunekitError
from tunekit.store.winners import winners_mark

if TYPE_CHECKING:
    from tunekit.dispatch.kernel import Kernel

logger = logging.getLogger("tunekit")

EXIT_S = 2.0
Mark = tuple[tuple[int, ...], ...]


def watch(kernel: Kernel, database: Path, every_s: float) -> None:
    """Have `kernel` refreshed when the winners of its spec change; looked at every `every_s`.

    The thread ends with the kernel, and with the interpreter. A forked child has none.
    """
    stop = threading.Event()
    arguments = (weakref.ref(kernel), kernel.spec.name, database, every_s, stop)
    thread = threading.Thread(target=_watch, args=arguments, name="tunekit-watch", daemon=True)
    weakref.finalize(kernel, _end, thread, stop)
    thread.start()


def _watch(kernel: weakref.ref[Kernel], spec: str, database: Path, every_s: float, stop: threading.Event) -> None:
    files, winners = _files(database), winners_mark(database, spec)
    told = False
    while not stop.wait(every_s):
        now = _files(database)
        if now == files:
            continue
        found = winners_mark(database, spec)
        if found == winners:
            files = now
            continue
        with beside_captures() as allowed:
            if allowed and _refresh(kernel):
                files, winners = now, found
            elif not allowed and not told:
                told = True
                logger.warning("%s: other winners are recorded; call refresh() outside CUDA graph captures", spec)


def _refresh(kernel: weakref.ref[Kernel]) -> bool:
    alive = kernel()
    if alive is None:
        return False
    try:
        alive.reread()
    except TunekitError as error:
        logger.warning("%s can't be refreshed: %s", alive.spec.name, error)
    return True


def _files(database: Path) -> Mark:
    """What changes with a database's files."""
    found: list[tuple[int, ...]] = []
    for path in (database, database.with_name(f"{database.name}-wal")):
        try:
            stat = path.stat()
        except OSError:
            found.append(())
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(EXIT_S)
