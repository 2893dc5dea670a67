"""The options that commands share, and what they mean."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from tunekit.settings import Settings, load_settings

F = TypeVar("F", bound=Callable[..., Any])


SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
# Three weeks: whoever allows more means no limit, and epoll can't wait for more than 2**31 ms at a time.
LONGEST_S = 21 * 24 * 3600.0
# What numpy, torch and Optuna all take.
SEED = click.IntRange(0, 2**32 - 1)
MEBIBYTES = {"": 1, "m": 1, "mb": 1, "mib": 1, "g": 2**10, "gb": 2**10, "gib": 2**10}


def duration(text: str) -> float:
    """A positive time in seconds, from seconds or a unit: ``90``, ``1.5s``, ``5m``, ``2h``. At most `LONGEST_S`."""
    seconds = _amount(text, SECONDS)
    if seconds is None:
        raise click.BadParameter(f"'{text}' is no positive time such as 30, 90s or 5m")
    return min(seconds, LONGEST_S)


def memory(text: str) -> int:
    """Bytes, from ``4GiB`` or ``512MiB``; a plain number counts MiB."""
    mebibytes = _amount(text, MEBIBYTES)
    if mebibytes is None:
        raise click.BadParameter(f"'{text}' is no amount of memory such as 4GiB or 512MiB")
    return int(mebibytes * 2**20)


def budget(text: str) -> str:
    """What a search may spend: ``40`` variants, or a time with its unit: ``10m`` comes back as ``600s``."""
    if not text.strip().isdecimal():
        return f"{duration(text):g}s"
    if int(text) < 1:
        raise click.BadParameter("the budget must be at least 1")
    return str(int(text))


def _amount(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", str(text).strip().lower())
    try:
        amount = float(match[1]) * units[match[2]] if match else 0.0
    except (ValueError, KeyError):
        return None
    return amount if 0 < amount < math.inf else None


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
    help='Problems as JSON Lines or a JSON list, "count" tells how often each occurs; or a shipped one, as "dsv4-pro".',
)
implementation_option = click.option("--implementation", metavar="NAME", help="Only this implementation.")
db_option = click.option(
    "--db", type=click.Path(path_type=Path), metavar="FILE", help="The database. [default: $TUNEKIT_DB, else the cache]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON value.")
jobs_option = click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compile workers. [default: as cores and memory allow]",
)
tunables_option = click.option(
    "--tunables", "tunable_texts", multiple=True, metavar="K=V ...", help="The variant with these values."
)
variant_option = click.option(
    "--variant", "variant_ids", multiple=True, metavar="ID", help="Only this variant (its id's beginning); repeatable."
)


def limit_options(function: F) -> F:
    """``--compile-timeout --trace-timeout --memory-limit``: what one compile may take."""
    for option in (
        click.option(
            "--memory-limit",
            type=memory,
            metavar="MIB",
            help="Memory of one compile: 4GiB, or a number of MiB. [default: 4096]",
        ),
        click.option(
            "--trace-timeout",
            type=duration,
            metavar="S",
            help="Limit of one trace. [default: 60, or --compile-timeout where that is shorter]",
        ),
        click.option(
            "--compile-timeout",
            type=duration,
            metavar="S",
            help="Limit of one compile's back end, in seconds or as 5m. [default: the spec's, else 300]",
        ),
    ):
        function = option(function)
    return function


def settings(database: Path | None = None, **limits: Any) -> Settings:
    """The settings from the environment, with the flags that were given in their place."""
    given = {name: value for name, value in limits.items() if value is not None}
    return dataclasses.replace(load_settings(database=database), **given)
