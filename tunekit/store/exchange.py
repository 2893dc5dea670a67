"""Moving results between databases: export, import, merge, and the files that ship.

Conflict rules:

- sweeps and trials carry a uid from the moment they are recorded: one that is
  there already is kept, so importing twice changes nothing;
- of two winners for one key (spec, version, arch, bucket, environment,
  protocol) the later recorded is current and the other is history; at the same
  second the one that was there stays;
- of two memories of one hung or crashed compile the later stays;
- a line that can't be read is rejected with its number and reason; the others go in.

An export of everything holds every digit, so export and import round-trip
exactly; shipped files round measured numbers to 7 significant digits.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunekit.errors import DatabaseError
from tunekit.model import Winner
from tunekit.store import files, lines, queries, rows, rows_of_trials, winner_lines, writing
from tunekit.store.database import BUSY_S, Store, now
from tunekit.store.lines import DIGITS, Line, SweepRecord
from tunekit.store.readonly import UnreadableError, reading
from tunekit.store.shipped import shipped_file
from tunekit.trials import KnownBad, Trial

log = logging.getLogger("tunekit")

Kind = Literal["sweep", "trial", "winner", "known_bad"]
KINDS: tuple[Kind, ...] = ("sweep", "trial", "winner", "known_bad")


@dataclass(frozen=True)
class Exchanged:
    """What an import or merge did, in records; `rejected` says for each bad line where and why."""

    added: int = 0
    known: int = 0
    replaced: int = 0
    rejected: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.added} added, {self.known} already there"
        text += f", {self.replaced} replaced by a later one" if self.replaced else ""
        return text + (f", {len(self.rejected)} rejected" if self.rejected else "")


def export_lines(
    database: Path,
    *,
    spec: str | None = None,
    arch: str | None = None,
    kinds: Iterable[Kind] = KINDS,
    digits: int | None = None,
) -> Iterator[str]:
    """A database's records as lines, in the order in which an import takes them; the database is only read.

    Raises:
        DatabaseError: absent, damaged, newer or not permitted.
    """
    if not os.path.lexists(database):
        raise DatabaseError(f"no database {database}")
    try:
        with reading(database, BUSY_S) as connection:
            yield from _exported(connection, database, spec, arch, frozenset(kinds), digits)
    except (UnreadableError, rows.RowError) as error:
        raise DatabaseError(f"{database} {error}") from error


def _exported(
    connection: sqlite3.Connection,
    path: Path,
    spec: str | None,
    arch: str | None,
    kinds: frozenset[str],
    digits: int | None,
) -> Iterator[str]:
    connection.execute("BEGIN")  # one moment's contents, whatever is written meanwhile
    sweeps = {sweep.id: sweep for sweep in queries.select_sweeps(connection, spec=spec, arch=arch)}
    if "sweep" in kinds:
        for sweep in sorted(sweeps.values(), key=lambda each: each.id):
            record = SweepRecord(**{name: getattr(sweep, name) for name in SweepRecord.__dataclass_fields__})
            yield lines.sweep_line(record, uid=sweep.uid)
    if "trial" in kinds:
        found = queries.trial_rows(connection, {"spec": spec, "arch": arch})
        for start in range(0, len(found), writing.CHUNK):
            for row, trial in queries.trials_of(connection, path, found[start : start + writing.CHUNK]):
                owner = sweeps.get(row["sweep"])
                yield lines.trial_line(trial, sweep=owner.uid if owner else None, digits=digits, **_identity(row))
    if "winner" in kinds:
        for row, winner in queries.winners_with_rows(connection, path, spec=spec, arch=arch):
            yield lines.winner_line(winner, digits=digits, **_identity(row))
    if "known_bad" in kinds:
        for row, bad in queries.known_bad_with_rows(connection, path, spec=spec, arch=arch):
            yield lines.known_bad_line(bad, recorded_at=row["recorded_at"], digits=digits)


def _identity(row: Mapping[str, Any]) -> dict[str, str]:
    return {"uid": row["uid"], "recorded_at": row["recorded_at"]}


def export_jsonl(
    database: Path,
    target: Path,
    *,
    spec: str | None = None,
    arch: str | None = None,
    kinds: Iterable[Kind] = KINDS,
    digits: int | None = None,
) -> int:
    """Write a database's records to a file, whole or not at all; how many lines.

    Raises:
        DatabaseError: the database can't be read or the file not written.
    """
    written = list(export_lines(database, spec=spec, arch=arch, kinds=kinds, digits=digits))
    _write_lines(target, written)
    return len(written)


def _write_lines(target: Path, written: list[str]) -> None:
    try:
        files.publish("".join(f"{line}\n" for line in written).encode(), target, target.absolute().parent)
    except OSError as error:
        raise DatabaseError(f"can't write {target}: {error.strerror}") from error


@dataclass(frozen=True)
class Shipped:
    """The `file` that ships, and how many of its winners came from the database and how many were `kept`."""

    file: Path
    written: int
    kept: int


def ship(database: Path, directory: Path, *, spec: str, arch: str) -> Shipped:
    """Put winners, and the finals that chose them, into the file of a spec and an architecture that ships.

    What the file has for problems, or GPUs, that the database has no winner for stays. Sorted by problem, rounded,
    without uids, so that a re-tune shows in review as the lines that changed.

    Raises:
        DatabaseError: the file can't be read or written.
    """
    fresh = _shippable(database, spec, arch)
    target = shipped_file(spec, arch, directory)
    before = _shipped_lines(target)
    retuned = {_tuned(winner, "bucket") for winner in _winners(fresh)}
    replaced = [winner for winner in _winners(before) if _tuned(winner, "bucket") in retuned]
    problems = {_tuned(winner, "problem") for winner in (*_winners(fresh), *replaced)}
    kept = [
        plain
        for plain in before
        if (_tuned(plain, "bucket") not in retuned if _is_winner(plain) else _tuned(plain, "problem") not in problems)
    ]
    both = sorted([*fresh, *kept], key=_review_order)
    _write_lines(target, [json.dumps(plain, ensure_ascii=False) for plain in both])
    return Shipped(target, len(_winners(fresh)), len(_winners(kept)))


def _shippable(database: Path, spec: str, arch: str) -> list[dict[str, Any]]:
    """A database's winners, and the finals of their problems: one that found no winner speaks for none that ships."""
    found = []
    for line in export_lines(database, spec=spec, arch=arch, kinds=("winner", "trial"), digits=DIGITS):
        plain = json.loads(line)
        if _is_winner(plain) or str(plain.get("protocol") or "").startswith("final/"):
            for name in ("uid", "sweep"):
                plain.pop(name, None)
            found.append(plain)
    decided = {_tuned(winner, "problem") for winner in _winners(found)}
    return [plain for plain in found if _tuned(plain, "problem") in decided]


