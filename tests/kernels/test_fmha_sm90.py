"""Every flag of the Hopper attention kernel, executed by the simulator: right results and no fault.

The inputs are awkward by themselves (kernel_specs/attention/inputs.py): sequences without keys, ragged ones, NaN in
every row of K and V that no query may see. The slow tests cross the flags with head dims, `smem_p` and `normalize`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.simulated import SPEC, Run, quick_but, simulating
from tests.kernels.test_fmha import declared, fitting, run
from tunekit.arch import ARCHES
from tunekit.compiling import units
from tunekit.model import Values, Variant
from tunekit.probe import Probe
from tunekit.space import broken, expand

ARCH, KERNEL = "sm_90a", "sm90"
GQA = {"heads": 2, "kv_heads": 1}
MQA = {"heads": 64, "kv_heads": 1}
ODD = {"heads": 3, "kv_heads": 1}  # three heads a KV head: nothing packs into 64 rows
WINDOW = {"mask": "window", "window_left": 70, "window_right": 3}
TWO = {"sources": 2, "s_k2": 90}
LISTED = {"gather": True, "top_k": 150}

# Together they have every flag; each has two CTAs along the rows at least, and ragged ends.
COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal sink lse fp16": (
        {**ODD, "t": 70, "s_k": 130, "head_dim": 64, "mask": "causal", "return_lse": True, "has_sink": True}
        | {"dtype": "float16"},
        {"m_tile": 64, "kv_tile": 64, "kv_stage": 2, "smem_p": True, "rescale_log2": 8},
    ),
    "two sources lengths window sink": (
        {**MQA, **TWO, **WINDOW, "batch": 5, "t": 2, "s_k": 100, "head_dim": 64, "has_lengths": True, "has_sink": True}
        | {"return_lse": True},
        {"m_tile": 64, "kv_tile": 64, "kv_stage": 2, "kv_groups": 2},
    ),
    "pages lengths window of packed sequences": (
        {**ODD, **WINDOW, "batch": 4, "t": 70, "s_k": 150, "head_dim": 64, "varlen": True, "page": 64}
        | {"has_lengths": True},
        {"m_tile": 64, "kv_tile": 64, "kv_stage": 2, "cluster_m": 2},
    ),
    "causal, heads side by side": (
        {"batch": 2, "heads": 6, "kv_heads": 3, "t": 100, "s_k": 130, "head_dim": 64, "mask": "causal"},
        {"m_tile": 64, "kv_tile": 64, "kv_stage": 2},
    ),
    "causal packed sequences to merge": (
        {**GQA, "batch": 3, "t": 150, "s_k": 150, "head_dim": 64, "varlen": True, "mask": "causal", "normalize": False},
        {"m_tile": 128, "kv_tile": 64, "kv_stage": 2},
    ),
    "shared KV lengths": (
        {**GQA, "batch": 3, "t": 100, "s_k": 150, "head_dim": 128, "head_dim_v": 64, "kv_shared": True}
        | {"has_lengths": True, "return_lse": True},
        {"m_tile": 128, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2},
    ),
    "split K, narrow V, top-left": (
        {**GQA, "t": 100, "s_k": 100, "head_dim": 256, "head_dim_v": 128, "mask": "causal_top_left"},
        {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, "k_sub": 2},
    ),
    "two sources, the second listed, lengths window sink": (
        {**MQA, **WINDOW, "t": 2, "s_k": 100, "head_dim": 64, "sources": 2, "s_k2": 200, "gather": True, "top_k": 90}
        | {"has_lengths": True, "has_sink": True, "return_lse": True},
        {"m_tile": 64, "kv_tile": 64, "kv_stage": 2},
    ),
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with simulating(ARCH, KERNEL, tmp_path_factory.mktemp("sm90")) as run:
        yield run


LONGER = {
    "two sources, the second listed, lengths window sink",
    "split K, narrow V, top-left",
    "shared KV lengths",
    "causal, heads side by side",
    "pages lengths window of packed sequences",
    "causal packed sequences to merge",
}


@pytest.mark.parametrize("name", quick_but(COMBINED, LONGER))
def test_flags_in_combination(simulated: Run, name: str) -> None:
    problem, tunables = COMBINED[name]
    outcome = simulated(problem, tunables, schedules=2)
    assert outcome.ok, outcome.reason
    assert not outcome.facts.get("spill_bytes") and not outcome.facts.get("wgmma_serialized")


# More row blocks than there are CTAs.
PERSISTENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"batch": 5, "heads": 9, "kv_heads": 9, "t": 190, "s_k": 150}, {"m_tile": 64}),
    "causal": (
        {"batch": 3, "heads": 15, "kv_heads": 15, "t": 380, "s_k": 400, "mask": "causal", "return_lse": True},
        {"m_tile": 128, "kv_stage": 3, "rescale_log2": 8},
    ),
    "packed causal": (
        {**ODD, "batch": 45, "t": 100, "s_k": 150, "varlen": True, "total_t": 3000, "mask": "causal", "has_sink": True},
        {"m_tile": 64, "kv_stage": 1, "smem_p": True},
    ),
    "two sources lengths window": (
        {**GQA, **TWO, **WINDOW, "batch": 70, "t": 70, "s_k": 150, "has_lengths": True},
        {"m_tile": 64, "kv_stage": 2},
    ),
    "shared": (
        {"batch": 9, "heads": 20, "kv_heads": 20, "t": 100, "s_k": 150, "kv_shared": True, "has_lengths": True},
        {"m_tile": 128, "kv_stage": 2},
    ),
    "each K tile in two stages": (
        {"batch": 67, "heads": 2, "kv_heads": 2, "t": 64, "s_k": 150, "head_dim": 256},
        {"m_tile": 64, "kv_stage": 1, "k_sub": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PERSISTENT)
def test_persistent_rounds(simulated: Run, name: str) -> None:
    problem, tunables = PERSISTENT[name]
    check(simulated, {"head_dim": 64, **problem}, {"schedule": "persistent", "kv_tile": 64, **tunables})


# One flag or two at a time, on shapes that every head dim can afford.
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"t": 100, "s_k": 150},
    "lse": {"t": 100, "s_k": 150, "return_lse": True},
    "fp16": {"t": 100, "s_k": 150, "dtype": "float16"},
    "causal": {"t": 100, "s_k": 150, "mask": "causal", "return_lse": True},
    "causal, more queries than keys": {"t": 150, "s_k": 60, "mask": "causal", "return_lse": True},
    "causal_top_left": {"t": 150, "s_k": 100, "mask": "causal_top_left"},
    "window": {"t": 130, "s_k": 200, **WINDOW, "return_lse": True},
    "window without a right side": {"t": 130, "s_k": 200, "mask": "window", "window_left": 20},
    "window of one key": {"t": 130, "s_k": 200, "mask": "window", "window_left": 0, "window_right": 0},
    "lengths": {"batch": 5, "t": 70, "s_k": 150, "has_lengths": True, "return_lse": True},
    "lengths causal": {"batch": 5, "t": 70, "s_k": 150, "has_lengths": True, "mask": "causal"},
    "two sources": {"t": 100, "s_k": 150, **TWO, "return_lse": True},
    "two sources lengths causal": {"batch": 5, "t": 70, "s_k": 150, **TWO, "has_lengths": True, "mask": "causal"},
    "two sources lengths window": {"batch": 5, "t": 70, "s_k": 150, **TWO, **WINDOW, "has_lengths": True},
    "pages": {"batch": 3, "t": 70, "s_k": 200, "page": 128, "has_lengths": True},
    "pages causal": {"batch": 3, "t": 70, "s_k": 200, "page": 64, "has_lengths": True, "mask": "causal"},
    "packed": {"batch": 3, "t": 100, "s_k": 150, "varlen": True, "return_lse": True},
    "packed causal": {"batch": 3, "t": 150, "s_k": 150, "varlen": True, "mask": "causal"},
    "packed pages": {"batch": 3, "t": 100, "s_k": 150, "varlen": True, "page": 64, "has_lengths": True},
}
TILES = {
    64: {"m_tile": 128, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2},
    128: {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2},
    256: {"m_tile": 64, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, "k_sub": 2},
    512: {"m_tile": 64, "pv_n_tile": 256, "kv_tile": 64, "kv_stage": 1},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("flags", "head_dim"), list(itertools.product(FLAGS, TILES)))
def test_flags_at_every_head_dim(simulated: Run, flags: str, head_dim: int) -> None:
    """`smem_p`, `normalize` and a sink in turn: over the head dims a flag meets all of them."""
    turn = list(FLAGS).index(flags) + list(TILES).index(head_dim)
    normalize = turn % 2 == 0
    problem = {**GQA, "head_dim": head_dim, **FLAGS[flags], "normalize": normalize, "has_sink": turn % 4 == 0}
    outcome = simulated(problem, {**TILES[head_dim], "smem_p": turn // 2 % 2 == 0}, schedules=3)
    assert outcome.ok, outcome.reason


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [name for name in FLAGS if "fp16" not in name])
def test_flags_with_shared_kv(simulated: Run, flags: str) -> None:
    """V is K's columns; two KV groups, which wait for different stages, and two warp groups, which share them."""
    problem = {**MQA, "head_dim": 128, "head_dim_v": 64, **FLAGS[flags], "kv_shared": True}
    problem["t"] = 3
    for groups in ({"m_tile": 64, "kv_groups": 2, "kv_stage": 4}, {"m_tile": 128, "kv_groups": 1, "kv_stage": 2}):
        outcome = simulated(problem, {"pv_n_tile": 64, "kv_tile": 64, **groups}, schedules=3)
        assert outcome.ok, outcome.reason


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", ["plain", "causal", "window", "two sources lengths window", "packed causal", "pages"])
def test_flags_with_lazy_rescaling_clusters_and_three_warp_groups(simulated: Run, flags: str) -> None:
    problem = {**ODD, "head_dim": 64, **FLAGS[flags]}
    for tunables in (
        {"m_tile": 192, "kv_tile": 128 if "pages" not in flags else 64, "rescale_log2": 8},
        {"m_tile": 64, "kv_tile": 64, "cluster_m": 2, "ctas_per_sm": 2, "rescale_log2": 8},
        {"m_tile": 128, "kv_tile": 64, "cluster_m": 2, "smem_p": True},
    ):
        outcome = simulated(problem, {"pv_n_tile": 64, "kv_stage": 2, **tunables}, schedules=3)
        assert outcome.ok, outcome.reason


