"""A stand-in for CUDA's driver: a shared object that counts what it is asked and keeps each thread's capture mode."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from tunekit.backends.host import compiler

DEVICES = 2
SOURCE = """
#define _GNU_SOURCE
#include <unistd.h>
#include <sys/syscall.h>

static int inits, initialising_thread, init_ms, init_fails, retained[2];
int cuInit(unsigned flags)
{
    usleep(1000 * init_ms);
    initialising_thread = syscall(SYS_gettid);
    __sync_fetch_and_add(&inits, 1);
    return init_fails;
}
int cuDeviceGet(int *device, int ordinal)
{
    if (ordinal >= 2)
        return 101;
    *device = 40 + ordinal;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = retained;
    __sync_fetch_and_add(&retained[device - 40], 1);
    return 0;
}
int inits_so_far(void) { return inits; }
int thread_of_init(void) { return initialising_thread; }
int retained_so_far(int device) { return retained[device]; }
void let_init(int ms, int code) { init_ms = ms, init_fails = code; }

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

    @property
    def inits(self) -> int:
        return int(self.library.inits_so_far())

    @property
    def initialising_thread(self) -> int:
        """The system's number of the thread that initialised it last."""
        return int(self.library.thread_of_init())

    @property
    def retained(self) -> list[int]:
        """How often each device's primary context was retained."""
        return [int(self.library.retained_so_far(device)) for device in range(DEVICES)]

    def let_init(self, take_s: float = 0.0, code: int = 0) -> None:
        """From now on its initialisation takes so long, and ends with `code`."""
        self.library.let_init(round(1000 * take_s), code)

    def refuse(self) -> None:
        """From now on it takes no thread's mode."""
        self.library.refuse(1)
