"""Caches that can't be written, or shouldn't be trusted."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from store_values import fork, make_trial, make_winner, wait, warnings_of

from tunekit.errors import DatabaseError
from tunekit.settings import load_settings
from tunekit.store import files
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store, read_records
from tunekit.store.exchange import export_lines
from tunekit.store.gc import gc
from tunekit.store.verify import verify
from tunekit.store.winners import read_winners

NOBODY = 65534


@pytest.fixture
def cache(kernel):
    """A complete cache that others may read but nobody may write; made where another user can reach it."""
    root = Path(tempfile.mkdtemp(prefix="tunekit-test-"))
    root.chmod(0o755)
    with Store.open(root / "cache" / "tunekit.db") as store:
        store.record(make_trial())
        store.put_winner(make_winner(artifact="abc"))
    ArtifactStore(root / "cache" / "artifacts").put("abc", "symbol", kernel())
    for directory, _, names in os.walk(root / "cache"):
        os.chmod(directory, 0o555)
        for name in names:
            os.chmod(Path(directory) / name, 0o444)
    yield root / "cache"
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o755)
    shutil.rmtree(root)


def as_another_user(work, user: int = NOBODY) -> int:
    """Run `work` in a child that can't override permissions (root can), without a home."""

    def run() -> None:
        os.environ.pop("HOME", None)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        work()

    return wait(fork(run))


def collected() -> list[str]:
    """Collect the child's warnings: its logging is its own."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("tunekit").addHandler(Collect(logging.WARNING))
    return lines


def test_a_complete_cache_on_read_only_media_is_served(cache):
    """Case 31: mode 0555, another owner, HOME absent: all is read, without a warning; nothing is written."""
    before = sorted(cache.rglob("*"))

    def read() -> None:
        said = collected()
        assert read_winners(cache / "tunekit.db", "fmha", "sm_90a") == [make_winner(artifact="abc")]
        store = ArtifactStore(cache / "artifacts")
        artifact = store.get("abc")
        assert artifact is not None and store.path(artifact).read_bytes() == b"sokernel"
        with store.lock("abc", timeout_s=1) as held:
            assert not held, "no lock can be made; that keeps nobody from going on"
        assert read_records(cache / "tunekit.db").trials == [make_trial()]
        assert len(list(export_lines(cache / "tunekit.db"))) == 2
        assert verify(cache / "tunekit.db", store) == []
        assert said == [], said

    assert as_another_user(read) == 0
    assert sorted(cache.rglob("*")) == before


def test_a_sweep_says_plainly_that_it_cannot_write(cache):
    """Case 31: opening for writing, putting and collecting each give one clear sentence with the way out."""

    def write() -> None:
        for path in (cache / "tunekit.db", cache / "new.db", cache / "deeper" / "new.db"):
            with pytest.raises(DatabaseError, match=r"can't write .*permission.*--db or TUNEKIT_DB"):
                Store.open(path)
        store = ArtifactStore(cache / "artifacts")
        assert "no permission to write" in (store.unwritable() or "")
        source = cache / "tunekit.db"
        with pytest.raises(DatabaseError, match="Permission denied"):
            store.put("new", "symbol", {"so": source})
        with pytest.raises(DatabaseError, match="no permission"):
            gc([cache / "tunekit.db"], store)
        with pytest.raises(DatabaseError, match="can't write"), store.scratch():
            pass

    assert as_another_user(write) == 0


def test_a_damaged_artifact_on_read_only_media_is_a_miss(cache):
    """Cases 27 and 31: it can't be moved aside; one line says so, and it is a miss."""
    store = ArtifactStore(cache / "artifacts")
    path = store.path(store.get("abc"))
    path.chmod(0o644)
    path.write_bytes(b"damage")
    path.chmod(0o444)

    def read() -> None:
        said = collected()
        assert ArtifactStore(cache / "artifacts").get("abc") is None
        assert len(said) == 1 and "can't be moved aside" in said[0]

    assert as_another_user(read) == 0


def test_a_write_ahead_log_left_on_read_only_media(cache):
    """Case 31: the writer was killed before its log was folded in, then the media became read-only: read anyway."""
    root = cache.parent / "killed"
    reading, writing = os.pipe()

    def write() -> None:
        store = Store.open(root / "tunekit.db")
        store.put_winner(make_winner(3))
        os.write(writing, b"!")
        os.kill(os.getpid(), 9)

    assert wait(fork(write)) == -9 and os.read(reading, 1)
    assert (root / "tunekit.db-wal").stat().st_size > 0
    for path in (*root.iterdir(), root):
        path.chmod(0o555)

    def read() -> None:
        assert read_winners(root / "tunekit.db", "fmha", "sm_90a") == [make_winner(3)]

    assert as_another_user(read) == 0


def test_a_log_that_cannot_be_read_is_said(cache):
    """Case 31: a log that was copied without its shared memory can't be read on read-only media: one line says so."""
    log_file = cache / "tunekit.db-wal"
    cache.chmod(0o755)
    log_file.write_bytes(b"x" * 100)
    cache.chmod(0o555)

    def read() -> None:
        said = collected()
        assert len(read_winners(cache / "tunekit.db", "fmha", "sm_90a")) == 1
        assert len(said) == 1 and "tunekit.db-wal can't be read" in said[0]

    assert as_another_user(read) == 0


def test_an_unreadable_database_is_a_miss(cache, caplog):
    secret = cache / "tunekit.db"
    secret.chmod(0o000)

    def read() -> None:
        said = collected()
        assert read_winners(secret, "fmha", "sm_90a") == []
        assert len(said) == 1 and str(secret) in said[0]

    assert as_another_user(read) == 0


