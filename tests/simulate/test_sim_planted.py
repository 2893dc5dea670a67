"""Planted faults: each is found and named, and the kernel without it runs clean under several schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import planted_cluster
import planted_copies
import planted_plain
import planted_ring
import planted_tensor
import planted_warpgroup
import pytest
from planted import Base, Plant

MODULES = (planted_ring, planted_copies, planted_cluster, planted_warpgroup, planted_tensor, planted_plain)
PLANTS: tuple[Plant, ...] = tuple(plant for module in MODULES for plant in module.PLANTS)
BASES: tuple[Base, ...] = tuple({plant.base.name: plant.base for plant in PLANTS}.values())
SEEDS = range(5)


def _run(run_ptx: Callable[..., Any], base: Base, text: str, seed: int, **changes: Any) -> Any:
    settings = {"block": base.block, "grid": base.grid, "cluster": base.cluster, "shared": base.shared}
    settings |= {"parameters": base.parameters, **changes}
    return run_ptx(text, base.buffers(), seed=seed, unwritten=tuple(base.expected()), **settings)


def _right(base: Base, ran: Any) -> bool:
    return all(np.array_equal(ran.buffers[name], wanted) for name, wanted in base.expected().items())


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernel_without_a_fault_runs_clean(run_ptx: Callable[..., Any], base: Base, seed: int) -> None:
    ran = _run(run_ptx, base, base.text, seed, strict=True)
    assert not ran.faults, [str(fault) for fault in ran.faults]
    assert _right(base, ran)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.base.name}: {plant.name}")
def test_a_planted_fault_is_found_and_named(run_ptx: Callable[..., Any], plant: Plant) -> None:
    found = []
    for seed in SEEDS:
        ran = _run(run_ptx, plant.base, plant.text, seed, **plant.changes)
        named = [f for f in ran.faults if f.kind in plant.finds and (not plant.at or plant.at in f.place.text)]
        found.append(bool(named) or (plant.wrong and not _right(plant.base, ran)))
        if not found[-1] and not plant.some:
            pytest.fail(f"seed {seed}: {[(f.kind.value, f.message, f.place.text) for f in ran.faults]}")
    assert any(found)


def test_there_are_at_least_25() -> None:
    assert len(PLANTS) >= 25
