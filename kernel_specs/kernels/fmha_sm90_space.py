"""The space of the sm_90a attention kernel: tunables, rules and footprint, as plain arithmetic.

`v` is problem and tunables together; what each tunable does is told in fmha_sm90.py.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

from ..attention.missing import not_yet

BLOCK_ROWS = 64
WARP_GROUP_THREADS = 128
BF16_BYTES = 2
BARRIER_BYTES = 8
STORAGE_ALIGNMENT = 1024  # of swizzled tiles, and so of the whole storage
SMEM_PER_SM_BYTES = 233_472
SMEM_RESERVED_BYTES = 1024  # by the system, per resident CTA
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
)


def consumers(v: Values) -> int:
    """Consumer warp groups of a CTA."""
    return int(v.m_tile // BLOCK_ROWS * v.kv_groups)


def smem_terms(v: Values) -> dict[str, int]:
    """Bytes of each part of a CTA's shared memory; O reuses Q, and the KV groups' exchange reuses K and V."""
    k_stage = v.kv_stage * v.k_sub
    return {
        "q": v.m_tile * v.head_dim * BF16_BYTES,
        "k": v.kv_stage * v.kv_tile * v.head_dim * BF16_BYTES,
        "v": v.kv_stage * v.kv_tile * v.pv_n_tile * BF16_BYTES,
        "p": consumers(v) * BLOCK_ROWS * v.kv_tile * BF16_BYTES if v.smem_p else 0,
        "barriers": 2 * BARRIER_BYTES * (1 + k_stage + v.kv_stage),
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


def _exchange_fits(v: Values) -> bool:
    terms = smem_terms(v)
    return terms["k"] + terms["v"] >= 4 * WARP_GROUP_THREADS * (v.pv_n_tile // 2 + 4)


def _two_fit_an_sm(v: Values) -> bool:
    one = -(-sum(smem_terms(v).values()) // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT
    return bool(v.ctas_per_sm * (one + SMEM_RESERVED_BYTES) <= SMEM_PER_SM_BYTES)


CONSTRAINTS = (
    *not_yet(
        "sm90",
        "float16",
        "head_dim_v",
        "lse",
        "kv_shared",
        "causal",
        "window",
        "lengths",
        "sink",
        "sources",
        "gather",
        "paged",
        "varlen",
    ),
    Constraint(
        "pv_divides",
        "head_dim must be a multiple of pv_n_tile: every CTA owns whole column slices of V",
        lambda v: v.head_dim % v.pv_n_tile == 0,
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
        "registers",
        "S, P and O of a consumer thread (kv_tile / 2, kv_tile / 4 unless smem_p, pv_n_tile / 2 registers) must leave "
        "room in its share of the register file, or ptxas spills and serialises wgmma",
        lambda v: tile_registers(v) <= TILE_REGISTERS.get((consumers(v), v.ctas_per_sm), 0),
    ),
    Constraint(
        "smem_per_sm",
        "ctas_per_sm CTAs, each with the system's 1024 B, must fit the SM's 233472 B",
        lambda v: v.ctas_per_sm == 1 or _two_fit_an_sm(v),
    ),
)

_PLAIN = {"k_sub": 1, "kv_groups": 1, "cluster_m": 1, "ctas_per_sm": 1}
DEFAULTS = (
    {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 128, "kv_stage": 2, "smem_p": False, **_PLAIN},
    {"m_tile": 128, "pv_n_tile": 64, "kv_tile": 128, "kv_stage": 2, "smem_p": False, **_PLAIN},
    {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, "smem_p": False, **_PLAIN},
    {"m_tile": 64, "pv_n_tile": 256, "kv_tile": 64, "kv_stage": 1, "smem_p": False, **_PLAIN},
)


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .fmha_sm90 import make_fake_args, make_fmha

    p = b.problem
    shape = {"head_dim": p.head_dim, "heads": p.heads, "kv_heads": p.kv_heads, "normalize": p.normalize}
    return make_fmha(**shape, **b.tunables), make_fake_args(**shape)
