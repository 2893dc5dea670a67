"""mma.sync: a warp's matrix multiply-accumulate on register fragments (PTX ISA 9.7.14.5).

Not modelled: sparse (.sp) and block-scaled (.block_scale) forms, single-bit operands, the four-fold m8n8k4 of f16,
and wmma.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import WARP, Lanes
from tunekit.simulate.matrix import fragment
from tunekit.simulate.matrix.arithmetic import ACCUMULATORS, ELEMENT_BITS, INTEGERS, UNSIGNED, multiply_add, values
from tunekit.simulate.ptx import module as ptx

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
# k by the bits of an element, for shapes of 16 rows and of 8 (the tables of 9.7.14.2).
_K_OF_16 = {4: (32, 64), 8: (16, 32), 16: (8, 16), 32: (4, 8), 64: (4, 8, 16)}
_K_OF_8 = {4: (32,), 8: (16,), 64: (4,)}
_F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def _legal(m: int, n: int, k: int, types: tuple[str, str, str, str], mixed: bool) -> bool:
    dtype, atype, btype, ctype = types
    by_bits = _K_OF_16 if m == 16 else _K_OF_8 if m == 8 else {}
    depths = by_bits.get(ELEMENT_BITS.get(atype, 0), ())
    if n != 8 or dtype != ctype or k not in depths:
        return False
    if atype in INTEGERS:
        return btype in INTEGERS and ELEMENT_BITS[atype] == ELEMENT_BITS[btype] and dtype == "s32"
    if atype in _F8F6F4:
        narrow = btype in _F8F6F4 and dtype in ("f16", "f32")
        return narrow and ((mixed and k == 32) or {atype, btype} <= {"e4m3", "e5m2"})
    if atype != btype:
        return False
    if atype == "f16":
        return dtype in ("f16", "f32")
    return dtype == ("f64" if atype == "f64" else "f32")


def register_elements(w: Warp, slots: tuple[int, ...], kind: str) -> NDArray[Any]:
    """The elements in multiplicand registers: [registers, 32, elements a register], as unsigned integers."""
    if kind == "f64":
        return np.stack([w.u64[slot] for slot in slots])[..., None]
    words = np.stack([w.u32[slot] for slot in slots])
    bits = ELEMENT_BITS[kind]
    if bits == 4:
        octets = words.view(np.uint8).reshape(-1, WARP, 4)
        return np.stack([octets & 15, octets >> 4], axis=-1).reshape(-1, WARP, 8)
    elements: NDArray[Any] = words.view(UNSIGNED[bits]).reshape(-1, WARP, 32 // bits)
    return elements


def read_accumulator(w: Warp, slots: tuple[int, ...], kind: str, m: int) -> NDArray[Any]:
    """C as a matrix [m, n] of the accumulator's type."""
    if kind == "f64":
        return fragment.c_matrix(np.stack([w.f64[slot] for slot in slots]), m)
    words = np.stack([w.u32[slot] for slot in slots])
    if kind == "f16":
        return fragment.c_matrix_packed(words.view(np.float16).reshape(-1, WARP, 2), m)
    return fragment.c_matrix(words.view(ACCUMULATORS[kind]), m)


def write_accumulator(w: Warp, slots: tuple[int, ...], kind: str, matrix: NDArray[Any], lanes: Lanes) -> None:
    """Spreads D over its registers."""
    if kind == "f64":
        registers = fragment.c_registers(matrix)
        for slot, row in zip(slots, registers, strict=True):
            np.copyto(w.f64[slot], row, where=lanes.where)
        return
    if kind == "f16":
        words = np.ascontiguousarray(fragment.c_registers_packed(matrix)).view(np.uint32)[..., 0]
    else:
        words = fragment.c_registers(matrix).view(np.uint32)
    for slot, row in zip(slots, words, strict=True):
        np.copyto(w.u32[slot], row, where=lanes.where)


@instruction("mma.sync.aligned")
def mma(i: ptx.Instruction, d: Decoder) -> Step:
    """d, a, b, c"""
    modifiers = i.modifiers[2:]
    shape = _SHAPE.fullmatch(modifiers[0])
    types = modifiers[-4:]
    options = set(modifiers[1:-4]) - {"row", "col"}
    if shape is None or modifiers[1:3] != ("row", "col") or not options <= {"satfinite", "kind::f8f6f4"}:
        raise d.unsupported("a form that is not modelled")
    m, n, k = (int(x) for x in shape.groups())
    dtype, atype, btype, ctype = types
    if not _legal(m, n, k, (dtype, atype, btype, ctype), "kind::f8f6f4" in options):
        raise d.unsupported("a shape and types that are not modelled")
    satfinite = "satfinite" in options
    a_slots = d.reads_vector(i.operands[1], "f64" if atype == "f64" else "b32")
    b_slots = d.reads_vector(i.operands[2], "f64" if btype == "f64" else "b32")
    c_slots = d.reads_vector(i.operands[3], "f64" if ctype == "f64" else "b32")
    d_slots = d.writes_vector(i.operands[0], "f64" if dtype == "f64" else "b32")

    def words(rows: int, columns: int, bits: int) -> int:
        return rows * columns * bits // (WARP * (64 if bits == 64 else 32))

    wanted = (
        words(m, k, ELEMENT_BITS[atype]), words(k, n, ELEMENT_BITS[btype]),
        *(m * n // WARP // (2 if kind == "f16" else 1) for kind in (ctype, dtype)),
    )  # fmt: skip
    if (len(a_slots), len(b_slots), len(c_slots), len(d_slots)) != wanted:
        raise d.unsupported(f"fragments of other than {wanted} registers")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        a = values(fragment.a_matrix(register_elements(w, a_slots, atype), m), atype)
        b = values(fragment.b_matrix(register_elements(w, b_slots, btype)), btype)
        c = read_accumulator(w, c_slots, ctype, m)
        write_accumulator(w, d_slots, dtype, multiply_add(a, b, c, dtype, satfinite=satfinite), lanes)
        return None

    return step


@instruction("mma.sp", "wmma")
def refused(i: ptx.Instruction, d: Decoder) -> Step:
    raise d.unsupported("not modelled")
