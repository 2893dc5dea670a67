"""What a variant of kernels/fmha_sm100.py takes of an SM, and which variants there are: arithmetic only.

Every number is exact: benchmarks/compile_fmha_sm100.py compares it with the traced and the compiled
kernel.
"""

M_TILE = 128
SMEM_LIMIT_BYTES = 232_448
TMEM_COLUMNS = 512
THREADS = 384
ALIGN_BYTES = 1024
BF16_BYTES = 2
BARRIER_BYTES = 8


def _tmem_stages(pv_n_tile: int, kv_tile: int, smem_p: bool) -> tuple[int, int, int]:
    """(s_stage, p_stage, columns in use): S, P (unless in SMEM) and O side by side."""
    p_columns = 0 if smem_p else kv_tile // 2
    s_stage = 2 if 2 * (kv_tile + p_columns) + pv_n_tile <= TMEM_COLUMNS else 1
    p_stage = 1 if smem_p else s_stage
    return s_stage, p_stage, s_stage * kv_tile + p_stage * p_columns + pv_n_tile


def footprint(
    *, head_dim: int, pv_n_tile: int, kv_tile: int, kv_stage: int, smem_p: bool, **_: object
) -> dict[str, object]:
    """smem_bytes (dynamic; static is 0), tmem_columns (allocated), threads, cluster (CTAs)."""
    s_stage, p_stage, columns = _tmem_stages(pv_n_tile, kv_tile, smem_p)
    # A full and an empty barrier a stage: Q and O one stage each, K and V kv_stage each, S, P.
    barriers_bytes = 2 * BARRIER_BYTES * (2 + 2 * kv_stage + s_stage + p_stage)
    tmem_base_bytes = 4
    statistics_bytes = 2 * M_TILE * 4
    header_bytes = barriers_bytes + tmem_base_bytes + statistics_bytes
    header_bytes = -(-header_bytes // ALIGN_BYTES) * ALIGN_BYTES
    q_bytes = M_TILE * head_dim * BF16_BYTES
    k_bytes = kv_stage * kv_tile * head_dim * BF16_BYTES
    v_bytes = kv_stage * kv_tile * pv_n_tile * BF16_BYTES
    p_bytes = p_stage * M_TILE * kv_tile * BF16_BYTES if smem_p else 0
    return {
        "smem_bytes": header_bytes + q_bytes + k_bytes + v_bytes + p_bytes,
        "tmem_columns": max(32, 1 << (columns - 1).bit_length()),
        "threads": THREADS,
        "cluster": 1,
    }


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


# (name, sentence, predicate over a variant's scalars): the predicate is true for a valid variant.
constraints = [
    (
        "head-dim",
        "head_dim is 64, 128, 256 or 512.",
        lambda v: v["head_dim"] in (64, 128, 256, 512),
    ),
    (
        "m-tile",
        "m_tile is 128 on sm_100a: the 64-row tcgen05 forms are not yet covered.",
        lambda v: v.get("m_tile", M_TILE) == M_TILE,
    ),
    (
        "heads-divide",
        "heads is a multiple of kv_heads.",
        lambda v: v["kv_heads"] > 0 and v["heads"] > 0 and v["heads"] % v["kv_heads"] == 0,
    ),
    (
        "gqa-ratio",
        "heads / kv_heads is a power of two: the query tile packs whole heads, and TMA tiles only such a packing.",
        lambda v: v["kv_heads"] > 0 and _power_of_two(v["heads"] // v["kv_heads"]),
    ),
    (
        "kv-tile",
        "kv_tile is 64 or 128: a softmax thread holds a whole row of the tile in registers, and "
        "P moves 64 keys (32 columns) at a time.",
        lambda v: v["kv_tile"] in (64, 128),
    ),
    (
        "pv-n-tile",
        "pv_n_tile is 64, 128 or 256 (tcgen05.mma's N is at most 256).",
        lambda v: v["pv_n_tile"] in (64, 128, 256),
    ),
    (
        "pv-n-tile-divides",
        "pv_n_tile divides head_dim.",
        lambda v: v["head_dim"] % v["pv_n_tile"] == 0,
    ),
    ("kv-stage", "kv_stage is at least 1.", lambda v: v["kv_stage"] >= 1),
    (
        "smem-fit",
        f"Q, the stages of K and V, and P fit the {SMEM_LIMIT_BYTES} bytes of shared memory a CTA has on sm_100a.",
        lambda v: footprint(**v)["smem_bytes"] <= SMEM_LIMIT_BYTES,
    ),
]
