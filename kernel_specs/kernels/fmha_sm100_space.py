"""The space of the sm_100a attention kernel: tunables, rules and footprint, as plain arithmetic.

`v` is problem and tunables together; what each tunable does is told in fmha_sm100.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tunekit.arch import Arch
from tunekit.model import Footprint, Values
from tunekit.spec import Build, Constraint, Tunable

from .attention.workspace import elements

TMEM_COLUMNS = 512
GROUP_THREADS = 128
ALIGN_BYTES = 1024
ELEMENT_BYTES = 2
WORD_BYTES = 4
BARRIER_BYTES = 8
NARROW_REGISTERS = 168  # of a softmax thread with 64 scores or less

TUNABLES = (
    Tunable("m_tile", (128, 64)),
    Tunable("row_groups", (1, 2)),
    Tunable("pv_n_tile", (64, 128, 256, 512)),
    Tunable("kv_tile", (64, 128)),
    Tunable("kv_stage", (1, 2, 3, 4)),
    Tunable("k_sub", (1, 2)),
    Tunable("s_stage", (2, 1)),
    Tunable("smem_p", (False, True)),
    Tunable("rescale_log2", (0, 8)),
    Tunable("tma_o", (True, False)),
    Tunable("num_splits", (1, 2, 4, 8)),
    Tunable("softmax_registers", (192, 200)),
)


def halves(v: Values) -> int:
    """Column halves of an accumulator: one of 64 rows leaves 16 of each warp's 32 lanes free, for its second half."""
    return 2 if v.m_tile == 64 else 1


class Columns(NamedTuple):
    """TMEM columns: where S, P and O begin; from one stage of P to the next; stages of P; how many are in use; whether
    QK(i + 1) may be issued before PV(i)."""

    s: int
    p: int
    o: int
    p_stride: int
    p_stage: int
    used: int
    qk_first: bool


def columns(v: Values) -> Columns:
    """S, P (unless in shared memory) and O side by side, a stage for each softmax group; where that does not fit, or
    two groups share the columns, P lies in the columns of its own S, which nobody needs by then."""
    s_columns, o_columns = v.kv_tile // halves(v), v.pv_n_tile // halves(v)
    s_all, o_all = v.row_groups * v.s_stage * s_columns, v.row_groups * o_columns
    if v.smem_p:
        # A second stage of P in shared memory would cost a stage of K and V, and PV(i) starts well before
        # softmax(i + 1) has its P to store.
        return Columns(0, 0, s_all, 0, 1, s_all + o_all, True)
    p_columns = v.kv_tile // 2
    p_all = v.row_groups * v.s_stage * p_columns
    if v.row_groups == 1 and s_all + p_all + o_all <= TMEM_COLUMNS:
        return Columns(0, s_all, s_all + p_all, p_columns, v.s_stage, s_all + p_all + o_all, True)
    qk_first = v.row_groups == 1 and v.s_stage == 2
    return Columns(0, 0, s_all, s_columns, v.s_stage, s_all + o_all, qk_first)


def tmem_columns(v: Values) -> int:
    """The columns that are allocated: a power of two."""
    return max(32, 1 << (columns(v).used - 1).bit_length())


def warp_groups(v: Values) -> int:
    """Softmax groups, one of correction, one that issues, and one that gathers."""
    return v.row_groups + 2 + bool(v.gather)


