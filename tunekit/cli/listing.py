"""``tunekit list``: the shipped specs, or one spec's variants for a problem."""

from __future__ import annotations

import sys
from typing import Any

import click

from tunekit import space
from tunekit.arch import ARCHES
from tunekit.cli import options
from tunekit.cli.problems import problems
from tunekit.cli.space_view import all_points, choose_arch
from tunekit.errors import UserError
from tunekit.report import Printer, Table, units
from tunekit.spec import KernelSpec, list_specs, load_spec


@click.command("list", cls=options.PairsCommand)
@click.argument("spec", metavar="[SPEC]", required=False)
@options.arch_option
@options.problem_option
@options.implementation_option
@options.json_option
def listing(
    spec: str | None, arch: str | None, problem_texts: tuple[str, ...], implementation: str | None, as_json: bool
) -> int:
    """List the shipped specs, or the variants of one.

    With SPEC: every variant that the constraints leave for the problem, with its
    declared footprint and, where that can't fit, why.
    """
    out = Printer(sys.stdout)
    if spec is None and (arch or problem_texts or implementation):
        raise UserError("--arch, --problem and --implementation are about one spec: name it")
    if spec is None:
        _print_specs(out, as_json)
        return 0
    loaded = load_spec(spec)
    chosen, why = choose_arch(loaded, arch)
    results: list[dict[str, Any]] = []
    for problem in problems(loaded, problem_texts, None):
        expansion = space.expand(loaded, chosen, problem, implementation)
        points = [p for p in all_points(loaded, chosen, problem, implementation) if p.dropped_by is None]
        misfits = sum(1 for point in points if not point.fits)
        if as_json:
            variants = [{"variant": p.variant, "footprint": p.footprint, "misfit": p.misfit} for p in points]
            counts = {"total": expansion.total, "dropped": expansion.removed, "absent": list(expansion.absent)}
            results.append({"problem": problem, "arch": chosen.name, **counts, "variants": variants})
            continue
        out.heading(f"{loaded.name} on {chosen.name} ({why}): {problem}")
        out.line(f"  {expansion.blame()}" + (f"; {misfits} can't fit" if misfits else ""))
        for absent in expansion.absent:
            out.line(f"  {absent}")
        rows = [
            (
                point.variant.id,
                point.variant.implementation,
                str(point.variant.tunables),
                units.count(point.footprint.smem_bytes),
                units.count(point.footprint.tmem_columns or None),
                units.count(point.footprint.threads),
                point.verdict,
            )
            for point in points
        ]
        columns = ("variant", "implementation", "tunables", "smem B", "TMEM cols", "threads", "declared footprint")
        out.table(Table(columns, rows, right=frozenset({"smem B", "TMEM cols", "threads"})))
        out.line()
    if as_json:
        out.json(results)
    return 0


def _print_specs(out: Printer, as_json: bool) -> None:
    specs = list_specs()
    if as_json:
        out.json([_spec_json(spec) for spec in specs])
        return
    if not specs:
        out.line("no specs are shipped; give a path to a file of your own")
        return
    rows = [
        (
            spec.name,
            str(spec.version),
            ", ".join(i.name for i in spec.implementations),
            ", ".join(_arches(spec)),
            " ".join(axis.name for axis in spec.axes),
            spec.description.strip().partition("\n")[0],
        )
        for spec in specs
    ]
    out.table(Table(("spec", "version", "implementations", "architectures", "problem", "what"), rows))


def _arches(spec: KernelSpec) -> list[str]:
    return [a.name for a in ARCHES.values() if any(i.unsupported(a) is None for i in spec.implementations)]


def _spec_json(spec: KernelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "version": spec.version,
        "description": spec.description.strip(),
        "architectures": _arches(spec),
        "axes": [
            {
                "name": a.name,
                "kind": a.kind,
                "static": a.static,
                "values": a.values,
                "default": None if callable(a.default) else a.default,
                "derived": callable(a.default),
            }
            for a in spec.axes
        ],
        "implementations": [
            {
                "name": i.name,
                "backend": i.backend,
                "package": i.package or None,
                "tunables": {t.name: t.values for t in i.tunables},
            }
            for i in spec.implementations
        ],
        "examples": list(spec.examples),
    }
