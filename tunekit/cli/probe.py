"""``tunekit probe``: the three readings of what a variant needs, and whether they agree."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import click

from tunekit.cli import options
from tunekit.cli.problems import problems
from tunekit.cli.space_view import Point, all_points, choose_arch, select
from tunekit.model import Footprint, Values, Variant
from tunekit.report import Printer, Table, progress_display, units
from tunekit.settings import Settings
from tunekit.spec import KernelSpec, absolute_reference, load_spec


@dataclass(frozen=True)
class Reading:
    """What one variant needs: by the spec's arithmetic, by the traced IR, by the machine code.

    `disagreements` are fields in which two readings differ; `status` and `reason`
    tell how the probe ended.
    """

    variant: Variant
    status: str
    reason: str
    declared: Footprint
    traced: Footprint
    compiled: Footprint
    seconds: float | None
    disagreements: tuple[str, ...]

    @property
    def best(self) -> Footprint:
        """The fields that any reading knows, the machine code's first."""
        known = {}
        for field in dataclasses.fields(Footprint):
            readings = (getattr(reading, field.name) for reading in (self.compiled, self.traced, self.declared))
            known[field.name] = next((value for value in readings if value is not None), None)
        return Footprint(**known)

    def verdict(self) -> str:
        if self.status != "ok":
            return f"{self.status}: {self.reason.strip().partition(chr(10))[0]}"
        if self.disagreements:
            return "; ".join(self.disagreements)
        known = [reading for reading in (self.declared, self.traced, self.compiled) if reading != Footprint()]
        return "agree" if len(known) > 1 else "nothing to compare"


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

    Variants whose declared footprint can't fit are not traced. Exit status 1: a
    reading failed, or two disagree.
    """
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
        fitting = [] if declared_only else [point for point in points if point.fits]
        readings = {p.variant.id: _declared(p) for p in points}
        readings |= _traced(loaded, spec, problem, fitting, settings, back_end)
        ordered = [readings[point.variant.id] for point in points]
        good = good and all(r.status in ("ok", "over_budget") and not r.disagreements for r in ordered)
        collected.append({"problem": problem, "arch": chosen.name, "variants": ordered})
        if not as_json:
            out.heading(f"{loaded.name} on {chosen.name} ({why}): {problem}")
            out.table(_table(ordered))
            out.line()
    if as_json:
        out.json(collected)
    return 0 if good else 1


def _declared(point: Point) -> Reading:
    status = "ok" if point.misfit is None else "over_budget"
    return Reading(point.variant, status, point.misfit or "", point.footprint, Footprint(), Footprint(), None, ())


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
            value = result.value or {}
            traced, compiled = Footprint(**value.get("traced", {})), Footprint(**value.get("compiled", {}))
            mine = declared[unit.variant.id]
            differing = [f"declared {text} traced" for text in mine.disagreements(traced)]
            differing += [f"traced {text} compiled" for text in traced.disagreements(compiled)]
            seconds = sum(float(s) for s in result.seconds.values())
            readings[unit.variant.id] = Reading(
                unit.variant, str(result.status), result.reason, mine, traced, compiled, seconds, tuple(differing)
            )
    return readings


def _table(readings: list[Reading]) -> Table:
    rows = [
        (
            reading.variant.id,
            str(reading.variant.tunables),
            units.count(reading.best.smem_bytes),
            units.count(reading.best.tmem_columns or None),
            units.count(reading.best.threads),
            units.count(reading.best.cluster),
            units.count(reading.best.registers),
            units.count(reading.best.spill_bytes),
            units.seconds(reading.seconds),
            reading.verdict(),
        )
        for reading in readings
    ]
    numbers = ("smem B", "TMEM cols", "threads", "cluster", "regs", "spill B", "took")
    return Table(("variant", "tunables", *numbers, "readings"), rows, right=frozenset(numbers))
