"""Asynchronous copies (PTX ISA 9.7.9): cp.async, bulk copies and reductions, their groups, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from several_runs import clean, kinds, messages

Run = Callable[..., Any]
Text = Callable[..., str]
SEEDS = range(5)
# %rd1 = in, %rd2 = out, %rd4 = in + 16 tid, %rd5 = out + 16 tid, %r1 = tid, %p1 = first thread,
# %r6 = bar, %r9 = tile + 16 tid, %r10 = tile
START = """
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 16;
add.u64 %rd4, %rd1, %rd3;
add.u64 %rd5, %rd2, %rd3;
setp.eq.u32 %p1, %r1, 0;
shl.b32 %r8, %r1, 4;
mov.u32 %r10, tile;
add.u32 %r9, %r10, %r8;
mov.u32 %r6, bar;
"""
OUT = "ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r9]; st.global.v4.u32 [%rd5], {%r20, %r21, %r22, %r23}; ret;"
INIT = "@%p1 mbarrier.init.shared.b64 [%r6], {count}; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p9, [%r6], 0; @!%p9 bra W;"
FILL = """
ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%rd4];
st.shared.v4.u32 [%r9], {%r20, %r21, %r22, %r23};
"""


@pytest.fixture
def execute(run_ptx: Run, ptx_kernel: Text) -> Callable[..., list[Any]]:
    """Runs a body under several seeds with 4 words a thread of input and output."""

    def go(body: str, *, threads: int = 32, given: np.ndarray | None = None, out: Any = None, **more: Any) -> list[Any]:
        text = ptx_kernel(
            START + body,
            ".param .u64 in, .param .u64 out",
            variables=".shared .align 128 .b8 tile[8192]; .shared .align 8 .b64 bar;",
        )
        given = np.arange(1, 4 * threads + 1, dtype=np.uint32) if given is None else given
        unwritten = ("out",) if out is None else ()
        out = np.zeros(4 * threads, np.uint32) if out is None else out
        seeds = more.pop("seeds", SEEDS)
        return [
            run_ptx(
                text,
                {"in": given, "out": out},
                ("in", "out"),
                block=(threads, 1, 1),
                seed=seed,
                unwritten=unwritten,
                **more,
            )
            for seed in seeds
        ]

    return go


class TestCpAsync:
    @pytest.mark.parametrize(
        "wait",
        [
            "cp.async.commit_group; cp.async.wait_group 0;",
            "cp.async.wait_all;",
            "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;",
        ],
    )
    def test_copy(self, execute: Run, wait: str) -> None:
        out = clean(execute(f"cp.async.cg.shared.global [%r9], [%rd4], 16; {wait} {OUT}"))
        assert (out == np.arange(1, 129)).all()

    @pytest.mark.parametrize("wait", ["", "cp.async.commit_group; cp.async.wait_group 1;", "cp.async.wait_group 0;"])
    def test_reading_too_early(self, execute: Run, wait: str) -> None:
        found = kinds(execute(f"cp.async.cg.shared.global.L2::128B [%r9], [%rd4], 16; {wait} {OUT}"))
        assert found and found <= {"data race", "uninitialised read"}

    def test_zero_fill(self, execute: Run) -> None:
        body = f"""
        mov.u32 %r11, 0;
        setp.lt.u32 %p3, %r1, 16;
        selp.u32 %r11, 8, 0, %p3;
        cp.async.ca.shared::cta.global [%r9], [%rd4], 16, %r11;
        cp.async.wait_all;
        {OUT}
        """
        # The last half of the threads must not even touch its source.
        given = np.arange(1, 65, dtype=np.uint32)
        out = clean(execute(body, given=given)).reshape(32, 4)
        assert (out[:16, :2] == given.reshape(16, 4)[:, :2]).all()
        assert not out[:16, 2:].any()
        assert not out[16:].any()

    def test_ignored_source(self, execute: Run) -> None:
        body = f"setp.ge.u32 %p3, %r1, 16; cp.async.ca.shared.global [%r9], [%rd4], 16, %p3; cp.async.wait_all; {OUT}"
        out = clean(execute(body, given=np.arange(1, 65, dtype=np.uint32)))
        assert (out[:64] == np.arange(1, 65)).all()
        assert not out[64:].any()

    def test_other_warps_need_a_barrier(self, execute: Run) -> None:
        body = "cp.async.ca.shared.global [%r9], [%rd4], 16; cp.async.wait_all; BARRIER xor.b32 %r9, %r9, 512;" + OUT
        out = clean(execute(body.replace("BARRIER", "bar.sync 0;"), threads=64))
        assert (out == np.roll(np.arange(1, 257), 128)).all()
        assert kinds(execute(body.replace("BARRIER", ""), threads=64)) & {"data race", "uninitialised read"}

    @pytest.mark.parametrize(("count", "noinc"), [("1", ""), ("65", ".noinc")])
    def test_mbarrier_tracks_copies(self, execute: Run, count: str, noinc: str) -> None:
        body = (
            INIT.format(count=count)
            + f"""
            cp.async.ca.shared.global [%r9], [%rd4], 16;
            cp.async.mbarrier.arrive{noinc}.shared.b64 [%r6];
            bar.sync 0;
            @%p1 mbarrier.arrive.shared.b64 %rd9, [%r6];
            {WAIT}
            xor.b32 %r9, %r9, 512;
            {OUT}
            """
        )
        out = clean(execute(body, threads=64))
        assert (out == np.roll(np.arange(1, 257), 128)).all()

    def test_misaligned(self, execute: Run) -> None:
        runs = execute("cp.async.ca.shared.global [%r9+4], [%rd4], 16; cp.async.wait_all; ret;")
        assert kinds(runs) == {"misaligned address"}

    def test_out_of_bounds(self, execute: Run) -> None:
        runs = execute("cp.async.ca.shared.global [%r9], [%rd4+16], 16; cp.async.wait_all; ret;")
        assert kinds(runs) == {"out of bounds"}


class TestBulkToShared:
    COPY = "@%p1 cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [%r10], [%rd1], 512, [%r6];"

    @pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
    def test_copy(self, execute: Run, space: str) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        {self.COPY.format(space=space)} {WAIT} {OUT}
        """
        )
        assert (clean(execute(body)) == np.arange(1, 129)).all()

    def test_no_wait(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        {self.COPY.format(space="shared::cta")} {OUT}
        """
        )
        assert kinds(execute(body)) & {"data race", "uninitialised read"}

    def test_too_few_bytes_expected(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 496;
        {self.COPY.format(space="shared::cta")} {WAIT} {OUT}
        """
        )
        runs = execute(body)
        assert "deadlock" in kinds(runs)
        assert "16 bytes more completed than expected" in messages(runs)

    def test_too_many_bytes_expected(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 528;
        {self.COPY.format(space="shared::cta")} {WAIT} {OUT}
        """
        )
        runs = execute(body)
        assert kinds(runs) == {"deadlock", "transaction count"}
        assert "16 bytes of transactions outstanding" in messages(runs)

    def test_refill_before_readers_are_done(self, execute: Run) -> None:
        """The second copy overwrites the stage while the other warp may still be reading it."""
        refill = """
        {sync}
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%rd1+512], 512, [%r6];
        W2: mbarrier.try_wait.parity.shared.b64 %p9, [%r6], 1; @!%p9 bra W2;
        ret;
        """
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        {self.COPY.format(space="shared::cta")} {WAIT}
        and.b32 %r8, %r8, 511;
        add.u32 %r9, %r10, %r8;
        ld.shared.u32 %r20, [%r9]; st.global.u32 [%rd5], %r20;
        """
        )
        clean(execute(body + refill.format(sync="bar.sync 0;"), threads=64))
        # The other warp may also miss the phase altogether, since the barrier is two phases on.
        found = kinds(execute(body + refill.format(sync=""), threads=64))
        assert "data race" in found
        assert found <= {"data race", "deadlock"}

    def test_alignment_and_size(self, execute: Run) -> None:
        copy = "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes {operands}, [%r6]; ret;"
        for operands, text in (
            ("[%r10+8], [%rd1], 16", "destination"),
            ("[%r10], [%rd1+4], 16", "source"),
            ("[%r10], [%rd1], 24", "24 bytes: not a multiple of 16"),
        ):
            runs = execute(INIT.format(count=1) + copy.format(operands=operands), seeds=range(1))
            assert kinds(runs) == {"misaligned address"}
            assert text in messages(runs)

    def test_the_cta_leaves_before_its_bytes_come(self, execute: Run) -> None:
        body = (
            INIT.format(count=1)
            + f"""
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r6], 512;
        {self.COPY.format(space="shared::cta")} ret;
        """
        )
        assert "work unfinished at exit" in kinds(execute(body, seeds=range(8)))


