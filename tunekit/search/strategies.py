"""The strategies by name; `auto` chooses among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tunekit.errors import UserError
from tunekit.model import Variant
from tunekit.search.encoding import Space
from tunekit.search.optuna_samplers import Gp, Tpe, require_scipy
from tunekit.search.protocol import Budget, Strategy, Told
from tunekit.search.surrogate import Surrogate


class Exhaustive:
    """Every candidate, in the order of the declaration, or of a space's predictions."""

    name = "exhaustive"

    def __init__(self, candidates: Sequence[Variant], seed: int) -> None:
        ordered = candidates.by_prediction() if isinstance(candidates, Space) else candidates
        self._left = {variant.id: variant for variant in ordered}

    def ask(self, most: int) -> list[Variant]:
        return [self._left.pop(id) for id in list(self._left)[: max(0, most)]]

    def tell(self, results: Sequence[Told]) -> None:
        """Nothing to learn but what need not be tried."""
        for result in results:
            self._left.pop(result.variant.id, None)


class Random(Exhaustive):
    """Candidates in a random order, drawn without replacement."""

    name = "random"

    def __init__(self, candidates: Sequence[Variant], seed: int) -> None:
        shuffled = list(candidates)
        random.Random(seed).shuffle(shuffled)
        super().__init__(shuffled, seed)


STRATEGIES: dict[str, Callable[[Sequence[Variant], int], Strategy]] = {
    "exhaustive": Exhaustive,
    "random": Random,
    "tpe": Tpe,
    "gp": Gp,
    "surrogate": Surrogate,
}


class Chosen(NamedTuple):
    """A strategy's name, and why it in a few words."""

    name: str
    why: str


def choose_strategy(asked: str, candidates: int, budget: Budget) -> Chosen:
    """The strategy to use; ``auto`` is exhaustive where the budget covers the space, else the surrogate.

    Raises:
        UserError: an unknown name, or one whose package is not installed.
    """
    if asked not in ("auto", *STRATEGIES):
        raise UserError(f"unknown search '{asked}' (known: auto, {', '.join(STRATEGIES)})")
    if asked == "gp":
        require_scipy()
    if asked != "auto":
        return Chosen(asked, "as asked")
    if budget.seconds is None and budget.left(0) >= candidates:
        return Chosen("exhaustive", f"the budget covers all {candidates} variants")
    limit = f"{budget.seconds:g} s" if budget.seconds is not None else f"{budget.evaluations} evaluations"
    return Chosen("surrogate", f"{candidates} variants, {limit}")


def make_strategy(name: str, candidates: Sequence[Variant], budget: Budget, seed: int) -> Strategy:
    """The strategy called `name` (see :func:`choose_strategy`) over the candidates; a `Space` is encoded but once.

    Raises:
        UserError: an unknown name, or a strategy whose package is not installed.
    """
    return STRATEGIES[choose_strategy(name, len(candidates), budget).name](candidates, seed)
