"""``tunekit.best``: the same choice as dispatch, explained."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

import tunekit
from tunekit.dispatch.lookup import look_up
from tunekit.environment import environment
from tunekit.errors import NoKernelError, UserError
from tunekit.model import Level
from tunekit.settings import Settings


@pytest.fixture
def settings(tuned) -> Settings:
    return Settings(tuned.database, tuned.artifacts)


def test_best_is_what_load_would_pick(tuned, monkeypatch):
    monkeypatch.setenv("TUNEKIT_CACHE", str(tuned.root))
    winner = tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    choice = tunekit.best(tuned.reference, rows=48)
    assert (choice.level, choice.variant, choice.artifact) == (Level.BUCKET, winner.variant, winner.artifact)
    assert choice.winner.median_us == 10.0 and choice.better is None
    assert choice.fell_back_from == ("exact: nothing was measured here for this problem",)


def test_a_winner_that_is_not_compiled_is_still_named(tuned, settings):
    """On a machine without the artifacts, the answer is what would be picked, and that it isn't there."""
    winner = tuned.tune({"rows": 64}, compiled=False, unroll=4, delay_us=0)
    choice = look_up(tuned.reference, {"rows": 64}, settings=settings)
    assert (choice.variant, choice.level, choice.artifact) == (winner.variant, Level.EXACT, None)
    assert "neither it nor any fallback is compiled" in choice.why
    tuned.compile(tuned.variant(), rows=64)
    choice = look_up(tuned.reference, {"rows": 64}, settings=settings)
    assert choice.level is Level.DEFAULT and choice.artifact is not None and choice.better == winner.variant
    assert any("exact" in line and "not in the store" in line for line in choice.fell_back_from)


def test_wrong_questions_are_answered_in_one_line(tuned, settings):
    """A mistake is the caller's: named, with the nearest right name, and no traceback to read."""
    for keywords, words in [
        ({"problem": {"row": 4}}, "unknown axis 'row'; did you mean rows?"),
        ({"problem": {}}, "the problem needs rows"),
        ({"problem": {"rows": 4, "cols": 17}}, "17 is not allowed"),
        ({"problem": {"rows": 4}, "arch": "sm_99"}, "unknown architecture 'sm_99'"),
    ]:
        with pytest.raises(UserError) as caught:
            look_up(tuned.reference, settings=settings, **keywords)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="unknown spec 'nothing'"):
        tunekit.best("nothing", rows=3)


def test_no_variant_for_a_shape_names_shape_and_constraint(tuned, settings):
    """Case 57."""
    tuned.reference = str(tuned.specs / "host_moments.py")
    with pytest.raises(NoKernelError, match=r"rows=3 cols=25 on host: .*2 by block_divides"):
        look_up(tuned.reference, {"rows": 3, "cols": 25}, settings=settings)


def test_an_arch_that_no_implementation_supports_is_said(tuned, settings):
    with pytest.raises(NoKernelError, match="on sm_90a: it has implementations for the CPU"):
        look_up(tuned.reference, {"rows": 4}, arch="sm_90a", settings=settings)


@pytest.mark.parametrize("content", [b"", b"x", b"not a database" * 100])
def test_a_damaged_database_is_no_winner_and_one_line(tuned, settings, caplog, content):
    tuned.compile(tuned.variant(), rows=4)
    tuned.database.write_bytes(content)
    choice = look_up(tuned.reference, {"rows": 4}, settings=settings)
    assert choice.level is Level.DEFAULT
    assert sum(str(tuned.database) in record.getMessage() for record in caplog.records) == 1


def test_a_row_with_a_newer_field_or_no_driver_is_one_line_and_a_miss(tuned, settings, caplog):
    """Case 23: a miss, said once; healed when the row is written again; nothing is deleted."""
    gpu = replace(environment(0), gpu="NVIDIA H200", arch="sm_90a", driver=None)
    winner = tuned.winner(tuned.variant(arch="sm_90a"), {"rows": 4}, environment=gpu)
    tuned.put(winner)
    with pytest.raises(NoKernelError):
        look_up(tuned.reference, {"rows": 4}, arch="sm_90a", settings=settings)
    assert sum("driver" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    good = tuned.tune({"rows": 4}, unroll=2, delay_us=0)
    with sqlite3.connect(tuned.database) as connection:
        connection.execute("UPDATE winners SET tunables = json_set(tunables, '$.unroll', 3) WHERE arch = 'host'")
        rows = connection.execute("SELECT count(*) FROM winners").fetchone()
    tuned.compile(tuned.variant(), rows=4)
    choice = look_up(tuned.reference, {"rows": 4}, settings=settings)
    assert choice.level is Level.DEFAULT
    assert len(caplog.records) == 1
    tuned.put(good)
    assert look_up(tuned.reference, {"rows": 4}, settings=settings).level is Level.EXACT
    with sqlite3.connect(tuned.database) as connection:
        assert connection.execute("SELECT count(*) FROM winners").fetchone() >= rows
