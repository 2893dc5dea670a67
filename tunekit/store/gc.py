"""Freeing space: what nothing refers to, unfinished work, and what was moved aside long ago."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tunekit.errors import DatabaseError
from tunekit.store import files, rows
from tunekit.store.artifacts import ArtifactStore, read_manifest
from tunekit.store.readonly import UnreadableError, reading
from tunekit.store.verify import current_artifacts

DAY_S = 86400.0
# What a sweep has just published and is about to record, whatever age the caller allows.
YOUNG_S = 3600.0


@dataclass(frozen=True)
class Collected:
    """What `gc` removed (or would, in a dry run), and how many bytes that freed."""

    removed: tuple[Path, ...]
    freed_bytes: int
    kept: int


def _references(database: Path, since: str) -> set[str]:
    """Every artifact that a current winner, or a trial recorded since, refers to by key or content hash."""
    with reading(database, 10.0) as connection:
        names = set(current_artifacts(connection))
        sql = "SELECT compile_key, artifact FROM trials WHERE recorded_at >= ?"
        for row in connection.execute(sql, (since,)):
            names |= {row[0], row[1]} - {None}
        return names


def gc(
    databases: list[Path],
    artifacts: ArtifactStore,
    *,
    older_than_days: float = 30.0,
    dry_run: bool = False,
    now_s: float | None = None,
) -> Collected:
    """Remove what nothing refers to and that is older than `older_than_days`, and than an hour in any case.

    Kept whatever its age: each artifact of a current winner of any of
    `databases`. Kept while young: artifacts that trials refer to or that were
    published lately, unfinished scratch work, what was moved aside (also beside
    the databases), idle lock files. Kept while in use: scratch work of any process.

    Raises:
        DatabaseError: a database can't be read, so what it refers to isn't known: nothing is removed.
    """
    present = time.time() if now_s is None else now_s
    horizon = present - max(older_than_days * DAY_S, YOUNG_S)
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(horizon))
    referenced: set[str] = set()
    for database in databases:
        if os.path.lexists(database):
            try:
                referenced |= _references(database, since)
            except UnreadableError as error:
                raise DatabaseError(f"{database} {error}; nothing was removed") from error
    reason = artifacts.unwritable()
    if reason and not dry_run:
        raise DatabaseError(f"can't clean up: {reason}")
    doomed, kept = _unreferenced(artifacts, referenced, horizon)
    root = artifacts.root
    for pattern in ("scratch/*", "quarantine/*", "locks/*/*.lock"):
        doomed += [path for path in root.glob(pattern) if _older(path, horizon) and not files.in_use(path)]
    for database in databases:
        pattern = f"{database.name}*{files.ASIDE_MARK}*"
        doomed += [path for path in database.parent.glob(pattern) if _older(path, horizon)]
    freed = sum(_size(path) for path in doomed)
    if not dry_run:
        for path in doomed:
            _remove(path)
    return Collected(tuple(doomed), freed, kept)


def _unreferenced(artifacts: ArtifactStore, referenced: set[str], horizon: float) -> tuple[list[Path], int]:
    """Manifests, then objects, that nothing needs; and how many artifacts stay."""
    doomed: list[Path] = []
    kept = 0
    needed: set[str] = set()
    for key in artifacts.keys():  # noqa: SIM118 (a method, not a mapping's)
        manifest = artifacts.manifest(key)
        try:
            artifact = read_manifest(manifest.read_bytes(), key)
        except (rows.RowError, OSError):
            kept += 1  # damage is for `get` to move aside; a newer format for a newer tunekit
            needed |= _hashes_in(manifest)
            continue
        hashes = {str(value) for value in artifact.files.values()}
        if ({key} | hashes) & referenced or not _older(manifest, horizon):
            kept += 1
            needed |= hashes
        else:
            doomed.append(manifest)
    for path in artifacts.root.glob("objects/*/*"):
        if path.stem not in needed and path.stem not in referenced and _older(path, horizon):
            doomed.append(path)
    return doomed, kept


def _hashes_in(manifest: Path) -> set[str]:
    """Whatever looks like a content hash in a manifest that can't be read: its objects stay."""
    with contextlib.suppress(OSError):
        return set(re.findall(r"[0-9a-f]{64}", manifest.read_text(errors="replace")))
    return set()


def _older(path: Path, horizon: float) -> bool:
    try:
        return path.lstat().st_mtime < horizon
    except OSError:
        return False


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            return sum(_size(child) for child in path.iterdir())
        return path.lstat().st_size
    return 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
