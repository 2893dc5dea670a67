"""Footprint and constraints of the sm_90a attention kernel (``kernels/fmha_sm90.py``), as plain arithmetic.

Every function takes the kernel's own scalars as keywords; the optional ones have the kernel's defaults.
"""

from collections.abc import Callable

BLOCK_ROWS = 64
WARP_GROUP_THREADS = 128
BF16_BYTES = 2
STORAGE_ALIGNMENT = 1024  # of swizzled tiles, and so of the whole storage
SMEM_PER_CTA_BYTES = 232_448
SMEM_PER_SM_BYTES = 233_472
SMEM_RESERVED_BYTES = 1024  # by the system, per resident CTA
# S + P + O registers a consumer thread can hold before ptxas spills, by (consumer warp groups, CTAs on one SM).
# Read from ptxas over the whole space.
TILE_REGISTERS = {(1, 1): 216, (1, 2): 192, (2, 1): 216, (3, 1): 128}

OPTIONAL = {"k_stage": 0, "k_sub": 1, "kv_groups": 1, "cluster_m": 1, "ctas_per_sm": 1}


def _complete(variant: dict) -> dict:
    full = {**OPTIONAL, **variant}
    full["k_stage"] = full["k_stage"] or full["kv_stage"] * full["k_sub"]
    return full


def consumers(v: dict) -> int:
    """Consumer warp groups of a CTA."""
    return v["m_tile"] // BLOCK_ROWS * v.get("kv_groups", 1)


def smem_terms(**variant) -> dict[str, int]:
    """Bytes of each part of the CTA's shared memory; O reuses Q, and the groups' exchange reuses K and V."""
    v = _complete(variant)
    return {
        "q": v["m_tile"] * v["head_dim"] * BF16_BYTES,
        "k": v["k_stage"] * v["kv_tile"] * (v["head_dim"] // v["k_sub"]) * BF16_BYTES,
        "v": v["kv_stage"] * v["kv_tile"] * v["pv_n_tile"] * BF16_BYTES,
        "p": consumers(v) * BLOCK_ROWS * v["kv_tile"] * BF16_BYTES if v["smem_p"] else 0,
        "barriers": 8 * 2 * (1 + v["k_stage"] + v["kv_stage"]),
    }


def footprint(**variant) -> dict:
    """Dynamic shared memory (bytes), TMEM columns, threads a CTA and cluster shape."""
    v = _complete(variant)
    total = sum(smem_terms(**variant).values())
    return {
        "smem_bytes": -(-total // STORAGE_ALIGNMENT) * STORAGE_ALIGNMENT,
        "tmem_columns": 0,
        "threads": WARP_GROUP_THREADS * (1 + consumers(v)),
        "cluster": (v["cluster_m"], 1, 1),
    }


def tile_registers(**variant) -> int:
    """Registers of one consumer thread for S, P and O, which are live together."""
    v = _complete(variant)
    return v["kv_tile"] // 2 + v["pv_n_tile"] // 2 + (0 if v["smem_p"] else v["kv_tile"] // 4)


def _exchange_fits(v: dict) -> bool:
    terms = smem_terms(**v)
    return terms["k"] + terms["v"] >= 4 * WARP_GROUP_THREADS * (v["pv_n_tile"] // 2 + 4)


CONSTRAINTS: list[tuple[str, str, Callable[[dict], bool]]] = [
    (
        "heads_divide",
        "the query heads must be a multiple of the KV heads",
        lambda v: v["heads"] % v["kv_heads"] == 0,
    ),
    (
        "pv_divides",
        "head_dim must be a multiple of pv_n_tile: every CTA owns whole column slices of V",
        lambda v: v["head_dim"] % v["pv_n_tile"] == 0,
    ),
    (
        "k_parts",
        "a K stage holds whole 64-column blocks (head_dim % (64 * k_sub) == 0), and a tile's parts must be resident at "
        "once (k_stage >= k_sub)",
        lambda v: v["head_dim"] % (64 * v["k_sub"]) == 0 and v["k_stage"] >= v["k_sub"],
    ),
    (
        "residency",
        "two CTAs share an SM, and two warp groups a row block, only at m_tile 64, and not both at once; with two CTAs "
        "the kernel starts with 128 registers a thread, which a wgmma 256 columns wide does not fit",
        lambda v: (
            (v["ctas_per_sm"] == 1 and v["kv_groups"] == 1)
            or (v["m_tile"] == 64 and v["ctas_per_sm"] == 1 and v["kv_groups"] == 2)
            or (v["m_tile"] == 64 and v["ctas_per_sm"] == 2 and v["kv_groups"] == 1 and v["pv_n_tile"] <= 128)
        ),
    ),
    (
        "group_stages",
        "a ring stage must always serve the same KV group, or a group would miss a phase of its barrier: kv_stage and "
        "k_stage / k_sub are multiples of kv_groups",
        lambda v: (
            v["kv_groups"] == 1
            or (v["kv_stage"] % v["kv_groups"] == 0 and v["k_stage"] % (v["kv_groups"] * v["k_sub"]) == 0)
        ),
    ),
    (
        "group_exchange",
        "two KV groups exchange O in float32 through the spent K and V rings, which must hold 64 x pv_n_tile of it",
        lambda v: v["kv_groups"] == 1 or _exchange_fits(v),
    ),
    (
        "registers",
        "S, P and O of a consumer thread (kv_tile / 2 + kv_tile / 4 unless smem_p + pv_n_tile / 2 registers) must fit "
        "its share of the register file, or ptxas spills and serialises wgmma",
        lambda v: tile_registers(**v) <= TILE_REGISTERS.get((consumers(v), v["ctas_per_sm"]), 0),
    ),
    (
        "smem",
        "Q, the K and V rings, P and the barriers must fit the CTA's 232448 bytes",
        lambda v: footprint(**v)["smem_bytes"] <= SMEM_PER_CTA_BYTES,
    ),
    (
        "smem_per_sm",
        "ctas_per_sm CTAs, each with the system's 1024 bytes, must fit the SM's 233472 bytes",
        lambda v: v["ctas_per_sm"] * (footprint(**v)["smem_bytes"] + SMEM_RESERVED_BYTES) <= SMEM_PER_SM_BYTES,
    ),
]


def violated(**variant) -> str | None:
    """Name of the first constraint that the variant breaks, or None."""
    v = _complete(variant)
    return next((name for name, _, holds in CONSTRAINTS if not holds(v)), None)
