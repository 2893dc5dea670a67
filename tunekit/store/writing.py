"""The inserts, each inside a transaction that the caller opened."""

from __future__ import annotations

from typing import Any

from tunekit.identity import digest
from tunekit.model import Environment, Values, Winner
from tunekit.store import rows, rows_of_trials
from tunekit.store.standing import comparable, is_gpu, missing_identity
from tunekit.trials import Trial

CHUNK = 500


def values_key(values: Values) -> str:
    """The key that values are looked up by: the order of the names doesn't count, the types do."""
    return digest(values)[:24]


def comparable_key(environment: Environment) -> str:
    """The key of all environments whose measured times may be compared."""
    return digest(comparable(environment))[:24]


def environment_id(db: Any, environment: Environment) -> int:
    """The row of an environment, inserted if it is new."""
    row = rows.environment_row(environment)
    name = digest(row)
    known = db.execute("SELECT id FROM environments WHERE digest = ?", (name,)).fetchone()
    if known:
        return int(known[0])
    comparable = comparable_key(environment)
    return int(db["environments"].insert({"digest": name, "comparable": comparable, **row}).last_pk)


def insert_trial(db: Any, trial: Trial, *, uid: str, recorded_at: str) -> int:
    """A trial with its compile facts and samples; its row id.

    Raises:
        rows.RowError: something in it may not be stored.
    """
    row = rows_of_trials.trial_row(trial)
    facts = rows_of_trials.facts_row(trial.outcome)
    samples = rows_of_trials.samples_of(trial.outcome.samples_us)
    row |= {"uid": uid, "recorded_at": recorded_at, "sweep": trial.sweep, "problem_key": values_key(trial.problem)}
    row["environment"] = environment_id(db, trial.environment)
    number = int(db["trials"].insert(row).last_pk)
    if facts is not None:
        db["compile_facts"].insert({"trial": number, **facts})
    if samples:
        lines = [(number, position, us) for position, us in enumerate(samples)]
        db.conn.executemany("INSERT INTO samples (trial, position, us) VALUES (?, ?, ?)", lines)
    return number


def winner_key(winner: Winner) -> dict[str, Any]:
    """The columns of which each combination has one current winner.

    Raises:
        rows.RowError: the winner may not be stored.
    """
    row = rows.winner_row(winner)
    return {
        **{name: row[name] for name in ("spec", "arch", "version", "protocol")},
        "bucket_key": values_key(winner.bucket),
        "environment_key": comparable_key(winner.environment),
    }


def _retire_unplaced(db: Any, key: dict[str, Any]) -> None:
    """Make history of a bucket's winners that name no GPU or driver: nothing can be compared with them."""
    same = ("spec", "arch", "version", "bucket_key")
    where = " AND ".join(f"{name} = ?" for name in same)
    nowhere = "SELECT id FROM environments WHERE gpu IS NULL OR driver IS NULL"
    sql = f"UPDATE winners SET current = 0 WHERE current = 1 AND {where} AND environment IN ({nowhere})"
    db.execute(sql, [key[name] for name in same])


def insert_winner(db: Any, winner: Winner, *, uid: str, recorded_at: str, current: bool = True) -> None:
    """A winner, as the current one of its key (whose earlier one becomes history) or as history itself.

    Raises:
        rows.RowError: something in it may not be stored.
    """
    key = winner_key(winner)
    if current:
        where = " AND ".join(f"{name} = ?" for name in key)
        db.execute(f"UPDATE winners SET current = 0 WHERE current = 1 AND {where}", list(key.values()))
        if is_gpu(winner.variant.arch) and missing_identity(winner.environment, winner.variant.arch) is None:
            _retire_unplaced(db, key)
    place = environment_id(db, winner.environment)
    held = {"uid": uid, "recorded_at": recorded_at, "current": int(current), "environment": place}
    db["winners"].insert({**rows.winner_row(winner), **key, **held})
