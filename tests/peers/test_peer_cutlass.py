"""CUTLASS's CuTeDSL kernels in the simulator: NVIDIA's operators from PyPI, and the repository's examples."""

from __future__ import annotations

import os
from collections.abc import Callable

import cutlass_examples
import cutlass_gemm
import pytest
from installed import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@needs("nvidia-cutlass-operators")
@pytest.mark.parametrize("case", cutlass_gemm.CASES)
def test_operator_agrees_with_the_oracle(agrees: Callable[..., None], case: str) -> None:
    agrees("cutlass_gemm", case)


@pytest.mark.skipif(
    cutlass_examples.VARIABLE not in os.environ,
    reason=f"{cutlass_examples.VARIABLE} doesn't name examples/python/CuTeDSL of a CUTLASS checkout",
)
@pytest.mark.parametrize("case", cutlass_examples.CASES)
def test_example_agrees_with_the_oracle(agrees: Callable[..., None], case: str) -> None:
    agrees("cutlass_examples", case)
