"""quack's block-scaled GEMM on sm_100a: elements of 8, 6 or 4 bits, each 32 (or 16) of K with one scale."""

from __future__ import annotations

import dataclasses
from typing import Any

# What a number's bits mean comes from the OCP MX specification 1.0; decoded here without the package.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


def run(case: Case, seed: int) -> list[tuple[str, Any, Any]]:
    """Call the package; (name, result, oracle) of each output."""
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
    return [("d", d.float(), a_value @ b_value.mT)]


def operand(name: str, rows: int, k: int) -> tuple[Any, Any, Any]:
    """A random operand of a format: its storage, its scales in blocks of 128 rows by 4, and its value in float32."""
    import torch

    block = 16 if name == "nvfp4" else 32
    if name.endswith("fp4"):
        codes = torch.randint(0, 16, (1, rows, k), dtype=torch.uint8)
        storage = (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)
        value = torch.tensor([*E2M1, *(-x for x in E2M1)])[codes.long()]
    else:
        storage = torch.randn(1, rows, k).to(getattr(torch, f"float8_{name.removeprefix('mxfp8_')}{'fn' * ('e4' in name)}"))
        value = storage.float()
    shape = (1, rows, k // block)
    if name == "nvfp4":
        scale = (torch.rand(shape) * 4 + 0.25).to(torch.float8_e4m3fn)
    else:
        scale = torch.randint(124, 131, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    blocks = scale.view(torch.uint8).reshape(1, rows // 128, 4, 32, k // block // 4, 4).permute(0, 1, 4, 3, 2, 5)
    value = value * scale.float().repeat_interleave(block, dim=-1)
    return storage, blocks.contiguous().view(scale.dtype), value
