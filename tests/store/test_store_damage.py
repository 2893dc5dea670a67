"""Damage, strangers and newer versions: one line, nothing deleted, and the run goes on."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import sqlite3

import pytest
from store_values import H200, fork, make_bad, make_trial, make_winner, wait_all, warnings_of

from tunekit.errors import DatabaseError
from tunekit.store import connection, readonly, rows, rows_of_trials, writing
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store, read_records
from tunekit.store.migrations import APPLICATION_ID, STEPS
from tunekit.store.winners import read_winners

RANDOM = random.Random(27)


def truncated(size):
    def damage(path):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2 if size == "half" else size])

    return damage


def replaced(content):
    return lambda path: path.write_bytes(content)


def as_directory(path):
    path.unlink()
    path.mkdir()
    (path / "something").write_text("of the user's")


DAMAGE = {
    "truncated to 0": truncated(0),
    "truncated to 1": truncated(1),
    "truncated to 100": truncated(100),
    "truncated to half": truncated("half"),
    "random bytes": replaced(RANDOM.randbytes(50_000)),
    "a text file": replaced(b"lr = 0.1\n" * 1000),
    "a directory": as_directory,
}


def full(database):
    with Store.open(database) as store:
        for number in range(50):
            store.record(make_trial(number, samples=[1.0] * 100))
        store.put_winner(make_winner())
    assert not list(database.parent.glob("*-wal"))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_database_is_moved_aside(database, damage, caplog):
    """Case 27: the database truncated at 0, 1, 100 bytes and half, random bytes, a text file, a directory:
    a reader has one warning line and a miss; a writer has one, moves it aside and goes on."""
    full(database)
    damage(database)
    assert read_winners(database, "fmha", "sm_90a") == []
    assert len(warnings_of(caplog)) == 1 and str(database) in warnings_of(caplog)[0]
    with pytest.raises(DatabaseError, match=r"tunekit\.db"):
        read_records(database)
    caplog.clear()
    with Store.open(database) as store:
        store.record(make_trial(7))
        assert store.trials() == [make_trial(7)]
    (aside,) = (p for p in database.parent.glob("tunekit.db.damaged-*") if not p.name.endswith(("-wal", "-shm")))
    assert len(warnings_of(caplog)) == 1
    assert aside.name in warnings_of(caplog)[0] and "\n" not in warnings_of(caplog)[0]
    caplog.clear()
    with Store.open(database) as store:
        assert len(store.trials()) == 1
    assert not caplog.records


def test_8_processes_meet_the_same_damage(database):
    """Case 27: one of them moves it aside, none moves the new one, no row is lost."""
    full(database)
    database.write_bytes(b"damage" * 1000)

    def work() -> None:
        with Store.open(database) as store:
            for number in range(5):
                store.record(make_trial(number))

    assert wait_all([fork(work) for _ in range(8)]) == [0] * 8
    with Store.open(database) as store:
        assert len(store.trials()) == 40
    assert len(list(database.parent.glob("tunekit.db.damaged-*"))) == 1


def test_another_process_moves_the_damage_first(database, monkeypatch):
    """Case 27: the file is gone between the look at it and its opening; a new one is made, and no error."""
    full(database)
    connect = connection.connect

    def late(path, **how):
        monkeypatch.setattr(connection, "connect", connect)
        os.rename(path, path.with_name("elsewhere.db"))
        return connect(path, **how)

    monkeypatch.setattr(connection, "connect", late)
    with Store.open(database) as store:
        assert store.trials() == []


def test_damage_that_shows_in_mid_run(database, caplog):
    """Case 27: pages overwritten while the store is open: moved aside, the trial in flight goes to the new one."""
    full(database)
    with Store.open(database) as store:
        store.read(lambda c: c.execute("PRAGMA cache_size = 0"))
        size = database.stat().st_size
        with database.open("r+b") as file:
            file.seek(4096)
            file.write(RANDOM.randbytes(size - 4096))
        store.record(make_trial(3))
        assert store.trials()[-1] == make_trial(3)
        store.put_winner(make_winner(3))
        assert store.winners() == [make_winner(3)]
    assert len(warnings_of(caplog)) == 1


def test_a_database_removed_in_mid_run(database):
    full(database)
    with Store.open(database) as store:
        shutil.rmtree(database.parent)
        store.record(make_trial(3))
        assert store.trials() == [make_trial(3)]


def test_a_log_without_its_database_is_not_replayed_into_a_new_one(database):
    database.parent.mkdir()
    wal = database.parent / "tunekit.db-wal"
    wal.write_bytes(RANDOM.randbytes(10_000))
    with Store.open(database) as store:
        store.record(make_trial())
        assert store.trials() == [make_trial()]
    assert len(list(database.parent.glob("tunekit.db-wal.damaged-*"))) == 1


def test_a_user_s_directory_is_not_moved(tmp_path):
    """A slip like --db ~/project names a directory that is no database: refused, untouched."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.py").write_text("print()")
    with pytest.raises(DatabaseError, match="is a directory; name a file"):
        Store.open(project)
    assert (project / "main.py").exists() and len(list(tmp_path.iterdir())) == 1


