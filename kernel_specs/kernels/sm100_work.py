"""What one CTA computes: its rows, and the KV tiles that it visits."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .sm100_plan import SWIZZLE_COLUMNS, Plan


class Rows(NamedTuple):
    """A softmax group's rows: where they lie among heads and positions."""

    head_block: Int32
    position_block: Int32
    first_position: Int32


class Work(NamedTuple):
    """The tiles of both sources are counted as one sequence: source 1's from `begin` on, then source 2's from 0 on. The
    CTA visits ``first <= i < last`` of it; ``i < dense_tiles`` is tile ``begin + i`` of source 1."""

    rank: Int32  # of the CTA in its pair
    batch: Int32
    kv_head: Int32
    pv_slice: Int32
    column: Int32  # the first of the CTA's columns of V and O
    split: Int32
    rows: tuple[Rows, ...]
    queries: Int32
    first_query: Int32
    keys: Int32
    keys2: Int32
    begin: Int32
    dense_tiles: Int32
    first: Int32
    last: Int32
    full_begin: Int32
    full_end: Int32

    @property
    def own_dense_tiles(self):
        """How many of the CTA's tiles are of source 1: the first ones."""
        return cutlass.max(cutlass.min(self.last, self.dense_tiles) - self.first, 0)

    @property
    def tiles(self):
        """How many tiles the CTA visits; 0 where its rows see no key."""
        return self.last - self.first


def row_blocks(plan: Plan, queries):
    """Row blocks of one KV head over `queries` positions, a softmax group each."""
    return plan.packing.head_blocks * cute.ceil_div(queries, plan.positions)


def grid(plan: Plan, queries, batch):
    """CTAs along x (row blocks), y (KV heads and slices of O's columns), z (sequences and splits of the keys)."""
    blocks = cute.round_up(cute.ceil_div(row_blocks(plan, queries), plan.groups), plan.ctas)
    return blocks, plan.problem.kv_heads * plan.slices, batch * plan.splits


@cute.jit
def find_work(plan: cutlass.Constexpr, sequences: cutlass.Constexpr, left, right):
    """This CTA's work."""
    x, y, z = cute.arch.block_idx()
    rank = x % plan.ctas
    if const_expr(plan.problem.mask in ("causal", "causal_top_left")):
        # Late positions see the most keys: the longest CTAs start first, so that the short ones fill the gaps.
        blocks, _, _ = cute.arch.grid_dim()
        x = blocks - 1 - x
    batch = z // plan.splits
    queries = sequences.queries(batch)
    keys, begin, dense_tiles, full_begin, full_end = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    rows = tuple(_rows(plan, x * plan.groups + group, y // plan.slices) for group in range(plan.groups))
    # A pair visits the tiles of the rows of both.
    first_block = x // plan.ctas * plan.ctas
    all_rows = (
        rows if not plan.pair else tuple(_rows(plan, first_block + i, y // plan.slices) for i in range(plan.ctas))
    )
    first_position = rows[0].first_position
    last_position = first_position
    for one in all_rows:
        first_position = cutlass.min(first_position, one.first_position)
        last_position = cutlass.max(last_position, one.first_position + plan.positions - 1)
    exists = Boolean(first_position < queries)
    if const_expr(plan.dense):
        keys = Int32(sequences.keys(batch))
        last_position = cutlass.min(last_position, queries - 1)
        tiles = plan.mask.tiles(first_position, last_position, queries, keys, left, right)
        begin, full_begin, full_end = Int32(tiles.begin), Int32(tiles.full_begin), Int32(tiles.full_end)
        dense_tiles = cutlass.max(Int32(tiles.end) - begin, 0) * Int32(exists)
    keys2 = Int32(0)
    if const_expr(plan.problem.gather):
        keys2 = sequences.listed()
    elif const_expr(plan.problem.sources == 2):
        keys2 = Int32(sequences.keys2(batch))
    all_tiles = dense_tiles + cute.ceil_div(keys2, plan.kv_tile) * Int32(exists)
    split = z % plan.splits
    return Work(
        rank=rank,
        batch=batch,
        kv_head=y // plan.slices,
        pv_slice=y % plan.slices,
        column=cute.assume(y % plan.slices * plan.pv_n_tile, divby=SWIZZLE_COLUMNS),
        split=split,
        rows=rows,
        queries=queries,
        first_query=Int32(sequences.first_query(batch)),
        keys=keys,
        keys2=keys2,
        begin=begin,
        dense_tiles=dense_tiles,
        first=all_tiles * split // plan.splits,
        last=all_tiles * (split + 1) // plan.splits,
        full_begin=full_begin,
        full_end=full_end,
    )


def _rows(plan: Plan, block, kv_head) -> Rows:
    head_block, position_block = plan.packing.coordinates(block, kv_head)
    return Rows(head_block, position_block, position_block * plan.positions)
