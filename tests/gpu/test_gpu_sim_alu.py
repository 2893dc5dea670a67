"""Arithmetic, conversions and comparisons on this GPU and in the simulator: the same inputs, the same bits.

The approximations differ in their last bits: there the distance is bounded by the sum of the ISA's error and one
rounding. What only later architectures have (f32x2, three-input min and max, e2m1 ...) is not here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]
SIMULATE = Path(__file__).resolve().parent.parent / "simulate"
COUNT = 1024


def module_of(path: Path) -> ModuleType:
    name = f"gpu_sim_alu_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


lanes = module_of(SIMULATE / "alu_lanes.py")
MODES = ("rn", "rz", "rm", "rp")
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
COMPARISONS = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"


def _floating() -> Iterator[tuple[str, str, str]]:
    """(instruction, types of the inputs, types of the outputs)."""
    for mode in MODES:
        for name in ("add", "sub", "mul", "div"):
            yield f"{name}.{mode}.f64 {{x}}, {{a}}, {{b}};", "f64 f64", "f64"
            yield f"{name}.{mode}.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
            if name != "div":
                yield f"{name}.{mode}.ftz.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
                yield f"{name}.{mode}.sat.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
        for kind in ("f32", "f64"):
            yield f"fma.{mode}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} {kind}", kind
            yield f"sqrt.{mode}.{kind} {{x}}, {{a}};", kind, kind
            yield f"rcp.{mode}.{kind} {{x}}, {{a}};", kind, kind
        yield f"fma.{mode}.ftz.f32 {{x}}, {{a}}, {{b}}, {{c}};", "f32 f32 f32", "f32"
    for name in ("min", "max"):
        for flags in ("", ".ftz", ".NaN", ".xorsign.abs"):
            yield f"{name}{flags}.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
        for kind in ("f16", "bf16"):
            for flags in ("", ".NaN", ".xorsign.abs"):
                yield f"{name}{flags}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind
    for kind in ("f16", "bf16"):
        for name in ("add", "sub", "mul"):
            yield f"{name}.rn.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind
        for flags in ("", ".relu", *((".ftz", ".sat") if kind == "f16" else ())):
            yield f"fma.rn{flags}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} {kind}", kind
    for name in COMPARISONS.split():
        for kind in ("f32", "f64", "f16", "bf16"):
            yield f"setp.{name}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", "pred"


def _conversions() -> Iterator[tuple[str, str, str]]:
    for kind in ("f16", "f32", "f64", "bf16"):
        for to in ("u16", "s16", "u32", "s32", "u64", "s64"):
            for mode in ("rni", "rzi", "rmi", "rpi"):
                yield f"cvt.{mode}.{to}.{kind} {{x}}, {{a}};", kind, to
            for mode in MODES:
                yield f"cvt.{mode}.{kind}.{to} {{x}}, {{a}};", to, kind
    for mode in MODES:
        for to, kind in (("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64"), ("bf16", "f64")):
            yield f"cvt.{mode}.{to}.{kind} {{x}}, {{a}};", kind, to
    for kind in ("f16", "bf16"):
        yield f"cvt.f32.{kind} {{x}}, {{a}};", kind, "f32"
        for mode in ("rn", "rz"):
            for flags in ("", ".relu", ".satfinite", ".relu.satfinite"):
                yield f"cvt.{mode}{flags}.{kind}x2.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "u32"
    for mode in ("rna", "rn", "rz"):
        yield f"cvt.{mode}.tf32.f32 {{x}}, {{a}};", "f32", "u32"
    for kind in ("e4m3x2", "e5m2x2"):
        for flags in ("", ".relu"):
            yield f"cvt.rn.satfinite{flags}.{kind}.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "u16"
            yield f"cvt.rn.satfinite{flags}.{kind}.f16x2 {{x}}, {{a}};", "u32", "u16"
            yield f"cvt.rn{flags}.f16x2.{kind} {{x}}, {{a}};", "u16", "u32"
    for kind in ("u16", "s16"):
        yield f"cvt.pack.sat.{kind}.s32 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
    for kind in ("u8", "s8"):
        yield f"cvt.pack.sat.{kind}.s32.b32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"


def _integers() -> Iterator[tuple[str, str, str]]:
    for kind in INTEGERS:
        two, three = f"{kind} {kind}", f"{kind} {kind} {kind}"
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            yield f"{name}.{kind} {{x}}, {{a}}, {{b}};", two, kind
        for name in ("mad.lo", "mad.hi", "sad"):
            yield f"{name}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", three, kind
        yield f"shr.{kind} {{x}}, {{a}}, {{b}};", f"{kind} u32", kind
        if kind[1:] != "16":
            yield f"bfind.{kind} {{x}}, {{a}};", kind, "u32"
            yield f"bfind.shiftamt.{kind} {{x}}, {{a}};", kind, "u32"
            yield f"bfe.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} u32 u32", kind
    for kind in ("u32", "s32"):
        for half in ("lo", "hi"):
            yield f"mul24.{half}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind
        for mode in ("clamp", "wrap"):
            yield f"szext.{mode}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} u32", kind
        yield f"dp4a.{kind}.s32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
        yield f"dp2a.hi.{kind}.u32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    for bits in (32, 64):
        kind = f"u{bits}"
        for name in ("popc", "clz"):
            yield f"{name}.b{bits} {{x}}, {{a}};", kind, "u32"
        yield f"brev.b{bits} {{x}}, {{a}};", kind, kind
        yield f"shl.b{bits} {{x}}, {{a}}, {{b}};", f"{kind} u32", kind
        yield f"bfi.b{bits} {{x}}, {{a}}, {{b}}, {{c}}, {{e}};", f"{kind} {kind} u32 u32", kind
    for mode in ("clamp", "wrap"):
        yield f"bmsk.{mode}.b32 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
        for side in ("l", "r"):
            yield f"shf.{side}.{mode}.b32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield f"prmt.b32{mode} {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    yield "lop3.b32 {x}, {a}, {b}, {c}, 0xE2;", "u32 u32 u32", "u32"
    yield "min.relu.s32 {x}, {a}, {b};", "u32 u32", "u32"


# Instruction: largest relative error of the hardware (PTX ISA 9.7.3), plus one rounding of the simulator
APPROXIMATE = {
    "ex2.approx.ftz.f32": 2.0**-22,
    "ex2.approx.f32": 2.0**-22,
    "lg2.approx.f32": 2.0**-21,
    "rcp.approx.ftz.f32": 2.0**-22,
    "rsqrt.approx.f32": 2.0**-22,
    "sqrt.approx.f32": 2.0**-22,
    "tanh.approx.f32": 2.0**-10.5,
}


def inputs_of(types: str) -> list[Array]:
    made = []
    for seed, kind in enumerate(types.split()):
        if kind == "bf16":
            made.append((lanes.float_corners(COUNT, seed) >> np.uint32(16)).astype(np.uint16))
        elif kind[0] == "f":
            made.append(lanes.float_corners(COUNT, seed, np.dtype(f"f{int(kind[1:]) // 8}")))
        else:
            made.append(lanes.corners(np.dtype(f"u{int(kind[1:]) // 8}").type, COUNT, seed))
    return made


def size_of(kind: str) -> str:
    return kind if kind == "pred" else f"b{kind.lstrip('busf')}"


class Gpu:
    """Runs one CTA of a kernel by the driver API."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def ok(self, returned: tuple[Any, ...]) -> Any:
        error, *values = returned
        assert error == self.driver.CUresult.CUDA_SUCCESS, error
        return values[0] if values else None

    def run(self, text: str, buffers: dict[str, Array]) -> dict[str, Array]:
        d = self.driver
        module = self.ok(d.cuModuleLoadData(text.encode() + b"\0"))
        kernel = self.ok(d.cuModuleGetFunction(module, b"kernel"))
        places = {name: self.ok(d.cuMemAlloc(array.nbytes)) for name, array in buffers.items()}
        for name, array in buffers.items():
            self.ok(d.cuMemcpyHtoD(places[name], array.ctypes.data, array.nbytes))
        values = [ctypes.c_uint64(int(place)) for place in places.values()]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.ok(d.cuLaunchKernel(kernel, 1, 1, 1, COUNT, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
        self.ok(d.cuCtxSynchronize())
        after = {}
        for name, array in buffers.items():
            after[name] = np.empty_like(array)
            self.ok(d.cuMemcpyDtoH(after[name].ctypes.data, places[name], array.nbytes))
            self.ok(d.cuMemFree(places[name]))
        self.ok(d.cuModuleUnload(module))
        return after


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        pytest.skip(f"needs cuda-python: {error}")
    try:
        (error,) = driver.cuInit(0)
    except RuntimeError as missing:  # no driver library
        pytest.skip(f"needs a CUDA driver: {missing}")
    if error != driver.CUresult.CUDA_SUCCESS:
        pytest.skip(f"needs a CUDA GPU: cuInit returns {error}")
    _, device = driver.cuDeviceGet(0)
    _, context = driver.cuDevicePrimaryCtxRetain(device)
    driver.cuCtxPushCurrent(context)
    yield Gpu(driver)
    driver.cuCtxPopCurrent()
    driver.cuDevicePrimaryCtxRelease(device)


def both(gpu: Gpu, text: str, types: str, output: str) -> tuple[list[Array], Array, Array]:
    """Inputs, the simulator's results, the GPU's."""
    inputs = inputs_of(types)
    chosen = np.zeros(COUNT, np.uint32)
    (simulated,) = lanes.on_lanes_unguarded(text, inputs, size_of(output))
    source, buffers = lanes.kernel_of(text, inputs, size_of(output), chosen, "sm_90a")
    return inputs, simulated, gpu.run(source, buffers)["x"]


@pytest.mark.parametrize("chapter", [_floating, _conversions, _integers], ids=lambda f: f.__name__[1:])
def test_same_bits(gpu: Gpu, chapter: Any) -> None:
    wrong = []
    for text, types, output in chapter():
        inputs, simulated, measured = both(gpu, text, types, output)
        same = simulated == measured
        if output == "f64":  # payloads of NaN are not modelled
            same |= np.isnan(simulated.view(np.float64)) & np.isnan(measured.view(np.float64))
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            example = ", ".join(f"{int(x[at]):#x}" for x in inputs)
            wrong.append(
                f"{text}: {np.count_nonzero(~same)} lanes, ({example}) {simulated[at]:#x} != {measured[at]:#x}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(APPROXIMATE))
def test_approximations_are_close(gpu: Gpu, name: str) -> None:
    _, simulated, measured = both(gpu, f"{name} {{x}}, {{a}};", "f32", "f32")
    ours, theirs = (x.view(np.float32).astype(np.float64) for x in (simulated, measured))
    special = ~np.isfinite(ours) | (ours == 0)
    np.testing.assert_array_equal(simulated[special], measured[special])
    bound = APPROXIMATE[name] * np.maximum(np.abs(ours), 0.5 if name.startswith("lg2") else 2.0**-126)
    assert np.all(np.abs(ours - theirs)[~special] <= bound[~special])
