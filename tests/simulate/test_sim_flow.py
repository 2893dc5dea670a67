"""Control flow and the instructions without results, executed."""

from __future__ import annotations

import numpy as np
import pytest

from tunekit.simulate.faults import Unsupported

OUT = ".param .u64 out"
LANE = "ld.param.u64 %rd1, [out]; mov.u32 %r1, %laneid; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;"


def lanes(run_ptx, text: str, **more) -> np.ndarray:
    ran = run_ptx(text, {"out": np.zeros(32, np.uint32)}, ["out"], **more)
    assert ran.faults == ()
    return ran.buffers["out"]


def test_both_sides_of_a_branch_and_a_loop(run_ptx, ptx_kernel):
    """Each lane counts to its own number, odd lanes by twos."""
    body = f"""{LANE} mov.b32 %r2, 0; mov.b32 %r4, 0; and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0;
    LOOP: setp.ge.u32 %p2, %r4, %r1; @%p2 bra DONE; @%p1 bra EVEN; add.u32 %r2, %r2, 2; bra.uni NEXT;
    EVEN: add.u32 %r2, %r2, 1; NEXT: add.u32 %r4, %r4, 1; bra LOOP;
    DONE: st.global.u32 [%rd1], %r2; ret;"""
    expected = [lane * (2 if lane % 2 else 1) for lane in range(32)]
    for seed in range(4):
        assert lanes(run_ptx, ptx_kernel(body, OUT), seed=seed).tolist() == expected


def test_a_switch(run_ptx, ptx_kernel):
    body = f"""{LANE} and.b32 %r2, %r1, 3; T: .branchtargets A, B, C, A; brx.idx %r2, T;
    A: mov.b32 %r3, 10; bra END; B: mov.b32 %r3, 11; bra END; C: mov.b32 %r3, 12;
    END: st.global.u32 [%rd1], %r3; exit;"""
    assert lanes(run_ptx, ptx_kernel(body, OUT)).tolist() == [10, 11, 12, 10] * 8


def test_a_switch_beyond_its_list(run_ptx, ptx_kernel):
    body = "mov.u32 %r1, %laneid; T: .branchtargets A, A; brx.idx %r1, T; A: exit;"
    (fault,) = run_ptx(ptx_kernel(body)).faults
    assert fault.kind.value == "illegal operation" and "in a list of 2 targets" in fault.message


def test_lanes_that_leave_early(run_ptx, ptx_kernel):
    body = f"{LANE} setp.lt.u32 %p1, %r1, 8; @%p1 exit; setp.gt.u32 %p2, %r1, 20; @%p2 ret; st.global.u32 [%rd1], %r1;"
    assert np.flatnonzero(lanes(run_ptx, ptx_kernel(body, OUT))).tolist() == list(range(8, 21))


def test_bra_uni_must_be_uniform(run_ptx, ptx_kernel):
    body = "mov.u32 %r1, %laneid; setp.lt.u32 %p1, %r1, 8; @%p1 bra.uni L; L: exit;"
    ran = run_ptx(ptx_kernel(body))
    assert ran.kinds == {"divergence"} and "0x000000ff of the 0xffffffff" in ran.faults[0].message


def test_a_function_that_only_some_lanes_call(run_ptx, ptx_kernel):
    double = """.func (.param .b32 out) double(.param .b32 in) { .reg .b32 %r<3>; .reg .pred %p1;
        ld.param.b32 %r1, [in]; setp.eq.u32 %p1, %r1, 3; @%p1 bra THREE; add.u32 %r1, %r1, %r1;
        st.param.b32 [out], %r1; ret; THREE: st.param.b32 [out], 33; ret; }"""
    body = f"""{LANE} mov.b32 %r2, 99; setp.lt.u32 %p1, %r1, 8;
    {{ .param .b32 param0; .param .b32 retval0; st.param.b32 [param0], %r1; st.param.b32 [retval0], %r2;
    @%p1 call (retval0), double, (param0); ld.param.b32 %r2, [retval0]; }}
    st.global.u32 [%rd1], %r2; exit;"""
    got = lanes(run_ptx, ptx_kernel(body, OUT, variables=double))
    assert got.tolist() == [0, 2, 4, 33, 8, 10, 12, 14] + [99] * 24


def test_a_recursive_function_is_refused_when_it_is_reached(run_ptx, ptx_kernel):
    endless = ".func endless() { call endless; ret; }"
    assert run_ptx(ptx_kernel("exit; call endless; exit;", variables=endless)).faults == ()
    with pytest.raises(Unsupported, match="endless calls itself"):
        run_ptx(ptx_kernel("call endless; exit;", variables=endless))


def test_trap_ends_the_grid(run_ptx, ptx_kernel):
    ran = run_ptx(ptx_kernel("trap;"))
    assert ran.kinds == {"trap"} and ran.results[0].state == "stopped"


