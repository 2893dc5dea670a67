"""The attention spec with torch's functions alone, for tensors of the CPU: what `fmha` computes, without a GPU."""

from __future__ import annotations

import dataclasses

from tunekit.spec import load_spec

fmha = load_spec("fmha")
host_attention = dataclasses.replace(
    fmha,
    name="host_attention",
    implementations=tuple(
        dataclasses.replace(implementation, requires=frozenset({"host"}))
        for implementation in fmha.implementations
        if implementation.name == "torch_sdpa"
    ),
)
SPECS = [host_attention]
del fmha  # it runs on no host
