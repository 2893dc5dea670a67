"""tcgen05.mma gone wrong: descriptors, addresses, scale factors, and the forms that are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simulate.tensor_core import Bench
from tests.simulate.test_sim_tc_mma import A_AT, B_AT, shape_of
from tunekit.simulate.faults import Unsupported
from tunekit.simulate.matrix.layout import SWIZZLE_128B, Place
from tunekit.simulate.units.tcgen05.instruction_descriptor import encode as describe


def issued(text: str, values: dict[str, Any], columns: int = 512, written: bool = True) -> list[str]:
    """The faults of one instruction `tcgen05.mma...`; A and B are zeros in shared and tensor memory."""
    bench = Bench(text, threads=1)
    bench.allocate(columns)
    a, b = Place(A_AT, 16, 1024, SWIZZLE_128B), Place(B_AT, 16, 1024, SWIZZLE_128B)
    a_desc = bench.matrix(a, np.zeros((128, 16), np.uint16), "bf16")
    b_desc = bench.matrix(b, np.zeros((128, 16), np.uint16), "bf16")
    if written:
        bench.write_tensor(slice(None), slice(0, columns), np.zeros((128, columns), np.uint32))
    shape = describe(shape_of("f16", 128, 64, "bf16", "bf16"))
    bench.set({"%r1": 0, "%r2": 256, "%r3": shape, "%rd1": a_desc, "%rd2": b_desc, "%p1": 1, **values})
    bench.run()
    return bench.faults


MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;"
MMA_TS = "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2], %rd2, %r3, %p1;"


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        (MMA, {"%r3": 0x10}, "descriptor: N: 0 is not a multiple of 8 between 8 and 256"),
        (MMA, {"%r3": 0x8100490 | 1 << 2}, "descriptor: sparsity (the instruction is dense): bit 2 must be 0"),
        (MMA, {"%r3": 0x4100490 | 1 << 24}, "descriptor: M: 80 is not one of 64, 128 (cta_group::1, kind::f16)"),
        (MMA, {"%rd1": 0x400}, "descriptor: matrix descriptor of A: fixed constant: bits 46-48 are 0b000"),
        (MMA, {"%rd2": 3 << 61 | 1 << 46}, "descriptor: matrix descriptor of B: swizzling mode"),
        (MMA, {"%rd2": 1 << 46 | 2 << 61 | 64 << 32 | 0x3FF0}, "out of bounds: B (start 0x3ff00"),
        (MMA, {"%r1": 480}, "tmem access: D at 0x000001e0 (lane 0, column 480) (128x64x16 bf16 x bf16 -> f32): "
         "columns 480-543 of tensor memory, which has 512"),
        (MMA, {"%r1": 32 << 16}, "tmem access: D at 0x00200000 (lane 32, column 0): layout D starts in (0,)"),
        (MMA_TS, {"%r2": 16 << 16 | 256}, "start in different lanes"),
        (MMA_TS, {"%r2": 508}, "tmem access: A at 0x000001fc (lane 0, column 508): columns 508-515"),
        (MMA_TS, {"%r3": 0x8100490 | 1 << 15}, "descriptor: transpose A: A in tensor memory can't be transposed"),
        (MMA.replace("f16", "tf32"), {"%r3": 0x8100910 | 1 << 15}, "kind::tf32 transposed needs 32-byte atoms"),
    ],
)  # fmt: skip
def test_instructions_gone_wrong(text: str, values: dict[str, int], message: str) -> None:
    faults = issued(text, values)
    assert any(message in fault for fault in faults), faults


def test_columns_that_are_not_allocated() -> None:
    faults = issued(MMA, {"%r1": 32}, columns=64)
    assert faults == [
        "tmem access: D at 0x00000020 (lane 0, column 32) (128x64x16 bf16 x bf16 -> f32): columns 64-95 of tensor "
        "memory, which are not allocated (allocated: none)"
    ]


def test_accumulating_on_what_nothing_has_written() -> None:
    assert "uninitialised read" in issued(MMA, {}, written=False)[0]
    assert issued(MMA, {"%p1": 0}, written=False) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", "sparse matrices"),
        ("tcgen05.mma.ws.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r2], %r3, %p1;", "sparse matrices"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r2], %rd2, %r3, %p1;", "the shift of A's rows"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1, 16;", "scale-input-d"),
        ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r1], %rd1, %rd2, %r3, [%r2], [%r2], %p1;",
         "needs its scale vector size"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::4X [%r1], %rd1, %rd2, %r3, [%r2], [%r2], %p1;",
         "kind::mxf4 has no scale vector of 4X"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        issued(text, {})


def test_scale_factors_that_differ_between_the_quarters_of_the_lanes() -> None:
    shape = shape_of("mxf8f6f4", 128, 32, "e4m3", "e4m3", scale_type="ue8m0")
    bench = Bench(
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %rd1, %rd2, %r3, [%r4], [%r5], %p1;", threads=1
    )
    bench.allocate()
    zeros = np.zeros((128, 32), np.uint8)
    a = bench.matrix(Place(A_AT, 16, 1024, SWIZZLE_128B), zeros, "e4m3")
    b = bench.matrix(Place(B_AT, 16, 1024, SWIZZLE_128B), zeros[:32], "e4m3")
    bench.write_tensor(slice(None), slice(100, 108), np.full((128, 8), 0x7F7F7F7F, np.uint32))
    bench.write_tensor(70, 101, np.uint32(0x7F7F7F80))
    bench.set({"%r1": 0, "%r3": describe(shape), "%r4": 100, "%r5": 104, "%rd1": a, "%rd2": b, "%p1": 0})
    bench.run()
    assert len(bench.faults) == 1
    assert "scale_A at 0x00000064 (lane 0, column 100): factor 38 differs between" in bench.faults[0]
