"""tcgen05.cp and tcgen05.shift (PTX ISA 9.7.16.9): from shared to tensor memory, and rows down by one.

The source of cp is a K-major matrix of `rows` rows, 16 or 32 bytes wide, found by a matrix descriptor. Row r goes to

    128x256b, 128x128b       lane r
    64x128b.warpx2::02_13    lanes r and r + 64
    64x128b.warpx2::01_23    lanes 64 (r / 32) + r % 32, and 32 above
    32x128b.warpx4           lanes r, r + 32, r + 64, r + 96
    4x256b                   lane 32 r

from the lane of the address; so is the split of CUTLASS's copy atoms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Access
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.matrix import descriptor_sm100
from tunekit.simulate.matrix.descriptor_sm100 import DescriptorError
from tunekit.simulate.matrix.layout import Place, chunk_addresses
from tunekit.simulate.ptx.module import Instruction
from tunekit.simulate.units.tcgen05.address import QUADRANT, show, split
from tunekit.simulate.units.tcgen05.arithmetic import nibbles, sextets
from tunekit.simulate.units.tcgen05.operands import cells
from tunekit.simulate.units.tcgen05.pipe import members, submit
from tunekit.simulate.units.tcgen05.state import WarpTensor, group_of, tensor

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp

Index = NDArray[np.int64]

# Rows, bytes of a row, and the multicast that the shape needs.
_SHAPES: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "128x256b": (128, 32, ()),
    "4x256b": (4, 32, ()),
    "128x128b": (128, 16, ()),
    "64x128b": (64, 16, ("warpx2::02_13", "warpx2::01_23")),
    "32x128b": (32, 16, ("warpx4",)),
}


@lru_cache(maxsize=16)
def destinations(shape: str, multicast: str) -> Index:
    """int64[copies, rows]: the lanes that each row of the source goes to."""
    rows = _SHAPES[shape][0]
    row = np.arange(rows, dtype=np.int64)
    if shape == "4x256b":
        lanes = row[None, :] * QUADRANT
    elif multicast == "warpx4":
        lanes = row[None, :] + QUADRANT * np.arange(4, dtype=np.int64)[:, None]
    elif multicast == "warpx2::02_13":
        lanes = row[None, :] + np.array([[0], [64]], dtype=np.int64)
    elif multicast == "warpx2::01_23":
        lanes = 64 * (row // 32) + row % 32 + np.array([[0], [32]], dtype=np.int64)
    else:
        lanes = row[None, :]
    lanes.flags.writeable = False
    return lanes


_SOURCE_BYTES = {"b4x16_p64": 8, "b6x16_p32": 12, "": 16}


def decompressed(chunks: NDArray[np.uint8], source: str) -> NDArray[np.uint8]:
    """uint8[..., 16]: chunks with 16 elements of 4 or 6 bits, each in a byte of its own (9.7.16.9.1).

    An element of 4 bits goes to bits 2-5, where tcgen05.mma looks for it (9.7.16.10.4.3).
    """
    if source == "b4x16_p64":
        return np.left_shift(nibbles(chunks), 2, dtype=np.uint8)
    if source == "b6x16_p32":
        return sextets(chunks)
    return chunks


@dataclass(frozen=True)
class _Copy:
    """One tcgen05.cp, its operands read at issue."""

    warp: Warp
    instruction: Instruction
    ctas: tuple[Cta, ...]
    shape: str
    multicast: str
    source: str
    address: int
    place: Place
    shared: Access
    tensor: Access

    def run(self) -> None:
        rows, width, _ = _SHAPES[self.shape]
        lanes = destinations(self.shape, self.multicast).reshape(-1)
        lane, column = split(self.address)
        found = chunk_addresses(self.place, rows, width, 8, "k")
        at_lanes, at_columns, touched = cells(np.sort(lanes).tobytes(), lane, column, width // 4)
        for cta in self.ctas:
            problem = tensor(cta).trouble(lane, int(lanes.max()) + 1, at_columns)
            if problem is not None:
                self.warp.fault(FaultKind.TMEM_ACCESS, f"at {show(self.address)}: {problem}", None, self.instruction)
                continue
            inside = cta.shared.within(found, 16)
            if not inside.all():
                where = cta.shared.where(int(found[~inside][0]))
                message = f"the source ({self.place}): 16 bytes at {where}, outside shared memory"
                self.warp.fault(FaultKind.OUT_OF_BOUNDS, message, None, self.instruction)
                continue
            chunks = decompressed(cta.shared.read(found, _SOURCE_BYTES[self.source], self.shared), self.source)
            words = np.ascontiguousarray(chunks).reshape(rows, width).view(np.uint32)
            copies = np.tile(words, (lanes.size // rows, 1))[np.argsort(lanes, kind="stable")]
            tensor(cta).memory.write(at_lanes, at_columns, copies, touched, self.tensor)


@instruction("tcgen05.cp")
def cp(i: Instruction, d: Decoder) -> Step:
    group = group_of(i)
    shape = next(m for m in i.modifiers if m in _SHAPES)
    multicast = next((m for m in i.modifiers if m.startswith("warpx")), "")
    needed = _SHAPES[shape][2]
    if multicast not in (needed or ("",)):
        raise d.unsupported(f".{shape} with multicast {multicast or 'none'}: needs {' or '.join(needed) or 'none'}")
    source = next((m for m in i.modifiers if m in ("b6x16_p32", "b4x16_p64")), "")
    if bool(source) != ("b8x16" in i.modifiers):
        raise d.unsupported("decompression needs .b8x16 and a source format")
    address, matrix = d.address(i.operands[0]), d.read(i.operands[1], "b64")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in lanes.indices:
            ctas = members(w, i, group)
            try:
                place = descriptor_sm100.decode(int(w.u64[matrix][lane]))
            except DescriptorError as error:
                w.fault(FaultKind.DESCRIPTOR, f"matrix descriptor: {error}")
                continue
            unit = w.part(WarpTensor)
            target = address.first(w, Lanes.of(1 << int(lane))) & 0xFFFFFFFF
            shared, own = w.async_access(unit.pipe), unit.access(unit.pipe, i)
            operation = _Copy(w, i, ctas, shape, multicast, source, target, place, shared, own)
            unit.rely()
            submit(w, i, ctas, operation.run)
        return None

    return step


@instruction("tcgen05.shift")
def shift(i: Instruction, d: Decoder) -> Step:
    """Rows 1 to 31 of a quarter of the lanes move to rows 0 to 30, in the 8 columns from the address (31x256b)."""
    group = group_of(i)
    address = d.address(i.operands[0])

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for one in lanes.indices:
            ctas = members(w, i, group)
            unit = w.part(WarpTensor)
            target = address.first(w, Lanes.of(1 << int(one))) & 0xFFFFFFFF
            access = unit.access(unit.pipe, i)
            unit.rely()
            submit(w, i, ctas, partial(_shift, w, i, ctas, target, access))
        return None

    return step


def _shift(w: Warp, i: Instruction, ctas: tuple[Cta, ...], address: int, access: Access) -> None:
    lane, column = split(address)
    for cta in ctas:
        state = tensor(cta)
        rows, columns, touched = cells(np.arange(QUADRANT, dtype=np.int64).tobytes(), lane, column, 8)
        problem = state.trouble(lane, QUADRANT, columns)
        if lane % QUADRANT:
            problem = f"lane {lane} is not a multiple of {QUADRANT}"
        if problem is not None:
            w.fault(FaultKind.TMEM_ACCESS, f"at {show(address)}: {problem}", None, i)
            continue
        words = state.memory.read(rows, columns, touched, access)[1:].copy()
        state.memory.write(slice(lane, lane + QUADRANT - 1), columns, words, touched, access)
