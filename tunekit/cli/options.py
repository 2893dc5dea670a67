"""The options that commands share, and what they mean."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tunekit.settings import Settings, load_settings

F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.ParamType):
    """A positive time: seconds, or with a unit: ``90``, ``1.5s``, ``5m``, ``2h``."""

    name = "seconds"
    UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", str(value).strip().lower())
        try:
            seconds = float(match[1]) * self.UNITS[match[2]] if match else math.nan
        except (ValueError, KeyError):
            seconds = math.nan
        if not (0 < seconds < math.inf):
            self.fail(f"'{value}' is no positive time such as 30, 90s or 5m", param, ctx)
        return seconds


class Memory(click.ParamType):
    """A positive amount of memory in bytes: ``4GiB``, ``512MiB``; a plain number counts MiB."""

    name = "memory"
    UNITS = {"": 2**20, "m": 2**20, "mb": 2**20, "mib": 2**20, "g": 2**30, "gb": 2**30, "gib": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", str(value).strip().lower())
        try:
            amount = int(float(match[1]) * self.UNITS[match[2]]) if match else 0
        except (ValueError, KeyError, OverflowError):
            amount = 0
        if amount <= 0:
            self.fail(f"'{value}' is no amount of memory such as 4GiB or 512MiB", param, ctx)
        return amount


class Budget(click.ParamType):
    """How much a search may spend: ``40`` variants, or a time with its unit, ``90s`` or ``10m``."""

    name = "n|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        text = str(value).strip()
        if text.isdigit():
            if int(text) < 1:
                self.fail("the budget must be at least 1", param, ctx)
            return int(text)
        return f"{Duration().convert(text, param, ctx):g}s"


DURATION = Duration()
MEMORY = Memory()
BUDGET = Budget()


class PairsCommand(click.Command):
    """A command whose ``--problem`` and ``--tunables`` take all the ``k=v`` words that follow them."""

    GREEDY = ("--problem", "-p", "--tunables")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        option: str | None = None
        for word in args:
            if word in self.GREEDY:
                option = word
                spread.append(word)
            elif option is not None and "=" in word and not word.startswith("-"):
                spread += [word] if spread[-1] == option else [option, word]
            else:
                option = None
                spread.append(word)
        return super().parse_args(ctx, spread)


spec_argument = click.argument("spec", metavar="SPEC")
arch_option = click.option(
    "--arch", metavar="ARCH", help="Architecture, e.g. sm_100a. [default: this machine's GPU, else the spec's newest]"
)
problem_option = click.option(
    "--problem",
    "-p",
    "problem_texts",
    multiple=True,
    metavar="K=V ...",
    help="One problem: the axes' values. [default: the spec's examples]",
)
workload_option = click.option(
    "--workload",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help='Problems as JSON Lines or a JSON list; "count" tells how often each occurs.',
)
implementation_option = click.option("--implementation", metavar="NAME", help="Only this implementation.")
db_option = click.option(
    "--db", type=click.Path(path_type=Path), metavar="FILE", help="The database. [default: $TUNEKIT_DB, else the cache]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON value.")
jobs_option = click.option(
    "--jobs", "-j", type=click.IntRange(min=1), metavar="N", help="Compile workers. [default: as cores and memory allow]"
)
variant_option = click.option(
    "--variant", "variant_ids", multiple=True, metavar="ID", help="Only this variant (its id's beginning); repeatable."
)


def limit_options(function: F) -> F:
    """``--compile-timeout --trace-timeout --memory-limit``: what one compile may take."""
    for option in (
        click.option("--memory-limit", type=MEMORY, metavar="MIB", help="Memory of one compile: 4GiB, or MiB."),
        click.option("--trace-timeout", type=DURATION, metavar="S", help="Limit of one trace, in seconds or as 5m."),
        click.option("--compile-timeout", type=DURATION, metavar="S", help="Limit of one compile's back end."),
    ):
        function = option(function)
    return function


def settings(database: Path | None = None, **limits: Any) -> Settings:
    """The settings from the environment, with the flags that were given in their place."""
    given = {name: value for name, value in limits.items() if value is not None}
    return dataclasses.replace(load_settings(database=database), **given)
