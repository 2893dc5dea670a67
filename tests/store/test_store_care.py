"""`verify` finds every damage; `gc` removes what nothing needs, and never what something does."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest
from store_values import fork, make_bad, make_trial, make_winner, wait_all

from tunekit.errors import DatabaseError
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.store.gc import gc
from tunekit.store.verify import verify

DAY_S = 86400.0


@pytest.fixture
def artifacts(tmp_path):
    return ArtifactStore(tmp_path / "cache" / "artifacts")


def test_a_sound_store_has_no_findings(database, artifacts, kernel):
    artifacts.put("abc", "symbol", kernel())
    with Store.open(database) as store:
        store.start_sweep("fmha", 1, "sm_90a", {})
        store.record(make_trial(samples=(1.0,)))
        store.put_winner(make_winner(1, artifact="abc"))
        store.put_winner(make_winner(2, artifact="abc"))
        store.remember_bad(make_bad())
        assert verify(database, artifacts) == []


CORRUPTIONS = {
    "UPDATE trials SET status = 'molten' WHERE id = 2": "trial 2",
    "UPDATE trials SET tunables = '{}' WHERE id = 2": "trial 2",
    "UPDATE trials SET environment = 77 WHERE id = 2": "trials 2",
    "UPDATE winners SET tied = 'x' WHERE id = 1": "winner 1",
    "UPDATE winners SET confidence = 7 WHERE id = 2": "winner 2",
    "UPDATE known_bad SET status = 'odd'": "known_bad",
    "UPDATE sweeps SET arguments = '{'": "sweep 1",
    "UPDATE environments SET power_limit_w = 'much'": "environment 1",
}


@pytest.mark.parametrize("change", CORRUPTIONS, ids=lambda text: text[7:40])
def test_each_broken_row_is_found(database, change):
    with Store.open(database) as store:
        store.start_sweep("fmha", 1, "sm_90a", {})
        for number in range(3):
            store.record(make_trial(number))
        store.put_winner(make_winner(1, artifact=""))
        store.put_winner(make_winner(2, artifact=""))
        store.remember_bad(make_bad())
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(change)
    connection.close()
    before = database.read_bytes()
    findings = verify(database)
    assert any(CORRUPTIONS[change] in finding.where for finding in findings), findings
    assert database.read_bytes() == before


def test_damaged_pages_artifacts_and_missing_ones_are_found(database, artifacts, kernel):
    with Store.open(database) as store:
        for number in range(200):
            store.record(make_trial(number))
        store.put_winner(make_winner(artifact="f" * 64))
    broken = artifacts.put("broken", "symbol", kernel(b"1"))
    artifacts.path(broken).write_bytes(b"")
    artifacts.put("torn", "symbol", kernel(b"2"))
    artifacts.manifest("torn").write_bytes(b"{")
    artifacts.put("sound", "symbol", kernel(b"3"))
    found = {(f.severity, f.where): f.message for f in verify(database, artifacts)}
    assert found[("error", str(artifacts.path(broken)))] == "zero length"
    assert ("error", str(artifacts.manifest("torn"))) in found
    assert [where for severity, where in found if severity == "warning"] == [
        'winner fmha sm_90a {"head_dim":128,"s_k":2048}'
    ]
    assert len(found) == 3
    with database.open("r+b") as file:
        file.seek(database.stat().st_size // 2)
        file.write(b"\xff" * 8192)
    assert any(f.severity == "error" and str(database) in f.where for f in verify(database))
    database.write_bytes(b"text")
    assert [f.severity for f in verify(database)] == ["error"]
    database.unlink()
    assert [f.severity for f in verify(database)] == ["warning"]


def test_gc_keeps_what_is_referenced_and_removes_the_rest(database, artifacts, kernel):
    """Winners' artifacts stay for ever, by key or by content hash; trials' while young; the rest goes when old."""
    made = {
        name: artifacts.put(name, name, kernel(name.encode())) for name in ("winner", "hash", "tried", "free", "old")
    }
    shared = artifacts.put("twin", "twin", kernel(b"winner"))
    assert shared.files == made["winner"].files
    with Store.open(database) as store:
        store.put_winner(make_winner(1, artifact="old"))
        store.put_winner(make_winner(1, artifact="winner"))
        store.put_winner(make_winner(2, artifact=made["hash"].files.so, protocol="other"))
        store.record(make_trial(compile_key="tried"))
        scratch = artifacts.root / "scratch" / "left"
        scratch.mkdir()
        (scratch / "kernel.o").write_bytes(b"x" * 1000)
        artifacts.path(artifacts.put("bad", "bad", kernel(b"bad"))).write_bytes(b"")
        assert artifacts.get("bad") is None
        with artifacts.lock("idle"):
            pass
        aside = database.with_name("tunekit.db.damaged-20200101T000000Z-1-abc")
        aside.write_bytes(b"old")
        notes = database.with_name("notes.txt")
        notes.write_text("mine")

        young = gc([database], artifacts)
        assert young.removed == () and young.freed_bytes == 0 and young.kept == 7

        soon = time.time() + 20 * DAY_S
        dry = gc([database], artifacts, older_than_days=10, now_s=soon, dry_run=True)
        assert dry.removed and all(path.exists() for path in dry.removed)
        # In 20 days the trial of today is older than 10 days too, so `tried` goes; in 5 it stays.
        names = {path.stem for path in dry.removed if path.parent.parent.name == "keys"}
        assert names == {"tried", "free", "old", "bad", "twin"}
        mixed = gc([database], artifacts, older_than_days=10, now_s=time.time() + 5 * DAY_S, dry_run=True)
        assert mixed.removed == ()

        done = gc([database], artifacts, older_than_days=10, now_s=soon)
        assert done.removed == dry.removed and done.freed_bytes == dry.freed_bytes > 1000
        assert not any(path.exists() for path in done.removed)
        assert not scratch.exists() and not aside.exists() and notes.exists()
        assert artifacts.get("winner") == made["winner"], "its files stay, though its twin is gone"
        assert artifacts.get("hash") == made["hash"]
        assert artifacts.keys() == ["hash", "winner"]
        assert gc([database], artifacts, older_than_days=10, now_s=soon).removed == ()
        assert len(store.trials()) == 1


def test_gc_keeps_young_trials_artifacts(database, artifacts, kernel):
    artifacts.put("tried", "tried", kernel())
    artifacts.put("free", "free", kernel(b"2"))
    old = time.time() - 100 * DAY_S
    for path in artifacts.root.rglob("*"):
        os.utime(path, (old, old))
    with Store.open(database) as store:
        store.record(make_trial(compile_key="tried"))
        gc([database], artifacts, older_than_days=30)
    assert artifacts.keys() == ["tried"]


def test_use_keeps_an_artifact_from_being_collected(database, artifacts, kernel):
    """A default variant that is served daily has no winner's row: reading it dates it anew."""
    artifacts.put("served", "served", kernel(b"1"))
    artifacts.put("unused", "unused", kernel(b"2"))
    old = time.time() - 100 * DAY_S
    for path in artifacts.root.rglob("*"):
        os.utime(path, (old, old))
    assert artifacts.get("served") is not None
    gc([database], artifacts, older_than_days=30)
    assert artifacts.get("served") is not None and artifacts.get("unused") is None


