"""The covariance of two candidates' times, fitted to what was measured.

A product over the coordinates of `1 - r + r exp(-distance / l)`. The exponential
allows for cliffs, which tile sizes and alignments make; a share `r` below 1
lets a coordinate act by itself, whatever the others are, so that main effects
show after a few dozen evaluations. `l`, `r` and the noise are the maximum of
the posterior, by sign-based gradient steps (Rprop), which need no scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunekit.search.encoding import Codes, Floats

# The prior's mean and deviation of log l, logit r and log noise, and their bounds. The times are standardised and
# distances end at 1: two thirds of the range is "smooth unless the data say otherwise", half of a coordinate's effect
# is its own, noise 1 % of the variance.
_MEAN = (np.log(0.7), 0.0, np.log(1e-2))
_DEVIATION = (1.0, 1.5, 2.0)
_BOUNDS = ((np.log(0.03), np.log(30.0)), (-6.0, 6.0), (np.log(1e-6), 0.0))
# Added to the diagonal whatever the noise: below it, a factor in single precision is not positive.
JITTER = 1e-5


@dataclass(frozen=True)
class Covariance:
    """Fitted parameters: log l and logit r of each coordinate, then log noise."""

    distances: tuple[Floats, ...]
    parameters: Floats

    @classmethod
    def prior(cls, distances: Sequence[Floats]) -> Covariance:
        count = len(distances)
        return cls(tuple(distances), _each(_MEAN, count))

    @property
    def noise(self) -> float:
        """The variance of the noise, the signal's being 1."""
        return float(np.exp(self.parameters[-1])) + JITTER

    def tables(self) -> list[Floats]:
        """For each coordinate the factor of each pair of its values."""
        lengths, shares = _unpacked(self.parameters, len(self.distances))
        return [1 - r + r * np.exp(-d / length) for d, length, r in zip(self.distances, lengths, shares, strict=True)]

    def fitted(self, codes: Codes, values: Floats, steps: int) -> Covariance:
        """The covariance after so many steps from this one, on measured candidates and their standardised values."""
        count = len(self.distances)
        mean, deviation = _each(_MEAN, count), _each(_DEVIATION, count)
        low, high = (_each(tuple(bound[end] for bound in _BOUNDS), count) for end in (0, 1))
        here, step, last = self.parameters.copy(), np.full(len(mean), 0.3), np.zeros(len(mean))
        best, least = here, np.inf
        pairs = [np.ix_(column, column) for column in codes.T]
        for _ in range(steps):
            cost, slope = self._cost(here, pairs, values)
            pull = (here - mean) / deviation
            cost, slope = cost + 0.5 * float(pull @ pull), slope + pull / deviation
            if cost < least:
                best, least = here, cost
            turned = slope * last
            step = np.where(turned > 0, np.minimum(step * 1.2, 1.0), np.where(turned < 0, step * 0.5, step))
            last = np.where(turned < 0, 0.0, slope)
            here = np.clip(here - np.sign(last) * step, low, high)
        return Covariance(self.distances, best)

    def _cost(
        self, parameters: Floats, pairs: Sequence[tuple[NDArray[np.int16], ...]], values: Floats
    ) -> tuple[float, Floats]:
        """The negative log likelihood, the signal's variance profiled out, and its gradient."""
        count, n = len(self.distances), len(values)
        lengths, shares = _unpacked(parameters, count)
        decays = [np.exp(-d / length) for d, length in zip(self.distances, lengths, strict=True)]
        factors = [(1 - r + r * e)[pair] for e, r, pair in zip(decays, shares, pairs, strict=True)]
        product = np.ones((n, n))
        for factor in factors:
            product *= factor
        noise = float(np.exp(parameters[-1]))
        lower = np.linalg.cholesky(product + (noise + JITTER) * np.eye(n))
        inverse = np.linalg.inv(lower)
        precision = inverse.T @ inverse
        weights = precision @ values
        scale = max(float(values @ weights) / n, 1e-9)
        cost = 0.5 * n * np.log(scale) + float(np.log(np.diag(lower)).sum())
        pressure = np.outer(weights, weights) / scale - precision
        slope = np.empty(len(parameters))
        slope[-1] = -0.5 * noise * np.trace(pressure)
        pressure *= product
        for k, (d, e, factor, pair) in enumerate(zip(self.distances, decays, factors, pairs, strict=True)):
            share = pressure / factor
            slope[k] = -0.5 * np.vdot(share, (shares[k] * e * d / lengths[k])[pair])
            slope[count + k] = -0.5 * shares[k] * (1 - shares[k]) * np.vdot(share, (e - 1)[pair])
        return cost, slope


def _each(values: Sequence[float], count: int) -> Floats:
    """One value for each length, each share, and the noise."""
    return np.concatenate([np.full(count, values[0]), np.full(count, values[1]), [values[2]]])


def _unpacked(parameters: Floats, count: int) -> tuple[Floats, Floats]:
    return np.exp(parameters[:count]), 1 / (1 + np.exp(-parameters[count : 2 * count]))
