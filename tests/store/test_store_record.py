"""What is recorded comes back as it was, and what is no time never enters."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
import threading

import pytest
from store_values import H200, PROTOCOL, fork, make_bad, make_trial, make_winner, wait

from tunekit.errors import DatabaseError
from tunekit.model import Environment, Values
from tunekit.store.database import Store
from tunekit.store.lines import parse_line, winner_line
from tunekit.store.winners import read_winners
from tunekit.trials import Stage, Status

NO_TIMES = [math.nan, math.inf, -math.inf, 0, 0.0, -1, -0.5, None, "fast", "12.5", True, [1.0]]


def test_a_trial_comes_back_as_it_was(database):
    trial = make_trial(samples=(10.0 / 3.0, 3.25, 1e-3), stage=Stage.MEASURE)
    with Store.open(database) as store:
        sweep = store.start_sweep("fmha", 1, "sm_90a", {"jobs": 2, "problem": {"head_dim": 128}})
        trial = dataclasses.replace(trial, sweep=sweep)
        store.record(trial)
        assert store.trials() == [trial]
    with Store.open(database) as store:
        assert store.trials(sweep=sweep) == [trial]


@pytest.mark.parametrize("status", list(Status))
def test_a_failure_is_kept_with_its_reason(database, status):
    trial = make_trial(status=status, reason="smem 262144 B > 232448 B (sm_90a)\nline two \x00 '\";--")
    with Store.open(database) as store:
        store.record(trial)
        assert store.trials()[0].outcome == trial.outcome


def test_undecodable_text_of_a_child_is_escaped_not_lost(database):
    trial = make_trial(status=Status.COMPILE_ERROR, reason=b"caf\xe9".decode(errors="surrogateescape"))
    with Store.open(database) as store:
        store.record(trial)
        assert store.trials()[0].outcome.reason == "caf\\udce9"


def test_a_trial_and_its_outcome_have_one_protocol(database):
    trial = make_trial()
    with Store.open(database) as store:
        store.record(dataclasses.replace(trial, outcome=dataclasses.replace(trial.outcome, protocol="")))
        store.record(dataclasses.replace(trial, protocol=""))
        assert store.trials() == [trial, trial]
        with pytest.raises(DatabaseError, match="protocol"):
            store.record(dataclasses.replace(trial, protocol="2/other"))


def test_trials_are_found_by_each_of_their_fields(database):
    with Store.open(database) as store:
        store.record(make_trial(1))
        store.record(make_trial(2, stage=Stage.VERIFY, problem=Values(head_dim=64, normalize=True)))
        assert len(store.trials(spec="fmha", arch="sm_90a")) == 2
        assert [t.variant.tunables.kv_stage for t in store.trials(stage=Stage.VERIFY)] == [2]
        assert store.trials(variant=make_trial(1).variant.id) == [make_trial(1)]
        assert store.trials(compile_key=f"{2:064x}")[0].outcome.stage is Stage.VERIFY
        assert store.trials(problem=Values(normalize=True, head_dim=128)) == [make_trial(1)]
        assert store.trials(problem=Values(normalize=1, head_dim=128)) == [], "1 is not True"
        assert store.trials(spec="other") == store.trials(arch="sm_100a") == store.trials(sweep=7) == []


@pytest.mark.parametrize("value", NO_TIMES, ids=repr)
def test_what_is_no_time_is_never_stored(database, value):
    """Case 41: NaN, inf, 0, -1, None, "fast": never a winner, never stored as a number; case 46: the earlier stays."""
    earlier = make_winner(1)
    with Store.open(database) as store:
        store.put_winner(earlier)
        with pytest.raises(DatabaseError, match="median_us"):
            store.put_winner(make_winner(2, median_us=value))
        with pytest.raises(DatabaseError, match=r"samples_us\[1\]"):
            store.record(make_trial(samples=(1.0, value), stage=Stage.MEASURE))
        if value not in (0, 0.0) or isinstance(value, bool):
            with pytest.raises(DatabaseError, match="spread_us"):
                store.put_winner(make_winner(2, spread_us=value))
            with pytest.raises(DatabaseError, match="seconds"):
                store.remember_bad(make_bad(seconds=value))
        assert store.winners() == [earlier]
        assert store.trials() == []
    counts = sqlite3.connect(database).execute("SELECT (SELECT count(*) FROM samples), (SELECT count(*) FROM winners)")
    assert counts.fetchone() == (0, 1)


@pytest.mark.parametrize("value", ["'fast'", "NULL", "0", "-1", "9e999", "-9e999"])
def test_the_schema_itself_refuses_what_is_no_time(database, value):
    """Case 41: also another program can't put one in: SQLite alone would store NaN as NULL and any text."""
    with Store.open(database) as store:
        store.record(make_trial(samples=(1.0,)))
        store.put_winner(make_winner())
    connection = sqlite3.connect(database)
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(f"UPDATE samples SET us = {value}")
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(f"UPDATE winners SET median_us = {value}")


