"""A stand-in for CUDA's driver: a shared object that counts what it is asked and keeps each thread's capture mode."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from tunekit.backends.host import compiler

SOURCE = """
static __thread int mode;
static int refuses;
int cuThreadExchangeStreamCaptureMode(int *given)
{
    int old = mode;
    if (refuses)
        return 801;
    mode = *given;
    *given = old;
    return 0;
}
int mode_here(void) { return mode; }
void set_mode_here(int now) { mode = now; }
void refuse(int now) { refuses = now; }
"""


class Driver:
    """The library at `path`, compiled there."""

    def __init__(self, path: Path) -> None:
        source = path.with_suffix(".c")
        source.write_text(SOURCE)
        subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
        self.path = path
        self.library = ctypes.CDLL(str(path))

    @property
    def mode(self) -> int:
        """The capture mode of the calling thread: 0 global, 1 thread-local, 2 relaxed."""
        return int(self.library.mode_here())

    @mode.setter
    def mode(self, now: int) -> None:
        self.library.set_mode_here(now)

    def refuse(self) -> None:
        """From now on it takes no thread's mode."""
        self.library.refuse(1)
