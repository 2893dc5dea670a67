"""Which variants to try next: strategies behind one ask/tell protocol."""

from tunekit.search.protocol import Budget, Strategy, Told, parse_budget
from tunekit.search.strategies import STRATEGIES, choose_strategy, make_strategy

__all__ = [
    "STRATEGIES",
    "Budget",
    "Strategy",
    "Told",
    "choose_strategy",
    "make_strategy",
    "parse_budget",
]