def registers(v: Values) -> tuple[int, int, int, int]:
    """Registers of a softmax, a correction, an issue and a gathering thread.

    At launch each thread has an equal share of 65,536, rounded down to eights; setmaxnreg hands the same sum out anew.
    A softmax thread holds a row of S (up to 128 registers) and of 16-bit P (up to 64); the MMA thread keeps the
    descriptors of all k-steps (at head_dim 512 it spilt with 144, at 64 and 128 it needs 48); a correction thread
    holds 32 columns of O.
    """
    groups = warp_groups(v)
    softmax = v.softmax_registers if v.kv_tile // halves(v) == 128 or v.row_groups == 2 else NARROW_REGISTERS
    left = groups * (65536 // (groups * GROUP_THREADS) // 8 * 8) - v.row_groups * softmax
    if v.gather:
        return softmax, 80, left - 80 - 104, 104
    correction = 80 if v.row_groups == 2 else max(128, left - 184)
    return softmax, correction, left - correction, 0


def smem_terms(v: Values, more_header: int = 0) -> dict[str, int]:
    """Bytes of each part of a CTA's shared memory; ``more_header``: of what lies in the header besides."""
    p_stages, s_stages = v.row_groups * columns(v).p_stage, v.row_groups * v.s_stage
    # Q's one; a full and an empty barrier a stage of K, V (unless it is K), S, P and O; two boundary barriers.
    kv_rings = 1 if v.kv_shared else 2
    barriers = BARRIER_BYTES * (1 + 2 * (kv_rings * v.kv_stage + s_stages + p_stages + v.row_groups) + 2)
    tmem_base, factors = 4, v.row_groups * GROUP_THREADS * WORD_BYTES
    header = barriers + tmem_base + factors + more_header
    q_columns = max(v.head_dim, v.pv_n_tile)
    return {
        "header": -(-header // ALIGN_BYTES) * ALIGN_BYTES,
        "q": v.row_groups * v.m_tile * q_columns * ELEMENT_BYTES,
        "k": v.kv_stage * v.kv_tile * (v.head_dim // v.k_sub) * ELEMENT_BYTES,
        "v": 0 if v.kv_shared else v.kv_stage * v.kv_tile * v.pv_n_tile * ELEMENT_BYTES,
        "p": p_stages * v.m_tile * v.kv_tile * ELEMENT_BYTES if v.smem_p else 0,
    }


def footprint(v: Values, arch: Arch) -> Footprint:
    """Dynamic shared memory (there is no static), allocated TMEM columns, threads and cluster of a CTA."""
    return Footprint(
        smem_bytes=sum(smem_terms(v).values()),
        tmem_columns=tmem_columns(v),
        threads=warp_groups(v) * GROUP_THREADS,
        cluster=1,
    )


def workspace(v: Values, arch: Arch) -> int:
    """Float32 elements that the splits of the keys leave for the merge."""
    if v.num_splits == 1:
        return 0
    tokens = v.total_t if v.varlen else v.batch * v.t
    return elements(tokens * v.heads, v.num_splits, v.head_dim_v)


def _keys(v: Values) -> int:
    """Keys or entries of all sources."""
    return (0 if v.gather and v.sources == 1 else v.s_k) + (v.top_k or v.s_k2)


CONSTRAINTS = (
    Constraint(
        "pv_divides",
        "head_dim_v must be a multiple of pv_n_tile: every CTA owns whole column slices of V",
        lambda v: v.head_dim_v % v.pv_n_tile == 0,
    ),
    Constraint(
        "p_in_smem",
        "with m_tile=64 P must be in shared memory (smem_p): in tensor memory its rows would be needed in all lanes",
        lambda v: v.m_tile == 128 or v.smem_p,
    ),
    Constraint(
        "half_columns",
        "with m_tile=64 pv_n_tile must be at least 128: each half of the lanes takes whole 64-column blocks of V",
        lambda v: v.m_tile == 128 or v.pv_n_tile >= 128,
    ),
    Constraint(
        "mma_n",
        "a product has at most 256 columns: pv_n_tile=512 needs m_tile=64, whose accumulators come in two halves",
        lambda v: v.m_tile == 64 or v.pv_n_tile <= 256,
    ),
    Constraint(
        "two_groups",
        "row_groups=2 is for m_tile=128, s_stage=1 (each group has its own S) and rows without a list of their own",
        lambda v: v.row_groups == 1 or (v.m_tile == 128 and v.s_stage == 1 and not v.gather),
    ),
    Constraint(
        "two_groups_of_rows",
        "row_groups=2 needs more rows than one group has: t * heads / kv_heads > m_tile",
        lambda v: v.row_groups == 1 or v.t * (v.heads // v.kv_heads) > v.m_tile,
    ),
    Constraint(
        "two_groups_ahead",
        "row_groups=2 issues the QK products of the next tile early: kv_shared needs two stages for that",
        lambda v: v.row_groups == 1 or not v.kv_shared or v.kv_stage > 1,
    ),
    Constraint(
        "sub_tiles",
        "k_sub splits K alone, at head_dim 512 and one row group: narrower tiles fit, and a shared tile is V too",
        lambda v: v.k_sub == 1 or (v.head_dim == 512 and not v.kv_shared and v.row_groups == 1),
    ),
    Constraint(
        "page_tiles",
        "page must be a multiple of kv_tile: a TMA box lies within one page",
        lambda v: v.page % v.kv_tile == 0,
    ),
    Constraint(
        "split_o",
        "tma_o stages the final O: with num_splits > 1 the merge writes it, so only tma_o=False",
        lambda v: v.num_splits == 1 or not v.tma_o,
    ),
    Constraint(
        "split_once",
        "num_splits is for work that leaves multiprocessors idle: one row group",
        lambda v: v.num_splits == 1 or v.row_groups == 1,
    ),
    Constraint(
        "split_tiles",
        "num_splits must leave each CTA a KV tile: at most one split a tile of the visible keys",
        lambda v: v.num_splits == 1 or v.num_splits * v.kv_tile <= _keys(v),
    ),
    Constraint(
        "score_registers",
        "more than 192 registers are for the threads of one softmax group that hold a row of 128 scores",
        lambda v: v.softmax_registers == 192 or (v.row_groups == 1 and v.kv_tile // halves(v) == 128),
    ),
    Constraint(
        "score_stages",
        "with one score tile the tensor core waits: s_stage=1 is for two row groups, or O of 256 TMEM columns",
        lambda v: v.s_stage == 2 or v.row_groups == 2 or v.pv_n_tile // halves(v) == 256,
    ),
    Constraint(
        "kv_stages",
        "with one stage of K and V the tensor core waits: kv_stage=1 is for where two may not fit: head_dim 256, 512",
        lambda v: v.kv_stage > 1 or v.head_dim >= 256,
    ),
)

BASE = {
    "m_tile": 128,
    "row_groups": 1,
    "pv_n_tile": 128,
    "kv_tile": 128,
    "kv_stage": 2,
    "k_sub": 1,
    "s_stage": 2,
    "smem_p": False,
    "rescale_log2": 8,
    "tma_o": True,
    "num_splits": 1,
    "softmax_registers": 192,
}
TWO_GROUPS = {**BASE, "row_groups": 2, "s_stage": 1}
HALF_ROWS = {**BASE, "m_tile": 64, "kv_tile": 64, "smem_p": True}
# In this order: many rows; 512 columns of V in one CTA; then by what fits.
DEFAULTS = (
    {**TWO_GROUPS, "pv_n_tile": 128},
    {**TWO_GROUPS, "pv_n_tile": 64, "kv_stage": 3},
    {**HALF_ROWS, "pv_n_tile": 512},
    {**HALF_ROWS, "pv_n_tile": 512, "kv_stage": 1},
    {**BASE, "kv_tile": 64, "pv_n_tile": 256},
    {**BASE, "pv_n_tile": 128},
    {**BASE, "pv_n_tile": 64},
    {**BASE, "kv_tile": 64, "pv_n_tile": 128},
    {**BASE, "kv_tile": 64, "pv_n_tile": 128, "kv_stage": 1},
    {**BASE, "kv_tile": 64, "pv_n_tile": 64, "kv_stage": 2},
    {**BASE, "kv_tile": 64, "pv_n_tile": 64, "kv_stage": 1},
)


def build(b: Build) -> tuple[Any, Any]:
    """The kernel and its compile arguments."""
    from .attention.arguments import make_fake_args
    from .fmha_sm100 import make_kernel

    return make_kernel(b.problem, b.tunables), make_fake_args(b.problem, b.tunables.num_splits > 1)