def _shipped_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file that ships; none where it isn't there yet."""
    found: list[dict[str, Any]] = []
    try:
        for number, line in winner_lines.split(file.read_bytes()) if file.exists() else ():
            try:
                if not isinstance(lines.parse_line(line).value, (Winner, Trial)):
                    raise rows.RowError("neither a winner nor a trial")
            except rows.RowError as error:
                raise DatabaseError(f"{file}, line {number}: {error}; see `tunekit db verify {file}`") from error
            found.append(json.loads(line))
    except OSError as error:
        raise DatabaseError(f"can't read {file}: {error.strerror}") from error
    return found


def _is_winner(plain: Mapping[str, Any]) -> bool:
    return bool(plain["kind"] == "winner")


def _winners(plain: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in plain if _is_winner(each)]


def _tuned(plain: Mapping[str, Any], name: str) -> str:
    """What was tuned where: the line's bucket or problem, and its GPU."""
    return json.dumps([plain[name], plain["environment"].get("gpu")], sort_keys=True)


def _review_order(plain: Mapping[str, Any]) -> tuple[Any, ...]:
    """Winners first, then by bucket or problem, numbers as numbers."""
    point = plain.get("bucket", plain["problem"])
    axes = [
        (name, value if isinstance(value, str) else "", 0 if isinstance(value, str) else value)
        for name, value in point.items()
    ]
    return not _is_winner(plain), axes, plain["recorded_at"], plain["variant"]


def import_jsonl(store: Store, source: Path) -> Exchanged:
    """Take in a file of lines; see the module for what happens to records that are there already.

    Raises:
        DatabaseError: the file can't be read or the database not written.
    """
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DatabaseError(f"can't read {source}: {error.strerror}") from error
    return import_lines(store, winner_lines.split(content))


