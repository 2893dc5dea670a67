"""Checking what is kept: the database's pages, every row, every artifact. Nothing is changed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunekit import identity
from tunekit.model import Variant
from tunekit.store import files, lines, queries, rows, winner_lines
from tunekit.store.artifacts import ArtifactStore, NewerError, damage_of, read_manifest
from tunekit.store.readonly import Skipped, UnreadableError, environments, reading


@dataclass(frozen=True)
class Finding:
    """One thing that `verify` found. An ``error`` is damage; a ``warning`` is worth knowing."""

    severity: Literal["error", "warning"]
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.message}"


def verify(database: Path, artifacts: ArtifactStore | None = None) -> list[Finding]:
    """Check the database's pages, every row and every artifact's hash; nothing is changed."""
    findings: list[Finding] = []
    referenced: dict[str, str] = {}
    if os.path.lexists(database):
        findings += _trust(database)
        try:
            with reading(database, 10.0) as connection:
                findings += _check_database(connection, database)
                referenced = current_artifacts(connection)
        except UnreadableError as error:
            findings.append(Finding("error", str(database), str(error)))
    else:
        findings.append(Finding("warning", str(database), "there is no database"))
    if artifacts is not None and artifacts.root.is_dir():
        findings += _trust(artifacts.root)
        findings += _check_artifacts(artifacts, referenced)
    return findings


def verify_lines(path: Path) -> list[Finding]:
    """Check every line of an exported or shipped file."""
    findings: list[Finding] = []
    try:
        content = path.read_bytes()
    except OSError as error:
        return [Finding("error", str(path), f"can't be read: {error.strerror}")]
    for number, text in winner_lines.split(content):
        try:
            value = lines.parse_line(text).value
        except rows.RowError as error:
            findings.append(Finding("error", f"{path}:{number}", str(error)))
            continue
        variant = getattr(value, "variant", None)
        if isinstance(variant, Variant):
            findings += _check_variant(variant, f"{path}:{number}")
    return findings


def _trust(path: Path) -> Iterator[Finding]:
    for sentence in (files.world_writable(path), files.foreign_owner(path)):
        if sentence:
            yield Finding("warning", str(path), sentence)


def _check_database(connection: sqlite3.Connection, path: Path) -> Iterator[Finding]:
    for (answer,) in connection.execute("PRAGMA integrity_check(20)").fetchall():
        if answer != "ok":
            yield Finding("error", str(path), answer)
    for row in connection.execute("PRAGMA foreign_key_check").fetchall():
        yield Finding("error", f"{path} {row[0]} {row[1]}", f"refers to a row of {row[2]} that is not there")
    places = environments(connection, (row[0] for row in connection.execute("SELECT id FROM environments")))
    for number, place in places.items():
        if isinstance(place, rows.RowError):
            yield Finding("error", f"{path} environment {number}", str(place))
    for number, arguments in connection.execute("SELECT id, arguments FROM sweeps"):
        try:
            rows.parse(arguments, "arguments")
        except rows.RowError as error:
            yield Finding("error", f"{path} sweep {number}", str(error))
    yield from _check_rows(connection, path)


def _check_rows(connection: sqlite3.Connection, path: Path) -> Iterator[Finding]:
    """Findings for rows that don't parse, and for variants whose id is not that of their fields."""
    unreadable = Skipped()
    numbers = [row[0] for row in connection.execute("SELECT id FROM trials ORDER BY id")]
    for start in range(0, len(numbers), 500):
        part = numbers[start : start + 500]
        found = queries.rows_by_id(connection, "trials", part)
        for row, trial in queries.trials_of(connection, path, found, unreadable):
            yield from _check_variant(trial.variant, f"{path} trial {row['id']}")
    for row, winner in queries.winners_with_rows(connection, path, current=None, unreadable=unreadable):
        yield from _check_variant(winner.variant, f"{path} winner {row['id']}")
    for row, known in queries.known_bad_with_rows(connection, path, unreadable=unreadable):
        yield from _check_variant(known.variant, f"{path} known_bad {row['compile_key'][:12]}")
    for where, reason in unreadable.rows:
        yield Finding("error", f"{path} {where}", reason)


def _check_variant(variant: Variant, where: str) -> Iterator[Finding]:
    right = identity.variant(variant.spec, variant.version, variant.implementation, variant.arch, variant.tunables)
    if right.id != variant.id:
        yield Finding("warning", where, f"variant id {variant.id} is not that of its fields ({right.id})")


def _check_artifacts(artifacts: ArtifactStore, referenced: dict[str, str]) -> Iterator[Finding]:
    sound: set[str] = set()
    for key in artifacts.keys():  # noqa: SIM118 (a method, not a mapping's)
        manifest = artifacts.manifest(key)
        try:
            artifact = read_manifest(manifest.read_bytes(), key)
        except NewerError as error:
            yield Finding("warning", str(manifest), str(error))
            continue
        except (rows.RowError, OSError) as error:
            yield Finding("error", str(manifest), str(error))
            continue
        damaged = False
        for role in artifact.files:
            damage = damage_of(artifacts.path(artifact, role), str(artifact.files[role]))
            if damage:
                damaged = True
                yield Finding("error", str(artifacts.path(artifact, role)), damage)
        if not damaged:
            sound |= {key, *(str(value) for value in artifact.files.values())}
    for name, winner in referenced.items():
        if name not in sound:
            yield Finding("warning", winner, f"its artifact {name[:16]} is not here; it will be compiled when needed")


def current_artifacts(connection: sqlite3.Connection) -> dict[str, str]:
    """What the current winners refer to (compile keys, or content hashes), with the winner's name."""
    sql = "SELECT artifact, spec, arch, bucket FROM winners WHERE current = 1 AND artifact <> ''"
    return {row[0]: f"winner {row[1]} {row[2]} {row[3]}" for row in connection.execute(sql)}
