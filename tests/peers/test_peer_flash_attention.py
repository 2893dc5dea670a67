"""flash-attn-4's forward in the simulator: its answer is the oracle's, and nothing is found wrong with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flash_attention import CASES
from installed import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000), needs("flash-attn-4")]


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_oracle(agrees: Callable[..., None], case: str) -> None:
    agrees("flash_attention", case)


@pytest.mark.parametrize("case", ["fa4_d128_causal", "fa4_d64", "fa4_d128_2cta"])
def test_every_schedule_gives_the_same_bits(agrees: Callable[..., None], case: str) -> None:
    agrees("flash_attention", case, schedules=5, seed=1)
