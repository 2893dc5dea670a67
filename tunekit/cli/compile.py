"""``tunekit compile``: the first half of a sweep, for chosen variants: compiled into the artifact store."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunekit.cli import INTERRUPTION, Interruption, options
from tunekit.cli.problems import problems
from tunekit.cli.space_view import choose_arch
from tunekit.errors import UserError
from tunekit.report import Printer, print_sweep, progress_display
from tunekit.space import default_variant
from tunekit.spec import load_spec


@click.command("compile", cls=options.PairsCommand)
@options.spec_argument
@options.arch_option
@options.problem_option
@options.workload_option
@options.implementation_option
@options.variant_option
@click.option("--default", "only_default", is_flag=True, help="Only the variant that serves an untuned problem.")
@options.jobs_option
@options.limit_options
@click.option("--force", is_flag=True, help="Compile also what is stored.")
@click.option("--retry-failed", is_flag=True, help="Try again what hung or crashed before.")
@options.db_option
@options.json_option
@INTERRUPTION
def compile_(
    interruption: Interruption,
    spec: str,
    arch: str | None,
    problem_texts: tuple[str, ...],
    workload: Path | None,
    implementation: str | None,
    variant_ids: tuple[str, ...],
    only_default: bool,
    jobs: int | None,
    compile_timeout: float | None,
    trace_timeout: float | None,
    memory_limit: int | None,
    force: bool,
    retry_failed: bool,
    db: Path | None,
    as_json: bool,
) -> int:
    """Compile variants and store their artifacts.

    All variants of the problems, unless --variant or --default choose. Exit status
    1: some variant failed.
    """
    loaded = load_spec(spec)
    chosen, _ = choose_arch(loaded, arch)
    todo = problems(loaded, problem_texts, workload)
    settings = options.settings(
        db,
        compile_limit_s=compile_timeout,
        trace_limit_s=trace_timeout,
        memory_limit_bytes=memory_limit,
        jobs=jobs,
    )
    if only_default:
        if len(todo) != 1 or variant_ids:
            raise UserError("--default takes one problem (--problem) and no --variant")
        default = default_variant(loaded, chosen, todo[0])
        if default is None:
            raise UserError(f"{loaded.name} has no default variant for {todo[0]} on {chosen.name}")
        variant_ids = (default.id,)
    from tunekit.sweep import SweepOptions, sweep

    wanted = SweepOptions(
        arch=chosen.name,
        implementation=implementation,
        jobs=jobs,
        search="exhaustive",
        force=force,
        retry_failed=retry_failed,
        verify="none",
        variants=variant_ids,
    )
    with progress_display(sys.stderr) as on_event:
        report = sweep(spec, todo, wanted, settings, on_event)
    out = Printer(sys.stdout)
    out.json(report) if as_json else print_sweep(report, spec, out, winners=False)
    if report.state == "interrupted":
        return 128 + interruption.number
    return 0 if all(row.ok for problem in report.problems for row in problem.rows) else 1
