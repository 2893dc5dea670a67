"""Loads, stores and atomics of small kernels (PTX ISA 9.7.9, 9.7.13): values, and the faults of bad accesses."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tunekit.simulate.launch.arguments import Buffers, Wanted
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.run import simulate

Run = Callable[..., Any]
Text = Callable[..., str]
PARAMETERS = ".param .u64 in, .param .u64 out"
# %rd1 = in + 4 * tid, %rd2 = out + 4 * tid, %r1 = tid, %rd3 = 4 * tid
ADDRESSES = """
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
add.u64 %rd1, %rd1, %rd3;
add.u64 %rd2, %rd2, %rd3;
"""


@pytest.fixture
def execute(run_ptx: Run, ptx_kernel: Text) -> Callable[..., Any]:
    def go(body: str, given: np.ndarray, out: np.ndarray, variables: str = "", **more: Any) -> Any:
        text = ptx_kernel(ADDRESSES + body + "\nret;", PARAMETERS, variables=variables)
        return run_ptx(text, {"in": given, "out": out}, ("in", "out"), unwritten=("out",), **more)

    return go


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


class TestLoadStore:
    def test_copy(self, execute: Run) -> None:
        given = words(128)
        ran = execute(
            "ld.global.b32 %r2, [%rd1]; st.global.b32 [%rd2], %r2;",
            given,
            np.zeros(128, np.uint32),
            block=(128, 1, 1),
        )
        assert not ran.faults
        assert (ran.buffers["out"] == given).all()

    @pytest.mark.parametrize(
        ("type_", "dtype", "wide"),
        [
            ("u8", np.uint8, np.uint32),
            ("s8", np.int8, np.int32),
            ("u16", np.uint16, np.uint32),
            ("s16", np.int16, np.int32),
        ],
    )
    def test_narrow_loads_extend(self, execute: Run, type_: str, dtype: Any, wide: Any) -> None:
        given = words(32)
        ran = execute(f"ld.global.{type_} %r2, [%rd1]; st.global.b32 [%rd2], %r2;", given, np.zeros(32, np.uint32))
        assert not ran.faults
        low = given.view(np.uint8).reshape(32, 4)[:, : np.dtype(dtype).itemsize].copy().view(dtype)[:, 0]
        assert (ran.buffers["out"].view(wide) == low).all()

    def test_narrow_store_keeps_the_low_bits(self, execute: Run) -> None:
        given = words(32)
        ran = execute("ld.global.u32 %r2, [%rd1]; st.global.u8 [%rd2], %r2;", given, np.full(32, 0x11223344, np.uint32))
        assert (ran.buffers["out"] == (given & 0xFF | 0x11223300)).all()

    def test_vectors_and_128_bits(self, execute: Run) -> None:
        given = words(256)
        body = """
        mul.wide.u32 %rd4, %r1, 28;
        add.u64 %rd1, %rd1, %rd4;
        add.u64 %rd2, %rd2, %rd4;
        ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1];
        ld.global.v2.b64 {%rd5, %rd6}, [%rd1+16];
        st.global.v2.b32 [%rd2], {%r2, %r3};
        st.global.v2.b32 [%rd2+8], {%r4, %r5};
        st.global.v2.b64 [%rd2+16], {%rd5, %rd6};
        """
        ran = execute(body, given, np.zeros(256, np.uint32))
        assert not ran.faults
        assert (ran.buffers["out"] == given).all()

    def test_v8_with_holes(self, execute: Run) -> None:
        given = words(256)
        body = """
        mul.wide.u32 %rd4, %r1, 28;
        add.u64 %rd1, %rd1, %rd4;
        add.u64 %rd2, %rd2, %rd4;
        ld.global.L2::evict_last.v8.b32 {%r2, _, %r4, %r5, %r6, %r7, %r8, %r9}, [%rd1];
        st.global.L1::no_allocate.v8.b32 [%rd2], {%r2, _, %r4, %r5, %r6, %r7, %r8, %r9};
        """
        ran = execute(body, given, np.full(256, 7, np.uint32))
        expected = given.copy()
        expected[1::8] = 7
        assert not ran.faults
        assert (ran.buffers["out"] == expected).all()

    def test_generic_addresses_reach_shared_memory(self, execute: Run) -> None:
        body = """
        ld.global.b32 %r2, [%rd1];
        mov.u64 %rd4, tile;
        cvta.shared.u64 %rd4, %rd4;
        add.u64 %rd4, %rd4, %rd3;
        st.b32 [%rd4], %r2;
        bar.sync 0;
        mov.u32 %r3, tile;
        xor.b32 %r4, %r1, 31;
        shl.b32 %r4, %r4, 2;
        add.u32 %r3, %r3, %r4;
        ld.shared.b32 %r5, [%r3];
        st.b32 [%rd2], %r5;
        """
        given = words(32)
        ran = execute(body, given, np.zeros(32, np.uint32), variables=".shared .align 16 .b8 tile[128];")
        assert not ran.faults
        assert (ran.buffers["out"] == given[::-1]).all()

    def test_local_memory_is_each_lanes_own(self, execute: Run) -> None:
        body = """
        ld.global.b32 %r2, [%rd1];
        st.local.b32 [mine], %r2;
        ld.local.b32 %r3, [mine];
        st.global.b32 [%rd2], %r3;
        """
        given = words(32)
        ran = execute(body, given, np.zeros(32, np.uint32), variables=".local .align 4 .b8 mine[4];")
        assert not ran.faults
        assert (ran.buffers["out"] == given).all()

    def test_constants(self, execute: Run) -> None:
        ran = execute(
            "ld.const.b32 %r2, [table+4]; st.global.b32 [%rd2], %r2;",
            words(32),
            np.zeros(32, np.uint32),
            variables=".const .align 4 .u32 table[2] = {5, 6};",
        )
        assert (ran.buffers["out"] == 6).all()

    def test_st_bulk_clears(self, execute: Run) -> None:
        body = """
        setp.ne.u32 %p1, %r1, 0;
        mov.u64 %rd5, 128;
        mov.u32 %r6, tile;
        @!%p1 st.bulk.shared::cta [%r6], %rd5, 0;
        bar.sync 0;
        shl.b32 %r4, %r1, 2;
        add.u32 %r6, %r6, %r4;
        ld.shared.b32 %r5, [%r6];
        st.global.b32 [%rd2], %r5;
        """
        ran = execute(body, words(32), np.ones(32, np.uint32), variables=".shared .align 16 .b8 tile[128];")
        assert not ran.faults
        assert not ran.buffers["out"].any()

    @pytest.mark.parametrize("size", [136, 0x7FFFFFFF8, -8])
    def test_st_bulk_of_more_than_there_is(self, execute: Run, size: int) -> None:
        body = f"""
        setp.ne.u32 %p1, %r1, 0;
        mov.u64 %rd5, {size};
        mov.u32 %r6, tile;
        @!%p1 st.bulk.shared::cta [%r6], %rd5, 0;
        """
        ran = execute(body, words(32), np.ones(32, np.uint32), variables=".shared .align 16 .b8 tile[128];")
        assert ran.kinds == {"out of bounds"}

    def test_out_of_bounds(self, execute: Run) -> None:
        ran = execute("ld.global.b32 %r2, [%rd1+4]; st.global.b32 [%rd2], %r2;", words(32), np.zeros(32, np.uint32))
        (fault,) = ran.faults
        assert fault.kind.value == "out of bounds"
        assert fault.lanes == (31,)
        assert "0 bytes after the end of in" in fault.message

    def test_misaligned(self, execute: Run) -> None:
        ran = execute("ld.global.b16 %rs1, [%rd1+1]; st.global.b16 [%rd2], %rs1;", words(33), np.zeros(33, np.uint32))
        assert "misaligned address" in ran.kinds

    def test_uninitialised_shared(self, execute: Run) -> None:
        ran = execute(
            "mov.u32 %r3, tile; ld.shared.b32 %r2, [%r3]; st.global.b32 [%rd2], %r2;",
            words(32),
            np.zeros(32, np.uint32),
            variables=".shared .align 16 .b8 tile[128];",
        )
        assert ran.kinds == {"uninitialised read"}

    def test_store_to_const_is_refused(self, execute: Run) -> None:
        with pytest.raises(Exception, match=r"st\.const"):
            execute(
                "st.const.b32 [table], %r1;", words(32), words(32), variables=".const .align 4 .u32 table[2] = {5, 6};"
            )


class TestAtomics:
    def test_add_by_all_lanes(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; atom.global.add.u32 %r2, [%rd1], %r1; "
            "mul.wide.u32 %rd2, %r1, 4; add.u64 %rd2, %rd2, %rd1; st.global.u32 [%rd2+4], %r2; ret;",
            ".param .u64 out",
        )
        out = np.zeros(129, np.uint32)
        for seed in range(3):
            ran = run_ptx(text, {"out": out}, ("out",), block=(128, 1, 1), seed=seed)
            assert not ran.faults
            assert ran.buffers["out"][0] == 127 * 128 // 2
            seen = ran.buffers["out"][1:].astype(np.int64)
            order = np.argsort(seen, kind="stable")
            steps = np.diff(seen[order])
            assert (steps == order[:-1])[seen[order[:-1]] != seen[order[1:]]].all()

    @pytest.mark.parametrize(
        ("operation", "type_", "start", "expected"),
        [
            ("min", "s32", 5, lambda v: min(5, v.view(np.int32).min())),
            ("max", "u32", 5, lambda v: max(5, v.max())),
            ("and", "b32", 0xFFFFFFFF, lambda v: np.bitwise_and.reduce(v)),
            ("or", "b32", 0, lambda v: np.bitwise_or.reduce(v)),
            ("xor", "b32", 9, lambda v: 9 ^ np.bitwise_xor.reduce(v)),
            ("add", "u32", 9, lambda v: (9 + int(v.astype(np.uint64).sum())) % 2**32),
        ],
    )
    def test_red(self, run_ptx: Run, ptx_kernel: Text, operation: str, type_: str, start: int, expected: Any) -> None:
        text = ptx_kernel(
            ADDRESSES
            + f"ld.param.u64 %rd5, [out]; ld.global.b32 %r2, [%rd1]; red.global.{operation}.{type_} [%rd5], %r2; ret;",
            PARAMETERS,
        )
        given = words(64)
        ran = run_ptx(text, {"in": given, "out": np.array([start], np.uint32)}, ("in", "out"), block=(64, 1, 1))
        assert not ran.faults
        assert ran.buffers["out"].view(np.int32 if type_ == "s32" else np.uint32)[0] == expected(given)

    def test_inc_and_dec_wrap(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            "ld.param.u64 %rd1, [out]; red.global.inc.u32 [%rd1], 9; red.global.dec.u32 [%rd1+4], 9; ret;",
            ".param .u64 out",
        )
        ran = run_ptx(text, {"out": np.zeros(2, np.uint32)}, ("out",))
        assert list(ran.buffers["out"]) == [32 % 10, (-32) % 10]

    def test_cas_takes_one_winner(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 100;"
            "atom.global.cas.b32 %r3, [%rd1], 0, %r2; setp.eq.u32 %p1, %r3, 0;"
            "@%p1 red.global.add.u32 [%rd1+4], 1; atom.global.exch.b32 %r4, [%rd1+8], %r1; ret;",
            ".param .u64 out",
        )
        ran = run_ptx(text, {"out": np.zeros(3, np.uint32)}, ("out",), block=(64, 1, 1), seed=3)
        assert not ran.faults
        assert ran.buffers["out"][0] >= 100
        assert ran.buffers["out"][1] == 1

    def test_shared_atomics_with_generic_addresses(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            """
            ld.param.u64 %rd1, [out];
            mov.u32 %r1, %tid.x;
            mov.u32 %r2, count;
            setp.eq.u32 %p1, %r1, 0;
            @%p1 st.shared.u32 [%r2], 0;
            bar.sync 0;
            mov.u64 %rd2, count;
            cvta.shared.u64 %rd2, %rd2;
            red.add.u32 [%rd2], 1;
            bar.sync 0;
            @%p1 ld.shared.u32 %r3, [%r2];
            @%p1 st.global.u32 [%rd1], %r3;
            ret;
            """,
            ".param .u64 out",
            variables=".shared .align 4 .u32 count;",
        )
        for seed in range(4):
            ran = run_ptx(text, {"out": np.zeros(1, np.uint32)}, ("out",), block=(96, 1, 1), seed=seed)
            assert not ran.faults
            assert ran.buffers["out"][0] == 96

    def test_vector_f32_and_packed_bf16(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            "ld.param.u64 %rd1, [out]; mov.b32 %r1, 0x3f800000; mov.b32 %r2, 0x40000000; mov.b32 %r3, 0x3f803f80;"
            "red.global.add.v2.f32 [%rd1], {%r1, %r2}; red.global.add.noftz.bf16x2 [%rd1+8], %r3; ret;",
            ".param .u64 out",
        )
        ran = run_ptx(text, {"out": np.zeros(3, np.uint32)}, ("out",))
        assert list(ran.buffers["out"].view(np.float32)[:2]) == [32.0, 64.0]
        assert ran.buffers["out"][2] == 0x42004200

    def test_wide_and_narrow_swaps(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            """
            ld.param.u64 %rd1, [out];
            mov.u32 %r1, %tid.x;
            setp.ne.u32 %p1, %r1, 0;
            @%p1 ret;
            .reg .b128 %a;
            .reg .b128 %b;
            ld.global.b128 %a, [%rd1];
            atom.global.exch.b128 %b, [%rd1+16], %a;
            st.global.b128 [%rd1+32], %b;
            atom.global.cas.b128 %b, [%rd1], %a, %b;
            atom.global.cas.b16 %rs1, [%rd1+48], 3, 4;
            st.global.u16 [%rd1+50], %rs1;
            ret;
            """,
            ".param .u64 out",
        )
        given = words(16)
        given[12] = 3
        ran = run_ptx(text, {"out": given}, ("out",))
        assert not ran.faults
        out = ran.buffers["out"]
        assert (out[4:8] == given[:4]).all()
        assert (out[8:12] == given[4:8]).all()
        assert (out[:4] == given[4:8]).all()
        assert out[12] == 3 << 16 | 4

    def test_half_vectors(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            """
            ld.param.u64 %rd1, [out];
            ld.global.v4.b16 {%rs1, %rs2, %rs3, %rs4}, [%rd1+8];
            atom.global.v4.f16.max.noftz {%rs5, %rs6, %rs7, %rs8}, [%rd1], {%rs1, %rs2, %rs3, %rs4};
            red.global.v2.f16x2.add.noftz [%rd1+16], {%r1, %r2};
            ret;
            """.replace("{%r1, %r2}", "{%r1, %r1}").replace("ld.param", "mov.b32 %r1, 0x3c003c00; ld.param"),
            ".param .u64 out",
        )
        given = np.arange(12, dtype=np.float16)
        ran = run_ptx(text, {"out": given}, ("out",))
        assert not ran.faults
        assert list(ran.buffers["out"]) == [4, 5, 6, 7, 4, 5, 6, 7, 40, 41, 42, 43]

    def test_f32_subnormals_flush_in_global_memory(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            "ld.param.u64 %rd1, [out]; mov.b32 %r1, 1; mov.u32 %r2, %tid.x; setp.eq.u32 %p1, %r2, 0;"
            "@%p1 red.global.add.f32 [%rd1], %r1; ret;",
            ".param .u64 out",
        )
        ran = run_ptx(text, {"out": np.array([1], np.uint32)}, ("out",))
        assert ran.buffers["out"][0] == 0

    def test_plain_access_races_with_an_atomic(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = ptx_kernel(
            "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32;"
            "@%p1 red.global.add.u32 [%rd1], 1; @!%p1 st.global.u32 [%rd1], 7; ret;",
            ".param .u64 out",
        )
        ran = run_ptx(text, {"out": np.zeros(1, np.uint32)}, ("out",), block=(64, 1, 1))
        assert ran.kinds == {"data race"}


class TestSpinning:
    @pytest.mark.parametrize(
        "try_", ["atom.global.cas.b32 %r2, [%rd1], 0, 1;", "ld.relaxed.gpu.global.u32 %r2, [%rd1];"]
    )
    def test_a_lock_that_nobody_frees(
        self, run_ptx: Run, ptx_kernel: Text, monkeypatch: pytest.MonkeyPatch, try_: str
    ) -> None:
        monkeypatch.setattr("tunekit.simulate.machine.cluster.STILL_INSTRUCTIONS", 2000)
        text = ptx_kernel(
            f"ld.param.u64 %rd1, [out]; S: {try_} setp.ne.u32 %p1, %r2, 0; @%p1 bra S; ret;", ".param .u64 out"
        )
        assert run_ptx(text, {"out": np.ones(1, np.uint32)}, ("out",)).kinds == {"livelock"}

    def test_a_lock(self, run_ptx: Run, ptx_kernel: Text) -> None:
        """Each warp's first lane adds to an ordinary variable under a spin lock."""
        text = ptx_kernel(
            """
            ld.param.u64 %rd1, [out];
            mov.u32 %r1, %tid.x;
            and.b32 %r1, %r1, 31;
            setp.ne.u32 %p1, %r1, 0;
            @%p1 ret;
            S: atom.acquire.gpu.global.cas.b32 %r2, [%rd1], 0, 1;
            setp.ne.u32 %p2, %r2, 0;
            @%p2 bra S;
            ld.global.u32 %r3, [%rd1+4];
            add.u32 %r3, %r3, 1;
            st.global.u32 [%rd1+4], %r3;
            st.release.gpu.global.u32 [%rd1], 0;
            ret;
            """,
            ".param .u64 out",
        )
        for seed in range(4):
            ran = run_ptx(text, {"out": np.zeros(2, np.uint32)}, ("out",), block=(256, 1, 1), seed=seed)
            assert not ran.faults
            assert list(ran.buffers["out"]) == [0, 8]


