"""Every code block of the README and the docs runs, or, where it can't here, is checked.

``python``   runs, in the order of the page, in one namespace.
``console``  each ``$ command`` runs; the lines after it are its output, ``...`` standing for anything.
``sh``       is checked: each ``tunekit`` and ``make`` line must parse.

A comment on the line before a block says more:
``<!-- file: NAME -->``   the block is written to NAME, for the later ones to use;
``<!-- recorded -->``     a transcript kept as it was: its commands must parse;
``<!-- needs a GPU -->``  the Python is compiled, not run.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import tunekit
from tunekit.cli import main
from tunekit.cli import tunekit as group

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
PACKAGE = str(Path(tunekit.__file__).resolve().parents[1])


@dataclass(frozen=True)
class Block:
    language: str
    note: str
    body: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(m["language"], m["note"] or "", m["body"], text.count("\n", 0, m.start()) + 1)
        for m in FENCE.finditer(text)
    ]


def commands(body: str) -> list[tuple[str, str]]:
    """The ``$`` lines of a console block, each with the output that follows it."""
    found: list[tuple[str, str]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + line + "\n")
    return found


def parse(command: str) -> None:
    """Fail unless a ``tunekit`` or ``make`` command line is one that exists."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if not words:
        return
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in words[1:]), command
    elif words[0].endswith("tunekit"):
        arguments = [word for word in words[1:] if word not in ("[...]",)]
        context = click.Context(group, info_name="tunekit")
        command_object: click.Command = group
        while isinstance(command_object, click.Group) and arguments and not arguments[0].startswith("-"):
            name = arguments.pop(0)
            found = command_object.get_command(context, name)
            assert found is not None, f"{command}: no command {name}"
            command_object = found
        if not isinstance(command_object, click.Group):
            command_object.make_context(command_object.name, arguments)


SIMPLE = re.compile(r"tunekit ([^;|&<>$*`]+?)(?:; test \$\? = (\d))?")


def run(command: str, directory: Path) -> tuple[int, str]:
    """The exit status and output of a command; one of tunekit alone runs in this process."""
    simple = SIMPLE.fullmatch(command)
    if simple:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main(shlex.split(simple[1]))
        return status if simple[2] is None else int(status != int(simple[2])), said.getvalue()
    env = {**os.environ, "PYTHONPATH": PACKAGE, "TUNEKIT_CACHE": str(directory / "cache"), "CI": "true"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    command = re.sub(r"^(\s*)tunekit\b", rf"\1{shlex.quote(sys.executable)} -m tunekit", command)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout


def matches(wanted: str, output: str) -> bool:
    lines = "\n".join(line.rstrip() for line in wanted.strip().splitlines())
    pattern = ".*?".join(re.escape(part) for part in lines.split("..."))
    return (
        re.fullmatch(pattern, "\n".join(line.rstrip() for line in output.strip().splitlines()), re.DOTALL) is not None
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(sys, "path", [*sys.path])
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page):
        place = f"{page.name}:{block.line}"
        if block.note.startswith("file: "):
            (tmp_path / block.note.removeprefix("file: ")).write_text(block.body)
        elif block.language == "python":
            code = compile(block.body, place, "exec")
            if block.note != "needs a GPU":
                exec(code, namespace)
        elif block.language == "console":
            for command, wanted in commands(block.body):
                parse(command.partition(";")[0].partition("|")[0])
                if block.note == "recorded":
                    continue
                status, output = run(command, tmp_path)
                assert status == 0, f"{place}: {command}\n{output}"
                assert not wanted or matches(wanted, output), f"{place}: {command}\n{output}"
        elif block.language == "sh":
            for line in block.body.splitlines():
                parse(line)


def test_the_harness_sees_what_is_wrong(tmp_path):
    assert matches("a ... c\n", "a b\nb c\n")
    assert not matches("a ... c\n", "a b\n")
    with pytest.raises(AssertionError):
        parse("tunekit swep fmha")
    with pytest.raises(click.UsageError):
        parse("tunekit sweep fmha --no-such-flag")
    with pytest.raises(AssertionError):
        parse("make nonsense")


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
