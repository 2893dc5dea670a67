"""What goes into the pool and what comes out: plain values, and the words for every way to end."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tunekit.backends import PTX_PATTERN
from tunekit.backends.contract import CompileRequest
from tunekit.backends.entry import toolchain
from tunekit.errors import NO_MESSAGE
from tunekit.model import Values
from tunekit.trials import Status

COMPILE_ENTRY = "tunekit.backends.entry:run"
# Phases that the trace limit covers; the back end's covers all others.
TRACE_PHASES = ("start", "trace")
STDERR_IN_REASON = 300
# How faulthandler's dump of a crash begins, and a frame of it that every task has.
FATAL = "Fatal Python error: "
POOL_FRAME = "tunekit/jobs/"
FRAMES_IN_REASON = 2
STARVED_WORTH_SAYING_S = 0.5
MIB = 2**20
SERVER = "server"
# What a compiler writes before it gives up for want of memory.
OUT_OF_MEMORY_WORDS = ("out of memory", "bad_alloc", "MemoryError")


@dataclass(frozen=True)
class Limits:
    """What one task may use; None is no limit.

    `trace_s` runs from the child's start until its first phase after ``trace``,
    `backend_s` from there; `memory_bytes` covers the child and all its descendants.
    """

    trace_s: float | None = None
    backend_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Milestone:
    """A phase that begins when a file appears: what native code can't report itself.

    `pattern` is a glob (absolute); it counts while the task is in phase `after`.
    """

    phase: str
    after: str
    pattern: str


@dataclass(frozen=True)
class Task:
    """One call of `entry` (``module:function``) with (`payload`, phase) in a child process.

    It returns JSON. `context` completes "... died while working on"; `limits`
    replaces the pool's.
    """

    id: str
    payload: Mapping[str, Any]
    entry: str = COMPILE_ENTRY
    context: str = ""
    limits: Limits | None = None
    milestones: tuple[Milestone, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something that happened to a task; `seconds` since its child, process `pid`, started."""

    task: str
    kind: Literal["started", "phase", "finished"]
    phase: str = ""
    seconds: float = 0.0
    pid: int | None = None


@dataclass(frozen=True)
class TaskResult:
    """How a task ended.

    `value` is what the entry returned; `phase` the one it ended in; `seconds` the
    wall time of each phase; `peak_rss_bytes` of the child's whole tree; `stderr`
    the end of what it wrote. `server_died`: the process that ran all tasks went, and
    this one with it, so that its end says nothing about the task.
    """

    id: str
    status: Status
    reason: str = ""
    value: Mapping[str, Any] | None = None
    phase: str = ""
    seconds: Values = field(default_factory=Values)
    peak_rss_bytes: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    stderr: str = ""
    server_died: bool = False

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


def compile_task(request: CompileRequest, *, id: str | None = None, limits: Limits | None = None) -> Task:
    """The task that compiles `request`; its id is the symbol unless given."""
    return Task(
        id=request.symbol if id is None else id,
        payload=request.to_payload(),
        context=f"{request}, {toolchain()}",
        limits=limits,
        milestones=(Milestone("ptxas", "mlir", f"{request.out_dir}/{PTX_PATTERN}"),),
    )


@dataclass(frozen=True)
class Ending:
    """The raw facts of a child's end, as its supervisor saw them.

    `killed_for` names the limit that it broke: ``trace``, ``backend``, ``memory``, ``cancel``, or
    ``server``, whose death took it along; `limit` is that limit's value; `error` is what its edge caught;
    `starved_s` how long it was ready to run without a core.
    """

    phase: str
    seconds: Mapping[str, float]
    value: Mapping[str, Any] | None = None
    error: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    killed_for: str | None = None
    limit: float | None = None
    peak_rss_bytes: int | None = None
    starved_s: float = 0.0
    stderr: str = ""


def conclude(task: Task, ending: Ending) -> TaskResult:
    """The result of a task: its status, and a sentence for every way to end but the good one."""
    status, reason = _judge(task, ending)
    seconds = ending.seconds
    if ending.value is not None and isinstance(ending.value.get("seconds"), Mapping):
        seconds = ending.value["seconds"]
    return TaskResult(
        id=task.id,
        status=status,
        reason=reason,
        value=ending.value,
        phase=ending.phase,
        seconds=Values({name: float(value) for name, value in seconds.items()}),
        peak_rss_bytes=ending.peak_rss_bytes,
        signal=ending.signal,
        exit_code=ending.exit_code,
        stderr=ending.stderr,
        server_died=ending.killed_for == SERVER,
    )


def _judge(task: Task, ending: Ending) -> tuple[Status, str]:
    about = f" [{ending.phase} of {task.context or task.id}]"
    words = _of_the_task(ending.stderr)
    said = f"; stderr ends: {words[-STDERR_IN_REASON:]}" if words else ""
    if ending.killed_for in ("trace", "backend"):
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in ending.seconds.items())
        if ending.starved_s >= STARVED_WORTH_SAYING_S:
            spent += f"; {ending.starved_s:.1f} s of it without a core"
        what = f"killed in {ending.phase} at the {ending.killed_for} limit of {ending.limit:g} s ({spent})"
        return Status.COMPILE_TIMEOUT, what + about
    if ending.killed_for == "memory":
        peak, limit = (ending.peak_rss_bytes or 0) // MIB, int(ending.limit or 0) // MIB
        return Status.COMPILE_OUT_OF_MEMORY, f"killed: {peak} MiB of memory > {limit} MiB" + about
    if ending.killed_for == "cancel":
        return Status.COMPILE_CRASHED, "cancelled" + about
    if ending.killed_for == SERVER:
        return Status.COMPILE_CRASHED, ending.stderr + about
    if ending.value is not None:
        status, reason = _judge_value(ending.value)
        silent = status is not Status.OK and (not reason or NO_MESSAGE in reason)
        return status, f"{reason or status.value}; exit status {ending.exit_code}" if silent else reason
    if ending.error is not None:
        trace = ending.phase in TRACE_PHASES
        return (Status.TRACE_ERROR if trace else Status.COMPILE_ERROR), ending.error + about
    starved = any(words in ending.stderr for words in OUT_OF_MEMORY_WORDS)
    status = Status.COMPILE_OUT_OF_MEMORY if starved else Status.COMPILE_CRASHED
    if ending.signal is not None:
        return status, f"worker died (signal {ending.signal}, {signal_name(ending.signal)})" + about + said
    return status, f"worker exited with status {ending.exit_code} and left no result" + about + said


def _of_the_task(stderr: str) -> str:
    """What the task wrote, and of a fatal error's dump its headline and innermost frames."""
    written, fatal, dump = stderr.partition(FATAL)
    lines = [line.strip() for line in dump.splitlines() if line.strip()]
    frames = [line for line in lines if line.startswith("File ") and POOL_FRAME not in line]
    headline = [fatal + lines[0]] if fatal and lines else []
    return " | ".join(filter(None, [written.strip(), *headline, *frames[:FRAMES_IN_REASON]]))


def _judge_value(value: Mapping[str, Any]) -> tuple[Status, str]:
    """The status that the entry itself gave, ok for an entry that speaks of none."""
    try:
        return Status(value.get("status", Status.OK)), str(value.get("reason", ""))
    except ValueError:
        return Status.COMPILE_ERROR, f"the entry returned an unknown status {value.get('status')!r}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
