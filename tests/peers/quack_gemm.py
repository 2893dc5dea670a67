"""quack's GEMM, called through ``quack.gemm.gemm``, the layer of the package that takes the tile shape."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """D = A B^T with A (1, m, k) and B (1, n, k); D is bf16. `tile_m` is that of a pair of CTAs where two share one."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    dynamic: bool = False
    pingpong: bool = False
    dtype: str = "bfloat16"
    m: int = 256
    n: int = 256
    k: int = 128
    arch: str = "sm_100a"
    outputs: tuple[int, ...] = (2,)


CASES = {
    "quack_128x128": Case(128, 128),
    "quack_128x256": Case(128, 256, k=192),
    "quack_128x64_clc": Case(128, 64, dynamic=True),
    "quack_128x128_cluster": Case(128, 128, cluster_m=1, cluster_n=2),
    "quack_128x128_fp16": Case(128, 128, dtype="float16"),
    "quack_128x128_fp8": Case(128, 128, dtype="float8_e4m3fn"),
    "quack_256x128_2cta": Case(256, 128, cluster_m=2),
    "quack_256x256_2cta_edges": Case(256, 256, cluster_m=2, m=500, n=264, k=200),
    "quack_256x128_2cta_clc": Case(256, 128, cluster_m=2, dynamic=True, m=512),
    "quack_sm90_128x128": Case(128, 128, arch="sm_90a"),
    "quack_sm90_128x192_cluster": Case(128, 192, cluster_m=2, arch="sm_90a", m=200, n=192, k=200),
    "quack_sm90_64x128_pingpong": Case(64, 128, pingpong=True, arch="sm_90a"),
    "quack_sm90_128x128_fp8": Case(128, 128, dtype="float8_e4m3fn", arch="sm_90a"),
}


def run(case: Case, seed: int) -> list[tuple[str, Any, Any, float]]:
    """Call the package; name, result, oracle and limit of each output."""
    import torch
    from quack.gemm import gemm

    torch.manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    a = torch.randn(1, case.m, case.k).to(dtype)
    b = torch.randn(1, case.n, case.k).to(dtype)
    d = torch.full((1, case.m, case.n), torch.nan, dtype=torch.bfloat16)
    gemm(
        a,
        b,
        d,
        None,
        None,
        case.tile_m,
        case.tile_n,
        case.cluster_m,
        case.cluster_n,
        pingpong=case.pingpong,
        is_dynamic_persistent=case.dynamic,
    )
    return [("d", d.float(), a.float() @ b.float().mT, 2e-3)]
