"""Writing results: aligned plain text, or rich's tables on a terminal that can show them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from tunekit.errors import UserError
from tunekit.model import to_json

PLAIN_WIDTH = 110


def is_plain(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Whether `stream` gets plain lines: no terminal, a CI job, or a terminal without escapes."""
    env = os.environ if environ is None else environ
    in_ci = env.get("CI", "").lower() not in ("", "0", "false")
    return in_ci or env.get("TERM", "") == "dumb" or not stream.isatty()


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; `right` names the columns of numbers; `title` may be empty."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = field(default=frozenset())
    title: str = ""

    def lines(self) -> list[str]:
        """The table as aligned text, without trailing spaces; columns empty in every row are left out."""
        keep = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        names = [self.columns[i] for i in keep]
        cells = [names, *([row[i] for i in keep] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(keep))]
        body = [
            "  ".join(
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for cell, width, name in zip(row, widths, names, strict=True)
            ).rstrip()
            for row in cells
        ]
        return ([self.title] if self.title else []) + body


class Printer:
    """Writes results to one stream, the way that stream can show them."""

    def __init__(self, stream: TextIO, plain: bool | None = None) -> None:
        self.stream = stream
        self.plain = is_plain(stream) if plain is None else plain

    def line(self, text: str = "") -> None:
        """One line of text, never wrapped: what it holds can be copied.

        Raises:
            UserError: the stream takes no more, for example on a full disk.
        """
        try:
            self.stream.write(text + "\n")
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"can't write the result: {error.strerror}") from None

    def heading(self, text: str) -> None:
        if self.plain:
            self.line(text)
        else:
            self._console().print(text, style="bold", markup=False, highlight=False, soft_wrap=True)

    def json(self, value: Any) -> None:
        """`value` (dataclasses too) as one indented JSON document."""
        self.line(json.dumps(to_json(value), indent=2, allow_nan=False))

    def table(self, table: Table) -> None:
        if not table.rows:
            return
        if self.plain:
            for line in table.lines():
                self.line(line)
            return
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        keep = [i for i in range(len(table.columns)) if any(row[i] for row in table.rows)]
        drawn = RichTable(box=box.SIMPLE_HEAD, title=table.title or None, title_justify="left", pad_edge=False)
        for i in keep:
            name = table.columns[i]
            drawn.add_column(name, justify="right" if name in table.right else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(row[i]) for i in keep))
        self._console().print(drawn)

    def _console(self) -> Any:
        from rich.console import Console

        return Console(file=self.stream)
