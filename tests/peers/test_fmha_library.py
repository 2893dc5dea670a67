"""flash-attn-4 as an implementation of `fmha`, in the simulator: what its rules let through, it computes right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fmha_library import CASES
from installed import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000), needs("flash-attn-4")]


UNFENCED = "missing proxy fence"
"""Of its row-wise loads of pages on Hopper: wgmma reads what cp.async wrote with no fence between the two."""


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_oracle(agrees: Callable[..., None], case: str) -> None:
    agrees("fmha_library", case, known=UNFENCED if case.startswith("paged") and "sm90" in case else "")
