"""``tunekit capture``: run a program, and write what it asked kernels for as a workload file."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from tunekit.cli import INTERRUPTION, Interruption, options
from tunekit.dispatch.recorder import DIRECTORY, check_output, merge
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.report import Printer
from tunekit.spec import list_specs
from tunekit.spec.workloads import workload_text
from tunekit.store import files


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    required=True,
    help="The workload file to write.",
)
@options.json_option
@INTERRUPTION
def capture(interruption: Interruption, command: tuple[str, ...], output: Path, as_json: bool) -> int:
    """Run a command, and record the problems that it asks for.

    In every process of it that loads kernels by tunekit.load: each call's problem, counted,
    also where nothing could serve it. `tunekit sweep SPEC --workload FILE` tunes them, the
    most frequent first. Functions from bind() and replays of CUDA graphs aren't seen.

    The exit status is the command's.
    """
    check_output(output.absolute())
    with tempfile.TemporaryDirectory(prefix="tunekit-capture-") as parts:
        status = _run(command, {**os.environ, DIRECTORY: parts}, interruption)
        problems, processes = merge(Path(parts))
    if problems:
        calls = problems.total()
        remark = f"{len(problems)} problems, {calls} calls of {processes} processes, by tunekit capture"
        files.publish(workload_text(problems, remark).encode(), output.absolute(), output.absolute().parent)
    _tell(problems, processes, output, as_json)
    return status


def _run(command: tuple[str, ...], environ: dict[str, str], interruption: Interruption) -> int:
    try:
        process = subprocess.Popen(command, env=environ)
    except OSError as error:
        raise UserError(f"can't start {command[0]}: {error.strerror}") from None
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            if interruption.number != signal.SIGINT:  # that one the terminal sends to both
                process.send_signal(interruption.number)
        else:
            return code if code >= 0 else 128 - code


def _tell(problems: Counter[tuple[str, Values]], processes: int, output: Path, as_json: bool) -> None:
    by_spec = Counter(spec for spec, _ in problems)
    if as_json:
        calls = {spec: sum(n for (name, _), n in problems.items() if name == spec) for spec in by_spec}
        specs = {spec: {"problems": by_spec[spec], "calls": calls[spec]} for spec in sorted(by_spec)}
        Printer(sys.stdout).json({"output": str(output) if problems else None, "processes": processes, "specs": specs})
        return
    if not problems:
        click.echo("tunekit: nothing was captured: no process called a kernel of tunekit.load", err=True)
        return
    what = ", ".join(f"{count} problems of {spec}" for spec, count in sorted(by_spec.items()))
    click.echo(f"tunekit: {output}: {what}; {problems.total()} calls in {processes} processes", err=True)
    shipped = {spec.name for spec in list_specs()}
    for spec in sorted(by_spec):
        named, note = (spec, "") if spec in shipped else (f"FILE.py:{spec}", "  (FILE.py: the spec's file)")
        click.echo(f"  tunekit sweep {named} --workload {shlex.quote(str(output))}{note}", err=True)