class TestFlags:
    """Message passing by flags: release and acquire operations, fences, and what is missing without them."""

    def passing(self, run_ptx: Run, ptx_kernel: Text, store: str, load: str, before: str = "", after: str = "") -> Any:
        text = ptx_kernel(
            f"""
            ld.param.u64 %rd1, [out];
            mov.u32 %r1, %tid.x;
            mov.u32 %r2, flag;
            setp.lt.u32 %p1, %r1, 32;
            setp.eq.u32 %p3, %r1, 0;
            @%p3 st.shared.u32 [%r2], 0;
            bar.sync 0;
            @%p1 bra PRODUCER;
            AGAIN:
            {load} %r3, [%r2];
            setp.eq.u32 %p2, %r3, 0;
            @%p2 bra AGAIN;
            {after}
            ld.shared.u32 %r4, [%r2+4];
            st.global.u32 [%rd1], %r4;
            ret;
            PRODUCER:
            @%p3 st.shared.u32 [%r2+4], 42;
            {before}
            @%p3 {store} [%r2], 1;
            ret;
            """,
            ".param .u64 out",
            variables=".shared .align 8 .b8 flag[8];",
        )
        found: set[str] = set()
        for seed in range(5):
            ran = run_ptx(text, {"out": np.zeros(1, np.uint32)}, ("out",), block=(64, 1, 1), seed=seed)
            found |= ran.kinds
            assert ran.buffers["out"][0] == 42
        return found

    def test_release_acquire(self, run_ptx: Run, ptx_kernel: Text) -> None:
        assert not self.passing(run_ptx, ptx_kernel, "st.release.cta.shared.u32", "ld.acquire.cta.shared.u32")

    def test_fences_with_relaxed(self, run_ptx: Run, ptx_kernel: Text) -> None:
        assert not self.passing(
            run_ptx,
            ptx_kernel,
            "st.relaxed.cta.shared.u32",
            "ld.relaxed.cta.shared.u32",
            "fence.acq_rel.cta;",
            "fence.acq_rel.cta;",
        )

    def test_volatile_with_membar(self, run_ptx: Run, ptx_kernel: Text) -> None:
        assert not self.passing(
            run_ptx, ptx_kernel, "st.volatile.shared.u32", "ld.volatile.shared.u32", "membar.cta;", "membar.cta;"
        )

    @pytest.mark.parametrize(
        ("store", "load", "before", "after"),
        [
            ("st.relaxed.cta.shared.u32", "ld.acquire.cta.shared.u32", "", ""),
            ("st.release.cta.shared.u32", "ld.relaxed.cta.shared.u32", "", ""),
            ("st.relaxed.cta.shared.u32", "ld.relaxed.cta.shared.u32", "fence.acq_rel.cta;", ""),
        ],
    )
    def test_half_a_pattern_is_a_race(
        self, run_ptx: Run, ptx_kernel: Text, store: str, load: str, before: str, after: str
    ) -> None:
        assert self.passing(run_ptx, ptx_kernel, store, load, before, after) == {"data race"}

    def test_atomics_pass_messages(self, run_ptx: Run, ptx_kernel: Text) -> None:
        text = """
            ld.param.u64 %rd1, [out];
            mov.u32 %r1, %tid.x;
            mov.u32 %r2, flag;
            setp.lt.u32 %p1, %r1, 32;
            setp.eq.u32 %p3, %r1, 0;
            @%p3 st.shared.u32 [%r2], 0;
            bar.sync 0;
            @%p1 bra PRODUCER;
            AGAIN:
            atom.acquire.cta.shared.add.u32 %r3, [%r2], 0;
            setp.lt.u32 %p2, %r3, 32;
            @%p2 bra AGAIN;
            ld.shared.u32 %r4, [%r2+4];
            st.global.u32 [%rd1], %r4;
            ret;
            PRODUCER:
            @%p3 st.shared.u32 [%r2+4], 42;
            red.release.cta.shared.add.u32 [%r2], 1;
            ret;
            """
        kernel = ptx_kernel(text, ".param .u64 out", variables=".shared .align 8 .b8 flag[8];")
        for seed in range(4):
            ran = run_ptx(kernel, {"out": np.zeros(1, np.uint32)}, ("out",), block=(64, 1, 1), seed=seed)
            assert not ran.faults
            assert ran.buffers["out"][0] == 42


def test_atomics_of_several_processes(ptx_kernel: Text) -> None:
    """Eight CTAs in two processes add to one word, which starts at 0."""
    text = ptx_kernel(
        """
        ld.param.u64 %rd1, [out];
        mov.u32 %r1, 0;
        AGAIN:
        atom.global.add.u32 %r2, [%rd1], 1;
        red.global.max.u32 [%rd1+4], %r2;
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p1, %r1, 20;
        @%p1 bra AGAIN;
        ret;
        """,
        ".param .u64 out",
    )
    buffers = Buffers([Wanted("out", "uint32", (2,), data=np.zeros(2, np.uint32), output=True)])
    launch = Launch("kernel", (8, 1, 1), (32, 1, 1), (1, 1, 1), 0, {}, (struct.pack("<Q", buffers["out"].address),))
    report = simulate(launch, read_module(text), buffers, jobs=2)
    assert report.ok
    total = 8 * 32 * 20
    assert list(buffers.bytes_of(buffers["out"]).view(np.uint32)) == [total, total - 1]
