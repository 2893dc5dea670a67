"""tunekit's own strategy: a Gaussian process over the candidates, and a local search beside it.

The times' logarithms, standardised, are half replaced by their normal ranks: a
few variants that are fifty times slower must not hide what parts the best. The
next candidate is that of the largest expected improvement times the chance
that it runs at all, over every open candidate (a pool of them, in a large
space). Candidates that are out count as measured, without a result, so that a
batch spreads.

Early on, deviations are taken the wider the longer no result was clearly
better: otherwise a few dozen evaluations go into the last percents of the
first good region, and another is never seen. That fades out; then each
`LOCAL`-th is chosen among the neighbours of the best candidate that has an open one.

A failure has no time, so it is in no mean. What fails is learned by itself: a
second process, with a covariance of its own, over "ran" and "failed".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tunekit.model import Variant
from tunekit.search.encoding import Codes, Floats, Space
from tunekit.search.kernel import Covariance
from tunekit.search.posterior import Posterior, Singles
from tunekit.search.protocol import Told

# Random candidates before the model has a say; it needs MEASURED times at least. LIKELY of them are a cost model's,
# where the space has its predictions: if it is wrong, the others still spread.
FIRST = 6
LIKELY = 3
MEASURED = 3
# Below so many results the covariance stays at its prior: a fit of two parameters a tunable would follow the noise.
FITTED_FROM = 20
# Refitted whenever the results have grown by this share; the steps of the first fit and of the later ones.
GROWTH = 0.15
STEPS = (25, 12)
# Results that a fit looks at (half of them the best), and that the posterior holds: their cost is cubic and quadratic.
FIT_AT_MOST = 240
HELD = 600
# Open candidates that are compared: 16,384 x 400 results take 5 ms a proposal.
POOL = 16_384
# What surely fails is tried last, in the order of its gain.
LEAST_CHANCE = 1e-3
# Deviations are taken 10 % wider for each result since the best was last undercut by 3 %, at most 2.5 times as wide;
WIDER = 0.1
WIDEST = 2.5
BETTER = 0.97
# in full up to the first of these numbers of results, then ever less, and from the second on not at all.
EXPLORING = (40, 80)
# Once that fades, every fourth proposal is a neighbour of the best: it finds what the model smooths over.
LOCAL = 4


class Surrogate:
    """See the module. Deterministic by its seed; asking for one or for many differs, as it must."""

    name = "surrogate"

    def __init__(self, candidates: Sequence[Variant], seed: int) -> None:
        self._space = candidates if isinstance(candidates, Space) else Space(candidates)
        self._random = np.random.default_rng(seed)
        self._open = np.ones(len(self._space), bool)
        self._first = self._space.likely(LIKELY) + self._random.permutation(len(self._space))[: 4 * FIRST].tolist()
        self._times: dict[int, float] = {}  # microseconds, by candidate, in the order told
        self._failed: list[int] = []
        self._out: list[int] = []
        self._mark = math.inf  # the last time that was clearly better than those before, and the results since
        self._since = 0
        self._proposed = 0
        self._covariance: Covariance | None = None
        self._failing: Covariance | None = None
        self._fit_at = FITTED_FROM
        self._fits = 0
        self._view: _View | None = None

    def ask(self, most: int) -> list[Variant]:
        batch: list[int] = []
        while len(batch) < most and self._open.any():
            chosen = self._next()
            self._open[chosen] = False
            self._out.append(chosen)
            self._proposed += 1
            batch.append(chosen)
        return [self._space[number] for number in batch]

    def tell(self, results: Sequence[Told]) -> None:
        for result in results:
            number = self._space.place.get(result.variant.id)
            if number is None:
                continue
            self._open[number] = False
            if number in self._out:
                self._out.remove(number)
            if number in self._times or number in self._failed:
                continue
            self._since += 1
            if result.time_us is not None:
                self._times[number] = result.time_us
                if result.time_us < BETTER * self._mark:
                    self._mark, self._since = result.time_us, 0
            elif result.failed:
                self._failed.append(number)

    def _next(self) -> int:
        while self._first and self._proposed < FIRST:
            chosen = int(self._first.pop(0))
            if self._open[chosen]:
                return chosen
        if len(self._times) < MEASURED:
            return self._unlike_the_failed()
        view = self._current()
        exploring = self._exploring()
        gain = view.gain(self._out, 1 + exploring * min(WIDER * self._since, WIDEST - 1))
        if exploring < 1 and self._proposed % LOCAL == 0:
            near = self._near_the_best(view)
            if len(near):
                return int(view.pool[near[np.argmax(gain[near])]])
        return int(view.pool[np.argmax(gain)])

    def _exploring(self) -> float:
        """From 1, at the beginning, to 0."""
        full, none = EXPLORING
        known = len(self._times) + len(self._failed) + len(self._out)
        return min(1.0, max(0.0, (none - known) / (none - full)))

    def _unlike_the_failed(self) -> int:
        """An open candidate at random; of a few, the one that shares least with what failed."""
        drawn = self._random.choice(np.flatnonzero(self._open), 8)
        if not self._failed:
            return int(drawn[0])
        codes = self._space.codes
        shared = (codes[drawn][:, None, :] == codes[self._failed][None, :, :]).sum(axis=2).max(axis=1)
        return int(drawn[np.argmin(shared)])

    def _near_the_best(self, view: _View) -> NDArray[np.intp]:
        """The places in the pool of the open neighbours of the best candidate that has any."""
        base = self._space.codes[view.pool][:, : self._space.tunables]
        is_open = self._open[view.pool]
        for number in sorted(self._times, key=lambda each: self._times[each]):
            differing = (base != self._space.codes[number, : self._space.tunables]).sum(axis=1)
            near = np.flatnonzero((differing == 1) & is_open)
            if len(near):
                return near
        return np.zeros(0, np.intp)

    def _current(self) -> _View:
        """The view of the pool after all that was told."""
        told = len(self._times) + len(self._failed)
        view = self._view
        if view is None or told >= self._fit_at or self._outdates(view):
            self._view = view = self._refit(told)
        view.update(self._times, self._failed, self._open)
        return view

    def _outdates(self, view: _View) -> bool:
        """Whether there is a first failure, or a new best whose neighbours a partial pool may lack."""
        return (bool(self._failed) and view.runs is None) or (view.partial and self._best() not in view.known)

    def _best(self) -> int:
        return min(self._times, key=lambda number: self._times[number])

    def _refit(self, told: int) -> _View:
        codes = self._space.codes
        if self._covariance is None:
            self._covariance = Covariance.prior([each.distance for each in self._space.coordinates])
        if told >= self._fit_at:
            sample = self._some(FIT_AT_MOST)
            values = standardised([self._times[number] for number in sample])
            self._covariance = self._covariance.fitted(codes[sample], values, STEPS[min(self._fits, 1)])
            self._fits += 1
            self._fit_at = told + max(1, int(GROWTH * told))
        held = self._some(HELD)
        if self._failed:
            self._fit_failing()
        pool, partial = self._pool()
        return _View(self._space, (self._covariance, self._failing), pool, held, partial)

    def _fit_failing(self) -> None:
        """Fit which candidates run: on as many failures as successes, the latest of each."""
        least = FIT_AT_MOST // 2
        sample = [*list(self._times)[-least:], *self._failed[-least:]]
        ran = np.array([number in self._times for number in sample], dtype=float)
        start = self._failing or Covariance.prior([each.distance for each in self._space.coordinates])
        values = (ran - ran.mean()) / max(float(ran.std()), 1e-12)
        self._failing = start.fitted(self._space.codes[sample], values, STEPS[1]) if len(sample) > MEASURED else start

    def _some(self, most: int) -> list[int]:
        """The measured candidates, or the best half of `most` and others at random, in the order told."""
        if len(self._times) <= most:
            return list(self._times)
        ranked = sorted(self._times, key=lambda number: self._times[number])
        drawn = self._random.choice(ranked[most // 2 :], most - most // 2, replace=False)
        kept = {*ranked[: most // 2], *drawn.tolist()}
        return [number for number in self._times if number in kept]

    def _pool(self) -> tuple[NDArray[np.intp], bool]:
        """The open candidates and those that are out; of too many the neighbours of the best and others at random."""
        among = self._open.copy()
        among[self._out] = True
        open_ = np.flatnonzero(among)
        if len(open_) <= POOL:
            return open_, False
        ranked = sorted(self._times, key=lambda number: self._times[number])
        near = [self._space.neighbours(number, among) for number in ranked[:8]]
        drawn = self._random.choice(open_, POOL // 2, replace=False)
        return np.unique(np.concatenate([*near, drawn]))[:POOL], True


class _View:
    """One pool under fitted covariances, kept up to date until the next fit."""

    def __init__(
        self,
        space: Space,
        covariances: tuple[Covariance, Covariance | None],
        pool: NDArray[np.intp],
        held: list[int],
        partial: bool,
    ) -> None:
        self.pool, self.partial = pool, partial
        self.known = list(held)
        self._codes = space.codes
        timing, failing = covariances
        self._posterior = Posterior(timing, self._codes[pool], self._codes[held])
        self.runs = None if failing is None else _Runs(failing, self._codes, pool)
        self._out: list[int] = []
        self._left_out: set[int] | None = None

    def update(self, times: dict[int, float], failed: Sequence[int], is_open: NDArray[np.bool_]) -> None:
        """Take in the results that are new since the last time."""
        self._posterior.forget(len(self.known))
        self._out = []
        if self._left_out is None:
            self._left_out = set(times) - set(self.known)
        seen = {*self.known, *self._left_out}
        for number in times:
            if number not in seen:
                self._posterior.add(self._codes[number])
                self.known.append(number)
        values = standardised([times[number] for number in self.known])
        self._mean, self._scale = self._posterior.mean(values)
        self._least = float(values.min())
        self._open = is_open
        self._chance = self.runs.chance(times, failed) if self.runs else np.ones(len(self.pool), np.float32)

    def gain(self, out: Sequence[int], wider: float) -> Floats:
        """The expected improvement of each candidate of the pool, deviations `wider` times theirs; -1 if not open."""
        for number in out:
            if number not in self._out:
                self._posterior.add(self._codes[number])
                self._out.append(number)
        deviation = wider * np.sqrt(self._posterior.variance() * self._scale)
        z = (self._least - self._mean) / deviation
        gain = deviation * (z * _below(z) + np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi))
        gain *= self._chance
        return np.where(self._open[self.pool], gain, -1.0)


class _Runs:
    """The chance that each candidate of a pool runs at all."""

    def __init__(self, covariance: Covariance, codes: Codes, pool: NDArray[np.intp]) -> None:
        self._codes = codes
        self._known: list[int] = []
        self._posterior = Posterior(covariance, codes[pool], codes[:0])

    def chance(self, times: Mapping[int, float], failed: Sequence[int]) -> Singles:
        seen = set(self._known)
        for number in [*list(times)[-HELD:], *failed[-HELD:]]:
            if number not in seen:
                self._posterior.add(self._codes[number])
                self._known.append(number)
        ran = np.array([number in times for number in self._known], dtype=float)
        share = (ran.sum() + 1) / (len(ran) + 1)  # one success more than seen: nothing fails until something did
        mean, _ = self._posterior.mean(ran - share)
        chance: Singles = np.clip(mean + np.float32(share), LEAST_CHANCE, 1.0).astype(np.float32)
        return chance


def standardised(times: Sequence[float]) -> Floats:
    """The times as the model sees them: half logarithms, half normal ranks, of mean 0 and deviation about 1."""
    logs = np.log(np.asarray(times, dtype=float))
    logs = (logs - logs.mean()) / (logs.std() + 1e-12)
    _, place, count = np.unique(times, return_inverse=True, return_counts=True)
    middles = (np.cumsum(count) - count / 2) / len(logs)
    normal = NormalDist()
    ranks = np.array([normal.inv_cdf(float(middle)) for middle in middles])[place]
    mixed: Floats = 0.5 * (logs + ranks)
    return mixed


def _below(z: Singles) -> Singles:
    """The normal distribution's area below `z`, to 1e-5 (Abramowitz and Stegun, 26.2.16)."""
    t = 1 / (1 + np.float32(0.33267) * np.abs(z))
    tail = np.exp(-0.5 * z * z) * t * (0.4361836 + t * (-0.1201676 + t * 0.9372980)) / np.sqrt(2 * np.pi)
    area: Singles = np.where(z > 0, 1 - tail, tail).astype(np.float32)
    return area
