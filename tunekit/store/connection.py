"""Opening the database for writing: created whole, checked, write-ahead where that works.

A database is made under a scratch name and renamed into place, so that nobody
ever sees a half-made one and an empty file is known to be damage. Creating and
moving aside take a lock file beside the database; nothing else does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import filelock
from sqlite_utils import Database

from tunekit.errors import DatabaseError
from tunekit.store import files
from tunekit.store.migrations import STEPS, Step, check_ours, migrate

T = TypeVar("T")
log = logging.getLogger("tunekit")

DATABASE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
SMALLEST = 512  # bytes: one page of the smallest size
SIBLINGS = ("-wal", "-shm", "-journal")


def connect(path: Path, *, busy_s: float, vfs: str | None = None, create: bool = False) -> sqlite3.Connection:
    """A connection that begins no transaction by itself.

    SQLite itself waits half a second at most, since nothing interrupts that;
    `retry_busy` does the rest, and Ctrl-C ends it.
    """
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}" + (f"&vfs={vfs}" if vfs else "")
    connection = sqlite3.connect(uri, uri=True, timeout=min(busy_s, 0.5), isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the file itself is broken (SQLITE_CORRUPT, SQLITE_NOTADB).

    Its subclasses say other things: OperationalError is busy, full, read-only or I/O.
    """
    return type(error) is sqlite3.DatabaseError


def is_busy(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))


def retry_busy(action: Callable[[], T], path: Path, busy_s: float) -> T:
    """Run `action` until the database is free, for `busy_s` at most.

    SQLite's own waiting gives up at once in some races (recovery, a snapshot
    that went stale), hence this loop around it.

    Raises:
        DatabaseError: still locked; the message says for how long it was tried.
    """
    deadline = time.monotonic() + busy_s
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
            if time.monotonic() >= deadline:
                raise DatabaseError(
                    f"{path} was locked by another process for {busy_s:g} s;"
                    " end the program that holds a transaction open on it, or name another file with --db"
                ) from error
        time.sleep(random.uniform(0.005, 0.05))


def write_ahead(connection: sqlite3.Connection, path: Path) -> str:
    """Switch to write-ahead logging where the file system allows it; the journal mode that SQLite answers.

    Says so in one line where it is refused: writers then wait for readers.
    """
    kind = files.network_file_system(path)
    wanted = "delete" if kind else "wal"
    mode = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    if mode != wanted:
        mode = str(connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0])
    # A commit is on disk when it returns: 1-5 ms here, beside trials of seconds.
    connection.execute("PRAGMA synchronous = FULL")
    if mode != "wal":
        why = f"{kind} is a network file system" if kind else f"SQLite answered '{mode}'"
        log.warning(
            "%s: no write-ahead log (%s); going on with a rollback journal, writers wait for readers", path, why
        )
    return mode


@contextlib.contextmanager
def opening_lock(path: Path) -> Iterator[None]:
    """Held while the file at `path` is created or moved aside; a dead holder's lock is gone with it."""
    lock = f"{path}.opening"  # not .lock: SQLite's unix-dotfile VFS makes that one
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_WRONLY, 0o644))  # filelock takes some refusals for a held lock
        with filelock.FileLock(lock, timeout=60):
            yield
    except filelock.Timeout as error:
        raise DatabaseError(f"{lock} is held by another process for over 60 s") from error
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: object) -> DatabaseError:
    reason = files.unwritable(path.parent) or error
    return DatabaseError(f"can't write {path}: {reason}; name another file with --db or TUNEKIT_DB")


def create(path: Path, *, busy_s: float, vfs: str | None, steps: Sequence[Step] = STEPS) -> None:
    """Make the database, whole, unless it is there; call with the opening lock held."""
    if os.path.lexists(path):
        return
    scratch = path.with_name(f"{path.name}.new-{files.fresh_name()}")
    try:
        connection = connect(scratch, busy_s=busy_s, vfs=vfs, create=True)
        with contextlib.closing(connection):
            if files.network_file_system(path) is None:
                connection.execute("PRAGMA journal_mode = WAL")
            _migrate(connection, path, busy_s, steps)
        for suffix in SIBLINGS:  # an old log beside a new database would be replayed into it
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", files.aside_name(Path(f"{path}{suffix}")))
        os.rename(scratch, path)
        files.fsync_directory(path.parent)
    finally:
        for leftover in (scratch, *(Path(f"{scratch}{suffix}") for suffix in SIBLINGS)):
            leftover.unlink(missing_ok=True)


