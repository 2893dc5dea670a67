"""The pruned walk keeps, drops and counts what visiting every point does, and visits few of them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tunekit.model import Values
from tunekit.pruning import Dropped, Kept, walk
from tunekit.spec import Constraint, Tunable

NAMES = ("a", "b", "c", "d")


def holds(constraint: Constraint, point: Values) -> bool:
    return bool(constraint.holds(point))


def visited(tunables: Any, constraints: Any, problem: Values) -> tuple[list[Values], dict[str, int]]:
    """What the walk over every point gives."""
    kept, dropped = [], {}
    for chosen in itertools.product(*(t.values for t in tunables)):
        point = Values(dict(zip((t.name for t in tunables), chosen, strict=True)))
        first = next((c for c in constraints if not c.holds(problem.merged(point))), None)
        if first is None:
            kept.append(point)
        else:
            dropped[first.name] = dropped.get(first.name, 0) + 1
    return kept, dropped


def drawn(draw: random.Random) -> Constraint:
    """A constraint that reads some names, and others only where those say so."""
    first, second, third = (draw.choice((*NAMES, "n")) for _ in range(3))
    limit, other = draw.randint(0, 4), draw.randint(0, 6)
    kind = draw.choice(("one", "two", "short", "merged", "all"))
    if kind == "one":
        return Constraint(f"one_{draw.random()}", "why", lambda v: v[first] <= limit)
    if kind == "two":
        return Constraint(f"two_{draw.random()}", "why", lambda v: getattr(v, first) + v[second] != other)
    if kind == "merged":
        return Constraint(f"merged_{draw.random()}", "why", lambda v: v.merged({first: limit})[second] <= other)
    if kind == "short":
        return Constraint(
            f"short_{draw.random()}", "why", lambda v: v[first] > limit or v.get(second) < other or v[third]
        )
    return Constraint(f"all_{draw.random()}", "why", lambda v: sum(dict(v).values()) < 2 * other)


@pytest.mark.parametrize("seed", range(40))
def test_it_keeps_and_counts_as_a_visit_of_every_point_does(seed: int) -> None:
    draw = random.Random(seed)
    tunables = [Tunable(name, tuple(range(draw.randint(1, 4)))) for name in NAMES]
    constraints = [drawn(draw) for _ in range(draw.randint(0, 5))]
    problem = Values(n=draw.randint(0, 4))
    kept, dropped = [], {}
    for found in walk(tunables, constraints, problem, holds):
        if isinstance(found, Kept):
            kept.append(found.tunables)
        else:
            assert isinstance(found, Dropped)
            dropped[found.constraint.name] = dropped.get(found.constraint.name, 0) + found.points
    assert (kept, dropped) == visited(tunables, constraints, problem)


def test_what_the_first_tunable_decides_is_asked_once_a_value() -> None:
    asked = 0

    def first_only(v: Any) -> bool:
        nonlocal asked
        asked += 1
        return bool(v.a == 1)

    tunables = [Tunable("a", (0, 1)), *(Tunable(name, tuple(range(10))) for name in ("b", "c", "d"))]
    found = list(walk(tunables, [Constraint("first", "why", first_only)], Values(), holds))
    assert asked == 3  # with no tunable chosen, and with each value of a
    assert [f.points for f in found if isinstance(f, Dropped)] == [1000]
    assert sum(isinstance(f, Kept) for f in found) == 1000


def test_a_constraint_over_the_problem_alone_drops_the_space_at_once() -> None:
    tunables = [Tunable(name, tuple(range(100))) for name in NAMES]
    (found,) = walk(tunables, [Constraint("never", "why", lambda v: v.n > 1)], Values(n=1), holds)
    assert isinstance(found, Dropped) and found.points == 100**4