def test_what_is_no_regular_file_is_neither_read_nor_moved(tmp_path, caplog):
    """`--db /dev/null`, a pipe, a link to nowhere: one clear sentence; nothing blocks, and nothing is renamed."""
    pipe, dangling, null = tmp_path / "pipe.db", tmp_path / "dangling.db", tmp_path / "null.db"
    os.mkfifo(pipe)
    dangling.symlink_to(tmp_path / "nowhere" / "t.db")
    null.symlink_to("/dev/null")
    for path in (pipe, dangling, null):
        with pytest.raises(DatabaseError, match=path.name):
            Store.open(path)
        caplog.clear()
        assert read_winners(path, "fmha", "sm_90a") == []
        assert len(warnings_of(caplog)) == 1
        assert path.is_symlink() or path.is_fifo()
    assert len(list(tmp_path.iterdir())) == 3 and os.path.exists("/dev/null")


def test_a_link_to_itself_is_moved_aside(tmp_path, caplog):
    loop = tmp_path / "loop.db"
    loop.symlink_to(loop)
    assert read_winners(loop, "fmha", "sm_90a") == []
    with Store.open(loop) as store:
        assert store.winners() == []
    assert loop.is_file() and sum("damaged" in line for line in warnings_of(caplog)) == 1


@pytest.mark.parametrize("place", ["file/t.db", "file/deeper/t.db", "x" * 300 + ".db"])
def test_a_place_where_no_database_can_be_is_one_clear_error(tmp_path, place):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(DatabaseError, match=r"can't write .*--db or TUNEKIT_DB"):
        Store.open(tmp_path / place)
    assert read_winners(tmp_path / place, "fmha", "sm_90a") == []


def test_another_application_s_database_is_refused(tmp_path):
    path = tmp_path / "places.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url)")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="another application's"):
        Store.open(path)
    assert path.read_bytes() == before
    assert read_winners(path, "fmha", "sm_90a") == []


def test_a_newer_schema_is_a_miss_and_nothing_is_deleted(database, caplog):
    """Case 23: a database of a newer schema: readers have one line and a miss, writers one clear error."""
    full(database)
    with sqlite3.connect(database) as connection:
        connection.execute(f"PRAGMA user_version = {len(STEPS) + 3}")
    connection.close()
    before = database.read_bytes()
    assert read_winners(database, "fmha", "sm_90a") == []
    assert len(warnings_of(caplog)) == 1 and f"schema {len(STEPS) + 3}" in warnings_of(caplog)[0]
    with pytest.raises(DatabaseError, match=f"schema {len(STEPS) + 3}, this tunekit knows up to {len(STEPS)}: upgrade"):
        Store.open(database)
    assert database.read_bytes() == before
    assert not list(database.parent.glob("*.damaged-*"))


@pytest.mark.parametrize("table", ["winners", "environments"])
def test_a_row_with_an_unknown_newer_field_is_a_miss_later_healed(database, caplog, table):
    """Case 23: one clear line, a miss; a new winner heals it; nothing is deleted."""
    with Store.open(database) as store:
        store.put_winner(make_winner(1))
        store.record(make_trial(1))
        store.execute(lambda db: db.execute(f"ALTER TABLE {table} ADD COLUMN nvlink TEXT"))
        store.execute(lambda db: db.execute(f"UPDATE {table} SET nvlink = 'v7'"))
        for read in (lambda: read_winners(database, "fmha", "sm_90a"), store.winners):
            caplog.clear()
            assert read() == []
            assert len(warnings_of(caplog)) == 1 and "unknown field 'nvlink'" in warnings_of(caplog)[0]
        healed = make_winner(2, environment=dataclasses.replace(H200, torch="2.14.0"))
        store.put_winner(healed)
        caplog.clear()
        assert read_winners(database, "fmha", "sm_90a") == store.winners() == [healed]
        assert not caplog.records
        count = "SELECT count(*) FROM winners"
        assert store.read(lambda c: c.execute(count).fetchone()) == (2,)


