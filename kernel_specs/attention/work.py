"""What a launch of each sm_90a attention kernel does, for the cost model. Plain arithmetic over problem and tunables.

The rows of a KV head are `BLOCK_ROWS` query heads times query positions a row block (kernels/attention/packing.py). A
CTA walks over its KV tiles, a tile a step. Tiles are counted by the keys that a query sees on average, which the
problem's cost knows: under a causal mask CTAs differ, and the grid's order evens that out.
"""

from __future__ import annotations

import math

from tunekit.arch import Arch
from tunekit.model import Values
from tunekit.spec import Work

from ..kernels import fmha_sm90_pair_space as pair_space
from ..kernels import fmha_sm90_wide_space as wide_space
from ..kernels.fmha_sm90_space import BLOCK_ROWS, PERSISTENT_CTAS
from ..kernels.fmha_sm90_split_space import FIXED
from .cost import ELEMENT_BYTES, cost


def sm90(v: Values, arch: Arch) -> Work:
    """`m_tile` rows and `pv_n_tile` columns of O a CTA; `kv_groups` warp groups take turns at its tiles. A persistent
    CTA does several row blocks."""
    work = _work(v, v.m_tile, v.pv_n_tile, v.kv_stage)
    if v.schedule != "persistent" or work.ctas <= PERSISTENT_CTAS:
        return work
    rounds = -(-work.ctas // PERSISTENT_CTAS)
    return Work(
        ctas=PERSISTENT_CTAS,
        steps=rounds * work.steps,
        stages=work.stages,
        flops=rounds * work.flops,
        step_bytes=rounds * work.step_bytes,
        edge_bytes=rounds * work.edge_bytes,
        ctas_per_sm=work.ctas_per_sm,
    )


def sm90_split(v: Values, arch: Arch) -> Work:
    """`num_splits` CTAs share the tiles of a row block."""
    return _work(v.merged(FIXED), v.m_tile, v.pv_n_tile, v.kv_stage)


def sm90_wide(v: Values, arch: Arch) -> Work:
    """All 512 columns of O a CTA; a ring of parts of tiles, as many as fit."""
    tile_parts = wide_space.HEAD_DIM // v.part_columns * (1 if v.kv_shared else 2)
    return _work(v, BLOCK_ROWS, wide_space.HEAD_DIM, wide_space.slots(v) / tile_parts)


def sm90_pair(v: Values, arch: Arch) -> Work:
    """A CTA scores every other tile, and multiplies all of them by its half of V's columns: as many products, and bytes
    from L2, as half of the tiles with all columns. The ring holds 3 or 4 parts of a pair of tiles."""
    half = Values({**v, "kv_tile": pair_space.KV_TILE, "cluster_m": 1, "num_splits": pair_space.CLUSTER})
    return _work(half, BLOCK_ROWS, pair_space.HEAD_DIM, pair_space.SLOTS / (3 if v.kv_shared else 4))


def _work(v: Values, rows: int, columns: int, stages: float) -> Work:
    """CTAs of `rows` rows by `columns` columns of O, with `stages` tiles of K and V in flight."""
    splits, groups = v.get("num_splits", 1), v.get("kv_groups", 1)
    clusters = -(-_row_blocks(v) * BLOCK_ROWS // (rows * v.cluster_m))
    tokens = v.total_t if v.varlen else v.batch * v.t
    keys = cost(v).flops / (2 * v.heads * tokens * (v.head_dim + v.head_dim_v))
    tiles = math.ceil(keys / splits / v.kv_tile - 1e-9)
    tile_columns = v.head_dim if v.kv_shared else v.head_dim + columns
    return Work(
        ctas=clusters * v.cluster_m * (v.head_dim_v // columns) * splits * v.kv_heads * v.batch,
        steps=tiles / groups,
        stages=stages / groups,
        flops=2.0 * rows * tiles * v.kv_tile * (v.head_dim + columns),
        step_bytes=float(ELEMENT_BYTES * tiles * v.kv_tile * tile_columns) / v.cluster_m,
        edge_bytes=float(ELEMENT_BYTES * rows * (v.head_dim + columns)),
        ctas_per_sm=v.get("ctas_per_sm", 1),
        launches=2 if v.get("merge") == "kernel" else 1,
    )


def _row_blocks(v: Values) -> int:
    """Row blocks of one KV head of one sequence."""
    ratio = v.heads // v.kv_heads
    heads = math.gcd(ratio, BLOCK_ROWS)
    queries = -(-v.total_t // v.batch) if v.varlen else v.t
    return int(ratio // heads * -(-queries // (BLOCK_ROWS // heads)))
