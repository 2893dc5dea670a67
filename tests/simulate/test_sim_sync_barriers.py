"""Barriers and mbarriers in kernels (PTX ISA 9.7.13): right results under several schedules, and each misuse once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from several_runs import clean, kinds, messages

Run = Callable[..., Any]
Text = Callable[..., str]
SEEDS = range(4)
# %rd1 = out + 4 * tid, %r1 = tid, %p1 = first thread, %p2 = first warp, %r9 = tile + 4 * tid
START = """
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.u64 %rd1, %rd1, %rd3;
setp.eq.u32 %p1, %r1, 0;
setp.lt.u32 %p2, %r1, 32;
shl.b32 %r8, %r1, 2;
mov.u32 %r9, tile;
add.u32 %r9, %r9, %r8;
"""
VARIABLES = ".shared .align 16 .b8 tile[4096]; .shared .align 8 .b64 bar; .shared .align 8 .b64 bar2;"


@pytest.fixture
def execute(run_ptx: Run, ptx_kernel: Text) -> Callable[..., list[Any]]:
    """Runs a body under several seeds; returns every run."""

    def go(body: str, threads: int, *, seeds: Any = SEEDS, variables: str = VARIABLES, **more: Any) -> list[Any]:
        text = ptx_kernel(START + body, ".param .u64 out", variables=variables)
        out = np.zeros(threads, np.uint32)
        size = more.pop("size", threads)
        out = np.zeros(size, np.uint32)
        return [
            run_ptx(text, {"out": out}, ("out",), block=(threads, 1, 1), seed=seed, unwritten=("out",), **more)
            for seed in seeds
        ]

    return go


REVERSE = """
st.shared.u32 [%r9], %r1;
{barrier}
xor.b32 %r8, %r1, {mask};
shl.b32 %r8, %r8, 2;
mov.u32 %r9, tile;
add.u32 %r9, %r9, %r8;
ld.shared.u32 %r3, [%r9];
st.global.u32 [%rd1], %r3;
ret;
"""


class TestBarriers:
    def test_a_warp_that_arrives_and_then_waits_counts_twice(self, execute: Run) -> None:
        """As flash-attn-4's first warpgroup on sm_90a lets itself go first."""
        body = "@%p2 bar.arrive 2, 64;\n@%p2 bar.sync 2, 64;\nst.global.u32 [%rd1], %r1;\nret;"
        assert (clean(execute(body, 64)) == np.arange(64)).all()

    @pytest.mark.parametrize(
        "barrier",
        [
            "bar.sync 0;",
            "bar.cta.sync 3, 128;",
            "barrier.sync 0;",
            "barrier.cta.sync.aligned 15, 128;",
            "mov.u32 %r5, 7; bar.sync %r5;",
        ],
    )
    def test_all_threads_meet(self, execute: Run, barrier: str) -> None:
        out = clean(execute(REVERSE.format(barrier=barrier, mask=127), 128))
        assert (out == 127 - np.arange(128)).all()

    def test_none_is_a_race(self, execute: Run) -> None:
        assert "data race" in kinds(execute(REVERSE.format(barrier="", mask=127), 128))

    def test_a_warp_alone_needs_none(self, execute: Run) -> None:
        out = clean(execute(REVERSE.format(barrier="bar.warp.sync 0xffffffff;", mask=31), 32))
        assert (out == 31 - np.arange(32)).all()

    def test_partial_last_warp(self, execute: Run) -> None:
        out = clean(execute(REVERSE.format(barrier="bar.sync 0;", mask=1), 48))
        assert (out == np.arange(48) ^ 1).all()

    def test_producer_and_consumer(self, execute: Run) -> None:
        body = """
        mov.u32 %r4, 0;
        mov.u32 %r5, 0;
        @!%p2 bra CONSUMER;
        PRODUCER:
        bar.sync 1, 64;
        st.shared.u32 [%r9], %r4;
        bar.arrive 2, 64;
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %p3, %r4, 5;
        @%p3 bra PRODUCER;
        bar.sync 1, 64;
        ret;
        CONSUMER:
        bar.arrive 1, 64;
        bar.sync 2, 64;
        ld.shared.u32 %r6, [%r9+-128];
        add.u32 %r5, %r5, %r6;
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %p3, %r4, 5;
        @%p3 bra CONSUMER;
        bar.arrive 1, 64;
        st.global.u32 [%rd1], %r5;
        ret;
        """
        out = clean(execute(body, 64))
        assert (out[32:] == 10).all()

    def test_arrive_alone_orders_nothing_back(self, execute: Run) -> None:
        """A stage that is refilled before its reader has said that it is done."""
        body = """
        @!%p2 bra CONSUMER;
        st.shared.u32 [%r9], 1;
        bar.arrive 2, 64;
        st.shared.u32 [%r9], 2;
        ret;
        CONSUMER:
        bar.sync 2, 64;
        ld.shared.u32 %r6, [%r9+-128];
        st.global.u32 [%rd1], %r6;
        ret;
        """
        assert kinds(execute(body, 64)) == {"data race"}

    @pytest.mark.parametrize(("operation", "expected"), [("popc.u32 %r3", 33), ("and.pred %p5", 0), ("or.pred %p5", 1)])
    def test_red(self, execute: Run, operation: str, expected: int) -> None:
        select = "" if "popc" in operation else "selp.u32 %r3, 1, 0, %p5;"
        body = f"setp.le.u32 %p4, %r1, 32; bar.red.{operation}, 1, %p4; {select} st.global.u32 [%rd1], %r3; ret;"
        assert (clean(execute(body, 64)) == expected).all()

    def test_exited_warps_do_not_count(self, execute: Run) -> None:
        body = "@%p2 ret; bar.sync 0; st.global.u32 [%rd1], %r1; ret;"
        assert (clean(execute(body, 96))[32:] == np.arange(32, 96)).all()

    def test_threads_apart_at_an_unaligned_barrier(self, execute: Run) -> None:
        body = """
        st.shared.u32 [%r9], %r1;
        setp.lt.u32 %p3, %r1, 16;
        @%p3 bra ONE;
        barrier.sync 0;
        ld.shared.u32 %r3, [tile];
        bra DONE;
        ONE:
        barrier.sync 0;
        ld.shared.u32 %r3, [tile+252];
        DONE:
        st.global.u32 [%rd1], %r3;
        ret;
        """
        out = clean(execute(body, 64))
        assert (out == np.where(np.arange(64) < 16, 63, 0)).all()

    def test_deadlock_says_who_is_missing(self, execute: Run) -> None:
        runs = execute("@%p2 bra AWAY; bar.sync 1, 96; ret; AWAY: bar.sync 2, 64; ret;", 96)
        assert kinds(runs) == {"deadlock"}
        assert "barrier 1: 64 of 96 threads have arrived (warps 1, 2)" in messages(runs)
        assert "barrier 2: 32 of 64 threads have arrived (warps 0)" in messages(runs)

    def test_bad_count(self, execute: Run) -> None:
        assert "is given 33 threads" in messages(execute("bar.sync 1, 33; ret;", 64))

    def test_counts_that_disagree(self, execute: Run) -> None:
        runs = execute(
            "@%p2 bra A; setp.ge.u32 %p3, %r1, 64; @%p3 ret; bar.sync 1, 64; ret; A: bar.arrive 1, 96; ret;", 96
        )
        assert "barrier misuse" in kinds(runs)
        assert "threads while" in messages(runs)

    def test_arriving_twice(self, execute: Run) -> None:
        runs = execute("@!%p2 ret; bar.arrive 1, 96; bar.arrive 1, 96; ret;", 96)
        assert "arrives at barrier 1 again" in messages(runs)

    def test_no_such_barrier(self, execute: Run) -> None:
        assert "barrier 16: a CTA has barriers 0 to 15" in messages(execute("bar.sync 16; ret;", 32))

    def test_an_aligned_barrier_under_a_guard(self, execute: Run) -> None:
        assert kinds(execute("setp.lt.u32 %p3, %r1, 16; @%p3 bar.sync 0; ret;", 32)) == {"divergence"}