@pytest.mark.parametrize("fields", [{"driver": None}, {"gpu": None}, {"gpu": None, "driver": None}])
def test_a_winner_of_no_gpu_or_driver_is_a_miss(database, caplog, fields):
    """Case 23: NULL driver or GPU: can't be compared with anything: one clear line, a miss, later healed."""
    with Store.open(database) as store:
        store.put_winner(make_winner(1, environment=dataclasses.replace(H200, **fields)))
        assert read_winners(database, "fmha", "sm_90a") == []
        assert [m for m in warnings_of(caplog) if "names no" in m] == warnings_of(caplog) and len(
            warnings_of(caplog)
        ) == 1
        store.put_winner(make_winner(2))
        caplog.clear()
        assert read_winners(database, "fmha", "sm_90a") == [make_winner(2)]
        assert not caplog.records, "healed: it is history now"
        count = "SELECT count(*) FROM winners"
        assert store.read(lambda c: c.execute(count).fetchone()) == (2,), "nothing is deleted"


@pytest.mark.parametrize(
    "change", ["status = 'molten'", "tunables = '[1]'", "seconds = '{\"a\": NaN}'", "problem = 'x'"]
)
def test_an_unreadable_trial_is_left_out_with_one_line(database, caplog, change):
    """Case 23: two of five rows can't be read (a status of a newer version, broken JSON): the other three are."""
    with Store.open(database) as store:
        for number in range(5):
            store.record(make_trial(number))
        store.execute(lambda db: db.execute(f"UPDATE trials SET {change} WHERE id IN (2, 4)"))
        assert [t.variant.tunables.kv_stage for t in store.trials()] == [0, 2, 4]
        assert len(warnings_of(caplog)) == 1 and "skipped 2 rows" in warnings_of(caplog)[0]


def test_nothing_stored_is_ever_unpickled_or_evaluated(database, tmp_path, caplog):
    """Case 32: rows that would run if anything evaluated them are data, and a miss."""
    mark = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    pickled = f"cos\nsystem\n(S'touch {mark}'\ntR."
    with Store.open(database) as store:
        store.record(make_trial(1, reason=code))
        store.put_winner(make_winner(1))
        for text in (code, pickled):
            store.execute(lambda db, text=text: db.execute("UPDATE winners SET tunables = ?, tied = ?", (text, text)))
            assert store.winners() == [] and read_winners(database, "fmha", "sm_90a") == []
        assert store.trials()[0].outcome.reason == code
    assert not mark.exists()


def test_migrations_take_the_missing_steps_once(database):
    """An older database gains what it lacks, in one transaction; a step that fails changes nothing."""
    with Store.open(database, steps=STEPS) as store:
        store.record(make_trial())

    def add(db):
        db["trials"].add_column("node", str)

    def fail(db):
        db["trials"].add_column("rack", str)
        raise sqlite3.OperationalError("no space")

    with pytest.raises(DatabaseError, match="no space"):
        Store.open(database, steps=(*STEPS, add, fail))
    with Store.open(database) as store:
        assert store.trials() == [make_trial()]

    def work() -> None:
        with Store.open(database, steps=(*STEPS, add)) as mine:
            mine.record(make_trial(1))

    assert wait_all([fork(work) for _ in range(6)]) == [0] * 6
    with Store.open(database, steps=(*STEPS, add)) as store:
        assert len(store.trials()) == 7
        assert store.read(lambda c: c.execute("PRAGMA user_version").fetchone()) == (len(STEPS) + 1,)


def test_an_older_schema_is_read_where_it_cannot_be_migrated(database):
    """Read-only media may hold a database that was never migrated: readers take what it has."""
    with Store.open(database, steps=STEPS[:4]) as store:
        row = rows_of_trials.trial_row(make_trial())
        row |= {"uid": "u", "recorded_at": "2026-01-01T00:00:00Z", "problem_key": "x"}
        del row["windows"]
        store.execute(lambda db: db["trials"].insert({**row, "environment": writing.environment_id(db, H200)}))
        won = {**rows.winner_row(make_winner()), **writing.winner_key(make_winner()), "uid": "w", "current": 1}
        won["recorded_at"] = row["recorded_at"]
        for later in ("library", "outcome", "rounds", "cases", "final"):
            del won[later]
        store.execute(lambda db: db["winners"].insert({**won, "environment": writing.environment_id(db, H200)}))
    before = database.read_bytes()
    assert read_winners(database, "fmha", "sm_90a") == [make_winner()]
    (trial,) = read_records(database).trials
    assert trial.variant == make_trial().variant and trial.outcome.windows == ()
    assert database.read_bytes() == before
    with Store.open(database) as store:
        store.record(make_trial(samples=(1.0,)))
        assert len(store.trials()) == 2


