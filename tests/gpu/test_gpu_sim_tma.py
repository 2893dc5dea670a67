"""Tensor maps of the driver (cuTensorMapEncodeTiled) on this GPU: decoded, encoded again, compared with CuTeDSL's."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from driver_api import driver_context
from loading import module_of

from tunekit.simulate.tma.descriptor import decode, encode
from tunekit.simulate.tma.rules import problems
from tunekit.simulate.tma.swizzle import PATTERNS, Swizzle
from tunekit.simulate.tma.tensor_map import Element, TensorMap

pytestmark = pytest.mark.gpu

SPECS = Path(__file__).resolve().parent.parent / "specs"
# Set by CuTeDSL's host code and not by the driver: bits of word 1 that say nothing about the copy.
CUTEDSL_BITS = 1 << 1 | 1 << 21
PLAIN = [element for element in Element if not element.packed]
HOPPER_SWIZZLES = [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128]
BASE = TensorMap(0x7F1234567000, Element.BF16, (640, 300, 7), (1536, 460800), (64, 128, 1), (1, 1, 1), Swizzle.B128)


class Driver:
    """The driver's encoder, in the current context."""

    def __init__(self, bindings: Any) -> None:
        self.bindings = bindings

    def made(self, tensor: TensorMap) -> bytes | None:
        """Its 128 bytes for `tensor`, or None where it refuses."""
        api = self.bindings
        strides = [*tensor.strides, 0] if tensor.rank == 1 else tensor.strides
        error, result = api.cuTensorMapEncodeTiled(
            api.CUtensorMapDataType(tensor.element.driver),
            tensor.rank,
            tensor.address,
            [api.cuuint64_t(size) for size in tensor.sizes],
            [api.cuuint64_t(stride) for stride in strides],
            [api.cuuint32_t(size) for size in tensor.box],
            [api.cuuint32_t(step) for step in tensor.element_strides],
            api.CUtensorMapInterleave((0, 16, 32).index(tensor.interleave_bytes)),
            api.CUtensorMapSwizzle(int(tensor.swizzle)),
            api.CUtensorMapL2promotion((0, 64, 128, 256).index(tensor.l2_promotion_bytes)),
            api.CUtensorMapFloatOOBfill(int(tensor.nan_fill)),
        )
        if error == api.CUresult.CUDA_SUCCESS:
            return ctypes.string_at(int(result.getPtr()), 128)
        assert error == api.CUresult.CUDA_ERROR_INVALID_VALUE, error
        return None


@pytest.fixture(scope="module")
def hopper() -> Iterator[Driver]:
    with driver_context(9, "the driver's bits are known for") as bindings:
        yield Driver(bindings)


