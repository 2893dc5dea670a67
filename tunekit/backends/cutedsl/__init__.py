"""The CuTeDSL backend: ``build`` returns a ``@cute.jit`` callable and its compile arguments.

One trace serves both the probe and the compile: a trace-finalize hook reads the
footprint from the IR before the back end runs, and stops there if the kernel can't
fit, if its back end would not come back (see fragments), or if only a probe was asked
for. Facts about nvidia-cutlass-dsl are those of 4.8.1.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunekit.arch import Arch, parse_arch
from tunekit.backends import DUMP_PREFIX
from tunekit.backends.contract import CompileReport, CompileRequest, Phase, files_in
from tunekit.backends.cutedsl import compiled as machine_code
from tunekit.backends.cutedsl import fragments
from tunekit.backends.cutedsl import traced as ir_reading
from tunekit.backends.cutedsl.link import link
from tunekit.errors import TunekitError
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Implementation
from tunekit.trials import Status

# Read by CuTeDSL when it is imported. An arch is given so that it never asks the driver for one.
ARCH_VARIABLE = "CUTE_DSL_ARCH"
WARM_UP_ARCH = "sm_100a"
LIBRARIES_VARIABLE = "CUTE_DSL_LIBS"
# An arch for which nothing here is compiled: on a match CuTeDSL also makes a JIT engine for
# running the kernel at once, 70 ms that an exported kernel has no use for (2026-11).
NO_EXECUTION_ARCH = "sm_80"
# remarks{ptx}: also what `ptxas -v` says (registers, spills, its seconds), and source lines in the traced IR, which
# double the trace's time; the code stays the same.
OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin remarks{ptx}"
# CuTeDSL's own option parser takes no quotes and few other characters in a path.
PLAIN_PATH = re.compile(r"[\w./+-]+")


def warm() -> None:
    """Import CuTeDSL and compile a small kernel by every step of a real one: its lazy initialisation is paid once.

    torch is kept out: tvm_ffi imports it where it can (1.5 s, 200 MB, threads), and
    no compile needs it.
    """
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_") and name != LIBRARIES_VARIABLE]:
        del os.environ[name]  # options by the environment are in no compile's key
    os.environ[ARCH_VARIABLE] = WARM_UP_ARCH
    with _without_torch():
        import tvm_ffi  # noqa: F401

        from tunekit.backends.cutedsl.warmup import WARM_UP

        with tempfile.TemporaryDirectory(prefix="tunekit-warm-") as scratch:
            nothing = Values()
            request = CompileRequest("", WARM_UP.name, WARM_UP_ARCH, nothing, nothing, "tunekit_warm_up", scratch)
            report = compile(request, WARM_UP, Build(parse_arch(WARM_UP_ARCH), nothing, nothing), lambda *_: None)
    if report.status is not Status.OK:
        raise TunekitError(f"the first compile failed: {report.reason}")
    gc.collect()
    gc.freeze()  # a forked child's collector would otherwise touch, and so copy, every page


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    if "torch" in sys.modules:
        yield
        return
    blocked: dict[str, Any] = sys.modules
    blocked["torch"] = None
    try:
        yield
    finally:
        del blocked["torch"]


def compile(request: CompileRequest, implementation: Implementation, build: Build, phase: Phase) -> CompileReport:
    """Trace, check the footprint, compile, export, link.

    Phases: trace, mlir (to PTX), ptxas, export, link. ``mlir`` and ``ptxas`` are one
    native call that holds the GIL; the PTX file, written between them, tells them apart.
    """
    from cutlass import cute

    _select_arch(build.arch)
    function, arguments = _callable_of(implementation.build(build))
    out = Path(request.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    with _dump_directory(out) as dump:
        gate = _Gate(build.arch, request.trace_only, phase)
        options = f"--gpu-arch {build.arch.name} --dump-dir {dump} {OPTIONS}"
        log = io.StringIO()
        try:
            with contextlib.redirect_stderr(log):
                kernel = cute.compile(
                    function,
                    *arguments,
                    options=" ".join([options, *implementation.compile_options.split(), *request.options.split()]),
                    trace_finalize_hooks=gate,
                )
        except Exception:
            # CuTeDSL wraps what a hook raises; the gate remembers that it was the gate.
            if gate.report is not None:
                return gate.report
            raise
        finally:
            (out / "compiler.log").write_text(log.getvalue(), encoding="utf-8", errors="replace")
        ptx, cubin = out / "kernel.ptx", out / "kernel.cubin"
        _collect(dump, "*.ptx", ptx)
        phase("ptxas", ptx.stat().st_mtime)
        _collect(dump, "*.cubin", cubin)
    phase("export")
    code, binary = ptx.read_text(encoding="utf-8"), cubin.read_bytes()
    footprint, facts = machine_code.read(kernel.ir_module, code, binary, log.getvalue())
    wrong = machine_code.wrong_arch(binary, code, build.arch) or footprint.misfit(build.arch)
    if wrong:
        status = Status.OVER_BUDGET if footprint.misfit(build.arch) else Status.COMPILE_ERROR
        return CompileReport(status, wrong, traced=gate.footprint, compiled=footprint, facts=facts)
    obj, so = out / "kernel.o", out / "kernel.so"
    kernel.export_to_c(str(obj), function_name=request.symbol)
    phase("link")
    link(obj, so)
    facts = facts.merged({"so_bytes": so.stat().st_size})
    files = files_in(out, so=so, ptx=ptx, cubin=cubin)
    return CompileReport(Status.OK, traced=gate.footprint, compiled=footprint, facts=facts, files=files)


class _Gate:
    """The hook between trace and back end: reads the footprint, lets through what fits and what the back end bears."""

    def __init__(self, arch: Arch, trace_only: bool, phase: Phase) -> None:
        self._arch = arch
        self._trace_only = trace_only
        self._phase = phase
        self.footprint = Footprint()
        self.report: CompileReport | None = None

    def __call__(self, owner: Any, module: Any, name: str) -> None:
        kernels = ir_reading.read(module)
        self.footprint = ir_reading.combined(kernels)
        for kernel in kernels:
            if kernel.shortfall:
                self._stop(Status.TRACE_ERROR, kernel.shortfall)
            misfit = kernel.footprint.misfit(self._arch)
            if misfit:
                self._stop(Status.OVER_BUDGET, misfit)
        fragment = fragments.refused(module)
        if fragment is not None:
            self._stop(Status.TRACE_ERROR, fragment.refusal())
        if self._trace_only:
            self._stop(Status.OK, "")
        owner.envar.arch = NO_EXECUTION_ARCH
        self._phase("mlir")

    def _stop(self, status: Status, reason: str) -> None:
        self.report = CompileReport(status, reason, traced=self.footprint)
        raise StopTrace(reason)


class StopTrace(Exception):
    """Ends a compile after its trace: nothing more is wanted, or nothing more would fit."""


def _select_arch(arch: Arch) -> None:
    """Make `arch` what CuTeDSL's helpers see while a kernel is built, whatever they saw before.

    CuTeDSL keeps the first value of the environment variable that it reads, so
    setting the variable alone would come too late in a forked child.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    os.environ[ARCH_VARIABLE] = arch.name
    CuTeDSL._get_dsl().envar.arch = arch.name


def _callable_of(built: Any) -> tuple[Any, tuple[Any, ...]]:
    if isinstance(built, tuple) and len(built) == 2 and callable(built[0]) and isinstance(built[1], (tuple, list)):
        return built[0], tuple(built[1])
    raise TypeError(f"build must return (@cute.jit callable, compile arguments), not {type(built).__name__}")


@contextlib.contextmanager
def _dump_directory(out: Path) -> Iterator[Path]:
    """A new directory for CuTeDSL's dumps, under `out` unless its name can't be passed."""
    parent = out.resolve() if PLAIN_PATH.fullmatch(str(out.resolve())) else None
    dump = Path(tempfile.mkdtemp(prefix=DUMP_PREFIX, dir=parent))
    try:
        yield dump
    finally:
        shutil.rmtree(dump, ignore_errors=True)


def _collect(dump: Path, pattern: str, target: Path) -> None:
    """Move the one file that CuTeDSL dumped under a name of its own."""
    found = sorted(dump.glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"CuTeDSL kept {len(found)} files {pattern}, not one")
    shutil.move(found[0], target)
