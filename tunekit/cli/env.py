"""``tunekit env``: what a result made here would say about where it was made."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click

from tunekit import settings as defaults
from tunekit.cli import options
from tunekit.environment import environment
from tunekit.report import Printer


@click.command()
@click.option(
    "--device", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="The GPU to describe."
)
@options.db_option
@options.json_option
def env(device: int, db: Path | None, as_json: bool) -> int:
    """Show the GPU, the toolchain, the limits and where results are kept."""
    here = environment(device)
    chosen = options.settings(db)
    out = Printer(sys.stdout)
    workers, why = _workers(chosen.jobs)
    limits = {
        "trace_s": chosen.trace_limit_s or defaults.DEFAULT_TRACE_LIMIT_S,
        "compile_s": chosen.compile_limit_s or defaults.DEFAULT_COMPILE_LIMIT_S,
        "run_s": chosen.run_limit_s or defaults.DEFAULT_RUN_LIMIT_S,
        "memory_mib": (chosen.memory_limit_bytes or defaults.DEFAULT_MEMORY_LIMIT_BYTES) / 2**20,
    }
    if as_json:
        paths = {"database": str(chosen.database), "artifacts": str(chosen.artifacts)}
        out.json({"environment": here, **paths, "workers": workers, "workers_why": why, "limits": limits})
        return 0
    for field in dataclasses.fields(here):
        value = getattr(here, field.name)
        absent = "none" if field.name == "gpu" else "-"
        out.line(f"{field.name:<14} {absent if value is None else value}")
    out.line(f"{'database':<14} {chosen.database}")
    out.line(f"{'artifacts':<14} {chosen.artifacts}")
    out.line(f"{'compiling':<14} {why}")
    out.line(
        f"{'limits':<14} trace {limits['trace_s']:g} s, back end {limits['compile_s']:g} s, "
        f"run {limits['run_s']:g} s, memory {limits['memory_mib']:,.0f} MiB"
    )
    return 0


def _workers(jobs: int | None) -> tuple[int, str]:
    from tunekit.jobs import worker_count

    return worker_count(jobs)
