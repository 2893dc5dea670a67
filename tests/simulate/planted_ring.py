"""A producer and a consumer warp around a ring of two stages, guarded by full and empty mbarriers."""

from __future__ import annotations

from typing import Any

import numpy as np
from planted import Base, Plant, plant

from tunekit.simulate.faults import FaultKind

ROUNDS = 5

TEXT = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry ring(.param .u64 source, .param .u64 result)
{
.reg .pred %p<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
ld.param.u64 %rd1, [source];
ld.param.u64 %rd2, [result];
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
and.b32 %r3, %r1, 31;
mov.u32 %r4, smem;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r4], 32;
mbarrier.init.shared.b64 [%r4+8], 32;
mbarrier.init.shared.b64 [%r4+16], 32;
mbarrier.init.shared.b64 [%r4+24], 32;
READY:
bar.sync 0;
mov.u32 %r5, 0;
mov.u32 %r6, 0;
mov.u32 %r7, 0;
setp.ne.u32 %p2, %r2, 0;
@%p2 bra CONSUMER;
PRODUCER:
xor.b32 %r8, %r7, 1;
shl.b32 %r9, %r6, 3;
add.u32 %r10, %r4, %r9;
WAIT_EMPTY:
mbarrier.try_wait.parity.shared.b64 %p3, [%r10+16], %r8;
@!%p3 bra WAIT_EMPTY;
shl.b32 %r11, %r5, 5;
add.u32 %r11, %r11, %r3;
mul.wide.u32 %rd3, %r11, 4;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r12, [%rd4];
shl.b32 %r13, %r6, 7;
add.u32 %r13, %r13, %r4;
shl.b32 %r14, %r3, 2;
add.u32 %r13, %r13, %r14;
st.shared.u32 [%r13+32], %r12;
mbarrier.arrive.shared.b64 %rd5, [%r10];
add.u32 %r5, %r5, 1;
xor.b32 %r6, %r6, 1;
setp.eq.u32 %p4, %r6, 0;
@%p4 xor.b32 %r7, %r7, 1;
setp.lt.u32 %p5, %r5, 5;
@%p5 bra PRODUCER;
ret;
CONSUMER:
shl.b32 %r9, %r6, 3;
add.u32 %r10, %r4, %r9;
WAIT_FULL:
mbarrier.try_wait.parity.shared.b64 %p3, [%r10], %r7;
@!%p3 bra WAIT_FULL;
shl.b32 %r13, %r6, 7;
add.u32 %r13, %r13, %r4;
xor.b32 %r14, %r3, 31;
shl.b32 %r14, %r14, 2;
add.u32 %r13, %r13, %r14;
ld.shared.u32 %r12, [%r13+32];
mbarrier.arrive.shared.b64 %rd5, [%r10+16];
add.u32 %r12, %r12, 7;
shl.b32 %r11, %r5, 5;
add.u32 %r11, %r11, %r3;
mul.wide.u32 %rd3, %r11, 4;
add.s64 %rd4, %rd2, %rd3;
st.global.u32 [%rd4], %r12;
add.u32 %r5, %r5, 1;
xor.b32 %r6, %r6, 1;
setp.eq.u32 %p4, %r6, 0;
@%p4 xor.b32 %r7, %r7, 1;
setp.lt.u32 %p6, %r5, 5;
@%p6 bra CONSUMER;
ret;
}
"""


def _buffers() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "source": np.arange(ROUNDS * 32, dtype=np.uint32),
        "result": np.zeros(ROUNDS * 32, dtype=np.uint32),
    }


def _expected() -> dict[str, np.ndarray[Any, Any]]:
    return {"result": (_buffers()["source"].reshape(ROUNDS, 32)[:, ::-1] + 7).reshape(-1)}


RING = Base("ring", TEXT, _buffers, ("source", "result"), _expected, block=(64, 1, 1), shared=512)

F = FaultKind
PLANTS: tuple[Plant, ...] = (
    plant(
        "full barrier expects one arrival too many",
        RING,
        ("mbarrier.init.shared.b64 [%r4], 32", "mbarrier.init.shared.b64 [%r4], 33"),
        finds=F.DEADLOCK,
    ),
    plant(
        "full barrier expects half the arrivals, so that its phase passes twice",
        RING,
        ("mbarrier.init.shared.b64 [%r4+8], 32", "mbarrier.init.shared.b64 [%r4+8], 16"),
        finds=(F.RACE, F.UNINITIALISED, F.DEADLOCK),
    ),
    plant(
        "a stage is reused before its consumer released it",
        RING,
        ("mbarrier.try_wait.parity.shared.b64 %p3, [%r10+16], %r8;\n@!%p3 bra WAIT_EMPTY;", ""),
        finds=(F.RACE, F.DEADLOCK),
    ),
    plant(
        "the consumer never releases the stage",
        RING,
        ("mbarrier.arrive.shared.b64 %rd5, [%r10+16];", ""),
        finds=F.DEADLOCK,
    ),
    plant(
        "the consumer waits for the wrong phase",
        RING,
        (
            "mbarrier.try_wait.parity.shared.b64 %p3, [%r10], %r7;",
            "xor.b32 %r8, %r7, 1;\nmbarrier.try_wait.parity.shared.b64 %p3, [%r10], %r8;",
        ),
        finds=(F.RACE, F.UNINITIALISED, F.DEADLOCK),
    ),
    plant(
        "a wait that gave up is taken for a success",
        RING,
        ("@!%p3 bra WAIT_FULL;", ""),
        finds=(F.RACE, F.UNINITIALISED, F.DEADLOCK),
        wrong=True,
        some=True,
    ),
    plant(
        "the consumer waits for the other stage's barrier",
        RING,
        (
            "mbarrier.try_wait.parity.shared.b64 %p3, [%r10], %r7;",
            "xor.b32 %r15, %r9, 8;\nadd.u32 %r15, %r15, %r4;\nmbarrier.try_wait.parity.shared.b64 %p3, [%r15], %r7;",
        ),
        finds=(F.RACE, F.UNINITIALISED, F.DEADLOCK),
    ),
    plant(
        "the stage is announced before it is written",
        RING,
        ("mbarrier.arrive.shared.b64 %rd5, [%r10];\n", ""),
        ("ld.global.u32 %r12, [%rd4];", "ld.global.u32 %r12, [%rd4];\nmbarrier.arrive.shared.b64 %rd5, [%r10];"),
        finds=(F.RACE, F.UNINITIALISED),
    ),
    plant(
        "no barrier between the mbarriers' init and their use",
        RING,
        ("bar.sync 0;\n", ""),
        finds=(F.MBARRIER, F.RACE),
    ),
    plant(
        "the consumer asks for one round more than the producer makes",
        RING,
        ("setp.lt.u32 %p6, %r5, 5;", "setp.lt.u32 %p6, %r5, 6;"),
        finds=F.DEADLOCK,
    ),
    plant(
        "the producer reads one round past its input",
        RING,
        ("setp.lt.u32 %p5, %r5, 5;", "setp.lt.u32 %p5, %r5, 6;"),
        ("setp.lt.u32 %p6, %r5, 5;", "setp.lt.u32 %p6, %r5, 6;"),
        finds=F.OUT_OF_BOUNDS,
        at="ld.global",
    ),
    plant(
        "the consumer reads one word past what was written",
        RING,
        ("ld.shared.u32 %r12, [%r13+32];", "ld.shared.u32 %r12, [%r13+36];"),
        finds=(F.UNINITIALISED, F.RACE),
        at="ld.shared",
    ),
    plant(
        "the stage's address is odd",
        RING,
        ("st.shared.u32 [%r13+32], %r12;", "st.shared.u32 [%r13+33], %r12;"),
        finds=F.MISALIGNED,
        at="st.shared",
    ),
    plant(
        "stages overlap by half",
        RING,
        (
            "shl.b32 %r13, %r6, 7;\nadd.u32 %r13, %r13, %r4;\nshl.b32 %r14, %r3, 2;",
            "shl.b32 %r13, %r6, 6;\nadd.u32 %r13, %r13, %r4;\nshl.b32 %r14, %r3, 2;",
        ),
        finds=(F.RACE, F.UNINITIALISED),
    ),
)
