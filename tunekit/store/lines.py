"""Records as lines of JSON: what is exported, reviewed, merged and shipped.

One object a line, ``kind`` first, keys in the order of the rows, None left out,
the environment written out in full. A line without ``uid`` (written by hand)
is known by its content. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

from tunekit.model import Environment, Winner
from tunekit.store import rows, rows_of_trials
from tunekit.store.winner_lines import FORMAT, about, opened, place, read_winner, recorded, row
from tunekit.trials import KnownBad, Trial

DIGITS = 7  # of shipped times: 1e-7 is a hundredth of any clock's noise, and still short to read


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as it travels: without the row id, which differs from database to database."""

    spec: str
    version: int
    arch: str
    arguments: Mapping[str, Any]
    state: str
    started_at: str
    finished_at: str | None = None
    host: str | None = None
    pid: int | None = None


Record = Union[SweepRecord, Trial, Winner, KnownBad]


class Line(NamedTuple):
    """One parsed line. `sweep` is the uid of a trial's sweep."""

    value: Record
    uid: str
    recorded_at: str
    sweep: str | None = None


def winner_line(winner: Winner, *, uid: str | None = None, recorded_at: str = "", digits: int | None = None) -> str:
    """A winner as a line. `digits`: significant digits of its times, all of them if None."""
    row = _expanded(rows.winner_row(winner))
    return _line("winner", uid, recorded_at, {**row, "environment": _environment(winner.environment)}, digits)


def trial_line(
    trial: Trial, *, uid: str | None = None, recorded_at: str = "", sweep: str | None = None, digits: int | None = None
) -> str:
    row = _expanded(rows_of_trials.trial_row(trial))
    facts = rows_of_trials.facts_row(trial.outcome)
    if facts is not None:
        facts = _expanded(facts)
        row["facts"] = facts.pop("facts")
        row["footprint"] = _present(facts)
    row["samples_us"] = list(rows_of_trials.samples_of(trial.outcome.samples_us))
    row |= {"environment": _environment(trial.environment), "sweep": sweep}
    return _line("trial", uid, recorded_at, row, digits)


def known_bad_line(bad: KnownBad, *, recorded_at: str = "", digits: int | None = None) -> str:
    return _line("known_bad", None, recorded_at, _expanded(rows_of_trials.known_bad_row(bad)), digits)


def sweep_line(sweep: SweepRecord, *, uid: str) -> str:
    row = {name: getattr(sweep, name) for name in SweepRecord.__dataclass_fields__}
    return _line("sweep", uid, "", row, None)


def _line(kind: str, uid: str | None, recorded_at: str, row: Mapping[str, Any], digits: int | None) -> str:
    body = _present({"kind": kind, "format": FORMAT, "uid": uid, "recorded_at": recorded_at or None, **row})
    if digits is not None:
        body = {name: _rounded(name, value, digits) for name, value in body.items()}
    return rows.text(json.dumps(body, ensure_ascii=False, allow_nan=False), "line")


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _expanded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its JSON columns as objects."""
    return {
        name: rows.parse(value, name) if name in rows.JSON_COLUMNS and isinstance(value, str) else value
        for name, value in row.items()
    }


def _environment(environment: Environment) -> dict[str, Any]:
    return _present(rows.environment_row(environment))


def _rounded(name: str, value: Any, digits: int) -> Any:
    """Measured numbers to `digits` significant digits; what identifies a record is left alone."""
    if name not in ("median_us", "spread_us", "margin", "confidence", "samples_us", "seconds"):
        return value
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, list):
        return [_rounded(name, item, digits) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(name, item, digits) for key, item in value.items()}
    return value


def parse_line(source: bytes) -> Line:
    """What a line records.

    Raises:
        rows.RowError: malformed, of an unknown kind or a newer format, or with a field that can't be judged.
    """
    kind, plain = opened(source)
    uid, recorded_at, sweep = about(plain)
    value = recorded(plain, READERS[kind])
    return Line(value, uid or hashlib.sha256(source.strip()).hexdigest()[:32], recorded_at, sweep)


def _read_trial(body: Mapping[str, Any]) -> Trial:
    rest = {name: value for name, value in body.items() if name not in ("facts", "footprint", "samples_us")}
    facts = None
    if "facts" in body or "footprint" in body:
        footprint = body.get("footprint", {})
        if not isinstance(footprint, dict):
            raise rows.RowError("footprint is not an object")
        facts = {
            **dict.fromkeys(rows.FOOTPRINT_COLUMNS),
            **footprint,
            "facts": rows.Parsed(body.get("facts", {})),
        }
    samples = body.get("samples_us", [])
    if not isinstance(samples, list):
        raise rows.RowError("samples_us is not a list")
    return rows_of_trials.trial_of(row(rest, rows_of_trials.TRIAL_COLUMNS), place(body), facts, samples, None)


def _read_known_bad(body: Mapping[str, Any]) -> KnownBad:
    plain = row({**body, "seconds": 0}, rows_of_trials.KNOWN_BAD_COLUMNS)
    return rows_of_trials.known_bad_of({**plain, "seconds": body["seconds"]})


def _read_sweep(body: Mapping[str, Any]) -> SweepRecord:
    known = SweepRecord.__dataclass_fields__
    rows.check_known(body, tuple(known))
    arguments = body["arguments"]
    if not isinstance(arguments, dict):
        raise rows.RowError("arguments is not an object")
    texts = {name: rows.text(body[name], name) for name in ("spec", "arch", "state", "started_at")}
    if texts["state"] not in ("running", "done", "interrupted", "failed"):
        raise rows.RowError(f"state is {texts['state']!r}, which this tunekit doesn't know")
    return SweepRecord(
        **texts,
        version=rows.count(body["version"], "version"),
        arguments=arguments,
        finished_at=rows.optional_text(body.get("finished_at"), "finished_at"),
        host=rows.optional_text(body.get("host"), "host"),
        pid=rows.optional_count(body.get("pid"), "pid"),
    )


READERS: dict[str, Callable[[Mapping[str, Any]], Record]] = {
    "winner": read_winner,
    "trial": _read_trial,
    "known_bad": _read_known_bad,
    "sweep": _read_sweep,
}
