"""The results that ship with tunekit: reviewable text, a read-only layer under the user's database.

``tuning_db/<spec>.<arch>.jsonl``, one JSON object a line (see `lines`), and
``tuning_db/<spec>.<arch>.cost.json``, the cost model's numbers.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from tunekit.model import Winner
from tunekit.store.readonly import Skipped, at_work

log = logging.getLogger("tunekit")


def shipped_directory() -> Path:
    """Where the shipped results lie: inside the installed package, or in the checkout beside it."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "tuning_db"
    return inside if inside.is_dir() else package.parent / "tuning_db"


def shipped_file(spec: str, arch: str, directory: Path | None = None) -> Path:
    """The file of a spec and an architecture, whether it is there or not."""
    name = f"{spec}.{arch}.jsonl"
    if not spec.isidentifier() or not arch.isidentifier():
        name = "none"  # nothing is shipped under a name that isn't one; '..' never reaches the file system
    return (directory or shipped_directory()) / name


def shipped_winners(spec: str, arch: str, *, version: int | None = None, directory: Path | None = None) -> list[Winner]:
    """The shipped winners, in the file's order, each with source ``shipped``; of one spec `version` or of all.

    Never raises for what it finds: lines that can't be read are left out, with one warning line.
    """
    path = shipped_file(spec, arch, directory)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, UnicodeEncodeError):  # a name that this locale has no bytes for is no file
        return []
    except OSError as error:
        log.warning("%s can't be read (%s); no shipped winner is used", path, error.strerror)
        return []
    with at_work:
        from tunekit.store.winner_lines import parse_winner, split  # here: the ladder seldom comes down to what ships

    skipped = Skipped()
    found: list[Winner] = []
    for number, line in split(content):
        value = skipped.attempt(f"line {number}", parse_winner, line)
        if value is None or (value.variant.spec, value.variant.arch) != (spec, arch):
            continue
        if version in (None, value.variant.version):
            found.append(dataclasses.replace(value, source="shipped"))
    skipped.warn(path)
    return found


def shipped_cost_model(spec: str, arch: str, directory: Path | None = None) -> Any:
    """The plain numbers of a spec's cost model (see tunekit.search.cost_model); None where none ships.

    Never raises for what it finds: a file that can't be read is none, with one warning line.
    """
    path = shipped_file(spec, arch, directory).with_suffix(".cost.json")
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, UnicodeEncodeError):
        return None
    except (OSError, ValueError) as error:
        log.warning("%s can't be read (%s); no cost model is used", path, error)
        return None
