"""Two tuners on one GPU take turns: one lock file a GPU, named by its UUID, in the shared temporary directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tunekit.errors import UserError
from tunekit.measure.gpu_state import GpuMonitor


def lock_path(device: int, directory: Path | None = None) -> Path:
    """The lock file of CUDA device `device`; by UUID, so that CUDA_VISIBLE_DEVICES' numbering doesn't matter."""
    with GpuMonitor(device) as monitor:
        name = monitor.uuid() or f"cuda-{device}"
    safe = re.sub(r"[^A-Za-z0-9-]", "_", name)
    return (directory or Path(tempfile.gettempdir())) / f"tunekit-{safe}.lock"


@contextlib.contextmanager
def turn(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`, waiting for as long as another process has it.

    `on_wait` hears one sentence if there is a wait. A holder that dies frees the lock.

    Raises:
        UserError: the lock file can't be made or opened.
    """
    try:
        handle = open_lock(path)
    except OSError as error:
        raise UserError(f"can't take turns on the GPU: {path}: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait:
                on_wait(f"waiting for another tuner on this GPU ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def open_lock(path: Path) -> int:
    """A handle on the lock file, made where it is missing.

    An existing file is opened without O_CREAT: in a sticky directory Linux refuses
    that flag on another user's file (fs.protected_regular), and filelock always sets it.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL)
    except FileExistsError:  # another tuner made it in between
        return os.open(path, flags)
    os.fchmod(handle, 0o666)  # another user's tuner takes turns as well
    return handle
