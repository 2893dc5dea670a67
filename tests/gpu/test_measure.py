"""Verifying and timing on a GPU, with small CuTeDSL kernels compiled through tunekit's own pool."""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.backends import symbol_of
from tunekit.backends.contract import CompileRequest
from tunekit.environment import environment
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.measure import MeasuringWorker, RunJob, choose
from tunekit.measure.sequential import LOOKS
from tunekit.measure.silence import Compiles
from tunekit.model import Footprint, Values
from tunekit.settings import Settings
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.sweep import SweepOptions, audit
from tunekit.trials import Status

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU: torch.cuda is not available", allow_module_level=True)

pytestmark = pytest.mark.gpu

REFERENCE = f"{Path(__file__).resolve().parent.parent / 'specs' / 'cute_measure.py'}:cute_double"
MILLION = {"n": 1 << 20}
GIB = 2**30


class Compiled:
    """The variants of cute_double, compiled for this GPU; `job` picks one by its tunables."""

    def __init__(self, root: Path) -> None:
        self.spec = load_spec(REFERENCE)
        arch = parse_arch(environment(0).arch or "sm_90a")
        problem = self.spec.problem({})
        self.results = {}
        requests = {}
        for variant in expand(self.spec, arch, problem).variants:
            symbol = symbol_of(identity.digest([variant.id]))
            out = str(root / symbol)
            request = CompileRequest(
                REFERENCE, variant.implementation, arch.name, Values(), variant.tunables, symbol, out
            )
            requests[symbol] = (variant, request)
        with Pool(workers=4, limits=Limits(60.0, 120.0, 4 * GIB)) as pool:
            for result in pool.run([compile_task(request) for _, request in requests.values()]):
                self.results[requests[result.id][0]] = result

    def job(self, problem: dict, *, id: str | None = None, **tunables) -> RunJob:
        wanted = {"fault": "none", "smem_bytes": 0, "cycles": 0, **tunables}
        ((variant, result),) = [(v, r) for v, r in self.results.items() if dict(v.tunables) == wanted]
        assert result.ok, result.reason
        if id:
            variant = dataclasses.replace(variant, id=id)
        return RunJob(REFERENCE, self.spec.problem(problem), variant, result.value["files"]["so"], result.id)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return Compiled(tmp_path_factory.mktemp("cute_double"))


@pytest.fixture(scope="module")
def worker():
    with MeasuringWorker(0, run_limit_s=5.0) as shared:
        yield shared


def test_only_the_right_one_may_win(compiled, worker):
    """Case 44, on the GPU: the wrong ones fail, each with what was wrong, and only the right one can be chosen."""
    expected = {
        "none": (Status.OK, ""),
        "half": (Status.WRONG_RESULT, "y: unwritten at [524288]; 524288 of 1048576 elements, in n 524288-1048575"),
        "nan": (Status.WRONG_RESULT, "y: NaN at [349525]; 1 of 1048576 elements"),
        "one_element": (Status.WRONG_RESULT, "y: mismatch at [524289]"),
        "odd": (Status.WRONG_RESULT, "y: unwritten at [0]; 1 of 1 elements [n=1"),
        "past_end": (Status.WRONG_RESULT, "write outside y: 4 bytes written past its end"),
    }
    samples = {}
    for fault, (status, words) in expected.items():
        outcome = worker.verify(compiled.job(MILLION, fault=fault))
        assert outcome.status is status, (fault, outcome.reason)
        assert words in outcome.reason, (fault, outcome.reason)
        if outcome.ok:
            samples[fault] = [5.0]
    assert choose(samples).winner == "none"


def test_the_shared_memory_limit_is_the_drivers(compiled, worker):
    """Case 12: the limit itself is launched and right; 4 bytes more never reach the back end."""
    assert worker.verify(compiled.job(MILLION, smem_bytes=232_448)).status is Status.OK
    ((_, over),) = [(v, r) for v, r in compiled.results.items() if v.tunables.smem_bytes == 232_452]
    assert over.status is Status.OVER_BUDGET
    assert "232452" in over.reason and "232448" in over.reason


