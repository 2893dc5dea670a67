"""Rows and model values, both ways, with every field checked on the way in and out.

A row is a flat mapping of column names to what SQLite holds. A value that is
not what its column promises (a NaN for a time, a status of a newer version, a
field that this version doesn't know) raises :class:`RowError`: writers tell the
caller, readers count the row as a miss. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tunekit.model import Environment, Footprint, Values, Variant, Winner, to_json

Row = Mapping[str, Any]

VARIANT_COLUMNS = ("spec", "version", "implementation", "arch", "variant", "tunables")
ENVIRONMENT_COLUMNS = tuple(f.name for f in dataclasses.fields(Environment))
FOOTPRINT_COLUMNS = tuple(f.name for f in dataclasses.fields(Footprint))
WINNER_COLUMNS = (
    *VARIANT_COLUMNS,
    *("problem", "bucket", "protocol", "artifact", "symbol", "median_us", "spread_us", "samples"),
    *("runner_up", "margin", "confidence", "method", "tied", "source", "library"),
    *("outcome", "rounds", "cases", "final"),
)
# What the tables hold beside the value's own fields.
BOOKKEEPING = frozenset({"id", "uid", "recorded_at", "environment", "environment_key", "bucket_key", "problem_key"})
BOOKKEEPING |= {"current", "sweep", "trial", "digest", "comparable"}
JSON_COLUMNS = frozenset({"tunables", "problem", "bucket", "tied", "seconds", "facts", "arguments", "windows"})


class RowError(ValueError):
    """A row, or a value to be stored, that isn't what its fields promise."""


LARGEST_COUNT = 2**63 - 1  # SQLite's
LONGEST_US = 9e99  # as the schema's CHECK says


def check_known(row: Row, columns: Sequence[str]) -> None:
    """Refuse a row with a field of a newer version: what it means can't be known here."""
    for name, value in row.items():
        if value is not None and name not in columns and name not in BOOKKEEPING:
            raise RowError(f"unknown field '{name}', from a newer tunekit")


def text(value: object, field: str) -> str:
    """A string that UTF-8 can hold: lone surrogates (undecodable bytes of a child's output) are escaped."""
    if not isinstance(value, str):
        raise RowError(f"{field} is {value!r}, not text")
    if value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def optional_text(value: object, field: str) -> str | None:
    return None if value is None else text(value, field)


