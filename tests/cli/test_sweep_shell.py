"""What the shell around a sweep does with events, interrupts and results (cases 59 to 61)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tunekit

FAKE = str(Path(__file__).with_name("fake_sweep.py"))
PACKAGE = str(Path(tunekit.__file__).resolve().parents[1])


@pytest.mark.parametrize("environ", [{}, {"CI": "true"}, {"TERM": "dumb"}], ids=["pipe", "CI", "dumb"])
def test_plain_output_has_no_escapes_and_a_line_a_variant(shell, scale, environ):
    """Case 60: through a pipe, in CI and on a dumb terminal."""
    done = shell(FAKE, "mixed", "sweep", scale, "-p", "rows=8", **environ)
    assert done.status == 0
    for text in (done.out, done.err):
        assert "\r" not in text and "\x1b" not in text
    told = [line for line in done.err.splitlines() if " n=" in line]
    assert len(told) == 4
    assert any("compile_error: tile 2 does not divide 64" in line for line in told)
    assert "Traceback" not in done.err


def test_a_terminal_gets_escapes_unless_it_is_dumb_or_ci(scale, tmp_path):
    """Case 60, the other way round: on a real pseudo-terminal the same rules decide."""
    import pty

    def on_a_terminal(**environ):
        parent, child = pty.openpty()
        env = {**os.environ, "PYTHONPATH": PACKAGE, "TERM": "xterm", **environ}
        process = subprocess.Popen(
            [sys.executable, FAKE, "mixed", "sweep", scale, "-p", "rows=8"], stdout=child, stderr=child, env=env
        )
        os.close(child)
        seen = b""
        while True:
            try:
                chunk = os.read(parent, 65536)
            except OSError:
                break
            if not chunk:
                break
            seen += chunk
        os.close(parent)
        assert process.wait(30) == 0
        return seen

    assert b"\x1b[" in on_a_terminal()
    for plain in ({"CI": "true"}, {"TERM": "dumb"}):
        seen = on_a_terminal(**plain)
        assert b"\x1b" not in seen
        assert b"\r" not in seen.replace(b"\r\n", b"\n")  # the terminal itself makes \r\n of each newline


def test_200_failures_for_one_reason_are_one_group(shell, scale):
    """Case 61: the count, the first error's whole text, a command that reproduces one; and no success (case 46)."""
    done = shell(FAKE, "failures", "sweep", scale, "-p", "rows=8")
    assert done.status == 1
    assert "200 x compile_error: tile 0 does not divide 64" in done.out
    assert "at kernel.py:0" in done.out
    assert done.out.count("does not divide") == 1
    again = re.search(r"again: (tunekit compile .*)", done.out)
    assert again is not None
    assert "--variant" in again[1] and "--problem rows=8" in again[1]


def test_one_json_value_on_stdout_and_nothing_else(shell, scale):
    done = shell(FAKE, "mixed", "sweep", scale, "-p", "rows=8", "--json")
    report = json.loads(done.out)
    assert report["state"] == "done"
    (problem,) = report["problems"]
    assert [row["status"] for row in problem["rows"]] == ["ok", "ok", "compile_error", "ok"]
    assert problem["winner"]["median_us"] == 3.25


def test_the_winner_or_why_there_is_none(shell, scale):
    assert "3.25 us +- 0.10 us over 50 samples, 3.1 % ahead of x1" in shell(FAKE, "mixed", "sweep", scale).out
    assert "no winner: no GPU is here" in shell(FAKE, "plain", "sweep", scale).out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_after_five(scale, number, status, tmp_path):
    """Case 59, the shell's part: the rows so far are printed, the status tells, no traceback, back within 2 s."""
    process = subprocess.Popen(
        [sys.executable, FAKE, "slow", "sweep", scale, "-p", "rows=8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGE},
    )
    for line in process.stderr:
        if "five done" in line:
            break
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - sent < 2
    assert process.returncode == status
    assert "interrupted: the results so far are kept" in out
    assert re.search(r"^  [5-7] of [5-7] variants passed", out, re.MULTILINE)
    assert "Traceback" not in err


def test_flags_reach_the_pipeline(monkeypatch, scale, tunekit):
    spec = importlib.util.spec_from_file_location("fake_sweep", FAKE)
    fake_sweep = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fake_sweep", fake_sweep)
    spec.loader.exec_module(fake_sweep)
    module = fake_sweep.fake("plain")
    seen = {}

    def spy(spec_reference, problems, options, settings, on_event):
        seen.update(spec=spec_reference, problems=problems, options=options, settings=settings)
        return fake_sweep.fake("plain").sweep(spec_reference, problems, options, settings, on_event)

    module.sweep = spy
    monkeypatch.setitem(sys.modules, "tunekit.sweep", module)
    flags = "--budget 5m --search random --seed 7 --jobs 3 --compile-timeout 2m --trace-timeout 9 --run-timeout 0.5"
    more = (
        "--memory-limit 2GiB --no-resume --force --retry-failed --verify none --cases problem --variant abc --db d.db"
    )
    assert tunekit("sweep", scale, "--problem", "rows=8", "cols=128", *flags.split(), *more.split()).status == 0
    options, settings = seen["options"], seen["settings"]
    assert [dict(p) for p in seen["problems"]] == [{"rows": 8, "cols": 128, "dtype": "float32"}]
    assert (options.budget, options.search, options.seed, options.jobs) == ("300s", "random", 7, 3)
    assert (options.resume, options.force, options.retry_failed, options.verify) == (False, True, True, "none")
    assert (options.cases, options.variants) == ("problem", ("abc",))
    assert (settings.compile_limit_s, settings.trace_limit_s, settings.run_limit_s) == (120.0, 9.0, 0.5)
    assert (settings.memory_limit_bytes, settings.jobs, settings.database.name) == (2 * 2**30, 3, "d.db")