def merge(store: Store, other: Path) -> Exchanged:
    """Take in all of another database, which is only read.

    Raises:
        DatabaseError: `other` is this database, or can't be read; or this one can't be written.
    """
    if other.exists() and store.path.exists() and other.samefile(store.path):
        raise DatabaseError(f"{other} is the database itself")
    exported = export_lines(other)
    return import_lines(store, ((number, line.encode()) for number, line in enumerate(exported, start=1)))


def import_lines(store: Store, source: Iterable[tuple[int, bytes]]) -> Exchanged:
    """Take in numbered lines, 500 a transaction: a crash leaves whole records, and importing again completes them."""
    tally = _Tally()
    part: list[Line] = []
    for number, text in source:
        try:
            part.append(lines.parse_line(text))
        except rows.RowError as error:
            tally.rejected.append(f"line {number}: {error}")
        if len(part) == writing.CHUNK:
            _take_in(store, part, tally)
            part = []
    _take_in(store, part, tally)
    return Exchanged(tally.added, tally.known, tally.replaced, tuple(tally.rejected))


class _Tally:
    def __init__(self) -> None:
        self.added = self.known = self.replaced = 0
        self.rejected: list[str] = []


def _take_in(store: Store, part: list[Line], tally: _Tally) -> None:
    def action(db: Any) -> list[str]:
        return [_insert(db, line) for line in part]  # counted after the commit: a retry must not count twice

    for outcome in store.execute(action) if part else []:
        setattr(tally, outcome, getattr(tally, outcome) + 1)


def _insert(db: Any, line: Line) -> str:
    """Insert one record by the conflict rules; ``added``, ``known`` or ``replaced``."""
    value = line.value
    if isinstance(value, SweepRecord):
        return _insert_sweep(db, value, line.uid)
    if isinstance(value, Trial):
        if _id_of(db, "trials", line.uid) is not None:
            return "known"
        number = writing.insert_trial(db, value, uid=line.uid, recorded_at=line.recorded_at or now())
        owner = _id_of(db, "sweeps", line.sweep) if line.sweep else None
        db.execute("UPDATE trials SET sweep = ? WHERE id = ?", (owner, number))
        return "added"
    if isinstance(value, Winner):
        return _insert_winner(db, value, line)
    return _insert_bad(db, value, line.recorded_at or now())


def _id_of(db: Any, table: str, uid: str) -> int | None:
    found = db.execute(f"SELECT id FROM {table} WHERE uid = ?", (uid,)).fetchone()
    return int(found[0]) if found else None


def _insert_sweep(db: Any, sweep: SweepRecord, uid: str) -> str:
    row = {name: getattr(sweep, name) for name in SweepRecord.__dataclass_fields__}
    row |= {"uid": uid, "arguments": rows.dump(dict(sweep.arguments), "arguments")}
    number = _id_of(db, "sweeps", uid)
    if number is None:
        db["sweeps"].insert(row)
        return "added"
    state = db.execute("SELECT state FROM sweeps WHERE id = ?", (number,)).fetchone()[0]
    if state == "running" and sweep.state != "running":
        db["sweeps"].update(number, {"state": sweep.state, "finished_at": sweep.finished_at})
        return "replaced"
    return "known"


def _insert_winner(db: Any, winner: Winner, line: Line) -> str:
    if _id_of(db, "winners", line.uid) is not None:
        return "known"
    key = writing.winner_key(winner)
    where = " AND ".join(f"{name} = ?" for name in key)
    sql = f"SELECT recorded_at FROM winners WHERE current = 1 AND {where}"
    there = db.execute(sql, list(key.values())).fetchone()
    recorded_at = line.recorded_at or now()
    later = there is None or recorded_at > there[0]
    writing.insert_winner(db, winner, uid=line.uid, recorded_at=recorded_at, current=later)
    return "replaced" if there and later else "added"


def _insert_bad(db: Any, bad: KnownBad, recorded_at: str) -> str:
    there = db.execute("SELECT recorded_at FROM known_bad WHERE compile_key = ?", (bad.compile_key,)).fetchone()
    if there and there[0] >= recorded_at:
        return "known"
    db["known_bad"].upsert({"recorded_at": recorded_at, **rows_of_trials.known_bad_row(bad)}, pk="compile_key")
    return "replaced" if there else "added"
