"""How far apart two paired series are, without a bell curve: the Hodges-Lehmann estimate and its exact interval.

The estimate is the median of all averages of two differences (each with itself too, "Walsh
averages"); the bounds are averages so far out that, were the truth beyond them, the ranks of
the differences would have come out as they did with at most the probability asked for
(Wilcoxon's signed-rank distribution, counted, not approximated). It assumes that the
differences are independent and symmetric about the truth. Differences of two series with
noise alike are symmetric whatever the noise is: heavy tails and two clocks included.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shift:
    """Where paired differences lie: the estimate, and the sorted Walsh averages that any bound comes from."""

    pairs: int
    averages: tuple[float, ...]

    @property
    def estimate(self) -> float:
        """The Hodges-Lehmann estimate."""
        count = len(self.averages)
        return (self.averages[(count - 1) // 2] + self.averages[count // 2]) / 2

    def bounds(self, error: float) -> tuple[float, float]:
        """The interval that the truth is below with probability `error` at most, and above with no more.

        Infinite where so few pairs can't say that.
        """
        beyond = bisect.bisect_right(cumulative(self.pairs), error)
        if not beyond:
            return -math.inf, math.inf
        return self.averages[beyond - 1], self.averages[-beyond]

    def p_above(self) -> float:
        """The probability of averages as far above 0 as these, were the truth 0 or below."""
        return cumulative(self.pairs)[min(bisect.bisect_right(self.averages, 0.0), len(self.averages) - 1)]


def shift(differences: Sequence[float]) -> Shift:
    """The Walsh averages of at least one difference."""
    count = len(differences)
    averages = [(differences[i] + differences[j]) / 2 for i in range(count) for j in range(i + 1)]
    averages.sort()
    return Shift(count, tuple(averages))


@functools.cache
def cumulative(pairs: int) -> tuple[float, ...]:
    """For each sum of ranks from 0: the probability that Wilcoxon's statistic of `pairs` pairs is that or less."""
    ways = [1]
    for rank in range(1, pairs + 1):
        longer = ways + [0] * rank
        for total, count in enumerate(ways):
            longer[total + rank] += count
        ways = longer
    total, found = 0, []
    for count in ways:
        total += count
        found.append(total / 2**pairs)
    return tuple(found)
