"""D = 2 A B^T by two wgmma of one warp group, operands copied to shared memory by ordinary stores."""

from __future__ import annotations

from typing import Any

import numpy as np
from planted import Base, Plant, plant

from tunekit.simulate.faults import FaultKind

M, N, K = 64, 32, 16
DS = ", ".join(f"%r{40 + n}" for n in range(16))
TEXT = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry group(.param .u64 a, .param .u64 b, .param .u64 d)
{
.reg .pred %p<8>;
.reg .b32 %r<64>;
.reg .b64 %rd<16>;
ld.param.u64 %rd1, [a];
ld.param.u64 %rd2, [b];
ld.param.u64 %rd3, [d];
mov.u32 %r1, %tid.x;
mov.u32 %r4, smem;
setp.lt.u32 %p1, %r1, 64;
and.b32 %r2, %r1, 63;
mul.wide.u32 %rd4, %r2, 32;
add.s64 %rd5, %rd1, %rd4;
@!%p1 add.s64 %rd5, %rd2, %rd4;
setp.ge.u32 %p2, %r1, 96;
@%p2 bra STORED;
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd5];
ld.global.v4.b32 {%r14, %r15, %r16, %r17}, [%rd5+16];
shr.u32 %r5, %r1, 3;
shl.b32 %r5, %r5, 8;
and.b32 %r6, %r1, 7;
shl.b32 %r6, %r6, 4;
add.u32 %r7, %r5, %r6;
add.u32 %r8, %r4, %r7;
st.shared.v4.b32 [%r8], {%r10, %r11, %r12, %r13};
st.shared.v4.b32 [%r8+128], {%r14, %r15, %r16, %r17};
STORED:
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r20, %r4, 4;
or.b32 %r21, %r20, 0x80000;
mov.b32 %r22, 0x10;
mov.b64 %rd6, {%r21, %r22};
add.u32 %r23, %r21, 128;
mov.b64 %rd7, {%r23, %r22};
mov.pred %p3, 0;
mov.pred %p4, 1;
"""
TEXT += "".join(f"mov.b32 %r{40 + n}, 0;\n" for n in range(16))
TEXT += f"""
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{{DS}}}, %rd6, %rd7, %p3, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{{DS}}}, %rd6, %rd7, %p4, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 1;
st.shared.b32 [%r4+2048], %r1;
mul.wide.u32 %rd8, %r1, 64;
add.s64 %rd9, %rd3, %rd8;
"""
TEXT += "".join(
    f"st.global.v4.b32 [%rd9+{16 * n}], {{%r{40 + 4 * n}, %r{41 + 4 * n}, %r{42 + 4 * n}, %r{43 + 4 * n}}};\n"
    for n in range(4)
)
TEXT = TEXT.replace("st.shared.b32 [%r4+2048], %r1;", "setp.ne.u32 %p5, %r1, 0;\n@!%p5 st.shared.b32 [%r4+2048], %r1;")
TEXT += """
ret;
}
"""


def _bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _values() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    return random.integers(-4, 5, (M, K)).astype(np.float32), random.integers(-4, 5, (N, K)).astype(np.float32)


def _buffers() -> dict[str, np.ndarray[Any, Any]]:
    a, b = _values()
    return {"a": _bf16(a), "b": _bf16(b), "d": np.zeros((128, 16), dtype=np.float32)}


def _expected() -> dict[str, np.ndarray[Any, Any]]:
    a, b = _values()
    full = 2 * a @ b.T
    thread, register = np.meshgrid(np.arange(128), np.arange(16), indexing="ij")
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register % 4 // 2)
    column = register // 4 * 8 + thread % 4 * 2 + register % 2
    return {"d": full[row, column].astype(np.float32)}


GROUP = Base("group", TEXT, _buffers, ("a", "b", "d"), _expected, block=(128, 1, 1), shared=4096)
SECOND = f"wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{{DS}}}, %rd6, %rd7, %p4, 1, 1, 0, 0;\n"

F = FaultKind
PLANTS: tuple[Plant, ...] = (
    plant(
        "operands stored without a proxy fence",
        GROUP,
        ("fence.proxy.async.shared::cta;\n", ""),
        finds=F.MISSING_PROXY_FENCE,
        at="wgmma.mma_async",
    ),
    plant(
        "no barrier between the stores and the product",
        GROUP,
        ("bar.sync 0;\n", ""),
        finds=(F.RACE, F.UNINITIALISED),
        at="wgmma.mma_async",
    ),
    plant(
        "no wgmma.fence after the accumulators were set",
        GROUP,
        ("wgmma.fence.sync.aligned;\n", ""),
        finds=F.MISSING_WGMMA_FENCE,
        at="wgmma.mma_async",
    ),
    plant(
        "accumulators stored without waiting",
        GROUP,
        ("wgmma.wait_group.sync.aligned 0;\n", ""),
        finds=F.EARLY_REGISTER,
        at="st.global",
    ),
    plant(
        "one group may still be in flight",
        GROUP,
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        finds=F.EARLY_REGISTER,
        at="st.global",
    ),
    plant(
        "the operand is overwritten while it may still be read",
        GROUP,
        ("wgmma.wait_group.sync.aligned 0;\nbar.sync 1;\n", ""),
        (
            "@!%p5 st.shared.b32 [%r4+2048], %r1;\n",
            "@!%p5 st.shared.b32 [%r4+2048], %r1;\nwgmma.wait_group.sync.aligned 0;\n",
        ),
        finds=F.RACE,
    ),
    plant(
        "one warp leaves the group",
        GROUP,
        (SECOND, "shr.u32 %r30, %r1, 5;\nsetp.eq.u32 %p6, %r30, 2;\n@%p6 bra OUT;\n" + SECOND),
        ("ret;\n}", "OUT:\nret;\n}"),
        finds=(F.DEADLOCK, F.DIVERGENCE, F.ILLEGAL, F.BARRIER, F.UNFINISHED),
    ),
    plant(
        "B is taken for MN-major",
        GROUP,
        ("%rd6, %rd7, %p4, 1, 1, 0, 0;", "%rd6, %rd7, %p4, 1, 1, 0, 1;"),
        wrong=True,
    ),
)
