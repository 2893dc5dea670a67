"""``tunekit probe``: the three readings of what a variant needs, and whether they agree."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from tunekit.cli import options
from tunekit.cli.problems import problems
from tunekit.cli.space_view import Point, all_points, choose_arch, select
from tunekit.errors import UserError
from tunekit.model import Footprint, Values, Variant
from tunekit.probe import Probe
from tunekit.report import Printer, Table, progress_display, units
from tunekit.settings import Settings
from tunekit.spec import KernelSpec, absolute_reference, load_spec


@dataclass(frozen=True)
class Reading:
    """What one variant needs, by up to three readings; `status` and `reason` tell how the probe ended."""

    variant: Variant
    status: str
    reason: str
    probe: Probe
    seconds: float | None = None
    library: bool = False

    @property
    def good(self) -> bool:
        return self.status in ("ok", "over_budget") and self.probe.agrees

    def verdict(self) -> str:
        if self.status != "ok":
            return f"{self.status}: {self.reason.strip().partition(chr(10))[0]}"
        if self.library:
            return "a library's function: nothing to trace"
        known = [name for name, reading in self.probe.readings().items() if reading != Footprint()]
        verb = {0: "nothing is known", 1: f"{''.join(known)} only"}.get(len(known), f"{', '.join(known)} agree")
        return "; ".join(self.probe.disagreements()) or verb

    def to_json(self) -> dict[str, object]:
        """The reading as `--json` prints it."""
        return {
            "variant": self.variant,
            "status": self.status,
            "reason": self.reason,
            **self.probe.readings(),
            "disagreements": self.probe.disagreements(),
            "seconds": self.seconds,
            "library": self.library,
        }


@click.command(cls=options.PairsCommand)
@options.spec_argument
@options.arch_option
@options.problem_option
@options.implementation_option
@options.variant_option
@click.option("--compile", "back_end", is_flag=True, help="Run the back end too: registers, spills.")
@click.option("--declared", "declared_only", is_flag=True, help="Only the spec's arithmetic; imports no compiler.")
@options.jobs_option
@options.limit_options
@options.json_option
def probe(
    spec: str,
    arch: str | None,
    problem_texts: tuple[str, ...],
    implementation: str | None,
    variant_ids: tuple[str, ...],
    back_end: bool,
    declared_only: bool,
    jobs: int | None,
    compile_timeout: float | None,
    trace_timeout: float | None,
    memory_limit: int | None,
    as_json: bool,
) -> int:
    """Compare declared, traced and compiled footprints.

    Variants whose declared footprint can't fit are not traced, nor is what a library launches. Exit status 1: a
    reading failed, or two disagree.
    """
    if back_end and declared_only:
        raise UserError("give --compile or --declared, not both")
    loaded = load_spec(spec)
    chosen, why = choose_arch(loaded, arch)
    settings = options.settings(
        compile_limit_s=compile_timeout, trace_limit_s=trace_timeout, memory_limit_bytes=memory_limit, jobs=jobs
    )
    out = Printer(sys.stdout)
    collected = []
    good = True
    for problem in problems(loaded, problem_texts, None):
        points = [p for p in all_points(loaded, chosen, problem, implementation) if p.dropped_by is None]
        points = select(points, variant_ids)
        fitting = [] if declared_only else [point for point in points if point.fits and not point.library]
        readings = {p.variant.id: _declared(p) for p in points}
        readings |= _traced(loaded, spec, problem, fitting, settings, back_end)
        ordered = [readings[point.variant.id] for point in points]
        good = good and all(reading.good for reading in ordered)
        collected.append({"problem": problem, "arch": chosen.name, "variants": [r.to_json() for r in ordered]})
        if not as_json:
            out.heading(f"{loaded.name} on {chosen.name} ({why}): {problem}")
            if not ordered:
                out.line("  no valid variant (tunekit explain says why)")
            out.table(_table(ordered))
            out.line()
    if as_json:
        out.json(collected)
    return 0 if good else 1


def _declared(point: Point) -> Reading:
    status = "ok" if point.misfit is None else "over_budget"
    return Reading(point.variant, status, point.misfit or "", Probe(point.footprint), library=point.library)


def _traced(
    spec: KernelSpec, reference: str, problem: Values, points: list[Point], settings: Settings, back_end: bool
) -> dict[str, Reading]:
    if not points:
        return {}
    from tunekit.cli.tracing import trace
    from tunekit.compiling import units as compile_units

    declared = {point.variant.id: point.footprint for point in points}
    wanted = compile_units(spec, absolute_reference(reference), problem, [point.variant for point in points])
    readings = {}
    with progress_display(sys.stderr) as on_event:
        for unit, result in trace(spec, wanted, settings, on_event, back_end=back_end):
            mine = declared[unit.variant.id]
            readings[unit.variant.id] = Reading(
                unit.variant,
                str(result.status),
                result.reason,
                Probe(mine) if result.value is None else Probe.of_report(result.value, mine),
                sum(float(s) for s in result.seconds.values()),
            )
    return readings


def _table(readings: list[Reading]) -> Table:
    rows = []
    for reading in readings:
        best = reading.probe.footprint()
        rows.append(
            (
                reading.variant.id,
                str(reading.variant),
                units.count(best.smem_bytes),
                units.count(best.tmem_columns or None),
                units.count(best.threads),
                units.count(best.cluster),
                units.count(best.registers),
                units.count(best.spill_bytes),
                units.seconds(reading.seconds),
                reading.verdict(),
            )
        )
    numbers = ("smem B", "TMEM cols", "threads", "cluster", "regs", "spill B", "took")
    return Table(("id", "variant", *numbers, "readings"), rows, right=frozenset(numbers))