# One producer thread fills, all wait: %r6 = barrier address.
INIT = """
mov.u32 %r6, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r6], {count};
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
WAIT = """
WAIT{n}:
mbarrier.try_wait.parity.shared::cta.b64 %p9, [%r6], {parity};
@!%p9 bra WAIT{n};
"""


class TestMbarriers:
    @pytest.mark.parametrize(
        "arrive",
        [
            "mbarrier.arrive.shared.b64 %rd9, [%r6];",
            "mbarrier.arrive.shared::cta.b64 _, [%r6], 1;",
            "mbarrier.arrive.release.cta.shared::cta.b64 %rd9, [%r6];",
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];",
            "mov.u64 %rd8, bar; cvta.shared.u64 %rd8, %rd8; mbarrier.arrive.b64 %rd9, [%rd8];",
        ],
    )
    def test_all_threads_meet(self, execute: Run, arrive: str) -> None:
        body = INIT.format(count=128) + REVERSE.format(barrier=arrive + WAIT.format(n=0, parity=0), mask=127)
        out = clean(execute(body, 128))
        assert (out == 127 - np.arange(128)).all()

    def test_state_and_test_wait(self, execute: Run) -> None:
        barrier = """
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        AGAIN:
        mbarrier.test_wait.shared.b64 %p9, [%r6], %rd9;
        @!%p9 bra AGAIN;
        """
        out = clean(execute(INIT.format(count=128) + REVERSE.format(barrier=barrier, mask=127), 128))
        assert (out == 127 - np.arange(128)).all()

    @pytest.mark.parametrize(
        ("arrive", "wait"),
        [
            ("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r6];", "mbarrier.try_wait.parity.shared.b64"),
            ("mbarrier.arrive.shared::cta.b64 _, [%r6];", "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64"),
        ],
    )
    def test_relaxed_orders_nothing(self, execute: Run, arrive: str, wait: str) -> None:
        body = INIT.format(count=128) + REVERSE.format(
            barrier=f"{arrive} W: {wait} %p9, [%r6], 0; @!%p9 bra W;", mask=127
        )
        assert kinds(execute(body, 128)) == {"data race"}

    def test_relaxed_with_fences(self, execute: Run) -> None:
        barrier = """
        fence.acq_rel.cta;
        mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r6];
        W: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p9, [%r6], 0;
        @!%p9 bra W;
        fence.acq_rel.cta;
        """
        out = clean(execute(INIT.format(count=128) + REVERSE.format(barrier=barrier, mask=127), 128))
        assert (out == 127 - np.arange(128)).all()

    def test_ring_of_one_stage(self, execute: Run) -> None:
        """full and empty barriers over five rounds, the phase bit flipping."""
        body = """
        mov.u32 %r6, bar;
        mov.u32 %r7, bar2;
        @%p1 mbarrier.init.shared.b64 [%r6], 32;
        @%p1 mbarrier.init.shared.b64 [%r7], 32;
        bar.sync 0;
        mov.u32 %r4, 0;
        mov.u32 %r5, 0;
        @!%p2 bra CONSUMER;
        PRODUCER:
        and.b32 %r10, %r4, 1;
        xor.b32 %r10, %r10, 1;
        P: mbarrier.try_wait.parity.shared.b64 %p9, [%r7], %r10, 1000;
        @!%p9 bra P;
        st.shared.u32 [%r9], %r4;
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %p3, %r4, 5;
        @%p3 bra PRODUCER;
        ret;
        CONSUMER:
        and.b32 %r10, %r4, 1;
        C: mbarrier.try_wait.parity.shared.b64 %p9, [%r6], %r10, 1000;
        @!%p9 bra C;
        ld.shared.u32 %r11, [%r9+-128];
        mbarrier.arrive.shared.b64 %rd9, [%r7];
        add.u32 %r5, %r5, %r11;
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %p3, %r4, 5;
        @%p3 bra CONSUMER;
        st.global.u32 [%rd1], %r5;
        ret;
        """
        assert (clean(execute(body, 64, seeds=range(8)))[32:] == 10).all()

    def test_wrong_phase_is_found(self, execute: Run) -> None:
        """The consumer waits for the parity that is already over, so it reads too early."""
        body = (
            INIT.format(count=32)
            + """
        @!%p2 bra CONSUMER;
        st.shared.u32 [%r9], 1;
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        ret;
        CONSUMER:
        """
            + WAIT.format(n=0, parity=1)
            + "ld.shared.u32 %r11, [%r9+-128]; st.global.u32 [%rd1], %r11; ret;"
        )
        assert kinds(execute(body, 64)) & {"data race", "uninitialised read"}

    def test_peeking_does_not_deadlock(self, execute: Run) -> None:
        """A try_wait for something that the same warp will bring about later, if the wait fails."""
        body = (
            INIT.format(count=1)
            + """
        @!%p2 ret;
        mbarrier.try_wait.parity.shared.b64 %p9, [%r6], 0;
        @%p1 mbarrier.arrive.shared.b64 %rd9, [%r6];
        selp.u32 %r3, 1, 0, %p9;
        """
            + WAIT.format(n=0, parity=0)
            + "st.global.u32 [%rd1], %r3; ret;"
        )
        assert (clean(execute(body, 64))[:32] == 0).all()

    def test_pending_count(self, execute: Run) -> None:
        body = (
            INIT.format(count=40)
            + """
        mbarrier.arrive.noComplete.shared.b64 %rd9, [%r6], 1;
        mbarrier.pending_count.b64 %r3, %rd9;
        st.global.u32 [%rd1], %r3;
        ret;
        """
        )
        assert (clean(execute(body, 32)) == 40 - np.arange(32)).all()

    def test_drop(self, execute: Run) -> None:
        """Phase 0 has 64 arrivals, of which 32 drop out; phase 1 has 32."""
        body = (
            INIT.format(count=64)
            + """
        st.shared.u32 [%r9], %r1;
        @%p2 mbarrier.arrive_drop.shared.b64 %rd9, [%r6];
        @%p2 ret;
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        """
            + WAIT.format(n=0, parity=0)
            + "mbarrier.arrive.shared.b64 %rd9, [%r6];"
            + WAIT.format(n=1, parity=1)
            + """
        ld.shared.u32 %r3, [%r9+-128];
        st.global.u32 [%rd1], %r3;
        ret;
        """
        )
        assert (clean(execute(body, 64))[32:] == np.arange(32)).all()

    def test_transactions_by_hand(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + """
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 96;
        @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r6], 32;
        @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r6], 128;
        """
            + WAIT.format(n=0, parity=0)
            + "st.global.u32 [%rd1], 1; ret;"
        )
        runs = execute(body, 32)
        # The expected bytes of an expect_tx after the phase's last arrival come in time: the count was not yet zero.
        assert (clean(runs) == 1).all()


class TestMbarrierMisuse:
    def test_deadlock_text(self, execute: Run) -> None:
        body = (
            INIT.format(count=33)
            + """
        @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r6], 16384;
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        """
            + WAIT.format(n=0, parity=0)
            + "ret;"
        )
        runs = execute(body, 32)
        assert "deadlock" in kinds(runs)
        assert (
            "mbarrier at shared 0x1400 (phase 0, waiting for parity 0): "
            "1 of 33 arrivals and 16384 bytes of transactions outstanding"
        ) in messages(runs)

    @pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
    def test_one_arrival_short(self, execute: Run, wait: str) -> None:
        body = (
            INIT.format(count=64)
            + f"""
        @%p2 mbarrier.arrive.shared.b64 %rd9, [%r6];
        W: mbarrier.{wait}.parity.shared.b64 %p9, [%r6], 0;
        @!%p9 bra W;
        ret;
        """
        )
        runs = execute(body, 64)
        assert kinds(runs) == {"deadlock"}
        assert "32 of 64 arrivals outstanding" in messages(runs)

    def test_too_many_arrivals(self, execute: Run) -> None:
        body = (
            INIT.format(count=8)
            + """
        @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r6], 16;
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r6], 16;
        ret;
        """
        )
        runs = execute(body, 32)
        assert kinds(runs) == {"mbarrier misuse"}
        assert "1 arrivals, 0 of 8 pending" in messages(runs)

    def test_never_initialised(self, execute: Run) -> None:
        runs = execute("mov.u32 %r6, bar; mbarrier.arrive.shared.b64 %rd9, [%r6]; ret;", 32)
        assert "was never initialised" in messages(runs)

    def test_after_inval(self, execute: Run) -> None:
        body = (
            INIT.format(count=32) + "@%p1 mbarrier.inval.shared.b64 [%r6]; mbarrier.arrive.shared.b64 %rd9, [%r6]; ret;"
        )
        assert "was invalidated" in messages(execute(body, 32))

    def test_overwritten(self, execute: Run) -> None:
        body = INIT.format(count=32) + "@%p1 st.shared.u32 [%r6+4], 0; mbarrier.arrive.shared.b64 %rd9, [%r6]; ret;"
        assert "overwritten by a store" in messages(execute(body, 32))

    def test_initialised_twice(self, execute: Run) -> None:
        body = INIT.format(count=32) + "@%p1 mbarrier.init.shared.b64 [%r6], 32; ret;"
        assert "while a valid mbarrier (phase 0) lives there" in messages(execute(body, 32))

    def test_misaligned(self, execute: Run) -> None:
        runs = execute("mov.u32 %r6, bar; @%p1 mbarrier.init.shared.b64 [%r6+4], 1; ret;", 32)
        assert "not aligned to 8 bytes" in messages(runs)

    def test_initialisation_is_not_published(self, execute: Run) -> None:
        body = """
        mov.u32 %r6, bar;
        @%p1 mbarrier.init.shared.b64 [%r6], 64;
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        ret;
        """
        runs = execute(body, 64, seeds=range(8))
        assert kinds(runs) <= {"data race", "mbarrier misuse"}
        assert "data race" in kinds(runs)
        assert "no order with its initialisation by warp 0" in messages(runs)

    def test_bytes_that_never_come(self, execute: Run) -> None:
        """Whoever waits for them waits for ever; that nobody does is common: CUTLASS's producers end so."""
        body = INIT.format(count=1) + "@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 64;"
        assert not kinds(execute(body + "ret;", 32))
        runs = execute(body + WAIT.format(n=0, parity=0) + "ret;", 32)
        assert kinds(runs) == {"deadlock", "transaction count"}
        assert "64 bytes of transactions outstanding" in messages(runs)

    def test_more_bytes_than_expected(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + """
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 64;
        @%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r6], 80;
        """
            + WAIT.format(n=0, parity=0)
            + "ret;"
        )
        runs = execute(body, 32)
        assert "deadlock" in kinds(runs)
        assert "16 bytes more completed than expected" in messages(runs)

    def test_count_overflow(self, execute: Run) -> None:
        body = INIT.format(count=1) + "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r6], 1048576; ret;"
        assert "transaction count 1048576, beyond" in messages(execute(body, 32))

    def test_stale_state(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + """
        @!%p1 ret;
        mbarrier.arrive.shared.b64 %rd9, [%r6];
        mbarrier.arrive.shared.b64 %rd8, [%r6];
        mbarrier.test_wait.shared.b64 %p9, [%r6], %rd9;
        ret;
        """
        )
        assert "a state of phase 0 is tested in phase 2" in messages(execute(body, 32))

    def test_no_complete_completes(self, execute: Run) -> None:
        body = INIT.format(count=32) + "mbarrier.arrive.noComplete.shared.b64 %rd9, [%r6], 1; ret;"
        assert ".noComplete arrival completes the phase" in messages(execute(body, 32))
