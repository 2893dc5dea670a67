"""The runtime library's stand-in in this process: compiled, loaded in its place, and answered for."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tunekit.backends.host import compiler
from tunekit.backends.load import RUNTIME_LIBRARY
from tunekit.errors import TunekitError

SOURCE = Path(__file__).with_name("stand_in.c")
# The runtime library's own name is the SONAME, so that the dynamic linker takes the stand-in for it.
OPTIONS = ("-shared", "-fPIC", "-O1", f"-Wl,-soname,{RUNTIME_LIBRARY}")

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
DEVICE_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
KERNEL_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
REFUSE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)


class Answers(ctypes.Structure):
    """struct Answers of stand_in.c."""

    _fields_ = (
        ("launch", LAUNCH),
        ("device_attribute", DEVICE_ATTRIBUTE),
        ("kernel_attribute", KERNEL_ATTRIBUTE),
        ("refuse", REFUSE),
    )


@functools.cache
def stand_in() -> Callable[[Answers], None]:
    """Load the stand-in for the life of the process; the function that sets who answers its calls.

    Raises:
        TunekitError: the real runtime library is loaded already, or the stand-in does not compile.
    """
    real = loaded_runtime()
    if real is not None:
        raise TunekitError(
            f"{real} is loaded in this process, so a launch can't be recorded: do it in a process of its own, "
            "before any kernel is loaded and without importing cutlass"
        )
    with tempfile.TemporaryDirectory(prefix="tunekit-stand-in-") as scratch:
        so = Path(scratch) / "stand_in.so"
        command = [compiler(), *OPTIONS, "-o", str(so), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            raise TunekitError(f"the launch stand-in does not compile: {done.stderr.strip()[-2000:]}")
        library = ctypes.CDLL(str(so), mode=ctypes.RTLD_GLOBAL)
    set_answers = library.tunekit_answers
    set_answers.argtypes, set_answers.restype = (ctypes.POINTER(Answers),), None
    return lambda answers: set_answers(ctypes.byref(answers))


def loaded_runtime() -> str | None:
    """The path of the real runtime library if this process has it loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if Path(path[2]).name == RUNTIME_LIBRARY:
            return "/" + path[2]
    return None