def test_printf_of_the_device(run_ptx, ptx_kernel):
    """The format lies in constant memory here, the values in local memory: 8-aligned, as the compiler puts them."""
    text = "lane %d: %5.2f %s %#x %lld%%\n"
    constant = lambda name, s: f".const .align 1 .b8 {name}[] = {{{', '.join(str(c) for c in s.encode())}, 0}};\n"  # noqa: E731
    variables = (
        ".extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 v);\n"
        + constant("form", text) + constant("word", "two")
    )  # fmt: skip
    body = """.local .align 8 .b8 depot[40]; mov.u32 %r1, %laneid; setp.gt.u32 %p1, %r1, 1; @%p1 exit;
    st.local.u32 [depot], %r1; st.local.b64 [depot+8], 0d4004000000000000;
    mov.u64 %rd4, word; cvta.const.u64 %rd4, %rd4; st.local.b64 [depot+16], %rd4; st.local.b32 [depot+24], 255;
    st.local.b64 [depot+32], -5;
    mov.u64 %rd1, form; cvta.const.u64 %rd2, %rd1; mov.u64 %rd3, depot; cvta.local.u64 %rd3, %rd3;
    { .param .b64 param0; .param .b64 param1; .param .b32 retval0; st.param.b64 [param0], %rd2;
    st.param.b64 [param1], %rd3; call.uni (retval0), vprintf, (param0, param1); ld.param.b32 %r2, [retval0]; }
    exit;"""
    ran = run_ptx(ptx_kernel(body, variables=variables))
    assert ran.faults == ()
    assert ran.results[0].faults.notes == [
        f"cta (0, 0, 0) warp 0 lane {n}: lane {n}:  2.50 two 0xff -5%\n" for n in (0, 1)
    ]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("dec.sync.aligned.u32 24", "inc.sync.aligned.u32 240", None),
        ("dec.sync.aligned.u32 28", "dec.sync.aligned.u32 24", "not a multiple of 8 from 24 to 256"),
        ("dec.sync.aligned.u32 264", "dec.sync.aligned.u32 24", "not a multiple of 8 from 24 to 256"),
        ("dec.sync.aligned.u32 40; setmaxnreg.dec.sync.aligned.u32 48", "dec.sync.aligned.u32 24", "that owns 40"),
        ("dec.sync.aligned.u32 64; setmaxnreg.inc.sync.aligned.u32 40", "dec.sync.aligned.u32 24", "that owns 64"),
    ],
)
def test_register_counts(run_ptx, ptx_kernel, first, second, said):
    """Three warpgroups of 384 threads have 168 registers a thread: one gives, two take."""
    body = f"""mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 128; @%p1 bra FIRST; setmaxnreg.{second}; exit;
    FIRST: setmaxnreg.{first}; exit;"""
    ran = run_ptx(ptx_kernel(body, directives=".reqntid 384, 1, 1 .minnctapersm 1"), block=(384, 1, 1))
    assert [fault.message for fault in ran.faults if said is None or said not in fault.message] == []
    assert bool(ran.faults) == (said is not None)


def test_more_registers_than_the_pool_holds_never_come(run_ptx, ptx_kernel):
    body = "setmaxnreg.inc.sync.aligned.u32 240; exit;"
    ran = run_ptx(ptx_kernel(body, directives=".reqntid 384, 1, 1"), block=(384, 1, 1))
    assert ran.kinds == {"deadlock"}
    assert "setmaxnreg.inc to 240: 2304 registers wanted, 0 free in the CTA" in ran.faults[0].message


def test_a_warp_that_leaves_its_warpgroup_alone(run_ptx, ptx_kernel):
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 exit; setmaxnreg.dec.sync.aligned.u32 40; exit;"
    ran = run_ptx(ptx_kernel(body, directives=".reqntid 128, 1, 1"), block=(128, 1, 1))
    (fault,) = ran.faults
    assert fault.message == "setmaxnreg not executed by warp 0, but by another warp of its warpgroup"
    assert "setmaxnreg.dec" in fault.place.text


def test_the_warps_of_a_warpgroup_may_have_a_setmaxnreg_each(run_ptx, ptx_kernel):
    """As CUTLASS's kernels do, whose warps go separate ways first."""
    body = """mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra FIRST; setmaxnreg.dec.sync.aligned.u32 40; exit;
    FIRST: setmaxnreg.dec.sync.aligned.u32 40; exit;"""
    assert run_ptx(ptx_kernel(body, directives=".reqntid 128, 1, 1"), block=(128, 1, 1)).faults == ()


def test_hints_do_nothing(run_ptx, ptx_kernel):
    body = """ld.param.u64 %rd1, [out]; griddepcontrol.wait; prefetch.global.L2 [%rd1]; prefetch.tensormap [%rd1];
    prefetchu.L1 [%rd1]; applypriority.global.L2::evict_normal [%rd1], 128; pmevent 1; nanosleep.u32 20;
    griddepcontrol.launch_dependents; exit;"""
    ran = run_ptx(ptx_kernel(body, OUT), {"out": np.zeros(32, np.uint32)}, ["out"])
    assert ran.faults == () and not ran.buffers["out"].any()


