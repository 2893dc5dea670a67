"""The space of the paired sm_90a attention kernel (head_dim 512): tunables, rules and footprint, as plain arithmetic.

`v` is problem and tunables together; what each tunable does is told in fmha_sm90_pair.py.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

from .fmha_sm90_wide_space import (
    BARRIER_BYTES,
    BLOCK_ROWS,
    ELEMENT_BYTES,
    HEAD_DIM,
    STORAGE_ALIGNMENT,
    THREADS,
)

CLUSTER = 2
OWN_COLUMNS = HEAD_DIM // CLUSTER  # of O, a CTA
KV_TILE = 64
SLOTS = 6  # of both rings, each for 64 rows of Q, K or V by 256 columns
MESSAGES = 2  # of an owner, which hold P of its last tiles
WORD_BYTES = 4
# P of 64 x 64 in 16 bits, and what its rows' exponents start from.
MESSAGE_BYTES = BLOCK_ROWS * (KV_TILE * ELEMENT_BYTES + WORD_BYTES)
END_BYTES = BLOCK_ROWS * 3 * WORD_BYTES  # a row's last such start, and its sums
BARRIERS = 2 * SLOTS + (CLUSTER + 1) * MESSAGES + 1

TUNABLES = (
    Tunable("key_slots", (2, 3, 4)),
    Tunable("prefetch", (0, 1, 2)),
    Tunable("rescale_log2", (0, 8)),
)


def footprint(v: Values, arch: Arch) -> Footprint:
    """Dynamic shared memory (there is no static), threads and cluster of a CTA."""
    ring = SLOTS * KV_TILE * OWN_COLUMNS * ELEMENT_BYTES
    exchanged = CLUSTER * (MESSAGES * MESSAGE_BYTES + END_BYTES)
    total = ring + exchanged + BARRIERS * BARRIER_BYTES
    return Footprint(
        smem_bytes=-(-total // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT,
        tmem_columns=0,
        threads=THREADS,
        cluster=CLUSTER,
    )


CONSTRAINTS = (
    Constraint(
        "pair_columns",
        "two CTAs share the 512 columns of O: head_dim and head_dim_v must be 512",
        lambda v: v.head_dim == v.head_dim_v == HEAD_DIM,
    ),
    Constraint(
        "pair_page",
        "a KV tile of 64 keys lies within one page, so page must be a multiple of 64",
        lambda v: v.page % KV_TILE == 0,
    ),
    Constraint(
        "pair_prefetch",
        "tiles are prefetched into L2 where their place is known early: not through a page table",
        lambda v: v.prefetch == 0 or not v.page,
    ),
    Constraint(
        "pair_slots",
        "of one latent a pair's tiles have a part for scores alone and two for O: 2 slots for keys, and 4",
        lambda v: v.key_slots == 2 or not v.kv_shared,
    ),
    Constraint(
        "pair_dense",
        "threads of one CTA gather listed rows, and a pair's CTAs share what they load: no gather",
        lambda v: not v.gather,
    ),
    Constraint(
        "pair_normalized",
        "rows' exponents start from whole numbers, which are no row_max to merge by, so it needs normalize",
        lambda v: v.normalize,
    ),
)

DEFAULTS = ({"key_slots": 3, "prefetch": 0, "rescale_log2": 8}, {"key_slots": 2, "prefetch": 0, "rescale_log2": 8})


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .attention.arguments import make_fake_args
    from .fmha_sm90_pair import make_kernel

    return make_kernel(b.problem, b.tunables), make_fake_args(b.problem)
