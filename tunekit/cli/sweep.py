"""``tunekit sweep``: the whole pipeline for one spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from tunekit.cli import INTERRUPTION, Interruption, options
from tunekit.cli.problems import problems
from tunekit.progress import AuditReport, SweepReport
from tunekit.report import Printer, print_audit, print_sweep, progress_display
from tunekit.spec import load_spec


@click.command(cls=options.PairsCommand)
@options.spec_argument
@options.arch_option
@options.problem_option
@options.workload_option
@click.option(
    "--budget", type=options.budget, metavar="N|TIME", help="At most N variants a problem, or a time such as 10m."
)
@click.option(
    "--search",
    type=click.Choice(["auto", "exhaustive", "random", "tpe", "gp", "surrogate"]),
    default="auto",
    show_default=True,
    help="How to choose variants. auto: all of them where the budget allows, else a surrogate.",
)
@click.option("--seed", type=options.SEED, metavar="N", default=0, show_default=True, help="Same seed, same proposals.")
@options.implementation_option
@options.variant_option
@options.jobs_option
@options.limit_options
@click.option(
    "--run-timeout",
    type=options.duration,
    metavar="S",
    help="Limit of one run of a kernel on the device. [default: 20]",
)
@click.option(
    "--verify",
    type=click.Choice(["auto", "gpu", "simulate", "none"]),
    default="auto",
    show_default=True,
    help="Check results: on the device, or else in the simulator; or fail without a device; or simulate; or never. "
    "Only what was measured on a device can win.",
)
@click.option(
    "--cases",
    type=click.Choice(["full", "problem"]),
    default="full",
    show_default=True,
    help="What a variant must get right on the device: three draws of the inputs and the edges of every size; or one "
    "draw of the problem alone, where many problems share the kernels.",
)
@click.option(
    "--device", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="The GPU to measure on."
)
@click.option(
    "--cache",
    type=click.Choice(["flush", "rotate", "warm"]),
    default="flush",
    show_default=True,
    help="What a timed call finds in the L2 cache: nothing, not even its code (flush); code but no data (rotate); all.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 50, min_open=True),
    metavar="PERCENT",
    default=1.0,
    show_default=True,
    help="Variants within this of each other count as equal.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(50, 99.99),
    metavar="PERCENT",
    default=95.0,
    show_default=True,
    help="How sure the final's decision must be, over all finalists and looks.",
)
@click.option(
    "--final-rounds",
    type=int,
    metavar="N",
    default=160,
    show_default=True,
    help="The most rounds of a final that can't be decided before; even.",
)
@click.option(
    "--final-time",
    type=options.duration,
    metavar="S",
    default="120",
    show_default=True,
    help="The most seconds of a final.",
)
@click.option(
    "--repeat-audit",
    type=click.IntRange(min=2),
    metavar="N",
    help="Sweep N times, each from an empty database beside yours, and say how far they agree.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Reuse stored measurements of this very code; the final is always run.",
)
@click.option("--force", is_flag=True, help="Do everything again, also what is stored.")
@click.option("--retry-failed", is_flag=True, help="Try again what hung or crashed before.")
@options.db_option
@options.json_option
@INTERRUPTION
def sweep(
    interruption: Interruption,
    spec: str,
    arch: str | None,
    problem_texts: tuple[str, ...],
    workload: Path | None,
    budget: str | None,
    search: str,
    seed: int,
    implementation: str | None,
    variant_ids: tuple[str, ...],
    jobs: int | None,
    compile_timeout: float | None,
    trace_timeout: float | None,
    memory_limit: int | None,
    run_timeout: float | None,
    verify: str,
    cases: str,
    device: int,
    cache: Literal["flush", "rotate", "warm"],
    margin: float,
    confidence: float,
    final_rounds: int,
    final_time: float,
    repeat_audit: int | None,
    resume: bool,
    force: bool,
    retry_failed: bool,
    db: Path | None,
    as_json: bool,
) -> int:
    """Find the fastest correct variant for each problem.

    Without a GPU of the architecture it expands, probes, compiles, exports and simulates
    a sample of each grid, and says that nothing was measured. Ctrl-C keeps what is done;
    the same command goes on from there.

    Exit status 1: no variant passed for some problem; of an audit: runs disagree outside ties.
    """
    from tunekit.sweep import SweepOptions
    from tunekit.sweep import sweep as run

    todo = problems(load_spec(spec), problem_texts, workload)
    settings = options.settings(
        db,
        compile_limit_s=compile_timeout,
        trace_limit_s=trace_timeout,
        run_limit_s=run_timeout,
        memory_limit_bytes=memory_limit,
        jobs=jobs,
    )
    chosen = SweepOptions(
        arch=arch,
        implementation=implementation,
        variants=variant_ids,
        jobs=jobs,
        budget=budget,
        search=search,
        seed=seed,
        resume=resume,
        force=force,
        retry_failed=retry_failed,
        verify=verify,
        cases=cases,
        device=device,
        cache=cache,
        margin=margin / 100,
        confidence=confidence / 100,
        final_rounds=final_rounds,
        final_seconds=final_time,
    )
    if repeat_audit is not None:
        from tunekit.sweep import audit

        with progress_display(sys.stderr) as on_event:
            audited = audit(spec, todo, chosen, settings, on_event, repeat_audit)
        return _tell_audit(audited, as_json, interruption)
    with progress_display(sys.stderr) as on_event:
        report = run(spec, todo, chosen, settings, on_event)
    out = Printer(sys.stdout)
    if as_json:
        out.json(report)
    else:
        print_sweep(report, spec, out)
    return exit_status(report, interruption)


def _tell_audit(report: AuditReport, as_json: bool, interruption: Interruption) -> int:
    out = Printer(sys.stdout)
    if as_json:
        out.json(report)
    else:
        print_audit(report, out)
    if report.runs[-1].state == "interrupted":
        return 128 + interruption.number
    return 0 if all(agreement.ok for agreement in report.agreements) else 1


def exit_status(report: SweepReport, interruption: Interruption) -> int:
    """130 or 143 if interrupted, 1 if some problem has no variant that passed, else 0."""
    if report.state == "interrupted":
        return 128 + interruption.number
    return 0 if all(any(row.ok for row in problem.rows) for problem in report.problems) else 1
