"""Which row blocks a CTA of the Hopper attention kernel works on, and in what order the grid takes them.

The hardware starts CTAs in the order of their indices, x fastest, as SMs become free. Where all rows are equally long
the row blocks of a head follow each other, so that few heads' K and V are in L2 at a time. Under a causal mask the
longest rows come first, and of several heads side by side: with one head after the other, the last one's longest rows
would begin when the grid is almost done, and most SMs would wait for them.
"""

from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Int32, const_expr

from .sm90_plan import Plan


def grid(plan: Plan, given: dict):
    """(CTAs of the row blocks, heads side by side, slices, cluster and splits; sections of KV heads; sequences)."""
    if const_expr(plan.problem.varlen):
        batch, queries = given["cu_seqlens_q"].shape[0] - 1, given["max_t"]
    else:
        batch, queries = given["q"].shape[0], given["q"].shape[1]
    clusters = cute.ceil_div(plan.packing.blocks(queries), plan.row_blocks * plan.cluster_m)
    return clusters * _ctas_of_rows(plan), plan.problem.kv_heads // plan.heads_abreast, batch


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
