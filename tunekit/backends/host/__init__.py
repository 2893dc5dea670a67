"""The host backend: kernels in C, compiled by the machine's C compiler.

``build`` returns C source (see tunekit_host.h). The artifact has the same shape as
a GPU kernel's: a shared object that exports one function through TVM-FFI. So all
that comes after the compile runs without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tunekit.backends.contract import CompileReport, CompileRequest, Phase, files_in
from tunekit.errors import NO_MESSAGE, TunekitError
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Implementation
from tunekit.trials import Status

COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-shared", "-fPIC", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-Wall")
MOST_READ_BYTES = 8000
"""Of what a compiler says, from its end."""


def warm() -> None:
    """Nothing to share between compiles."""


def compile(request: CompileRequest, implementation: Implementation, build: Build, phase: Phase) -> CompileReport:
    """Build the source and compile it. Phases: trace (the build function), compile."""
    source = implementation.build(build)
    if not isinstance(source, str):
        raise TypeError(f"build must return C source as text, not {type(source).__name__}")
    if request.trace_only:
        return CompileReport(Status.OK, traced=Footprint())
    phase("compile")
    out = Path(request.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    text, so = out / "kernel.c", out / "kernel.so"
    text.write_text(source, encoding="utf-8")
    failed = compile_c(
        text, so, *implementation.compile_options.split(), f"-DTUNEKIT_SYMBOL=__tvm_ffi_{request.symbol}"
    )
    if failed:
        return CompileReport(Status.COMPILE_ERROR, f"{failed} [{request}]")
    facts = Values(so_bytes=so.stat().st_size)
    return CompileReport(Status.OK, facts=facts, files=files_in(out, so=so, source=text))


def compile_c(source: Path, so: Path, *options: str, limit_s: float | None = None) -> str | None:
    """Compile a C file that exports functions through TVM-FFI; why it failed, or None.

    At `limit_s` the compiler is killed with its process group. Without it (where somebody limits this process) the
    compiler stays in this process's group.

    Raises:
        TunekitError: there is no C compiler, or no apache-tvm-ffi.
    """
    includes = [f"-I{directory}" for directory in (Path(__file__).parent, *_ffi_includes())]
    command = [compiler(), *OPTIONS, *options, *includes, "-o", str(so), str(source), "-lm"]
    try:
        failed = _run(command, so.parent, limit_s)
    except OSError as error:
        failed = f"can't be run: {error}"
    return f"{Path(command[0]).name} {failed}" if failed else None


def _run(command: list[str], directory: Path, limit_s: float | None) -> str | None:
    """Run a compiler; what it did instead of its work, or None. In `directory` lies what one that is killed leaves."""
    environ = {**os.environ, "TMPDIR": str(directory)}
    with tempfile.TemporaryFile(dir=directory) as said:  # no pipe, which what the compiler leaves running would hold
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=environ, start_new_session=limit_s is not None
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"took over {limit_s:g} s; killed"
        finally:
            if process.returncode is None:
                if limit_s is None:
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(-min(said.seek(0, os.SEEK_END), MOST_READ_BYTES), os.SEEK_END)
        words = said.read().decode(errors="replace").strip() or NO_MESSAGE
    return f"exited with {status}: {words[-2000:]}" if status else None


def compiler() -> str:
    """The path of the machine's C compiler.

    Raises:
        TunekitError: there is none.
    """
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    raise TunekitError(f"no C compiler found (tried {', '.join(COMPILERS)}): install gcc")


def _ffi_includes() -> list[Path]:
    """TVM-FFI's and DLPack's headers, located without importing the package."""
    found = importlib.util.find_spec("tvm_ffi")
    if found is None or found.origin is None:
        raise TunekitError("apache-tvm-ffi is not installed: pip install apache-tvm-ffi")
    return [Path(found.origin).parent / "include"]
