"""The baseline file: normalised compile times as reviewable JSON, written atomically."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit.check.verdict import Entry
from tunekit.errors import UserError
from tunekit.model import Values, to_json

FORMAT = 1


@dataclass(frozen=True)
class Baseline:
    """Kernels by name. `toolchain` is what they were last compiled with."""

    kernels: Mapping[str, Entry] = field(default_factory=dict)
    toolchain: Mapping[str, str | None] = field(default_factory=dict)

    def updated(
        self, entries: Mapping[str, Entry], gone: Iterable[str], toolchain: Mapping[str, str | None]
    ) -> Baseline:
        """This baseline with `entries` in place and the kernels named in `gone` left out."""
        dropped = set(gone)
        kept = {name: entry for name, entry in self.kernels.items() if name not in dropped}
        return Baseline({**kept, **entries}, toolchain)


def read_baseline(path: Path) -> Baseline:
    """The baseline in a file.

    Raises:
        UserError: no such file, or one that is no baseline; the message says what is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise UserError(f"no baseline {path} ({error.strerror}): make one with --update-baseline") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no baseline: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise UserError(f"{path} is no baseline of format {FORMAT} (found {found}): write it with --update-baseline")
    try:
        kernels = {str(name): _entry(fields) for name, fields in document["kernels"].items()}
        return Baseline(kernels, dict(document.get("toolchain", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is a damaged baseline ({type(error).__name__}: {error})") from error


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write the file whole or not at all.

    Raises:
        UserError: it can't be written.
    """
    document = {
        "format": FORMAT,
        "toolchain": dict(baseline.toolchain),
        "kernels": {name: _rounded(baseline.kernels[name]) for name in sorted(baseline.kernels)},
    }
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise UserError(f"can't write the baseline {path}: {error.strerror}") from error


def _entry(fields: Mapping[str, Any]) -> Entry:
    numbers = {name: fields[name] for name in ("relative", "seconds")}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not (0 < number < math.inf):
            raise ValueError(f"{name} is {number!r}, not a positive number")
    return Entry(
        spec=str(fields["spec"]),
        implementation=str(fields["implementation"]),
        arch=str(fields["arch"]),
        static=Values(fields["static"]),
        tunables=Values(fields["tunables"]),
        **numbers,
    )


def _rounded(entry: Entry) -> dict[str, Any]:
    fields: dict[str, Any] = to_json(entry)
    return {**fields, "relative": float(f"{entry.relative:.4g}"), "seconds": float(f"{entry.seconds:.4g}")}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