def test_five_variants_with_an_out_of_bounds_write_in_the_middle(compiled):
    """Case 49: the faulty one is named, the four others are verified and timed as usual."""
    others = [{"smem_bytes": 0}, {"smem_bytes": 1024}, {"cycles": 8000}, {"cycles": 80_000}]
    jobs = [compiled.job(MILLION, **tunables) for tunables in others]
    jobs.insert(2, compiled.job(MILLION, fault="out_of_bounds"))
    with MeasuringWorker(0, run_limit_s=5.0) as worker:
        verified = [worker.verify(job, seeds=1) for job in jobs]
        timed = [worker.time(job, 5) for job in jobs]
        final = worker.final(jobs, 4)
    for outcomes in (verified, timed, list(final.values())):
        assert [outcome.ok for outcome in outcomes] == [True, True, False, True, True], [o.reason for o in outcomes]
        assert outcomes[2].status is Status.DEVICE_FAULT
        assert "illegal" in outcomes[2].reason or "misaligned" in outcomes[2].reason
    assert worker.late_faults == []


def test_a_kernel_that_spins_for_ever(compiled):
    """Case 50: killed by a run limit of 0.5 s; the next variant is measured on a fresh context."""
    with MeasuringWorker(0, run_limit_s=0.5) as worker:
        good = compiled.job(MILLION)
        assert worker.verify(good).ok
        first = worker.pid
        begin = time.monotonic()
        outcome = worker.verify(compiled.job(MILLION, fault="spin"))
        assert outcome.status is Status.RUN_TIMEOUT
        assert "took over 0.5 s in run (launch 1" in outcome.reason
        assert time.monotonic() - begin < 20
        assert worker.verify(good).ok and worker.time(good, 3).ok
        assert worker.pid != first


def test_one_variant_that_does_not_fit_the_memory(compiled):
    """Case 51: the GPU is 95 % full; a problem of 10 GB is out of memory, the rest go on."""
    with MeasuringWorker(0, run_limit_s=5.0) as worker:
        small = compiled.job(MILLION)
        assert worker.verify(small, seeds=1).ok  # its context is there before the memory is taken
        free, total = torch.cuda.mem_get_info(0)
        wanted = int(free - total * 0.05)
        if wanted <= 0:
            pytest.skip(f"the GPU is fuller than 95 % already: {free / GIB:.1f} GiB free")
        blocks = [torch.empty(wanted, dtype=torch.uint8, device="cuda:0")]
        try:
            large = compiled.job({"n": 1_342_177_280})  # x and y of 5 GiB each
            for outcome in (worker.verify(large, seeds=1), worker.time(large, 2)):
                assert outcome.status is Status.LAUNCH_ERROR, outcome.reason
                assert outcome.reason.startswith("out of memory"), outcome.reason
            outcomes = worker.final([small, compiled.job(MILLION, cycles=8000)], 2)
            assert all(outcome.ok for outcome in outcomes.values())
        finally:
            blocks.clear()
            torch.cuda.empty_cache()


def test_an_artifact_from_the_store_is_verified_in_a_new_process(compiled, tmp_path):
    """Case 47: stored, found again, and run by a process that has never compiled anything."""
    artifacts = pytest.importorskip("tunekit.store.artifacts")
    job = compiled.job(MILLION)
    result = next(r for r in compiled.results.values() if r.id == job.symbol)
    store = artifacts.ArtifactStore(tmp_path / "artifacts")
    files = {role: Path(path) for role, path in result.value["files"].items()}
    key = identity.digest([job.variant.id])
    store.put(key, job.symbol, files, footprint=Footprint(), facts=Values(), seconds=Values())
    again = artifacts.ArtifactStore(tmp_path / "artifacts")
    found = again.get(key)
    assert found is not None and found.symbol == job.symbol
    stored = dataclasses.replace(job, so=str(again.path(found, "so")))
    with MeasuringWorker(0, run_limit_s=5.0) as worker:
        assert worker.verify(stored).status is Status.OK


def apart(one, other) -> float:
    """The median of two outcomes' ratios, round by round, minus 1."""
    rounds = min(len(one.samples_us), len(other.samples_us))
    return statistics.median(one.samples_us[i] / other.samples_us[i] for i in range(rounds)) - 1


