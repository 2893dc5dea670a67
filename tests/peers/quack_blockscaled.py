"""quack's block-scaled GEMM on sm_100a: elements of 8, 6 or 4 bits, each 32 (or 16) of K with one scale."""

from __future__ import annotations

import dataclasses
from typing import Any

from scaled import operand


@dataclasses.dataclass(frozen=True)
class Case:
    """D = A B^T with formats as quack names them; `tile_m` is that of a pair of CTAs where two share one."""

    a: str
    b: str
    tile_m: int = 128
    tile_n: int = 128
    cluster_m: int = 1
    m: int = 256
    n: int = 256
    k: int = 256
    arch: str = "sm_100a"
    outputs: tuple[int, ...] = (2,)


CASES = {
    "quack_mxfp8": Case("mxfp8_e4m3", "mxfp8_e4m3"),
    "quack_mxfp8_2cta": Case("mxfp8_e5m2", "mxfp8_e4m3", tile_m=256, cluster_m=2),
    "quack_mxfp8_mxfp4": Case("mxfp8_e4m3", "mxfp4"),
    "quack_mxfp4": Case("mxfp4", "mxfp4"),
    "quack_nvfp4": Case("nvfp4", "nvfp4"),
    "quack_nvfp4_2cta": Case("nvfp4", "nvfp4", tile_m=256, tile_n=256, cluster_m=2),
}


def run(case: Case, seed: int) -> list[tuple[str, Any, Any, float]]:
    """Call the package; name, result, oracle and limit of each output."""
    import torch
    from quack.gemm import gemm

    torch.manual_seed(seed)
    a, a_scale, a_value = operand(case.a, case.m, case.k)
    b, b_scale, b_value = operand(case.b, case.n, case.k)
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
        1,
        SFA=a_scale,
        SFB=b_scale,
        bs_format_a=case.a,
        bs_format_b=case.b,
    )
    return [("d", d.float(), a_value @ b_value.mT, 2e-3)]
