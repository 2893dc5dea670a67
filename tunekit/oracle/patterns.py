"""What an output holds before a launch, so that elements that nobody wrote are known afterwards."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SCRATCH_POISON = 0x7FC0_5C5C
"""What a workspace of float32 holds before a launch: a NaN that no output holds, so that an output computed from it
is not taken for one that nobody wrote."""


@functools.cache
def poisons() -> Mapping[torch.dtype, tuple[torch.dtype, tuple[int, int]]]:
    """Per dtype: the integer type of the same width, and what an output holds before an odd and an even launch.

    Floats: NaNs that no arithmetic yields (e4m3 has two NaNs only, and conversions yield 0x7F). The two differ, so
    that an integer result that happens to equal one of them is still told from an unwritten one.
    """
    import torch

    return {
        torch.float64: (torch.int64, (0x7FF8_DEAD_BEEF_0001, 0x7FF8_DEAD_BEEF_0002)),
        torch.float32: (torch.int32, (0x7FC0_DEAD, 0x7FC0_BEEF)),
        torch.bfloat16: (torch.int16, (0x7FDE, 0x7FCD)),
        torch.float16: (torch.int16, (0x7EDE, 0x7ECD)),
        torch.float8_e4m3fn: (torch.uint8, (0xFF, 0xFF)),
        torch.float8_e5m2: (torch.uint8, (0xFE, 0xFD)),
        torch.int32: (torch.int32, (0x5AFE_C0DE, 0x2BAD_F00D)),
        torch.int64: (torch.int64, (0x5AFE_C0DE_5AFE_C0DE, 0x2BAD_F00D_2BAD_F00D)),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width."""
    return tensor.view(poisons()[tensor.dtype][0])


def poison(dtype: torch.dtype, launch: int) -> int:
    """The bit pattern, as a signed integer, that an output holds before launch number `launch`."""
    return poisons()[dtype][1][(launch - 1) % 2]
