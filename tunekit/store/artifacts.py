"""Compiled kernels, addressed by what they contain.

    objects/ab/<sha-256>.<role>   the files; a name is the hash of the content
    keys/ab/<compile key>.json    which files a key has, its symbol and facts
    locks/ scratch/ quarantine/   who compiles what, unfinished work, moved aside

Each file is written under a scratch name, synced and renamed, the key last: a
reader sees all of an artifact or none. The hash is checked at every `get`; a
doubt is a miss. Nothing in here is unpickled or evaluated. Standard library
only, except for `lock`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunekit.errors import DatabaseError
from tunekit.model import Artifact, Footprint, Values
from tunekit.store import files, rows

log = logging.getLogger("tunekit")

FORMAT = 1
USE_S = 86400.0
KEY = re.compile(r"[0-9A-Za-z_-]{1,128}")
ROLE = re.compile(r"[a-z0-9_]{1,16}")
_HASH = re.compile(r"[0-9a-f]{64}")


class NewerError(rows.RowError):
    """A manifest of a later format: a miss, but left where it is."""


class NothingToKeep(DatabaseError):
    """A file to be stored is not there: whoever made it is at fault, not the store."""


class ArtifactStore:
    """The artifacts under one directory, shared by any number of processes.

    It may lie on read-only media or belong to another user (one warning line).
    One in which anybody may put files is refused: what is loaded from it runs.
    A `frozen` one is complete as it is, such as a bundle's: reading it writes nothing,
    and damage raises instead of being moved aside.
    """

    def __init__(self, root: Path, *, frozen: bool = False) -> None:
        self.root = Path(root)
        self.frozen = frozen
        self._trusted: str | None = None
        self._checked = False

    def refused(self) -> str | None:
        """Why nothing may be loaded from here, in a sentence; None if it may. Warns once of another owner."""
        if not self._checked and self.root.is_dir():
            self._checked = True
            self._trusted = files.world_writable(self.root)
            stranger = files.foreign_owner(self.root)
            if self._trusted:
                log.warning("artifacts are not used: %s", self._trusted)
            elif stranger:
                log.warning("%s; its kernels run with this process's rights", stranger)
        return self._trusted

    def unwritable(self) -> str | None:
        """Why nothing can be put here, in a sentence; None if it can."""
        if self.frozen:
            return f"{self.root} is only read"
        return self.refused() or files.unwritable(self.root)

    # -- reading

    def get(self, key: str) -> Artifact | None:
        """The artifact of a key, every file's hash checked; None if there is none.

        A damaged one is moved aside with one warning line, and is none.

        Raises:
            DatabaseError: a damaged one, where the store is frozen.
        """
        manifest = self.manifest(key)
        if self.refused() or not os.path.lexists(manifest):
            return None
        try:
            artifact = read_manifest(manifest.read_bytes(), key)
        except NewerError as error:
            log.warning("%s %s; it will be compiled again", manifest, error)
            return None
        except FileNotFoundError:
            return None  # collected meanwhile
        except (rows.RowError, OSError) as error:
            self._set_aside(manifest, str(error), key)
            return None
        for role in artifact.files:
            path = self.path(artifact, role)
            damage = damage_of(path, str(artifact.files[role]))
            if damage:
                self._set_aside(path, damage, key)
                return None
        self._note_use(manifest)
        return artifact

    def path(self, artifact: Artifact, role: str = "") -> Path:
        """Where an artifact's file of a role lies: of the one that is loaded, where none is named.

        Raises:
            DatabaseError: it has no such file.
        """
        role = role or artifact.role
        if role not in artifact.files:
            raise DatabaseError(f"artifact {artifact.key} has no {role} (it has: {', '.join(artifact.files)})")
        return self._object(str(artifact.files[role]), role)

    def keys(self) -> list[str]:
        """All keys that have a manifest, sound or not."""
        return sorted(path.stem for path in self.root.glob("keys/*/*.json"))

    # -- writing

    def put(
        self,
        key: str,
        symbol: str,
        files_by_role: Mapping[str, Path],
        *,
        footprint: Footprint = Footprint(),  # noqa: B008 (frozen)
        facts: Values = Values(),
        seconds: Values = Values(),
    ) -> Artifact:
        """Publish the files of a key, in place of what it had; the files given are copied.

        Raises:
            NothingToKeep: a file given can't be read.
            DatabaseError: the store can't be written or is refused, or a name is not one.
        """
        manifest = self.manifest(key)
        refused = self.unwritable() if self.frozen else self.refused()
        if refused:
            raise DatabaseError(f"can't keep artifacts: {refused}")
        contents: dict[str, bytes] = {}
        for role, source in files_by_role.items():
            try:
                contents[role] = Path(source).read_bytes()
            except OSError as error:
                raise NothingToKeep(f"can't read {source}: {error.strerror}") from error
        try:
            scratch = self._directory("scratch")
            hashes: dict[str, str] = {}
            for role, content in contents.items():
                hashes[role] = hashlib.sha256(content).hexdigest()
                target = self._object(hashes[role], role)
                files.publish(content, target, scratch, 0o755 if role == "so" else 0o644)
            artifact = Artifact(key, symbol, Values(hashes), footprint, facts, seconds)
            files.publish(manifest_bytes(artifact), manifest, scratch)
        except OSError as error:
            where = error.filename or self.root
            raise DatabaseError(f"can't keep the artifact of {key}: {where}: {error.strerror}") from error
        except rows.RowError as error:
            raise DatabaseError(f"can't keep the artifact of {key}: {error}") from error
        return artifact

    @contextlib.contextmanager
    def lock(self, key: str, timeout_s: float = -1) -> Iterator[bool]:
        """Held by the one process that compiles `key`; the others wait, then find it with `get`.

        Yields whether it is held: False after `timeout_s` (negative: no limit) or
        where no lock file can be made; going on without costs a compile that is
        done twice, never a wrong artifact. The kernel drops a dead holder's lock.
        Look with `get` again once inside.
        """
        import filelock  # here: 45 ms, and readers don't need it

        self.manifest(key)
        try:
            path = self._directory("locks", key[:2]) / f"{key}.lock"
            held = filelock.FileLock(path, timeout=timeout_s)
            held.acquire()
        except (filelock.Timeout, OSError):
            yield False
            return
        try:
            yield True
        finally:
            held.release()

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for one compile's results, on this file system; gone afterwards."""
        if self.frozen:
            raise DatabaseError(f"{self.root} is only read")
        try:
            directory = self._directory("scratch", files.fresh_name())
        except OSError as error:
            raise DatabaseError(f"can't write {self.root}: {error.strerror}") from error
        try:
            with files.used(directory):
                yield directory
        finally:
            import shutil  # here: it takes 3 ms, and who only reads needs none

            shutil.rmtree(directory, ignore_errors=True)

    # -- places

    def manifest(self, key: str) -> Path:
        """Where the manifest of a key lies, whether it is there or not."""
        if not KEY.fullmatch(key):
            raise DatabaseError(f"{key!r} is no artifact key (letters, digits, - and _)")
        return self.root / "keys" / key[:2] / f"{key}.json"

    def _object(self, content_hash: str, role: str) -> Path:
        if not ROLE.fullmatch(role):
            raise DatabaseError(f"{role!r} is no file role (lower-case letters, digits and _)")
        return self.root / "objects" / content_hash[:2] / f"{content_hash}.{role}"

    def _note_use(self, manifest: Path) -> None:
        """Keep what is used from being collected: a manifest's date is that of its last use, to the day."""
        if self.frozen:
            return
        with contextlib.suppress(OSError):
            if time.time() - manifest.stat().st_mtime > USE_S:
                os.utime(manifest)

    def _directory(self, *parts: str) -> Path:
        directory = self.root.joinpath(*parts)
        if not directory.is_dir():
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _set_aside(self, path: Path, damage: str, key: str) -> None:
        """Move a damaged file to the quarantine and say so in one line.

        Another process may have published a sound file at the same name since;
        then that one was moved, and goes back.
        """
        if self.frozen:
            raise DatabaseError(f"artifact {key} is damaged ({path}: {damage})")
        try:
            target = self._directory("quarantine") / files.aside_name(path).name
            os.rename(path, target)
        except FileNotFoundError:
            log.warning("artifact %s is incomplete (%s: %s); it will be compiled again", key, path.name, damage)
            return
        except OSError as error:
            log.warning("artifact %s is damaged (%s: %s) and can't be moved aside (%s)", key, path, damage, error)
            return
        sound = self._sound(path, target, key)
        if sound:
            with contextlib.suppress(OSError):
                os.link(target, path)
            with contextlib.suppress(OSError):
                target.unlink()
            return
        log.warning("artifact %s is damaged (%s); %s moved to %s", key, damage, path.name, target)

    def _sound(self, path: Path, moved: Path, key: str) -> bool:
        if path.suffix == ".json":
            try:
                read_manifest(moved.read_bytes(), key)
            except NewerError:
                return True
            except (rows.RowError, OSError):
                return False
            return True
        return damage_of(moved, path.stem) is None


