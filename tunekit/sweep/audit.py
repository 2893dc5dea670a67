"""Whether tuning is repeatable: the same sweep several times, each from an empty database, and what they agree on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tunekit.errors import UserError
from tunekit.model import Value, Values, Winner
from tunekit.progress import Agreement, AuditReport, SweepEvent, SweepReport
from tunekit.settings import Settings
from tunekit.sweep.options import SweepOptions
from tunekit.sweep.run import checked, sweep


def audit(
    reference: str,
    problems: Sequence[Mapping[str, Value]],
    options: SweepOptions,
    settings: Settings,
    on_event: Callable[[SweepEvent], None],
    times: int,
) -> AuditReport:
    """Sweep `times` times, each into a new database beside the user's own, which is left alone.

    Artifacts are shared, so that only the first run compiles; no time, failure or winner is. The databases
    stay, for ``tunekit explain --winner --db``. An interrupted run is the last one.

    Raises:
        UserError: as ``sweep``; or fewer than two times.
    """
    if times < 2:
        raise UserError(f"an audit repeats a sweep {times} times; it takes 2 at least")
    checked(reference, problems, options, settings)  # before an earlier audit's databases go
    runs: list[SweepReport] = []
    databases: list[str] = []
    for number in range(1, times + 1):
        database = settings.database.with_name(f"{settings.database.stem}.audit-{number}{settings.database.suffix}")
        _remove(database)
        on_event(SweepEvent("note", text=f"audit: run {number} of {times}, into {database}"))
        runs.append(sweep(reference, problems, options, dataclasses.replace(settings, database=database), on_event))
        databases.append(str(database))
        if runs[-1].state == "interrupted":
            break
    return AuditReport(runs[0].spec, runs[0].arch, tuple(runs), tuple(databases), agreements(runs))


def _remove(database: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def agreements(runs: Sequence[SweepReport]) -> tuple[Agreement, ...]:
    """How far the runs' winners agree, problem by problem; nothing where fewer than two runs are complete."""
    whole = [run for run in runs if run.state == "done"]
    if len(whole) < 2:
        return ()
    columns = zip(*(run.problems for run in whole), strict=True)
    return tuple(agreement(column[0].problem, [report.winner for report in column]) for column in columns)


def agreement(problem: Values, winners: Sequence[Winner | None]) -> Agreement:
    """What winners of the same problem, each of another run, say together."""
    found = [winner for winner in winners if winner is not None]
    together = Agreement(problem, tuple(winners), "agree")
    if len(found) < len(winners):
        return dataclasses.replace(
            together, verdict="no winner", why=f"{len(winners) - len(found)} runs have no winner"
        )
    pairs = [(a, b) for a, b in itertools.combinations(found, 2) if a.variant.id != b.variant.id]
    if not pairs:
        return together
    apart = [pair for pair in pairs if not _joint(*pair)]
    if apart:
        a, b = apart[0]
        why = f"{_words(a)}, and {_words(b)}: neither run found the two equal"
        return dataclasses.replace(together, verdict="disagree", why=why)
    names = ", ".join(sorted({winner.variant.id for winner in found}))
    if all("tie" in _joint(a, b) for a, b in pairs):
        return dataclasses.replace(together, verdict="within ties", why=f"{names} differ within a tie")
    why = f"{names} differ where a run ended undecided between them"
    return dataclasses.replace(together, verdict="undecided", why=why)


def _joint(a: Winner, b: Winner) -> set[str]:
    """The outcomes of those of two runs that did not tell the two winners apart."""
    return {own.outcome for own, other in ((a, b), (b, a)) if own.outcome != "winner" and other.variant.id in own.tied}


def _words(winner: Winner) -> str:
    return f"{winner.variant.id} won by {100 * (winner.margin or 0):.1f} %"
