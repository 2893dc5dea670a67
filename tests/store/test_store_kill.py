"""SIGKILL at any point: at most the trial in flight is lost, and the next run goes on from there."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time

import pytest
from store_values import fork, make_trial, make_winner, wait

from tunekit.store import connection, files
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.store.verify import verify
from tunekit.trials import Stage, Status

DIE = signal.SIGKILL


def die_at(statement: int, store: Store) -> None:
    """Kill this process when SQLite begins its n-th statement from now."""
    seen = 0

    def count(_sql: str) -> None:
        nonlocal seen
        seen += 1
        if seen == statement:
            os.kill(os.getpid(), DIE)

    store.read(lambda c: c.set_trace_callback(count))


def sound(database) -> bool:
    return sqlite3.connect(database).execute("PRAGMA integrity_check").fetchone() == ("ok",) and not verify(database)


def test_killed_anywhere_in_recording_a_trial(database):
    """Case 28: killed at each statement of a trial's transaction: all of the trial is there, or nothing of it."""
    with Store.open(database) as store:
        store.record(make_trial(0))
    ends = []
    for statement in range(1, 100):

        def work(at=statement) -> None:
            with Store.open(database) as mine:
                die_at(at, mine)
                mine.record(make_trial(at, samples=(1.0, 2.0, 3.0)))

        ends.append(wait(fork(work)))
        assert sound(database)
        if ends[-1] == 0:
            break
    assert ends[-1] == 0 and len(ends) > 5, "it was killed at several points, and at last not at all"
    with Store.open(database) as store:
        trials = store.trials()
    assert trials[0] == make_trial(0)
    assert len(trials) == 2, "only the one that was not killed before its commit"
    assert trials[-1].outcome.samples_us == (1.0, 2.0, 3.0)


def test_killed_before_and_during_a_winner_s_write(database):
    """Case 28: killed before and at each statement of the winner's write: the earlier one or the new one, whole."""
    with Store.open(database) as store:
        store.put_winner(make_winner(0))
    for statement in range(1, 100):

        def work(at=statement) -> None:
            with Store.open(database) as mine:
                die_at(at, mine)
                mine.put_winner(make_winner(at))

        end = wait(fork(work))
        assert sound(database)
        with Store.open(database) as store:
            found = store.winners()
        if end == 0:
            assert found == [make_winner(statement)]
            break
        assert end == -DIE
        assert found == [make_winner(0)]
    assert end == 0 and statement > 3


def test_killed_after_benchmark_k_the_next_run_resumes_at_k_plus_1(database):
    """Case 28: a sweep killed again and again, at or soon after some result: each run does only what `done` doesn't
    know; what a run said to be recorded is recorded; in the end 30 are there, none twice."""
    keys = [f"{number:064x}" for number in range(30)]

    def sweep(report: int) -> None:
        with Store.open(database) as store:
            number = store.start_sweep("fmha", 1, "sm_90a", {})
            finished = store.done(Stage.MEASURE, keys)
            for index, key in enumerate(keys):
                if key not in finished:
                    store.record(make_trial(index, stage=Stage.MEASURE, samples=(1.0 + index,), sweep=number))
                    os.write(report, bytes([index]))
            store.finish_sweep(number, "done")

    chance = random.Random(28)
    told: set[int] = set()
    kills, end = 0, -DIE
    while end != 0:
        reading, writing = os.pipe()
        child = fork(lambda report=writing: sweep(report))
        os.close(writing)
        for _ in range(chance.randint(1, 6)):
            told |= set(os.read(reading, 1))
        time.sleep(chance.uniform(0.0, 0.01))
        os.kill(child, DIE)
        end = wait(child)
        while more := os.read(reading, 64):
            told |= set(more)
        os.close(reading)
        kills += end == -DIE
        with Store.open(database) as store:
            kept = [int(trial.compile_key, 16) for trial in store.trials()]
        assert told <= set(kept) and kept == list(range(len(kept)))
        assert len(kept) - len(told) <= kills, "each kill left one at most that was recorded and not yet said"
    assert kept == list(range(30)) and kills > 2
    with Store.open(database) as store:
        sweeps = store.sweeps()
        assert sweeps[0].state == "done" and len(sweeps) == kills + 1
        assert {s.state for s in sweeps} <= {"done", "running"}
        assert not any(s.alive for s in sweeps)


@pytest.mark.parametrize("call", ["rename", "replace", "link", "fsync", "mkdir"])
def test_killed_while_the_database_is_made(database, call):
    """Case 28: killed at each step of making the database: the next process makes it, without a complaint."""
    for nth in range(1, 4):

        def work(nth=nth) -> None:
            real, seen = getattr(os, call), 0

            def fatal(*arguments, **options):
                nonlocal seen
                seen += 1
                if seen == nth:
                    os.kill(os.getpid(), DIE)
                return real(*arguments, **options)

            setattr(os, call, fatal)
            with Store.open(database) as store:
                store.record(make_trial())

        wait(fork(work))
        with Store.open(database) as store:
            store.record(make_trial())
            assert store.trials()
        assert not list(database.parent.glob("*.damaged-*"))
        for path in database.parent.iterdir():
            path.unlink()


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "mkdir"])
def test_killed_while_an_artifact_is_published(tmp_path, kernel, call, caplog):
    """Case 28: killed at each step of `put`: the artifact is whole or absent, and putting it again works."""
    store = ArtifactStore(tmp_path / "artifacts")
    made = kernel(b"x" * 10_000)
    deaths = 0
    for nth in range(1, 20):

        def work(nth=nth) -> None:
            real, seen = getattr(os, call), 0

            def fatal(*arguments, **options):
                nonlocal seen
                seen += 1
                if seen == nth:
                    os.kill(os.getpid(), DIE)
                return real(*arguments, **options)

            setattr(os, call, fatal)
            store.put(f"key{call}{nth}", "symbol", made)

        end = wait(fork(work))
        deaths += end == -DIE
        found = store.get(f"key{call}{nth}")
        assert (found is not None) if end == 0 else (found is None or store.path(found).exists())
        assert store.put(f"key{call}{nth}", "symbol", made) == store.get(f"key{call}{nth}")
        if end == 0:
            break
    assert end == 0
    assert deaths > 0 or call == "mkdir", "Python 3.10's pathlib took its mkdir when it was imported"
    assert not caplog.records


def test_killed_while_damage_is_moved_aside(database, caplog):
    """Case 28 with 27: killed between moving a damaged database aside and making a new one."""
    with Store.open(database) as store:
        store.record(make_trial())
    database.write_bytes(b"not a database at all" * 100)

    def work() -> None:
        connection.create = lambda *a, **k: os.kill(os.getpid(), DIE)
        Store.open(database)

    assert wait(fork(work)) == -DIE
    with Store.open(database) as store:
        store.record(make_trial(status=Status.OK))
        assert len(store.trials()) == 1
    assert len(list(database.parent.glob(f"tunekit.db{files.ASIDE_MARK}*"))) == 1
