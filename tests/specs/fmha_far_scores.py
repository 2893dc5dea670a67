"""fmha with scores that are many powers of two apart, which those of normal inputs never are."""

from __future__ import annotations

import dataclasses
import math

from kernel_specs import fmha as shipped

ORDINARY = shipped.fmha.inputs
Q_COLUMN, LOG2_E = 32.0, math.log2(math.e)
LOW, HIGH = 7.98, 25.1  # LOW is within 2^8 of 0; 2^-25 is no float16, and 2^(LOW - HIGH) is one


def late_and_flat(problem, generator, device):
    """Of tiles of 64 keys, from the last on, by turns: scores of LOW (of the last: 0), and one of HIGH alone. V has a
    mean, so that what many keys of little weight add is seen."""
    import torch

    p, found = problem, dict(ORDINARY(problem, generator, device))
    dtype = getattr(torch, p.dtype)
    k, v = (torch.randn(p.batch, p.s_k, p.kv_heads, p.head_dim, generator=generator) for _ in range(2))
    q = torch.zeros(p.batch, p.t, p.heads, p.head_dim)
    q[..., 0] = Q_COLUMN
    for tile in range(-(-p.s_k // 64)):
        from_last = -(-p.s_k // 64) - 1 - tile
        scores = torch.full((64,), LOW if from_last else 0.0)
        if from_last % 2:
            scores[:], scores[1] = -400.0, HIGH
        keys = k[:, tile * 64 : (tile + 1) * 64, :, 0]
        keys[:] = (scores / (Q_COLUMN * p.head_dim**-0.5 * LOG2_E))[: keys.shape[1], None]
    return found | {"q": q.to(dtype), "k": k.to(dtype), "v": (v + 3.0).to(dtype)}


def steep(problem, generator, device):
    """Scores of some hundred by standard deviation: of most rows one key has all the weight."""
    import torch

    p = problem
    q = 300.0 * torch.randn(p.batch, p.t, p.heads, p.head_dim, generator=generator)
    return dict(ORDINARY(problem, generator, device)) | {"q": q.to(getattr(torch, p.dtype))}


fmha_late_and_flat = dataclasses.replace(shipped.fmha, name="fmha_late_and_flat", inputs=late_and_flat)
fmha_steep = dataclasses.replace(shipped.fmha, name="fmha_steep", inputs=steep)
