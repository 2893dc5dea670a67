"""What a real run asks for, recorded into a workload that a sweep takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import tunekit
from tests.dispatch.test_dispatch_processes import ROOT
from tunekit.errors import NoKernelError, UserError
from tunekit.spec import load_spec
from tunekit.spec.workloads import read_workload

SERVE = """
import multiprocessing, os, signal, sys, time
import torch
import tunekit
kernel = tunekit.load(sys.argv[1])

def serve(rows, times):
    for _ in range(times):
        kernel(torch.ones(rows, 64))

serve(64, 5)
serve(48, 2)
how = sys.argv[2]
if how == "fork":
    workers = [multiprocessing.get_context("fork").Process(target=serve, args=(64, 10)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
if how == "sigterm":
    print("ready", flush=True)
    time.sleep(60)
if how == "fails":
    sys.exit(7)
"""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if not line.startswith("#")]


def counts(path):
    return {(item["spec"], item["rows"]): item["count"] for item in lines(path)}


def test_calls_are_counted_by_problem_and_swept_most_frequent_first(tuned, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, fallback="bucket", **tuned.places)
    path = tmp_path / "workload.jsonl"
    kernel(torch.ones(64, 64))
    kernel(torch.ones(40, 64))
    with tunekit.capture(path):
        for _ in range(3):
            kernel(torch.ones(64, 64))
        for _ in range(2):
            kernel(x=torch.ones(64, 64))
        kernel.refresh()  # tables are replaced; their counts stay
        kernel(torch.ones(64, 64))
        other = tunekit.load(tuned.reference, native=False, **tuned.places)
        for _ in range(9):
            other(torch.ones(48, 64))
        with pytest.raises(NoKernelError):
            kernel(torch.ones(300, 64))
    kernel(torch.ones(64, 64))
    assert counts(path) == {("host_scale", 48): 9, ("host_scale", 64): 6, ("host_scale", 300): 1}
    assert path.read_text().startswith("# 3 problems, 16 calls\n")
    assert [problem.rows for problem in read_workload(tuned.spec, path)] == [48, 64, 300]
    assert kernel._counters.problems is None, "nothing is recorded any more"


def test_counts_survive_tables_that_grow_and_are_dropped(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr("tunekit.dispatch.kernel.MAX_KEYS", 128)
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    for native in (True, False):
        kernel = tunekit.load(tuned.reference, native=native, **tuned.places)
        path = tmp_path / f"{native}.jsonl"
        with tunekit.capture(path):
            for rows in range(1, 400):
                for _ in range(1 + rows % 3):
                    kernel(torch.ones(rows, 64))
        assert counts(path) == {("host_scale", rows): 1 + rows % 3 for rows in range(1, 400)}


def test_mistakes_of_a_capture_are_said(tuned, tmp_path):
    path = tmp_path / "workload.jsonl"
    with pytest.raises(UserError, match="no kernel was called"), tunekit.capture(path):
        pass
    assert not path.exists()
    with pytest.raises(UserError, match="under way"), tunekit.capture(path), tunekit.capture(path):
        pass
    with pytest.raises(UserError, match="can't write the workload"), tunekit.capture("/proc/none/w.jsonl"):
        pass


def test_a_workload_of_several_specs_gives_each_its_own(tuned, tmp_path):
    path = tmp_path / "several.jsonl"
    path.write_text(
        '{"spec": "host_scale", "rows": 5, "count": 2}\n{"spec": "other", "n": 3}\n{"rows": 7, "count": 4}\n'
    )
    assert [problem.rows for problem in read_workload(tuned.spec, path)] == [7, 5]
    with pytest.raises(UserError, match=r"no problem of host_moments \(there are some of host_scale, other\)"):
        path.write_text('{"spec": "host_scale", "rows": 5}\n{"spec": "other", "n": 3}\n')
        read_workload(load_spec(str(tuned.specs / "host_moments.py")), path)


def command(tuned, *words: object, **more):
    environ = {**os.environ, "TUNEKIT_CACHE": str(tuned.root), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "tunekit", *map(str, words)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def captured(tuned, path, how):
    program = tuned.root / "serve.py"
    program.write_text(SERVE)
    return command(tuned, "capture", "-o", path, sys.executable, program, tuned.reference, how)


def test_the_command_merges_what_all_processes_asked_for_and_a_sweep_takes_it(tuned, tmp_path):
    """capture -> sweep --workload -> served: the whole way round, forked workers too."""
    tuned.tune({"rows": 1024}, unroll=4, delay_us=0)
    path = tmp_path / "workload.jsonl"
    process = captured(tuned, path, "fork")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert counts(path) == {("host_scale", 64): 25, ("host_scale", 48): 2}
    assert "2 problems of host_scale; 27 calls in 3 processes" in err
    assert f"tunekit sweep FILE.py:host_scale --workload {path}  (FILE.py: the spec's file)" in err
    sweep = command(
        tuned,
        "sweep",
        tuned.reference,
        "--workload",
        path,
        "--budget",
        2,
        "--final-rounds",
        20,
        "--final-time",
        3,
        "--cases",
        "problem",
        "--json",
    )
    out, err = sweep.communicate(timeout=150)
    assert sweep.returncode == 0, err
    assert [problem["problem"]["rows"] for problem in json.loads(out)["problems"]] == [64, 48]
    assert tunekit.load(tuned.reference, **tuned.places).choice(torch.ones(64, 64)).level.value in ("exact", "bucket")


def test_the_command_keeps_what_a_terminated_program_asked_for(tuned, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    path = tmp_path / "workload.jsonl"
    process = captured(tuned, path, "sigterm")
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert time.monotonic() - began < 10
    assert counts(path) == {("host_scale", 64): 5, ("host_scale", 48): 2}


@pytest.mark.slow
def test_the_commands_status_is_the_programs(tuned, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    process = captured(tuned, tmp_path / "w.jsonl", "fails")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7, err
    assert counts(tmp_path / "w.jsonl")["host_scale", 64] == 5
    for words, said in (
        (("capture", "-o", tmp_path / "w.jsonl", "/nowhere/program"), "can't start /nowhere/program"),
        (
            ("capture", "-o", "/proc/none/w.jsonl", "true"),
            "can't write the workload /proc/none/w.jsonl: /proc/none is no directory",
        ),
    ):
        process = command(tuned, *words)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and said in err
    nothing = command(tuned, "capture", "-o", tmp_path / "none.jsonl", "true")
    _, err = nothing.communicate(timeout=60)
    assert nothing.returncode == 0 and "nothing was captured" in err and not (tmp_path / "none.jsonl").exists()
