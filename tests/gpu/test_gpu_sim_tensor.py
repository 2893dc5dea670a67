"""Tensor copies on this GPU and in the simulator: the same PTX, the same tensor maps, the same bytes afterwards.

The maps are this package's own encoding, so that a map that the hardware reads otherwise shows too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tunekit.simulate.tma.descriptor import encode
from tunekit.simulate.tma.rules import problems
from tunekit.simulate.tma.swizzle import PATTERNS, Swizzle
from tunekit.simulate.tma.tensor_map import Element, TensorMap

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parent.parent
BOX_BYTES = 8192
PLAIN = [element for element in Element if not element.packed]
SWIZZLES = [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128]
ARGUMENTS = ("map", "out", "size", "start", "c0", "c1", "c2", "c3", "c4")
REDUCTIONS = {
    "add": "U32 S32 U64 F16 BF16 F32",
    "min": "U32 S32 U64 S64 F16 BF16",
    "max": "U32 S32 U64 S64 F16 BF16",
    "inc": "U32",
    "dec": "U32",
    "and": "U32 U64",
    "or": "U32 U64",
    "xor": "U32 U64",
}


def module_of(path: Path) -> ModuleType:
    name = f"gpu_sim_tensor_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


kernels = module_of(TESTS / "specs" / "tensor_copy_kernels.py")
run_simulated = module_of(TESTS / "simulate" / "conftest.py").run


@dataclasses.dataclass(frozen=True)
class Case:
    """One box: map.address counts from the start of the tensor's buffer, `start` from that of the tile."""

    map: TensorMap
    coordinates: tuple[int, ...]
    start: int

    @property
    def bytes_needed(self) -> int:
        return self.map.address + self.map.span_bytes


class GpuError(Exception):
    """A call of the driver failed."""