@pytest.mark.parametrize("fields", [{"samples": 0}, {"samples": True}, {"confidence": 1.5}, {"margin": math.nan}])
def test_a_winner_of_no_evidence_is_refused(database, fields):
    with Store.open(database) as store, pytest.raises(DatabaseError, match=next(iter(fields))):
        store.put_winner(make_winner(**fields))


def test_all_failing_leaves_the_earlier_winner(database):
    """Case 46, the storage side: failures are kept beside an earlier winner, which stays the current one."""
    with Store.open(database) as store:
        store.put_winner(make_winner(1))
        for number in range(5):
            store.record(make_trial(number, status=Status.WRONG_RESULT, reason="row 3", stage=Stage.VERIFY))
        assert store.winners() == [make_winner(1)]
        assert len(store.trials()) == 5


def test_a_later_winner_replaces_the_one_of_its_key_only(database):
    others = [
        make_winner(1, bucket=Values(head_dim=64, s_k=2048)),
        make_winner(2, protocol="2/final"),
        make_winner(3, environment=dataclasses.replace(H200, driver="580.1")),
    ]
    with Store.open(database) as store:
        for winner in (*others, make_winner(4), make_winner(5)):
            store.put_winner(winner)
        assert store.winners("fmha", "sm_90a") == [*others, make_winner(5)]
        # Another torch or Python is another environment, but its times are comparable: the same key.
        newer = make_winner(6, environment=dataclasses.replace(H200, torch="3.0"))
        store.put_winner(newer)
        assert store.winners() == [*others, newer]
    history = sqlite3.connect(database).execute("SELECT symbol FROM winners WHERE current = 0 ORDER BY id").fetchall()
    assert history == [("tunekit_4",), ("tunekit_5",)]


NAMES = [
    *("NVIDIA A/B", "../../etc/passwd", "GPU (80 GB) [x]", "NVIDIA H200 MIG 1g.18gb", "Графика 加速器 🚀", "a'; DROP"),
    *("tab\tnewline\n", "\u2028\u2029", '{"json"}', "%00%2e", " "),
]


@pytest.mark.parametrize("name", NAMES)
def test_odd_device_names(database, name):
    """Case 35: slashes, spaces, parentheses, dots, a MIG suffix, other alphabets: kept, and looked up again."""
    place = dataclasses.replace(H200, gpu=name, mig=name)
    with Store.open(database) as store:
        store.put_winner(make_winner(environment=place))
        store.record(make_trial(environment=place))
        assert store.done(Stage.COMPILE, [f"{0:064x}"], environment=place)
        assert not store.done(Stage.COMPILE, [f"{0:064x}"], environment=H200)
    assert [winner.environment.gpu for winner in read_winners(database, "fmha", "sm_90a")] == [name]
    stray = {path.name.replace("tunekit.db", "") for path in database.parent.iterdir()}
    assert stray <= {"", "-wal", "-shm", ".opening"}


def test_known_bad_is_remembered_until_forgotten(database):
    with Store.open(database) as store:
        store.remember_bad(make_bad(1))
        store.remember_bad(make_bad(1, seconds=7.0))
        store.remember_bad(make_bad(2, signal=None, peak_rss_bytes=None))
        assert store.known_bad(f"{1:064x}") == make_bad(1, seconds=7.0)
        assert store.known_bad("0" * 63 + "9") is None
        assert store.forget_bad("other") == 0
        assert store.forget_bad() == 2
        assert store.known_bad(f"{1:064x}") is None


