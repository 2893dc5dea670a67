"""The space of the sm_100a attention kernel: tunables, rules and footprint, as plain arithmetic.

`v` is problem and tunables together; what each tunable does is told in fmha_sm100.py.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

from ..attention.missing import not_yet

M_TILE = 128
TMEM_COLUMNS = 512
THREADS = 384
ALIGN_BYTES = 1024
BF16_BYTES = 2
BARRIER_BYTES = 8

TUNABLES = (
    Tunable("pv_n_tile", (64, 128, 256)),
    Tunable("kv_tile", (64, 128)),
    Tunable("kv_stage", (1, 2, 3, 4)),
    Tunable("smem_p", (False, True)),
)


def tmem_stages(v: Values) -> tuple[int, int, int]:
    """(S stages, P stages, TMEM columns in use): S, P (unless in shared memory) and O side by side."""
    p_columns = 0 if v.smem_p else v.kv_tile // 2
    s_stage = 2 if 2 * (v.kv_tile + p_columns) + v.pv_n_tile <= TMEM_COLUMNS else 1
    p_stage = 1 if v.smem_p else s_stage
    return s_stage, p_stage, s_stage * v.kv_tile + p_stage * p_columns + v.pv_n_tile


def smem_terms(v: Values) -> dict[str, int]:
    """Bytes of each part of a CTA's shared memory."""
    s_stage, p_stage, _ = tmem_stages(v)
    # A full and an empty barrier a stage: Q and O one stage each, K and V kv_stage each, S, P.
    barriers = 2 * BARRIER_BYTES * (2 + 2 * v.kv_stage + s_stage + p_stage)
    tmem_base, statistics = 4, 2 * M_TILE * 4
    header = barriers + tmem_base + statistics
    return {
        "header": -(-header // ALIGN_BYTES) * ALIGN_BYTES,
        "q": M_TILE * v.head_dim * BF16_BYTES,
        "k": v.kv_stage * v.kv_tile * v.head_dim * BF16_BYTES,
        "v": v.kv_stage * v.kv_tile * v.pv_n_tile * BF16_BYTES,
        "p": p_stage * M_TILE * v.kv_tile * BF16_BYTES if v.smem_p else 0,
    }


def footprint(v: Values, arch: Arch) -> Footprint:
    """Dynamic shared memory (there is no static), allocated TMEM columns, threads and cluster of a CTA."""
    _, _, columns = tmem_stages(v)
    return Footprint(
        smem_bytes=sum(smem_terms(v).values()),
        tmem_columns=max(32, 1 << (columns - 1).bit_length()),
        threads=THREADS,
        cluster=1,
    )


CONSTRAINTS = (
    *not_yet(
        "sm100",
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
        "gqa_ratio",
        "heads / kv_heads must be a power of two: the query tile packs whole heads, and TMA tiles only such a packing",
        lambda v: (v.heads // v.kv_heads) & (v.heads // v.kv_heads - 1) == 0,
    ),
    Constraint(
        "pv_divides",
        "head_dim must be a multiple of pv_n_tile: every CTA owns whole column slices of V",
        lambda v: v.head_dim % v.pv_n_tile == 0,
    ),
)

DEFAULTS = (
    {"pv_n_tile": 128, "kv_tile": 128, "kv_stage": 2, "smem_p": False},
    {"pv_n_tile": 64, "kv_tile": 128, "kv_stage": 2, "smem_p": False},
    {"pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, "smem_p": False},
    {"pv_n_tile": 128, "kv_tile": 64, "kv_stage": 1, "smem_p": False},
)


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .fmha_sm100 import make_fake_args, make_kernel

    p = b.problem
    shape = {"head_dim": p.head_dim, "heads": p.heads, "kv_heads": p.kv_heads, "normalize": p.normalize}
    return make_kernel(**shape, **b.tunables), make_fake_args(**shape)
