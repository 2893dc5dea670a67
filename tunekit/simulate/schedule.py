"""Who runs next: every choice that the hardware makes freely, drawn from one seed."""

from __future__ import annotations

import random


class Schedule:
    """The choices of one run. The same seed makes the same choices.

    Each seed favours other warps, other slice lengths and other speeds of the asynchronous engines, so that several
    seeds reach interleavings that a fair order would never show.
    """

    def __init__(self, seed: int, warps: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._weights = [self._random.choice((0.05, 1.0, 1.0, 4.0)) for _ in range(warps)]
        self._engine = self._random.choice((0.03, 0.5, 1.0, 4.0))
        self._slice = self._random.choice((16, 64, 256))

    def pick(self, count: int) -> int:
        """One of `count` equal choices."""
        return self._random.randrange(count) if count > 1 else 0

    def engine_first(self, runnable: int) -> bool:
        """Whether the asynchronous engines go before the warps, when `runnable` warps could run."""
        return self._random.random() * (self._engine + runnable * 0.25) < self._engine

    def warp(self, runnable: list[int]) -> int:
        """Which of the runnable warps (by their number in the cluster) goes next."""
        if len(runnable) == 1:
            return runnable[0]
        return self._random.choices(runnable, [self._weights[warp] for warp in runnable])[0]

    def slice(self) -> int:
        """For how many instructions."""
        return self._random.randint(1, 2 * self._slice)

    def times_out(self) -> bool:
        """Whether a potentially blocking wait gives up at once, as the hardware may after a time of its own."""
        return self._random.random() < 0.25