def test_sweeps_say_how_they_ended(database):
    with Store.open(database) as store:
        first = store.start_sweep("fmha", 1, "sm_90a", {"jobs": 2})
        second = store.start_sweep("fmha", 1, "sm_90a", {})
        assert [(s.id, s.state, s.alive) for s in store.sweeps()] == [
            (second, "running", True),
            (first, "running", True),
        ]
        store.finish_sweep(first, "interrupted")
        assert store.sweeps("fmha", "sm_90a")[1].state == "interrupted"
        assert store.sweeps()[1].arguments == {"jobs": 2}
        with pytest.raises(DatabaseError, match="gone"):
            store.finish_sweep(second, "gone")
        with pytest.raises(DatabaseError, match="no sweep 77"):
            store.finish_sweep(77, "done")
        with pytest.raises(DatabaseError, match="FOREIGN KEY"):
            store.record(make_trial(sweep=77))
    # One whose process was killed says running, and isn't.
    assert wait(fork(lambda: Store.open(database).start_sweep("fmha", 1, "sm_90a", {}))) == 0
    with Store.open(database) as store:
        assert [s.alive for s in store.sweeps()] == [False, True, False]


def test_done_tells_what_needs_no_doing_again(database):
    """Resume: by compile key for a compile; by problem, protocol and environment too for a run. Newest counts."""
    keys = [f"{number:064x}" for number in range(1200)]
    decode, prefill = Values(tokens=1), Values(tokens=4096)
    elsewhere = dataclasses.replace(H200, driver="580.1")
    with Store.open(database) as store:
        store.record(make_trial(1, status=Status.COMPILE_ERROR, reason="first"))
        store.record(make_trial(1))
        store.record(make_trial(2, status=Status.COMPILE_TIMEOUT, reason="ptxas"))
        for number, problem in ((1, decode), (3, prefill)):
            store.record(make_trial(number, stage=Stage.MEASURE, problem=problem, samples=(5.0,)))
        compiled = store.done(Stage.COMPILE, keys)
        assert {key: t.outcome.status for key, t in compiled.items()} == {
            keys[1]: Status.OK,
            keys[2]: Status.COMPILE_TIMEOUT,
        }
        here = {"problem": decode, "protocol": PROTOCOL, "environment": H200}
        assert list(store.done(Stage.MEASURE, keys, **here)) == [keys[1]]
        assert store.done(Stage.MEASURE, keys[:1], **here) == {}
        assert store.done(Stage.MEASURE, keys, **{**here, "protocol": "2"}) == {}
        assert store.done(Stage.MEASURE, keys, **{**here, "environment": elsewhere}) == {}
        assert list(store.done(Stage.MEASURE, keys, **{**here, "environment": dataclasses.replace(H200, torch="9")}))
        assert store.done(Stage.MEASURE, []) == {}


def test_a_store_works_from_threads_but_not_after_a_fork(database):
    with Store.open(database) as store:
        threads = [threading.Thread(target=store.record, args=(make_trial(n),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        def child() -> None:
            for use in (lambda: store.record(make_trial(100)), store.trials, store.winners):
                with pytest.raises(DatabaseError, match="opened before a fork"):
                    use()
            store.close()

        assert wait(fork(child)) == 0
        store.record(make_trial(101))
        assert len(store.trials()) == 9


def test_an_environment_without_a_gpu_is_kept(database):
    nowhere = Environment(python="3.12.1")
    with Store.open(database) as store:
        store.record(make_trial(environment=nowhere))
        assert store.trials()[0].environment == nowhere


def test_a_winner_keeps_how_it_was_decided(database):
    """Its outcome, rounds, cases and final; one of before, without them, comes back as it was."""
    decided = make_winner(0, outcome="tie", rounds=28, cases=5, final="f" * 32, confidence=0.95)
    older = make_winner(1, bucket=Values(head_dim=64))
    with Store.open(database) as store:
        store.put_winner(decided)
        store.put_winner(older)
        assert store.winners() == [decided, older]
    line = winner_line(decided)
    assert parse_line(line.encode()).value == decided
    assert parse_line(winner_line(older).encode()).value == older and '"rounds"' not in winner_line(older)
    with Store.open(database) as store, pytest.raises(DatabaseError, match="rounds is -1"):
        store.put_winner(make_winner(2, rounds=-1))
