"""flash-attn-4's forward on sm_100a, called as its users call it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: `heads` query heads share `kv_heads` key and value heads."""

    head_dim: int
    causal: bool
    heads: int = 2
    kv_heads: int = 2
    seqlen_q: int = 256
    seqlen_k: int = 256
    dtype: str = "bfloat16"
    arch: str = "sm_100a"
    outputs: tuple[int, ...] = (3, 4)


CASES = {
    "fa4_d64": Case(64, False),
    "fa4_d64_causal": Case(64, True),
    "fa4_d128": Case(128, False),
    "fa4_d128_causal": Case(128, True),
    "fa4_d128_causal_gqa": Case(128, True, heads=4, kv_heads=2),
    "fa4_d64_gqa": Case(64, False, heads=4, kv_heads=1, seqlen_q=128, seqlen_k=200),
    "fa4_d128_2cta": Case(128, False, heads=1, kv_heads=1, seqlen_q=512),
    "fa4_d128_fp8": Case(128, False, dtype="float8_e4m3fn"),
    "fa4_sm90_d64_causal": Case(64, True, arch="sm_90a"),
    "fa4_sm90_d128": Case(128, False, arch="sm_90a"),
}


# Relative norms. P and the output are rounded to bf16 (half an ulp is 2^-9 of a value); with fp8, P to e4m3 (2^-4).
LIMITS = {"bfloat16": 3e-3, "float8_e4m3fn": 4e-2}


def run(case: Case, seed: int) -> list[tuple[str, Any, Any, float]]:
    """Call the package; name, result, oracle and limit of each output."""
    import torch
    from flash_attn.cute import flash_attn_func

    torch.manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    q = torch.randn(1, case.seqlen_q, case.heads, case.head_dim).to(dtype)
    k, v = torch.randn(2, 1, case.seqlen_k, case.kv_heads, case.head_dim).to(dtype)
    out, lse = flash_attn_func(q, k, v, causal=case.causal, return_lse=True)
    shared = case.heads // case.kv_heads
    keys, values = (t.float().repeat_interleave(shared, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) * case.head_dim**-0.5
    if case.causal:
        shape = (case.seqlen_q, case.seqlen_k)
        hidden = torch.ones(shape, dtype=torch.bool).triu(1 + case.seqlen_k - case.seqlen_q)
        scores = scores.masked_fill(hidden, -torch.inf)
    oracle = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
    return [("out", out.float(), oracle, LIMITS[case.dtype]), ("lse", lse, scores.logsumexp(-1), 2e-6)]