def number(value: object, field: str, *, above: float = -math.inf, least: float = -math.inf) -> float:
    """A finite number > `above` and >= `least`; bool is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError(f"{field} is {value!r}, not a number")
    if not math.isfinite(value):
        raise RowError(f"{field} is {value!r}, not a finite number")
    if not (value > above and value >= least):
        bound = f"above {above:g}" if above > -math.inf else f"at least {least:g}"
        raise RowError(f"{field} is {value!r}; it must be {bound}")
    return float(value)


def count(value: object, field: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RowError(f"{field} is {value!r}, not an integer from {least}")
    if value > LARGEST_COUNT:
        raise RowError(f"{field} is over {LARGEST_COUNT}, which a database holds no more")
    return value


def optional_count(value: object, field: str) -> int | None:
    return None if value is None else count(value, field)


def time_us(value: object, field: str) -> float:
    """A measured time in microseconds: finite and above 0, or it is no time."""
    us = number(value, field, above=0.0)
    if us >= LONGEST_US:
        raise RowError(f"{field} is {value!r}; it must be below {LONGEST_US:g}")
    return us


def dump(value: Any, field: str) -> str:
    """Compact JSON in the value's own order.

    Raises:
        RowError: NaN, infinity, or what has no JSON form.
    """
    try:
        plain = json.dumps(to_json(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RowError(f"{field}: {error}") from None
    return text(plain, field)


def _refuse_constant(name: str) -> Any:
    raise RowError(f"{name} is not a number that a record may hold")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # json.loads would make one a call


def parse(source: str, field: str) -> Any:
    """JSON to plain values; NaN and Infinity, which Python's parser takes, are refused."""
    try:
        return _DECODER.decode(source)
    except RowError as error:
        raise RowError(f"{field}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"{field} is not JSON: {error}") from None


def parse_object(content: bytes, field: str) -> dict[str, Any]:
    """The object that bytes of JSON hold."""
    try:
        parsed = parse(content.decode(), field)
    except UnicodeDecodeError as error:
        raise RowError(f"{field} is not UTF-8: {error}") from None
    if not isinstance(parsed, dict):
        raise RowError(f"{field} is not an object")
    return parsed


class Parsed(NamedTuple):
    """A JSON column's value in place of its text: where the column is a part of a line of JSON, parsed with it."""

    value: Any


def plain(source: object, field: str) -> Any:
    """What a JSON column holds."""
    return source.value if isinstance(source, Parsed) else parse(text(source, field), field)


def values(source: object, field: str) -> Values:
    """The ``Values`` of a JSON column: an object of plain values."""
    return plain_values(plain(source, field), field)


def plain_values(parsed: object, field: str) -> Values:
    """The ``Values`` of a parsed object of plain values."""
    if not isinstance(parsed, dict):
        raise RowError(f"{field} is not an object")
    for name, item in parsed.items():
        if not isinstance(item, (bool, int, float, str)):
            raise RowError(f"{field}.{name} is {item!r}, not a plain value")
        if isinstance(item, float) and not math.isfinite(item):
            raise RowError(f"{field}.{name} is {item!r}, not a finite number")
    return Values(parsed)


def seconds(given: Values, field: str = "seconds") -> Values:
    """Seconds per phase, checked: each finite and at least 0."""
    for name, value in given.items():
        number(value, f"{field}.{name}", least=0.0)
    return given


def variant_row(variant: Variant) -> dict[str, Any]:
    return {
        "spec": text(variant.spec, "spec"),
        "version": count(variant.version, "version"),
        "implementation": text(variant.implementation, "implementation"),
        "arch": text(variant.arch, "arch"),
        "variant": text(variant.id, "variant"),
        "tunables": dump(variant.tunables, "tunables"),
    }


def variant_of(row: Row) -> Variant:
    return Variant(
        spec=text(row["spec"], "spec"),
        version=count(row["version"], "version"),
        implementation=text(row["implementation"], "implementation"),
        arch=text(row["arch"], "arch"),
        tunables=values(row["tunables"], "tunables"),
        id=text(row["variant"], "variant"),
    )


def environment_row(environment: Environment) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in ENVIRONMENT_COLUMNS:
        value = getattr(environment, name)
        if name == "power_limit_w":
            row[name] = None if value is None else number(value, name, above=0.0)
        else:
            row[name] = optional_text(value, name)
    return row


def environment_of(row: Row) -> Environment:
    check_known(row, ENVIRONMENT_COLUMNS)
    return Environment(**environment_row(Environment(**{name: row.get(name) for name in ENVIRONMENT_COLUMNS})))


def winner_row(winner: Winner) -> dict[str, Any]:
    """The row of a winner. A time of NaN, inf, 0, -1, None or "fast" is refused."""
    return {
        **variant_row(winner.variant),
        "problem": dump(winner.problem, "problem"),
        "bucket": dump(winner.bucket, "bucket"),
        "tied": dump([text(item, "tied") for item in winner.tied], "tied"),
        "library": text(winner.library, "library") or None,
        "outcome": text(winner.outcome, "outcome") or None,
        "rounds": optional_count(winner.rounds, "rounds"),
        "cases": optional_count(winner.cases, "cases"),
        "final": text(winner.final, "final") or None,
        **_winner_fields(lambda name: getattr(winner, name)),
    }


def _winner_fields(get: Callable[[str], Any]) -> dict[str, Any]:
    """The fields that a row and a winner hold alike, each checked."""
    margin, confidence = get("margin"), get("confidence")
    if confidence is not None and number(confidence, "confidence", least=0.0) > 1:
        raise RowError(f"confidence is {confidence!r}; it must be at most 1")
    return {
        "protocol": text(get("protocol"), "protocol"),
        "artifact": text(get("artifact"), "artifact"),
        "symbol": text(get("symbol"), "symbol"),
        "median_us": time_us(get("median_us"), "median_us"),
        "spread_us": number(get("spread_us"), "spread_us", least=0.0),
        "samples": count(get("samples"), "samples", least=1),
        "runner_up": optional_text(get("runner_up"), "runner_up"),
        "margin": None if margin is None else number(margin, "margin"),
        "confidence": None if confidence is None else float(confidence),
        "method": text(get("method"), "method"),
        "source": text(get("source"), "source"),
    }


def winner_of(row: Row, environment: Environment) -> Winner:
    check_known(row, WINNER_COLUMNS)
    tied = plain(row["tied"], "tied")
    if not isinstance(tied, list):
        raise RowError("tied is not a list")
    return Winner(
        variant=variant_of(row),
        problem=values(row["problem"], "problem"),
        bucket=values(row["bucket"], "bucket"),
        environment=environment,
        tied=tuple(text(item, "tied") for item in tied),
        library=optional_text(row.get("library"), "library") or "",  # schema 5 has none
        outcome=optional_text(row.get("outcome"), "outcome") or "",  # schema 6 has neither this nor the rest
        rounds=optional_count(row.get("rounds"), "rounds"),
        cases=optional_count(row.get("cases"), "cases"),
        final=optional_text(row.get("final"), "final") or "",
        **_winner_fields(row.__getitem__),
    )
