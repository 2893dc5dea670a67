"""The cost model's coefficients from measured times, and its error on problems that it has not seen.

Least squares of the relative error, no coefficient below 0: a resource never makes a launch faster, and a sum of times
extrapolates. The error is that of models fitted without the problem that they are judged on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from tunekit.search.cost_model import TERMS, Launch, Machine, Ranking, terms
from tunekit.search.encoding import Floats

FOLDS = 10
SWEEPS = 2000
FIRST = (1, 5, 10)
DIGITS = 6


@dataclass(frozen=True)
class Observed:
    """One measured variant. Times of one `group` (a problem under a protocol) are comparable; those of one
    `problem` are held out together."""

    group: str
    problem: str
    launch: Launch
    time_us: float | None


def usable(observed: Iterable[Observed]) -> list[Observed]:
    """Those that have a time: failures, NaN and nonsense teach nothing."""
    return [each for each in observed if each.time_us is not None and 0 < each.time_us < math.inf]


def fit(observed: Iterable[Observed], machine: Machine) -> dict[str, float]:
    """The coefficient of each term, to six digits; 0 where a term explains nothing or is always 0.

    Raises:
        ValueError: there is nothing to fit.
    """
    known = usable(observed)
    if not known:
        raise ValueError("a cost model is fitted on measured times, and there is none")
    found = least_squares(_matrix(known, machine) / _times(known)[:, None], np.ones(len(known)))
    return {name: float(f"{value:.{DIGITS}g}") for name, value in zip(TERMS, found, strict=True)}


def least_squares(matrix: Floats, values: Floats) -> Floats:
    """The x of no element below 0 that makes matrix x nearest to the values: coordinate descent on scaled columns."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    normal, right = scaled.T @ scaled, scaled.T @ values
    found = np.zeros(matrix.shape[1])
    for _ in range(SWEEPS):
        before = found.copy()
        for k in np.flatnonzero(np.diag(normal) > 0):
            found[k] = max(0.0, found[k] - (normal[k] @ found - right[k]) / normal[k, k])
        if np.abs(found - before).max() <= 1e-12 * (1 + np.abs(found).max()):
            break
    solution: Floats = found / scale
    return solution


def held_out(observed: Sequence[Observed], machine: Machine) -> list[float]:
    """For each of the observed (all of them usable) the time by a model that was fitted without its problem."""
    problems = {problem: place % FOLDS for place, problem in enumerate(sorted({o.problem for o in observed}))}
    fold = np.array([problems[each.problem] for each in observed])
    matrix, predicted = _matrix(observed, machine), np.full(len(observed), math.nan)
    for one in sorted(set(fold.tolist())):
        others = [each for each, place in zip(observed, fold, strict=True) if place != one]
        if others:
            coefficients = np.array(list(fit(others, machine).values()))
            predicted[fold == one] = (matrix[fold == one] * coefficients).sum(axis=1)  # equal rows, equal sums
    return [float(value) for value in predicted]


def log_error(observed: Sequence[Observed], predicted: Sequence[float]) -> float:
    """The root mean square of log(predicted / measured)."""
    logs = np.log(np.asarray(predicted) / _times(observed))
    return float(np.sqrt(np.mean(logs**2)))


def ranking(observed: Sequence[Observed], predicted: Sequence[float], least_trials: int) -> Ranking | None:
    """How the predicted order held in the groups of at least so many trials; None where there is none."""
    places: dict[str, list[int]] = {}
    for place, each in enumerate(observed):
        places.setdefault(each.group, []).append(place)
    groups = [found for found in places.values() if len(found) >= least_trials]
    if not groups:
        return None
    times, guesses = _times(observed), np.asarray(predicted)
    correlations = [spearman(guesses[group], times[group]) for group in groups]
    regrets: Mapping[int, list[float]] = {k: [regret(guesses[g], times[g], k) for g in groups] for k in FIRST}
    return Ranking(
        least_trials,
        len(groups),
        (round(median(correlations), 3), round(min(correlations), 3)),
        {k: (round(median(each), 3), round(max(each), 3)) for k, each in regrets.items()},
    )


def regret(predicted: Floats, times: Floats, first: int) -> float:
    """The best time of the so many predicted fastest, over the best of all; equal predictions stay in order."""
    order = np.argsort(predicted, kind="stable")
    return float(times[order[:first]].min() / times.min())


def spearman(one: Floats, other: Floats) -> float:
    """The rank correlation of two columns, ties at their mean rank; 0 where one of them is all ties."""
    left, right = _ranks(one), _ranks(other)
    if np.ptp(left) == 0 or np.ptp(right) == 0:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    middles: Floats = np.cumsum(count) - (count - 1) / 2
    return middles[place]


def _matrix(observed: Sequence[Observed], machine: Machine) -> Floats:
    return np.array([list(terms(each.launch, machine).values()) for each in observed], dtype=float)


def _times(observed: Sequence[Observed]) -> Floats:
    return np.array([each.time_us for each in observed], dtype=float)
