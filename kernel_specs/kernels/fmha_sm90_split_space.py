"""The space of the sm_90a attention kernel with split KV: decode, where a row block alone can't fill the GPU.

An implementation of its own beside sm90, with the same kernel: what pays with many queries (multicast, P in shared
memory, parts of K, lazy rescaling) is fixed here, and `v` has the rest of fmha_sm90_space.py's tunables. In addition
`num_splits` CTAs share a row block's KV tiles, evenly; `merge`: they are a cluster and meet in its shared memory, or
leave partial results in the workspace to a second kernel.
"""

from __future__ import annotations

from typing import Any

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

from . import fmha_sm90_space as plain
from .attention.workspace import STATISTICS, elements

MOST_CLUSTER_CTAS = 16  # needs the non-portable size
FEWEST_KERNEL_SPLITS = 4
FLOAT_BYTES = 4
FIXED = Values({"smem_p": False, "k_sub": 1, "cluster_m": 1, "rescale_log2": 0, "schedule": "static"})

TUNABLES = (
    Tunable("m_tile", (64, 128)),
    Tunable("pv_n_tile", (64, 128, 256)),
    Tunable("kv_tile", (64, 128)),
    Tunable("kv_stage", (1, 2, 4)),
    Tunable("kv_groups", (1, 2)),
    Tunable("ctas_per_sm", (1, 2)),
    Tunable("num_splits", (2, 3, 4, 5, 8, 16, 32, 64)),
    Tunable("merge", ("cluster", "kernel")),
)


def footprint(v: Values, arch: Arch) -> Footprint:
    """That of the kernel that walks the tiles; the one that merges needs less of everything."""
    found = plain.footprint(v.merged(FIXED), arch)
    cluster = v.num_splits if v.merge == "cluster" else 1
    return Footprint(found.smem_bytes, found.tmem_columns, found.threads, cluster)


def workspace(v: Values, arch: Arch) -> int:
    """Float32 elements of the partial results that a merge kernel reads."""
    if v.merge == "cluster":
        return 0
    tokens = v.total_t if v.varlen else v.batch * v.t
    return elements(tokens * v.heads, v.num_splits, v.head_dim_v)


def _exchange_fits(v: Values) -> bool:
    terms = plain.smem_terms(v.merged(FIXED))
    needed = FLOAT_BYTES * v.m_tile * v.kv_groups * (v.pv_n_tile + STATISTICS)
    return bool(terms["q"] + terms["k"] + terms["v"] >= needed)


CONSTRAINTS = (
    Constraint(
        "split_cluster",
        "merged in a cluster, the splits are its CTAs: 16 at most",
        lambda v: v.merge != "cluster" or v.num_splits <= MOST_CLUSTER_CTAS,
    ),
    Constraint(
        "split_kernel",
        "a merge kernel is a second launch, which 2 or 3 splits don't pay for: it merges 4 at least",
        lambda v: v.merge != "kernel" or v.num_splits >= FEWEST_KERNEL_SPLITS,
    ),
    Constraint(
        "split_exchange",
        "the CTAs of a cluster exchange O and its statistics in float32 through their spent Q, K and V, which must "
        "hold those of every KV group",
        lambda v: v.merge != "cluster" or _exchange_fits(v),
    ),
    *(Constraint(rule.name, rule.why, lambda v, rule=rule: rule.holds(v.merged(FIXED))) for rule in plain.CONSTRAINTS),
)

_ONE = {"ctas_per_sm": 1, "kv_groups": 1}
DEFAULTS = (
    {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, "num_splits": 4, "merge": "cluster", **_ONE},
    {"m_tile": 128, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, "num_splits": 4, "merge": "cluster", **_ONE},
    {"m_tile": 64, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 1, "num_splits": 4, "merge": "cluster", **_ONE},
    {"m_tile": 64, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 1, "num_splits": 4, "merge": "cluster", **_ONE},
)


def build(b: Build) -> tuple[Any, Any]:
    """The kernels and their compile arguments."""
    from .attention.arguments import make_fake_args
    from .fmha_sm90 import make_kernel

    tunables = b.tunables.merged(FIXED)
    return make_kernel(b.problem, tunables), make_fake_args(b.problem, workspace=b.tunables.merge == "kernel")
