"""Which keys a query sees, and which KV tiles a block of queries must visit.

A mask gives each query position one run of visible keys, ``first <= key < end``: everything else follows from the two.
All of it is integer arithmetic that works alike on numbers of the trace (Int32) and on Python's own.

Names: ``position`` counts a sequence's queries from 0; ``queries`` and ``keys`` are how many it has; ``left`` and
``right`` are the window's sides, -1 for an unlimited one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass

KINDS = ("none", "causal", "causal_top_left", "window")


class Tiles(NamedTuple):
    """The KV tiles of a block of queries: it visits ``begin <= tile < end``; all of its queries see all the keys of
    ``full_begin <= tile < full_end``, so that only the others need a mask. ``begin == end``: no query sees a key."""

    begin: object
    end: object
    full_begin: object
    full_end: object


@dataclass(frozen=True)
class Mask:
    """A mask by position. `kind` is one of KINDS; `kv_tile` the keys of a tile."""

    kind: str
    kv_tile: int

    @property
    def has_left_side(self) -> bool:
        """Whether early keys may be hidden from late queries."""
        return self.kind == "window"

    @property
    def by_position(self) -> bool:
        """Whether what a query sees depends on its position at all."""
        return self.kind != "none"

    def visible(self, position, queries, keys, left, right):
        """(first, end) of the keys that one query sees; ``first >= end``: none. ``0 <= first``, ``end <= keys``."""
        if self.kind == "none":
            return 0, keys
        if self.kind == "causal_top_left":
            return 0, cutlass.min(keys, position + 1)
        diagonal = position + keys - queries
        if self.kind == "causal":
            return 0, cutlass.min(keys, diagonal + 1)
        first = _choose(left < 0, 0, cutlass.max(0, diagonal - left))
        end = _choose(right < 0, keys, cutlass.min(keys, diagonal + right + 1))
        return first, end

    def tiles(self, first_position, last_position, queries, keys, left, right) -> Tiles:
        """The tiles of the queries ``first_position <= position <= last_position``, both of the sequence."""
        earliest, narrow_end = self.visible(first_position, queries, keys, left, right)
        latest, wide_end = self.visible(last_position, queries, keys, left, right)
        tile = self.kv_tile
        end = (cutlass.max(wide_end, 0) + tile - 1) // tile
        full_end = cutlass.max(narrow_end, 0) // tile
        if not self.has_left_side:
            return Tiles(0, end, 0, full_end)
        begin = cutlass.min(earliest // tile, end)
        full_begin = (latest + tile - 1) // tile
        return Tiles(begin, end, full_begin, full_end)


def _choose(condition, yes, no):
    """``yes`` if ``condition`` else ``no``, without a branch in the kernel."""
    if isinstance(condition, bool):
        return yes if condition else no
    flag = cutlass.Int32(condition)
    return yes * flag + no * (1 - flag)
