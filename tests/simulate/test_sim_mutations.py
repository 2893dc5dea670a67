"""Synchronisation taken away from kernels that are right: an answer not looked at, a wait left out, an exit too early.

The attention kernel's mutations are those of benchmarks/simulator_mutations.py; here is a sample.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulate.test_sim_tc_order import COMMIT, LD, MMA, WAIT_LD, kinds, run
from tests.simulate.test_sim_tc_order import WAIT as WAIT_MMA

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "simulator_mutations.py"
SEEDS = range(8)

# Warp 1 takes its time, stores, and arrives; warp 0 waits (or not) and loads.
HANDED_OVER = """
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
mov.u32 %r3, bar;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [%r3], 32;
bar.sync 0;
setp.lt.u32 %p2, %r1, 32;
@%p2 bra CONSUMER;
mov.u32 %r4, 0;
BUSY:
add.u32 %r4, %r4, 1;
setp.lt.u32 %p3, %r4, 400;
@%p3 bra BUSY;
st.shared.u32 [%r2], %r4;
mbarrier.arrive.shared.b64 %rd2, [%r3];
ret;
CONSUMER:
"""
READ = "ld.shared.u32 %r5, [%r2]; @%p1 st.global.u32 [%rd1], %r5; ret;"
TRY = "mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0;"
LOOP = f"WAIT: {TRY} @!%p4 bra WAIT;"
# A look ahead, as CUTLASS's pipelines have it, with the wait made good where it failed.
PEEK = f"{TRY} @%p4 bra GOT; {LOOP} GOT:"


@pytest.fixture
def handed_over(run_ptx: Callable[..., Any], ptx_kernel: Callable[..., str]) -> Callable[[str], list[Any]]:
    def go(wait: str) -> list[Any]:
        variables = ".shared .align 16 .b8 tile[128]; .shared .align 8 .b64 bar;"
        text = ptx_kernel(HANDED_OVER + wait + READ, ".param .u64 out", variables=variables)
        out = {"out": np.zeros(1, np.uint32)}
        return [run_ptx(text, out, ("out",), block=(64, 1, 1), seed=seed, unwritten=("out",)) for seed in SEEDS]

    return go


@pytest.mark.parametrize("wait", [LOOP, PEEK])
def test_a_wait_that_is_made_good_is_clean(handed_over: Callable[[str], list[Any]], wait: str) -> None:
    for ran in handed_over(wait):
        assert not ran.faults, ran.faults[0]
        assert ran.buffers["out"][0] == 400


def test_an_answer_that_nobody_looks_at_is_found(handed_over: Callable[[str], list[Any]]) -> None:
    """Under most seeds: the first wait for a phase that is not over says so, instead of being suspended until it is."""
    found = [bool(ran.kinds & {"data race", "uninitialised read"}) for ran in handed_over(TRY)]
    assert sum(found) >= 5


@pytest.mark.parametrize(
    ("after", "strict", "expected"),
    [
        ("add.u32 %r21, %r20, 1;", False, set()),
        ("add.u32 %r21, %r20, 1;", True, {"register used before its operation is complete"}),
        ("mov.b32 %r21, %r20; add.u32 %r22, %r21, 1;", True, {"register used before its operation is complete"}),
        (f"mov.b32 %r21, %r20; {WAIT_LD} add.u32 %r22, %r21, 1;", True, set()),
    ],
)
def test_a_register_of_a_load_before_its_wait(after: str, strict: bool, expected: set[str]) -> None:
    """The ISA demands the wait; kernels known to be right go without where the register is used."""
    fence = "tcgen05.fence::after_thread_sync;"
    assert kinds(run(MMA + COMMIT + WAIT_MMA + fence + LD + after, strict=strict)) == expected


def test_a_commit_that_arrives_after_the_exit() -> None:
    """The warps must outlive what arrives in their shared memory; an example of CUTLASS's does not."""
    assert all(kinds(run(COMMIT, seed=seed)) == set() for seed in SEEDS)
    found = [kinds(run(COMMIT, seed=seed, strict=True)) for seed in SEEDS]
    assert {"work unfinished at exit"} in found
    assert all(kinds(run(COMMIT + WAIT_MMA, seed=seed, strict=True)) == set() for seed in SEEDS)


TRY_WAIT = "mbarrier.try_wait.parity.shared.b64"
COMMIT_ONE = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
SAMPLE = (
    ("bar.sync", "removed", 1),
    ("bar.arrive", "removed", 1),
    ("fence.proxy.async.shared::cta", "removed", 1),
    (TRY_WAIT, "removed", 1),
    (TRY_WAIT, "ignored", 1),
    ("mbarrier.arrive.shared.b64", "removed", 2),
    ("mbarrier.arrive.expect_tx.shared.b64", "expects nothing", 1),
    ("tcgen05.wait::st.sync.aligned", "removed", 1),
    ("tcgen05.wait::ld.sync.aligned", "removed", 1),
    ("tcgen05.fence::before_thread_sync", "removed", 2),
    (COMMIT_ONE, "removed", 1),
    ("cp.async.bulk.wait_group.read", "removed", 1),
)


@pytest.mark.slow
def test_a_sample_of_the_attention_kernels_mutations_is_found(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    spec = importlib.util.spec_from_file_location("simulator_mutations", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    kernel = benchmark.Kernel("sm_100a", tmp_path)
    assert kernel.run(kernel.ptx, 0, True) == ""
    named = {(m.instruction, m.how, m.number): m for m in benchmark.mutations(kernel.ptx)}
    missed = [key for key in SAMPLE if not any(kernel.run(named[key].of(kernel.ptx), seed, True) for seed in range(3))]
    assert missed == []
