"""The kernel that merges partial results of split KV, alone: what the ranges leave is drawn, some of it empty."""

from __future__ import annotations

import math

from kernel_specs.kernels.attention.workspace import elements, statistics_at
from tunekit.spec import Axis, Implementation, KernelSpec, ScalarArg, TensorArg, Tolerance, Tunable

SPLITS = (1, 2, 3, 8, 16, 33, 64)


def rows(p):
    return p.batch * p.t * p.heads


def draw(p, generator, device):
    """Partial results as the writers leave them. Row 0 has no key at all; others lack some ranges."""
    import torch

    shape = (p.splits, rows(p))
    outputs = torch.randn(*shape, p.columns, generator=generator, device=device)
    maximum = 4 * torch.randn(shape, generator=generator, device=device)
    total = 1 + 9 * torch.rand(shape, generator=generator, device=device)
    empty = torch.rand(shape, generator=generator, device=device) < 0.3
    empty[0, 1:], empty[:, 0] = False, True
    outputs[empty], maximum[empty], total[empty] = 0.0, -math.inf, 0.0
    statistics = torch.stack((maximum.T, total.T), dim=-1)
    found = {"partials": torch.cat((outputs.flatten(), statistics.flatten()))}
    if p.has_sink:
        found["sink"] = torch.randn(p.heads, generator=generator, device=device)
    return found


def reference(p, given):
    import torch

    partials, scale = given["partials"].double(), float(given["scale"])
    at = statistics_at(rows(p), p.splits, p.columns)
    outputs = partials[:at].view(p.splits, rows(p), p.columns)
    maxima, totals = partials[at:].view(rows(p), p.splits, 2).unbind(-1)
    row_max = maxima.amax(1)
    weights = torch.exp(scale * (maxima - row_max.nan_to_num(neginf=0.0)[:, None]))
    total = (weights * totals).sum(1)
    o = torch.einsum("rs,src->rc", weights, outputs)
    denominator = total.clone()
    if p.has_sink:
        sink = given["sink"].double().repeat(p.batch * p.t)
        denominator += torch.exp(sink - scale * row_max.nan_to_num(neginf=0.0))
    if p.normalize:
        o = o / denominator.where(total > 0, torch.ones_like(total))[:, None]
    lse = scale * row_max + torch.log(total)

    def by_head(x):
        return x.view(p.batch, p.t, p.heads).transpose(1, 2)

    found = {"o": o.view(p.batch, p.t, p.heads, p.columns), "lse": by_head(lse)}
    return found if p.normalize else {**found, "row_max": by_head(row_max)}


def build(b):
    from .split_merge_kernel import Merge, fake_args

    return Merge(b.problem, b.tunables.pdl), fake_args(b.problem)


split_merge = KernelSpec(
    name="split_merge",
    version=1,
    axes=(
        Axis("batch", bucket="pow2", default=2),
        Axis("t", bucket="pow2", default=3),
        Axis("heads", static=True, default=5),
        Axis("columns", values=(64, 128, 256, 512), static=True, default=64),
        Axis("splits", values=SPLITS, static=True, default=3),
        Axis("normalize", kind="flag", static=True, default=True),
        Axis("has_sink", kind="flag", static=True, default=False),
        Axis("n", default=lambda p: elements(rows(p), p.splits, p.columns)),
    ),
    signature=(
        TensorArg("partials", ("n",), "float32"),
        TensorArg("sink", ("heads",), "float32", when=lambda p: p.has_sink),
        TensorArg("o", ("batch", "t", "heads", "columns"), "bfloat16", role="output"),
        TensorArg("lse", ("batch", "heads", "t"), "float32", role="output"),
        TensorArg("row_max", ("batch", "heads", "t"), "float32", role="output", when=lambda p: not p.normalize),
        ScalarArg("scale", default=lambda p: 0.3),
    ),
    implementations=(
        Implementation(
            name="combine",
            requires={"tma"},
            tunables=(Tunable("pdl", (True, False)),),
            defaults=({"pdl": True},),
            build=build,
        ),
    ),
    inputs=draw,
    reference=reference,
    tolerance={
        "o": Tolerance(cosine=0.99999, relative_norm=3e-3),
        "lse": Tolerance(cosine=0.999999, relative_norm=1e-5),
        "row_max": Tolerance(cosine=0.999999, relative_norm=1e-6),
    },
    examples=({},),
)
