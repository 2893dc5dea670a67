"""``tunekit sweep``: the whole pipeline for one spec."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunekit.cli import INTERRUPTION, Interruption, options
from tunekit.cli.problems import problems
from tunekit.progress import SweepReport
from tunekit.report import Printer, print_sweep, progress_display
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

    Exit status 1: no variant passed for some problem.
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
    )
    with progress_display(sys.stderr) as on_event:
        report = run(spec, todo, chosen, settings, on_event)
    out = Printer(sys.stdout)
    if as_json:
        out.json(report)
    else:
        print_sweep(report, spec, out)
    return exit_status(report, interruption)


def exit_status(report: SweepReport, interruption: Interruption) -> int:
    """130 or 143 if interrupted, 1 if some problem has no variant that passed, else 0."""
    if report.state == "interrupted":
        return 128 + interruption.number
    return 0 if all(any(row.ok for row in problem.rows) for problem in report.problems) else 1
