"""The strategies by name: exhaustive, random and Optuna's TPE; `auto` chooses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tunekit.errors import UserError
from tunekit.model import Variant
from tunekit.search.protocol import Budget, Strategy, Told
from tunekit.search.surrogate import Surrogate


class Exhaustive:
    """Every candidate, in the order of the declaration."""

    name = "exhaustive"

    def __init__(self, candidates: Sequence[Variant], seed: int) -> None:
        self._left = list(candidates)

    def ask(self, most: int) -> list[Variant]:
        batch, self._left = self._left[:most], self._left[most:]
        return batch

    def tell(self, results: Sequence[Told]) -> None:
        """Nothing to learn: everything is tried."""


class Random(Exhaustive):
    """Candidates in a random order, drawn without replacement."""

    name = "random"

    def __init__(self, candidates: Sequence[Variant], seed: int) -> None:
        shuffled = list(candidates)
        random.Random(seed).shuffle(shuffled)
        super().__init__(shuffled, seed)


class Tpe:
    """Optuna's tree-structured Parzen estimator over the tunables.

    Optuna knows nothing of constraints or of what was tried: a proposal that is
    no open candidate is replaced by the open candidate nearest to it (fewest
    differing tunables, the first of those), and Optuna learns from that one.
    """

    name = "tpe"

    def __init__(self, candidates: Sequence[Variant], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True))
        self._open = {variant.id: variant for variant in candidates}
        names = list(dict.fromkeys(name for variant in candidates for name in variant.tunables))
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(
                list(dict.fromkeys(v.tunables[name] for v in candidates if name in v.tunables))
            )
            for name in names
        }
        implementations = list(dict.fromkeys(variant.implementation for variant in candidates))
        self._distributions["implementation"] = optuna.distributions.CategoricalDistribution(implementations)

    def ask(self, most: int) -> list[Variant]:
        batch: list[Variant] = []
        while self._open and len(batch) < most:
            wish = self._study.ask(self._distributions).params
            chosen = min(self._open.values(), key=lambda variant: self._differences(variant, wish))
            del self._open[chosen.id]
            batch.append(chosen)
        return batch

    def tell(self, results: Sequence[Told]) -> None:
        trial = self._optuna.trial
        for result in results:
            failed = result.time_us is None
            self._study.add_trial(
                trial.create_trial(
                    params=self._params(result.variant),
                    distributions={name: self._distributions[name] for name in self._params(result.variant)},
                    value=None if failed else result.time_us,
                    state=trial.TrialState.FAIL if failed else trial.TrialState.COMPLETE,
                )
            )

    def _params(self, variant: Variant) -> dict[str, object]:
        return {**variant.tunables, "implementation": variant.implementation}

    def _differences(self, variant: Variant, wish: dict[str, object]) -> int:
        return sum(wish.get(name) != value for name, value in self._params(variant).items())


STRATEGIES: dict[str, Callable[[Sequence[Variant], int], Strategy]] = {
    strategy.name: strategy for strategy in (Exhaustive, Random, Tpe, Surrogate)
}


def strategy_name(asked: str, candidates: int, budget: Budget) -> str:
    """The strategy to use; ``auto`` is exhaustive where the budget covers the space, else the surrogate.

    Raises:
        UserError: an unknown name.
    """
    if asked == "auto":
        return "exhaustive" if budget.seconds is None and budget.left(0) >= candidates else "surrogate"
    if asked not in STRATEGIES:
        raise UserError(f"unknown search '{asked}' (known: auto, {', '.join(STRATEGIES)})")
    return asked


def make_strategy(name: str, candidates: Sequence[Variant], budget: Budget, seed: int) -> Strategy:
    """The strategy called `name` (see :func:`strategy_name`) over at least one candidate."""
    return STRATEGIES[strategy_name(name, len(candidates), budget)](candidates, seed)
