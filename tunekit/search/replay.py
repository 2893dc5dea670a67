"""Strategies on recorded spaces: what a search would have found, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.search.protocol import Strategy, Told


@dataclass(frozen=True)
class Replay:
    """The proposals in order, and after each the least time so far (None before the first that runs)."""

    proposed: tuple[str, ...]
    best_us: tuple[float | None, ...]


def replay(strategy: Strategy, recorded: Mapping[str, Told], evaluations: int, batch: int = 1) -> Replay:
    """Let a strategy search `recorded`, which has an outcome for each of its candidates by id.

    Ends after so many evaluations, or when the strategy has no more; a failure costs one like a success.
    """
    proposed: list[str] = []
    best: list[float | None] = []
    while len(proposed) < evaluations:
        asked = strategy.ask(min(batch, evaluations - len(proposed)))
        if not asked:
            break
        results = [recorded[variant.id] for variant in asked]
        for result in results:
            proposed.append(result.variant.id)
            seen = [time for time in (best[-1] if best else None, result.time_us) if time is not None]
            best.append(min(seen) if seen else None)
        strategy.tell(results)
    return Replay(tuple(proposed), tuple(best))
