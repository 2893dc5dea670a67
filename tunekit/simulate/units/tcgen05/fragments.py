"""Which cell of tensor memory each register of each lane holds in tcgen05.ld and tcgen05.st (PTX ISA 9.7.16.2.3.1).

With t the lane of the warp and r the number of the register in the vector:

    32x32b      lane t                        column r
    16x64b      lane t / 4 + 8 (t % 2)        column (t / 2) % 2 + 2 r
    16x128b     lane t / 4 + 8 (r % 2)        column t % 4 + 4 (r / 2)
    16x256b     lane t / 4 + 8 ((r / 2) % 2)  column 2 (t % 4) + r % 2 + 8 (r / 4)
    16x32bx2    lane t % 16                   column r, and from the second address for t >= 16

With .pack::16b or .unpack::16b a register holds the low halves of two neighbouring columns, 2c and 2c + 1 in place of
column c (9.7.16.8.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]

REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
MOST_REGISTERS = 128


@dataclass(frozen=True)
class Fragment:
    """Offsets from the address of the instruction.

    lanes    int64[32, registers]
    columns  int64[32, registers], or [32, registers, 2] if packed: low half first
    height   lanes that the access touches, from the address's lane on
    """

    lanes: Index
    columns: Index
    height: int
    packed: bool

    @property
    def registers(self) -> int:
        return int(self.lanes.shape[1])

    @property
    def touched(self) -> Index:
        """The columns that are touched, in order."""
        return np.unique(self.columns)


@lru_cache(maxsize=512)
def fragment(shape: str, repeat: int, packed: bool = False, split: int = 0) -> Fragment:
    """The fragment of `.shape.x<repeat>`; split: columns from the first to the second address of 16x32bx2."""
    if shape not in REGISTERS:
        raise ValueError(f"no shape {shape}")
    registers = REGISTERS[shape] * repeat
    if repeat & (repeat - 1) or not 1 <= repeat <= 128 or registers > MOST_REGISTERS:
        raise ValueError(f"{shape} has no .x{repeat}")
    lane = np.arange(32, dtype=np.int64)[:, None]
    register = np.arange(registers, dtype=np.int64)[None, :]
    second: Index = np.zeros((32, 1), dtype=np.int64)
    if shape == "32x32b":
        row, column = lane + 0 * register, register + 0 * lane
    elif shape == "16x64b":
        row, column = lane // 4 + 8 * (lane % 2) + 0 * register, (lane // 2) % 2 + 2 * register
    elif shape == "16x128b":
        row, column = lane // 4 + 8 * (register % 2), lane % 4 + 4 * (register // 2)
    elif shape == "16x256b":
        row = lane // 4 + 8 * ((register // 2) % 2)
        column = 2 * (lane % 4) + register % 2 + 8 * (register // 4)
    else:
        row, column = lane % 16 + 0 * register, register + 0 * lane
        second = split * (lane // 16)
    if packed:
        columns = 2 * column[:, :, None] + np.arange(2, dtype=np.int64) + second[:, :, None]
    else:
        columns = column + second
    for array in (row, columns):
        array.flags.writeable = False
    return Fragment(row, columns, 32 if shape == "32x32b" else 16, packed)
