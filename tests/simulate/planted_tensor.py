"""S = A B^T on the tensor core, P = 2 S as bf16 back into tensor memory, O = P V: the shape of an attention step.

128 threads. A [128, 16], B [32, 16], V [16, 32] (its own 16 rows are the columns 0..15 of P), all bf16, copied to
shared memory by ordinary stores in the unswizzled K-major layout (core matrices of 8 rows of 16 bytes). Values are
small integers, so every result is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from planted import Base, Plant, plant

from tunekit.simulate.faults import FaultKind

M, N, K = 128, 32, 16


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


# Offsets in dynamic shared memory: two mbarriers, the slot for the tensor-memory address, then A, B and V.
TEXT = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry tensor(.param .u64 a, .param .u64 b, .param .u64 v, .param .u64 o)
{
.reg .pred %p<8>;
.reg .b16 %rs<4>;
.reg .b32 %r<128>;
.reg .b64 %rd<32>;
ld.param.u64 %rd1, [a];
ld.param.u64 %rd2, [b];
ld.param.u64 %rd3, [v];
ld.param.u64 %rd4, [o];
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
mov.u32 %r4, smem;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r4], 1;
mbarrier.init.shared.b64 [%r4+8], 1;
READY:
setp.ne.u32 %p2, %r2, 0;
@%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4+16], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
mul.wide.u32 %rd5, %r1, 32;
add.s64 %rd6, %rd1, %rd5;
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd6];
ld.global.v4.b32 {%r14, %r15, %r16, %r17}, [%rd6+16];
shr.u32 %r5, %r1, 3;
shl.b32 %r5, %r5, 8;
and.b32 %r6, %r1, 7;
shl.b32 %r6, %r6, 4;
add.u32 %r7, %r5, %r6;
add.u32 %r8, %r4, %r7;
st.shared.v4.b32 [%r8+1024], {%r10, %r11, %r12, %r13};
st.shared.v4.b32 [%r8+1152], {%r14, %r15, %r16, %r17};
setp.ge.u32 %p3, %r1, 32;
@%p3 bra STORED;
add.s64 %rd7, %rd2, %rd5;
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd7];
ld.global.v4.b32 {%r14, %r15, %r16, %r17}, [%rd7+16];
st.shared.v4.b32 [%r8+5120], {%r10, %r11, %r12, %r13};
st.shared.v4.b32 [%r8+5248], {%r14, %r15, %r16, %r17};
add.s64 %rd8, %rd3, %rd5;
ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd8];
ld.global.v4.b32 {%r14, %r15, %r16, %r17}, [%rd8+16];
st.shared.v4.b32 [%r8+6144], {%r10, %r11, %r12, %r13};
st.shared.v4.b32 [%r8+6272], {%r14, %r15, %r16, %r17};
STORED:
fence.proxy.async.shared::cta;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %r20, [%r4+16];
mov.b32 %r21, 0x8080490;
setp.ne.u32 %p4, %r1, 0;
@%p4 bra ISSUED;
add.u32 %r22, %r4, 1024;
shr.u32 %r22, %r22, 4;
mov.b32 %r23, 0x80000;
or.b32 %r24, %r22, %r23;
mov.b32 %r25, 0x4010;
mov.b64 %rd10, {%r24, %r25};
add.u32 %r26, %r4, 5120;
shr.u32 %r26, %r26, 4;
or.b32 %r27, %r26, %r23;
mov.b64 %rd11, {%r27, %r25};
setp.ne.u32 %p5, %r1, 0;
tcgen05.mma.cta_group::1.kind::f16 [%r20], %rd10, %rd11, %r21, %p5;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
ISSUED:
mov.b32 %r30, 0;
WAIT_S:
mbarrier.try_wait.parity.shared.b64 %p6, [%r4], %r30;
@!%p6 bra WAIT_S;
tcgen05.fence::after_thread_sync;
shl.b32 %r31, %r2, 21;
add.u32 %r32, %r20, %r31;
tcgen05.ld.sync.aligned.32x32b.x16.b32 S_REGISTERS, [%r32];
tcgen05.wait::ld.sync.aligned;
"""
TEXT += "".join(f"add.f32 %r{40 + n}, %r{40 + n}, %r{40 + n};\n" for n in range(16))
TEXT += "".join(f"cvt.rn.bf16x2.f32 %r{60 + n}, %r{41 + 2 * n}, %r{40 + 2 * n};\n" for n in range(8))
TEXT += """
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r32], {%r60, %r61, %r62, %r63, %r64, %r65, %r66, %r67};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 1, 128;
tcgen05.fence::after_thread_sync;
@%p4 bra ISSUED_O;
add.u32 %r26, %r4, 6144;
shr.u32 %r26, %r26, 4;
or.b32 %r27, %r26, %r23;
mov.b64 %rd12, {%r27, %r25};
add.u32 %r28, %r20, 32;
tcgen05.mma.cta_group::1.kind::f16 [%r28], [%r20], %rd12, %r21, %p5;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+8];
ISSUED_O:
WAIT_O:
mbarrier.try_wait.parity.shared.b64 %p6, [%r4+8], %r30;
@!%p6 bra WAIT_O;
tcgen05.fence::after_thread_sync;
add.u32 %r33, %r32, 32;
tcgen05.ld.sync.aligned.32x32b.x32.b32 O_REGISTERS, [%r33];
tcgen05.wait::ld.sync.aligned;
mul.wide.u32 %rd20, %r1, 128;
add.s64 %rd21, %rd4, %rd20;
"""
TEXT += "".join(
    f"st.global.v4.b32 [%rd21+{16 * n}], {{%r{70 + 4 * n}, %r{71 + 4 * n}, %r{72 + 4 * n}, %r{73 + 4 * n}}};\n"
    for n in range(8)
)
TEXT += """
tcgen05.fence::before_thread_sync;
bar.sync 2;
tcgen05.fence::after_thread_sync;
@%p2 bra DONE;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64;
DONE:
ret;
}
"""