def test_the_reader_knows_the_schema_that_the_migrations_make():
    assert len(STEPS) == readonly.SCHEMA
    assert readonly.APPLICATION_ID == APPLICATION_ID


# -- artifacts


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


ARTIFACT_DAMAGE = {
    "zero length": truncated(0),
    "truncated to 1": truncated(1),
    "truncated to half": truncated("half"),
    "a flipped byte": flipped,
    "random bytes": replaced(RANDOM.randbytes(5000)),
    "a text file": replaced(b"hello\n"),
    "a directory": as_directory,
}


@pytest.mark.parametrize("part", ["so", "ptx", "manifest"])
@pytest.mark.parametrize("damage", ARTIFACT_DAMAGE.values(), ids=ARTIFACT_DAMAGE)
def test_a_damaged_artifact_is_a_miss(tmp_path, kernel, damage, part, caplog):
    """Case 27: an artifact of zero length or with a flipped byte: a miss, moved aside, one line; made again, a hit."""
    store = ArtifactStore(tmp_path / "artifacts")
    made = kernel(b"x" * 1000)
    artifact = store.put("abc", "symbol", made)
    assert store.get("abc") == artifact
    path = store.manifest("abc") if part == "manifest" else store.path(artifact, part)
    damage(path)
    assert store.get("abc") is None
    assert len(warnings_of(caplog)) == 1 and "abc" in warnings_of(caplog)[0]
    assert len(list(store.root.glob("quarantine/*"))) == 1 and not path.exists()
    caplog.clear()
    assert store.put("abc", "symbol", made) == store.get("abc") == artifact
    assert not caplog.records


def test_a_newer_artifact_is_a_miss_and_stays(tmp_path, kernel, caplog):
    """Case 23: a manifest of a later format: one line, a miss, nothing moved or deleted."""
    store = ArtifactStore(tmp_path / "artifacts")
    artifact = store.put("abc", "symbol", kernel())
    manifest = store.manifest("abc")
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    before = manifest.read_bytes()
    assert store.get("abc") is None
    assert len(warnings_of(caplog)) == 1 and "format 2" in warnings_of(caplog)[0]
    assert manifest.read_bytes() == before and store.path(artifact).exists()


def test_an_artifact_comes_back_with_its_facts(tmp_path, kernel):
    trial = make_trial()
    store = ArtifactStore(tmp_path / "artifacts")
    outcome = trial.outcome
    facts = {"footprint": outcome.footprint, "facts": outcome.facts, "seconds": outcome.seconds}
    artifact = store.put(trial.compile_key, "symbol", kernel(), **facts)
    again = ArtifactStore(tmp_path / "artifacts")
    assert again.get(trial.compile_key) == artifact
    assert again.keys() == [trial.compile_key]
    assert again.path(artifact).suffix == ".so" and os.access(again.path(artifact), os.R_OK)
    with pytest.raises(DatabaseError, match="has no cubin"):
        again.path(artifact, "cubin")
    for key in ("../etc", "", "a/b", "ключ", "x" * 129):
        with pytest.raises(DatabaseError, match="no artifact key"):
            again.get(key)
    with pytest.raises(DatabaseError, match="not a finite number"):
        again.put("x", "symbol", kernel(), seconds=outcome.seconds.merged({"ptxas": float("nan")}))
    assert again.get("x") is None and make_bad().compile_key


def test_a_full_disk_is_one_clear_error_and_loses_nothing_earlier(database):
    """Case 27's neighbour: no space left: a sentence, the transaction undone whole; with space again it goes on."""
    with Store.open(database) as store:
        store.record(make_trial(0))
        pages = store.read(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
        store.read(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone())
        with pytest.raises(DatabaseError, match=r"can't write .*full"):
            store.record(make_trial(1, samples=[1.0] * 10_000))
        assert store.trials() == [make_trial(0)]
        store.read(lambda c: c.execute("PRAGMA max_page_count = 1000000").fetchone())
        store.record(make_trial(2))
        assert store.trials() == [make_trial(0), make_trial(2)]
