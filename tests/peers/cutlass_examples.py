"""CUTLASS's CuTeDSL examples, whose kernel classes are called with tensors of our own.

They are in no package: ``TUNEKIT_CUTLASS_EXAMPLES`` names the directory examples/python/CuTeDSL of a checkout
(https://github.com/NVIDIA/cutlass). Their own ``run`` functions fill tensors by kernels, so they want a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "TUNEKIT_CUTLASS_EXAMPLES"


@dataclasses.dataclass(frozen=True)
class Case:
    """`run` builds, compiles and calls the kernel of the example's file; `options` are its own."""

    file: str
    run: Callable[[Any, Any], list[tuple[str, Any, Any, float]]]
    options: tuple[tuple[str, Any], ...] = ()
    arch: str = "sm_100a"
    outputs: tuple[int, ...] = (2,)

    def __getattr__(self, name: str) -> Any:
        values = dict(self.options)
        if name.startswith("__") or name not in values:
            raise AttributeError(name)
        return values[name]


def run(case: Case, seed: int) -> list[tuple[str, Any, Any, float]]:
    """Call the example's kernel; name, result, oracle and limit of each output."""
    import torch

    torch.manual_seed(seed)
    return case.run(load(Path(os.environ[VARIABLE]), case.file), case)


def load(examples: Path, file: str) -> Any:
    """The example's module. CuTeDSL reads a kernel's source from its file, so it is imported from there."""
    sys.path.insert(0, str(examples))
    spec = importlib.util.spec_from_file_location(Path(file).stem, examples / file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{examples / file} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def gemm(example: Any, case: Any) -> list[tuple[str, Any, Any, float]]:
    """C = A B^T, with A (m, k, 1), B (n, k, 1) and C (m, n, 1); every matrix is K-major or N-major but for `majors`."""
    import cutlass
    import torch
    from cutlass import cute

    m, n, k = case.mnk
    dtype = getattr(torch, case.dtype)
    a, b = matrix(m, k, case.majors[0] == "m").to(dtype), matrix(n, k, case.majors[1] == "n").to(dtype)
    c = torch.full_like(matrix(m, n, case.majors[2] == "m"), torch.nan).to(getattr(torch, case.out))
    if case.arch == "sm_90a":
        kernel = example.HopperWgmmaGemmKernel(cutlass.Float32, case.tile, case.cluster)
    else:
        kernel = example.DenseGemmKernel(cutlass.Float32, case.two_cta, case.tile, case.cluster, case.tma_store)
    tensors = [dynamic(t) for t in (a, b, c)]
    compiled = cute.compile(kernel, *tensors, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
    compiled(a, b, c)
    exact = torch.einsum("mkl,nkl->mnl", *(in_tf32(t) if case.dtype == "float32" else t.float() for t in (a, b)))
    return [("c", c.float(), exact, 2e-6)]


def fmha(example: Any, case: Any) -> list[tuple[str, Any, Any, float]]:
    """Attention with q (1, s, h_k, h_r, d) and k, v (1, s, h_k, 1, d), causal or not."""
    import cutlass
    import torch
    from cutlass import Float32, Int32, cute

    s, h_k, h_r, d = case.seqlen, case.kv_heads, case.shared, case.head_dim
    dtype = getattr(torch, case.dtype)
    q = torch.randn(1, s, h_k, h_r, d).to(dtype)
    k, v = torch.randn(2, 1, s, h_k, 1, d).to(dtype)
    o = torch.full_like(q, torch.nan)
    lse = torch.full((1, s, h_k, h_r), torch.nan)
    masks = example.fmha_utils.MaskEnum
    kernel = example.BlackwellFusedMultiHeadAttentionForward(
        cutlass.Float32,
        cutlass.Float32,
        (128, 128),
        d,
        case.persistent,
        masks.WINDOW_MASK if case.causal else masks.RESIDUAL_MASK,
        case.ex2_emulation,
        True,
    )
    scale = d**-0.5
    shape = tuple(Int32(n) for n in (1, s, s, s, h_k * h_r, h_k, d, d))
    arguments = [
        *(dynamic(t) for t in (q, k, v, o)),
        shape,
        None,
        None,
        dynamic(lse),
        None,
        Float32(scale * 1.4426950408889634),
        Float32(scale),
        Float32(1.0),
        None,
        None,
        Int32(0) if case.causal else None,
        None,
        None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        False,
    ]
    compiled = cute.compile(kernel, *arguments, options="--opt-level 2")
    call = [q, k, v, o, *arguments[4:7], lse, *arguments[8:17], False]
    compiled(*call)
    scores = torch.einsum("bqgrd,bkgd->bgrqk", q.float(), k[:, :, :, 0].float()) * scale
    if case.causal:
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    oracle = torch.einsum("bgrqk,bkgd->bqgrd", scores.softmax(-1), v[:, :, :, 0].float())
    logarithm = scores.logsumexp(-1).permute(0, 3, 1, 2) * 1.4426950408889634  # the example's is to base 2
    return [("o", o.float(), oracle, 3e-3), ("lse", lse, logarithm, 2e-6)]


def in_tf32(tensor: Any) -> Any:
    """As a tensor copy brings float32 whose map says TF32: rounded to nearest even at 10 bits (measured on an H200)."""
    import torch

    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def matrix(rows: int, columns: int, rows_contiguous: bool) -> Any:
    """A random (rows, columns, 1) in float32."""
    import torch

    shape = (1, columns, rows) if rows_contiguous else (1, rows, columns)
    return torch.randn(shape).permute((2, 1, 0) if rows_contiguous else (1, 2, 0))


def dynamic(tensor: Any) -> Any:
    """The compile argument for a tensor: all sizes dynamic, the contiguous dimension known."""
    from cutlass import cute

    leading = max(range(tensor.ndim), key=lambda d: (tensor.stride(d) == 1) * tensor.shape[d])
    return cute.runtime.from_dlpack(tensor, assumed_align=16, enable_tvm_ffi=True).mark_layout_dynamic(leading)


DENSE = "cute/blackwell/kernel/dense_gemm/dense_gemm.py"
HOPPER_DENSE = "cute/hopper/kernel/dense_gemm/dense_gemm.py"
FMHA = "cute/blackwell/kernel/attention/fmha/fmha.py"


def dense(file: str = DENSE, arch: str = "sm_100a", **options: Any) -> Case:
    given = {
        "mnk": (256, 256, 128),
        "dtype": "bfloat16",
        "out": "float32",
        "majors": "kkn",
        "tile": (128, 128),
        "cluster": (1, 1),
        "two_cta": False,
        "tma_store": True,
    }
    return Case(file, gemm, tuple((given | options).items()), arch)


def attention(**options: Any) -> Case:
    given = {
        "seqlen": 256,
        "kv_heads": 1,
        "shared": 2,
        "head_dim": 128,
        "dtype": "bfloat16",
        "causal": False,
        "persistent": True,
        "ex2_emulation": False,
    }
    return Case(FMHA, fmha, tuple((given | options).items()), outputs=(3, 7))


CASES = {
    "example_dense": dense(),
    "example_dense_mn": dense(majors="mnm", tile=(128, 64), dtype="float16"),
    "example_dense_no_tma_store": dense(tma_store=False, tile=(64, 128)),
    "example_dense_2cta": dense(two_cta=True, tile=(256, 128), cluster=(2, 1)),
    "example_dense_tf32": dense(dtype="float32"),
    "example_fmha_d128": attention(),
    "example_fmha_d64_causal": attention(head_dim=64, causal=True, persistent=False),
    "example_fmha_d128_causal_ex2": attention(causal=True, ex2_emulation=True),
    "example_sm90_dense": dense(HOPPER_DENSE, "sm_90a"),
    "example_sm90_dense_cluster": dense(HOPPER_DENSE, "sm_90a", tile=(128, 256), cluster=(2, 1), majors="mnn"),
}
