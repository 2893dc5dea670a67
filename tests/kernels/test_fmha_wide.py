"""The wide Hopper attention kernel, executed by the simulator: right results and no fault, whatever the schedule.

The inputs are awkward by themselves (kernel_specs/attention/inputs.py): sequences without keys, ragged ones, lists with
gaps, NaN in every row of K and V that no query may see.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.simulated import SPEC, Run, quick_but, simulating
from tests.kernels.test_fmha import declared, fitting, run
from tunekit.compiling import units
from tunekit.model import Values, Variant
from tunekit.probe import Probe

ARCH, KERNEL = "sm_90a", "sm90_wide"
MQA = {"heads": 64, "kv_heads": 1, "t": 1, "head_dim": 512}
SHARED = {**MQA, "kv_shared": True}
LAYER = {"sources": 2, "has_sink": True, "return_lse": True}
WINDOW = {"mask": "window", "window_left": 127, "window_right": 0}
PLAIN = {
    "kv_tile": 64,
    "part_columns": 128,
    "cluster_m": 1,
    "prefetch": 0,
    "rescale_log2": 0,
    "num_splits": 1,
    "merge": "none",
}

FAST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a layer of latent KV, listed entries, no two lengths alike": (
        {**SHARED, **LAYER, "batch": 1, "s_k": 100, "s_k2": 200, "has_lengths": True, "gather": True, "top_k": 90},
        {},
    ),
    "separate K and V, splits merge in the cluster": (
        {**MQA, "s_k": 260, "return_lse": True},
        {"num_splits": 2, "merge": "cluster"},
    ),
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with simulating(ARCH, KERNEL, tmp_path_factory.mktemp("wide")) as run:
        yield run


def check(simulated: Run, problem: dict[str, Any], tunables: dict[str, Any], schedules: int = 1) -> None:
    outcome = simulated(problem, {**PLAIN, **tunables}, schedules=schedules)
    assert outcome.ok, outcome.reason
    assert not outcome.facts.get("spill_bytes") and not outcome.facts.get("wgmma_serialized")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", quick_but(FAST, {"separate K and V, splits merge in the cluster"}))
def test_flags_in_combination(simulated: Run, name: str) -> None:
    check(simulated, *FAST[name])


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one key": ({**SHARED, "s_k": 1}, {}),
    "one tile": ({**SHARED, "s_k": 64}, {}),
    "an even number of tiles": ({**SHARED, "s_k": 256}, {}),
    "an odd number of tiles": ({**SHARED, "s_k": 300}, {}),
    "the ring many times": ({**SHARED, "s_k": 900}, {}),
    "two row blocks prefetch in turns": ({**SHARED, "heads": 128, "s_k": 500}, {"prefetch": 1}),
    "separate, two row blocks prefetch in turns": ({**MQA, "heads": 128, "s_k": 300}, {"prefetch": 2}),
    "separate, one key": ({**MQA, "s_k": 1}, {}),
    "separate, odd": ({**MQA, "s_k": 300}, {}),
    "separate, the ring many times": ({**MQA, "s_k": 900}, {}),
    "tiles of 32 keys": ({**SHARED, "s_k": 170}, {"kv_tile": 32}),
    "separate, tiles of 32 keys": ({**MQA, "s_k": 170}, {"kv_tile": 32, "part_columns": 256}),
    "prefetched": ({**SHARED, "s_k": 450}, {"prefetch": 2}),
    "prefetched, separate, two sources": ({**MQA, **LAYER, "s_k": 200, "s_k2": 300}, {"prefetch": 4}),
    "parts of 256 columns": ({**SHARED, "s_k": 300}, {"part_columns": 256}),
    "separate, parts of 256 columns": ({**MQA, "s_k": 300}, {"part_columns": 256}),
    "multicast": ({**SHARED, "heads": 128, "s_k": 450}, {"cluster_m": 2}),
    "multicast beside a row block that does not exist": ({**SHARED, "s_k": 200}, {"cluster_m": 2}),
    "lazy rescale": ({**SHARED, "s_k": 450, "has_sink": True, "return_lse": True}, {"rescale_log2": 8}),
    "fp16": ({**SHARED, "s_k": 150, "dtype": "float16", "return_lse": True}, {}),
    "to merge": ({**SHARED, "s_k": 150, "normalize": False}, {}),
    "lengths": ({**SHARED, "batch": 5, "s_k": 200, "has_lengths": True, "has_sink": True, "return_lse": True}, {}),
    "separate, lengths, to merge": ({**MQA, "batch": 5, "s_k": 200, "has_lengths": True, "normalize": False}, {}),
    "causal": ({**SHARED, "heads": 8, "t": 20, "s_k": 100, "mask": "causal"}, {}),
    "causal, more queries than keys": (
        {**SHARED, "heads": 8, "t": 20, "s_k": 10, "mask": "causal", "return_lse": True},
        {},
    ),
    "causal from the top left": ({**SHARED, "heads": 8, "t": 20, "s_k": 100, "mask": "causal_top_left"}, {}),
    "window": ({**MQA, "heads": 16, "t": 9, "s_k": 300, **WINDOW, "return_lse": True}, {}),
    "two sources": ({**SHARED, **LAYER, **WINDOW, "t": 2, "s_k": 300, "s_k2": 100}, {}),
    "separate, two sources, lengths": ({**MQA, **LAYER, "batch": 5, "s_k": 128, "s_k2": 150, "has_lengths": True}, {}),
    "splits merge in a cluster": ({**SHARED, "batch": 2, "s_k": 300, "has_sink": True}, {"num_splits": 2}),
    "splits without a tile": (
        {**SHARED, "batch": 4, "s_k": 200, "has_lengths": True, "return_lse": True},
        {"num_splits": 4},
    ),
    "splits merge by a kernel": (
        {**MQA, "batch": 5, "s_k": 300, "has_lengths": True, "return_lse": True},
        {"num_splits": 3, "merge": "kernel"},
    ),
    "multicast splits merge by a kernel": (
        {**SHARED, "heads": 128, "s_k": 450, "has_sink": True},
        {"num_splits": 2, "merge": "kernel", "cluster_m": 2},
    ),
    "listed, one source": ({**SHARED, "t": 2, "s_k": 300, "gather": True, "top_k": 130, "return_lse": True}, {}),
    "separate, listed, two sources, splits": (
        {**MQA, **LAYER, "batch": 2, "s_k": 100, "s_k2": 300, "gather": True, "top_k": 150, "has_lengths": True},
        {"num_splits": 2},
    ),
    "separate, listed, one source": ({**MQA, "t": 2, "s_k": 300, "gather": True, "top_k": 200}, {"part_columns": 256}),
    "listed, tiles of 32": (
        {**SHARED, **LAYER, **WINDOW, "t": 2, "s_k": 200, "s_k2": 300, "gather": True, "top_k": 70},
        {"kv_tile": 32},
    ),
    "pages": ({**SHARED, "batch": 3, "t": 2, "s_k": 200, "page": 64, "has_lengths": True, "mask": "causal"}, {}),
    "packed": (
        {**MQA, "batch": 3, "t": 2, "s_k": 150, "varlen": True, "mask": "causal", "return_lse": True},
        {"num_splits": 2, "merge": "kernel"},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_flags_one_by_one(simulated: Run, name: str) -> None:
    problem, tunables = CASES[name]
    merge = "cluster" if tunables.get("num_splits", 1) > 1 else "none"
    check(simulated, problem, {"merge": merge, **tunables}, schedules=4)


def wide(problem: Values) -> list[Variant]:
    return [v for v in fitting(ARCH, problem) if v.implementation == KERNEL]


def test_it_is_for_512_columns() -> None:
    assert not wide(SPEC.problem({**MQA, "head_dim": 256, "s_k": 128}))
    assert wide(SPEC.problem({**MQA, "s_k": 128}))


def test_one_token_a_row_block_gathers() -> None:
    """A list belongs to one token, so fewer than 64 query heads a KV head can't share a block's list."""
    gathered = {**SHARED, "s_k": 128, "gather": True, "top_k": 64}
    assert {v.tunables.cluster_m for v in wide(SPEC.problem(gathered))} == {1}
    assert not wide(SPEC.problem({**gathered, "heads": 32}))


@pytest.mark.slow
def test_traced_footprints_equal_the_declared_ones(tmp_path: Path) -> None:
    """A sample over what changes the shared memory: shared and separate, gathered and not."""
    wanted = []
    for seed, more in enumerate(({"kv_shared": True}, {}, {"gather": True, "top_k": 64})):
        problem = SPEC.problem({**MQA, "s_k": 128, **more})
        variant = random.Random(seed).choice(wide(problem))
        wanted.append((units(SPEC, "fmha", problem, [variant])[0], problem))
    results = run([unit for unit, _ in wanted], tmp_path, trace_only=True)
    for unit, problem in wanted:
        result = results[unit.key]
        assert result.ok and result.value is not None, f"{unit.variant}: {result.reason}"
        assert Probe.of_report(result.value, declared(unit.variant, problem)).disagreements() == [], unit.variant