@pytest.mark.parametrize("cache", ["flush", "rotate", "warm"])
def test_the_same_variant_first_middle_and_last(compiled, worker, cache):
    """Case 36: one kernel listed three times among others is within 1 % of itself, and alone it ties with itself."""
    same = [compiled.job(MILLION, cycles=8000, id=f"same-{place}") for place in ("first", "middle", "last")]
    others = [compiled.job(MILLION), compiled.job(MILLION, smem_bytes=1024)]
    outcomes = worker.final([same[0], others[0], same[1], others[1], same[2]], cache=cache)
    found = [outcomes[job.variant.id] for job in same]
    gaps = [apart(one, other) for one, other in ((found[1], found[0]), (found[2], found[0]), (found[2], found[1]))]
    assert all(abs(gap) < 0.01 for gap in gaps), gaps
    decision = choose({id: outcome.samples_us for id, outcome in outcomes.items()})
    assert decision.winner in [job.variant.id for job in others]
    alone = worker.final(same, cache=cache)
    again = choose({id: outcome.samples_us for id, outcome in alone.items()})
    assert again.outcome != "winner", again
    assert all(standing.verdict != "slower" for standing in again.standings.values()), again


def test_a_clear_loser_is_dropped_and_the_protected_race_on(compiled, worker):
    """Racing: what takes many times as long leaves at the first look; a default or an incumbent stays to the end."""
    slow = compiled.job(MILLION, cycles=80_000)
    near = [compiled.job(MILLION, cycles=8000, id=f"same-{place}") for place in ("first", "last")]
    outcomes = worker.final([slow, *near])
    assert len(outcomes[slow.variant.id].samples_us) == LOOKS[0]
    assert all(len(outcomes[job.variant.id].samples_us) >= LOOKS[0] for job in near)
    kept = worker.final([slow, *near], protected=(slow.variant.id,))
    assert len({len(outcome.samples_us) for outcome in kept.values()}) == 1


def test_the_flush_adds_nothing(compiled, worker):
    """Case 37: a kernel that does next to nothing, with the flush on and off: less than 1 us apart."""
    job = compiled.job({"n": 1})
    cold = worker.final([job])[job.variant.id]
    warm = worker.final([job], cache="warm")[job.variant.id]
    assert cold.facts["flushed"] is True and warm.facts["flushed"] is False
    assert " flush_l2 " in cold.protocol and " warm " in warm.protocol
    times = statistics.median(cold.samples_us), statistics.median(warm.samples_us)
    assert abs(times[0] - times[1]) < 1.0, times


def test_each_cache_mode_is_in_the_record(compiled, worker):
    """A flush takes one copy of the arguments, rotation many; the protocol and the facts name which it was."""
    job = compiled.job(MILLION)
    found = {cache: worker.final([job], 2, cache=cache)[job.variant.id] for cache in ("flush", "rotate", "warm")}
    assert [outcome.protocol.split()[2] for outcome in found.values()] == ["flush_l2", "rotate_l2", "warm"]
    assert found["flush"].facts["argument_copies"] == found["warm"].facts["argument_copies"] == 1
    assert found["rotate"].facts["argument_copies"] > 10
    small = compiled.job({"n": 4096})
    assert " flush_l2 " in worker.final([small], 2, cache="rotate")[small.variant.id].protocol, "too many copies"


def graph_replay_us(job: RunJob, calls: int = 200) -> float:
    """A plain measurement of its own: one graph of many calls, replayed."""
    from tunekit.backends.load import load_artifact

    function = load_artifact(Path(job.so), job.symbol)
    x = torch.randn(job.problem.n, device="cuda:0")
    y = torch.empty_like(x)
    function(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function(x, y)
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / calls)
    return statistics.median(times[5:])


def test_a_kernel_of_about_5_us(compiled, worker):
    """Case 38: within 20 % of graph replay; neither compile nor first call are in a timed region."""
    job = compiled.job({"n": 4096}, cycles=8000)
    known = graph_replay_us(job)
    assert 3 < known < 12, known
    for cache in ("flush", "warm"):
        outcome = worker.final([job], cache=cache)[job.variant.id]
        measured = statistics.median(outcome.samples_us)
        assert measured == pytest.approx(known, rel=0.2), (cache, measured, known)
        assert 0 <= outcome.facts["host_us"] < 50, "what starting the graph adds was taken off"
    first = worker.time(job, 1, 0)
    assert len(first.samples_us) == 1, "case 42: one repetition, no warm-up"
    assert first.samples_us[0] < 3 * known, "loading the module takes far longer"
    searched = worker.time(job)
    assert abs(statistics.median(searched.samples_us) - known) < 3.0, "events, less an empty pair of them"
    assert 0 <= searched.facts["host_us"] < 10