class TestBulkToGlobal:
    STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r10], 512; @%p1 cp.async.bulk.commit_group;"
    FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"

    def test_store(self, execute: Run) -> None:
        body = FILL + self.FENCE + self.STORE + "@%p1 cp.async.bulk.wait_group 0; ret;"
        assert (clean(execute(body)) == np.arange(1, 129)).all()

    def test_fence_after_the_barrier_by_the_issuing_thread(self, execute: Run) -> None:
        body = (
            FILL
            + "bar.sync 0; fence.proxy.async.shared::cta;"
            + self.STORE
            + "@%p1 cp.async.bulk.wait_group.read 0; ret;"
        )
        assert (clean(execute(body, threads=32)) == np.arange(1, 129)).all()

    @pytest.mark.parametrize(
        "fence", ["bar.sync 0;", "fence.proxy.async.global; bar.sync 0;", "fence.acq_rel.cta; bar.sync 0;"]
    )
    def test_missing_proxy_fence(self, execute: Run, fence: str) -> None:
        runs = execute(FILL + fence + self.STORE + "@%p1 cp.async.bulk.wait_group 0; ret;")
        assert kinds(runs) == {"missing proxy fence"}
        assert "ordered after, but not fenced from" in messages(runs)

    def test_store_after_the_fence(self, execute: Run) -> None:
        body = FILL + "fence.proxy.async.shared::cta; st.shared.u32 [%r9], 5; bar.sync 0;" + self.STORE
        assert kinds(execute(body + "@%p1 cp.async.bulk.wait_group 0; ret;")) == {"missing proxy fence"}

    def test_missing_barrier(self, execute: Run) -> None:
        store = self.STORE.replace("[%r10]", "[%r10+512]")
        body = FILL + "fence.proxy.async.shared::cta;" + store + "@%p1 cp.async.bulk.wait_group 0; ret;"
        assert "data race" in kinds(execute(body, threads=64))

    @pytest.mark.parametrize(("wait", "found"), [("cp.async.bulk.wait_group.read 0;", set()), ("", {"data race"})])
    def test_reuse_needs_wait_group_read(self, execute: Run, wait: str, found: set[str]) -> None:
        body = FILL + self.FENCE + self.STORE + f"@%p1 {wait or 'mov.u32 %r2, 0;'} bar.sync 0; st.shared.u32 [%r9], 9;"
        body += "@%p1 cp.async.bulk.wait_group 0; ret;"
        runs = execute(body, threads=32)
        assert kinds(runs) == found
        if not found:
            assert (clean(runs) == np.arange(1, 129)).all()

    def test_read_back_needs_the_whole_wait(self, execute: Run) -> None:
        back = "@%p1 ld.global.u32 %r2, [%rd2]; @%p1 st.global.u32 [%rd2+508], %r2; ret;"
        body = FILL + self.FENCE + self.STORE
        clean(execute(body + "@%p1 cp.async.bulk.wait_group 0;" + back))
        assert kinds(execute(body + "@%p1 cp.async.bulk.wait_group.read 0;" + back)) & {
            "data race",
            "uninitialised read",
        }

    def test_exit_before_the_source_is_read(self, execute: Run) -> None:
        for ran in execute(FILL + self.FENCE + self.STORE + "ret;", seeds=range(4)):
            assert ran.kinds == {"work unfinished at exit"}
        for ran in execute(FILL + self.FENCE + self.STORE.split(";")[0] + "; ret;", seeds=range(4)):
            assert ran.kinds == {"work unfinished at exit"}

    def test_byte_mask(self, execute: Run) -> None:
        store = self.STORE.replace("bulk_group [%rd2], [%r10], 512", "bulk_group.cp_mask [%rd2], [%r10], 512, %rs1")
        body = FILL + self.FENCE + "mov.u16 %rs1, 0x00f0;" + store + "@%p1 cp.async.bulk.wait_group 0; ret;"
        out = clean(execute(body, out=np.zeros(128, np.uint32))).reshape(32, 4)
        assert (out[:, 1] == np.arange(1, 129).reshape(32, 4)[:, 1]).all()
        assert not out[:, [0, 2, 3]].any()

    @pytest.mark.parametrize(
        ("operation", "dtype", "expected"),
        [
            ("add.u32", np.uint32, lambda a, b: a + b),
            ("add.f32", np.float32, lambda a, b: a + b),
            ("max.s32", np.int32, np.maximum),
            ("xor.b32", np.uint32, lambda a, b: a ^ b),
            ("add.noftz.f16", np.float16, lambda a, b: a + b),
        ],
    )
    def test_reduce(self, execute: Run, operation: str, dtype: Any, expected: Any) -> None:
        count = 512 // np.dtype(dtype).itemsize
        generator = np.random.default_rng(0)
        first, second = (generator.integers(-50, 50, count).astype(dtype) for _ in range(2))
        store = f"@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%rd2], [%r10], 512;"
        body = FILL + self.FENCE + store + "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0; ret;"
        out = clean(execute(body, given=first.view(np.uint32), out=second.view(np.uint32)))
        assert (out.view(dtype) == expected(second, first)).all()

    def test_prefetch_checks_its_addresses(self, execute: Run) -> None:
        assert not kinds(execute("cp.async.bulk.prefetch.L2.global [%rd1], 512; ret;"))
        assert kinds(execute("cp.async.bulk.prefetch.L2.global [%rd1], 528; ret;")) == {"out of bounds"}
