"""Tensor copies into and out of shared memory, by two warps, with an addition in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from planted import Base, Plant, plant

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.tma.descriptor import encode
from tunekit.simulate.tma.swizzle import Swizzle
from tunekit.simulate.tma.tensor_map import Element, TensorMap

ROWS, COLUMNS = 8, 32

TEXT = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry copies(
    .param .align 64 .b8 in_map[128], .param .align 64 .b8 out_map[128], .param .u64 in, .param .u64 out)
{
.reg .pred %p<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
mov.b64 %rd1, in_map;
cvta.param.u64 %rd1, %rd1;
mov.b64 %rd2, out_map;
cvta.param.u64 %rd2, %rd2;
mov.u32 %r1, %tid.x;
mov.u32 %r4, smem;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r4], 1024;
add.u32 %r5, %r4, 1024;
mov.b32 %r6, 0;
mov.b32 %r7, 8;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r5], [%rd1, {%r6, %r7}], [%r4];
READY:
bar.sync 0;
mov.b32 %r8, 0;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r8;
@!%p2 bra WAIT;
shl.b32 %r9, %r1, 4;
add.u32 %r10, %r4, %r9;
ld.shared.v4.b32 {%r11, %r12, %r13, %r14}, [%r10+1024];
add.u32 %r11, %r11, 5;
add.u32 %r12, %r12, 5;
add.u32 %r13, %r13, 5;
add.u32 %r14, %r14, 5;
st.shared.v4.b32 [%r10+2048], {%r11, %r12, %r13, %r14};
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 bra STORED;
add.u32 %r15, %r4, 2048;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {%r6, %r6}], [%r15];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
STORED:
bar.sync 0;
st.shared.v4.b32 [%r10+2048], {%r8, %r8, %r8, %r8};
@%p1 bra DONE;
cp.async.bulk.wait_group 0;
DONE:
ret;
}
"""


def _buffers() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "in": np.arange(24 * COLUMNS, dtype=np.uint32).reshape(24, COLUMNS),
        "out": np.zeros((ROWS, COLUMNS), dtype=np.uint32),
    }


def _expected() -> dict[str, np.ndarray[Any, Any]]:
    return {"out": _buffers()["in"][8:16] + 5}


def tensor_map(buffer: str, rows: int, **changes: Any) -> Callable[[Mapping[str, int]], bytes]:
    """A map over rows of 32 numbers, box 8 by 32, without swizzle unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "element": Element.U32,
        "sizes": (COLUMNS, rows),
        "strides": (COLUMNS * 4,),
        "box": (COLUMNS, ROWS),
        "element_strides": (1, 1),
        "swizzle": Swizzle.NONE,
        "interleave_bytes": 0,
        "l2_promotion_bytes": 0,
        "nan_fill": False,
        "im2col": None,
        **changes,
    }
    return lambda addresses: encode(TensorMap(address=addresses[buffer], **fields))


IN, OUT = tensor_map("in", 24), tensor_map("out", ROWS)
COPIES = Base("copies", TEXT, _buffers, (IN, OUT, "in", "out"), _expected, block=(64, 1, 1), shared=4096)

F = FaultKind
PLANTS: tuple[Plant, ...] = (
    plant(
        "more bytes expected than the copy brings",
        COPIES,
        ("%rd3, [%r4], 1024;", "%rd3, [%r4], 1040;"),
        finds=F.TRANSACTIONS,
    ),
    plant(
        "fewer bytes expected than the copy brings",
        COPIES,
        ("%rd3, [%r4], 1024;", "%rd3, [%r4], 1008;"),
        finds=(F.TRANSACTIONS, F.DEADLOCK, F.MBARRIER),
    ),
    plant(
        "a box of one row too many",
        COPIES,
        finds=(F.TRANSACTIONS, F.DEADLOCK, F.MBARRIER),
        changes={"parameters": (tensor_map("in", 24, box=(COLUMNS, ROWS + 1)), OUT, "in", "out")},
    ),
    plant(
        "a box of one row too few, and the last row of the stage uninitialised",
        COPIES,
        ("%rd3, [%r4], 1024;", "%rd3, [%r4], 896;"),
        finds=F.UNINITIALISED,
        at="ld.shared",
        changes={"parameters": (tensor_map("in", 24, box=(COLUMNS, ROWS - 1)), OUT, "in", "out")},
    ),
    plant(
        "the wrong swizzle in the tensor map",
        COPIES,
        wrong=True,
        changes={"parameters": (tensor_map("in", 24, swizzle=Swizzle.B128), OUT, "in", "out")},
    ),
    plant(
        "coordinates in the wrong order",
        COPIES,
        ("[%rd1, {%r6, %r7}]", "[%rd1, {%r7, %r6}]"),
        wrong=True,
    ),
    plant(
        "the stage is read without waiting for the copy",
        COPIES,
        ("mbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r8;\n@!%p2 bra WAIT;\n", ""),
        finds=(F.RACE, F.UNINITIALISED),
        at="ld.shared",
    ),
    plant(
        "the result is stored without a proxy fence",
        COPIES,
        ("fence.proxy.async.shared::cta;\n", ""),
        finds=F.MISSING_PROXY_FENCE,
        at="cp.async.bulk.tensor.2d.global",
    ),
    plant(
        "one thread stores for both warps without a barrier",
        COPIES,
        ("fence.proxy.async.shared::cta;\nbar.sync 0;\n", "fence.proxy.async.shared::cta;\n"),
        finds=(F.RACE, F.UNINITIALISED),
        at="cp.async.bulk.tensor.2d.global",
    ),
    plant(
        "shared memory is written while the copy out may still read it",
        COPIES,
        ("cp.async.bulk.wait_group.read 0;\n", ""),
        finds=F.RACE,
    ),
    plant(
        "a copy to an address that is no multiple of 128",
        COPIES,
        ("add.u32 %r5, %r4, 1024;", "add.u32 %r5, %r4, 1056;"),
        finds=F.MISALIGNED,
        at="cp.async.bulk.tensor.2d.shared",
    ),
    plant(
        "a copy past the end of shared memory",
        COPIES,
        ("add.u32 %r5, %r4, 1024;", "add.u32 %r5, %r4, 3200;"),
        finds=F.OUT_OF_BOUNDS,
        at="cp.async.bulk.tensor.2d.shared",
    ),
    plant(
        "the tensor's size in its map is one row more than its memory",
        COPIES,
        ("mov.b32 %r7, 8;", "mov.b32 %r7, 17;"),
        finds=F.OUT_OF_BOUNDS,
        at="cp.async.bulk.tensor.2d.shared",
        changes={"parameters": (tensor_map("in", 25), OUT, "in", "out")},
    ),
    plant(
        "the barrier that the copy completes on was never initialised",
        COPIES,
        ("mbarrier.init.shared.b64 [%r4], 1;\n", ""),
        finds=F.MBARRIER,
    ),
)
