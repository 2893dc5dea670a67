"""What may serve where the best variant isn't there: fallback levels, strict, compiles beside the calls."""

from __future__ import annotations

import logging
import shlex
import threading
import time
from contextlib import contextmanager

import pytest
import torch

import tunekit
from tunekit.cli import main
from tunekit.dispatch import background
from tunekit.dispatch.on_request import Compiled, OnRequestCompiler
from tunekit.errors import NoKernelError, UserError
from tunekit.model import Level
from tunekit.store.artifacts import ArtifactStore


def test_levels_past_the_fallback_do_not_serve(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    for fallback, rows in (("exact", 64), ("bucket", 48), ("nearest", 300)):
        kernel = tunekit.load(tuned.reference, fallback=fallback, **tuned.places)
        assert kernel(torch.ones(rows, 64))[0, 0] == 0.5
        assert kernel.choice(torch.ones(rows, 64)).level.value == fallback
    kernel = tunekit.load(tuned.reference, fallback="bucket", **tuned.places)
    with pytest.raises(NoKernelError, match=r"rows=300.* would be served by nearest \(") as caught:
        kernel(torch.ones(300, 64))
    assert "but fallback='bucket' ends before that" in str(caught.value)
    assert f"Tune it with `tunekit sweep {tuned.reference} --arch host --problem rows=300`" in str(caught.value)
    assert kernel.stats()["error"] == 1 and kernel.stats()["loaded"] == 0
    with pytest.raises(UserError, match="must be one of exact, bucket, nearest, shipped, default"):
        tunekit.load(tuned.reference, fallback="anything")


def test_a_default_past_the_fallback_is_named(tuned):
    tuned.compile(tuned.variant(), rows=8)
    kernel = tunekit.load(tuned.reference, fallback="shipped", **tuned.places)
    with pytest.raises(NoKernelError, match="would be served by default"):
        kernel(torch.ones(8, 64))
    assert kernel.stats()["would_compile"] == 0


def test_strict_never_compiles_and_counts_what_would_have_been(tuned, monkeypatch):
    """Case 55: strict mode never compiles or tunes; a counter shows what would have."""

    def forbidden(*args, **keywords):
        raise AssertionError("strict mode compiles nothing")

    monkeypatch.setattr("tunekit.jobs.Pool.__init__", forbidden)
    for unroll, rows in ((4, 64), (8, 1024)):
        tuned.tune({"rows": rows}, compiled=False, unroll=unroll, delay_us=0)
    kernel = tunekit.load(tuned.reference, strict=True, **tuned.places)
    for rows in (64, 1024):
        with pytest.raises(NoKernelError, match="strict mode"):
            kernel(torch.ones(rows, 64))
    assert kernel.stats()["would_compile"] == 2 and kernel.stats()["compiled"] == 0
    with pytest.raises(UserError, match="strict mode never compiles"):
        tunekit.load(tuned.reference, strict=True, compile="background")


def test_strict_says_the_command_that_compiles_what_is_missing(tuned, monkeypatch):
    winner = tuned.tune({"rows": 64}, compiled=False, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, strict=True, **tuned.places)
    with pytest.raises(NoKernelError) as caught:
        kernel(torch.ones(64, 64))
    command = str(caught.value).partition("Compile it with `")[2].rstrip("`")
    assert f"--variant {winner.variant.id} " in command
    monkeypatch.setenv("TUNEKIT_CACHE", str(tuned.root))
    assert main(shlex.split(command)[1:]) == 0
    assert kernel(torch.ones(64, 64))[0, 0] == 0.5


@pytest.mark.parametrize("wrong", [{"strict": "no"}, {"all_or_nothing": 1}, {"watch_s": "30"}, {"watch_s": 0}])
def test_an_option_of_a_wrong_kind_is_refused_by_name(tuned, wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} is .*it must be"):
        tunekit.load(tuned.reference, **wrong, **tuned.places)


def test_a_fallback_serves_until_the_background_compile_is_done(tuned):
    winner = tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, compile="background", **tuned.places)
    x = torch.ones(64, 64)
    assert kernel(x)[0, 0] == 0.5 and kernel(x=x)[0, 0] == 0.5
    assert kernel.choice(x).level is Level.NEAREST
    assert any("compiled in the background" in line for line in kernel.choice(x).fell_back_from)
    assert background.wait(60)
    (entry, calls), *_ = kernel._tables[1].called()
    assert (entry.choice.level, entry.choice.artifact, calls) == (Level.EXACT, winner.artifact, 0)
    assert kernel.choice(x).artifact == winner.artifact
    resolved = kernel.stats()["problems"]
    assert kernel(x)[0, 0] == 0.5 and kernel(x=x)[0, 0] == 0.5
    assert kernel.stats()["problems"] == resolved, "no call after it found a cold key"
    assert kernel.stats()["compiled"] == 1 and kernel.calls()[Level.EXACT] == 2


def test_what_may_not_be_loaded_beside_a_capture_is_put_in_place_by_a_later_first_call(tuned, monkeypatch):
    @contextmanager
    def beside_captures():
        yield False

    monkeypatch.setattr("tunekit.dispatch.kernel.beside_captures", beside_captures)
    winner = tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, compile="background", **tuned.places)
    x = torch.ones(64, 64)
    kernel(x)
    assert background.wait(60)
    kernel(x)
    assert kernel.calls() == {Level.NEAREST: 1} and kernel.choice(x).level is Level.NEAREST
    kernel(torch.ones(1024, 64))
    kernel(x)
    assert kernel.choice(x).artifact == winner.artifact
    assert kernel.calls() == {Level.NEAREST: 1, Level.EXACT: 1}


