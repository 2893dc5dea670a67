"""ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14.5.15 to 9.7.14.5.17).

A matrix is made of rows of 16 bytes, each at the address that one lane gives: lanes 0-7 for the first 8x8 matrix, 8-15
for the next; 16 lanes a 16x16 matrix. A lane then holds four bytes of one row, or, transposed, of one column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import WARP, Lanes
from tunekit.simulate.ptx import module as ptx

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

Bytes = NDArray[np.uint8]
ROW_BYTES = 16
_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
# The space of a row's address; without one, it is a generic address.
_SPACES = {"shared": "shared", "shared::cta": "shared"}


def fragments_8x8(rows: Bytes, transposed: bool) -> Bytes:
    """[matrices, 8, 16] bytes to registers [matrices, 32, 4]: lane 4 r + c holds elements 2 c and 2 c + 1 of row r."""
    halves = rows.view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        halves = halves.swapaxes(1, 2)
    return np.ascontiguousarray(halves).view(np.uint8).reshape(-1, WARP, 4)


def rows_8x8(registers: Bytes, transposed: bool) -> Bytes:
    """The inverse of fragments_8x8."""
    halves = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        halves = halves.swapaxes(1, 2)
    return np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 8, ROW_BYTES)


def fragments_16x16(rows: Bytes) -> Bytes:
    """[matrices, 16, 16] bytes, transposed, to registers [2 matrices, 32, 4].

    Lane 4 r + c holds rows 4 c to 4 c + 3 of column r in its first register, and of column r + 8 in its second.
    """
    columns = rows.swapaxes(1, 2)
    return np.ascontiguousarray(columns).reshape(-1, WARP, 4)


def rows_16x8(registers: Bytes) -> Bytes:
    """Registers [matrices, 32, 4] of 16x8 matrices to the rows of their transposes, [matrices, 8, 16].

    The fragment is an accumulator's: bytes 0 and 1 of lane 4 g + t are columns 2 t and 2 t + 1 of row g, bytes 2 and
    3 those of row g + 8.
    """
    parts = registers.reshape(-1, 8, 4, 2, 2)  # matrix, g, t, half, i
    return np.ascontiguousarray(parts.transpose(0, 2, 4, 3, 1)).reshape(-1, 8, ROW_BYTES)


def expand(rows: Bytes, source: str) -> Bytes:
    """Rows of 16 packed elements and padding to one byte an element ("Optional Decompression").

    Six bits go to the low bits of the byte; four bits to its middle (2 to 5), where mma takes them.
    """
    if source == "b4x16_p64":
        packed = rows[..., :8]
        out = np.empty_like(rows)
        out[..., 0::2] = (packed & 15) << 2
        out[..., 1::2] = (packed >> 4) << 2
        return out
    bits = np.unpackbits(rows[..., :12], axis=-1, bitorder="little").reshape(*rows.shape[:-1], 16, 6)
    padded = np.concatenate([bits, np.zeros((*bits.shape[:-1], 2), dtype=np.uint8)], axis=-1)
    return np.packbits(padded, axis=-1, bitorder="little").reshape(rows.shape)


def _space(i: ptx.Instruction) -> str:
    return next((_SPACES[m] for m in i.modifiers if m in _SPACES), "generic")


@instruction("ldmatrix.sync.aligned")
def ldmatrix(i: ptx.Instruction, d: Decoder) -> Step:
    """r, [p]"""
    shape, count = i.modifiers[2], _COUNTS[i.modifiers[3]]
    transposed = "trans" in i.modifiers
    kind = i.modifiers[-1]
    lanes_each = 16 if shape == "m16n16" else 8
    if shape == "m8n8":
        legal = kind == "b16"
    elif shape == "m16n16":
        legal = transposed and count <= 2 and kind in ("b8", "b4x16_p64", "b6x16_p32")
    else:
        legal = shape == "m8n16" and not transposed and kind in ("b4x16_p64", "b6x16_p32")
    if not legal:
        raise d.unsupported("a shape and type that are not modelled")
    out = d.writes_vector(i.operands[0], "b32")
    if len(out) != count * (2 if shape == "m16n16" else 1):
        raise d.unsupported(f"{len(out)} destination registers")
    where, space = d.address(i.operands[1]), _space(i)
    givers = Lanes.of((1 << count * lanes_each) - 1)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        rows = w.load(space, where.of(w, givers), ROW_BYTES, givers)
        rows = rows.reshape(count, lanes_each, ROW_BYTES)
        if shape == "m8n8":
            registers = fragments_8x8(rows, transposed)
        else:
            if kind != "b8":
                rows = expand(rows, kind)
            registers = fragments_16x16(rows) if transposed else rows.reshape(count, WARP, 4)
        for slot, values in zip(out, registers.view(np.uint32)[..., 0], strict=True):
            np.copyto(w.u32[slot], values, where=lanes.where)
        return None

    return step


@instruction("stmatrix.sync.aligned")
def stmatrix(i: ptx.Instruction, d: Decoder) -> Step:
    """[p], r"""
    shape, count = i.modifiers[2], _COUNTS[i.modifiers[3]]
    transposed = "trans" in i.modifiers
    kind = i.modifiers[-1]
    if (shape, kind) not in (("m8n8", "b16"), ("m16n8", "b8")) or (shape == "m16n8" and not transposed):
        raise d.unsupported("a shape and type that are not modelled")
    where, space = d.address(i.operands[0]), _space(i)
    source = d.reads_vector(i.operands[1], "b32")
    if len(source) != count:
        raise d.unsupported(f"{len(source)} source registers")
    givers = Lanes.of((1 << count * 8) - 1)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        registers = np.stack([w.u32[slot] for slot in source]).view(np.uint8).reshape(count, WARP, 4)
        rows = rows_8x8(registers, transposed) if shape == "m8n8" else rows_16x8(registers)
        w.store(space, where.of(w, givers), rows.reshape(-1, ROW_BYTES), givers)
        return None

    return step


@instruction("movmatrix.sync.aligned")
def movmatrix(i: ptx.Instruction, d: Decoder) -> Step:
    """d, a: the transpose of an 8x8 matrix of 16-bit elements."""
    if i.modifiers[2:] != ("m8n8", "trans", "b16"):
        raise d.unsupported("a shape and type that are not modelled")
    source, out = d.read(i.operands[1], "b32"), d.write(i.operands[0], "b32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        matrix = w.u32[source].view(np.uint16).reshape(8, 8)
        np.copyto(w.u32[out], np.ascontiguousarray(matrix.T).reshape(-1).view(np.uint32), where=lanes.where)
        return None

    return step
