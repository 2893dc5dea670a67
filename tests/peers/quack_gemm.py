"""quack's GEMM on sm_100a, called through ``quack.gemm.gemm``, the layer that takes the tile shape."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """D = A B^T with A (l, m, k) and B (l, n, k), bf16. `tile_m` is the tile of a whole cluster_m of MMAs."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    dynamic: bool = False
    m: int = 256
    n: int = 256
    k: int = 128


CASES = {
    "quack_128x128": Case(128, 128),
    "quack_128x256": Case(128, 256, k=192),
    "quack_128x64_clc": Case(128, 64, dynamic=True),
    "quack_256x128_2cta": Case(256, 128, cluster_m=2),
    "quack_256x256_2cta_edges": Case(256, 256, cluster_m=2, m=500, n=264, k=200),
}
ARCH = "sm_100a"


def run(case: Case, seed: int) -> list[tuple[str, Any, Any]]:
    """Call the package; (name, result, oracle) of each output."""
    import torch
    from quack.gemm import gemm

    torch.manual_seed(seed)
    a = torch.randn(1, case.m, case.k).bfloat16()
    b = torch.randn(1, case.n, case.k).bfloat16()
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
        is_dynamic_persistent=case.dynamic,
    )
    return [("d", d.float(), a.float() @ b.float().mT)]
