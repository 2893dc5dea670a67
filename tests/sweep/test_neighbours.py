"""A search starts from what won for the nearest problems."""

from __future__ import annotations

import pytest

from tests.sweep.conftest import Cache, reference
from tunekit import identity
from tunekit.model import Environment, Values, Winner
from tunekit.spec import load_spec
from tunekit.sweep.neighbours import neighbours_winners

MANY = reference("host_many", "host_many")


def winner(n: int, number: int, version: int = 1) -> Winner:
    spec = load_spec(MANY)
    variant = identity.variant("host_many", version, "loop", "host", Values(number=number))
    problem = spec.problem({"n": n})
    return Winner(variant, problem, spec.bucket(problem), Environment(), "final/1", "0" * 64, "s", 1.0, 0.1, 8)


def test_the_nearest_buckets_come_first_each_winner_once_and_not_the_own() -> None:
    spec = load_spec(MANY)
    version = spec.version
    winners = [winner(n, number, version) for n, number in ((4096, 1), (64, 2), (256, 3), (32, 4), (1024, 3), (512, 3))]
    found = neighbours_winners(spec, spec.problem({"n": 64}), winners)
    assert [variant.tunables.number for variant in found] == [4, 3]


def test_winners_of_another_version_are_left_out() -> None:
    spec = load_spec(MANY)
    assert neighbours_winners(spec, spec.problem({"n": 64}), [winner(128, 1, spec.version + 1)]) == []


@pytest.mark.slow
def test_a_second_shape_begins_with_the_firsts_winner(cache: Cache) -> None:
    first = cache.run(MANY, {"n": 64}).problems[0].winner
    second = cache.run(MANY, {"n": 256}, search="random", budget="2").problems[0]
    assert first is not None
    assert first.variant.id in {row.variant.id for row in second.rows}
