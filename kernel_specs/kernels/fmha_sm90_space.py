"""The space of the sm_90a attention kernel: tunables, rules and footprint, as plain arithmetic.

`v` is problem and tunables together. `m_tile` rows and `pv_n_tile` columns of O a CTA; `kv_tile` keys a step;
`kv_stage` tiles in the K and V rings, each K tile in `k_sub` stages; `smem_p`: P goes through shared memory, not
registers; `kv_groups` warp groups share each row block, taking every kv_groups-th tile; `cluster_m` CTAs with
neighbouring rows share K and V by multicast; `ctas_per_sm` CTAs fit one SM's register file; `rescale_log2`: O is
rescaled only when a row's maximum has grown by more than this power of two (0: at every step, exactly); `schedule`: a
CTA a row block, or persistent: a CTA an SM, that loads the next row block's tiles while it ends one.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

BLOCK_ROWS = 64
WARP_GROUP_THREADS = 128
ELEMENT_BYTES = 2  # of bfloat16 and float16
BARRIER_BYTES = 8
STORAGE_ALIGNMENT = 1024  # of swizzled tiles, and so of the whole storage
SMEM_PER_SM_BYTES = 233_472
SMEM_RESERVED_BYTES = 1024  # by the system, per resident CTA
PERSISTENT_CTAS = 132  # SMs of the H100 SXM and the H200; on fewer SMs the last CTAs start late
# S + P + O registers that a consumer thread can hold before ptxas (CUDA 12.9, in CuTeDSL 4.8.1) spills, by
# (consumer warp groups, CTAs on one SM); read from ptxas over the whole space, 2026-11-29.
TILE_REGISTERS = {(1, 1): 216, (1, 2): 192, (2, 1): 216, (3, 1): 128}

TUNABLES = (
    Tunable("m_tile", (64, 128, 192)),
    Tunable("pv_n_tile", (64, 128, 256)),
    Tunable("kv_tile", (64, 128)),
    Tunable("kv_stage", (1, 2, 3, 4)),
    Tunable("smem_p", (False, True)),
    Tunable("k_sub", (1, 2, 4)),
    Tunable("kv_groups", (1, 2)),
    Tunable("cluster_m", (1, 2)),
    Tunable("ctas_per_sm", (1, 2)),
    Tunable("rescale_log2", (0, 8)),
    Tunable("schedule", ("static", "persistent")),
)


def consumers(v: Values) -> int:
    """Consumer warp groups of a CTA."""
    return int(v.m_tile // BLOCK_ROWS * v.kv_groups)


def smem_terms(v: Values) -> dict[str, int]:
    """Bytes of each part of a CTA's shared memory. O reuses Q unless the next row block's may be there; the KV groups'
    exchange reuses K and V; kv_shared: V is in K's stages. `present`: which entries of a gathered tile exist, a bit
    each in 8 buffers."""
    k_stage = v.kv_stage * v.k_sub
    return {
        "q": v.m_tile * v.head_dim * ELEMENT_BYTES,
        "k": v.kv_stage * v.kv_tile * v.head_dim * ELEMENT_BYTES,
        "v": 0 if v.kv_shared else v.kv_stage * v.kv_tile * v.pv_n_tile * ELEMENT_BYTES,
        "o": v.m_tile * v.pv_n_tile * ELEMENT_BYTES if v.schedule == "persistent" else 0,
        "p": consumers(v) * BLOCK_ROWS * v.kv_tile * ELEMENT_BYTES if v.smem_p else 0,
        "present": v.kv_tile if v.gather else 0,
        "barriers": 2 * BARRIER_BYTES * (1 + k_stage + (0 if v.kv_shared else v.kv_stage)),
    }


def footprint(v: Values, arch: Arch) -> Footprint:
    """Dynamic shared memory (there is no static), threads and cluster of a CTA."""
    total = sum(smem_terms(v).values())
    return Footprint(
        smem_bytes=-(-total // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT,
        tmem_columns=0,
        threads=WARP_GROUP_THREADS * (1 + consumers(v)),
        cluster=v.cluster_m,
    )


def tile_registers(v: Values) -> int:
    """Registers of one consumer thread for S, P and O, which live together."""
    return int(v.kv_tile // 2 + v.pv_n_tile // 2 + (0 if v.smem_p else v.kv_tile // 4))


def _rows(v: Values) -> int:
    """Query rows of all heads and sequences."""
    return int((v.total_t if v.varlen else v.batch * v.t) * v.heads)


def _whole_rows(v: Values) -> bool:
    return bool(v.cluster_m * v.kv_groups * v.ctas_per_sm == 1 and v.pv_n_tile == v.head_dim_v and not v.gather)


def _exchange_fits(v: Values) -> bool:
    terms = smem_terms(v)
    return terms["k"] + terms["v"] >= 4 * WARP_GROUP_THREADS * (v.pv_n_tile // 2 + 4)


def _two_fit_an_sm(v: Values) -> bool:
    one = -(-sum(smem_terms(v).values()) // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
    return bool(v.ctas_per_sm * (one + SMEM_RESERVED_BYTES) <= SMEM_PER_SM_BYTES)


CONSTRAINTS = (
    Constraint(
        "pv_divides",
        "head_dim_v must be a multiple of pv_n_tile: every CTA owns whole column slices of V",
        lambda v: v.head_dim_v % v.pv_n_tile == 0,
    ),
    Constraint(
        "o_in_q",
        "O is staged in Q's shared memory, so pv_n_tile must be at most head_dim",
        lambda v: v.pv_n_tile <= v.head_dim,
    ),
    Constraint(
        "k_parts",
        "a K stage holds whole 64-column blocks, so head_dim must be a multiple of 64 * k_sub",
        lambda v: v.head_dim % (64 * v.k_sub) == 0,
    ),
    Constraint(
        "k_sub_wide",
        "K is split over ring stages only where a tile is wide (head_dim >= 256)",
        lambda v: v.k_sub == 1 or v.head_dim >= 256,
    ),
    Constraint(
        "shared_whole",
        "with kv_shared a stage is K's whole tile and V's, so k_sub must be 1",
        lambda v: not v.kv_shared or v.k_sub == 1,
    ),
    Constraint(
        "shared_stages",
        "with kv_shared a tile is held until its PV product, which follows the next tile's S: two stages a KV group",
        lambda v: not v.kv_shared or v.kv_stage >= 2 * v.kv_groups,
    ),
    Constraint(
        "page_tile",
        "a KV tile lies within one page, so page must be a multiple of kv_tile",
        lambda v: v.page % v.kv_tile == 0,
    ),
    Constraint(
        "residency",
        "two CTAs share an SM, and two warp groups a row block, only at m_tile 64, and not both at once",
        lambda v: v.ctas_per_sm * v.kv_groups == 1 or (v.m_tile == 64 and v.ctas_per_sm * v.kv_groups == 2),
    ),
    Constraint(
        "group_stages",
        "a ring stage must always serve the same KV group, or a group would miss a phase of its barrier: "
        "kv_stage must be a multiple of kv_groups",
        lambda v: v.kv_stage % v.kv_groups == 0,
    ),
    Constraint(
        "group_exchange",
        "two KV groups exchange O in float32 through the spent K and V rings, which must hold 64 x pv_n_tile of it",
        lambda v: v.kv_groups == 1 or _exchange_fits(v),
    ),
    Constraint(
        "lazy_final",
        "a maximum that lags behind (rescale_log2 > 0) is no row_max to merge by, so it needs normalize",
        lambda v: v.rescale_log2 == 0 or v.normalize,
    ),
    Constraint(
        "registers",
        "S, P and O of a consumer thread (kv_tile / 2, kv_tile / 4 unless smem_p, pv_n_tile / 2 registers) must leave "
        "room in its share of the register file, or ptxas spills and serialises wgmma",
        lambda v: tile_registers(v) <= TILE_REGISTERS.get((consumers(v), v.ctas_per_sm), 0),
    ),
    Constraint(
        "registers_at_launch",
        "ptxas needs 158 registers for a wgmma of 256 columns, and allows what a thread has at its launch: 128 with "
        "two CTAs on an SM, so pv_n_tile must be at most 128 there",
        lambda v: v.ctas_per_sm == 1 or v.pv_n_tile <= 128,
    ),
    Constraint(
        "persistent_whole",
        "a persistent CTA does whole rows of O alone on its SM: cluster_m, kv_groups and ctas_per_sm must be 1 and "
        "pv_n_tile head_dim_v, and it does not gather",
        lambda v: v.schedule == "static" or _whole_rows(v),
    ),
    Constraint(
        "persistent_rounds",
        "a persistent CTA needs a second row block to load ahead for: more than 132 * m_tile rows of all heads",
        lambda v: v.schedule == "static" or _rows(v) > PERSISTENT_CTAS * v.m_tile,
    ),
    Constraint(
        "gather_rows",
        "all rows of a CTA read one token's list: with gather, the query heads of a KV head must be a multiple of "
        "m_tile",
        lambda v: not v.gather or v.heads // v.kv_heads % v.m_tile == 0,
    ),
    Constraint(
        "gather_registers",
        "a thread that gathers takes 40 registers, and three consumer warp groups leave it 32: with gather, m_tile "
        "must be at most 128",
        lambda v: not v.gather or v.m_tile <= 128,
    ),
    Constraint(
        "gather_multicast",
        "what threads gather cannot be multicast: with gather, cluster_m must be 1",
        lambda v: not v.gather or v.cluster_m == 1,
    ),
    Constraint(
        "smem_per_sm",
        "ctas_per_sm CTAs, each with the system's 1024 B, must fit the SM's 233472 B",
        lambda v: v.ctas_per_sm == 1 or _two_fit_an_sm(v),
    ),
)

_PLAIN = {
    "smem_p": False,
    "k_sub": 1,
    "kv_groups": 1,
    "cluster_m": 1,
    "ctas_per_sm": 1,
    "rescale_log2": 0,
    "schedule": "static",
}
DEFAULTS = (
    {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 128, "kv_stage": 2, **_PLAIN},
    {"m_tile": 128, "pv_n_tile": 64, "kv_tile": 128, "kv_stage": 2, **_PLAIN},
    {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, **_PLAIN},
    {"m_tile": 128, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, **_PLAIN},
    {"m_tile": 64, "pv_n_tile": 256, "kv_tile": 64, "kv_stage": 1, **_PLAIN},
    {"m_tile": 64, "pv_n_tile": 256, "kv_tile": 64, "kv_stage": 2, **_PLAIN},
    {"m_tile": 64, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 1, **_PLAIN},
    {"m_tile": 64, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, **_PLAIN},
    {"m_tile": 64, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 1, **_PLAIN},
    {"m_tile": 64, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, **_PLAIN},
)


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .attention.arguments import make_fake_args
    from .fmha_sm90 import make_kernel

    return make_kernel(b.problem, b.tunables), make_fake_args(b.problem)
