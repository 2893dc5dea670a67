"""NVIDIA's GEMMs of nvidia-cutlass-operators: CUTLASS's CuTeDSL kernels, called through the package's own discovery."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """D = A B with A (m, k) and B (k, n); `kernel` is how the operator's class is called."""

    kernel: str
    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    two_cta: bool = False
    a_major: str = "k"
    b_major: str = "k"
    dtype: str = "bfloat16"
    out: str = "float32"
    m: int = 256
    n: int = 256
    k: int = 128
    arch: str = "sm_100a"
    outputs: tuple[int, ...] = (2,)


CASES = {
    "cutlass_persistent": Case("PersistentDenseGemmOperator", (128, 128)),
    "cutlass_persistent_mn": Case("PersistentDenseGemmOperator", (128, 128), a_major="m", b_major="n"),
    "cutlass_persistent_2cta": Case("PersistentDenseGemmOperator", (256, 128), (2, 1), True),
    "cutlass_persistent_multicast": Case("PersistentDenseGemmOperator", (128, 64), (2, 2), dtype="float16"),
}


def run(case: Case, seed: int) -> list[tuple[str, Any, Any]]:
    """Call the package; (name, result, oracle) of each output."""
    import torch
    from cutlass import operators

    torch.manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    a, b = torch.randn(case.m, case.k).to(dtype), torch.randn(case.k, case.n).to(dtype)
    a = a if case.a_major == "k" else a.T.contiguous().T
    b = b if case.b_major == "n" else b.T.contiguous().T
    out = torch.full((case.m, case.n), torch.nan, dtype=getattr(torch, case.out))
    arguments = operators.GemmArguments(A=a, B=b, out=out, accumulator_type=torch.float32)
    found = operators.get_operators(arguments, target_sm=case.arch.removeprefix("sm_"))
    matching = [operator for operator in found if fits(operator, case)]
    if not matching:
        raise LookupError(f"none of {len(found)} operators is {case}: {sorted({type(o).__name__ for o in found})}")
    matching[0].run(arguments, matching[0].compile(arguments, target_sm=case.arch.removeprefix("sm_")))
    return [("out", out.float(), a.float() @ b.float())]


def fits(operator: Any, case: Case) -> bool:
    design = operator.metadata.design
    return (
        type(operator).__name__ == case.kernel
        and tuple(design.tile_shape[:2]) == case.tile
        and tuple(design.cluster_shape[:2]) == case.cluster
        and getattr(design, "use_2cta_mma", False) == case.two_cta
    )
