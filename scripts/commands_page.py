"""Write docs/commands.md from the commands' own help: ``python scripts/commands_page.py``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from tunekit.cli import tunekit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"
HEAD = """\
# Commands

Made from the commands' own `--help` by `python scripts/commands_page.py`; a test compares the two.

Results go to stdout, everything else to stderr. Exit status: 0 done, 1 the result is a failure, 2 the
caller's mistake (one line says which), 3 what `simulate` does not model, 130 after Ctrl-C, 143 after SIGTERM. Where
the output is no terminal, or with `CI=true` or `TERM=dumb`, it is plain lines.

`--json` prints one JSON value: of `list`, `explain`, `probe`, `simulate` and `best` a list with an object for each
problem (`explain --variant`, `simulate`: for each variant; `explain --winner`: for each winner), of `db verify` a list
of findings, of the others an object. Its fields are those of the dataclasses in `tunekit/model.py` and
`tunekit/trials.py`, `tunekit/progress.py` and `tunekit/simulate/report.py`. After a caller's mistake stdout stays
empty.

Repeated `--problem` words make one problem; `--workload` takes several, an object of axis values each:
`{"head_dim": 128, "heads": 32, "kv_heads": 8, "t": 1, "s_k": 4096, "count": 100}`. One that names another `"spec"` is
passed over.

A flag wins over its environment variable: `TUNEKIT_CACHE` (the directory of database and artifacts), `TUNEKIT_DB`,
`TUNEKIT_JOBS`, `TUNEKIT_COMPILE_TIMEOUT`, `TUNEKIT_TRACE_TIMEOUT`, `TUNEKIT_RUN_TIMEOUT` (seconds),
`TUNEKIT_MEMORY_LIMIT` (MiB).
"""


def walk(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Each command that does something, with the words that call it."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None:
                yield from walk(found, f"{path} {name}")
    else:
        yield path, command


def describe(path: str, command: click.Command) -> str:
    arguments = [p.metavar or p.human_readable_name for p in command.params if isinstance(p, click.Argument)]
    lines = [f"## {' '.join([path, *arguments])}", "", inspect.cleandoc(command.help or ""), ""]
    for option in command.params:
        if isinstance(option, click.Option):
            names = ", ".join([*option.opts, *option.secondary_opts])
            metavar = "" if option.is_flag else f" {option.metavar or choices(option)}"
            default = f" [default: {shown(option.default)}]" if option.show_default else ""
            lines.append(f"- `{names}{metavar}`: {option.help}{default}")
    return "\n".join(lines) + "\n"


def choices(option: click.Option) -> str:
    return "|".join(str(c) for c in option.type.choices) if isinstance(option.type, click.Choice) else "N"


def shown(default: object) -> str:
    return {True: "on", False: "off"}.get(default, str(default)) if isinstance(default, bool) else str(default)


def page() -> str:
    return "\n".join([HEAD, *(describe(path, command) for path, command in walk(tunekit, "tunekit"))])


if __name__ == "__main__":
    PAGE.write_text(page())
