"""flash-attn-4 as the spec `fmha` plugs it in: the spec's own draws, NaN past every length, against its oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem and a variant. `outputs` are the positions of the kernel's arguments that it writes."""

    arch: str
    problem: Mapping[str, Any]
    tunables: Mapping[str, Any]
    outputs: tuple[int, ...] = (3, 4)


MHA = {"batch": 1, "heads": 2, "kv_heads": 2, "t": 130, "s_k": 200, "head_dim": 64}
GQA = {"batch": 2, "heads": 4, "kv_heads": 2, "t": 3, "s_k": 200, "head_dim": 64}
WINDOW = {"mask": "window", "window_left": 40, "window_right": 3}
PAGED = {"page": 64, "has_lengths": True, "s_k": 192}
CHOSEN = {"tile_m": 0, "tile_n": 0, "mma_pv_is_rs": True, "intra_wg_overlap": True}
TILED = {**CHOSEN, "tile_m": 64, "tile_n": 96}
PROBLEMS: dict[str, Mapping[str, Any]] = {
    "plain": MHA,
    "lse": {**MHA, "return_lse": True, "dtype": "float16"},
    "causal": {**MHA, "mask": "causal", "return_lse": True},
    "no_keys": {**MHA, "mask": "causal", "t": 200, "s_k": 70, "return_lse": True},
    "square": {**MHA, "mask": "causal_top_left", "t": 200},
    "window": {**MHA, **WINDOW, "return_lse": True},
    "sink": {**GQA, "has_sink": True, "mask": "causal"},
    "shared": {**GQA, "kv_shared": True, "head_dim": 128, "head_dim_v": 64},
    "packed": {**GQA, "varlen": True, "t": 70, "mask": "causal", "return_lse": True},
    "paged": {**GQA, **PAGED, "batch": 4},
    "paged_packed": {**GQA, **PAGED, "batch": 4, "varlen": True, "mask": "causal", "return_lse": True},
    "wide": {**MHA, "head_dim": 256, "t": 70},
}
CASES = {
    **{
        f"{name}_sm90": Case("sm_90a", problem, {**CHOSEN, "pack_gqa": problem["heads"] != problem["kv_heads"]})
        for name, problem in PROBLEMS.items()
    },
    **{
        f"{name}_sm90_tiled": Case("sm_90a", PROBLEMS[name], {**TILED, "pack_gqa": True, **flags})
        for name, flags in {
            "sink": {"mma_pv_is_rs": False},
            "packed": {"intra_wg_overlap": False},
            "paged": {},
        }.items()
    },
    **{
        f"{name}_sm100": Case(
            "sm_100a", problem, {"tile_n": 128, "num_splits": 1, "pack_gqa": problem["heads"] != problem["kv_heads"]}
        )
        for name, problem in PROBLEMS.items()
    },
}
LIMITS = {"o": 3e-3, "lse": 1e-5}
NO_KEY = -1e4
"""What stands for the LSE of a row without keys, where minus infinity has no difference."""


def run(case: Case, seed: int) -> list[tuple[str, Any, Any, float]]:
    """Call the function that tunekit would serve; name, result, oracle and limit of each output."""
    import torch

    from tunekit.arch import parse_arch
    from tunekit.backends.load import make
    from tunekit.model import Values
    from tunekit.space import broken
    from tunekit.spec import Build, load_spec
    from tunekit.spec.inputs import draw, scalars

    spec, arch = load_spec("fmha"), parse_arch(case.arch)
    problem, tunables = spec.problem(case.problem), Values(case.tunables)
    implementation = spec.implementation(f"flash_attn_4_{case.arch.removesuffix('a').replace('_', '')}")
    refused = broken(implementation, problem, tunables)
    if refused is not None:
        raise ValueError(f"{refused.name}: {refused.why}")
    inputs = draw(spec, problem, seed, torch.device("cpu"))
    numbers = scalars(spec, problem)
    given: dict[str, Any] = {}
    for argument in spec.arguments(problem):
        if argument.name in inputs or argument.name in numbers:
            given[argument.name] = inputs.get(argument.name, numbers.get(argument.name))
        else:
            dtype = getattr(torch, argument.dtype_of(problem))
            given[argument.name] = torch.full(argument.sizes(problem), float("nan"), dtype=dtype)
    make(implementation, Build(arch, spec.static(problem), tunables))(*given.values())
    wanted = spec.reference(problem, {**inputs, **numbers})
    return [
        (name, *(tensor.double().clamp(min=NO_KEY) for tensor in (given[name], wanted[name])), LIMITS[name])
        for name in wanted
    ]
