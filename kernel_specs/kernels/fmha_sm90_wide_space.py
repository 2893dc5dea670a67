"""The space of the wide sm_90a attention kernel (head_dim 512): tunables, rules and footprint, as plain arithmetic.

`v` is problem and tunables together; what each tunable does is told in fmha_sm90_wide.py.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

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
    Tunable("prefetch", (0, 1, 2, 4)),
    Tunable("rescale_log2", (0, 8)),
    Tunable("num_splits", (1, 2, 3, 4, 6, 8, 16, 32, 64)),
    Tunable("merge", ("none", "cluster", "kernel")),
)


def fixed_bytes(v: Values) -> int:
    """Shared memory besides the ring: Q (O reuses it), P of both warp groups, statistics, Q's barriers, a gathered
    tile's bits in 8 buffers."""
    present = int(v.kv_tile) if v.gather else 0
    return BLOCK_ROWS * (HEAD_DIM + 2 * int(v.kv_tile)) * ELEMENT_BYTES + STATISTICS_BYTES + present + 2 * BARRIER_BYTES


def slot_bytes(v: Values) -> int:
    """A part of a tile, and its two barriers."""
    return int(v.kv_tile * v.part_columns) * ELEMENT_BYTES + 2 * BARRIER_BYTES


def slots(v: Values) -> int:
    """Parts in the ring: as many as fit. With K and V apart, a slot always serves the same warp group's part of V, and
    so never has a phase of its barrier pass that the group does not wait for: a multiple of a tile of each."""
    most = (SMEM_BYTES - fixed_bytes(v)) // slot_bytes(v)
    pair = 2 * HEAD_DIM // int(v.part_columns)
    return most if v.kv_shared else most // pair * pair


def cluster(v: Values) -> int:
    """CTAs of a cluster: neighbouring row blocks, and the splits that merge there."""
    return int(v.cluster_m * (v.num_splits if v.merge == "cluster" else 1))


def footprint(v: Values, arch: Arch) -> Footprint:
    """Dynamic shared memory (there is no static), threads and cluster of a CTA."""
    total = fixed_bytes(v) + slots(v) * slot_bytes(v)
    return Footprint(
        smem_bytes=-(-total // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT,
        tmem_columns=0,
        threads=THREADS,
        cluster=cluster(v),
    )


CONSTRAINTS = (
    Constraint(
        "wide",
        "two warp groups share the 512 columns of O: head_dim and head_dim_v must be 512",
        lambda v: v.head_dim == v.head_dim_v == HEAD_DIM,
    ),
    Constraint(
        "page_tile",
        "a KV tile lies within one page, so page must be a multiple of kv_tile",
        lambda v: v.page % v.kv_tile == 0,
    ),
    Constraint(
        "prefetch_dense",
        "tiles are prefetched into L2 where their place is known early: neither through a page table nor gathered",
        lambda v: v.prefetch == 0 or not (v.page or v.gather),
    ),
    Constraint(
        "lazy_final",
        "a maximum that lags behind (rescale_log2 > 0) is no row_max to merge by, so it needs normalize",
        lambda v: v.rescale_log2 == 0 or v.normalize,
    ),
    Constraint(
        "merge_splits",
        "splits of the KV tiles meet in a cluster or in a merge kernel; one split has nothing to merge",
        lambda v: (v.num_splits == 1) == (v.merge == "none"),
    ),
    Constraint(
        "cluster_size",
        "a cluster of cluster_m row blocks, times the splits that merge in it, has 16 CTAs at most",
        lambda v: cluster(v) <= 16,
    ),
    Constraint(
        "gather_rows",
        "all rows of a block read one token's list: with gather, the query heads of a KV head must be a multiple of 64",
        lambda v: not v.gather or v.heads // v.kv_heads % BLOCK_ROWS == 0,
    ),
    Constraint(
        "gather_multicast",
        "what threads gather cannot be multicast: with gather, cluster_m must be 1",
        lambda v: not v.gather or v.cluster_m == 1,
    ),
)

_PLAIN = {"kv_tile": 64, "part_columns": 128, "cluster_m": 1, "prefetch": 0, "num_splits": 1, "merge": "none"}
DEFAULTS = ({**_PLAIN, "rescale_log2": 8}, {**_PLAIN, "rescale_log2": 0})


def workspace(v: Values, arch: Arch) -> int:
    """Float32 elements of the partial results that a merge kernel needs."""
    from .attention.workspace import elements

    if v.merge != "kernel":
        return 0
    tokens = v.total_t if v.varlen else v.batch * v.t
    return elements(tokens * v.heads, v.num_splits, HEAD_DIM)


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .attention.arguments import make_fake_args
    from .fmha_sm90_wide import make_kernel

    return make_kernel(b.problem, b.tunables), make_fake_args(b.problem, workspace=b.tunables.merge == "kernel")