def test_discarded_memory_is_indeterminate(run_ptx, ptx_kernel):
    body = """mov.u32 %r1, %laneid; setp.ne.u32 %p1, %r1, 0; @%p1 exit;
    ld.param.u64 %rd1, [out]; discard.global.L2 [%rd1], 128; exit;"""
    ran = run_ptx(ptx_kernel(body, OUT), {"out": np.zeros(64, np.uint32)}, ["out"])
    assert ran.buffers["out"].tolist() == [0xFFFFFFFF] * 32 + [0] * 32


def test_bytes_that_a_pragma_calls_unused_are_not_read(run_ptx, ptx_kernel):
    """The second word is uninitialised: loading it along is no fault, using it is."""
    load = """ld.param.u64 %rd1, [out]; mov.b32 %r9, 1; st.shared.b32 [s], %r9; st.shared.b32 [s+8], %r9;
    .pragma "used_bytes_mask 0x0f0f";
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [s]; add.u32 %r5, %r1, %r3;"""
    shared = ".shared .align 16 .b8 s[16];"
    assert run_ptx(ptx_kernel(load + "exit;", OUT, variables=shared), {"out": np.zeros(1)}, ["out"]).faults == ()
    ran = run_ptx(
        ptx_kernel(load + "add.u32 %r5, %r2, %r3; exit;", OUT, variables=shared), {"out": np.zeros(1)}, ["out"]
    )
    assert ran.kinds == {"undefined register"}


SPIN_LOCK = """mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.v2.b32 [s], {0, 0}; bar.sync 0;
    TRY: atom.acquire.cta.shared.cas.b32 %r2, [s], 0, 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra TRY;
    ld.shared.b32 %r3, [s+4]; add.u32 %r3, %r3, 1; st.shared.b32 [s+4], %r3;
    atom.release.cta.shared.exch.b32 %r4, [s], 0;
    bar.sync 0; ld.shared.b32 %r5, [s+4]; st.global.b32 [%rd1], %r5; exit;"""


def test_a_lock_that_the_lanes_of_a_warp_take_in_turn(run_ptx, ptx_kernel):
    """The lane that has it does not wait for the others, which spin until it gives it back."""
    body = f"{LANE} {SPIN_LOCK}"
    for seed in range(2):
        got = lanes(run_ptx, ptx_kernel(body, OUT, variables=".shared .align 8 .b8 s[8];"), seed=seed)
        assert got.tolist() == [32] * 32


def test_lanes_that_wait_for_what_others_do_behind_their_meeting(run_ptx, ptx_kernel):
    """Lane 0 waits on an mbarrier inside a branch for arrivals that the other lanes make after it."""
    body = f"""{LANE} setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared.b64 [b], 31; bar.warp.sync -1;
    @!%p1 bra OTHERS; W: mbarrier.try_wait.parity.shared.b64 %p2, [b], 0; @!%p2 bra W;
    OTHERS: @!%p1 mbarrier.arrive.shared.b64 _, [b]; st.global.b32 [%rd1], %r1; exit;"""
    for seed in range(3):
        got = lanes(run_ptx, ptx_kernel(body, OUT, variables=".shared .align 8 .b64 b;"), seed=seed)
        assert got.tolist() == list(range(32))


def test_lanes_meet_at_different_bar_warp_syncs(run_ptx, ptx_kernel):
    """PTX ISA, bar.warp.sync: all threads of the mask execute *a* bar.warp.sync with it, not the same one."""
    body = f"""{LANE} setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW; mov.b32 %r3, 0;
    HIGH: bar.warp.sync -1; ld.shared.b32 %r2, [s]; bar.warp.sync -1; add.u32 %r3, %r3, 1;
    setp.lt.u32 %p2, %r3, 5; @%p2 bra HIGH; bra END;
    LOW: mov.b32 %r3, 0; setp.eq.u32 %p3, %r1, 0; AGAIN: @%p3 st.shared.b32 [s], %r3; bar.warp.sync -1;
    mov.b32 %r2, 9; bar.warp.sync -1; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 5; @%p2 bra AGAIN;
    END: st.global.b32 [%rd1], %r2; exit;"""
    for seed in range(5):
        got = lanes(run_ptx, ptx_kernel(body, OUT, variables=".shared .align 4 .b32 s;"), seed=seed)
        assert got.tolist() == [9] * 16 + [4] * 16


def test_a_bar_warp_sync_that_some_lanes_never_reach(run_ptx, ptx_kernel):
    body = f"""{LANE} setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW; bar.warp.sync -1; bra END;
    LOW: bar.warp.sync 0xffff; bar.sync 0; END: exit;"""
    ran = run_ptx(ptx_kernel(body, OUT), {"out": np.zeros(32, np.uint32)}, ["out"])
    assert ran.kinds == {"deadlock"}
    assert "waits for bar.warp.sync 0xffffffff of lanes 0x0000ffff" in ran.faults[0].message
