"""The runtime library's stand-in: compiled, loaded in its place or linked into an object, and answered for.

A shared object names the runtime library as one that it needs, so the stand-in must be loaded under that name and
the real one must not be. An object can be linked with the stand-in, and is then independent of both.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from tunekit.backends.host import compiler
from tunekit.backends.load import RUNTIME_LIBRARY
from tunekit.errors import TunekitError

SOURCE = Path(__file__).with_name("stand_in.c")

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


SetAnswers: TypeAlias = Callable[[Answers], None]


@functools.cache
def stand_in() -> SetAnswers:
    """Load the stand-in under the runtime library's name, for the life of the process; who answers its calls is set
    by what this returns.

    Raises:
        TunekitError: the real runtime library is loaded already, or the stand-in does not compile.
    """
    real = loaded_runtime()
    if real is not None:
        raise TunekitError(
            f"{real} is loaded in this process, so the launches of a shared object can't be recorded: do it in a "
            "process of its own, before any kernel is loaded and without importing cutlass"
        )
    with tempfile.TemporaryDirectory(prefix="tunekit-stand-in-") as scratch:
        so = Path(scratch) / "stand_in.so"
        _compile(so, SOURCE, f"-Wl,-soname,{RUNTIME_LIBRARY}")
        return answers_of(ctypes.CDLL(str(so), mode=ctypes.RTLD_GLOBAL))


def link_with_stand_in(obj: Path, so: Path) -> None:
    """Link an exported object with a stand-in of its own, which it calls whatever else the process has loaded.

    Raises:
        TunekitError: the object calls what neither the stand-in nor tvm_ffi has; the linker names it.
    """
    from tvm_ffi.libinfo import find_libtvm_ffi

    _compile(so, obj, SOURCE, find_libtvm_ffi(), "-Wl,-Bsymbolic", "-Wl,-z,defs")


def answers_of(library: ctypes.CDLL) -> SetAnswers:
    """Who answers the calls of the stand-in within `library`, to be set."""
    set_answers = library.tunekit_answers
    set_answers.argtypes, set_answers.restype = (ctypes.POINTER(Answers),), None
    return lambda answers: set_answers(ctypes.byref(answers))


def _compile(so: Path, *arguments: str | Path) -> None:
    command = [compiler(), "-shared", "-fPIC", "-O1", "-o", str(so), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        said = done.stderr.strip()[-2000:] or f"exit status {done.returncode}"
        raise TunekitError(f"the launch stand-in can't be linked by {command[0]}: {said}")


def loaded_runtime() -> str | None:
    """The path of the real runtime library if this process has it loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, path = line.partition("/")
        if Path(path).name == RUNTIME_LIBRARY:
            return slash + path
    return None
