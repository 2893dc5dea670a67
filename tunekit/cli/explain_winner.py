"""``tunekit explain --winner``: how a recorded winner was decided, by deciding it again from the stored samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import DatabaseError
from tunekit.measure.record import decide_again, parted
from tunekit.measure.statistics import Decision, Standing
from tunekit.model import Values, Variant, Winner
from tunekit.report import Printer, Table, units
from tunekit.spec import KernelSpec
from tunekit.trials import Outcome, Stage, Trial


@dataclass(frozen=True)
class Repeated:
    """A recorded winner, its final's trials, the decision that these come to now, and how it differs."""

    winner: Winner
    trials: tuple[Trial, ...]
    again: Decision | None
    differs: tuple[str, ...]
    damage: str = ""

    @property
    def why_not(self) -> str:
        """Why it can't be decided again; empty if it was."""
        if self.again is not None:
            return ""
        if self.damage:
            return f"the record of its final is damaged: {self.damage}"
        if not self.winner.final:
            return "its record is older than the test, and names no final"
        return f"the trials of its final {self.winner.final[:12]} are not in this database"

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "winner": self.winner,
            "again": self.again,
            "same": None if self.again is None else not self.differs,
            "differs": list(self.differs),
            "why_not": self.why_not,
        }


def repeated(database: Path, spec: KernelSpec, arch: str, problem: Values) -> list[Repeated]:
    """The winners recorded for a problem's bucket, of each environment and protocol, decided again.

    Raises:
        DatabaseError: the database can't be read.
    """
    if not database.exists():
        return []
    from tunekit.store.queries import select_trials, select_winners
    from tunekit.store.readonly import UnreadableError, reading

    try:
        with reading(database) as connection:
            winners = select_winners(connection, database, spec=spec.name, arch=arch)
            winners = [winner for winner in winners if winner.bucket == spec.bucket(problem)]
            wanted = {"spec": spec.name, "arch": arch, "stage": Stage.MEASURE.value}
            trials = select_trials(connection, database, wanted) if winners else []
    except UnreadableError as error:
        raise DatabaseError(f"{database} {error}") from error
    return [_decided(winner, trials) for winner in winners]


def _decided(winner: Winner, trials: Sequence[Trial]) -> Repeated:
    own = tuple(trial for trial in trials if winner.final and trial.outcome.facts.get("final") == winner.final)
    if not own:
        return Repeated(winner, (), None, ())
    try:
        again = decide_again({trial.variant.id: trial.outcome for trial in own})
    except ValueError as error:
        return Repeated(winner, own, None, (), str(error))
    return Repeated(winner, own, again, tuple(parted(winner, again)))


def print_repeated(found: Repeated, out: Printer) -> None:
    """The final as a table, and whether its decision is the same again."""
    winner, again = found.winner, found.again
    out.heading(f"winner for {winner.bucket}: {units.label(winner.variant)}")
    out.line(f"  {winner.outcome or 'chosen'} by {winner.method}; {winner.protocol}")
    where = winner.environment
    out.line(f"  on {where.gpu or 'this machine'}" + (f", driver {where.driver}" if where.driver else ""))
    if again is None:
        out.line(f"  it can't be decided again: {found.why_not}")
        return
    variants = {trial.variant.id: trial.variant for trial in found.trials}
    rows = [_row(variants[id], standing) for id, standing in sorted(again.standings.items(), key=_by_place)]
    out.table(Table(("variant", "median", "rounds", "slower by", "between", "so", "tunables"), rows, right=_RIGHT))
    for trial in found.trials:
        if not trial.outcome.ok:
            out.line(f"  {trial.variant.id} failed: {trial.outcome.reason}")
    for line in _conditions([trial.outcome for trial in found.trials]):
        out.line(f"  {line}")
    total = sum(len(trial.outcome.samples_us) for trial in found.trials)
    out.line(f"  {again.outcome} after {again.rounds} rounds: {again.winner} ({again.tie_rule})")
    if found.differs:
        out.line(f"  decided again from {total} stored samples it comes out otherwise: {'; '.join(found.differs)}")
    else:
        out.line(f"  decided again from {total} stored samples: the same")


_RIGHT = frozenset({"median", "rounds", "slower by", "between"})


def _by_place(entry: tuple[str, Standing]) -> tuple[float, str]:
    return entry[1].behind, entry[0]


def _row(variant: Variant, standing: Standing) -> tuple[str, ...]:
    between = ""
    if standing.low is not None and standing.high is not None and standing.verdict != "leader":
        between = f"{100 * standing.low:.2f} and {100 * standing.high:.2f} %"
    behind = "" if standing.verdict == "leader" else f"{100 * standing.behind:.2f} %"
    return (
        variant.id,
        units.microseconds(standing.median_us),
        str(standing.samples),
        behind,
        between,
        standing.verdict,
        str(variant.tunables),
    )


def _conditions(outcomes: Sequence[Outcome]) -> list[str]:
    """What the GPU did meanwhile, and what else the record says of the windows."""
    windows = [window for outcome in outcomes for window in outcome.windows]
    lines = []
    clocks = [int(window["sm_mhz"]) for window in windows if "sm_mhz" in window]
    if clocks:
        power = [float(window["power_w"]) for window in windows if "power_w" in window]
        heat = [int(window["temperature_c"]) for window in windows if "temperature_c" in window]
        parts = [f"SM clock {min(clocks)} to {max(clocks)} MHz"]
        parts += [f"{min(power):.0f} to {max(power):.0f} W"] if power else []
        parts += [f"{min(heat)} to {max(heat)} C"] if heat else []
        lines.append(", ".join(parts))
    rejected = [str(window["rejected"]) for window in windows if "rejected" in window]
    if rejected:
        lines.append(f"{len(rejected)} of {len(windows)} windows did not count, the first because: {rejected[0]}")
    beside = {str(outcome.facts["compiling_beside"]) for outcome in outcomes if "compiling_beside" in outcome.facts}
    return lines + sorted(beside)
