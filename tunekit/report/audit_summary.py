"""An audit as text: which variant each run named, problem by problem, and whether that is one answer."""

from __future__ import annotations

from tunekit.model import Winner
from tunekit.progress import AuditReport
from tunekit.report.printer import Printer, Table


def print_audit(report: AuditReport, out: Printer) -> None:
    """A table a problem with a row a run, the verdict, and where the runs are kept."""
    for agreement in report.agreements:
        out.heading(f"{report.spec} on {report.arch}: {agreement.problem}")
        rows = [(str(number), *_row(winner)) for number, winner in enumerate(agreement.winners, 1)]
        out.table(Table(("run", "winner", "median", "outcome", "tied with"), rows, right=frozenset({"run", "median"})))
        out.line(f"  {agreement.verdict}" + (f": {agreement.why}" if agreement.why else ""))
        out.line()
    for number, database in enumerate(report.databases, 1):
        out.line(f"run {number} is kept in {database}")
    if not report.agreements:
        out.line("interrupted before two runs were complete: nothing to compare")
        return
    agreed = sum(agreement.ok for agreement in report.agreements)
    out.line(f"{agreed} of {len(report.agreements)} problems: the same winner, or one that differs within a tie")


def _row(winner: Winner | None) -> tuple[str, str, str, str]:
    if winner is None:
        return "none", "", "", ""
    others = ", ".join(tied for tied in winner.tied if tied != winner.variant.id)
    return winner.variant.id, f"{winner.median_us:.2f} us", winner.outcome, others
