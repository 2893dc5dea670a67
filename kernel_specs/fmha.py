"""Fused multi-head attention, forward: o = softmax(scale * q k^T) v, for MHA, GQA and MQA.

Tensors are row-major as torch holds them: q [batch, t, heads, head_dim], o [batch, t, heads, head_dim_v];
k [batch, s_k, kv_heads, head_dim], v [batch, s_k, kv_heads, head_dim_v]; lse, row_max [batch, heads, t] in float32.
`heads` is a multiple of `kv_heads`.

Keys. A sequence has t_i queries and n keys in source 1 (t and s_k, or fewer: `lengths`, cu_seqlens). Query i sees
key j where the mask says so: ``none`` always; ``causal`` j <= i + n - t_i, so that the last query sees the last key;
``causal_top_left`` j <= i; ``window`` i + n - t_i - left <= j <= i + n - t_i + right, where a side of -1 is unlimited.
With ``sources=2`` a query also sees every key of k2, v2 (below `lengths2`), with no regard to positions: a window of
recent tokens and a compressed range before it are one softmax. With ``gather`` the last source is seen through
`indices` [batch, t, top_k]: the rows that each query token reads, -1 for none, anywhere in the list.

Layouts. ``page > 0``: k, v are a pool [pages, page, kv_heads, ...]; page_table [batch, table_pages] has each sequence's
pages and, past those, any pages of the pool. ``varlen``: q, o [total_t, heads, ...] and, unless paged,
k, v [total_s_k, kv_heads, ...] hold the sequences end to end; sequence b has the rows cu_seqlens_q[b] to
cu_seqlens_q[b + 1] - 1; lse, row_max are [heads, total_t].
``kv_shared``: there is no v, the first head_dim_v columns of k are V.

Rows of k and v past a sequence's length, in a page that it does not use, and of a gathered source those that nobody
lists, may hold anything, NaN too: it never reaches an output. Rows that only a mask hides are finite.

`scale` is above 0, and 1 / sqrt(head_dim) if left out.

Outputs. `lse` is the natural logarithm of the row's sum of exp(scale * q.k), without the sink. `sink` is a logit per
query head that joins the denominator of o only: o = exp(lse) / (exp(lse) + exp(sink)) times the plain output. A row
that sees no key has o = 0 and lse = row_max = -inf, sink or not.

With ``normalize=False`` the outputs merge with those of other KV ranges: `row_max` is the row's largest raw score q.k
(before the scale), o holds the sum of exp(scale * (q.k - row_max)) v, and ``o / exp(lse - row_max * scale)`` is the
attention's output.
"""

from __future__ import annotations

from tunekit.spec import Implementation, KernelSpec, Tolerance

from .attention import work
from .attention.cost import cost
from .attention.flash_attn_4 import flash_attn_4_sm90, flash_attn_4_sm100
from .attention.inputs import draw
from .attention.oracle import reference, rounded
from .attention.signature import AXES, RULES, SIGNATURE
from .attention.torch_sdpa import torch_sdpa
from .kernels import (
    fmha_sm90_pair_space,
    fmha_sm90_space,
    fmha_sm90_split_space,
    fmha_sm90_wide_space,
    fmha_sm100_pair_space,
    fmha_sm100_space,
)

fmha = KernelSpec(
    name="fmha",
    version=2,
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
            work=work.sm90,
        ),
        Implementation(
            name="sm90_split",
            requires={"wgmma"},
            tunables=fmha_sm90_split_space.TUNABLES,
            constraints=fmha_sm90_split_space.CONSTRAINTS,
            defaults=fmha_sm90_split_space.DEFAULTS,
            footprint=fmha_sm90_split_space.footprint,
            workspace=fmha_sm90_split_space.workspace,
            build=fmha_sm90_split_space.build,
            work=work.sm90_split,
        ),
        Implementation(
            name="sm90_wide",
            requires={"wgmma"},
            tunables=fmha_sm90_wide_space.TUNABLES,
            constraints=fmha_sm90_wide_space.CONSTRAINTS,
            defaults=fmha_sm90_wide_space.DEFAULTS,
            footprint=fmha_sm90_wide_space.footprint,
            workspace=fmha_sm90_wide_space.workspace,
            build=fmha_sm90_wide_space.build,
            work=work.sm90_wide,
        ),
        Implementation(
            name="sm90_pair",
            requires={"wgmma"},
            tunables=fmha_sm90_pair_space.TUNABLES,
            constraints=fmha_sm90_pair_space.CONSTRAINTS,
            defaults=fmha_sm90_pair_space.DEFAULTS,
            footprint=fmha_sm90_pair_space.footprint,
            build=fmha_sm90_pair_space.build,
            work=work.sm90_pair,
        ),
        Implementation(
            name="sm100",
            requires={"tcgen05"},
            tunables=fmha_sm100_space.TUNABLES,
            constraints=fmha_sm100_space.CONSTRAINTS,
            defaults=fmha_sm100_space.DEFAULTS,
            footprint=fmha_sm100_space.footprint,
            build=fmha_sm100_space.build,
            workspace=fmha_sm100_space.workspace,
        ),
        Implementation(
            name="sm100_pair",
            requires={"tcgen05"},
            tunables=fmha_sm100_pair_space.TUNABLES,
            constraints=fmha_sm100_pair_space.CONSTRAINTS,
            defaults=fmha_sm100_pair_space.DEFAULTS,
            footprint=fmha_sm100_pair_space.footprint,
            build=fmha_sm100_pair_space.build,
            workspace=fmha_sm100_pair_space.workspace,
        ),
        flash_attn_4_sm90,
        flash_attn_4_sm100,
        torch_sdpa,
    ),
    constraints=RULES,
    reference=reference,
    rounded=rounded,
    tolerance={
        "o": Tolerance(cosine=0.999997, relative_norm=3e-3, rounding=1.25),
        "lse": Tolerance(cosine=0.999999, relative_norm=1e-4, relative=1e-4),
        "row_max": Tolerance(cosine=0.999999, relative_norm=1e-4, relative=1e-4),
    },
    cost=cost,
    compile_limit_s=60.0,
    inputs=draw,
    examples=(
        {"batch": 32, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 128},
        {"batch": 32, "heads": 64, "kv_heads": 1, "t": 1, "s_k": 640, "head_dim": 64},
    ),
)