class Gpu:
    """Runs kernels by the driver API, as the simulator's fixture runs them."""

    def __init__(self, driver: Any, device: Any) -> None:
        self.driver = driver
        self._device = device
        self._kernels: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        self.ok(self.driver.cuCtxSetCurrent(self.ok(self.driver.cuDevicePrimaryCtxRetain(self._device))))

    def restart(self) -> None:
        """A context that works again after a kernel's fault."""
        self._kernels.clear()
        self.driver.cuDevicePrimaryCtxRelease(self._device)
        self.driver.cuDevicePrimaryCtxReset(self._device)
        self.start()

    def ok(self, returned: tuple[Any, ...]) -> Any:
        error, *values = returned
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise GpuError(str(error))
        return values[0] if values else None

    def run(self, text: str, buffers: dict[str, np.ndarray[Any, Any]], case: Case) -> dict[str, np.ndarray[Any, Any]]:
        d = self.driver
        if text not in self._kernels:
            module = self.ok(d.cuModuleLoadData(text.encode() + b"\0"))
            self._kernels[text] = self.ok(d.cuModuleGetFunction(module, b"kernel"))
        places = {name: self.ok(d.cuMemAlloc(array.nbytes)) for name, array in buffers.items()}
        for name, array in buffers.items():
            self.ok(d.cuMemcpyHtoD(places[name], array.ctypes.data, array.nbytes))
        addresses = {name: int(place) for name, place in places.items()}
        values = [value(addresses) if callable(value) else value for value in parameters(case)]
        values = [addresses[value].to_bytes(8, "little") if isinstance(value, str) else value for value in values]
        room = [ctypes.create_string_buffer(len(value) + 64) for value in values]
        pointers = (ctypes.c_void_p * len(values))()
        for n, (value, place) in enumerate(zip(values, room, strict=True)):
            pointers[n] = -(-ctypes.addressof(place) // 64) * 64
            ctypes.memmove(pointers[n], value, len(value))
        self.ok(d.cuLaunchKernel(self._kernels[text], 1, 1, 1, 32, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
        self.ok(d.cuCtxSynchronize())
        after = {}
        for name, array in buffers.items():
            after[name] = np.empty_like(array)
            self.ok(d.cuMemcpyDtoH(after[name].ctypes.data, places[name], array.nbytes))
            self.ok(d.cuMemFree(places[name]))
        return after


def parameters(case: Case) -> list[Any]:
    """The kernels' parameters in order: bytes, a buffer's name for its address, or a function of the addresses."""

    def map_of(at: dict[str, int]) -> bytes:
        return encode(dataclasses.replace(case.map, address=case.map.address + at["tensor"]))

    coordinates = (*case.coordinates, *(0,) * (5 - case.map.rank))
    words = [case.map.transaction_bytes, case.start, *coordinates]
    return [map_of, "out", *((word & 0xFFFFFFFF).to_bytes(4, "little") for word in words)]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        pytest.skip(f"needs cuda-python: {error}")
    success = driver.CUresult.CUDA_SUCCESS
    try:
        (error,) = driver.cuInit(0)
    except RuntimeError as missing:  # no driver library
        pytest.skip(f"needs a CUDA driver: {missing}")
    if error != success:
        pytest.skip(f"needs a CUDA GPU: cuInit returns {error}")
    _, device = driver.cuDeviceGet(0)
    attributes = driver.CUdevice_attribute
    _, major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    if major < 9:
        pytest.skip(f"needs compute capability 9 or higher for tensor copies, not {major}")
    yield Gpu(driver, device)
    driver.cuDevicePrimaryCtxRelease(device)


def cases(
    seed: int, count: int, elements: list[Element], *, inside: bool = False, strided: bool = True
) -> Iterator[Case]:
    """Random boxes, partly outside their tensors. inside: no coordinate is negative. strided: element strides too."""
    draw = random.Random(seed)
    made = 0
    while made < count:
        element, swizzle, rank = draw.choice(elements), draw.choice(SWIZZLES), draw.randint(1, 5)
        each = element.bits // 8
        longest = PATTERNS[swizzle].span_bytes or 256
        box = [draw.choice([n for n in (16, 32, 48, 64, 96, 128, 256) if n <= longest]) // each]
        left = BOX_BYTES // (box[0] * each)
        for _ in range(rank - 1):
            box.append(draw.randint(1, max(1, min(48, left))))
            left //= box[-1]
        steps = (1, *(draw.choice([1, 1, 2, 3] if strided else [1]) for _ in range(rank - 1)))
        sizes = [draw.randint(1, 2 * n + 2) for n in box]
        strides, step = [], sizes[0] * each
        for size in sizes[1:]:
            strides.append(-(-step // 16) * 16 + draw.choice([0, 16, 48]))
            step = strides[-1] * size
        tensor = TensorMap(
            address=16 * draw.randint(0, 8),
            element=element,
            sizes=tuple(sizes),
            strides=tuple(strides),
            box=tuple(box),
            element_strides=steps,
            swizzle=swizzle,
            l2_promotion_bytes=draw.choice([0, 128]),
            nan_fill=element.floating and draw.random() < 0.5,
        )
        low = 0 if inside else 1
        start = tuple(draw.randint(-low * (n + 1), max(0, size + low)) for n, size in zip(box, sizes, strict=True))
        if not problems(tensor):
            made += 1
            yield Case(tensor, start, 128 * draw.randint(0, 32))


def contents(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, -(-size // 4096) * 4096, dtype=np.uint8)


def compared(gpu: Gpu, text: str, buffers: dict[str, np.ndarray[Any, Any]], case: Case) -> str:
    """What differs, in a line; empty if nothing does."""
    try:
        real = gpu.run(text, buffers, case)
    except GpuError as error:
        gpu.restart()
        return f"{case}: the GPU fails: {error}"
    simulated = run_simulated(text, buffers, parameters(case))
    lines = [f"fault {fault.kind.value}: {fault.message}" for fault in simulated.faults]
    for name, array in real.items():
        wrong = np.flatnonzero(array != simulated.buffers[name])
        if wrong.size:
            first = int(wrong[0])
            values = f"GPU {array[first : first + 16].tobytes().hex()}"
            values += f", simulator {simulated.buffers[name][first : first + 16].tobytes().hex()}"
            lines.append(f"{name}: {wrong.size} bytes differ, the first at {first:#x}: {values}")
    return "; ".join(lines) and f"{case}: {'; '.join(lines)}"


def failures(gpu: Gpu, text_of: Callable[[int], str], chosen: Iterator[Case], out: Callable[[int], Any]) -> list[str]:
    found = []
    for n, case in enumerate(chosen):
        buffers = {"tensor": contents(case.bytes_needed, n), "out": out(n)}
        different = compared(gpu, text_of(case.map.rank), buffers, case)
        if different:
            found.append(different)
    return found


def no_output(_: int) -> np.ndarray[Any, Any]:
    return np.zeros(kernels.TILE_BYTES + 4, np.uint8)


def source(seed: int) -> np.ndarray[Any, Any]:
    return contents(kernels.TILE_BYTES, 1000 + seed)


def report(found: list[str]) -> str:
    return f"{len(found)} differ\n" + "\n".join(found[:20])


def test_loads(gpu: Gpu) -> None:
    found = failures(gpu, kernels.load, cases(1, 100, PLAIN, strided=False), no_output)
    assert not found, report(found)


def test_loads_with_element_strides(gpu: Gpu) -> None:
    found = failures(gpu, kernels.load, cases(2, 60, PLAIN), no_output)
    assert not found, report(found)


def test_stores(gpu: Gpu) -> None:
    found = failures(gpu, kernels.store, cases(3, 60, PLAIN, inside=True, strided=False), source)
    assert not found, report(found)


def test_stores_with_element_strides(gpu: Gpu) -> None:
    found = failures(gpu, kernels.store, cases(4, 40, PLAIN, inside=True), source)
    assert not found, report(found)


@pytest.mark.parametrize("operation", list(REDUCTIONS))
def test_reductions(gpu: Gpu, operation: str) -> None:
    elements = [Element[name] for name in REDUCTIONS[operation].split()]
    found = []
    for n, case in enumerate(cases(5, 8, elements, inside=True, strided=False)):
        tensor, out = contents(case.bytes_needed, n), source(n)
        if case.map.element.floating:  # ordinary numbers: a NaN's bits are the hardware's own affair
            for array in (tensor, out):
                exponent = {16: slice(1, None, 2), 32: slice(3, None, 4)}[case.map.element.bits]
                array[exponent] = array[exponent] & 0xBB | 0x20
        different = compared(gpu, kernels.store(case.map.rank, operation), {"tensor": tensor, "out": out}, case)
        if different:
            found.append(different)
    assert not found, report(found)
