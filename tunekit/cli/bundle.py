"""``tunekit bundle``: one directory with the kernels that serve, for machines that neither compile nor record."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunekit.cli import options
from tunekit.cli.problems import problems
from tunekit.cli.space_view import choose_arch
from tunekit.report import Printer, progress_display, units
from tunekit.spec import load_spec


@click.command(cls=options.PairsCommand)
@options.spec_argument
@options.arch_option
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="The directory to make; not there yet."
)
@click.option(
    "--problem",
    "-p",
    "problem_texts",
    multiple=True,
    metavar="K=V ...",
    help="Only what serves this problem. [default: all that have a winner]",
)
@options.workload_option
@click.option("--compile", "compile_missing", is_flag=True, help="Compile what is not compiled; needs no GPU.")
@click.option("--force", is_flag=True, help="Replace the bundle that is there.")
@options.jobs_option
@options.limit_options
@options.db_option
@options.json_option
def bundle(
    spec: str,
    arch: str | None,
    out: Path,
    problem_texts: tuple[str, ...],
    workload: Path | None,
    compile_missing: bool,
    force: bool,
    jobs: int | None,
    compile_timeout: float | None,
    trace_timeout: float | None,
    memory_limit: int | None,
    db: Path | None,
    as_json: bool,
) -> int:
    """Put the winners' kernels into one directory, which tunekit.load(SPEC, bundle=DIR) serves from.

    Your own winners and the shipped ones, with checksums and licences; no compiler, database or network is needed
    where it serves. Exit status 1: something was left out, for it is not compiled.
    """
    loaded = load_spec(spec)
    chosen, _ = choose_arch(loaded, arch)
    todo = problems(loaded, problem_texts, workload) if problem_texts or workload else ()
    settings = options.settings(
        db,
        compile_limit_s=compile_timeout,
        trace_limit_s=trace_timeout,
        memory_limit_bytes=memory_limit,
        jobs=jobs,
    )
    from tunekit.dispatch.bundling import bundle as make

    with progress_display(sys.stderr) as on_event:
        done = make(
            loaded,
            spec,
            chosen.name,
            out,
            settings,
            todo,
            compile=compile_missing,
            force=force,
            on_event=on_event,
        )
    printer = Printer(sys.stdout)
    if as_json:
        printer.json(done)
        return 1 if done.left_out else 0
    printer.line(
        f"{done.spec} on {done.arch}: {done.kernels} kernels for {done.problems} problems, "
        f"{done.size_bytes / 1024:,.0f} KiB, in {done.directory}"
    )
    for package in done.libraries:
        printer.line(f"  {package} won too: it serves where it is installed")
    for left in done.left_out:
        printer.line(f"  left out: {units.label(left.variant)} for {left.problem}: {left.why}")
        printer.line(f"    {left.command}")
    if done.left_out and not compile_missing:
        printer.line(f"  {len(done.left_out)} left out; --compile compiles them")
    return 1 if done.left_out else 0
