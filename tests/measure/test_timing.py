"""Timing on the host, plans for a cold cache, the protocol's string, and turns on a GPU."""

from __future__ import annotations

import statistics
import subprocess
import sys
import textwrap

import pytest

from tunekit.errors import UserError
from tunekit.measure import choose, turn, usable
from tunekit.measure.job import RunJob, outcome_from_payload
from tunekit.measure.lock import lock_path
from tunekit.measure.protocol import CACHES, clocks_word, protocol, searched_alike
from tunekit.measure.timing import ColdPlan, calls_per_window, cold_plan
from tunekit.model import Values, to_json
from tunekit.trials import Outcome, Stage, Status

ROWS = {"rows": 8}
MIB = 2**20


def test_one_repetition_and_no_warm_up_give_a_number(compiler, shared_worker):
    """Case 42: repetitions 1 and warm-up 0."""
    outcome = shared_worker.time(compiler.job("host_scale", "host_scale", ROWS), 1, 0)
    assert outcome.status is Status.OK
    assert len(outcome.samples_us) == 1 and usable(outcome.samples_us[0])


@pytest.mark.parametrize("repetitions", [0, -1, 1.0, "3", None, True])
def test_repetitions_that_are_none(compiler, shared_worker, repetitions):
    """Case 42: a clear error, in the parent, before anything runs."""
    with pytest.raises(UserError, match=r"repetitions is .*; it must be an int from 1"):
        shared_worker.time(compiler.job("host_scale", "host_scale", ROWS), repetitions)


def test_warm_up_may_be_zero_but_not_less(compiler, shared_worker):
    """Case 42."""
    with pytest.raises(UserError, match=r"warm-up is -1; it must be an int from 0"):
        shared_worker.time(compiler.job("host_scale", "host_scale", ROWS), 1, -1)


def test_a_known_delay_is_measured(compiler, shared_worker):
    """Case 38 on the host: a kernel of 200 us, without what loading and the first call cost."""
    outcome = shared_worker.time(compiler.job("host_scale", "host_scale", ROWS, delay_us=200), 20, 0)
    assert 200 <= statistics.median(outcome.samples_us) < 260
    assert outcome.protocol == "search/2 perf_counter warm random host"


def test_a_final_orders_variants_and_pairs_their_rounds(compiler, shared_worker):
    jobs = {
        name: compiler.job("host_scale", "host_scale", ROWS, **tunables)
        for name, tunables in (
            ("slow", {"delay_us": 1000}),
            ("fast", {"unroll": 2, "delay_us": 0}),
            ("middle", {"delay_us": 200}),
        )
    }
    outcomes = shared_worker.final(list(jobs.values()), 4)
    by_name = {name: outcomes[job.variant.id] for name, job in jobs.items()}
    for outcome in by_name.values():
        assert outcome.ok and len(outcome.samples_us) == 4
        assert outcome.protocol == "final/2 perf_counter warm random host"
        assert [dict(window)["round"] for window in outcome.windows if dict(window)["kept"]] == [0, 1, 2, 3]
        assert outcome.facts["rejected_windows"] == 0
    decision = choose({name: outcome.samples_us for name, outcome in by_name.items()}, default="slow")
    assert decision.winner == "fast" and decision.runner_up == "middle"
    assert decision.margin > 10


def test_the_same_kernel_twice_is_refused_by_name(compiler, shared_worker):
    job = compiler.job("host_scale", "host_scale", ROWS)
    with pytest.raises(UserError, match=job.variant.id):
        shared_worker.final([job, job])
    other = compiler.job("host_scale", "host_scale", {"rows": 9}, unroll=2, delay_us=0)
    with pytest.raises(UserError, match="one problem"):
        shared_worker.final([job, other])
    assert shared_worker.final([]) == {}


def test_jobs_and_outcomes_survive_json(compiler):
    job = compiler.job("host_scale", "host_scale", ROWS)
    assert RunJob.from_payload(job.to_payload()) == job
    outcome = Outcome(
        Stage.MEASURE,
        Status.OK,
        samples_us=(1.5, 2.5),
        protocol="final/1",
        windows=(Values(us=1.5, round=0, kept=True),),
        facts=Values(calls_per_window=3),
    )
    assert outcome_from_payload(to_json(outcome)) == outcome


@pytest.mark.parametrize("sample", [0, -3.0, None, "fast"])
def test_a_child_can_not_report_what_is_no_time(sample):
    """Case 41: a sample that is no time fails the outcome and is not among its samples."""
    payload = to_json(Outcome(Stage.MEASURE, Status.OK))
    outcome = outcome_from_payload({**payload, "samples_us": [1.0, sample]})
    assert outcome.status is Status.LAUNCH_ERROR
    assert outcome.samples_us == ()
    assert "no times" in outcome.reason


