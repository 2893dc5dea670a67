"""The recorded winners, for lookups: read-only, standard library only, milliseconds."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunekit.model import Environment, Winner
from tunekit.store.readonly import Skipped, UnreadableError, environments, reading
from tunekit.store.rows import RowError, winner_of
from tunekit.store.standing import missing_identity

log = logging.getLogger("tunekit")


def read_winners(database: Path, spec: str, arch: str, *, version: int | None = None) -> list[Winner]:
    """The current winners of a spec on an architecture, oldest first, of one spec `version` or of all.

    Never raises for what it finds: a damaged, newer or forbidden database is an
    empty list and one warning line, a row that can't be judged (an unknown newer
    field, no GPU or driver) is left out with one. No database is no winners, silently.
    """
    if not os.path.lexists(database):
        return []
    skipped = Skipped()
    found: list[Winner] = []
    try:
        with reading(database) as connection:
            sql = "SELECT * FROM winners WHERE spec = ? AND arch = ? AND current = 1 ORDER BY id"
            rows = [dict(row) for row in connection.execute(sql, (spec, arch))]
            places = environments(connection, (row["environment"] for row in rows))
    except (UnreadableError, RowError) as error:
        log.warning("%s %s; no recorded winner is used", database, error)
        return []
    for row in rows:
        winner = skipped.attempt(f"winner {row.get('id')}", _winner, row, places)
        if winner is not None and version in (None, winner.variant.version):
            found.append(winner)
    skipped.warn(database)
    return found


def winners_mark(database: Path, spec: str) -> tuple[int, ...] | None:
    """What is another when other winners of a spec are current; None where that can't be told."""
    try:
        with reading(database) as connection:
            sql = "SELECT count(*), total(id), max(id) FROM winners WHERE spec = ? AND current = 1"
            return tuple(int(value or 0) for value in connection.execute(sql, (spec,)).fetchone())
    except UnreadableError:
        return None


def _winner(row: Mapping[str, Any], places: Mapping[int, Environment | RowError]) -> Winner:
    place = places[row["environment"]]
    if isinstance(place, RowError):
        raise place
    lacking = missing_identity(place, row["arch"])
    if lacking:
        raise RowError(lacking)
    return winner_of(row, place)
