"""Clusters (PTX ISA 9.7.9 and 9.7.13): remote memory, remote mbarriers, multicast, cluster barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from several_runs import clean, kinds, messages

Run = Callable[..., Any]
Text = Callable[..., str]
SEEDS = range(5)
# %r1 = tid, %r2 = rank, %r3 = the other rank, %r9 = tile + 16 tid, %r10 = tile, %r6 = bar,
# %rd1 = in, %rd5 = out + 16 (tid + 32 rank), %r12 and %r13: tile + 16 tid and bar in the other CTA
START = """
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %cluster_ctarank;
xor.b32 %r3, %r2, 1;
shl.b32 %r4, %r2, 5;
add.u32 %r4, %r4, %r1;
mul.wide.u32 %rd3, %r4, 16;
add.u64 %rd5, %rd2, %rd3;
setp.eq.u32 %p1, %r1, 0;
setp.eq.u32 %p2, %r2, 0;
shl.b32 %r8, %r1, 4;
mov.u32 %r10, tile;
add.u32 %r9, %r10, %r8;
mov.u32 %r6, bar;
mapa.shared::cluster.u32 %r12, %r9, %r3;
mapa.shared::cluster.u32 %r13, %r6, %r3;
"""
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
INIT = """
@%p1 mbarrier.init.shared.b64 [%r6], {count};
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
"""
WAIT = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p9, [%r6], 0; @!%p9 bra W;"


@pytest.fixture
def execute(run_ptx: Run, ptx_kernel: Text) -> Callable[..., list[Any]]:
    """Runs a body in one cluster of two CTAs with one warp each, under several seeds."""

    def go(body: str, *, ctas: int = 2, seeds: Any = SEEDS) -> list[Any]:
        text = ptx_kernel(
            START + body + "\nret;",
            ".param .u64 in, .param .u64 out",
            variables=".shared .align 128 .b8 tile[1024]; .shared .align 8 .b64 bar;",
        )
        given = np.arange(1, 257, dtype=np.uint32)
        out = np.zeros(128 * ctas, np.uint32)
        shape = (ctas, 1, 1)
        return [
            run_ptx(
                text, {"in": given, "out": out}, ("in", "out"), grid=shape, cluster=shape, seed=seed, unwritten=("out",)
            )
            for seed in seeds
        ]

    return go


class TestAddresses:
    def test_mapa_and_getctarank(self, execute: Run) -> None:
        body = """
        getctarank.shared::cluster.u32 %r20, %r12;
        mov.u64 %rd8, tile;
        cvta.shared.u64 %rd8, %rd8;
        mapa.u64 %rd9, %rd8, %r3;
        getctarank.u64 %r21, %rd9;
        getctarank.u64 %r22, %rd8;
        st.global.v4.u32 [%rd5], {%r20, %r21, %r22, %r2};
        """
        out = clean(execute(body)).reshape(2, 32, 4)
        assert (out[0] == [1, 1, 0, 0]).all()
        assert (out[1] == [0, 0, 1, 1]).all()

    def test_no_such_cta(self, execute: Run) -> None:
        away = "mapa.shared::cluster.u32 %r20, %r9, 5;"
        assert not messages(execute(away))
        assert kinds(execute(away + "st.shared::cluster.u32 [%r20], %r1;")) == {"out of bounds"}


class TestRemoteMemory:
    def test_stores_and_loads(self, execute: Run) -> None:
        body = f"""
        st.shared::cluster.u32 [%r12], %r4;
        {MEET}
        ld.shared.u32 %r20, [%r9];
        ld.shared::cluster.u32 %r21, [%r12];
        st.global.v2.u32 [%rd5], {{%r20, %r21}};
        {MEET}
        """
        out = clean(execute(body)).reshape(2, 32, 4)
        assert (out[0, :, 0] == np.arange(32, 64)).all()
        assert (out[0, :, 1] == np.arange(32)).all()

    def test_race_without_the_barrier(self, execute: Run) -> None:
        body = f"st.shared::cluster.u32 [%r12], %r4; ld.shared.u32 %r20, [%r9]; st.global.u32 [%rd5], %r20; {MEET}"
        assert kinds(execute(body)) & {"data race", "uninitialised read"}

    def test_a_relaxed_arrival_releases_nothing(self, execute: Run) -> None:
        body = f"""
        st.shared::cluster.u32 [%r12], %r4;
        barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
        ld.shared.u32 %r20, [%r9]; st.global.u32 [%rd5], %r20; {MEET}
        """
        assert kinds(execute(body)) == {"data race"}

    def test_the_owner_has_exited(self, execute: Run) -> None:
        """CTA 1 leaves while CTA 0 may still read its memory."""
        body = f"""
        st.shared.u32 [%r9], %r4; {MEET} @!%p2 ret;
        ld.shared::cluster.u32 %r20, [%r12]; st.global.u32 [%rd5], %r20;
        """
        runs = execute(body, seeds=range(12))
        assert kinds(runs) == {"out of bounds"}
        assert "cta 1, which has exited" in messages(runs)

    def test_shared_cta_does_not_reach_out(self, execute: Run) -> None:
        assert kinds(execute("st.shared::cta.u32 [%r12], %r4;")) == {"out of bounds"}

    def test_atomics(self, execute: Run) -> None:
        body = f"""
        @%p1 st.shared.u32 [%r10], 0;
        mapa.shared::cluster.u32 %r20, %r10, 0;
        {MEET}
        red.relaxed.cluster.shared::cluster.add.u32 [%r20], 1;
        {MEET}
        ld.shared::cluster.u32 %r21, [%r20]; st.global.u32 [%rd5], %r21;
        {MEET}
        """
        assert (clean(execute(body))[::4] == 64).all()


class TestClusterBarrier:
    def test_wait_without_arrive(self, execute: Run) -> None:
        assert "wait without barrier.cluster.arrive" in messages(execute("barrier.cluster.wait;"))

    def test_arrive_twice(self, execute: Run) -> None:
        assert "twice without" in messages(execute("barrier.cluster.arrive; barrier.cluster.arrive;"))

    def test_deadlock(self, execute: Run) -> None:
        body = "@!%p2 bra WAITS; bar.sync 1, 32; mbarrier.init.shared.b64 [%r6], 2; " + WAIT + "ret; WAITS: " + MEET
        runs = execute(body)
        assert kinds(runs) == {"deadlock"}
        assert "barrier.cluster: warps 0 of the cluster have not arrived" in messages(runs)

    def test_exited_ctas_do_not_count(self, execute: Run) -> None:
        clean(execute("@!%p2 ret;" + MEET))


class TestRemoteMbarrier:
    def test_arrivals(self, execute: Run) -> None:
        """Each CTA writes into the other's memory and arrives at the other's mbarrier."""
        body = (
            INIT.format(count=32)
            + f"""
        st.shared::cluster.u32 [%r12], %r4;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13];
        {WAIT}
        ld.shared.u32 %r20, [%r9];
        st.global.u32 [%rd5], %r20;
        {MEET}
        """
        )
        out = clean(execute(body)).reshape(2, 32, 4)
        assert (out[0, :, 0] == np.arange(32, 64)).all()

    def test_initialisation_needs_a_fence_or_a_release(self, execute: Run) -> None:
        body = f"""
        @%p1 mbarrier.init.shared.b64 [%r6], 32;
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait.acquire.aligned;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13];
        {WAIT} {MEET}
        """
        runs = execute(body)
        assert kinds(runs) == {"data race"}
        assert "no order with its initialisation" in messages(runs)

    def test_mbarrier_init_fence_covers_nothing_else(self, execute: Run) -> None:
        body = """
        st.shared.u32 [%r9], %r4;
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned;
        barrier.cluster.wait.acquire.aligned;
        ld.shared::cluster.u32 %r20, [%r12];
        st.global.u32 [%rd5], %r20;
        """
        assert kinds(execute(body + MEET)) == {"data race"}

    def test_st_async(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r12], {{%r1, %r2, %r3, %r4}}, [%r13];
        {WAIT}
        ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r9];
        st.global.v4.u32 [%rd5], {{%r20, %r21, %r22, %r23}};
        {MEET}
        """
        )
        out = clean(execute(body)).reshape(2, 32, 4)
        assert (out[0] == np.stack([np.arange(32), np.full(32, 1), np.zeros(32), np.arange(32, 64)], axis=1)).all()

    def test_red_async(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 st.shared.u32 [%r10], 100;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 128;
        {MEET}
        mapa.shared::cluster.u32 %r20, %r10, %r3;
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r20], %r1, [%r13];
        {WAIT}
        ld.shared.u32 %r20, [%r10];
        st.global.u32 [%rd5], %r20;
        {MEET}
        """
        )
        assert (clean(execute(body))[::4] == 100 + 31 * 32 // 2).all()

    def test_a_wait_is_for_an_own_mbarrier(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        mov.u64 %rd8, bar;
        cvta.shared.u64 %rd8, %rd8;
        mapa.u64 %rd9, %rd8, %r3;
        mbarrier.try_wait.parity.b64 %p9, [%rd9], 1;
        {MEET}
        """
        )
        assert "only a CTA's own are allowed" in messages(execute(body))

    def test_data_and_mbarrier_in_different_ctas(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 4;
        @%p1 st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r12], %r1, [%r6];
        {WAIT} {MEET}
        """
        )
        assert "in different CTAs" in messages(execute(body))


class TestBulk:
    def test_multicast(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        mov.u16 %rs1, 3;
        and.pred %p3, %p1, %p2;
        @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r10], [%rd1], 512, [%r6], %rs1;
        {WAIT}
        ld.shared.v4.u32 {{%r20, %r21, %r22, %r23}}, [%r9];
        st.global.v4.u32 [%rd5], {{%r20, %r21, %r22, %r23}};
        {MEET}
        """
        )
        out = clean(execute(body)).reshape(2, 128)
        assert (out == np.arange(1, 129)).all()

    def test_multicast_to_nobody(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        mov.u16 %rs1, 7;
        and.pred %p3, %p1, %p2;
        @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r10], [%rd1], 512, [%r6], %rs1;
        {WAIT} {MEET}
        """
        )
        assert "a multicast to CTAs 0x7 in a cluster of 2" in messages(execute(body))

    @pytest.mark.parametrize(
        ("fence", "found"), [("fence.proxy.async.shared::cta;", set()), ("", {"missing proxy fence"})]
    )
    def test_between_ctas(self, execute: Run, fence: str, found: set[str]) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        st.shared.v4.u32 [%r9], {{%r4, %r4, %r4, %r4}};
        {fence}
        bar.sync 0;
        mapa.shared::cluster.u32 %r14, %r10, %r3;
        @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r14+512], [%r10], 512, [%r13];
        {WAIT}
        ld.shared.u32 %r20, [%r9+512];
        st.global.u32 [%rd5], %r20;
        {MEET}
        """
        )
        runs = execute(body)
        assert kinds(runs) == found
        if not found:
            assert (clean(runs).reshape(2, 32, 4)[0, :, 0] == np.arange(32, 64)).all()


class TestClusterLaunchControl:
    def test_no_more_work(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 16;
        @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r10], [%r6];
        {WAIT}
        .reg .b128 %q;
        ld.shared.b128 %q, [%r10];
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p5, %q;
        clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r21, %r22, _, _}}, %q;
        clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r21, %q;
        selp.u32 %r20, 1, 2, %p5;
        st.global.u32 [%rd5], %r20;
        """
        )
        assert (clean(execute(body))[::4] == 2).all()

    def test_reading_the_answer_too_early(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 16;
        @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r10], [%r6];
        ld.shared.u32 %r20, [%r10];
        st.global.u32 [%rd5], %r20;
        {WAIT}
        """
        )
        assert kinds(execute(body)) & {"data race", "uninitialised read"}