def test_a_cold_cache_comes_from_a_flush_or_from_rotation():
    l2 = 60 * MIB
    assert cold_plan(20 * MIB, l2, "flush") == ColdPlan(copies=1, flush=True)
    assert cold_plan(20 * MIB, l2, "rotate") == ColdPlan(copies=13, flush=False)
    assert cold_plan(1000 * MIB, l2, "rotate") == ColdPlan(copies=2, flush=False)
    assert cold_plan(1 * MIB, l2, "rotate") == ColdPlan(copies=1, flush=True), "more copies than there may be"
    assert cold_plan(20 * MIB, l2, "warm") == ColdPlan(copies=1, flush=False)
    assert cold_plan(20 * MIB, 0, "flush") == ColdPlan(copies=1, flush=False), "the host has no L2 to flush"
    assert cold_plan(20 * MIB, l2, "rotate", most_copies=5) == ColdPlan(copies=1, flush=True), "too little memory"
    assert [cold_plan(20 * MIB, l2, cache).cache for cache in CACHES] == list(CACHES), "the record says which it was"
    for size in range(1, 400, 7):
        plan = cold_plan(size * MIB, l2, "rotate")
        others = (plan.copies - 1) * size * MIB
        assert plan.flush or others >= 4 * l2, "other traffic between two uses of one copy"


def test_a_window_holds_whole_rounds_within_the_run_limit():
    rotated, flushed, warm = ColdPlan(13, False), ColdPlan(2, True), ColdPlan(1, False)
    assert calls_per_window(20.0, rotated, run_limit_s=20.0) == 247
    assert calls_per_window(50.0, flushed, run_limit_s=20.0) == 34, "the flushes fill the window too"
    assert calls_per_window(5.0, flushed, run_limit_s=20.0) == 200, "but 1 ms is the kernel's own"
    assert calls_per_window(0.5, flushed, run_limit_s=20.0) == 256
    assert calls_per_window(5.0, flushed, run_limit_s=0.04) == 95, "not over a quarter of the run limit"
    assert calls_per_window(6000.0, ColdPlan(2, False), run_limit_s=20.0) == 2
    assert calls_per_window(0.0, warm, run_limit_s=20.0) == 1024
    assert calls_per_window(400_000.0, ColdPlan(2, False), run_limit_s=0.5) == 1, "two would take longer than the limit"
    for us in (1, 17, 300, 9000):
        count = calls_per_window(us, ColdPlan(3, False), 0.5)
        assert count * us <= 0.5e6 / 4 or count == 1


def test_the_protocol_names_all_that_makes_times_comparable():
    """Case 20, the measuring side: each part of the protocol changes the string."""
    base = protocol("final", "cuda_graph", cache="flush", own_inputs=False, clocks="default_clocks")
    assert base == "final/2 cuda_graph flush_l2 random default_clocks"
    others = {
        protocol("final", "cuda_graph", cache="rotate", own_inputs=False, clocks="default_clocks"),
        protocol("search", "cuda_graph", cache="flush", own_inputs=False, clocks="default_clocks"),
        protocol("final", "events", cache="flush", own_inputs=False, clocks="default_clocks"),
        protocol("final", "cuda_graph", cache="warm", own_inputs=False, clocks="default_clocks"),
        protocol("final", "cuda_graph", cache="flush", own_inputs=True, clocks="default_clocks"),
        protocol(
            "final", "cuda_graph", cache="flush", own_inputs=False, clocks=clocks_word("application clock 1500 MHz")
        ),
    }
    assert len(others | {base}) == 7
    assert clocks_word(None) == clocks_word("default") == "default_clocks"
    assert clocks_word("application clock 1500 MHz") == "clocks_1500_mhz"


def test_a_searchs_time_stands_beside_those_of_its_like_only():
    """Case 20: an older version's, a final's or another cache's search time is not reused."""
    flushed = protocol("search", "events", cache="flush", own_inputs=False, clocks="default_clocks")
    warm = protocol("search", "events", cache="warm", own_inputs=False, clocks="default_clocks")
    host = protocol("search", "perf_counter", cache="warm", own_inputs=False, clocks="host")
    assert [searched_alike(flushed, cache) for cache in CACHES] == [True, True, False]
    assert [searched_alike(warm, cache) for cache in CACHES] == [False, False, True]
    assert all(searched_alike(host, cache) for cache in CACHES)
    for other in (flushed.replace("/2", "/1"), flushed.replace("search", "final"), "", "search/2"):
        assert not searched_alike(other, "flush")


def test_two_tuners_take_turns(tmp_path):
    path = tmp_path / "gpu.lock"
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from tunekit.measure import turn
        with turn(Path({str(path)!r})):
            print("in", flush=True)
            time.sleep(float(sys.argv[1]))
        """)
    waits = []
    with subprocess.Popen([sys.executable, "-c", script, "0.4"], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with turn(path, waits.append):
            assert other.wait(5) == 0, "it had left before this one came in"
    assert len(waits) == 1 and str(path) in waits[0]
    with turn(path, waits.append):
        pass
    assert len(waits) == 1, "nobody to wait for, nothing said"


def test_a_dead_holder_blocks_nobody(tmp_path):
    path = tmp_path / "gpu.lock"
    script = textwrap.dedent(f"""
        import os
        from pathlib import Path
        from tunekit.measure import turn
        with turn(Path({str(path)!r})):
            os.kill(os.getpid(), 9)
        """)
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    waits = []
    with turn(path, waits.append):
        assert waits == []


def test_the_locks_name_is_a_plain_file_and_other_users_can_open_it(tmp_path):
    path = lock_path(0, tmp_path)
    assert path.parent == tmp_path
    with turn(path):
        assert path.stat().st_mode & 0o666 == 0o666
    with pytest.raises(UserError, match="can't take turns"), turn(tmp_path / "absent" / "x.lock"):
        pass