def _set_up(connection: sqlite3.Connection, path: Path, busy_s: float, steps: Sequence[Step]) -> str:
    """Log and schema as they should be; the journal mode. A database of others is left as it is."""
    retry_busy(lambda: check_ours(Database(connection), path, steps), path, busy_s)
    mode = retry_busy(lambda: write_ahead(connection, path), path, busy_s)
    _migrate(connection, path, busy_s, steps)
    return mode


def _migrate(connection: sqlite3.Connection, path: Path, busy_s: float, steps: Sequence[Step]) -> None:
    db = Database(connection)
    if check_ours(db, path, steps) == len(steps):
        return
    retry_busy(lambda: connection.execute("BEGIN IMMEDIATE"), path, busy_s)
    try:
        migrate(db, path, steps)
        retry_busy(lambda: connection.execute("COMMIT"), path, busy_s)
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def open_database(
    path: Path, *, create_missing: bool, busy_s: float, vfs: str | None = None, steps: Sequence[Step] = STEPS
) -> tuple[sqlite3.Connection, str]:
    """A checked, migrated connection and its journal mode; what is damaged is moved aside first.

    Raises:
        DatabaseError: it can't be written, belongs to somebody else, or isn't there and may not be made.
    """
    if create_missing and not path.parent.exists():
        try:
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
    distrust = files.world_writable(path) or files.foreign_owner(path) or files.foreign_owner(path.parent)
    if distrust:
        log.warning("%s; its tuning results may be anybody's", distrust)
    for _ in range(4):
        if not os.path.lexists(path):
            if not create_missing:
                raise DatabaseError(f"no database {path}; `tunekit sweep` makes it, --db or TUNEKIT_DB names another")
            with opening_lock(path):
                try:
                    create(path, busy_s=busy_s, vfs=vfs, steps=steps)
                except (OSError, sqlite3.OperationalError) as error:
                    raise cannot_write(path, error) from error
        damage = damage_of(path, vfs=vfs)
        if damage:
            move_aside(path, vfs=vfs)
            continue
        if not os.path.lexists(path):
            continue
        if not os.access(path, os.W_OK):
            raise cannot_write(path, "no permission to write the file")
        connection = connect(path, busy_s=busy_s, vfs=vfs)
        try:
            return connection, _set_up(connection, path, busy_s, steps)
        except sqlite3.OperationalError as error:
            connection.close()
            raise cannot_write(path, error) from error
        except sqlite3.DatabaseError as error:
            connection.close()
            if not is_damage(error):
                raise
            move_aside(path, vfs=vfs, thorough=True)
        except BaseException:
            connection.close()
            raise
    raise DatabaseError(f"{path} was found damaged, moved aside and found damaged again; is the disk failing?")


def damage_of(path: Path, *, vfs: str | None = None, thorough: bool = False) -> str | None:
    """What is wrong with the file at `path`, in words; None if it can be read, or isn't there.

    The quick check reads the header and the schema, which finds a truncated or
    overwritten file; the thorough one reads every page.
    """
    if path.is_dir():
        if path.suffix in DATABASE_SUFFIXES or not any(path.iterdir()):
            return "a directory"
        raise DatabaseError(f"{path} is a directory; name a file with --db or TUNEKIT_DB")
    if path.exists() and not path.is_file():  # /dev/null, a pipe: reading may block, renaming may harm
        raise DatabaseError(f"{path} is no regular file; name another with --db or TUNEKIT_DB")
    try:
        size = path.stat().st_size
        if size < SMALLEST:  # SQLite takes these for a database that is still empty
            return f"truncated to {size} bytes"
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    try:
        with contextlib.closing(connect(path, busy_s=10.0, vfs=vfs)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if thorough:
                answer = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
                return None if answer == "ok" else answer
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return str(error)
        if not is_busy(error) and os.path.lexists(path):  # else another process has just moved it aside
            raise cannot_write(path, error) from error
    return None


def move_aside(path: Path, *, vfs: str | None = None, thorough: bool = False) -> bool:
    """Rename a damaged database, with its logs, and say so in one line; False if it turns out sound.

    Checked again under the lock: of several processes that met the damage, one
    moves it, and none moves the sound file that the first one made since.
    """
    with opening_lock(path):
        damage = damage_of(path, vfs=vfs, thorough=thorough)
        if damage is None:
            return False
        target = files.aside_name(path)
        os.rename(path, target)
        for suffix in SIBLINGS:
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{target}{suffix}")
        log.warning("%s is damaged (%s); moved to %s, going on with a new one", path, damage, target.name)
        return True
