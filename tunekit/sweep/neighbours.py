"""Where a search starts: what won for the problems nearest to this one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tunekit.model import Values, Variant, Winner
from tunekit.spec import KernelSpec

# Of the neighbours' winners that many open the search: one is likely, a second hedges, more would eat small budgets.
MOST = 2


def neighbours_winners(spec: KernelSpec, problem: Values, winners: Iterable[Winner]) -> list[Variant]:
    """The variants that won for the nearest problems of other buckets, nearest first, each once.

    Near is a small sum of |log2 ratio| over the sizes; a problem that differs in anything else comes after those
    that don't.
    """
    bucket = spec.bucket(problem)
    others = [winner for winner in winners if winner.bucket != bucket and winner.variant.version == spec.version]
    others.sort(key=lambda winner: (*_gap(winner.problem, problem), winner.variant.id))
    return list(dict.fromkeys(winner.variant for winner in others))[:MOST]


def _gap(one: Values, other: Values) -> tuple[int, float]:
    """How many axes differ that are no sizes, and by how many doublings the sizes do."""
    names: Sequence[str] = [name for name in other if one.get(name) != other[name]]
    unlike, doublings = 0, 0.0
    for name in names:
        a, b = one.get(name), other[name]
        if type(a) is int and type(b) is int and a > 0 and b > 0:
            doublings += abs(math.log2(a / b))
        else:
            unlike += 1
    return unlike, doublings
