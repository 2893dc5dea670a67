"""Tensor maps as CuTeDSL's host code writes them, for tests: its own code runs, on the CPU; no GPU is needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

ADDRESS = 0x7F12_3456_7000
TYPES = {
    "u8": cutlass.Uint8,
    "u16": cutlass.Uint16,
    "f16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "f32": cutlass.Float32,
    "tf32": cutlass.TFloat32,
    "f64": cutlass.Float64,
    "e4m3": cutlass.Float8E4M3FN,
    "e2m1": cutlass.Float4E2M1FN,
    "e3m2": cutlass.Float6E3M2FN,
}
SWIZZLES = {  # by the number of the driver's CUtensorMapSwizzle
    0: (0, 4, 3),
    1: (1, 4, 3),
    2: (2, 4, 3),
    3: (3, 4, 3),
    4: (2, 5, 2),
}


@dataclass(frozen=True)
class Case:
    """One tensor (sizes and strides in elements, dimension 0 contiguous), its box, and the copy."""

    type: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of the dimensions 1 and up
    box: tuple[int, ...]
    swizzle: int = 0
    multicast: int = 1
    store: bool = False
    address: int = field(default=ADDRESS)


@cute.jit
def _write(
    source: cute.Pointer,
    out: cute.Pointer,
    sizes: cutlass.Constexpr,
    strides: cutlass.Constexpr,
    box: cutlass.Constexpr,
    steps: cutlass.Constexpr,
    swizzle: cutlass.Constexpr,
    multicast: cutlass.Constexpr,
    store: cutlass.Constexpr,
):
    tensor = cute.make_tensor(source, cute.make_layout(sizes, stride=strides))
    shared = cute.make_composed_layout(cute.make_swizzle(*swizzle), 0, cute.make_layout(box, stride=steps))
    if cutlass.const_expr(store):
        made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, shared, box)
    elif cutlass.const_expr(multicast > 1):
        made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SMulticastOp(), tensor, shared, box, multicast)
    else:
        made = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, shared, box)
    cpasync.copy_tensormap(made.atom, out)


def written(case: Case, arch: str = "sm_90a") -> bytes:
    """The 128 bytes at the place that `case`'s host code writes its tensor map to; untouched ones are 0xEE."""
    from cutlass.cutlass_dsl import CuTeDSL

    CuTeDSL._get_dsl().envar.arch = arch
    memory = (ctypes.c_uint8 * 512)(*[0xEE] * 512)
    place = -(-ctypes.addressof(memory) // 128) * 128
    pointers = (
        make_ptr(TYPES[case.type], case.address, cute.AddressSpace.gmem, assumed_align=32),
        make_ptr(cutlass.Int64, place, cute.AddressSpace.gmem, assumed_align=128),
    )
    steps = [1]
    for size in case.box[:-1]:
        steps.append(steps[-1] * size)
    copy = (SWIZZLES[case.swizzle], case.multicast, case.store)
    function = cute.compile(_write, *pointers, case.sizes, (1, *case.strides), case.box, tuple(steps), *copy)
    function(*pointers)
    return ctypes.string_at(place, 128)
