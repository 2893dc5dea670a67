"""NVIDIA's GEMMs of nvidia-cutlass-operators: CUTLASS's CuTeDSL kernels, called through the package's own discovery."""

from __future__ import annotations

import dataclasses
from typing import Any

import handover
from scaled import operand


@dataclasses.dataclass(frozen=True)
class Case:
    """D = A B with A (m, k) and B (k, n). `kernel` is the operator's class; `dtype` torch's name or a scaled format."""

    kernel: str
    tile: tuple[int, int]
    cluster: tuple[int, int] = (1, 1)
    two_cta: bool = False
    clc: bool = False
    a_major: str = "k"
    b_major: str = "k"
    dtype: str = "bfloat16"
    accumulator: str = "float32"
    out: str = "float32"
    m: int = 256
    n: int = 256
    k: int = 128
    arch: str = "sm_100a"
    outputs: tuple[int, ...] = (2,)  # the place of D among the arguments of the compiled function


# Relative norms: what rounding to the output's type explains, and for float32 the order of summation.
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-3, "float16": 3e-4, "int32": 0.0}
PERSISTENT, SCALED = "PersistentDenseGemmOperator", "PersistentDenseBlockScaledGemmOperator"
CASES = {
    "cutlass_persistent": Case(PERSISTENT, (128, 128)),
    "cutlass_persistent_clc": Case(PERSISTENT, (128, 128), clc=True),
    "cutlass_persistent_mn": Case(PERSISTENT, (64, 64), a_major="m", b_major="n", n=192),
    "cutlass_persistent_2cta": Case(PERSISTENT, (256, 128), (2, 1), True),
    "cutlass_persistent_2cta_mn": Case(PERSISTENT, (128, 128), (2, 1), True, a_major="m", b_major="n"),
    "cutlass_persistent_multicast": Case(PERSISTENT, (128, 64), (2, 2), dtype="float16", out="float16"),
    "cutlass_persistent_fp8": Case(PERSISTENT, (128, 128), dtype="float8_e5m2", out="bfloat16"),
    "cutlass_persistent_int8": Case(PERSISTENT, (128, 128), dtype="int8", accumulator="int32", out="int32"),
    "cutlass_tgv": Case("TgvGemmOperator", (64, 8), m=64, n=8, out="bfloat16"),
    "cutlass_mxfp8": Case(SCALED, (128, 128), (2, 1), dtype="mxfp8_e4m3", k=256, outputs=(4,)),
    "cutlass_mxfp4_2cta": Case(SCALED, (256, 128), (2, 1), dtype="mxfp4", k=256, outputs=(4,)),
    "cutlass_nvfp4": Case(SCALED, (256, 192), (2, 1), dtype="nvfp4", k=256, outputs=(4,)),
    "cutlass_sm90": Case("Sm90StaticPersistentGemmOperator", (128, 128), arch="sm_90a"),
    "cutlass_sm90_cluster": Case("Sm90StaticPersistentGemmOperator", (64, 128), (2, 1), arch="sm_90a", b_major="n"),
    "cutlass_sm80": Case("Sm80TensorOpGemmOperator", (128, 128), arch="sm_90a", out="bfloat16"),
}


def run(case: Case, seed: int) -> list[tuple[str, Any, Any, float]]:
    """Call the package; name, result, oracle and limit of each output."""
    import torch
    from cutlass import operators

    torch.manual_seed(seed)
    out = torch.full((case.m, case.n), -1).to(getattr(torch, case.out))
    if case.kernel == SCALED:
        a, a_value = scaled(case.dtype, case.m, case.k)
        b, b_value = scaled(case.dtype, case.n, case.k, transposed=True)
        handover.passed_by_pointer.append(out)
    else:
        a_value, b_value = torch.randn(case.m, case.k) * 3, torch.randn(case.k, case.n) * 3
        dtype = getattr(torch, case.dtype)
        a, b = a_value.to(dtype), b_value.to(dtype)
        a = a if case.a_major == "k" else a.T.contiguous().T
        b = b if case.b_major == "n" else b.T.contiguous().T
        a_value, b_value = a.float(), b.float()
    accumulator = getattr(torch, case.accumulator)
    arguments = operators.GemmArguments(A=a, B=b, out=out, accumulator_type=accumulator)
    target = case.arch.removeprefix("sm_")
    found = operators.get_operators(arguments, target_sm=target)
    matching = [operator for operator in found if fits(operator, case)]
    if not matching:
        raise LookupError(f"none of {len(found)} operators is {case}: " + "\n".join(map(str, found[:3])))
    matching[0].run(arguments, matching[0].compile(arguments, target_sm=target))
    return [("d", out.float(), a_value @ b_value, ROUNDING[case.out])]


def fits(operator: Any, case: Case) -> bool:
    """Whether an operator that was found is the one that the case asks for."""
    design = operator.metadata.design
    return (
        type(operator).__name__ == case.kernel
        and tuple(design.tile_shape[:2]) == case.tile
        and tuple(design.cluster_shape[:2]) == case.cluster
        and (case.kernel == SCALED or getattr(design, "use_2cta_mma", False) == case.two_cta)
        and ("CLC" in type(getattr(design, "tile_scheduler", None)).__name__) == case.clc
    )


def scaled(name: str, rows: int, k: int, *, transposed: bool = False) -> tuple[Any, Any]:
    """A scaled operand as the package takes it, and its value; `transposed` gives (k, rows)."""
    from cutlass import operators

    storage, scale, value = (tensor[0] for tensor in operand(name, rows, k))
    scale = scale.flatten()
    handover.passed_by_pointer.extend((storage, scale))
    mode = operators.ScaleMode.Blockwise1x16 if name == "nvfp4" else operators.ScaleMode.Blockwise1x32
    made = operators.ScaledOperand(
        storage.T if transposed else storage, scale, mode, operators.ScaleSwizzleMode.Swizzle32x4x4
    )
    return made, value.T if transposed else value
