"""Two CTAs of a cluster: each sends its numbers to the other's shared memory and signals the other's mbarrier."""

from __future__ import annotations

from typing import Any

import numpy as np
from planted import Base, Plant, plant

from tunekit.simulate.faults import FaultKind

TEXT = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry pair(.param .u64 source, .param .u64 result)
{
.reg .pred %p<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
ld.param.u64 %rd1, [source];
ld.param.u64 %rd2, [result];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %cluster_ctarank;
xor.b32 %r3, %r2, 1;
mov.u32 %r4, smem;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r4], 32;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r5, %r4, %r3;
shl.b32 %r6, %r2, 5;
add.u32 %r7, %r6, %r1;
mul.wide.u32 %rd3, %r7, 4;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r8, [%rd4];
shl.b32 %r9, %r1, 2;
add.u32 %r10, %r5, %r9;
st.shared::cluster.u32 [%r10+16], %r8;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
mov.b32 %r11, 0;
WAIT:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r4], %r11;
@!%p2 bra WAIT;
add.u32 %r12, %r4, %r9;
ld.shared.u32 %r13, [%r12+16];
add.s64 %rd5, %rd2, %rd3;
st.global.u32 [%rd5], %r13;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ret;
}
"""


def _buffers() -> dict[str, np.ndarray[Any, Any]]:
    return {"source": np.arange(64, dtype=np.uint32), "result": np.zeros(64, dtype=np.uint32)}


def _expected() -> dict[str, np.ndarray[Any, Any]]:
    return {"result": np.roll(np.arange(64, dtype=np.uint32), 32)}


PAIR = Base("pair", TEXT, _buffers, ("source", "result"), _expected, grid=(2, 1, 1), cluster=(2, 1, 1), shared=256)

F = FaultKind
PLANTS: tuple[Plant, ...] = (
    plant(
        "the other CTA's barrier is used before the cluster has met",
        PAIR,
        ("READY:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n", "READY:\n"),
        finds=(F.MBARRIER, F.RACE),
    ),
    plant(
        "the signal goes to the own barrier",
        PAIR,
        (
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];",
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];",
        ),
        finds=(F.RACE, F.UNINITIALISED),
        at="ld.shared",
    ),
    plant(
        "the numbers are read without waiting",
        PAIR,
        ("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r4], %r11;\n@!%p2 bra WAIT;\n", ""),
        finds=(F.RACE, F.UNINITIALISED),
        at="ld.shared",
    ),
    plant(
        "a rank that the cluster does not have",
        PAIR,
        ("xor.b32 %r3, %r2, 1;", "add.u32 %r3, %r2, 2;"),
        finds=F.OUT_OF_BOUNDS,
    ),
    plant(
        "one CTA does not come to the last meeting",
        PAIR,
        (
            "st.global.u32 [%rd5], %r13;\n",
            "st.global.u32 [%rd5], %r13;\nsetp.eq.u32 %p3, %r2, 1;\n@%p3 bra WAIT_FOR_EVER;\n",
        ),
        (
            "ret;\n}",
            "ret;\nWAIT_FOR_EVER:\nmov.b32 %r11, 1;\nAGAIN:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r4], %r11;\n@!%p4 bra AGAIN;\nret;\n}",
        ),
        finds=F.DEADLOCK,
    ),
)
