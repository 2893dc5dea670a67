"""The space of the wide sm_90a attention kernel (head_dim 512): tunables, rules and footprint, as plain arithmetic.

`v` is problem and tunables together; what each tunable does is told in fmha_sm90_wide.py.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

from ..attention.missing import not_yet

HEAD_DIM = 512
BLOCK_ROWS = 64
THREADS = 3 * 128
ELEMENT_BYTES = 2
BARRIER_BYTES = 8
STATISTICS_BYTES = 2 * 4 * (BLOCK_ROWS + 2 * 128)  # of both warp groups: the rows' maxima, each thread's two sums
STORAGE_ALIGNMENT = 1024  # of swizzled tiles, and so of the whole storage
SMEM_BYTES = 232_448  # of a CTA of sm_90a

TUNABLES = (
    Tunable("kv_tile", (64, 32)),
    Tunable("part_columns", (128, 256)),
    Tunable("cluster_m", (1, 2)),
    Tunable("rescale_log2", (0, 8)),
)


def fixed_bytes(v: Values) -> int:
    """Shared memory besides the ring: Q (O reuses it), P of both warp groups, statistics, Q's barriers."""
    return BLOCK_ROWS * (HEAD_DIM + 2 * int(v.kv_tile)) * ELEMENT_BYTES + STATISTICS_BYTES + 2 * BARRIER_BYTES


def slot_bytes(v: Values) -> int:
    """A part of a tile, and its two barriers."""
    return int(v.kv_tile * v.part_columns) * ELEMENT_BYTES + 2 * BARRIER_BYTES


def slots(v: Values) -> int:
    """Parts in the ring: as many as fit."""
    return (SMEM_BYTES - fixed_bytes(v)) // slot_bytes(v)


def footprint(v: Values, arch: Arch) -> Footprint:
    """Dynamic shared memory (there is no static), threads and cluster of a CTA."""
    total = fixed_bytes(v) + slots(v) * slot_bytes(v)
    return Footprint(
        smem_bytes=-(-total // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT,
        tmem_columns=0,
        threads=THREADS,
        cluster=int(v.cluster_m),
    )


CONSTRAINTS = (
    Constraint(
        "wide",
        "two warp groups share the 512 columns of O: head_dim and head_dim_v must be 512",
        lambda v: v.head_dim == v.head_dim_v == HEAD_DIM,
    ),
    *not_yet("sm90_wide", "gather"),
)

DEFAULTS = ({"kv_tile": 64, "part_columns": 128, "cluster_m": 1, "rescale_log2": 0},)


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .attention.arguments import make_fake_args
    from .fmha_sm90_wide import make_kernel

    return make_kernel(b.problem, b.tunables), make_fake_args(b.problem)
