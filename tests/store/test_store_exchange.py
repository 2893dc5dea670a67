"""Export, import, merge and the files that ship: nothing lost, nothing twice, nothing taken on trust."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_values import H200, fork, make_bad, make_trial, make_winner, wait_all, warnings_of

from tunekit.errors import DatabaseError
from tunekit.model import Values
from tunekit.store import database as database_module
from tunekit.store import lines, rows, winner_lines
from tunekit.store.database import Store
from tunekit.store.exchange import export_jsonl, export_lines, import_jsonl, merge, ship
from tunekit.store.shipped import shipped_file, shipped_winners
from tunekit.store.verify import verify_lines
from tunekit.trials import Stage, Status


def fill(path: Path, first: int = 0, count: int = 6) -> None:
    with Store.open(path) as store:
        sweep = store.start_sweep("fmha", 1, "sm_90a", {"jobs": 2, "names": ["Ж", "\u2028"]})
        for number in range(first, first + count):
            status = Status.OK if number % 2 else Status.COMPILE_CRASHED
            samples = (math.pi * number + 1, 1 / 3) if number % 2 else ()
            reason = "line one\nline two \u2028 'quoted' \x00"
            trial = make_trial(number, status=status, samples=samples, sweep=sweep, reason=reason)
            store.record(trial)
            store.put_winner(make_winner(number, bucket=Values(s_k=number), median_us=math.e * (number + 1)))
            store.remember_bad(make_bad(number))
        store.record(make_trial(99))
        store.finish_sweep(sweep, "done")


def contents(path: Path):
    with Store.open(path) as store:
        sweeps = [dataclasses.replace(sweep, id=0) for sweep in store.sweeps()]
        owners = {sweep.id: sweep.uid for sweep in store.sweeps()}
        trials = [(dataclasses.replace(t, sweep=None), owners.get(t.sweep)) for t in store.trials()]
        return sweeps, trials, store.winners(), [store.known_bad(f"{n:064x}") for n in range(12)]


def test_export_and_import_round_trip_exactly(tmp_path):
    one, two = tmp_path / "one.db", tmp_path / "two.db"
    fill(one)
    file = tmp_path / "all.jsonl"
    assert export_jsonl(one, file) == 1 + 7 + 6 + 6
    with Store.open(two) as store:
        # Its ids differ, so that a sweep's number can't match by luck.
        store.finish_sweep(store.start_sweep("other", 1, "sm_90a", {}), "done")
        first, again = import_jsonl(store, file), import_jsonl(store, file)
    assert (first.added, first.known, first.rejected) == (20, 0, ())
    assert (again.added, again.known, again.replaced) == (0, 20, 0)
    assert list(export_lines(two, spec="fmha")) == list(export_lines(one))
    ours, theirs = contents(one), contents(two)
    assert ours[1:] == theirs[1:] and ours[0] == theirs[0][:-1]
    assert ours[1][0][1] is not None and ours[1][-1][1] is None, "trials keep their sweep"


plain_floats = st.floats(allow_nan=False, allow_infinity=False)
times = st.floats(min_value=1e-9, max_value=1e12, allow_nan=False)
names = st.text(min_size=1, max_size=12)
plain = st.dictionaries(names, st.one_of(st.booleans(), st.integers(-(2**62), 2**62), plain_floats, names), max_size=4)


@given(plain, plain, st.lists(times, max_size=5), times, names, st.sampled_from(Status), st.sampled_from(Stage))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_record_survives_a_line(tunables, facts, samples, median, text, status, stage):
    """Every value that may be recorded reads back equal from its line: types, order and digits too."""
    variant = dataclasses.replace(make_trial().variant, tunables=Values(tunables))
    trial = make_trial(variant=variant, problem=Values(tunables), protocol=rows.text(text, "t"), samples=samples)
    outcome = dataclasses.replace(trial.outcome, facts=Values(facts), status=status, stage=stage)
    trial = dataclasses.replace(trial, outcome=outcome)
    line = lines.trial_line(trial, uid="u", recorded_at="2026-01-01T00:00:00Z")
    assert "\n" not in line
    assert lines.parse_line(line.encode()).value == trial
    winner = make_winner(variant=variant, median_us=median, environment=dataclasses.replace(H200, gpu=text))
    line = lines.winner_line(winner)
    parsed = lines.parse_line(line.encode())
    assert parsed.value == winner
    assert list(parsed.value.variant.tunables) == list(tunables)
    assert lines.winner_line(parsed.value) == line


def test_merge_joins_two_databases_without_doubles(tmp_path):
    """Both have what they share once; merging in either direction gives the same; the other is not written."""
    base, one, two = (tmp_path / f"{name}.db" for name in ("base", "one", "two"))
    fill(base, 0, 2)
    for path, first in ((one, 2), (two, 6)):
        with Store.open(path) as store:
            assert merge(store, base).added == 1 + 3 + 2 + 2
        fill(path, first, 3)
    before = two.read_bytes()
    with Store.open(one) as store:
        result = merge(store, two)
        assert (result.added, result.known) == (1 + 4 + 3 + 3, 1 + 3 + 2 + 2)
        assert str(result) == "11 added, 8 already there"
        assert merge(store, two).added == 0
    assert two.read_bytes() == before
    with Store.open(two) as store:
        merge(store, one)
    assert sorted(export_lines(one)) == sorted(export_lines(two))
    with Store.open(one) as store, pytest.raises(DatabaseError, match="the database itself"):
        merge(store, one)
    with Store.open(one) as store, pytest.raises(DatabaseError, match="no database"):
        merge(store, tmp_path / "absent.db")


def at(moment: str, monkeypatch):
    monkeypatch.setattr(database_module, "now", lambda: moment)


def test_the_later_winner_is_current(tmp_path, monkeypatch):
    """The conflict rule: later recorded wins, whichever way the merge goes; the other stays as history."""
    one, two = tmp_path / "one.db", tmp_path / "two.db"
    for path, moment, number in ((one, "2026-01-01T00:00:00Z", 1), (two, "2026-02-01T00:00:00Z", 2)):
        at(moment, monkeypatch)
        with Store.open(path) as store:
            store.put_winner(make_winner(number))
            store.remember_bad(make_bad(seconds=number))
    with Store.open(one) as early:
        result = merge(early, two)
        assert (result.added, result.replaced) == (0, 2)
        assert early.winners() == [make_winner(2)]
        assert early.known_bad(f"{0:064x}").seconds == 2
        count = early.read(lambda c: c.execute("SELECT current FROM winners ORDER BY id").fetchall())
        assert count == [(0,), (1,)]
    three = tmp_path / "three.db"
    at("2025-01-01T00:00:00Z", monkeypatch)
    with Store.open(three) as store:
        store.put_winner(make_winner(3))
        store.remember_bad(make_bad(seconds=3))
    with Store.open(one) as early:
        result = merge(early, three)
        assert (result.added, result.replaced, result.known) == (1, 0, 1)
        assert early.winners() == [make_winner(2)]
        # At the same second the one that was there stays.
        tie = lines.winner_line(make_winner(4), uid="tie", recorded_at="2026-02-01T00:00:00Z")
        file = tmp_path / "tie.jsonl"
        file.write_text(tie)
        assert import_jsonl(early, file).replaced == 0
        assert early.winners() == [make_winner(2)]


GOOD = json.loads(lines.winner_line(make_winner(), uid="w", recorded_at="2026-01-01T00:00:00Z"))
TRIAL = json.loads(lines.trial_line(make_trial(samples=(1.0,)), uid="t", recorded_at="2026-01-01T00:00:00Z"))


def edited(whole, **changes):
    return json.dumps({**whole, **changes})


BAD_LINES = {
    "not JSON": "{",
    "not an object": "[1, 2]",
    "a NaN": edited(GOOD, median_us=math.nan),
    "an infinity by overflow": json.dumps(GOOD).replace(str(GOOD["median_us"]), "1e999"),
    "a time of 0": edited(GOOD, median_us=0),
    "a time of -1": edited(GOOD, median_us=-1),
    "a time in words": edited(GOOD, median_us="fast"),
    "a time that the schema refuses": edited(GOOD, median_us=1e100),
    "a sample that the schema refuses": edited(TRIAL, samples_us=[1e100]),
    "rounds beyond 64 bits": edited(GOOD, rounds=10**30),
    "a fraction of a round": edited(GOOD, rounds=2.5),
    "an outcome that is a number": edited(GOOD, outcome=3),
    "no time": edited(GOOD, median_us=None),
    "no environment": json.dumps({name: value for name, value in GOOD.items() if name != "environment"}),
    "an unknown field": edited(GOOD, nvlink="v7"),
    "an unknown field of the environment": edited(GOOD, environment={**GOOD["environment"], "fabric": 1}),
    "an unknown kind": edited(GOOD, kind="verdict"),
    "a kind that is a list": edited(GOOD, kind=[]),
    "a newer format": edited(GOOD, format=2),
    "tunables that are none": edited(GOOD, tunables=[1]),
    "nested tunables": edited(GOOD, tunables={"a": {}}),
    "tied that is none": edited(GOOD, tied="abc"),
    "an unknown status": edited(TRIAL, status="molten"),
    "a bad sample": edited(TRIAL, samples_us=[1.0, -2.0]),
    "samples that are none": edited(TRIAL, samples_us="1.0"),
    "a footprint that is none": edited(TRIAL, footprint=[]),
    "an uid that is a number": edited(GOOD, uid=7),
    "deep nesting": "[" * 100_000,
    "not UTF-8": b"\xff\xfe",
    "a sweep without its state": json.dumps({"kind": "sweep", "spec": "x"}),
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_rejected_with_its_number_and_the_rest_goes_in(tmp_path, bad):
    """Cases 23 and 41, from a file: refused in a sentence; lines around it are taken."""
    file = tmp_path / "mixed.jsonl"
    good = json.dumps(GOOD).encode()
    middle = bad if isinstance(bad, bytes) else bad.encode()
    file.write_bytes(b"\n" + json.dumps(TRIAL).encode() + b"\n" + middle + b"\n" + good + b"\r\n")
    with Store.open(tmp_path / "t.db") as store:
        result = import_jsonl(store, file)
        assert (result.added, len(result.rejected)) == (2, 1), result
        assert result.rejected[0].startswith("line 3: ") and "\n" not in result.rejected[0][:300]
        assert len(store.winners()) == len(store.trials()) == 1
    assert [finding.where for finding in verify_lines(file)] == [f"{file}:3"]


def test_imports_and_sweeps_at_once(tmp_path, database):
    """Four imports of one file beside two writers: every record once."""
    fill(tmp_path / "one.db", 0, 10)
    file = tmp_path / "all.jsonl"
    export_jsonl(tmp_path / "one.db", file)

    def take() -> None:
        with Store.open(database) as store:
            assert not import_jsonl(store, file).rejected

    def write() -> None:
        with Store.open(database) as store:
            for number in range(100, 110):
                store.record(make_trial(number))

    assert wait_all([fork(work) for work in (take, take, write, take, write, take)]) == [0] * 6
    with Store.open(database) as store:
        assert len(store.trials()) == 11 + 20
        assert len(store.winners()) == 10


def test_a_thousand_lines_go_in_quickly(tmp_path):
    file = tmp_path / "many.jsonl"
    written = [
        lines.trial_line(make_trial(n, samples=[1.5] * 10), uid=f"u{n}", recorded_at="2026") for n in range(1000)
    ]
    file.write_text("\n".join(written))
    with Store.open(tmp_path / "t.db") as store:
        start = time.monotonic()
        assert import_jsonl(store, file).added == 1000
        assert time.monotonic() - start < 20
        assert len(store.trials()) == 1000


def test_files_that_can_not_be_used_are_named(tmp_path):
    with Store.open(tmp_path / "t.db") as store:
        with pytest.raises(DatabaseError, match=r"can't read .*absent\.jsonl"):
            import_jsonl(store, tmp_path / "absent.jsonl")
        with pytest.raises(DatabaseError, match="can't write"):
            export_jsonl(store.path, tmp_path / "t.db" / "x.jsonl")
    with pytest.raises(DatabaseError, match="no database"):
        list(export_lines(tmp_path / "absent.db"))


# -- the layer that ships


def test_shipped_rows_are_reviewable_and_read_back(tmp_path):
    database, directory = tmp_path / "t.db", tmp_path / "tuning_db"
    directory.mkdir()
    with Store.open(database) as store:
        for number in (2, 1):
            bucket = Values(head_dim=128, s_k=1024 * number)
            store.put_winner(make_winner(number, bucket=bucket, median_us=100.123456789012 * number))
        store.put_winner(make_winner(3, bucket=Values(head_dim=128, s_k=512)))
        store.record(make_trial(samples=(1 / 3,), stage=Stage.MEASURE))
    path = ship(database, directory, spec="fmha", arch="sm_90a").file
    assert path == directory / "fmha.sm_90a.jsonl"
    text = path.read_text()
    assert ship(database, directory, spec="fmha", arch="sm_90a").file.read_text() == text, "the same bytes every time"
    first = json.loads(text.splitlines()[1])
    assert list(first)[:6] == ["kind", "format", "recorded_at", "spec", "version", "implementation"]
    assert first["median_us"] == 100.1235 and first["environment"]["gpu"] == "NVIDIA H200"
    assert [json.loads(line)["bucket"]["s_k"] for line in text.splitlines()] == [512, 1024, 2048], "as numbers"
    found = shipped_winners("fmha", "sm_90a", directory=directory)
    assert [winner.bucket.s_k for winner in found] == [512, 1024, 2048]
    assert {winner.source for winner in found} == {"shipped"}
    assert found[1] == make_winner(
        1, bucket=Values(head_dim=128, s_k=1024), median_us=100.1235, source="shipped", confidence=0.99
    )
    assert shipped_winners("fmha", "sm_90a", version=2, directory=directory) == []
    assert verify_lines(path) == []
    # Imported into an empty database and shipped again: the same bytes.
    with Store.open(tmp_path / "again.db") as store:
        assert import_jsonl(store, path).added == 3
    again = tmp_path / "again"
    again.mkdir()
    assert ship(tmp_path / "again.db", again, spec="fmha", arch="sm_90a").file.read_text() == text
    # The finals that chose the winners go along, the search's timings don't.
    with Store.open(database) as store:
        problem = make_winner().problem
        for samples, protocol in (((1 / 3,), "final/1 cuda_graph"), ((1 / 7,), "search/1 events")):
            store.record(make_trial(samples=samples, stage=Stage.MEASURE, protocol=protocol, problem=problem))
    with_finals = ship(database, directory, spec="fmha", arch="sm_90a").file.read_text()
    assert '"samples_us": [0.3333333]' in with_finals and "0.1428571" not in with_finals
    assert shipped_winners("fmha", "sm_90a", directory=directory) == found


def test_shipping_one_retuned_problem_keeps_what_ships_for_the_others(tmp_path):
    """The database of one sweep holds one winner; the file that ships holds years of them."""
    directory, buckets = tmp_path / "tuning_db", [Values(head_dim=128, s_k=1024 * n) for n in (1, 2, 3)]
    directory.mkdir()
    with Store.open(tmp_path / "old.db") as store:
        for n, bucket in enumerate(buckets):
            store.put_winner(make_winner(n, bucket=bucket, problem=bucket, median_us=10.0))
        for problem in buckets[:2]:
            protocol = "final/1 cuda_graph"
            store.record(make_trial(samples=(10.0,), stage=Stage.MEASURE, protocol=protocol, problem=problem))
    first = ship(tmp_path / "old.db", directory, spec="fmha", arch="sm_90a")
    assert (first.written, first.kept) == (3, 0)
    elsewhere = dataclasses.replace(H200, gpu="NVIDIA H100")
    with Store.open(tmp_path / "new.db") as store:
        store.put_winner(make_winner(4, bucket=buckets[1], problem=buckets[1], median_us=9.0))
        store.put_winner(make_winner(5, bucket=buckets[2], problem=buckets[2], median_us=8.0, environment=elsewhere))
        undecided = {"stage": Stage.MEASURE, "protocol": "final/1 cuda_graph", "problem": buckets[0]}
        store.record(make_trial(9, samples=(7.0,), **undecided))
    second = ship(tmp_path / "new.db", directory, spec="fmha", arch="sm_90a")
    assert (second.written, second.kept) == (2, 2), "of the first bucket, and the third's on the other GPU"
    found = shipped_winners("fmha", "sm_90a", directory=directory)
    assert sorted((w.bucket.s_k, w.median_us) for w in found) == [(1024, 10.0), (2048, 9.0), (3072, 8.0), (3072, 10.0)]
    finals = [line for line in second.file.read_text().splitlines() if '"trial"' in line]
    assert [json.loads(line)["problem"]["s_k"] for line in finals] == [1024], "the final that was replaced went along"
    assert json.loads(finals[0])["samples_us"] == [10.0], "a final without a winner took the place of one that chose"


@pytest.mark.parametrize("broken", ["{", "[]", '{"kind": "winner"}', json.dumps({**GOOD, "environment": 7})])
def test_nothing_ships_into_a_file_that_has_a_broken_line(tmp_path, broken):
    """A winner that can't be read would be lost."""
    with Store.open(tmp_path / "t.db") as store:
        store.put_winner(make_winner())
    file = shipped_file("fmha", "sm_90a", tmp_path)
    file.write_text(f"{json.dumps(GOOD)}\n{broken}\n")
    before = file.read_bytes()
    with pytest.raises(DatabaseError, match=r"line 2: .*; see `tunekit db verify"):
        ship(tmp_path / "t.db", tmp_path, spec="fmha", arch="sm_90a")
    assert file.read_bytes() == before


