"""The verdict on compile times: pure arithmetic over samples and a baseline.

A kernel's figure is its fastest compile of all rounds. Times are compared as
multiples of the reference compile's fastest, taken in the same rounds, so that a
slow or busy machine moves both. A regression needs a ratio and an absolute growth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tunekit.check.targets import Target
from tunekit.model import Values
from tunekit.trials import Status


@dataclass(frozen=True)
class Sample:
    """One compile. `seconds` is from the start of tracing to the linked artifact (or to the failure)."""

    status: Status
    seconds: float
    reason: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Entry:
    """One kernel in a baseline. `relative` is its seconds over the reference compile's."""

    spec: str
    implementation: str
    arch: str
    static: Values
    tunables: Values
    relative: float
    seconds: float


class Verdict(str, Enum):
    """What the check says of a kernel. ``OK``, ``NEW`` and ``UNCHECKED`` pass, the others fail."""

    OK = "ok"
    NEW = "new"
    UNCHECKED = "unchecked"
    FAILED = "failed"
    OVER_LIMIT = "over_limit"
    REGRESSED = "regressed"
    VANISHED = "vanished"

    @property
    def passes(self) -> bool:
        return self in (Verdict.OK, Verdict.NEW, Verdict.UNCHECKED)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Row:
    """One kernel's line of the report.

    `seconds` is the fastest compile, `relative` that over the reference's; `ratio` is
    `relative` over the baseline's. None where there is nothing to state.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    seconds: float | None = None
    relative: float | None = None
    baseline: float | None = None
    ratio: float | None = None
    file: str = ""
    line: int = 1


@dataclass(frozen=True)
class Rule:
    """When a kernel fails: over `limit_s`, or both `max_ratio` times the baseline and `floor_s` slower."""

    limit_s: float
    max_ratio: float
    floor_s: float


def fastest(samples: Sequence[Sample]) -> float:
    """The fastest compile that succeeded, in seconds; infinite if none did."""
    return min((sample.seconds for sample in samples if sample.status is Status.OK), default=math.inf)


def judge(
    target: Target, samples: Sequence[Sample], reference: Sequence[Sample], baseline: Mapping[str, Entry], rule: Rule
) -> Row:
    """The verdict on one kernel. `reference` are the reference compile's samples of the same rounds."""
    seconds, unit = fastest(samples), fastest(reference)
    name, file, line = target.name, target.file, target.line
    if math.isinf(seconds):
        return Row(name, _failure(samples), _failure_reason(samples, rule), file=file, line=line)
    relative = seconds / unit if unit > 0 and not math.isinf(unit) else None
    known = baseline.get(name)
    before = known.relative if known else None
    ratio = relative / before if relative is not None and before else None
    row = Row(name, Verdict.OK, "", seconds, relative, before, ratio, file, line)
    if seconds > rule.limit_s:
        return _fail(row, Verdict.OVER_LIMIT, f"compiles in {seconds:.1f} s, over the limit of {rule.limit_s:g} s")
    if known is None:
        return _fail(row, Verdict.NEW, "not in the baseline" if baseline else "")
    if ratio is None or relative is None or before is None:
        return _fail(row, Verdict.FAILED, "can't be compared with the baseline: the reference compile failed")
    growth_s = (relative - before) * unit
    if ratio > rule.max_ratio and growth_s > rule.floor_s:
        reason = (
            f"compiles in {seconds:.2f} s, {ratio:.2f}x the baseline (limit {rule.max_ratio:g}x): "
            f"{relative:.2f} reference compiles, {before:.2f} before, {growth_s:+.2f} s on this machine"
        )
        return _fail(row, Verdict.REGRESSED, reason)
    return row


def _fail(row: Row, verdict: Verdict, reason: str) -> Row:
    if verdict is Verdict.NEW and not reason:
        return row
    return Row(row.name, verdict, reason, row.seconds, row.relative, row.baseline, row.ratio, row.file, row.line)


def _failure(samples: Sequence[Sample]) -> Verdict:
    timed_out = any(sample.status is Status.COMPILE_TIMEOUT for sample in samples)
    return Verdict.OVER_LIMIT if timed_out else Verdict.FAILED


def _failure_reason(samples: Sequence[Sample], rule: Rule) -> str:
    if not samples:
        return "was not compiled"
    last = samples[-1]
    where = f" in {last.phase}" if last.phase else ""
    if last.status is Status.COMPILE_TIMEOUT:
        return f"killed{where} after {last.seconds:.1f} s, over the limit of {rule.limit_s:g} s"
    return f"{last.status}{where}: {last.reason or 'no reason given'}"
