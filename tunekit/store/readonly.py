"""Reading a database without changing it: also from read-only media, another user's, or a newer one.

Standard library only, and quick: dispatch and `tunekit best` come through here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tunekit.model import Environment
from tunekit.store.rows import RowError, environment_of

T = TypeVar("T")
FilesMark = tuple[tuple[int, ...], ...]
log = logging.getLogger("tunekit")

at_work = threading.RLock()
"""Held while SQLite is at work or a module is imported late, and by a fork: SQLite's own locks, and Python's of
modules, stay as they are in a child, where the thread that had one is not. So a fork waits for these, and then for
nothing."""
os.register_at_fork(before=at_work.acquire, after_in_parent=at_work.release, after_in_child=at_work.release)

SCHEMA = 7  # the schema that this tunekit reads: as many as there are migrations (a test compares)
APPLICATION_ID = 0x54554E45


class UnreadableError(Exception):
    """Why a database can't be read, in words; a reader's caller turns it into one line and a miss."""


def connect_readonly(path: Path, busy_s: float) -> sqlite3.Connection:
    """A connection that can't write.

    A write-ahead database on read-only media has nowhere to put its shared
    memory; it is then opened as immutable, which is sound because nobody can write it.
    """
    uri = path.absolute().as_uri()
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=busy_s, isolation_level=None)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError:
        connection.close()
        if os.access(path.parent, os.W_OK) or not os.access(path, os.R_OK):
            raise
    except BaseException:
        connection.close()
        raise
    log_file = path.with_name(f"{path.name}-wal")
    if log_file.exists() and log_file.stat().st_size:
        log.warning("%s can't be read on read-only media; the results in it are missing", log_file)
    return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)


@contextlib.contextmanager
def reading(path: Path, busy_s: float = 2.0) -> Iterator[sqlite3.Connection]:
    """A read-only connection to a tunekit database whose schema this version knows.

    Raises:
        UnreadableError: damaged, newer, somebody else's, or not permitted.
    """
    try:
        if path.is_dir():
            raise UnreadableError("is a directory, not a database")
        if not path.is_file():
            raise UnreadableError("is no regular file")
        with at_work, contextlib.closing(connect_readonly(path, busy_s)) as connection:
            connection.row_factory = sqlite3.Row
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
            if owner != APPLICATION_ID:
                raise UnreadableError("holds no tunekit tables")
            if version > SCHEMA:
                raise UnreadableError(f"has schema {version}, this tunekit reads up to {SCHEMA}: upgrade tunekit")
            yield connection
    except (sqlite3.Error, OSError) as error:
        raise UnreadableError(f"can't be read ({error})") from error


def files_mark(database: Path) -> FilesMark:
    """What is another when a database's files are: two looks at the file system."""
    found: list[tuple[int, ...]] = []
    for path in (database, database.with_name(f"{database.name}-wal")):
        try:
            stat = path.stat()
        except OSError:
            found.append(())
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def environments(connection: sqlite3.Connection, ids: Iterable[int]) -> Mapping[int, Environment | RowError]:
    """Environments by row id; a row that this version can't judge is the error that says why."""
    found: dict[int, Environment | RowError] = {}
    for row in fetch(connection, "SELECT * FROM environments WHERE id IN ({})", sorted(set(ids))):
        try:
            found[row["id"]] = environment_of(row)
        except RowError as error:
            found[row["id"]] = error
    return found


def fetch(connection: sqlite3.Connection, sql: str, keys: list[Any], *more: Any) -> Iterator[dict[str, Any]]:
    """The rows for `keys`, which stand for the ``{}`` of `sql` (after `more`), 500 keys a query."""
    for start in range(0, len(keys), 500):
        part = keys[start : start + 500]
        cursor = connection.execute(sql.format(",".join("?" * len(part))), (*more, *part))
        names = [column[0] for column in cursor.description]
        for row in cursor:
            yield dict(zip(names, row, strict=True))


class Skipped:
    """Rows that could not be read, with the reasons; told in one line."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def attempt(self, where: str, read: Callable[..., T], *arguments: Any) -> T | None:
        """What `read(*arguments)` returns; None, and a count, where the row is not what it promises."""
        try:
            return read(*arguments)
        except (RowError, KeyError, IndexError) as error:
            self.rows.append((where, str(error)))
            return None

    def warn(self, path: object) -> None:
        """One line for all of them, with the first one's reason; none where there are none."""
        if self.rows:
            what = f"{len(self.rows)} row{'s' * (len(self.rows) != 1)}"
            first = ": ".join(self.rows[0])
            log.warning("%s: skipped %s that this tunekit can't read (%s)", path, what, first)