def test_artifacts_that_anybody_may_write_are_refused(tmp_path, kernel, caplog):
    """Case 32: a world-writable artifact directory: what lies in it would run, so it is refused in one line."""
    root = tmp_path / "artifacts"
    ArtifactStore(root).put("abc", "symbol", kernel())
    for directory in (root, tmp_path):
        directory.chmod(0o777)
        store = ArtifactStore(root)
        assert store.get("abc") is None and store.get("abc") is None
        assert len(warnings_of(caplog)) == 1 and f"chmod o-w {directory}" in warnings_of(caplog)[0]
        assert "writable by everybody" in (store.unwritable() or "")
        with pytest.raises(DatabaseError, match="writable by everybody"):
            store.put("abc", "symbol", kernel())
        directory.chmod(0o755)
        caplog.clear()
    assert ArtifactStore(root).get("abc") is not None
    tmp_path.chmod(0o1777)  # like /tmp: nobody may replace another's directory
    assert ArtifactStore(root).get("abc") is not None
    tmp_path.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_another_user_s_cache_is_warned_of(tmp_path, kernel, caplog):
    """Case 32: a cache directory of another user is read, with a warning line each for database and artifacts."""
    database, root = tmp_path / "theirs" / "tunekit.db", tmp_path / "theirs" / "artifacts"
    with Store.open(database) as store:
        store.put_winner(make_winner())
    ArtifactStore(root).put("abc", "symbol", kernel())
    for path in (database, root, database.parent):
        os.chown(path, NOBODY, NOBODY)
    with Store.open(database):
        pass
    store = ArtifactStore(root)
    assert store.get("abc") is not None and store.get("abc") is not None
    assert len(warnings_of(caplog)) == 2
    assert all(f"belongs to user {NOBODY}" in line for line in warnings_of(caplog))
    assert {finding.severity for finding in verify(database, store)} == {"warning"}


def test_a_world_writable_database_directory_is_warned_of(tmp_path, caplog):
    """Case 32: a database is data and runs nothing: one warning line, and it is used."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    with Store.open(shared / "tunekit.db") as store:
        store.record(make_trial())
    assert len(warnings_of(caplog)) == 1 and "writable by everybody" in warnings_of(caplog)[0]
    shared.chmod(0o1777)  # like /tmp: nobody may replace another's file
    caplog.clear()
    with Store.open(shared / "tunekit.db"):
        assert not caplog.records
    (shared / "tunekit.db").chmod(0o666)
    with Store.open(shared / "tunekit.db"):
        assert len(warnings_of(caplog)) == 1


def test_what_is_made_is_private(tmp_path):
    with Store.open(tmp_path / "new" / "tunekit.db"):
        pass
    store = ArtifactStore(tmp_path / "fresh" / "artifacts")
    with store.scratch() as scratch:
        assert scratch.is_dir()
    assert not scratch.exists()
    for directory in (tmp_path / "new", store.root):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_write_ahead_refused_falls_back_and_says_so(database, caplog):
    """Case 33: a VFS without shared memory refuses write-ahead logging: SQLite's answer is believed, one line says so,
    and many processes still lose nothing."""

    def work() -> None:
        with Store.open(database, vfs="unix-dotfile") as mine:
            for number in range(5):
                mine.record(make_trial(number))

    with Store.open(database, vfs="unix-dotfile") as store:
        assert store.journal_mode == "delete"
        assert len(warnings_of(caplog)) == 1 and "SQLite answered 'delete'" in warnings_of(caplog)[0]
    children = [fork(work) for _ in range(4)]
    assert [wait(child) for child in children] == [0] * 4
    with Store.open(database, vfs="unix-dotfile") as store:
        assert len(store.trials()) == 20


def test_a_network_file_system_gets_no_write_ahead_log(tmp_path, database, caplog, monkeypatch):
    """Case 33: on NFS SQLite may answer 'wal', but hosts don't see each other's log: the mount decides."""
    with Store.open(database) as store:
        assert store.journal_mode == "wal"
        store.record(make_trial())
    monkeypatch.setattr(files, "network_file_system", lambda path: "nfs4")
    with Store.open(database) as store:
        assert store.journal_mode == "delete"
        assert store.trials() == [make_trial()]
    assert len(warnings_of(caplog)) == 1 and "nfs4 is a network file system" in warnings_of(caplog)[0]


def test_the_file_system_type_is_that_of_the_nearest_mount(tmp_path):
    mounts = tmp_path / "mounts"
    home = tmp_path.resolve()
    spaced = str(home / "my data").replace(" ", "\\040")
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nfs:/x {home} nfs4 rw 0 0\n/dev/b {spaced} xfs rw 0 0\nodd\n")
    assert files.network_file_system(home / "x.db", mounts) == "nfs4"
    assert files.network_file_system(home / "my data" / "x.db", mounts) is None
    assert files.network_file_system(Path("/elsewhere"), mounts) is None
    assert files.network_file_system(Path("/elsewhere"), tmp_path / "absent") is None


def test_no_home_at_all_gives_an_absolute_private_cache(monkeypatch):
    """Case 31: HOME absent and no entry in the user database: never a directory called ~ in the working directory."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> None:
        settings = load_settings({})
        for path in (settings.database, settings.artifacts):
            assert path.is_absolute() and "~" not in str(path), path

    assert as_another_user(homeless, user=4242) == 0
    assert load_settings({"TUNEKIT_CACHE": "/x"}).database == Path("/x/tunekit.db")