def test_gc_removes_nothing_where_it_cannot_know(database, artifacts, kernel):
    """A newer or damaged database may refer to anything: one clear error, nothing removed."""
    artifacts.put("abc", "symbol", kernel())
    with Store.open(database) as store:
        store.execute(lambda db: db.execute("PRAGMA user_version = 99"))
    for content in (database.read_bytes(), b"text"):
        database.write_bytes(content)
        with pytest.raises(DatabaseError, match="nothing was removed"):
            gc([database], artifacts, older_than_days=0, now_s=time.time() + DAY_S)
        assert artifacts.get("abc") is not None


def test_gc_spares_what_a_process_works_in(database, artifacts, kernel):
    """However old and whatever age is given: a long compile's directory and lock, and what was just published."""
    with Store.open(database), artifacts.scratch() as directory, artifacts.lock("busy") as held:
        assert held
        artifacts.put("fresh", "fresh", kernel())
        (directory / "kernel.c").write_bytes(b"x")
        old = time.time() - 100 * DAY_S
        for pattern in ("scratch/*", "locks/*/*"):
            for path in artifacts.root.glob(pattern):
                os.utime(path, (old, old))
        assert gc([database], artifacts, older_than_days=0).removed == ()
        assert directory.is_dir()


def test_gc_beside_compiles(database, artifacts, kernel, tmp_path):
    """What is being published is young: gc beside 4 writers removes none of it."""
    with Store.open(database) as store:
        store.record(make_trial())

    def publish(process: int) -> None:
        mine = ArtifactStore(artifacts.root)
        for number in range(20):
            source = tmp_path / f"{process}.bin"
            source.write_bytes(b"%d" % number)
            key = f"{process}-{number}"
            mine.put(key, "symbol", {"so": source})
            assert mine.get(key) is not None

    def collect() -> None:
        for _ in range(20):
            assert gc([database], ArtifactStore(artifacts.root), older_than_days=0.01).removed == ()

    works = [collect, *(lambda p=p: publish(p) for p in range(4))]
    assert wait_all([fork(work) for work in works]) == [0] * 5
    assert len(artifacts.keys()) == 80


def test_a_place_that_takes_no_files_is_told_at_once():
    """Case 31: /proc answers as if the directory were gone, which is no lock held by another process."""
    started = time.monotonic()
    with pytest.raises(DatabaseError, match=r"can't write /proc/t\.db: .*; name another file with --db"):
        Store.open(Path("/proc/t.db"))
    assert time.monotonic() - started < 5
