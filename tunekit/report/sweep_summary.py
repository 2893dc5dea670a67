"""A sweep's result as text: what fitted, what did not and why, what each compile cost, and the winner."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tunekit.model import Values, Winner
from tunekit.progress import ProblemReport, Row, SweepReport
from tunekit.report import units
from tunekit.report.failures import group_failures, reproduce
from tunekit.report.printer import Printer, Table
from tunekit.trials import Stage

MAX_REASON_LINES = 12


def print_sweep(report: SweepReport, spec_reference: str, out: Printer, *, winners: bool = True) -> None:
    """Everything that a sweep found, problem by problem; `winners` also says who won, or why nobody did."""
    for problem in report.problems:
        out.heading(f"{report.spec} on {report.arch}: {problem.problem}")
        out.line(f"  {problem.expansion}")
        _print_rows(problem, out)
        _print_failures(problem, spec_reference, out)
        if winners:
            out.line(f"  {verdict(problem)}")
        out.line()
    for note in report.notes if winners else ():
        if not any(note in problem.why_no_winner for problem in report.problems):
            out.line(f"note: {note}")
    if report.state == "interrupted":
        out.line("interrupted: the results so far are kept, and the same command goes on from there")


def verdict(problem: ProblemReport) -> str:
    """One line: the winner with its figures, or why there is none."""
    if problem.winner is None:
        return f"no winner: {problem.why_no_winner or 'nothing was measured'}"
    return f"winner: {units.label(problem.winner.variant)}: {winner_text(problem.winner)}"


def winner_text(winner: Winner) -> str:
    """``12.34 us +- 0.05 us over 14 samples, 3.1 % ahead of <id> (99.2 % sure)``; or what it ties with."""
    text = f"{winner.median_us:.2f} us +- {winner.spread_us:.2f} us over {winner.samples} samples"
    if winner.runner_up and winner.margin is not None:
        side = "ahead of" if winner.margin >= 0 else "behind"
        text += f", {abs(winner.margin) * 100:.1f} % {side} {winner.runner_up}"
    others = _few([tied for tied in winner.tied if tied != winner.variant.id])
    if winner.outcome == "undecided":
        return f"{text}; undecided within its budget" + (f": it may be no faster than {others}" if others else "")
    if winner.confidence is not None:
        text += f" ({_percent(winner.confidence)} sure)"
    return f"{text}; a tie with {others}" if others else text


def _few(ids: Sequence[str]) -> str:
    """``a, b``; of more than four, the first three and how many more there are."""
    return ", ".join(ids) if len(ids) <= 4 else f"{', '.join(ids[:3])} and {len(ids) - 3} more"


def _percent(share: float) -> str:
    """``95 %``, ``99.3 %``; never 100 %."""
    return f"{min(100 * share, 99.9):.3g} %"


def _print_rows(problem: ProblemReport, out: Printer) -> None:
    ok = [row for row in problem.rows if row.ok]
    ok.sort(key=lambda row: (row.median_us is None, row.median_us or 0.0))
    out.table(row_table(ok, problem.winner))
    compiled = [row.compile_s for row in problem.rows if row.compile_s is not None]
    text = f"{len(ok)} of {len(problem.rows)} variants passed"
    if compiled:
        slowest = max((row for row in problem.rows if row.compile_s is not None), key=lambda row: row.compile_s or 0.0)
        text += (
            f"; {len(compiled)} compiles{_stored(problem)}: median {units.seconds(statistics.median(compiled))}, "
            f"slowest {units.seconds(max(compiled))} ({slowest.variant.id})"
        )
    out.line(f"  {text}")
    accuracy = units.accuracy(_worst(ok))
    if accuracy:
        out.line(f"  their worst figures against the oracle: {accuracy}")


def _worst(rows: Sequence[Row]) -> Values:
    """The worst accuracy of all results that were verified, on a device or in the simulator."""
    outcomes = [row.outcomes.get(stage) for row in rows for stage in (Stage.VERIFY, Stage.SIMULATE)]
    facts = [outcome.facts for outcome in outcomes if outcome is not None and "cosine" in outcome.facts]
    worst = {"cosine": min(float(fact["cosine"]) for fact in facts)} if facts else {}
    for name in ("relative_norm", "rounding_ratio", "max_abs_error"):
        known = [float(fact[name]) for fact in facts if name in fact]
        if known:
            worst[name] = max(known)
    return Values(worst)


def _stored(problem: ProblemReport) -> str:
    """How many of the compiles were found in the store; empty if none was."""
    outcomes = [row.outcomes.get(Stage.COMPILE) for row in problem.rows]
    stored = sum(1 for outcome in outcomes if outcome is not None and outcome.facts.get("cached"))
    return f" ({'all' if stored == sum(o is not None for o in outcomes) else stored} stored earlier)" if stored else ""


def row_table(rows: Sequence[Row], winner: Winner | None = None) -> Table:
    """One line a variant, a column a tunable; what no row knows has no column."""
    names = list(dict.fromkeys(name for row in rows for name in row.variant.tunables))
    several = len({row.variant.implementation for row in rows}) > 1
    cells = [
        (
            f"{row.variant.id}{'*' if winner and winner.variant.id == row.variant.id else ''}",
            row.variant.implementation if several else "",
            *(_value(row.variant.tunables, name) for name in names),
            units.count(row.footprint.smem_bytes),
            units.count(row.footprint.tmem_columns or None),
            units.count(row.footprint.threads),
            units.count(row.footprint.registers),
            units.count(row.footprint.spill_bytes),
            units.seconds(row.compile_s),
            units.microseconds(row.median_us),
        )
        for row in rows
    ]
    facts = ("smem B", "TMEM cols", "threads", "regs", "spill B", "compile", "search time")
    columns = ("variant", "implementation", *names, *facts)
    return Table(columns, cells, right=frozenset((*names, *facts)))


def _print_failures(problem: ProblemReport, spec_reference: str, out: Printer) -> None:
    groups = group_failures(problem.rows)
    if not groups:
        return
    out.heading("  failures:")
    for group in groups:
        out.line(f"  {group.headline()}")
        rest = group.rest()
        for line in rest[:MAX_REASON_LINES]:
            out.line(f"      {line}")
        if len(rest) > MAX_REASON_LINES:
            out.line(f"      ({len(rest) - MAX_REASON_LINES} more lines: tunekit explain has them)")
        out.line(f"      first: {units.label(group.first)}")
        out.line(f"      again: {reproduce(group, spec_reference, problem.problem)}")


def _value(tunables: Values, name: str) -> str:
    return str(tunables[name]) if name in tunables else ""
