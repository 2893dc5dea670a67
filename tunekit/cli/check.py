"""``tunekit check``: what CI asks."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunekit.cli import options
from tunekit.cli.problems import pairs, problems
from tunekit.errors import UserError
from tunekit.model import Value
from tunekit.report import Printer
from tunekit.spec import KernelSpec, list_specs, load_spec


@click.group()
def check() -> None:
    """Checks for CI: compile times."""


@check.command("compile-time", cls=options.PairsCommand, short_help="Compile times against a limit and a baseline.")
@click.argument("named", nargs=-1, metavar="[SPEC]...")
@click.option("--spec", "specs", multiple=True, metavar="SPEC", help="What to check, too. [default: all shipped]")
@click.option(
    "--arch",
    "arches",
    multiple=True,
    metavar="ARCH",
    help="Architecture; repeatable. [default: each implementation's first]",
)
@options.problem_option
@click.option("--tunables", "tunable_texts", multiple=True, metavar="K=V ...", help="Only variants with these values.")
@click.option("--all", "every", is_flag=True, help="Every variant. [default: defaults, and the winners that ship]")
@click.option(
    "--limit-s", type=options.duration, metavar="S", help="What one compile may take. [default: the spec's, else 300]"
)
@click.option("--baseline", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Earlier figures.")
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Another checkout: its kernels are compiled in the same rounds and compared with.",
)
@click.option("--update-baseline", is_flag=True, help="Write the figures to the baseline file.")
@click.option(
    "--max-ratio", type=float, metavar="N", default=1.5, show_default=True, help="A regression is this much slower ..."
)
@click.option(
    "--floor-s", type=float, metavar="S", default=0.5, show_default=True, help="... and slower by this many seconds."
)
@click.option(
    "--rounds", type=int, metavar="N", help="How often to compile; the fastest counts. [default: 3 to compare, else 1]"
)
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write JUnit XML too.")
@click.option("--github", is_flag=True, help="Print GitHub's workflow commands too: they annotate the pull request.")
@options.json_option
def compile_time(
    named: tuple[str, ...],
    specs: tuple[str, ...],
    arches: tuple[str, ...],
    problem_texts: tuple[str, ...],
    tunable_texts: tuple[str, ...],
    every: bool,
    limit_s: float | None,
    baseline: Path | None,
    base: Path | None,
    update_baseline: bool,
    max_ratio: float,
    floor_s: float,
    rounds: int | None,
    junit: Path | None,
    github: bool,
    as_json: bool,
) -> int:
    """Compile chosen variants cold, against a limit and a baseline.

    By default all of SPEC that is served: every implementation's default variants for the spec's examples and for the
    workloads beside it, and the winners that ship. Figures are calibrated by a reference compile in the same rounds,
    so that a busy machine raises no alarm. Exit status 1: a kernel failed, vanished, regressed or is over the limit.
    """
    from tunekit.check.compile_times import check_compile_times
    from tunekit.check.render import as_github, as_junit, as_text
    from tunekit.check.render import as_json as json_of

    names = (*named, *specs) or tuple(spec.name for spec in list_specs())
    if not names:
        raise UserError("no specs are shipped; name one with --spec")
    loaded = [load_spec(name) for name in names]
    if problem_texts and len(loaded) > 1:
        raise UserError("--problem is of one spec: name it with --spec")
    report = check_compile_times(
        names,
        arches or None,
        problems=problems(loaded[0], problem_texts, None) if problem_texts else None,
        which="all" if every else "default",
        only=_only(loaded, tunable_texts) if tunable_texts else None,
        limit_s=limit_s,
        baseline=baseline,
        base=base,
        max_ratio=max_ratio,
        floor_s=floor_s,
        rounds=rounds,
        update_baseline=update_baseline,
        settings=options.settings(),
        progress=lambda line: click.echo(line, err=True),
    )
    if junit is not None:
        try:
            junit.write_text(as_junit(report), encoding="utf-8")
        except OSError as error:
            raise UserError(f"can't write {junit}: {error.strerror}") from None
    out = Printer(sys.stdout)
    if as_json:
        out.json(json_of(report))
    else:
        for line in as_text(report).splitlines():
            out.line(line)
    if github:
        # GitHub reads its commands from stdout; with --json they'd spoil the value, so they go to stderr.
        for line in as_github(report).splitlines():
            click.echo(line, err=as_json)
    return report.exit_code


def _only(specs: list[KernelSpec], texts: tuple[str, ...]) -> dict[str, Value]:
    """``k=v`` texts as values, each as the specs' tunables write it."""
    found: dict[str, Value] = {}
    for name, text in pairs(texts, "--tunables").items():
        values = [
            value
            for spec in specs
            for implementation in spec.implementations
            for tunable in implementation.tunables
            if tunable.name == name
            for value in tunable.values
        ]
        # The check itself refuses an unknown name or value, with the known ones.
        found[name] = next((value for value in values if str(value).lower() == text.lower()), text)
    return found
