"""Attention by torch's own: the kernels behind ``scaled_dot_product_attention``, cuDNN's among them.

They return O in a tensor of their own, which is copied into the caller's: about 2 us, and one more pass over O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunekit.model import Values
from tunekit.spec import Build, Constraint, Implementation, Tunable

from .missing import never

if TYPE_CHECKING:
    import torch

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], torch.Tensor]

MOST_SCORES = 2**28  # of the math backend, which writes them all: 1 GiB in float32

TUNABLES = (
    # auto: what torch would choose. The others are called directly: choosing by torch.nn.attention.sdpa_kernel
    # changes the setting of all threads meanwhile, and takes the host 10 us a call.
    Tunable("backend", ("auto", "cudnn", "flash", "efficient", "math")),
    # The query heads of a KV head as rows of one head: K and V are read once for all of them.
    Tunable("pack", (False, True)),
)


def _group(v: Values) -> int:
    return int(v.heads // v.kv_heads)


CONSTRAINTS = (
    *never("SDPA", "merge", "lse", "window", "lengths", "sink", "sources", "gather", "paged", "varlen"),
    Constraint(
        "square_causal",
        "is_causal aligns the first query with the first key: mask=causal is the same only if t == s_k, or nothing is "
        "masked (t == 1)",
        lambda v: v.mask != "causal" or v.t in (1, v.s_k),
    ),
    Constraint(
        "square_top_left",
        "of the fast backends none takes is_causal with another number of keys than queries",
        lambda v: v.mask != "causal_top_left" or v.t == v.s_k or v.backend in ("auto", "efficient", "math"),
    ),
    Constraint(
        "pack_rows",
        "rows of several heads have no common position: packing needs heads to pack, and no mask (t == 1 has none)",
        lambda v: not v.pack or (_group(v) > 1 and (v.mask == "none" or (v.mask == "causal" and v.t == 1))),
    ),
    Constraint(
        "grouped_heads",
        "the efficient backend takes as many KV heads as query heads: others must be packed",
        lambda v: v.backend != "efficient" or v.pack or _group(v) == 1,
    ),
    Constraint(
        "head_dims",
        "flash takes one head_dim up to 256, cuDNN any two up to 256",
        lambda v: (
            v.backend not in ("flash", "cudnn")
            or (max(v.head_dim, v.head_dim_v) <= 256 and (v.backend == "cudnn" or v.head_dim == v.head_dim_v))
        ),
    ),
    Constraint(
        "scores_fit",
        f"the math backend writes every score, and takes minutes beyond {MOST_SCORES}",
        lambda v: v.backend != "math" or v.batch * v.heads * v.t * v.s_k <= MOST_SCORES,
    ),
)


def attend(backend: str) -> Attend:
    """The attention of one backend over [batch, heads, positions, columns], of fewer KV heads too."""
    import torch

    aten = torch.ops.aten
    if backend == "cudnn":
        return lambda q, k, v, causal, scale: aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False, 0.0, causal, False, scale=scale
        )[0]
    if backend == "flash":
        return lambda q, k, v, causal, scale: aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )[0]
    if backend == "efficient":
        return lambda q, k, v, causal, scale: aten._scaled_dot_product_efficient_attention(
            q, k, v, None, False, 0.0, causal, scale=scale
        )[0]
    if backend == "math":
        return lambda q, k, v, causal, scale: aten._scaled_dot_product_attention_math(
            q, k, v, None, 0.0, causal, None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )[0]
    return lambda q, k, v, causal, scale: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def build(b: Build) -> Callable[..., None]:
    """The function of q, k, v (but kv_shared), o and scale."""
    import torch

    p, backend, pack = b.problem, attend(b.tunables.backend), b.tunables.pack
    columns = slice(int(p.head_dim_v))

    @torch.no_grad()
    def apart(q: Any, k: Any, v: Any, o: Any, scale: float) -> None:
        masked = bool(p.mask == "causal_top_left" or (p.mask == "causal" and q.shape[1] > 1))
        o.copy_(backend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), masked, scale).transpose(1, 2))

    @torch.no_grad()
    def packed(q: Any, k: Any, v: Any, o: Any, scale: float) -> None:
        heads = (p.kv_heads, p.heads // p.kv_heads)
        rows = q.unflatten(2, heads).transpose(1, 2).flatten(2, 3)
        done = backend(rows, k.transpose(1, 2), v.transpose(1, 2), False, scale)
        o.unflatten(2, heads).copy_(done.unflatten(2, (q.shape[1], heads[1])).transpose(1, 2))

    function = packed if pack else apart
    if p.kv_shared:
        return lambda q, k, o, scale: function(q, k, k[..., columns], o, scale)
    return function


torch_sdpa = Implementation(
    name="torch_sdpa",
    requires=(),
    backend="library",
    package="torch",
    tunables=TUNABLES,
    constraints=CONSTRAINTS,
    build=build,
    defaults=({"backend": "auto", "pack": True}, {"backend": "auto", "pack": False}),
)
