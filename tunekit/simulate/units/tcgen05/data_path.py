"""How D, A and the scale factors lie in tensor memory (PTX ISA 9.7.16.10.5 and 9.7.16.10.7).

    layout   M    cta_group  form     rows of a CTA  lane of row m         columns of lane l
    A        256  2                   128            m                     n
    B        128  2                   64             m + 64 (n / (N/2))    n % (N/2)
    D        128  1                   128            m                     n
    E        64   1          .ws      64             m + 64 (n / (N/2))    n % (N/2)
    F        64   1                   64             m % 16 + 32 (m / 16)  n
    G        32   1          .ws      32             m + 32 (n / (N/4))    n % (N/4)

Each lane multiplies the row of A that lies in that same lane. So where D is folded (B, E and G), a matrix A in tensor
memory is given once for each part of the columns, and of the scale factors of B a lane uses those of its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


@dataclass(frozen=True)
class DataPath:
    """One layout, seen from one CTA.

    rows   rows of D that the CTA holds
    parts  into how many parts the N columns are folded; part p lies in the lanes lanes[p]
    lanes  int64[parts, rows]: from the address's lane
    """

    layout: str
    rows: int
    parts: int
    lanes: Index

    def columns(self, n: int) -> int:
        """Columns of tensor memory that D takes."""
        return n // self.parts


@lru_cache(maxsize=32)
def data_path(m: int, cta_group: int, weight_stationary: bool) -> DataPath:
    """The layout of this shape."""
    layouts = {
        (256, 2, False): ("A", 128, 1),
        (128, 2, False): ("B", 64, 2),
        (128, 1, False): ("D", 128, 1),
        (128, 1, True): ("D", 128, 1),
        (64, 1, True): ("E", 64, 2),
        (64, 1, False): ("F", 64, 1),
        (32, 1, True): ("G", 32, 4),
    }
    layout, rows, parts = layouts[m, cta_group, weight_stationary]
    row = np.arange(rows, dtype=np.int64)
    if layout == "F":
        lanes = (row % 16 + 32 * (row // 16))[None, :]
    else:
        lanes = row[None, :] + rows * np.arange(parts, dtype=np.int64)[:, None]
    lanes.flags.writeable = False
    return DataPath(layout, rows, parts, lanes)


def scale_cells(count: int) -> tuple[Index, Index]:
    """Where scale factors 0 .. count-1 lie: (lane within a quarter of the lanes, column from the address).

    Factor i lies in lane i % 32 and column i / 32, in each of the four quarters; the byte within the cell is the
    scale factor ID plus the number of the block along K (9.7.16.10.7.2 and .3).
    """
    index = np.arange(count, dtype=np.int64)
    return index % 32, index // 32
