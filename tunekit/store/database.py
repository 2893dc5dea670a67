"""The database of everything that was tried: many processes write it at once, nothing is lost.

Each write is one ``BEGIN IMMEDIATE`` transaction, on disk when the call
returns; a kill at any point loses at most the trial in flight.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from sqlite_utils import Database

from tunekit.errors import DatabaseError
from tunekit.model import Environment, Values, Winner
from tunekit.store import connection as opening
from tunekit.store import rows, rows_of_trials, writing
from tunekit.store.migrations import STEPS, Step
from tunekit.store.queries import Sweep, select_known_bad, select_sweeps, select_trials, select_winners
from tunekit.store.readonly import UnreadableError, reading
from tunekit.trials import KnownBad, Stage, Trial

T = TypeVar("T")
log = logging.getLogger("tunekit")

SweepState = Literal["done", "interrupted", "failed"]
BUSY_S = 60.0


class Store:
    """One open database. Safe to share between threads, never to carry over a fork.

    `journal_mode` is what SQLite answered: ``wal``, or ``delete`` where the file
    system refuses write-ahead logging.
    """

    def __init__(self, path: Path, *, create: bool, busy_s: float, vfs: str | None, steps: Sequence[Step]) -> None:
        self.path = path
        self._busy_s = busy_s
        self._vfs = vfs
        self._steps = steps
        self._lock = threading.RLock()
        self._connect(create)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        create: bool = True,
        busy_s: float = BUSY_S,
        vfs: str | None = None,
        steps: Sequence[Step] = STEPS,
    ) -> Store:
        """Open for writing; make or migrate the file as needed.

        `busy_s` bounds how long a write waits for other processes; `vfs` names
        another SQLite VFS (``unix-dotfile`` where POSIX locks don't work). A
        damaged file is moved aside with one warning line and a new one begun.

        Raises:
            DatabaseError: it can't be written; it is a newer tunekit's or another
                application's; or it isn't there and `create` is false.
        """
        return cls(Path(path), create=create, busy_s=busy_s, vfs=vfs, steps=steps)

    def _connect(self, create: bool) -> None:
        self._connection, self.journal_mode = opening.open_database(
            self.path, create_missing=create, busy_s=self._busy_s, vfs=self._vfs, steps=self._steps
        )
        self._db = Database(self._connection)
        self._pid = os.getpid()
        self._file = self._file_id()

    def _file_id(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def close(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- how every read and write runs

    def _ready(self) -> None:
        """Connect anew where another process moved the file aside.

        Raises:
            DatabaseError: this process was forked while the database was open. SQLite
                would believe itself in possession of locks that the parent holds.
        """
        if self._pid != os.getpid():
            raise DatabaseError(f"{self.path} was opened before a fork; close it first, and open it in the child")
        if self._file_id() != self._file:
            self._connection.close()
            self._connect(create=True)

    def _run(self, action: Callable[[], T]) -> T:
        """Run `action`; on damage met half-way, move the file aside, begin a new one and run it again.

        Raises:
            DatabaseError: locked, full, read-only or failing, or a value that may not be stored.
        """
        with self._lock:
            try:
                self._ready()
                try:
                    return action()
                except sqlite3.DatabaseError as error:
                    if not opening.is_damage(error):
                        raise
                    self._connection.close()
                    opening.move_aside(self.path, vfs=self._vfs, thorough=True)
                    self._connect(create=True)
                return action()
            except (rows.RowError, sqlite3.IntegrityError) as error:
                raise DatabaseError(f"not recorded: {error}") from error
            except sqlite3.DatabaseError as error:
                raise opening.cannot_write(self.path, error) from error

    def _write(self, action: Callable[[Database], T]) -> T:
        """One transaction around `action`: all of it is on disk when this returns, or none of it."""

        def transaction() -> T:
            begun = self._connection
            opening.retry_busy(lambda: begun.execute("BEGIN IMMEDIATE"), self.path, self._busy_s)
            try:
                result = action(self._db)
                # With a rollback journal a reader can hold up the commit; the transaction stays open meanwhile.
                opening.retry_busy(lambda: begun.execute("COMMIT"), self.path, self._busy_s)
                return result
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if begun.in_transaction:
                        begun.execute("ROLLBACK")
                raise

        return self._run(transaction)

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return self._run(lambda: opening.retry_busy(lambda: query(self._connection), self.path, self._busy_s))

    # -- sweeps

    def start_sweep(self, spec: str, version: int, arch: str, arguments: Mapping[str, Any]) -> int:
        """Note that a sweep begins, with what it was asked; its id."""
        row = {
            "uid": uuid.uuid4().hex,
            "spec": rows.text(spec, "spec"),
            "version": version,
            "arch": rows.text(arch, "arch"),
            "arguments": rows.dump(dict(arguments), "arguments"),
            "state": "running",
            "started_at": now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        return self._write(lambda db: int(db["sweeps"].insert(row).last_pk))

    def finish_sweep(self, sweep: int, state: SweepState) -> None:
        """Note how a sweep ended. One that was killed stays ``running``; see :attr:`Sweep.alive`."""
        if state not in ("done", "interrupted", "failed"):
            raise DatabaseError(f"a sweep ends done, interrupted or failed, not {state!r}")
        sql = "UPDATE sweeps SET state = ?, finished_at = ? WHERE id = ?"
        if not self._write(lambda db: int(db.execute(sql, (state, now(), sweep)).rowcount)):
            raise DatabaseError(f"{self.path} has no sweep {sweep}")

    def sweeps(self, spec: str | None = None, arch: str | None = None) -> list[Sweep]:
        """The sweeps, newest first."""
        return self._read(lambda c: select_sweeps(c, spec=spec, arch=arch))

    # -- trials

    def record(self, trial: Trial) -> int:
        """Keep one outcome, failures too, with every sample; its row id.

        Raises:
            DatabaseError: a sample that is no time (NaN, inf, 0, -1, None, "fast"), or an unwritable database.
        """
        return self._write(lambda db: writing.insert_trial(db, trial, uid=uuid.uuid4().hex, recorded_at=now()))

    def trials(
        self,
        *,
        spec: str | None = None,
        arch: str | None = None,
        variant: str | None = None,
        stage: Stage | None = None,
        problem: Values | None = None,
        compile_key: str | None = None,
        sweep: int | None = None,
    ) -> list[Trial]:
        """The trials that match every given field, oldest first. `variant` is a variant's id."""
        wanted = {"spec": spec, "arch": arch, "variant": variant, "compile_key": compile_key, "sweep": sweep}
        wanted |= {"stage": None if stage is None else stage.value}
        wanted |= {"problem_key": None if problem is None else writing.values_key(problem)}
        return self._read(lambda c: select_trials(c, self.path, wanted))

    def done(
        self,
        stage: Stage,
        compile_keys: Iterable[str],
        *,
        problem: Values | None = None,
        protocol: str | None = None,
        environment: Environment | None = None,
    ) -> dict[str, Trial]:
        """What needs no doing again: the newest trial of a stage by compile key, for those keys that have one.

        A compile's key covers all that decides its result, so keys alone are
        asked for there. A run depends on the `problem`, the `protocol` and the
        `environment` (the fields of `standing.KEY_FIELDS`) too: give them.
        """
        wanted = {"stage": stage.value, "protocol": protocol}
        wanted |= {"problem_key": None if problem is None else writing.values_key(problem)}
        wanted |= {"comparable": None if environment is None else writing.comparable_key(environment)}
        keys = list(dict.fromkeys(compile_keys))
        found = self._read(lambda c: select_trials(c, self.path, wanted, keys))
        return {trial.compile_key: trial for trial in found}

    # -- winners

    def put_winner(self, winner: Winner) -> None:
        """Make `winner` the current one of its key; the one that it replaces stays as history.

        Raises:
            DatabaseError: its time is none (NaN, inf, 0, -1, None, "fast"); the earlier winner stays.
        """
        self._write(lambda db: writing.insert_winner(db, winner, uid=uuid.uuid4().hex, recorded_at=now()))

    def winners(self, spec: str | None = None, arch: str | None = None) -> list[Winner]:
        """The current winners, oldest first, of every environment and protocol."""
        return self._read(lambda c: select_winners(c, self.path, spec=spec, arch=arch))

    # -- compiles not to try again

    def known_bad(self, compile_key: str) -> KnownBad | None:
        """What is remembered of a compile that hung or crashed; None if nothing."""
        found = self._read(lambda c: select_known_bad(c, self.path, compile_key=compile_key))
        return found[0] if found else None

    def remember_bad(self, bad: KnownBad) -> None:
        """Skip this compile from now on; its key changes with the source and the toolchain."""
        row = {"recorded_at": now()}
        self._write(lambda db: db["known_bad"].upsert({**row, **rows_of_trials.known_bad_row(bad)}, pk="compile_key"))

    def forget_bad(self, spec: str | None = None, compile_key: str | None = None) -> int:
        """Give remembered compiles (all, a spec's, or one) another chance; how many were forgotten."""
        given = {"spec": spec, "compile_key": compile_key}
        wanted = {name: value for name, value in given.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in wanted) or "1"
        return self._write(
            lambda db: int(db.execute(f"DELETE FROM known_bad WHERE {where}", tuple(wanted.values())).rowcount)
        )

    # -- the whole

    def execute(self, action: Callable[[Database], T]) -> T:
        """Run `action` in a write transaction: for imports, which must write several rows or none."""
        return self._write(action)

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run `query` on this store's connection, waiting for other processes as every read does."""
        return self._read(query)


@dataclass(frozen=True)
class Records:
    """All that a database holds, read without changing it: see :func:`read_records`."""

    sweeps: list[Sweep]
    trials: list[Trial]
    winners: list[Winner]
    known_bad: list[KnownBad]


def read_records(path: Path, *, spec: str | None = None, arch: str | None = None) -> Records:
    """The contents of a database on read-only media, or of one that must not be changed.

    Raises:
        DatabaseError: absent, damaged, newer or not permitted.
    """
    if not os.path.lexists(path):
        raise DatabaseError(f"no database {path}")
    try:
        with reading(path, BUSY_S) as connection:
            wanted = {"spec": spec, "arch": arch}
            return Records(
                select_sweeps(connection, spec=spec, arch=arch),
                select_trials(connection, path, wanted),
                select_winners(connection, path, spec=spec, arch=arch),
                select_known_bad(connection, path, spec=spec, arch=arch),
            )
    except UnreadableError as error:
        raise DatabaseError(f"{path} {error}") from error


def now() -> str:
    """The present second, UTC, as rows record it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
