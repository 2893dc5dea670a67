"""The schema, as the steps that led to it.

A step is a small function of a ``sqlite_utils.Database``; `user_version` counts
the steps taken. Steps are only ever appended: a released one never changes.
Two tables are plain SQL because sqlite-utils can't declare a CHECK, and SQLite
stores NaN as NULL and takes any text for a number. STRICT tables would do, but
a SQLite before 3.37 then calls the whole file malformed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tunekit.errors import DatabaseError
from tunekit.store.rows import ENVIRONMENT_COLUMNS, FOOTPRINT_COLUMNS

APPLICATION_ID = 0x54554E45  # "TUNE": whose file this is
Step = Callable[[Any], None]

_VARIANT = {"spec": str, "version": int, "implementation": str, "arch": str, "variant": str, "tunables": str}

_VARIANT_SQL = (
    "spec TEXT NOT NULL, version INTEGER NOT NULL, implementation TEXT NOT NULL, arch TEXT NOT NULL,"
    " variant TEXT NOT NULL, tunables TEXT NOT NULL"
)


def _text(names: str) -> dict[str, type]:
    return dict.fromkeys(names.split(), str)


def sweeps_and_environments(db: Any) -> None:
    db["sweeps"].create(
        {"id": int, "version": int, "pid": int, **_text("uid spec arch arguments state started_at finished_at host")},
        pk="id",
        not_null={"uid", "spec", "version", "arch", "arguments", "state", "started_at"},
    )
    db["sweeps"].create_index(["uid"], unique=True)
    columns = {name: float if name == "power_limit_w" else str for name in ENVIRONMENT_COLUMNS}
    db["environments"].create({"id": int, "digest": str, "comparable": str, **columns}, pk="id", not_null={"digest"})
    db["environments"].create_index(["digest"], unique=True)


def trials(db: Any) -> None:
    db["trials"].create(
        {
            **dict.fromkeys(("id", "sweep", "environment", "peak_rss_bytes"), int),
            **_VARIANT,
            **_text("uid recorded_at problem problem_key compile_key stage status reason protocol seconds artifact"),
        },
        pk="id",
        not_null={"uid", "recorded_at", "environment", *_VARIANT, "problem", "compile_key", "stage", "status"},
        foreign_keys=[("sweep", "sweeps", "id"), ("environment", "environments", "id")],
    )
    db["trials"].create_index(["uid"], unique=True)
    db["trials"].create_index(["compile_key", "stage"])
    db["trials"].create_index(["spec", "arch", "stage"])
    db["trials"].create_index(["sweep"])
    db["compile_facts"].create(
        {"trial": int, **dict.fromkeys(FOOTPRINT_COLUMNS, int), "facts": str},
        pk="trial",
        not_null={"facts"},
        foreign_keys=[("trial", "trials", "id")],
    )
    db.execute(
        "CREATE TABLE samples (trial INTEGER NOT NULL REFERENCES trials(id), position INTEGER NOT NULL,"
        " us REAL NOT NULL CHECK (typeof(us) = 'real' AND us > 0 AND us < 9e99), PRIMARY KEY (trial, position))"
        " WITHOUT ROWID"
    )


def winners(db: Any) -> None:
    db.execute(
        "CREATE TABLE winners (id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, recorded_at TEXT NOT NULL,"
        " current INTEGER NOT NULL CHECK (current IN (0, 1)), environment INTEGER NOT NULL REFERENCES environments(id),"
        f" environment_key TEXT NOT NULL, {_VARIANT_SQL}, problem TEXT NOT NULL, bucket TEXT NOT NULL,"
        " bucket_key TEXT NOT NULL, protocol TEXT NOT NULL, artifact TEXT NOT NULL, symbol TEXT NOT NULL,"
        " median_us REAL NOT NULL CHECK (typeof(median_us) = 'real' AND median_us > 0 AND median_us < 9e99),"
        " spread_us REAL NOT NULL CHECK (typeof(spread_us) = 'real' AND spread_us >= 0 AND spread_us < 9e99),"
        " samples INTEGER NOT NULL CHECK (samples > 0), runner_up TEXT, margin REAL, confidence REAL,"
        " method TEXT NOT NULL, tied TEXT NOT NULL, source TEXT NOT NULL)"
    )
    # One current winner a key; the replaced ones stay as history.
    db.execute(
        "CREATE UNIQUE INDEX current_winners ON winners"
        " (spec, arch, version, bucket_key, environment_key, protocol) WHERE current = 1"
    )


def known_bad(db: Any) -> None:
    db["known_bad"].create(
        {
            **_text("compile_key recorded_at status reason phase"),
            **_VARIANT,
            "seconds": float,
            "peak_rss_bytes": int,
            "signal": int,
        },
        pk="compile_key",
        not_null={"recorded_at", *_VARIANT, "status", "reason", "phase", "seconds"},
    )


def windows(db: Any) -> None:
    """What the GPU did during each timed window, as JSON."""
    db["trials"].add_column("windows", str)


def libraries(db: Any) -> None:
    """Of a winner that is a library's function: the package and its version."""
    db["winners"].add_column("library", str)


def decisions(db: Any) -> None:
    """Of a winner: how its final ended, after how many rounds, which final, and how many cases verified it."""
    for name, kind in (("outcome", str), ("rounds", int), ("cases", int), ("final", str)):
        db["winners"].add_column(name, kind)


STEPS: tuple[Step, ...] = (sweeps_and_environments, trials, winners, known_bad, windows, libraries, decisions)


def check_ours(db: Any, path: object, steps: Sequence[Step] = STEPS) -> int:
    """The schema version of a database, once it is known that this tunekit may write to it.

    Raises:
        DatabaseError: the file belongs to another application, or to a newer tunekit.
    """
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    owner = db.execute("PRAGMA application_id").fetchone()[0]
    if owner != APPLICATION_ID and (owner or db.table_names()):
        raise DatabaseError(f"{path} is another application's database; name another file with --db or TUNEKIT_DB")
    if version > len(steps):
        raise DatabaseError(
            f"{path} has schema {version}, this tunekit knows up to {len(steps)}: upgrade tunekit,"
            " or name another file with --db or TUNEKIT_DB (nothing was changed)"
        )
    return version


def migrate(db: Any, path: object, steps: Sequence[Step] = STEPS) -> None:
    """Take the steps that a database lacks, all in the open transaction or none.

    Raises:
        DatabaseError: as `check_ours`.
    """
    version = check_ours(db, path, steps)
    for step in steps[version:]:
        step(db)
    if version < len(steps):
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {len(steps)}")
