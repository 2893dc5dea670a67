"""Writing results: aligned plain text, or rich's tables on a terminal that can show them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from tunekit.errors import UserError
from tunekit.model import to_json


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

    def without_empty(self) -> Table:
        """The table without the columns that are empty in every row."""
        keep = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        rows = [[row[i] for i in keep] for row in self.rows]
        return replace(self, columns=tuple(self.columns[i] for i in keep), rows=rows)

    def lines(self) -> list[str]:
        """The table as aligned text, without trailing spaces; columns empty in every row are left out."""
        shown = self.without_empty()
        cells = [shown.columns, *shown.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(shown.columns))]
        body = [
            "  ".join(
                cell.rjust(width) if name in self.right else cell.ljust(width)
                for cell, width, name in zip(row, widths, shown.columns, strict=True)
            ).rstrip()
            for row in cells
        ]
        return ([self.title] if self.title else []) + body

    def is_prose(self, column: int) -> bool:
        """Whether a column's cells may be broken, at their spaces; ids and numbers never are."""
        return self.columns[column] not in self.right and any(" " in row[column] for row in self.rows)

    def narrowest(self) -> int:
        """The least width in characters that keeps every word whole, a space between two columns."""
        return sum(self._least(i) for i in range(len(self.columns))) + len(self.columns) + 1

    def packed(self, column: int) -> str:
        """A column's name, broken after spaces and underscores so that it is hardly wider than the cells."""
        room, lines = self._least(column), [""]
        for piece in _pieces(self.columns[column]):
            if lines[-1] and len(lines[-1] + piece.rstrip()) > room:
                lines.append("")
            lines[-1] += piece
        return "\n".join(line.rstrip() for line in lines)

    def _least(self, column: int) -> int:
        prose = self.is_prose(column)
        words = [word for row in self.rows for word in (row[column].split() if prose else [row[column]])]
        return max(len(word.rstrip()) for word in (*words, *_pieces(self.columns[column])))


def _pieces(name: str) -> list[str]:
    return re.findall(r"[^_ ]+[_ ]*|[_ ]+", name)


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

        shown = table.without_empty()
        console = self._console()
        narrow = len(max(shown.lines(), key=len)) + len(shown.columns) > console.width
        if narrow and shown.narrowest() > console.width:
            for line in shown.lines():  # too narrow for whole values: the terminal wraps, and nothing is cut
                self.line(line)
            return
        drawn = RichTable(
            box=box.SIMPLE_HEAD,
            title=shown.title or None,
            title_justify="left",
            pad_edge=False,
            padding=(0, 0) if narrow else (0, 1),
        )
        for i, name in enumerate(shown.columns):
            drawn.add_column(
                shown.packed(i) if narrow else name,
                justify="right" if name in shown.right else "left",
                no_wrap=not shown.is_prose(i),
            )
        for row in shown.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console.print(drawn)

    def _console(self) -> Any:
        from rich.console import Console

        return Console(file=self.stream)
