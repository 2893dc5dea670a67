"""How query heads and query positions share the rows of an M tile.

A *row block* is ``rows`` rows: ``heads`` neighbouring query heads of one KV head times ``positions`` neighbouring query
positions, heads fastest. ``heads`` is the greatest common divisor of ``rows`` and the query heads per KV head, so that
decode with many query heads over one KV head fills the tensor core at one position, and plain multi-head attention is
the case of one head a block. Any ratio works; an odd ratio packs nothing and wastes rows at short T.
"""

import math
from dataclasses import dataclass

import cutlass.cute as cute


@dataclass(frozen=True)
class Packing:
    """`rows` of a row block; `ratio` query heads a KV head."""

    rows: int
    ratio: int

    @property
    def heads(self) -> int:
        """Query heads in a row block."""
        return math.gcd(self.ratio, self.rows)

    @property
    def positions(self) -> int:
        """Query positions in a row block."""
        return self.rows // self.heads

    @property
    def head_blocks(self) -> int:
        """Row blocks side by side over the query heads of one KV head."""
        return self.ratio // self.heads

    @property
    def tile(self) -> tuple[int, int]:
        """A row block as (heads, positions): the first mode of a tiler over ``rows_view``."""
        return self.heads, self.positions

    def blocks(self, queries):
        """Row blocks of one KV head over ``queries`` positions."""
        return self.head_blocks * cute.ceil_div(queries, self.positions)

    def coordinates(self, block, kv_head):
        """(head block over all heads, position block) of row block ``block``: tile coordinates in ``rows_view``."""
        return kv_head * self.head_blocks + block % self.head_blocks, block // self.head_blocks

    def head(self, row, head_block):
        """The query head of a block's row."""
        return head_block * self.heads + row % self.heads

    def position(self, row, position_block):
        """The query position of a block's row; may lie past the last one."""
        return position_block * self.positions + row // self.heads


def rows_view(tensor):
    """[batch, T, heads, d], or packed [T, heads, d], as ((heads, T), d, batch): what a tiler (tile, d) walks."""
    if cute.rank(tensor) == 3:
        modes = cute.select(tensor.layout, mode=[1, 0, 2])
        modes = cute.append(modes, cute.make_layout(1, stride=0))
    else:
        modes = cute.select(tensor.layout, mode=[2, 1, 3, 0])
    return cute.group_modes(cute.make_tensor(tensor.iterator, modes), 0, 2)
