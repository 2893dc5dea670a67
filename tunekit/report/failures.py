"""Failures grouped by reason, so that 200 of a kind read as one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from tunekit.model import Values, Variant
from tunekit.progress import Row
from tunekit.trials import Stage

NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")


@dataclass(frozen=True)
class FailureGroup:
    """Variants that failed alike: stage, status, and reason but for its numbers and the variant's values.

    `reason` is the first one's text, whole; `first` the variant it comes from.
    """

    status: str
    stage: Stage | None
    reason: str
    first: Variant
    count: int

    def headline(self) -> str:
        """``200 x compile_error: no such layout``: the count and the reason's first line."""
        lines = self.reason.strip().splitlines()
        return f"{self.count} x {self.status}" + (f": {lines[0]}" if lines else "")

    def rest(self) -> list[str]:
        """The reason's further lines."""
        return self.reason.strip().splitlines()[1:]


def group_failures(rows: Iterable[Row]) -> tuple[FailureGroup, ...]:
    """The failed rows by stage, status and reason, the largest group first."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if not row.ok:
            stage = failed_stage(row)
            groups.setdefault((str(stage), row.status, _alike(row)), []).append(row)
    made = [
        FailureGroup(members[0].status, failed_stage(members[0]), members[0].reason, members[0].variant, len(members))
        for members in groups.values()
    ]
    return tuple(sorted(made, key=lambda group: -group.count))


def _alike(row: Row) -> str:
    """A reason without what differs from variant to variant: its numbers, and the variant's own values."""
    return NUMBER.sub("#", row.reason.replace(str(row.variant.tunables), "").replace(row.variant.id, ""))


def failed_stage(row: Row) -> Stage | None:
    """The stage at which a row's variant failed; None where it failed before the first."""
    for stage in Stage:
        outcome = row.outcomes.get(stage)
        if outcome is not None and not outcome.ok:
            return stage
    return None


def reproduce(group: FailureGroup, spec_reference: str, problem: Values) -> str:
    """A command that makes one failure of the group happen again, on its own."""
    if group.status == "over_budget":
        command = "explain"
    elif group.stage is Stage.SIMULATE:
        command = "simulate --ctas sample --line-info"
    elif group.stage in (Stage.VERIFY, Stage.MEASURE):
        command = "sweep --retry-failed --force"
    elif group.stage is Stage.PROBE:
        command = "probe"
    else:
        command = "compile --retry-failed --force"
    name, *flags = command.split()
    return " ".join(
        [
            f"tunekit {name} {shlex.quote(spec_reference)} --arch {group.first.arch} --variant {group.first.id}",
            *flags,
            f"--problem {problem}",
        ]
    )
