"""A simulation as text, in the form of a sanitizer's: each fault once with its first instance in full, then the sum."""

from __future__ import annotations

import re

from tunekit.model import Values
from tunekit.report import units
from tunekit.report.printer import Printer
from tunekit.simulate import faults
from tunekit.simulate.faults import Fault
from tunekit.simulate.job import Simulation
from tunekit.simulate.report import Launched, Report
from tunekit.trials import Status

RULE = "========="
MOST_NOTES = 40
_LONG_NAME = re.compile(r"\w{73,}")


def print_simulation(simulation: Simulation, out: Printer) -> None:
    """What was simulated, each fault, and whether the results are right."""
    report = simulation.report
    if report is None:
        out.line(f"  nothing was simulated: {simulation.status}: {simulation.failure}")
        return
    for launched in report.launches:
        out.line(f"  {launched_text(launched)}")
    for fault in report.faults:
        for line in fault_lines(fault):
            out.line(line)
    if report.faults and not any(fault.place.source for fault in report.faults):
        out.line("  --line-info adds the lines of the kernel's source")
    for note in report.notes[:MOST_NOTES]:
        out.line(f"  note: {note.rstrip()}")
    if len(report.notes) > MOST_NOTES:
        out.line(f"  and {len(report.notes) - MOST_NOTES} more notes")
    out.line(f"  {speed_text(report)}")
    out.line(f"  {verdict(simulation)}")


def launched_text(launched: Launched) -> str:
    """``kernel k: grid 4x1x1, 128 threads, 1,024 B dynamic smem; 2 of 4 CTAs simulated``."""
    x, y, z = launched.block
    cluster = "" if launched.cluster == (1, 1, 1) else f", clusters of {_sides(launched.cluster)}"
    some = "all" if launched.ctas == launched.total else f"{launched.ctas:,} of"
    return (
        f"kernel {shortened(launched.kernel)}: grid {_sides(launched.grid)}{cluster}, {x * y * z:,} threads, "
        f"{launched.shared_bytes:,} B dynamic smem; {some} {launched.total:,} CTAs simulated"
    )


def fault_lines(fault: Fault) -> list[str]:
    """One fault: what, where, how often; its first instance in full."""
    place = fault.place
    first, *rest = fault.message.splitlines() or [""]
    lines = [f"{RULE} {fault.kind.value}: {first}", *(f"{RULE}   {line}" for line in rest)]
    where = f"cta {place.cta}" + ("" if place.warp is None else f", warp {place.warp}")
    lines.append(f"{RULE}   in {where}{_lanes(fault.lanes)}")
    if place.line is not None:
        lines.append(f"{RULE}   at PTX line {place.line}: {abridged(place.text)}")
    if place.source is not None:
        lines.append(f"{RULE}   from {place.source[0]}:{place.source[1]}")
    if fault.count > 1:
        there = "" if place.line is None else " at this instruction"
        lines.append(f"{RULE}   seen {fault.count:,} times{there}")
    return lines


def speed_text(report: Report) -> str:
    seeds = [schedule.seed for schedule in report.schedules]
    runs = f"schedule (seed {seeds[0]})" if len(seeds) == 1 else f"schedules (seeds {seeds[0]}-{seeds[-1]})"
    rate = report.instructions / report.seconds if report.seconds else 0.0
    return (
        f"{len(seeds)} {runs}: {report.instructions:,} warp instructions in {units.seconds(report.seconds)}, "
        f"{rate:,.0f} a second"
    )


def verdict(simulation: Simulation) -> str:
    """One line: right, or what is not."""
    outcome = simulation.outcome()
    report = simulation.report
    if report is not None and report.faults:
        results = _results(report, simulation.figures)
        kinds = len(report.faults)
        return f"{kinds} fault{'s' if kinds > 1 else ''}; {results}"
    if outcome.status is Status.OK and report is not None:
        return f"clean: {_results(report, simulation.figures)}"
    return abridged(outcome.reason if outcome.status is Status.NOT_MODELLED else f"{outcome.status}: {outcome.reason}")


def _results(report: Report, figures: Values) -> str:
    wrong = next((schedule.wrong or schedule.changed for schedule in report.schedules if not schedule.ok), None)
    if wrong is not None:
        return f"results: {wrong}" if wrong else "the results were not compared"
    what = "what these CTAs wrote agrees" if report.partial else "the results agree"
    accuracy = units.accuracy(figures)
    return f"{what} with the oracle ({accuracy})" if accuracy else f"{what} with the oracle"


def shortened(name: str, width: int = 72) -> str:
    """A name, its middle left out where it is long: generated ones run to hundreds of characters."""
    half = (width - 3) // 2
    return name if len(name) <= width else f"{name[:half]}...{name[-half:]}"


def abridged(text: str) -> str:
    """Text with its long names and vectors shortened."""
    return _LONG_NAME.sub(lambda name: shortened(name.group()), faults.abridged(text))


def _sides(sides: tuple[int, int, int]) -> str:
    return "x".join(str(side) for side in sides)


def _lanes(lanes: tuple[int, ...]) -> str:
    if not lanes:
        return ""
    if lanes == tuple(range(lanes[0], lanes[-1] + 1)):
        return f", lane {lanes[0]}" if len(lanes) == 1 else f", lanes {lanes[0]}-{lanes[-1]}"
    return f", lanes {' '.join(str(lane) for lane in lanes)}"