# Of a gathered source; 64 query heads a KV head, or 128.
GATHERED: dict[str, dict[str, Any]] = {
    "listed": {"t": 2, "s_k": 300, **LISTED, "return_lse": True},
    "listed, fewer rows than entries": {"t": 2, "s_k": 100, **LISTED},
    "two sources": {"t": 2, "s_k": 150, "sources": 2, "s_k2": 300, **LISTED, "return_lse": True},
    "two sources causal": {"t": 2, "s_k": 90, "sources": 2, "s_k2": 100, **LISTED, "mask": "causal"},
    "two sources lengths window": {"batch": 4, "t": 1, "s_k": 150, "sources": 2, "s_k2": 200, **LISTED, **WINDOW}
    | {"has_lengths": True},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("flags", "head_dim"), list(itertools.product(GATHERED, TILES)))
def test_gathered_sources_at_every_head_dim(simulated: Run, flags: str, head_dim: int) -> None:
    """`smem_p`, `normalize` and a sink in turn, shared and separate KV."""
    turn = list(GATHERED).index(flags) + list(TILES).index(head_dim)
    normalize = turn % 2 == 0
    tiles = {**TILES[head_dim], "smem_p": turn // 2 % 2 == 0}
    problem = {"heads": tiles["m_tile"], "kv_heads": 1, "head_dim": head_dim, **GATHERED[flags]}
    problem |= {"normalize": normalize, "has_sink": turn % 4 == 0}
    check(simulated, problem, tiles)
    check(simulated, {**problem, "kv_shared": True}, {**tiles, "k_sub": 1, "kv_stage": 2})


TILINGS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "four stages, two KV groups": (64, False, {"m_tile": 64, "kv_groups": 2, "kv_stage": 4}),
    "shared, four stages, two KV groups": (64, True, {"m_tile": 64, "kv_groups": 2, "kv_stage": 4}),
    "tiles of 128": (128, False, {"m_tile": 128, "kv_tile": 128, "pv_n_tile": 128, "kv_stage": 1}),
    "shared, two CTAs, lazy": (64, True, {"m_tile": 64, "ctas_per_sm": 2, "kv_stage": 3, "rescale_log2": 8}),
    "column slices": (128, False, {"m_tile": 64, "pv_n_tile": 64, "kv_stage": 3}),
    "shared, column slices": (256, True, {"m_tile": 64, "pv_n_tile": 128, "kv_stage": 2}),
    "K in four parts": (256, False, {"m_tile": 64, "pv_n_tile": 256, "k_sub": 4, "kv_stage": 2}),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TILINGS)
