"""Each command's `--help` works, and docs/commands.md is what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
import pytest

from tunekit.cli import main
from tunekit.cli import tunekit as group

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("commands_page", ROOT / "scripts" / "commands_page.py")
commands_page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(commands_page)
COMMANDS = dict(commands_page.walk(group, "tunekit"))


@pytest.mark.parametrize("path", COMMANDS)
def test_help_works_and_every_option_explains_itself(path, capsys):
    assert main([*path.split()[1:], "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {path}")
    assert COMMANDS[path].help
    for option in COMMANDS[path].params:
        if isinstance(option, click.Option):
            assert option.help, f"{path}: {option.opts} has no help"
            assert option.opts[0] in out


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_prints_json_if_asked(path):
    assert any("--json" in option.opts for option in COMMANDS[path].params)


def test_the_page_is_the_commands_own_help():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == commands_page.page(), "run python scripts/commands_page.py"
