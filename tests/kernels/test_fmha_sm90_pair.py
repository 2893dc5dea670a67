"""The Hopper attention kernel on pairs of CTAs, executed by the simulator: right results, no fault under --strict.

The inputs are awkward by themselves (kernel_specs/attention/inputs.py): sequences without keys, ragged ones, NaN in
every row of K and V that no query may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.simulated import SPEC, Run, quick_but, simulating
from tests.kernels.test_fmha import fitting
from tunekit.model import Variant
from tunekit.spec import absolute_reference

ARCH, KERNEL = "sm_90a", "sm90_pair"
MQA = {"heads": 64, "kv_heads": 1, "t": 1, "head_dim": 512}
SHARED = {**MQA, "kv_shared": True}
LAYER = {"sources": 2, "has_sink": True, "return_lse": True}
WINDOW = {"mask": "window", "window_left": 127, "window_right": 0}
FAR_SCORES = Path(__file__).parents[1] / "specs" / "fmha_far_scores.py"
BASE = {"key_slots": 2, "prefetch": 0, "rescale_log2": 8}

COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a layer of latent KV: two sources of lengths, window, sink": (
        {**SHARED, **LAYER, **WINDOW, "batch": 2, "t": 2, "s_k": 200, "s_k2": 150, "has_lengths": True},
        {},
    ),
    "separate K and V, the rings many times": ({**MQA, "s_k": 1100, "return_lse": True}, {"key_slots": 3}),
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with simulating(ARCH, KERNEL, tmp_path_factory.mktemp("pair")) as run:
        yield run


def check(
    simulated: Run, problem: dict[str, Any], tunables: dict[str, Any], schedules: int = 1, spec: str = "fmha"
) -> None:
    outcome = simulated(problem, {**BASE, **tunables}, schedules=schedules, strict=True, spec=spec)
    assert outcome.ok, outcome.reason
    assert not outcome.facts.get("spill_bytes") and not outcome.facts.get("wgmma_serialized")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", quick_but(COMBINED, {"separate K and V, the rings many times"}))
def test_flags_in_combination(simulated: Run, name: str) -> None:
    check(simulated, *COMBINED[name])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one key": ({**SHARED, "s_k": 1, "return_lse": True}, {}),
    "one tile": ({**SHARED, "s_k": 64}, {}),
    "an even number of tiles": ({**SHARED, "s_k": 256}, {}),
    "an odd number of tiles": ({**SHARED, "s_k": 300}, {}),
    "the rings many times": ({**SHARED, "s_k": 1100}, {}),
    "separate, one key": ({**MQA, "s_k": 1}, {}),
    "separate, one tile": ({**MQA, "s_k": 50}, {"key_slots": 3}),
    "separate, odd": ({**MQA, "s_k": 300}, {}),
    "separate, three slots for keys": ({**MQA, "s_k": 700}, {"key_slots": 3}),
    "separate, four slots for keys": ({**MQA, "s_k": 700}, {"key_slots": 4}),
    "two row blocks prefetch in turns": ({**SHARED, "heads": 128, "s_k": 500}, {"prefetch": 1}),
    "separate, prefetched, two sources": ({**MQA, **LAYER, "s_k": 200, "s_k2": 300}, {"prefetch": 2}),
    "exact maxima": ({**SHARED, "s_k": 450, "has_sink": True, "return_lse": True}, {"rescale_log2": 0}),
    "fp16": ({**SHARED, "s_k": 150, "dtype": "float16", "return_lse": True}, {}),
    "lengths": ({**SHARED, "batch": 5, "s_k": 200, "has_lengths": True, "has_sink": True, "return_lse": True}, {}),
    "separate, lengths": ({**MQA, "batch": 5, "s_k": 200, "has_lengths": True, "return_lse": True}, {"key_slots": 4}),
    "causal": ({**SHARED, "heads": 8, "t": 20, "s_k": 100, "mask": "causal"}, {}),
    "causal, few keys, more queries": (
        {**SHARED, "heads": 8, "t": 20, "s_k": 10, "mask": "causal", "return_lse": True},
        {},
    ),
    "causal from the top left": ({**SHARED, "heads": 8, "t": 20, "s_k": 100, "mask": "causal_top_left"}, {}),
    "window": ({**MQA, "heads": 16, "t": 9, "s_k": 300, **WINDOW, "return_lse": True}, {}),
    "two sources": ({**SHARED, **LAYER, **WINDOW, "t": 2, "s_k": 300, "s_k2": 100}, {}),
    "separate, two sources, lengths": ({**MQA, **LAYER, "batch": 5, "s_k": 128, "s_k2": 150, "has_lengths": True}, {}),
    "pages": ({**SHARED, "batch": 3, "t": 2, "s_k": 200, "page": 64, "has_lengths": True, "mask": "causal"}, {}),
    "packed": ({**MQA, "batch": 3, "t": 2, "s_k": 150, "varlen": True, "mask": "causal", "return_lse": True}, {}),
    "heads that do not pack": ({"heads": 6, "kv_heads": 2, "t": 5, "s_k": 100, "head_dim": 512}, {}),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_flags_one_by_one(simulated: Run, name: str) -> None:
    check(simulated, *CASES[name], schedules=5)


FAR: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # P of up to 2^8 by a power of two that float16 lacks: what is left of 64 keys is seen.
    "float16, keys far below another's": ("late_and_flat", {**MQA, "s_k": 192, "dtype": "float16"}, {}),
    "float16, the same from exact maxima": (
        "late_and_flat",
        {**MQA, "s_k": 192, "dtype": "float16"},
        {"rescale_log2": 0},
    ),
    "bfloat16, keys far below another's": ("late_and_flat", {**MQA, "s_k": 192}, {}),
    "scores of hundreds": ("steep", {**MQA, "s_k": 300, "return_lse": True}, {}),
    "scores of hundreds, float16": ("steep", {**MQA, "s_k": 300, "dtype": "float16", "return_lse": True}, {}),
    "scores of hundreds, causal": (
        "steep",
        {**MQA, "heads": 8, "t": 9, "s_k": 200, "mask": "causal", "return_lse": True},
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAR)
def test_scores_far_apart(simulated: Run, name: str) -> None:
    inputs, problem, tunables = FAR[name]
    check(simulated, problem, tunables, schedules=2, spec=absolute_reference(f"{FAR_SCORES}:fmha_{inputs}"))


def pairs(**problem: Any) -> list[Variant]:
    return [v for v in fitting(ARCH, SPEC.problem({**MQA, "s_k": 128, **problem})) if v.implementation == KERNEL]


def test_it_is_for_512_columns_that_are_normalised_and_dense() -> None:
    assert not pairs(head_dim=256)
    assert not pairs(normalize=False)
    assert not pairs(gather=True, top_k=64)
    assert {v.tunables.key_slots for v in pairs()} == {2, 3, 4}
    assert {v.tunables.key_slots for v in pairs(kv_shared=True)} == {2}
