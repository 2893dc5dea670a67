"""Looking winners up: fast, light, and never a number of elsewhere as if measured here."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time

import pytest
from store_values import H200, PROTOCOL, make_trial, make_winner

from tunekit import identity
from tunekit.model import Environment, Values
from tunekit.store import rows_of_trials, writing
from tunekit.store.database import Store
from tunekit.store.standing import KEY_FIELDS, classify
from tunekit.store.winners import read_winners

CHANGES = {
    "gpu": "NVIDIA B200",
    "arch": "sm_100a",
    "driver": "580.65",
    "power_limit_w": 600.0,
    "mig": "on",
    "cuda": "13.0",
    "cutlass_dsl": "4.9.0",
}


def test_measured_here():
    standing = classify(make_winner(), H200, PROTOCOL, version=1)
    assert standing.here and standing.kind == "here"


@pytest.mark.parametrize("field", KEY_FIELDS)
def test_another_environment_makes_it_a_seed(field):
    """Case 17: another driver, CuTeDSL, GPU, power limit ...: not served as if measured here; the reason names it."""
    elsewhere = dataclasses.replace(H200, **{field: CHANGES[field]})
    standing = classify(make_winner(environment=elsewhere), H200, PROTOCOL)
    assert standing.kind == "seed"
    assert field in standing.reason and "here" in standing.reason
    unknown = dataclasses.replace(H200, **{field: None})
    assert not classify(make_winner(environment=unknown), H200, PROTOCOL).here
    assert not classify(make_winner(), unknown, PROTOCOL).here
    assert not classify(make_winner(), Environment(), PROTOCOL).here, "no GPU here at all"


@pytest.mark.parametrize("field", ["torch", "python", "tunekit", "tvm_ffi", "clocks_policy"])
def test_what_does_not_change_a_kernel_s_time_does_not_count(field):
    elsewhere = dataclasses.replace(H200, **{field: "other"})
    assert classify(make_winner(environment=elsewhere), H200, PROTOCOL).here


def test_another_protocol_is_not_comparable():
    """Case 20: changing the measuring protocol: the old winner is no longer comparable, only a seed."""
    standing = classify(make_winner(), H200, "2/final")
    assert standing.kind == "seed" and PROTOCOL in standing.reason and "2/final" in standing.reason


def test_another_version_and_shipped_rows_are_seeds():
    assert "version 1" in classify(make_winner(), H200, PROTOCOL, version=2).reason
    assert "shipped" in classify(make_winner(source="shipped"), H200, PROTOCOL).reason


def test_a_host_kernel_needs_no_gpu():
    variant = identity.variant("copy", 1, "c", "host", Values(unroll=4))
    place = Environment(python="3.12.1", tunekit="0.1.0")
    assert classify(make_winner(variant=variant, environment=place), place, PROTOCOL).here


def test_only_the_asked_for_winners_are_read(database):
    other = identity.variant("gemm", 1, "wgmma", "sm_90a", Values(a=1))
    newer = identity.variant("fmha", 2, "wgmma", "sm_90a", Values(a=1))
    blackwell = identity.variant("fmha", 1, "tcgen05", "sm_100a", Values(a=1))
    with Store.open(database) as store:
        for variant in (other, newer, blackwell, make_winner().variant):
            store.put_winner(make_winner(variant=variant))
    assert read_winners(database, "fmha", "sm_90a") == [make_winner(variant=newer), make_winner()]
    assert read_winners(database, "fmha", "sm_90a", version=2) == [make_winner(variant=newer)]
    assert read_winners(database, "fmha", "sm_120a") == []


def test_no_database_is_no_winners_silently(tmp_path, caplog):
    assert read_winners(tmp_path / "absent" / "t.db", "fmha", "sm_90a") == []
    assert not caplog.records and not (tmp_path / "absent").exists()


def test_the_readers_import_the_standard_library_only():
    """`tunekit best` and dispatch come through here: no sqlite-utils (150 ms), filelock, torch, cutlass or tvm_ffi."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import tunekit.store.winners, tunekit.store.shipped, tunekit.store.standing, tunekit.store.artifacts\n"
        "own = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(sorted(own))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['tunekit']", done.stdout + done.stderr


def test_a_lookup_beside_100_000_trials_takes_milliseconds(database):
    """`tunekit best` has 0.3 s in all; of these a lookup takes a few milliseconds, however many trials there are."""
    trial = make_trial()
    with Store.open(database) as store:

        def insert(db) -> None:
            row = rows_of_trials.trial_row(trial)
            row |= {"recorded_at": "2026", "sweep": None, "problem_key": "x"}
            row["environment"] = writing.environment_id(db, trial.environment)
            names = ", ".join(["uid", *row])
            marks = ", ".join("?" * (len(row) + 1))
            many = ((f"u{number}", *row.values()) for number in range(100_000))
            db.conn.executemany(f"INSERT INTO trials ({names}) VALUES ({marks})", many)

        store.execute(insert)
        for number in range(200):
            store.put_winner(make_winner(number, bucket=Values(s_k=number)))
    took = []
    for _ in range(7):
        start = time.perf_counter()
        assert len(read_winners(database, "fmha", "sm_90a")) == 200
        took.append(time.perf_counter() - start)
    assert statistics.median(took) < 0.1
