"""``tunekit explain``: which constraint dropped a variant, and all that is known of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tunekit.arch import Arch
from tunekit.cli import options
from tunekit.cli.explain_winner import print_repeated, repeated
from tunekit.cli.problems import problems, tunables
from tunekit.cli.space_view import Point, all_points, choose_arch, select
from tunekit.errors import DatabaseError, UserError
from tunekit.model import Values
from tunekit.probe import DISAGREEMENT
from tunekit.report import Printer, Table, units
from tunekit.space import implementations_on
from tunekit.spec import KernelSpec, load_spec
from tunekit.trials import Trial


@click.command(cls=options.PairsCommand)
@options.spec_argument
@options.arch_option
@options.problem_option
@options.implementation_option
@options.variant_option
@options.tunables_option
@click.option(
    "--winner", is_flag=True, help="How the recorded winner was decided, and whether its samples decide the same again."
)
@options.db_option
@options.json_option
def explain(
    spec: str,
    arch: str | None,
    problem_texts: tuple[str, ...],
    implementation: str | None,
    variant_ids: tuple[str, ...],
    tunable_texts: tuple[str, ...],
    winner: bool,
    db: Path | None,
    as_json: bool,
) -> int:
    """Say why variants were dropped, or all that is known of one.

    Without --variant or --tunables: how many variants each constraint and each
    limit of the architecture removed. With one: its constraints, its declared
    footprint and every stored outcome for the problem. With --winner: each winner that
    is recorded for the problem's bucket, its final's samples as a table, and the decision made
    again from them; exit status 1 where none is recorded, or one comes out otherwise or is damaged.
    """
    loaded = load_spec(spec)
    chosen, _ = choose_arch(loaded, arch)
    out = Printer(sys.stdout)
    collected: list[Any] = []
    if winner:
        if variant_ids or tunable_texts:
            raise UserError("--winner is of a problem, not of a --variant or of --tunables")
        found = [
            one
            for problem in problems(loaded, problem_texts, None)
            for one in repeated(options.settings(db).database, loaded, chosen.name, problem)
        ]
        for one in found if not as_json else ():
            print_repeated(one, out)
        if as_json:
            out.json([one.plain() for one in found])
        elif not found:
            out.line(f"no winner of {loaded.name} is recorded for {chosen.name} in {options.settings(db).database}")
        return 0 if found and not any(one.differs or one.damage for one in found) else 1
    for problem in problems(loaded, problem_texts, None):
        points = all_points(loaded, chosen, problem, implementation)
        if not variant_ids and not tunable_texts:
            summary = _fates(points)
            collected.append({"problem": problem, "arch": chosen.name, "variants": len(points), "dropped": summary})
            if not as_json:
                _print_fates(loaded, chosen, problem, points, summary, out)
            continue
        if tunable_texts:
            wanted = {
                candidate.name: tunables(candidate, tunable_texts)
                for candidate in implementations_on(loaded, chosen, implementation)
            }
            points = [p for p in points if p.variant.tunables == wanted[p.variant.implementation]]
        for point in select(points, variant_ids):
            trials = _trials(options.settings(db).database, point, (problem, loaded.static(problem)))
            collected.append(_story(problem, point, trials))
            if not as_json:
                _print_story(chosen, problem, point, trials, out)
    if as_json:
        out.json(collected)
    return 0


def _fates(points: list[Point]) -> list[dict[str, Any]]:
    """Why points fall away, in order: the constraints, then the architecture's limits; each with an example."""
    fates: dict[str, dict[str, Any]] = {}
    for point in points:
        if point.fits:
            continue
        if point.dropped_by is not None:
            name, why = point.dropped_by.name, point.dropped_by.why
        else:
            name, why = "over_budget", str(point.misfit)
        fate = fates.setdefault(name, {"by": name, "why": why, "count": 0, "example": point.variant})
        fate["count"] += 1
    return list(fates.values())


def _print_fates(
    spec: KernelSpec, arch: Arch, problem: Values, points: list[Point], fates: list[dict[str, Any]], out: Printer
) -> None:
    left = sum(1 for point in points if point.fits)
    out.heading(f"{spec.name} on {arch.name}: {problem}")
    out.line(f"  {left} of {len(points)} variants remain")
    rows = [
        (str(fate["count"]), fate["by"], fate["why"], fate["example"].id, str(fate["example"].tunables))
        for fate in fates
    ]
    out.table(Table(("dropped", "by", "because", "for example", "tunables"), rows, right=frozenset({"dropped"})))
    out.line()


def _story(problem: Values, point: Point, trials: list[Trial]) -> dict[str, Any]:
    constraint = point.dropped_by
    return {
        "problem": problem,
        "variant": point.variant,
        "dropped_by": None if constraint is None else {"by": constraint.name, "why": constraint.why},
        "footprint": point.footprint,
        "misfit": point.misfit,
        "trials": trials,
    }


def _print_story(arch: Arch, problem: Values, point: Point, trials: list[Trial], out: Printer) -> None:
    out.heading(units.label(point.variant))
    out.line(f"  problem: {problem}")
    if point.dropped_by is not None:
        out.line(f"  dropped by {point.dropped_by.name}: {point.dropped_by.why}")
        return
    out.line("  constraints: all hold")
    out.line(f"  declared footprint on {arch.name}: {units.footprint(point.footprint)} ({point.verdict})")
    if not trials:
        out.line("  stored outcomes: none")
        return
    out.line("  stored outcomes, oldest first:")
    for trial in trials:
        outcome = trial.outcome
        times = ", ".join(f"{name} {units.seconds(float(s))}" for name, s in outcome.seconds.items())
        peak = units.mebibytes(outcome.peak_rss_bytes)
        detail = "; ".join(part for part in (times, peak and f"peak {peak}") if part)
        out.line(f"    {outcome.stage}: {outcome.status}" + (f" ({detail})" if detail else ""))
        for line in outcome.reason.strip().splitlines():
            out.line(f"      {line}")
        if DISAGREEMENT in outcome.facts:
            out.line(f"      the footprint's readings disagree: {outcome.facts[DISAGREEMENT]}")
        accuracy = units.accuracy(outcome.facts)
        if accuracy:
            out.line(f"      {accuracy}")
        if outcome.samples_us:
            ordered = sorted(outcome.samples_us)
            median = units.microseconds(ordered[len(ordered) // 2])
            out.line(f"      median {median} over {len(ordered)} samples, protocol {trial.protocol}")
        toolchain = trial.environment.cutlass_dsl or "?"
        out.line(f"      on {trial.environment.gpu or 'no GPU'}, nvidia-cutlass-dsl {toolchain}")


def _trials(database: Path, point: Point, problems: tuple[Values, ...]) -> list[Trial]:
    """What is stored of a variant for these problems, read without writing; nothing where there is no database yet."""
    if not database.exists():
        return []
    from tunekit.store.queries import select_trials
    from tunekit.store.readonly import UnreadableError, reading

    try:
        with reading(database) as connection:
            found = select_trials(connection, database, {"variant": point.variant.id})
    except UnreadableError as error:
        raise DatabaseError(f"{database} {error}") from error
    return [trial for trial in found if trial.problem in problems]