def _bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _values() -> tuple[np.ndarray[Any, Any], ...]:
    random = np.random.default_rng(7)
    a = random.integers(-2, 3, (M, K)).astype(np.float32)
    b = random.integers(-1, 2, (N, K)).astype(np.float32)
    v = random.integers(-1, 2, (N, K)).astype(np.float32)
    return a, b, v


def _buffers() -> dict[str, np.ndarray[Any, Any]]:
    a, b, v = (_bf16(x) for x in _values())
    return {"a": a, "b": b, "v": v, "o": np.zeros((M, N), dtype=np.float32)}


def _expected() -> dict[str, np.ndarray[Any, Any]]:
    a, b, v = _values()
    s = a @ b.T
    return {"o": (2 * s[:, :K] @ v.T).astype(np.float32)}


TEXT = TEXT.replace("S_REGISTERS", registers(40, 16)).replace("O_REGISTERS", registers(70, 32))
TENSOR = Base("tensor", TEXT, _buffers, ("a", "b", "v", "o"), _expected, block=(128, 1, 1), shared=8192)

F = FaultKind
PLANTS: tuple[Plant, ...] = (
    plant(
        "operands stored without a proxy fence",
        TENSOR,
        ("fence.proxy.async.shared::cta;\n", ""),
        finds=F.MISSING_PROXY_FENCE,
        at="tcgen05.mma",
    ),
    plant(
        "no barrier between the stores and the product",
        TENSOR,
        ("bar.sync 0;\n", ""),
        finds=(F.RACE, F.UNINITIALISED, F.MBARRIER),
    ),
    plant(
        "S is read without waiting for the commit",
        TENSOR,
        ("mbarrier.try_wait.parity.shared.b64 %p6, [%r4], %r30;\n@!%p6 bra WAIT_S;\n", ""),
        finds=(F.RACE, F.UNINITIALISED, F.MISSING_TENSOR_FENCE),
        at="tcgen05.ld",
    ),
    plant(
        "no fence after the wait for S",
        TENSOR,
        ("@!%p6 bra WAIT_S;\ntcgen05.fence::after_thread_sync;", "@!%p6 bra WAIT_S;"),
        finds=F.MISSING_TENSOR_FENCE,
        at="tcgen05.ld",
        changes={"strict": True},
    ),
    plant(
        "S overwritten before wait::ld",
        TENSOR,
        (
            "[%r32];\ntcgen05.wait::ld.sync.aligned;",
            "[%r32];\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r32], {%r10};",
        ),
        finds=F.RACE,
        at="tcgen05.st",
    ),
    plant(
        "P announced before wait::st",
        TENSOR,
        ("tcgen05.wait::st.sync.aligned;\n", ""),
        finds=(F.MISSING_TENSOR_FENCE, F.RACE),
        at="tcgen05.mma",
    ),
    plant(
        "P announced without a fence before the barrier",
        TENSOR,
        ("tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;", "tcgen05.wait::st.sync.aligned;"),
        finds=F.MISSING_TENSOR_FENCE,
        at="tcgen05.mma",
        changes={"strict": True},
    ),
    plant(
        "P overlaps S and is used before all warps wrote it",
        TENSOR,
        ("bar.sync 1, 128;\n", ""),
        finds=(F.RACE, F.UNINITIALISED, F.MISSING_TENSOR_FENCE),
        at="tcgen05.",  # the product or the store, whichever comes second
    ),
    plant(
        "half the columns that are used",
        TENSOR,
        ("shared::cta.b32 [%r4+16], 64;", "shared::cta.b32 [%r4+16], 32;"),
        (
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64;",
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;",
        ),
        finds=(F.TMEM_ALLOCATION, F.TMEM_ACCESS),
    ),
    plant(
        "columns that are no power of two",
        TENSOR,
        ("shared::cta.b32 [%r4+16], 64;", "shared::cta.b32 [%r4+16], 96;"),
        finds=(F.TMEM_ALLOCATION, F.ILLEGAL),
    ),
    plant(
        "tensor memory never freed",
        TENSOR,
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64;\n", ""),
        finds=F.TMEM_LEAK,
    ),
    plant(
        "tensor memory freed by another size",
        TENSOR,
        (
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 64;",
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32;",
        ),
        finds=(F.TMEM_ALLOCATION, F.TMEM_LEAK),
    ),
    plant(
        "warps read lanes that are not theirs",
        TENSOR,
        ("shl.b32 %r31, %r2, 21;", "mov.b32 %r31, 0;"),
        finds=F.TMEM_ACCESS,
        at="tcgen05.ld",
    ),
    plant(
        "N in the instruction descriptor twice too large",
        TENSOR,
        ("mov.b32 %r21, 0x8080490;", "mov.b32 %r21, 0x8100490;"),
        finds=(F.TMEM_ALLOCATION, F.TMEM_ACCESS, F.UNINITIALISED),
    ),
    plant(
        "the first product accumulates onto nothing",
        TENSOR,
        ("setp.ne.u32 %p5, %r1, 0;", "setp.eq.u32 %p5, %r1, 0;"),
        finds=F.UNINITIALISED,
        at="tcgen05.mma",
    ),
    plant(
        "wrong swizzle in the matrix descriptors",
        TENSOR,
        ("mov.b32 %r25, 0x4010;", "mov.b32 %r25, 0x40004010;"),
        finds=(F.UNINITIALISED, F.OUT_OF_BOUNDS, F.DESCRIPTOR),
        wrong=True,
    ),
    plant(
        "strides of the matrix descriptors exchanged",
        TENSOR,
        ("mov.b32 %r23, 0x80000;", "mov.b32 %r23, 0x100000;"),
        ("mov.b32 %r25, 0x4010;", "mov.b32 %r25, 0x4008;"),
        wrong=True,
    ),
    plant(
        "the commit's barrier expects two arrivals",
        TENSOR,
        ("mbarrier.init.shared.b64 [%r4], 1;", "mbarrier.init.shared.b64 [%r4], 2;"),
        finds=F.DEADLOCK,
    ),
    plant(
        "O is read at the wrong barrier, complete long ago",
        TENSOR,
        (
            "mbarrier.try_wait.parity.shared.b64 %p6, [%r4+8], %r30;",
            "mbarrier.try_wait.parity.shared.b64 %p6, [%r4], %r30;",
        ),
        finds=(F.RACE, F.UNINITIALISED, F.MISSING_TENSOR_FENCE),
        at="tcgen05.ld",
    ),
    plant(
        "a warp takes a short cut past the barrier",
        TENSOR,
        ("bar.sync 1, 128;", "setp.eq.u32 %p7, %r2, 3;\n@!%p7 bar.sync 1, 128;"),
        finds=F.DEADLOCK,
    ),
    plant(
        "one row of A is never stored",
        TENSOR,
        ("st.shared.v4.b32 [%r8+1024]", "setp.ne.u32 %p7, %r1, 77;\n@%p7 st.shared.v4.b32 [%r8+1024]"),
        finds=F.UNINITIALISED,
        at="tcgen05.mma",
    ),
)
