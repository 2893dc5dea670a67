"""A line of JSON, opened; and the winners among lines, read at a process's first call: what a server's start waits for.

How lines are written, and what other lines record: `lines`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from tunekit.model import Environment, Winner
from tunekit.store import rows

T = TypeVar("T")

FORMAT = 1
KINDS = ("winner", "trial", "known_bad", "sweep")
HEAD = ("kind", "format", "uid", "recorded_at")

# How the writer begins and ends a line that holds no winner. The finals' trials are nine tenths of a shipped file's
# bytes: undecoded, they cost 20 ms less (2026-12-01, 507 lines).
_OTHERS = tuple(f'{{"kind": "{kind}", "format": {FORMAT}, '.encode() for kind in KINDS if kind != "winner")
_END = b"}"


def split(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that aren't blank, with their numbers from 1; only a newline ends a line."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def opened(source: bytes) -> tuple[str, dict[str, Any]]:
    """A line's kind, and the line as an object.

    Raises:
        rows.RowError: malformed, of an unknown kind or a newer format.
    """
    plain = rows.parse_object(source, "line")
    if plain.get("format", FORMAT) != FORMAT:
        raise rows.RowError(f"format {plain['format']!r}, this tunekit reads {FORMAT}")
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise rows.RowError(f"unknown kind {kind!r} (known: {', '.join(KINDS)})")
    return kind, plain


def parse_winner(source: bytes) -> Winner | None:
    """The winner that a line records; None for a line of another kind, which is read no further than to know that: such
    a line of the writer's, not cut off, is told by its first and last bytes.

    Raises:
        rows.RowError: malformed, of an unknown kind or a newer format, or with a field that can't be judged.
    """
    if source.startswith(_OTHERS) and source.rstrip().endswith(_END):
        return None
    kind, plain = opened(source)
    if kind != "winner":
        return None
    about(plain)
    return recorded(plain, read_winner)


def about(plain: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """A line's uid, empty if it has none, when it was recorded, and its sweep's uid.

    Raises:
        rows.RowError: one of them is no text.
    """
    uid, recorded_at = plain.get("uid") or "", plain.get("recorded_at", "")
    return rows.text(uid, "uid"), rows.text(recorded_at, "recorded_at"), rows.optional_text(plain.get("sweep"), "sweep")


def recorded(plain: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
    """What `read` makes of a line's body, which is all but what every line begins with.

    Raises:
        rows.RowError: it lacks a field, or one can't be judged.
    """
    try:
        return read({name: value for name, value in plain.items() if name not in HEAD})
    except KeyError as error:
        raise rows.RowError(f"lacks {error}") from None


def read_winner(body: Mapping[str, Any]) -> Winner:
    """The winner of a line's body."""
    return rows.winner_of(row(body, rows.WINNER_COLUMNS), place(body))


def row(body: Mapping[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    """A line's body as a row: what was left out back to None."""
    found: dict[str, Any] = dict.fromkeys(columns)
    for name, value in body.items():
        if name != "environment":
            found[name] = rows.Parsed(value) if name in rows.JSON_COLUMNS else value
    return found


def place(body: Mapping[str, Any]) -> Environment:
    """The environment of a line's body."""
    plain = body["environment"]
    if not isinstance(plain, dict):
        raise rows.RowError("environment is not an object")
    return rows.environment_of(plain)
