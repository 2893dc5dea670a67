"""The mask's runs of keys and tile ranges against a predicate for each pair, in plain Python numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from loading import module_of

SOURCE = Path(__file__).resolve().parents[2] / "kernel_specs" / "kernels" / "attention" / "mask.py"


@pytest.fixture(scope="module")
def module() -> Any:
    return module_of(SOURCE)


def sees(kind: str, i: int, j: int, queries: int, keys: int, left: int, right: int) -> bool:
    diagonal = i + keys - queries
    if kind == "causal":
        return j <= diagonal
    if kind == "causal_top_left":
        return j <= i
    if kind == "window":
        return (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)
    return True


@pytest.mark.parametrize("kind", ["none", "causal", "causal_top_left", "window"])
def test_runs_and_tiles_hold_what_the_predicate_says(module: Any, kind: str) -> None:
    draw = random.Random(kind)
    seen_full = seen_empty = 0
    for _ in range(2000):
        queries, keys, tile = draw.randint(1, 40), draw.randint(0, 60), draw.choice((4, 8))
        left, right = (draw.choice((-1, 0, 1, 5, 20)) for _ in range(2))
        first, last = sorted(draw.randrange(queries) for _ in range(2))
        mask = module.Mask(kind, tile)
        pairs = {
            i: [j for j in range(keys) if sees(kind, i, j, queries, keys, left, right)] for i in range(first, last + 1)
        }
        for i, visible in pairs.items():
            begin, end = mask.visible(i, queries, keys, left, right)
            assert begin >= 0 and end <= keys
            assert visible == list(range(begin, end))
        tiles = mask.tiles(first, last, queries, keys, left, right)
        assert {j // tile for visible in pairs.values() for j in visible} <= set(range(tiles.begin, tiles.end))
        assert 0 <= tiles.begin <= tiles.end <= -(-keys // tile)
        seen_empty += tiles.begin == tiles.end
        for number in range(max(tiles.begin, tiles.full_begin), min(tiles.end, tiles.full_end)):
            keys_of_tile = set(range(number * tile, (number + 1) * tile))
            assert all(keys_of_tile <= set(visible) for visible in pairs.values())
            seen_full += 1
    assert seen_full > 100 and seen_empty > 10