def test_gathered_sources_in_every_ring(simulated: Run, name: str) -> None:
    head_dim, shared, tunables = TILINGS[name]
    problem = {**GATHERED["two sources"], "heads": tunables["m_tile"], "kv_heads": 1, "head_dim": head_dim}
    problem |= {"kv_shared": shared, "top_k": 300}
    check(simulated, problem, {"kv_tile": 64, "pv_n_tile": 64, **tunables})


def check(simulated: Run, problem: dict[str, Any], tunables: dict[str, Any]) -> None:
    outcome = simulated(problem, tunables, schedules=3)
    assert outcome.ok, outcome.reason
    assert not outcome.facts.get("spill_bytes") and not outcome.facts.get("wgmma_serialized")


def test_what_a_gathered_source_rules_out() -> None:
    def rule(name: str, heads: int, **tunables: Any) -> str | None:
        kernel = SPEC.implementation(name)
        problem = SPEC.problem({**GATHERED["listed"], "heads": heads, "kv_heads": 1, "head_dim": 64})
        wanted = Values({**kernel.defaults[-1], "pv_n_tile": 64, "merge": "kernel", **tunables})
        found = broken(kernel, problem, wanted)
        return found.name if found else None

    for name in ("sm90", "sm90_split"):
        assert rule(name, 64) is None and rule(name, 128, m_tile=128) is None
        assert rule(name, 32) == "gather_rows" and rule(name, 64, m_tile=128) == "gather_rows"
    assert rule("sm90", 192, m_tile=192) == "gather_registers"
    assert rule("sm90", 64, cluster_m=2) == "gather_multicast"


