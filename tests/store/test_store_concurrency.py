"""Many processes at once: nothing is lost, nothing is done twice, nobody waits for the dead."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import threading
import time

import pytest
from store_values import fork, fork_waiting, make_trial, make_winner, wait, wait_all

from tunekit.errors import DatabaseError
from tunekit.model import Values
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.store.winners import read_winners


def test_32_processes_start_on_an_absent_database(database):
    """Case 29: 32 processes start on an absent database and write 20 results each: 640 rows, no error."""

    def write(process: int) -> None:
        with Store.open(database) as store:
            for number in range(20):
                store.record(make_trial(process * 20 + number, samples=(1.5, 2.5)))

    children = [fork(lambda process=process: write(process)) for process in range(32)]
    assert wait_all(children) == [0] * 32
    with Store.open(database) as store:
        trials = store.trials()
    assert len(trials) == 640
    assert len({trial.compile_key for trial in trials}) == 640
    assert all(trial.outcome.samples_us == (1.5, 2.5) for trial in trials)
    assert not list(database.parent.glob("*.new-*")) and not list(database.parent.glob("*.damaged-*"))


def test_16_processes_on_one_artifact_key(tmp_path):
    """Case 26: 16 processes x 50 rounds on one key, each with another content: every read's hash is right."""
    root = tmp_path / "artifacts"
    key = "k" * 64

    def work(process: int) -> None:
        store = ArtifactStore(root)
        source = tmp_path / f"{process}.so"
        for turn in range(50):
            content = f"{process} {turn}".encode() * 1000
            source.write_bytes(content)
            mine = store.put(key, f"symbol_{process}_{turn}", {"so": source})
            assert store.path(mine).read_bytes() == content
            found = store.get(key)
            assert found is not None
            read = store.path(found).read_bytes()
            assert hashlib.sha256(read).hexdigest() == found.files.so
            assert found.symbol == "symbol_{}_{}".format(*read[: len(read) // 1000].decode().split())

    children = [fork(lambda process=process: work(process)) for process in range(16)]
    assert wait_all(children) == [0] * 16
    assert not list(root.glob("scratch/*")) and not list(root.glob("quarantine/*"))


def test_8_processes_with_one_cold_key_compile_it_once(tmp_path, kernel):
    """Case 34: 8 processes, one cold key: one compile, and all of them load the same artifact."""
    root, log = tmp_path / "artifacts", tmp_path / "compiles"
    key = "c" * 64

    def work() -> None:
        store = ArtifactStore(root)
        if store.get(key) is None:
            with store.lock(key) as held:
                assert held
                if store.get(key) is None:
                    with log.open("a") as file:
                        file.write(f"{os.getpid()}\n")
                    time.sleep(0.3)
                    store.put(key, "symbol", kernel(b"from anybody"))
        found = store.get(key)
        assert found is not None and store.path(found).read_bytes() == b"sofrom anybody"

    children = [fork(work) for _ in range(8)]
    assert wait_all(children) == [0] * 8
    assert len(log.read_text().splitlines()) == 1


def test_a_dead_holder_of_a_key_blocks_nobody(tmp_path):
    """Case 34: the holder of a key's lock is killed in mid-compile; the next one has it at once."""
    store = ArtifactStore(tmp_path / "artifacts")
    reading, writing = os.pipe()

    def hold() -> None:
        with store.lock("abc"):
            os.write(writing, b"!")
            time.sleep(60)

    child = fork(hold)
    assert os.read(reading, 1) == b"!"
    with store.lock("abc", timeout_s=0.1) as held:
        assert not held, "it is held by a living process"
    with store.lock("other", timeout_s=1) as held:
        assert held, "another key is free"
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    start = time.monotonic()
    with store.lock("abc", timeout_s=10) as held:
        assert held
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("vfs", [None, "unix-dotfile"], ids=["write-ahead", "rollback journal"])
def test_readers_and_vacuum_during_a_sweep(database, vfs):
    """Case 30: a reader holds a transaction open, another process runs VACUUM: the sweep goes on, nothing is lost."""
    choice = f"&vfs={vfs}" if vfs else ""

    def vacuum() -> None:
        other = sqlite3.connect(f"{database.as_uri()}?mode=rw{choice}", uri=True, timeout=30)
        for _ in range(3):
            other.execute("VACUUM")
            time.sleep(0.02)

    child, start = fork_waiting(vacuum)
    with Store.open(database, vfs=vfs) as store:
        assert store.journal_mode == ("delete" if vfs else "wal")
        for number in range(50):
            store.record(make_trial(number, samples=[1.0] * 20))
        uri = f"{database.as_uri()}?mode=ro{choice}"
        reader = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM trials").fetchone() == (50,)
        if vfs:  # a rollback journal can't commit beside a reader: it waits until that one is done
            threading.Timer(0.7, lambda: (reader.execute("ROLLBACK"), reader.close())).start()
        start()
        for number in range(50, 80):
            store.record(make_trial(number))
        assert wait(child) == 0
        assert len(store.trials()) == 80
        if not vfs:
            assert reader.execute("SELECT count(*) FROM trials").fetchone() == (50,), "its own moment's contents"
            reader.close()


def test_a_writer_that_never_ends_is_named_after_a_bounded_wait(database):
    """Case 30: busy is retried for a bounded time, then one clear error; the store works again afterwards."""
    with Store.open(database, busy_s=0.3) as store:
        other = sqlite3.connect(database, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        start = time.monotonic()
        with pytest.raises(DatabaseError, match=r"locked by another process for 0\.3 s"):
            store.record(make_trial())
        assert time.monotonic() - start < 5
        assert store.trials() == []
        other.execute("ROLLBACK")
        store.record(make_trial())
        assert len(store.trials()) == 1


def test_readers_never_see_half_a_winner(database):
    """While winners are replaced all the time, a reader finds exactly one, whole."""
    with Store.open(database) as store:
        store.put_winner(make_winner(0))

    def replace() -> None:
        with Store.open(database) as mine:
            for number in range(60):
                mine.put_winner(make_winner(number, tied=tuple(str(number) for _ in range(50))))

    children = [fork(replace) for _ in range(2)]
    while any(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for child in children):
        found = read_winners(database, "fmha", "sm_90a")
        assert len(found) == 1
        assert found[0].bucket == Values(head_dim=128, s_k=2048)
    assert wait_all(children) == [0, 0]