def test_a_kernel_of_5_us_beside_busy_compile_workers(compiled, worker):
    """Case 40: compiles give way to the final, so its times are those without any: within 3 %.

    Without a flush, whose own time moves by a hundredth between two finals, which is a tenth of this kernel's.
    """
    jobs = [compiled.job({"n": 4096}, cycles=8000, id=f"same-{place}") for place in ("first", "last")]
    quiet = statistics.median(worker.final(jobs, cache="warm")[jobs[0].variant.id].samples_us)
    workers = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    log, done = [], threading.Event()

    def signal_all(number: int) -> None:
        log.append(number)
        for process in workers:
            process.send_signal(number)

    def compile_meanwhile() -> None:
        with Compiles() as compiles:
            while not done.wait(0.2):
                compiles.give_way(lambda: signal_all(signal.SIGSTOP), lambda: signal_all(signal.SIGCONT))

    thread = threading.Thread(target=compile_meanwhile)
    thread.start()
    try:
        time.sleep(0.5)
        outcome = worker.final(jobs, cache="warm")[jobs[0].variant.id]
    finally:
        done.set()
        thread.join()
        for process in workers:
            process.kill()
            process.wait()
    assert log[:1] == [signal.SIGSTOP] and "compiling_beside" not in outcome.facts
    assert statistics.median(outcome.samples_us) == pytest.approx(quiet, rel=0.03)


def test_tuning_twice_from_empty(tmp_path):
    """Case 43: where two sweeps from empty name different winners, one of them found both in one tie."""
    spec = load_spec(REFERENCE)
    arch = parse_arch(environment(0).arch or "sm_90a")
    right = [v.id for v in expand(spec, arch, spec.problem(MILLION)).variants if v.tunables.fault == "none"]
    settings = Settings(database=tmp_path / "tunekit.db", artifacts=tmp_path / "artifacts", run_limit_s=5.0)
    options = SweepOptions(arch=arch.name, variants=tuple(right))
    report = audit(REFERENCE, [MILLION], options, settings, lambda event: None, 2)
    (agreement,) = report.agreements
    assert agreement.ok, agreement
    for winner in agreement.winners:
        assert winner.outcome and winner.rounds and winner.cases and winner.final


def test_a_final_keeps_what_the_gpu_did(compiled, worker):
    """Case 39, the record: protocol with method, cache, data and clocks; clock and power beside each window."""
    jobs = [compiled.job(MILLION), compiled.job(MILLION, cycles=8000)]
    outcomes = worker.final(jobs, 4)
    for outcome in outcomes.values():
        assert outcome.protocol.startswith("final/2 cuda_graph flush_l2 random ")
        kept = [dict(window) for window in outcome.windows if dict(window)["kept"]]
        assert len(kept) == len(outcome.samples_us) == 4
        assert [window["us"] for window in kept] == list(outcome.samples_us)
        assert all(window["sm_mhz"] > 500 and window["power_w"] > 50 for window in kept), kept
    quick = worker.time(jobs[0])
    assert quick.protocol.startswith("search/2 events flush_l2 random ")
    assert len(quick.samples_us) == 10


def test_a_long_kernel_is_timed_by_events(compiled, worker):
    """Launch time is hidden by itself above half a millisecond; the protocol says which method it was."""
    job = compiled.job({"n": 1 << 28})
    outcome = worker.final([job], 2)[job.variant.id]
    assert outcome.ok, outcome.reason
    assert " events flush_l2 " in outcome.protocol
    bytes_moved = 8 * (1 << 28)
    assert 300 < statistics.median(outcome.samples_us) < 5000
    assert bytes_moved / statistics.median(outcome.samples_us) * 1e6 < 6e12, "faster than the memory can be"
