"""What sweeps and compiles record: how a variant fared at a stage of the pipeline.

Apart from `model`, because a process that serves records none of it, and would import these classes in vain.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tunekit.model import Environment, Footprint, Values, Variant


class Status(str, Enum):
    """How a stage ended. Each but ``OK`` comes with a reason in words."""

    OK = "ok"
    OVER_BUDGET = "over_budget"
    TRACE_ERROR = "trace_error"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    COMPILE_CRASHED = "compile_crashed"
    COMPILE_OUT_OF_MEMORY = "compile_out_of_memory"
    LAUNCH_ERROR = "launch_error"
    WRONG_RESULT = "wrong_result"
    NOT_DETERMINISTIC = "not_deterministic"
    RUN_TIMEOUT = "run_timeout"
    DEVICE_FAULT = "device_fault"
    KNOWN_BAD = "known_bad"
    NOT_MODELLED = "not_modelled"

    def __str__(self) -> str:
        return self.value


class Stage(str, Enum):
    """The pipeline's stages, in order."""

    PROBE = "probe"
    COMPILE = "compile"
    SIMULATE = "simulate"
    VERIFY = "verify"
    MEASURE = "measure"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Outcome:
    """How one variant fared at one stage. A failure is an outcome like any other.

    `seconds` is wall time per phase; `artifact` is the content hash of the
    exported object; `facts` are compiled facts (registers, spills, smem ...);
    `samples_us` are microseconds a call, in the order taken, by the method that
    `protocol` names. `windows` has one entry for each timed window, the rejected
    ones too: its time and what the GPU did meanwhile (clock, power, throttling).
    """

    stage: Stage
    status: Status
    reason: str = ""
    seconds: Values = Values()
    peak_rss_bytes: int | None = None
    artifact: str | None = None
    footprint: Footprint = Footprint()  # noqa: RUF009 (frozen)
    facts: Values = Values()
    samples_us: tuple[float, ...] = ()
    protocol: str = ""
    windows: tuple[Values, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


@dataclass(frozen=True)
class Trial:
    """One outcome as it is kept: which variant, for which problem, where and by which protocol.

    `problem` is complete; compile and probe trials keep the static axes only.
    """

    variant: Variant
    problem: Values
    compile_key: str
    outcome: Outcome
    environment: Environment
    protocol: str = ""
    sweep: int | None = None


@dataclass(frozen=True)
class KnownBad:
    """A compile that hung, crashed or ran out of memory: skipped until its key changes."""

    compile_key: str
    variant: Variant
    status: Status
    reason: str
    phase: str
    seconds: float
    peak_rss_bytes: int | None = None
    signal: int | None = None