def damage_of(path: Path, content_hash: str) -> str | None:
    """What is wrong with a file whose SHA-256 should be `content_hash`; None if nothing."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"{error.strerror}"
    if hashlib.sha256(content).hexdigest() == content_hash:
        return None
    return "zero length" if not content else f"the hash of its {len(content)} bytes is another"


def manifest_bytes(artifact: Artifact) -> bytes:
    """A manifest: the artifact's fields as JSON, with a hash over them.

    Raises:
        rows.RowError: NaN or infinity in it.
    """
    rows.seconds(artifact.seconds)
    body = rows.parse(rows.dump(artifact, "artifact"), "artifact")
    return json.dumps({"format": FORMAT, "sha256": _hash_of(body), **body}, indent=1, ensure_ascii=False).encode()


def _hash_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(content: bytes, key: str) -> Artifact:
    """The artifact that a manifest describes.

    Raises:
        rows.RowError: it is damaged, or another key's.
        NewerError: a later format.
    """
    if not content:
        raise rows.RowError("zero length")
    plain = rows.parse_object(content, "manifest")
    version = plain.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise NewerError(f"has format {version}, this tunekit reads {FORMAT}")
    body = {name: value for name, value in plain.items() if name not in ("format", "sha256")}
    if _hash_of(body) != plain.get("sha256"):
        raise rows.RowError("manifest does not match its hash")
    if body.get("key") != key:
        raise rows.RowError(f"manifest is that of {body.get('key')!r}")
    try:
        artifact = Artifact(
            key=key,
            symbol=rows.text(body["symbol"], "symbol"),
            files=Values(body["files"]),
            footprint=Footprint(**body["footprint"]),
            facts=Values(body["facts"]),
            seconds=Values(body["seconds"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise rows.RowError(f"manifest lacks or misnames a field ({error})") from None
    for role, content_hash in artifact.files.items():
        if not ROLE.fullmatch(role) or not _HASH.fullmatch(str(content_hash)):
            raise rows.RowError(f"manifest names file {role!r} with hash {content_hash!r}")
    return artifact
