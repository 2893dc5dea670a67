"""The command line over the real pipeline, on the host backend: interrupts, resuming, limits, groups."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import tunekit as package

PACKAGE = str(Path(package.__file__).resolve().parents[1])
SLOW = str(Path(__file__).resolve().parents[1] / "specs" / "shell_slow.py")


@pytest.fixture
def environ(tmp_path):
    return {**os.environ, "PYTHONPATH": PACKAGE, "TUNEKIT_CACHE": str(tmp_path / "cache")}


def survivors(environ) -> list[psutil.Process]:
    """The processes that work with this test's cache."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TUNEKIT_CACHE") == environ["TUNEKIT_CACHE"]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def compile_trials(environ) -> int:
    command = [sys.executable, "-m", "tunekit", "db", "info", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    return json.loads(done.stdout)["trials_by_status"].get("compile ok", 0)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupted_sweeps_lose_nothing_and_resume(environ, number, status):
    """Case 59: after 5 of 20; stored, printed, 130 or 143, back in 2 s, no traceback; the next run goes on."""
    command = [sys.executable, "-m", "tunekit", "sweep", f"{SLOW}:shell_slow", "--verify", "none", "--jobs", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environ, **pipes)
    for line in process.stderr:
        if line.startswith("5/20"):
            break
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - sent < 2
    assert process.returncode == status, out + err
    assert "Traceback" not in err + out
    kept = compile_trials(environ)
    assert kept in (5, 6)
    assert f"{kept} of {kept} variants passed" in out
    assert "interrupted" in out
    assert survivors(environ) == []
    again = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "20 of 20 variants passed" in again.stdout
    assert compile_trials(environ) == 20  # each compiled once, over both runs


@pytest.mark.parametrize(
    ("spec", "flags", "variables", "limit"),
    [
        ("shell_hang", ["--trace-timeout", "1.5"], {"TUNEKIT_TRACE_TIMEOUT": "60"}, "trace"),
        ("shell_hang", [], {"TUNEKIT_TRACE_TIMEOUT": "1.5"}, "trace"),
        ("shell_hang_late", ["--compile-timeout", "1.5"], {"TUNEKIT_COMPILE_TIMEOUT": "60"}, "backend"),
        ("shell_limited", ["--compile-timeout", "1.5s"], {"TUNEKIT_TRACE_TIMEOUT": "60"}, "backend"),
        ("shell_limited", [], {}, "backend"),
    ],
    ids=["trace flag", "trace environment", "back-end flag", "flag over spec", "spec"],
)
def test_a_limit_kills_at_that_limit(environ, tmp_path, spec, flags, variables, limit):
    """Case 63 (and 1): a hang is killed at its limit, whoever set it, and the other variant is compiled."""
    command = [sys.executable, "-m", "tunekit", "compile", f"{SLOW}:{spec}", *flags]
    environ |= {"TMPDIR": str(tmp_path), **variables}
    started = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert 1.5 < time.monotonic() - started < 10
    assert done.returncode == 1, done.stderr
    assert re.search(rf"1 x compile_timeout: killed in \w+ at the {limit} limit of 1.5 s", done.stdout)
    assert "1 of 2 variants passed" in done.stdout
    assert survivors(environ) == []


@pytest.mark.slow
def test_a_hang_is_remembered_until_asked_for_again(environ):
    """The next run skips what hung, in a sentence; --retry-failed tries it again."""
    command = [sys.executable, "-m", "tunekit", "compile", f"{SLOW}:shell_hang", "--trace-timeout", "1"]
    said = []
    for flags in ([], [], ["--retry-failed"]):
        done = subprocess.run([*command, *flags], env=environ, capture_output=True, text=True, timeout=60)
        said.append(re.search(r"1 x (\w+): (\w+)", done.stdout).groups())
    assert said == [("compile_timeout", "killed"), ("known_bad", "compile_timeout"), ("compile_timeout", "killed")]


def test_real_failures_are_grouped_and_the_command_reproduces_one(environ):
    """Case 61, over the real pipeline: 20 of a kind are one; the command printed makes one happen again."""
    command = [sys.executable, "-m", "tunekit", "sweep", f"{SLOW}:shell_fail", "--verify", "none"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1  # case 46: no variant passed
    assert "20 x trace_error: ValueError: tile 0 does not divide 64" in done.stdout
    assert "and that is all" in done.stdout
    again = re.search(r"again: tunekit (.*)", done.stdout)[1].split()
    repeated = subprocess.run(
        [sys.executable, "-m", "tunekit", *again], env=environ, capture_output=True, text=True, timeout=60
    )
    assert repeated.returncode == 1
    assert "1 x trace_error: ValueError: tile 0 does not divide 64" in repeated.stdout


def test_the_command_reproduces_what_is_only_remembered(environ):
    """Case 61 for a variant that is skipped as known_bad: the command printed makes it hang again."""
    command = [sys.executable, "-m", "tunekit", "compile", f"{SLOW}:shell_hang", "--trace-timeout", "1"]
    for _ in range(2):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert "1 x known_bad" in done.stdout
    again = re.search(r"again: tunekit (.*)", done.stdout)[1].split()
    command = [sys.executable, "-m", "tunekit", *again, "--trace-timeout", "1"]
    repeated = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert "1 x compile_timeout" in repeated.stdout


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", "2>&1 >&- | true"])
def test_a_stream_that_takes_nothing_does_not_stop_the_work(environ, closed):
    """Whoever stops watching loses no result."""
    script = f"{sys.executable} -m tunekit compile {SLOW}:shell_hang --trace-timeout 1 {closed}"
    subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert compile_trials(environ) == 1


def test_a_command_without_stdout_or_an_encoding_for_its_words(environ, tmp_path):
    spec = tmp_path / "named.py"
    spec.write_text(Path(SLOW).read_text().replace('"shell_hang"', '"gr\u00f6\u00dfe"'), encoding="utf-8")
    script = f"{sys.executable} -m tunekit list {spec}:gr\u00f6\u00dfe"
    environ |= {"PYTHONIOENCODING": "ascii"}
    for closed, said in ((">&-", ""), ("", "gr\\xf6\\xdfe")):
        done = subprocess.run(["bash", "-c", f"{script} {closed}"], env=environ, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
        assert said in done.stdout.decode("ascii")


@pytest.mark.slow
def test_what_is_cached_is_not_compiled_again_unless_forced(environ):
    """Cases 19 and 63: a second process compiles nothing; --force compiles all."""
    variant = json.loads(
        subprocess.run(
            [sys.executable, "-m", "tunekit", "list", f"{SLOW}:shell_hang", "--json"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
    )[0]["variants"][1]["variant"]["id"]
    command = [sys.executable, "-m", "tunekit", "compile", f"{SLOW}:shell_hang", "--variant", variant]
    counts = []
    for flags in ([], [], ["--force"]):
        done = subprocess.run([*command, *flags], env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        counts.append(compile_trials(environ))
    assert counts == [1, 1, 2]


def test_an_unwritable_database_is_one_line(environ, tmp_path):
    """Case 31, as the command line shows it: a file stands where the directory should be."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "tunekit", "sweep", f"{SLOW}:shell_slow", "--db", str(tmp_path / "file" / "t.db")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "t.db" in done.stderr
