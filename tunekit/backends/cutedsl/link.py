"""From an exported object to a shared object that tvm_ffi loads."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
from pathlib import Path

from tunekit.backends.load import runtime_library
from tunekit.errors import TunekitError

# The object needs no C start-up files, so the bare linker does: 3 ms against 17 ms through gcc.
LINKERS = ("ld", "cc", "gcc", "clang", "ld.lld")


def link(obj: Path, so: Path) -> None:
    """Link `obj` into `so`, against the runtime libraries by name only.

    Raises:
        TunekitError: there is no linker, or it failed.
    """
    linker = next((path for name in LINKERS if (path := shutil.which(name))), None)
    if linker is None:
        raise TunekitError(f"no linker found (tried {', '.join(LINKERS)}): install binutils")
    command = [linker, "-shared", "-o", str(so), str(obj), *map(str, _libraries())]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        words = done.stderr.strip()[-2000:] or "(no message)"
        raise TunekitError(f"{Path(linker).name} exited with {done.returncode}: {words}")


@functools.cache
def _libraries() -> list[Path]:
    runtime = runtime_library()
    ffi = importlib.util.find_spec("tvm_ffi")
    if runtime is None or ffi is None or ffi.origin is None:
        raise TunekitError("nvidia-cutlass-dsl and apache-tvm-ffi must be installed to link a kernel")
    found = sorted(Path(ffi.origin).parent.rglob("libtvm_ffi.so"))
    if not found:
        raise TunekitError("apache-tvm-ffi has no libtvm_ffi.so")
    return [runtime, found[0]]
