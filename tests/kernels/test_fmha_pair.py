"""The Blackwell attention kernel on pairs of CTAs, executed by the simulator: right results, no fault under --strict.

The inputs are awkward by themselves (kernel_specs/attention/inputs.py): sequences without keys, ragged ones, NaN in
every row of K and V that no query may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kernel_specs.kernels.fmha_sm100_pair_space import BASE
from tests.kernels.simulated import SPEC, Run, quick_but, simulating
from tunekit.arch import ARCHES
from tunekit.space import expand

ARCH, KERNEL = "sm_100a", "sm100_pair"
MQA = {"heads": 128, "kv_heads": 1, "t": 1, "head_dim": 512}
HALF = {**MQA, "heads": 64}  # a CTA's rows are one position's
ODD = {"heads": 6, "kv_heads": 2, "head_dim": 512}  # three heads a KV head: nothing packs into 64 rows
TWO = {"sources": 2, "s_k2": 90}
WINDOW = {"mask": "window", "window_left": 70, "window_right": 3}
LONG_WINDOW = {"mask": "window", "window_left": 127, "window_right": 0}
LISTS = {"gather": True, "top_k": 64, "s_k": 200}
TILE_128 = {"kv_tile": 128, "kv_stage": 1}
SPLIT = {"tma_o": False, "num_splits": 2}

COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two sources of lengths, window, sink, shared KV": (
        {**MQA, **TWO, **WINDOW, "batch": 2, "s_k": 100, "kv_shared": True, "has_lengths": True, "has_sink": True}
        | {"return_lse": True},
        {},
    ),
    "packed sequences, causal, fp16": (
        {**HALF, "batch": 3, "t": 5, "s_k": 150, "varlen": True, "mask": "causal", "dtype": "float16"}
        | {"return_lse": True},
        {},
    ),
    "pages, a split of the keys": (
        {**MQA, "batch": 2, "s_k": 256, "page": 64, "has_lengths": True, "normalize": False},
        SPLIT,
    ),
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with simulating(ARCH, KERNEL, tmp_path_factory.mktemp("pair")) as run:
        yield run


def check(simulated: Run, problem: dict[str, Any], tunables: dict[str, Any], schedules: int = 1) -> None:
    outcome = simulated(problem, {**BASE, **tunables}, schedules=schedules, strict=True)
    assert outcome.ok, outcome.reason
    assert not outcome.facts.get("spill_bytes")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", quick_but(COMBINED, set(COMBINED) - {"two sources of lengths, window, sink, shared KV"})
)
def test_flags_in_combination(simulated: Run, name: str) -> None:
    check(simulated, *COMBINED[name])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one key": ({**MQA, "s_k": 1}, {}),
    "one tile": ({**MQA, "s_k": 64}, {}),
    "an even number of tiles": ({**MQA, "s_k": 256}, {}),
    "the ring many times": ({**MQA, "s_k": 900}, {}),
    "one stage": ({**MQA, "s_k": 300}, {"kv_stage": 1}),
    "one score tile": ({**MQA, "s_k": 300}, {"s_stage": 1}),
    "tiles of 128 keys": ({**MQA, "s_k": 300}, TILE_128),
    "tiles of 128 keys, lengths": ({**MQA, "batch": 4, "s_k": 300, "has_lengths": True}, {**TILE_128, "s_stage": 1}),
    "O rescaled at once": ({**MQA, "s_k": 300}, {"rescale_log2": 0}),
    "O from registers": ({**MQA, "s_k": 200}, {"tma_o": False}),
    "shared KV": ({**MQA, "s_k": 300, "kv_shared": True}, {}),
    "lengths of shared KV": ({**MQA, "batch": 4, "s_k": 150, "kv_shared": True, "has_lengths": True}, {}),
    "lengths": ({**MQA, "batch": 4, "s_k": 150, "has_lengths": True, "return_lse": True}, {}),
    "sink": ({**MQA, "batch": 4, "s_k": 150, "has_lengths": True, "has_sink": True}, {}),
    "an odd number of positions": ({**HALF, "t": 3, "s_k": 200}, {}),
    "causal": ({**HALF, "t": 3, "s_k": 200, "mask": "causal", "return_lse": True}, {}),
    "causal with more queries than keys": ({**ODD, "t": 100, "s_k": 70, "mask": "causal", "return_lse": True}, {}),
    "causal, top-left": ({**ODD, "t": 70, "s_k": 150, "mask": "causal_top_left"}, {}),
    "window": ({**HALF, **LONG_WINDOW, "t": 4, "s_k": 700}, {}),
    "two sources": ({**MQA, **TWO, "batch": 4, "s_k": 100, "has_lengths": True}, {}),
    "pages": ({**HALF, "batch": 4, "t": 3, "s_k": 256, "page": 128, "has_lengths": True, "mask": "causal"}, {}),
    "packed sequences": ({**HALF, "batch": 3, "t": 7, "s_k": 150, "varlen": True, "mask": "causal"}, {}),
    "fp16": ({**MQA, "s_k": 150, "dtype": "float16"}, {}),
    "parts to merge": ({**MQA, "s_k": 300, "normalize": False}, {}),
    "parts to merge, O rescaled at once": ({**MQA, "s_k": 300, "normalize": False}, {"rescale_log2": 0}),
    "splits": ({**MQA, "s_k": 300, "has_sink": True, "return_lse": True}, SPLIT),
    "splits without a tile": ({**MQA, "batch": 2, "s_k": 260, "has_lengths": True}, {"tma_o": False, "num_splits": 4}),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_each_flag_and_tunable(simulated: Run, name: str) -> None:
    check(simulated, *CASES[name], schedules=5)


@pytest.mark.parametrize(
    "problem",
    [{**MQA, "s_k": 64, "head_dim": 256}, {**HALF, "s_k": 64}, {**MQA, **LISTS}],
    ids=["narrower heads", "rows of one CTA", "lists"],
)
def test_what_a_pair_does_not_do_has_no_variant(problem: dict[str, Any]) -> None:
    variants = expand(SPEC, ARCHES[ARCH], SPEC.problem(problem), KERNEL).variants
    assert not list(variants)
