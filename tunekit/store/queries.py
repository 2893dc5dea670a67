"""The queries, each on a connection that the caller opened, for writing or read-only."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunekit.model import Environment, Winner
from tunekit.store import rows, rows_of_trials
from tunekit.store.readonly import Skipped, environments, fetch
from tunekit.trials import KnownBad, Trial


@dataclass(frozen=True)
class Sweep:
    """One run of ``tunekit sweep``: what it was asked, and how it ended.

    `state` is ``running``, ``done``, ``interrupted`` or ``failed``; times are UTC.
    """

    id: int
    uid: str
    spec: str
    version: int
    arch: str
    arguments: Mapping[str, Any]
    state: str
    started_at: str
    finished_at: str | None
    host: str | None
    pid: int | None

    @property
    def alive(self) -> bool:
        """Whether it is running still; one of another host counts as running until it says otherwise."""
        if self.state != "running":
            return False
        if self.host != socket.gethostname() or self.pid is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            try:
                os.kill(self.pid, 0)
            except PermissionError:
                return True
            return True
        return False


def _matching(wanted: Mapping[str, Any]) -> tuple[str, list[Any]]:
    given = {name: value for name, value in wanted.items() if value is not None}
    clause = " AND ".join(f"{name} = ?" for name in given)
    return clause or "1", list(given.values())


def _rows(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def select_sweeps(connection: sqlite3.Connection, *, spec: str | None, arch: str | None) -> list[Sweep]:
    clause, values = _matching({"spec": spec, "arch": arch})
    found = _rows(connection, f"SELECT * FROM sweeps WHERE {clause} ORDER BY id DESC", values)
    names = Sweep.__dataclass_fields__
    return [
        Sweep(**{**{name: row[name] for name in names}, "arguments": rows.parse(row["arguments"], "arguments")})
        for row in found
    ]


def trial_rows(
    connection: sqlite3.Connection, wanted: Mapping[str, Any], keys: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The rows of the trials that match, oldest first; `keys` restricts them to compile keys.

    `wanted` maps columns to values, None for any; ``comparable`` is the environment's.
    """
    here = dict(wanted)
    place = here.pop("comparable", None)
    clause, values = _matching(here)
    if place is not None:
        clause += " AND environment IN (SELECT id FROM environments WHERE comparable = ?)"
        values.append(place)
    if keys is None:
        return _rows(connection, f"SELECT * FROM trials WHERE {clause} ORDER BY id", values)
    found = fetch(connection, f"SELECT * FROM trials WHERE {clause} AND compile_key IN ({{}})", list(keys), *values)
    return sorted(found, key=lambda row: int(row["id"]))


def rows_by_id(connection: sqlite3.Connection, table: str, ids: list[int]) -> list[dict[str, Any]]:
    return list(fetch(connection, f"SELECT * FROM {table} WHERE id IN ({{}})", ids))


def select_trials(
    connection: sqlite3.Connection, path: Path, wanted: Mapping[str, Any], keys: Sequence[str] | None = None
) -> list[Trial]:
    """The trials that match, oldest first; rows that can't be read are left out, with one warning line."""
    return [trial for _, trial in trials_of(connection, path, trial_rows(connection, wanted, keys))]


def trials_of(
    connection: sqlite3.Connection,
    path: Path,
    found: Sequence[Mapping[str, Any]],
    unreadable: Skipped | None = None,
) -> list[tuple[Mapping[str, Any], Trial]]:
    """Trials with their rows, facts, samples and environments put together.

    Rows that can't be read go to `unreadable`; where that is None, one warning line tells of them.
    """
    ids = [row["id"] for row in found]
    sql = "SELECT * FROM compile_facts WHERE trial IN ({})"
    facts = {int(fact["trial"]): fact for fact in fetch(connection, sql, ids)}
    samples: dict[int, list[float]] = {}
    sql = "SELECT trial, us FROM samples WHERE trial IN ({}) ORDER BY trial, position"
    for sample in fetch(connection, sql, ids):
        samples.setdefault(sample["trial"], []).append(sample["us"])
    places = environments(connection, (row["environment"] for row in found))
    skipped = unreadable or Skipped()
    trials: list[tuple[Mapping[str, Any], Trial]] = []

    def read(row: Mapping[str, Any]) -> Trial:
        number, place = row["id"], _place(places, row)
        return rows_of_trials.trial_of(row, place, facts.get(number), samples.get(number, ()), row["sweep"])

    for row in found:
        trial = skipped.attempt(f"trial {row['id']}", read, row)
        if trial is not None:
            trials.append((row, trial))
    if unreadable is None:
        skipped.warn(path)
    return trials


def _place(places: Mapping[int, Environment | rows.RowError], row: Mapping[str, Any]) -> Environment:
    place = places[row["environment"]]
    if isinstance(place, rows.RowError):
        raise place
    return place


def select_winners(
    connection: sqlite3.Connection, path: Path, *, spec: str | None = None, arch: str | None = None
) -> list[Winner]:
    """The current winners, oldest first."""
    return [winner for _, winner in winners_with_rows(connection, path, spec=spec, arch=arch)]


def winners_with_rows(
    connection: sqlite3.Connection,
    path: Path,
    *,
    spec: str | None = None,
    arch: str | None = None,
    current: int | None = 1,
    unreadable: Skipped | None = None,
) -> list[tuple[Mapping[str, Any], Winner]]:
    """Winners with their rows; `current` 0 is the history, None is all."""
    clause, values = _matching({"spec": spec, "arch": arch, "current": current})
    found = _rows(connection, f"SELECT * FROM winners WHERE {clause} ORDER BY id", values)
    places = environments(connection, (row["environment"] for row in found))
    skipped = unreadable or Skipped()
    pairs: list[tuple[Mapping[str, Any], Winner]] = []
    for row in found:
        winner = skipped.attempt(f"winner {row['id']}", lambda row: rows.winner_of(row, _place(places, row)), row)
        if winner is not None:
            pairs.append((row, winner))
    if unreadable is None:
        skipped.warn(path)
    return pairs


def select_known_bad(
    connection: sqlite3.Connection,
    path: Path,
    *,
    compile_key: str | None = None,
    spec: str | None = None,
    arch: str | None = None,
) -> list[KnownBad]:
    """What is remembered of compiles that hung or crashed, oldest first."""
    return [bad for _, bad in known_bad_with_rows(connection, path, compile_key=compile_key, spec=spec, arch=arch)]


def known_bad_with_rows(
    connection: sqlite3.Connection,
    path: Path,
    *,
    compile_key: str | None = None,
    spec: str | None = None,
    arch: str | None = None,
    unreadable: Skipped | None = None,
) -> list[tuple[Mapping[str, Any], KnownBad]]:
    clause, values = _matching({"compile_key": compile_key, "spec": spec, "arch": arch})
    skipped = unreadable or Skipped()
    pairs: list[tuple[Mapping[str, Any], KnownBad]] = []
    for row in _rows(connection, f"SELECT * FROM known_bad WHERE {clause} ORDER BY recorded_at, compile_key", values):
        bad = skipped.attempt(f"known_bad {row['compile_key']}", rows_of_trials.known_bad_of, row)
        if bad is not None:
            pairs.append((row, bad))
    if unreadable is None:
        skipped.warn(path)
    return pairs
