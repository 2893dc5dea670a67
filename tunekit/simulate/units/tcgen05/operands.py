"""Reading A, B and the scale factors of tcgen05.mma from shared and tensor memory (PTX ISA 9.7.16.10.4 to .7)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Access
from tunekit.simulate.machine.tensor_memory import Where, groups
from tunekit.simulate.matrix.layout import Major, Place, chunk_addresses
from tunekit.simulate.numbers.formats import decode
from tunekit.simulate.units.tcgen05.address import show, split
from tunekit.simulate.units.tcgen05.arithmetic import Float64, chunk_bytes, from_chunks, from_words
from tunekit.simulate.units.tcgen05.data_path import scale_cells
from tunekit.simulate.units.tcgen05.state import tensor

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp
    from tunekit.simulate.ptx.module import Instruction

Index = NDArray[np.int64]
WORDS_OF_A = 8  # columns that a row of A takes in tensor memory: always 32 bytes


@dataclass(frozen=True)
class Reader:
    """Who reads: the warp and instruction for reports, and what the accesses rely on, as taken at issue."""

    warp: Warp
    instruction: Instruction
    shared: Access
    tensor: Access

    def fault(self, kind: FaultKind, message: str) -> None:
        self.warp.fault(kind, message, instruction=self.instruction)


@dataclass(frozen=True)
class Elements:
    """Type, bits that each takes in memory, and which way they run."""

    type: str
    bits: int
    major: Major


def from_shared(
    reader: Reader, cta: Cta, place: Place, rows: int, k: int, elements: Elements, name: str
) -> Float64 | None:
    """The operand float64[rows, k] that `place` describes in `cta`'s shared memory; None if it lies outside."""
    found = chunk_addresses(place, rows, k, elements.bits, elements.major)
    inside = cta.shared.within(found, 16)
    if not inside.all():
        outside = int(found[~inside][0])
        reader.fault(
            FaultKind.OUT_OF_BOUNDS,
            f"{name} ({place}): 16 bytes at {cta.shared.where(outside)}, outside shared memory",
        )
        return None
    chunks = cta.shared.read(found, chunk_bytes(elements.type, elements.bits), reader.shared)
    return from_chunks(chunks, elements.type, elements.bits, elements.major)


@lru_cache(maxsize=256)
def cells(lanes: bytes, lane: int, column: int, count: int) -> tuple[Where, slice, Index]:
    """(lanes, columns, groups) of `count` columns in these lanes (int64 as bytes, in order, from `lane`)."""
    rows = np.frombuffer(lanes, dtype=np.int64) + lane
    columns = np.arange(column, column + count, dtype=np.int64)
    halves = np.unique(rows // 16) * 16
    first, last = int(rows[0]), int(rows[-1])
    where: Where = slice(first, last + 1) if last - first + 1 == rows.size else rows
    return where, slice(column, column + count), groups(halves[:, None], columns[None, :])


def from_tensor(reader: Reader, cta: Cta, address: int, lanes: Index, elements: Elements) -> Float64 | None:
    """The operand float64[rows, k] whose rows lie in `lanes` (from the address's lane); None if it is not there."""
    lane, column = split(address)
    state = tensor(cta)
    rows, columns, touched = cells(lanes.tobytes(), lane, column, WORDS_OF_A)
    problem = state.trouble(lane, int(lanes[-1]) + 1, columns)
    if problem is not None:
        reader.fault(FaultKind.TMEM_ACCESS, f"A at {show(address)}: {problem}")
        return None
    words = state.memory.read(rows, columns, touched, reader.tensor)
    return from_words(words, elements.type, elements.bits)


def scales(
    reader: Reader, cta: Cta, address: int, count: int, blocks: int, first: int, kind: str, parts: int, name: str
) -> list[Float64] | None:
    """Scale factors: for each part of the lanes float64[count, blocks].

    first: the byte of each cell where the factors start (the scale factor ID). The factors lie in all four quarters
    of the lanes; quarters of the same part must hold the same (9.7.16.10.7).
    """
    # CUTLASS leaves the ID in the two highest bits of the address too; they are no part of the lane.
    lane, column = split(address & 0x3FFFFFFF)
    within, across = scale_cells(count)
    state = tensor(cta)
    problem = f"lane {lane}, must be 0" if lane else state.trouble(0, 128, slice(column, column + int(across[-1]) + 1))
    if problem is not None:
        reader.fault(FaultKind.TMEM_ACCESS, f"{name} at {show(address)}: {problem}")
        return None
    rows = within[None, :] + 32 * np.arange(4, dtype=np.int64)[:, None]
    columns = np.broadcast_to(across + column, rows.shape)
    words = state.memory.read(rows, columns, groups(rows, columns), reader.tensor)
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(4, count, 4)[:, :, first : first + blocks]
    per_part = 4 // parts
    found = []
    for part in range(parts):
        same = octets[part * per_part : (part + 1) * per_part]
        if (same != same[0]).any():
            quarter, row = (int(n) for n in np.argwhere((same != same[0]).any(axis=2))[0])
            reader.fault(
                FaultKind.ILLEGAL,
                f"{name} at {show(address)}: factor {row} differs between the quarters of the lanes "
                f"{part * per_part} and {part * per_part + quarter}",
            )
        found.append(decode(same[0], kind).astype(np.float64))
    return found
