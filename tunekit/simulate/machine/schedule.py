"""Who runs next: every choice that the hardware makes freely, drawn from one seed."""

from __future__ import annotations

import random


class Schedule:
    """The choices of one run. The same seed makes the same choices.

    Each seed favours other warps, other slice lengths and other speeds of the asynchronous engines and of each
    instruction's asynchronous work, so that several seeds reach interleavings that a fair order would never show.
    """

    def __init__(self, seed: int, warps: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._weights = [self._random.choice((0.05, 1.0, 1.0, 4.0)) for _ in range(warps)]
        self._engine = self._random.choice((0.03, 0.5, 1.0, 4.0))
        self._slice = self._random.choice((16, 64, 256))
        self._speeds: dict[str, float] = {}

    def pick(self, count: int) -> int:
        """One of `count` equal choices."""
        return self._random.randrange(count) if count > 1 else 0

    def speed(self, work: str) -> float:
        """How fast asynchronous work of this name is: some instruction's may stay behind until nothing else can go."""
        speed = self._speeds.get(work)
        if speed is None:
            speed = self._speeds[work] = self._random.choice((0.01, 1.0, 1.0, 4.0))
        return speed

    def work(self, names: list[str]) -> int:
        """Which of several pieces of asynchronous work goes next."""
        if len(names) == 1:
            return 0
        return self._random.choices(range(len(names)), [self.speed(name) for name in names])[0]

    def engine_first(self, runnable: int, speed: float) -> bool:
        """Whether asynchronous work, the fastest of this speed, goes before the warps, when `runnable` could run."""
        engine = self._engine * speed
        return self._random.random() * (engine + runnable * 0.25) < engine

    def warp(self, runnable: list[int]) -> int:
        """Which of the runnable warps (by their number in the cluster) goes next."""
        if len(runnable) == 1:
            return runnable[0]
        return self._random.choices(runnable, [self._weights[warp] for warp in runnable])[0]

    def slice(self) -> int:
        """For how many instructions."""
        return self._random.randint(1, 2 * self._slice)

    def times_out(self, first: bool) -> bool:
        """Whether a potentially blocking wait gives up at once, as the hardware may after a time of its own.

        first: it is the first of its thread for that phase.
        """
        return self._random.random() < (0.9 if first else 0.25)
