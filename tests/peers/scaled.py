"""Random block-scaled operands and what they are worth."""

from __future__ import annotations

from typing import Any

# What four bits mean, without the sign: OCP MX specification 1.0, 5.3.3. Decoded here without any package.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def operand(name: str, rows: int, k: int) -> tuple[Any, Any, Any]:
    """A random operand of a format: its storage, its scales in blocks of 128 rows by 4, and its value in float32."""
    import torch

    block = 16 if name == "nvfp4" else 32
    if name.endswith("fp4"):
        codes = torch.randint(0, 16, (1, rows, k), dtype=torch.uint8)
        storage = (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)
        value = torch.tensor([*E2M1, *(-x for x in E2M1)])[codes.long()]
    else:
        storage = torch.randn(1, rows, k).to(torch.float8_e4m3fn if name == "mxfp8_e4m3" else torch.float8_e5m2)
        value = storage.float()
    shape = (1, rows, k // block)
    if name == "nvfp4":
        scale = (torch.rand(shape) * 4 + 0.25).to(torch.float8_e4m3fn)
    else:
        scale = torch.randint(124, 131, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    blocks = scale.view(torch.uint8).reshape(1, rows // 128, 4, 32, k // block // 4, 4).permute(0, 1, 4, 3, 2, 5)
    value = value * scale.float().repeat_interleave(block, dim=-1)
    return storage, blocks.contiguous().view(scale.dtype), value
