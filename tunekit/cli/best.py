"""``tunekit best``: what dispatch would pick for a problem. Imports no torch, no compiler, no SQLite library."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunekit.cli import options
from tunekit.cli.problems import problems
from tunekit.cli.space_view import choose_arch
from tunekit.model import Choice
from tunekit.report import Printer, units
from tunekit.report.sweep_summary import winner_text
from tunekit.spec import load_spec


@click.command(cls=options.PairsCommand)
@options.spec_argument
@options.arch_option
@options.problem_option
@options.workload_option
@click.option(
    "--device", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="The GPU that would serve."
)
@options.db_option
@options.json_option
def best(
    spec: str,
    arch: str | None,
    problem_texts: tuple[str, ...],
    workload: Path | None,
    device: int,
    db: Path | None,
    as_json: bool,
) -> int:
    """Say which variant serves a problem, and why.

    A choice that is not compiled, or a better one that is not, is shown with the command
    that compiles it. Exit status 1: no variant can serve it.
    """
    loaded = load_spec(spec)
    todo = problems(loaded, problem_texts, workload)
    chosen, why_arch = choose_arch(loaded, arch, device)
    settings = options.settings(db)
    out = Printer(sys.stdout)
    from tunekit.dispatch.library import compile_command
    from tunekit.dispatch.lookup import look_up

    choices = []
    for problem in todo:
        choice = look_up(loaded, problem, arch=chosen.name, device=device, settings=settings)
        choices.append({"problem": problem, "arch": chosen.name, "choice": choice})
        if not as_json:
            out.heading(f"{loaded.name} on {chosen.name} ({why_arch}): {problem}")
            wanted = choice.better or choice.variant
            _print(choice, compile_command(spec, wanted, problem), out)
    if as_json:
        out.json(choices)
    return 0


def _print(choice: Choice, compile_it: str, out: Printer) -> None:
    out.line(f"  variant   {units.label(choice.variant)}")
    out.line(f"  because   {choice.level}: {choice.why}")
    if choice.winner is not None:
        out.line(f"  measured  {winner_text(choice.winner)}, on {choice.winner.environment.gpu or 'this host'}")
    out.line(f"  artifact  {choice.artifact or f'none yet: {compile_it}'}")
    if choice.better is not None:
        out.line(f"  better    {units.label(choice.better)}, once it is compiled: {compile_it}")
    for missed in choice.fell_back_from:
        if choice.artifact or str(choice.variant) not in missed:  # that it is not compiled is said above
            out.line(f"  not       {missed}")