def one_field_at_a_time() -> Iterator[TensorMap]:
    def changed(**fields: Any) -> TensorMap:
        return dataclasses.replace(BASE, **fields)

    yield BASE
    for element in PLAIN:
        each = element.bits // 8
        yield changed(element=element, box=(128 // each, 16, 2), strides=(8192, 8192 * 300))
        if element.floating:
            yield changed(element=element, box=(128 // each, 16, 2), strides=(8192, 8192 * 300), nan_fill=True)
    for swizzle in HOPPER_SWIZZLES:
        for row in (16, 32, 48, 64, 128, 256):
            yield changed(swizzle=swizzle, box=(row // 2, 8, 3))
    for interleave in (16, 32):
        yield changed(interleave_bytes=interleave, box=(interleave // 2, 16, 1), swizzle=Swizzle.B32)
    for promotion in (0, 64, 128, 256):
        yield changed(l2_promotion_bytes=promotion)
    for bit in range(4, 60):
        yield changed(address=1 << bit)
    for n in (1, 2, 3, 255, 256, 257):
        yield changed(box=(8, n, 1), swizzle=Swizzle.NONE)
        yield changed(box=(8, 1, n), swizzle=Swizzle.NONE)
    for n in range(1, 10):
        yield changed(element_strides=(1, n, 1), box=(8, 8, 8))
        yield changed(element_strides=(n, 1, n), box=(8, 8, 8))
    rank_5 = changed(sizes=(64,) * 5, strides=(1 << 13, 1 << 14, 1 << 15, 1 << 16), box=(8, 1, 2, 1, 3))
    rank_5 = dataclasses.replace(rank_5, element_strides=(1,) * 5)
    for dimension in range(5):
        for bit in (0, 1, 15, 16, 31, 32, 33):
            sizes = list(rank_5.sizes)
            sizes[dimension] = 1 << bit
            yield dataclasses.replace(rank_5, sizes=tuple(sizes))
    for dimension in range(4):
        for stride in (8, 16, 24, 1 << 35, 1 << 36, 0xABCDEF0, (1 << 40) - 16, 1 << 40):
            strides = list(rank_5.strides)
            strides[dimension] = stride
            yield dataclasses.replace(rank_5, strides=tuple(strides))


def everything_at_once(count: int) -> Iterator[TensorMap]:
    draw = random.Random(0)
    for _ in range(count):
        element, swizzle, rank = draw.choice(PLAIN), draw.choice(HOPPER_SWIZZLES), draw.randint(1, 5)
        each = element.bits // 8
        longest = PATTERNS[swizzle].span_bytes or 256
        box = [draw.choice([n for n in (16, 32, 48, 64, 128, 256) if n <= longest]) // each]
        box += [draw.randint(1, (256, 4, 2, 2)[k]) for k in range(rank - 1)]
        sizes = [draw.randint(1, 5000) for _ in range(rank)]
        strides, step = [], sizes[0] * each
        for size in sizes[1:]:
            strides.append(-(-step // 16) * 16 + draw.choice([0, 16, 160]))
            step = strides[-1] * size
        yield TensorMap(
            address=16 * draw.randrange(1 << 43),
            element=element,
            sizes=tuple(sizes),
            strides=tuple(strides),
            box=tuple(box),
            element_strides=(1, *(draw.choice([1, 1, 1, 2, 3]) for _ in range(rank - 1))),
            swizzle=swizzle,
            l2_promotion_bytes=draw.choice([0, 64, 128, 256]),
            nan_fill=element.floating and draw.random() < 0.5,
        )


def test_the_drivers_tensor_maps_decode_and_encode(hopper: Driver) -> None:
    accepted = refused = 0
    for tensor in [*one_field_at_a_time(), *everything_at_once(500)]:
        data = hopper.made(tensor)
        if data is None:
            assert problems(tensor), f"the driver refuses {tensor}"
            refused += 1
            continue
        assert problems(tensor) == [], tensor
        assert decode(data) == tensor
        assert encode(tensor) == data, tensor
        accepted += 1
    assert accepted > 400
    assert refused > 10


@pytest.fixture(scope="module")
def cutedsl() -> ModuleType:
    pytest.importorskip("cutlass")
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    return module_of(SPECS / "cutedsl_tensor_maps.py")


def test_cutedsl_writes_what_the_driver_writes(hopper: Driver, cutedsl: ModuleType) -> None:
    cases = [
        cutedsl.Case("bf16", (640, 300, 7), (768, 230400), (64, 32, 5), 3),
        cutedsl.Case("bf16", (641, 299), (648,), (8, 256), 0),
        cutedsl.Case("f16", (640, 300), (640,), (32, 8), 2),
        cutedsl.Case("f16", (640, 300), (640,), (16, 8), 1),
        cutedsl.Case("u8", (1000,), (), (256,), 0),
        cutedsl.Case("e4m3", (4096, 4096), (4096,), (128, 64), 3, 2),
        cutedsl.Case("f32", (33, 12, 3, 4, 5), (36, 432, 1440, 7200), (8, 4, 2, 3, 2), 1),
        cutedsl.Case("tf32", (64, 64), (64,), (32, 16), 3, 1, True),
        cutedsl.Case("f64", (100, 64), (100,), (16, 16), 3),
        cutedsl.Case("bf16", (128, 1 << 20, 3), (1 << 19, 1 << 38), (64, 256, 1), 3, 1, True),
    ]
    for case in cases:
        written = cutedsl.written(case)[:64]
        made = hopper.made(decode(written))
        assert made is not None, case
        word_1 = int.from_bytes(written[8:16], "little") & ~CUTEDSL_BITS
        assert written[:8] + word_1.to_bytes(8, "little") + written[16:] == made[:64], case