def test_a_broken_shipped_line_is_left_out_with_one_warning(tmp_path, caplog):
    path = tmp_path / "fmha.sm_90a.jsonl"
    other = json.dumps({**GOOD, "spec": "gemm"})
    path.write_text("\n".join([BAD_LINES["a NaN"], json.dumps(GOOD), "{", json.dumps(TRIAL), other]))
    assert [w.symbol for w in shipped_winners("fmha", "sm_90a", directory=tmp_path)] == [GOOD["symbol"]]
    assert len(warnings_of(caplog)) == 1 and "skipped 2 rows" in warnings_of(caplog)[0]


def test_winners_are_read_without_decoding_what_else_the_writer_wrote(monkeypatch):
    others = [
        lines.trial_line(make_trial()),
        lines.trial_line(make_trial(), uid="u", recorded_at="2026-12-01T00:00:00Z", digits=3),
        lines.known_bad_line(make_bad()),
    ]
    parsed = []
    monkeypatch.setattr(winner_lines.rows, "parse", lambda *arguments: parsed.append(arguments))
    assert [winner_lines.parse_winner(line.encode()) for line in others] == [None, None, None] and not parsed


@pytest.mark.parametrize("what", ["cut off", "a newer format", "written by hand"])
def test_a_line_that_the_writer_did_not_write_so_is_looked_at(what):
    trial = lines.trial_line(make_trial())
    if what == "written by hand":
        assert winner_lines.parse_winner(json.dumps(dict(reversed(json.loads(trial).items()))).encode()) is None
        return
    line = trial[:-9] if what == "cut off" else trial.replace('"format": 1', '"format": 2', 1)
    with pytest.raises(rows.RowError, match="not JSON" if what == "cut off" else "format 2"):
        winner_lines.parse_winner(line.encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"uid": 7}, "uid is 7, not text"),
        ({"recorded_at": None}, "recorded_at is None"),
        ({"tied": "x"}, "tied is not a list"),
        ({"tunables": None}, "tunables is not an object"),
        ({"tunables": "{}"}, "tunables is not an object"),
        ({"problem": [1]}, "problem is not an object"),
        ({"seconds": None}, "unknown field 'seconds'"),
        ({"facts": {}}, "unknown field 'facts'"),
    ],
    ids=str,
)
def test_a_winners_line_is_judged_alike_by_both_readers(change, words):
    line = json.dumps({**GOOD, **change}).encode()
    for read in (winner_lines.parse_winner, lines.parse_line):
        with pytest.raises(rows.RowError, match=re.escape(words)):
            read(line)


def test_a_winner_is_the_same_to_both_readers():
    odd = {**GOOD, "tunables": {**GOOD["tunables"], "name": "\ud800 \u00e9"}, "library": "x 1"}
    for line in (json.dumps(GOOD), json.dumps(odd), json.dumps(odd, ensure_ascii=False).replace("\ud800", "")):
        content = line.encode()
        assert winner_lines.parse_winner(content) == lines.parse_line(content).value
    assert set(winner_lines.KINDS) == set(lines.READERS)


def test_nothing_shipped_is_nothing_said(tmp_path, caplog):
    assert shipped_winners("fmha", "sm_90a", directory=tmp_path / "absent") == []
    assert not caplog.records
    assert shipped_file("../../etc/passwd", "sm_90a", tmp_path).name == "none"
    (tmp_path / "fmha.sm_90a.jsonl").mkdir()
    assert shipped_winners("fmha", "sm_90a", directory=tmp_path) == []
    assert len(warnings_of(caplog)) == 1