def problem_of(head_dim: int, flags: str) -> Values:
    return SPEC.problem({**GQA, "head_dim": head_dim, **FLAGS[flags]})


def sample(count: int, seed: int) -> list[tuple[Variant, Values]]:
    """Variants drawn over head dims, flags, and shared KV."""
    draw = random.Random(seed)
    chosen = []
    for _ in range(count):
        problem = problem_of(draw.choice((64, 128, 256, 512)), draw.choice(list(FLAGS)))
        problem = SPEC.problem({**problem, "kv_shared": draw.random() < 0.5})
        chosen.append((draw.choice([v for v in fitting(ARCH, problem) if v.implementation == KERNEL]), problem))
    return chosen


@pytest.mark.slow
def test_traced_footprints_equal_the_declared_ones(tmp_path: Path) -> None:
    gathered = SPEC.problem({**GATHERED["two sources"], "heads": 128, "kv_heads": 1, "head_dim": 256})
    variants = [v for v in fitting(ARCH, gathered) if v.implementation == KERNEL]
    check_footprints([*sample(4, seed=0), (random.Random(0).choice(variants), gathered)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_footprints_equal_the_declared_ones_and_nothing_spills(tmp_path: Path) -> None:
    check_footprints(sample(60, seed=1), tmp_path, trace_only=False)


def check_footprints(wanted: list[tuple[Variant, Values]], root: Path, trace_only: bool = True) -> None:
    pairs = [(units(SPEC, "fmha", p, [variant])[0], p) for variant, p in wanted]
    results = run([unit for unit, _ in pairs], root, trace_only=trace_only)
    for unit, p in pairs:
        result = results[unit.key]
        assert result.ok and result.value is not None, f"{unit.variant}: {result.reason}"
        assert Probe.of_report(result.value, declared(unit.variant, p)).disagreements() == [], unit.variant
        if not trace_only:
            assert (result.value["compiled"]["spill_bytes"] or 0) <= 16, f"{p}: {unit.variant} spills"


def test_each_tunable_only_where_it_means_something() -> None:
    def kept(name: str, **more: Any) -> set[Any]:
        problem = SPEC.problem({**GQA, "t": 1, "s_k": 256, "head_dim": 128, **more})
        found = expand(SPEC, ARCHES[ARCH], problem).variants
        return {v.tunables[name] for v in found if v.implementation == KERNEL}

    assert kept("rescale_log2") == {0, 8} and kept("rescale_log2", normalize=False) == {0}
    assert kept("kv_stage", kv_shared=True) == {2, 3, 4} and kept("k_sub", head_dim=256, kv_shared=True) == {1}
    assert kept("kv_tile", page=64, has_lengths=True) == {64} and kept("kv_tile", page=128, has_lengths=True) == {
        64,
        128,
    }
    assert kept("pv_n_tile", head_dim_v=64) == {64} and kept("pv_n_tile", head_dim_v=256) == {64, 128}
