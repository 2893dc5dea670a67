"""Fused multi-head attention, forward: o = softmax(scale * q k^T) v.

Tensors are row-major as torch holds them: q, o [batch, t, heads, head_dim];
k, v [batch, s_k, kv_heads, head_dim]; lse, row_max [batch, heads, t] in float32.
`heads` may be a multiple of `kv_heads` (GQA, MQA); the heads of one KV head are
packed into the M tile, so that decode fills it at t = 1.

With ``normalize=False`` the outputs merge with those of other KV ranges:
`row_max` is the row's largest raw score q.k (before the scale), `lse` is
``row_max * scale + ln(row_sum)`` in natural logarithms, and
``o / exp(lse - row_max * scale)`` is the attention's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunekit.model import Cost, Values
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, ScalarArg, TensorArg, Tolerance

from .kernels import fmha_sm90_space, fmha_sm100_space

if TYPE_CHECKING:
    import torch

AXES = (
    Axis("batch", bucket="pow2", default=1, edges=(1, 3)),
    Axis("heads", static=True),
    Axis("kv_heads", static=True),
    Axis("t", bucket="pow2", edges=(1, 5)),
    Axis("s_k", bucket="pow2", edges=(1, 77, 640)),
    Axis("head_dim", values=(64, 128, 256, 512), static=True),
    Axis("dtype", kind="dtype", values=("bfloat16",), static=True, default="bfloat16"),
    Axis("normalize", kind="flag", static=True, default=True),
)


def _partial(p: Values) -> bool:
    return not p.normalize


SIGNATURE = (
    TensorArg("q", ("batch", "t", "heads", "head_dim"), "dtype"),
    TensorArg("k", ("batch", "s_k", "kv_heads", "head_dim"), "dtype"),
    TensorArg("v", ("batch", "s_k", "kv_heads", "head_dim"), "dtype"),
    TensorArg("o", ("batch", "t", "heads", "head_dim"), "dtype", role="output"),
    TensorArg("lse", ("batch", "heads", "t"), "float32", role="output", when=_partial),
    TensorArg("row_max", ("batch", "heads", "t"), "float32", role="output", when=_partial),
    ScalarArg("scale", default=lambda p: p.head_dim**-0.5),
)


def reference(problem: Values, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The oracle, in float64 on the inputs as they are (bf16)."""
    import torch

    batch, t, heads, head_dim = inputs["q"].shape
    kv_heads = inputs["k"].shape[2]
    # [batch, kv_head, rows, head_dim]: a KV head's queries (head in group, t) or its s_k keys. As rows of one product
    # the heads of a group share K and V, which a broadcast would copy for each of them.
    rows = heads // kv_heads * t
    q = inputs["q"].double().transpose(1, 2).reshape(batch, kv_heads, rows, head_dim)
    k, v = (inputs[name].double().transpose(1, 2) for name in ("k", "v"))
    raw = q @ k.transpose(-1, -2)
    row_max = raw.amax(-1)
    weights = torch.exp(inputs["scale"] * (raw - row_max.unsqueeze(-1)))
    row_sum = weights.sum(-1)
    unnormalised = weights @ v

    def by_token(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(batch, heads, t, head_dim).transpose(1, 2)

    if problem.normalize:
        return {"o": by_token(unnormalised / row_sum.unsqueeze(-1))}
    lse = row_max * inputs["scale"] + torch.log(row_sum)
    return {
        "o": by_token(unnormalised),
        "lse": lse.reshape(batch, heads, t),
        "row_max": row_max.reshape(batch, heads, t),
    }


def cost(p: Values) -> Cost:
    """Two matrix products; Q, K, V read and O written once."""
    element = 2
    queries = p.batch * p.t * p.heads * p.head_dim
    keys = p.batch * p.s_k * p.kv_heads * p.head_dim
    return Cost(flops=4.0 * queries * p.s_k, bytes=float(element * (2 * queries + 2 * keys)))


fmha = KernelSpec(
    name="fmha",
    version=1,
    description="fused multi-head attention, forward (MHA, GQA, MQA)",
    axes=AXES,
    signature=SIGNATURE,
    implementations=(
        Implementation(
            name="sm90",
            requires={"wgmma"},
            tunables=fmha_sm90_space.TUNABLES,
            constraints=fmha_sm90_space.CONSTRAINTS,
            defaults=fmha_sm90_space.DEFAULTS,
            footprint=fmha_sm90_space.footprint,
            build=fmha_sm90_space.build,
        ),
        Implementation(
            name="sm100",
            requires={"tcgen05"},
            tunables=fmha_sm100_space.TUNABLES,
            constraints=fmha_sm100_space.CONSTRAINTS,
            defaults=fmha_sm100_space.DEFAULTS,
            footprint=fmha_sm100_space.footprint,
            build=fmha_sm100_space.build,
        ),
    ),
    constraints=(
        Constraint("heads_divide", "heads must be a multiple of kv_heads", lambda p: p.heads % p.kv_heads == 0),
    ),
    reference=reference,
    tolerance={
        "o": Tolerance(cosine=0.999997, relative_norm=3e-3),
        "lse": Tolerance(cosine=0.999999, relative_norm=1e-4),
        "row_max": Tolerance(cosine=0.999999, relative_norm=1e-4),
    },
    cost=cost,
    examples=(
        {"batch": 32, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 128},
        {"batch": 32, "heads": 64, "kv_heads": 1, "t": 1, "s_k": 640, "head_dim": 64},
    ),
)