def test_a_background_compile_that_fails_is_said_and_not_tried_again(tuned, caplog):
    tuned.reference = f"{tuned.specs / 'host_scale.py'}:host_build"
    tuned.tune({"rows": 64}, compiled=False, build="raises")
    tuned.tune({"rows": 256}, build="also_good")
    kernel = tunekit.load(tuned.reference, compile="background", **tuned.places)
    with caplog.at_level(logging.WARNING, "tunekit"):
        assert kernel(torch.ones(64, 64))[0, 0] == 0.5
        assert background.wait(60)
        for rows in (64, 63, 50):
            assert kernel(torch.ones(rows, 64))[0, 0] == 0.5
        assert background.wait(0), "nothing is compiled again"
    assert sum("was not compiled in the background" in record.getMessage() for record in caplog.records) == 1
    assert "tile 48 does not divide 64" in caplog.text


def test_what_no_fallback_serves_is_an_error_that_tells_of_the_compile(tuned):
    kernel = tunekit.load(tuned.reference, compile="background", **tuned.places)
    with pytest.raises(NoKernelError, match="it is being compiled in the background"):
        kernel(torch.ones(4, 64))
    assert background.wait(60)
    assert kernel(torch.ones(4, 64))[0, 0] == 0.5 and kernel.stats()["compiled"] == 1


class SlowCompiler:
    """In place of the compiler: each compile waits until it may end; `most` ran at once."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.began: list[str] = []
        self.most = self.now = 0

    def __call__(self, compiler, variant, problem, stopped) -> Compiled:
        self.began.append(str(problem))
        self.now += 1
        self.most = max(self.most, self.now)
        self.may_end.wait(60)
        self.now -= 1
        return Compiled(None, "it was only played", failed=True)


@pytest.fixture
def slow_compiler(monkeypatch):
    slow = SlowCompiler()
    monkeypatch.setattr(OnRequestCompiler, "compile", lambda *arguments: slow(*arguments))
    yield slow
    slow.may_end.set()
    background.wait(60)


def test_background_compiles_are_one_at_a_time_and_few_wait(tuned, slow_compiler, caplog, monkeypatch):
    monkeypatch.setattr(background, "MOST_JOBS", 1)
    kernel = tunekit.load(tuned.reference, compile="background", **tuned.places)
    said = []
    with caplog.at_level(logging.WARNING, "tunekit"):
        for cols in (16, 32, 64, 128):  # each is compiled by itself
            with pytest.raises(NoKernelError) as error:
                kernel(torch.ones(4, cols))
            said.append(str(error.value))
            while not slow_compiler.began:
                time.sleep(0.001)
    assert ["queue of background compiles is full (1)" in words for words in said] == [False, False, True, True]
    assert sum("queue of background compiles is full" in record.getMessage() for record in caplog.records) == 1
    slow_compiler.may_end.set()
    assert background.wait(60)
    assert slow_compiler.most == 1 and len(slow_compiler.began) == 2


def test_other_keys_do_not_wait_for_a_compile_and_who_waits_says_for_what(tuned, slow_compiler, caplog, monkeypatch):
    """One lock a key: a compile while a call waits holds up the calls of its own problem, and no others."""
    monkeypatch.setattr("tunekit.dispatch.resolver.SAY_S", 0.05)
    tuned.tune({"rows": 64, "cols": 16}, compiled=False, unroll=8, delay_us=0)
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, compile="allow", **tuned.places)
    errors = []

    def call() -> None:
        try:
            kernel(torch.ones(64, 16))
        except NoKernelError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "tunekit"):
        for thread in threads:
            thread.start()
        while not slow_compiler.began:
            time.sleep(0.001)
        assert kernel(torch.ones(64, 64))[0, 0] == 0.5
        while "waits for the compile of loop" not in caplog.text:
            time.sleep(0.001)
        slow_compiler.may_end.set()
        for thread in threads:
            thread.join()
    assert len(errors) == 2 and slow_compiler.most == 1
    assert "a call of host_scale rows=64 cols=16" in caplog.text


def test_a_compile_that_another_process_does_is_waited_for_up_to_a_limit(tuned, caplog, monkeypatch):
    monkeypatch.setattr(OnRequestCompiler, "wait_s", 0.3)
    winner = tuned.tune({"rows": 64}, compiled=False, unroll=8, delay_us=0)
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    kernel = tunekit.load(tuned.reference, compile="allow", **tuned.places)
    x = torch.ones(64, 64)
    with caplog.at_level(logging.WARNING, "tunekit"), ArtifactStore(tuned.artifacts).lock(winner.artifact) as held:
        assert held and kernel(x)[0, 0] == 0.5
    assert kernel.choice(x).level is Level.NEAREST
    assert "rank 3 (local rank 1) waits for another compile of loop unroll=8" in caplog.text
    assert any("compiling it for over 0.3 s" in line for line in kernel.choice(x).fell_back_from)
    kernel.refresh()
    assert kernel.choice(x).artifact == winner.artifact, "it is tried again after a refresh"
