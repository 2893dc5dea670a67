"""The space of the sm_100a attention kernel on pairs of CTAs (head_dim 512): tunables, rules and footprint.

`v` is problem and tunables together. It is the kernel of fmha_sm100.py with two CTAs' rows, 64 each, in one product of
128 (tcgen05's cta_group::2): each CTA holds half of a tile's keys of K, and half of the columns of V.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

from . import fmha_sm100_space as single

HEAD_DIM = 512
CTAS = 2
# What the kernel of one CTA has as tunables, and a pair has no choice of.
FIXED = {"m_tile": 64, "row_groups": 1, "pv_n_tile": HEAD_DIM, "k_sub": 1, "smem_p": True, "softmax_registers": 192}

TUNABLES = (
    Tunable("kv_tile", (64, 128)),
    Tunable("kv_stage", (1, 2)),
    Tunable("s_stage", (2, 1)),
    Tunable("rescale_log2", (0, 8)),
    Tunable("tma_o", (True, False)),
    Tunable("num_splits", (1, 2, 4, 8)),
)


def complete(v: Values) -> Values:
    """With the values that a pair has no choice of."""
    return Values({**v, **FIXED})


def smem_terms(v: Values) -> dict[str, int]:
    """Bytes of each part of a CTA's shared memory. K and V are apart even where V is K: a CTA multiplies by its half of
    K's keys and by all keys of its half of V's columns, and both CTAs must have a product's operand at one address."""
    freed_barrier, exchange = single.BARRIER_BYTES, 2 * single.GROUP_THREADS * single.WORD_BYTES
    whole = single.smem_terms(Values({**complete(v), "kv_shared": False}), more_header=freed_barrier + exchange)
    return {**whole, "k": whole["k"] // CTAS, "v": whole["v"] // CTAS}


def footprint(v: Values, arch: Arch) -> Footprint:
    """Dynamic shared memory (there is no static), allocated TMEM columns, threads and cluster of a CTA."""
    return Footprint(
        smem_bytes=sum(smem_terms(v).values()),
        tmem_columns=single.tmem_columns(complete(v)),
        threads=single.warp_groups(complete(v)) * single.GROUP_THREADS,
        cluster=CTAS,
    )


CONSTRAINTS = (
    Constraint(
        "pair_columns",
        "a pair is for O of 512 columns: head_dim and head_dim_v must be 512, narrower ones leave a CTA room",
        lambda v: v.head_dim == v.head_dim_v == HEAD_DIM,
    ),
    Constraint(
        "pair_rows",
        "a pair needs rows for both CTAs: t * heads / kv_heads > 64",
        lambda v: v.t * (v.heads // v.kv_heads) > FIXED["m_tile"],
    ),
    Constraint(
        "pair_gather",
        "threads of one CTA gather listed rows, and a pair takes keys and columns of both: no gather",
        lambda v: not v.gather,
    ),
    *(rule for rule in single.CONSTRAINTS if rule.name in ("page_tiles", "split_o", "split_tiles")),
)

BASE = {"kv_tile": 64, "kv_stage": 2, "s_stage": 2, "rescale_log2": 8, "tma_o": True, "num_splits": 1}
DEFAULTS = (BASE,)

workspace = single.workspace


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .attention.arguments import make_fake_args
    from .fmha_sm100 import make_pair_kernel

    return make_pair_kernel(b.problem, complete(b.tunables)), make_fake_args(b.problem, b.tunables.num_splits > 1)
