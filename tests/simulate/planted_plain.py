"""A sum over a CTA's warps: shuffles, shared memory, a named barrier, an atomic; the faults of ordinary kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from planted import Base, Plant, plant

from tunekit.simulate.faults import FaultKind

WARPS, CTAS = 4, 2

TEXT = """
.version 8.8
.target sm_90a
.address_size 64
.shared .align 16 .b8 part[24];
.visible .entry total(.param .u64 source, .param .u64 result, .param .u64 squares)
{
.reg .pred %p<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
.local .align 4 .b8 stack[8];
ld.param.u64 %rd1, [source];
ld.param.u64 %rd2, [result];
ld.param.u64 %rd8, [squares];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mad.lo.u32 %r3, %r2, 128, %r1;
mul.wide.u32 %rd3, %r3, 4;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r4, [%rd4];
mul.lo.u32 %r20, %r4, %r4;
mov.u64 %rd10, stack;
st.local.u32 [%rd10+4], %r20;
ld.local.u32 %r21, [%rd10+4];
add.s64 %rd9, %rd8, %rd3;
st.global.u32 [%rd9], %r21;
shfl.sync.bfly.b32 %r5, %r4, 16, 31, -1;
add.u32 %r4, %r4, %r5;
shfl.sync.bfly.b32 %r5, %r4, 8, 31, -1;
add.u32 %r4, %r4, %r5;
shfl.sync.bfly.b32 %r5, %r4, 4, 31, -1;
add.u32 %r4, %r4, %r5;
shfl.sync.bfly.b32 %r5, %r4, 2, 31, -1;
add.u32 %r4, %r4, %r5;
shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
add.u32 %r4, %r4, %r5;
and.b32 %r6, %r1, 31;
shr.u32 %r7, %r1, 5;
mov.u32 %r8, part;
setp.ne.u32 %p1, %r6, 0;
@%p1 bra WRITTEN;
shl.b32 %r9, %r7, 2;
add.u32 %r10, %r8, %r9;
st.shared.u32 [%r10], %r4;
WRITTEN:
bar.sync 3, 128;
setp.ne.u32 %p2, %r1, 0;
@%p2 bra DONE;
ld.shared.v4.u32 {%r11, %r12, %r13, %r14}, [%r8];
add.u32 %r15, %r11, %r12;
add.u32 %r16, %r13, %r14;
add.u32 %r17, %r15, %r16;
red.global.add.u32 [%rd2], %r17;
DONE:
ret;
}
"""


def _buffers() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "source": np.arange(CTAS * WARPS * 32, dtype=np.uint32),
        "result": np.zeros(1, dtype=np.uint32),
        "squares": np.zeros(CTAS * WARPS * 32, dtype=np.uint32),
    }


def _expected() -> dict[str, np.ndarray[Any, Any]]:
    return {"squares": _buffers()["source"] ** 2}


TOTAL = Base(
    "total", TEXT, _buffers, ("source", "result", "squares"), _expected, grid=(CTAS, 1, 1), block=(WARPS * 32, 1, 1)
)

F = FaultKind
PLANTS: tuple[Plant, ...] = (
    plant("no barrier before the parts are read", TOTAL, ("bar.sync 3, 128;\n", ""), finds=(F.RACE, F.UNINITIALISED)),
    plant(
        "the barrier expects a warp that does not come",
        TOTAL,
        ("bar.sync 3, 128;", "bar.sync 3, 160;"),
        finds=(F.DEADLOCK, F.BARRIER),
    ),
    plant(
        "the barrier expects a warp fewer than come",
        TOTAL,
        ("bar.sync 3, 128;", "bar.sync 3, 96;"),
        finds=(F.RACE, F.UNINITIALISED, F.DEADLOCK, F.BARRIER),
    ),
    plant(
        "the barrier's count is no multiple of the warp size",
        TOTAL,
        ("bar.sync 3, 128;", "bar.sync 3, 100;"),
        finds=(F.BARRIER, F.ILLEGAL),
    ),
    plant(
        "a shuffle whose members are not all there",
        TOTAL,
        (
            "shfl.sync.bfly.b32 %r5, %r4, 16, 31, -1;",
            "setp.lt.u32 %p3, %r1, 16;\n@%p3 shfl.sync.bfly.b32 %r5, %r4, 16, 31, -1;",
        ),
        finds=(F.DIVERGENCE, F.UNDEFINED_REGISTER, F.DEADLOCK),
    ),
    plant(
        "a register read that nothing has written",
        TOTAL,
        ("add.u32 %r17, %r15, %r16;", "add.u32 %r17, %r15, %r18;"),
        finds=F.UNDEFINED_REGISTER,
    ),
    plant(
        "a read past the end of the input",
        TOTAL,
        ("ld.global.u32 %r4, [%rd4];", "ld.global.u32 %r4, [%rd4+4];"),
        finds=F.OUT_OF_BOUNDS,
        at="ld.global",
    ),
    plant(
        "a write past the end of the output",
        TOTAL,
        ("st.global.u32 [%rd9], %r21;", "st.global.u32 [%rd9+512], %r21;"),
        finds=F.OUT_OF_BOUNDS,
        at="st.global",
    ),
    plant(
        "a read past the end of shared memory",
        TOTAL,
        ("{%r11, %r12, %r13, %r14}, [%r8];", "{%r11, %r12, %r13, %r14}, [%r8+16];"),
        finds=F.OUT_OF_BOUNDS,
        at="ld.shared",
    ),
    plant(
        "a misaligned vector",
        TOTAL,
        ("{%r11, %r12, %r13, %r14}, [%r8];", "{%r11, %r12, %r13, %r14}, [%r8+8];"),
        finds=F.MISALIGNED,
        at="ld.shared",
    ),
    plant(
        "a write past the end of local memory",
        TOTAL,
        ("st.local.u32 [%rd10+4], %r20;", "st.local.u32 [%rd10+8], %r20;"),
        finds=F.OUT_OF_BOUNDS,
        at="st.local",
    ),
    plant(
        "an output read before it is written",
        TOTAL,
        (
            "st.global.u32 [%rd9], %r21;",
            "ld.global.u32 %r22, [%rd9];\nadd.u32 %r21, %r21, %r22;\nst.global.u32 [%rd9], %r21;",
        ),
        finds=F.UNINITIALISED,
        at="ld.global",
    ),
    plant(
        "warps write each other's parts",
        TOTAL,
        ("shl.b32 %r9, %r7, 2;", "mov.b32 %r9, 0;"),
        finds=F.RACE,
        at="st.shared",
    ),
)
