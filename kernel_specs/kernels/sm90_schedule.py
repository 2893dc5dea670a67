"""Which row blocks a CTA of the Hopper attention kernel works on, and in what order the grid takes them.

The hardware starts CTAs in the order of their indices, x fastest, as SMs become free. Where all rows are equally long
the row blocks of a head follow each other, so that few heads' K and V are in L2 at a time. Under a causal mask the
longest rows come first, and of several heads side by side: with one head after the other, the last one's longest rows
would begin when the grid is almost done, and most SMs would wait for them.

A persistent grid has a CTA an SM, which does a row block a *round*, so that its loads run ahead over the end of a row
block, and O is stored under the next one. The order is the CTAs' own then: row blocks of all heads in one line, in
rounds of as many as there are CTAs, and every other round backwards. So under a causal mask, where each round's row
blocks are shorter than the last one's, the CTAs still end at the same time.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .attention.sequences import extent
from .fmha_sm90_space import PERSISTENT_CTAS
from .sm90_plan import Plan


def grid(plan: Plan, given: dict):
    """(CTAs of the row blocks, heads side by side, slices, cluster and splits; sections of KV heads; sequences)."""
    rows, batch = _rows_and_batch(plan, given)
    if const_expr(plan.persistent):
        return cutlass.min(rows * plan.problem.kv_heads * batch, PERSISTENT_CTAS), 1, 1
    return rows * _ctas_of_rows(plan), plan.problem.kv_heads // plan.heads_abreast, batch


def _rows_and_batch(plan: Plan, given: dict):
    """How many times a cluster's rows cover a head's, and sequences."""
    queries, batch = extent(plan.problem, given)
    return cute.ceil_div(plan.packing.blocks(queries), plan.row_blocks * plan.cluster_m), batch


def _ctas_of_rows(plan: Plan) -> int:
    """Neighbouring CTAs that have the rows of one cluster in common."""
    return plan.heads_abreast * plan.slices * plan.cluster_m * plan.num_splits


def own_place(plan: Plan) -> SimpleNamespace:
    """Where a CTA works: batch, kv_head, column_slice, split; its first row block and its cluster's; its rank."""
    x, section, batch = cute.arch.block_idx()
    x, split = x // plan.num_splits, x % plan.num_splits
    cluster, rank = x // plan.cluster_m, x % plan.cluster_m
    cluster, column_slice = cluster // plan.slices, cluster % plan.slices
    cluster_row, head = cluster // plan.heads_abreast, cluster % plan.heads_abreast
    if const_expr(plan.longest_last):
        # The longest rows begin first: what is left for the grid's end is short.
        cluster_row = cute.arch.grid_dim()[0] // _ctas_of_rows(plan) - 1 - cluster_row
    return SimpleNamespace(
        batch=batch,
        kv_head=section * plan.heads_abreast + head,
        column_slice=column_slice,
        first_block=(cluster_row * plan.cluster_m + rank) * plan.row_blocks,
        cluster_block=cluster_row * plan.cluster_m * plan.row_blocks,
        rank=rank,
        first_rank=Int32(0),
        split=split,
    )


@dataclass(frozen=True)
class Before:
    """What a CTA has done before a row block: `blocks`, and the KV `tiles` of their walks. 0 or Int32."""

    blocks: object
    tiles: object


def rounds(plan: Plan, given: dict):
    """How many row blocks a persistent CTA does."""
    rows, batch = _rows_and_batch(plan, given)
    total, ctas = Int32(rows * plan.problem.kv_heads * batch), cute.arch.grid_dim()[0]
    whole = total // ctas
    return whole + Int32(_line_position(whole) < total)


def _line_position(turn):
    """Which of all row blocks a persistent CTA does in a round."""
    own, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return turn * ctas + own + turn % 2 * (ctas - 1 - 2 * own)


def place_in_round(plan: Plan, given: dict, turn) -> SimpleNamespace:
    """`own_place` of a persistent CTA in a round."""
    rows, batch = _rows_and_batch(plan, given)
    position = _line_position(turn)
    if const_expr(plan.longest_last):
        heads = plan.problem.kv_heads * batch
        row, head = rows - 1 - position // heads, position % heads
    else:
        row, head = position % rows, position // rows
    block = row * plan.row_blocks
    return SimpleNamespace(
        batch=head // plan.problem.kv_heads,
        kv_head=head % plan.problem.kv_heads,
        column_slice=Int32(0),
        first_block=block,
        cluster_block=block,
        rank=Int32(0),
        first_rank=Int32(0),
        split=Int32(0),
    )
