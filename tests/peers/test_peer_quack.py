"""quack's GEMMs in the simulator: bf16, fp16, fp8 and block-scaled, one CTA and two, on sm_100a and sm_90a."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import quack_blockscaled
import quack_gemm
from installed import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000), needs("quack-kernels")]


@pytest.mark.parametrize("case", quack_gemm.CASES)
def test_gemm_agrees_with_the_oracle(agrees: Callable[..., None], case: str) -> None:
    agrees("quack_gemm", case)


@pytest.mark.parametrize("case", quack_blockscaled.CASES)
def test_block_scaled_gemm_agrees_with_the_oracle(agrees: Callable[..., None], case: str) -> None:
    agrees("quack_blockscaled", case)


@pytest.mark.parametrize("case", ["quack_128x64_clc", "quack_256x256_2cta_edges"])
def test_every_schedule_gives_the_same_bits(agrees: Callable[..., None], case: str) -> None:
    agrees("quack_gemm", case, schedules=5, seed=1)
