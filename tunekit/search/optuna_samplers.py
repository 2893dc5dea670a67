"""Optuna's samplers over a finite set of candidates: TPE, and a Gaussian process.

Optuna knows nothing of constraints, of conditional tunables or of what was
tried. Each tunable is a parameter over its values' codes, "not there" being one
of them; a wish that is no open candidate is replaced by the open candidate that
differs from it in the fewest tunables (the first of those), and Optuna learns
from that one. A failure is told as a failed trial, which has no value.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunekit.errors import UserError
from tunekit.model import Variant
from tunekit.search.encoding import Space
from tunekit.search.protocol import Told


class Sampled:
    """One of Optuna's samplers by ask and tell."""

    name = ""

    def __init__(self, candidates: Sequence[Variant], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._study = optuna.create_study(sampler=self.sampler(optuna, seed))
        self._space = candidates if isinstance(candidates, Space) else Space(candidates)
        self._codes = self._space.codes[:, : self._space.tunables]
        self._open = np.ones(len(self._space), bool)
        self._told: set[int] = set()
        self._distributions = {
            each.name: optuna.distributions.IntDistribution(0, len(each.distance) - 1)
            if each.ordered
            else optuna.distributions.CategoricalDistribution(list(range(len(each.distance))))
            for each in self._space.coordinates[: self._space.tunables]
        }

    def sampler(self, optuna: Any, seed: int) -> Any:
        """The sampler; overridden by each strategy."""
        raise NotImplementedError

    def ask(self, most: int) -> list[Variant]:
        batch: list[Variant] = []
        while len(batch) < most and self._open.any():
            wish = self._study.ask(self._distributions).params
            row = np.array([wish[name] for name in self._distributions], dtype=self._codes.dtype)
            open_ = np.flatnonzero(self._open)
            chosen = int(open_[np.argmin((self._codes[open_] != row).sum(axis=1))])
            self._open[chosen] = False
            batch.append(self._space[chosen])
        return batch

    def tell(self, results: Sequence[Told]) -> None:
        trial = self._optuna.trial
        for result in results:
            number = self._space.place.get(result.variant.id)
            if number is None or number in self._told:
                continue
            self._open[number] = False
            self._told.add(number)
            if result.time_us is None and not result.failed:
                continue
            values = self._codes[number].tolist()
            state = trial.TrialState.FAIL if result.failed else trial.TrialState.COMPLETE
            self._study.add_trial(
                trial.create_trial(
                    params=dict(zip(self._distributions, values, strict=True)),
                    distributions=self._distributions,
                    value=None if result.time_us is None else float(np.log(result.time_us)),
                    state=state,
                )
            )


class Tpe(Sampled):
    """The tree-structured Parzen estimator."""

    name = "tpe"

    def sampler(self, optuna: Any, seed: int) -> Any:
        return optuna.samplers.TPESampler(seed=seed, multivariate=True)


def require_scipy() -> None:
    """Raise UserError where what Optuna's Gaussian process needs is not installed; imports nothing."""
    if importlib.util.find_spec("scipy") is None:
        raise UserError("the search 'gp' needs scipy (pip install 'tunekit[gp]'); 'surrogate' does not")


class Gp(Sampled):
    """Optuna's Gaussian process; it needs scipy.

    Raises:
        UserError: scipy is not installed.
    """

    name = "gp"

    def sampler(self, optuna: Any, seed: int) -> Any:
        require_scipy()
        return optuna.samplers.GPSampler(seed=seed)
