"""What a compile process runs: one request in, one JSON result out.

This is the edge where whatever a user's build function or a compiler throws
becomes a status; the process around it (see tunekit.jobs) reports what ends it
without a result.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.backends import backend, refusal
from tunekit.backends.contract import CompileReport, CompileRequest, Phase
from tunekit.errors import words_of
from tunekit.model import to_json
from tunekit.spec import Build, load_spec
from tunekit.trials import Status

REASON_LIMIT = 4000
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def run(payload: Mapping[str, Any], phase: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Compile what `payload` (a :class:`CompileRequest`) asks for.

    Returns the report as JSON, with ``seconds`` a phase. Never raises for what a
    spec or a compiler does wrong.
    """
    request = CompileRequest.from_payload(payload)
    clock = _PhaseClock(phase)
    clock("trace")
    try:
        report = _compile(request, clock)
    except Exception as error:
        # The edge: build functions and compilers raise anything; the name of the phase tells whose fault it is.
        status = Status.TRACE_ERROR if clock.current == "trace" else Status.COMPILE_ERROR
        if isinstance(error, MemoryError):
            status = Status.COMPILE_OUT_OF_MEMORY
        report = CompileReport(status, describe(error, request, clock.current))
    return {**to_json(report), "seconds": clock.stop()}


def _compile(request: CompileRequest, phase: Phase) -> CompileReport:
    arch = parse_arch(request.arch)
    implementation = load_spec(request.spec).implementation(request.implementation)
    refused = refusal(implementation, arch)
    if refused:
        return CompileReport(Status.TRACE_ERROR, refused)
    build = Build(arch, request.static, request.tunables)
    return backend(implementation.backend).compile(request, implementation, build, phase)


def describe(error: BaseException, request: CompileRequest, phase: str) -> str:
    """The error's own words, and what it was about: enough even where it says nothing."""
    words = ANSI.sub("", words_of(error))[:REASON_LIMIT]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{words} [{phase} of {request}, {toolchain()}{place}]"


def toolchain() -> str:
    """The compilers' versions, for messages: ``nvidia-cutlass-dsl 4.8.1``."""
    name = "nvidia-cutlass-dsl"
    return f"{name} {identity.distribution_version(name) or 'not installed'}"


class _PhaseClock:
    """Passes phases on and keeps the seconds spent in each."""

    def __init__(self, phase: Callable[[str], None]) -> None:
        self._phase = phase
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()
        self.current = ""

    def __call__(self, name: str, since: float | None = None) -> None:
        self.stop(0.0 if since is None else max(0.0, time.time() - since))
        self.current = name
        self._phase(name)

    def stop(self, ago: float = 0.0) -> dict[str, float]:
        """The seconds of each phase, the current one as if it ended `ago` seconds before now."""
        end = max(self._since, time.perf_counter() - ago)
        if self.current:
            self._seconds[self.current] = self._seconds.get(self.current, 0.0) + end - self._since
        self._since = end
        return self._seconds
