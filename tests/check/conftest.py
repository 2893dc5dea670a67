"""A timing source that stands for a compiler on a shared, noisy machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tunekit.check.targets import Target
from tunekit.check.verdict import Sample
from tunekit.trials import Status

SPECS = Path(__file__).parent.parent / "specs"


@dataclass
class Machine:
    """Compile times as a busy machine yields them.

    `true_s` gives a target's seconds on an idle machine of speed 1. Every compile is
    slowed by the machine's `speed`, by a load that wanders from compile to compile,
    and now and then by a burst that doubles or triples it.
    """

    true_s: Callable[[Target], float]
    seed: int = 0
    speed: float = 1.0
    noise: float = 0.15
    burst: float = 0.1
    compiled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.load = 0.2

    def __call__(self, target: Target) -> Sample:
        self.compiled.append(target.name)
        self.load = min(0.4, max(0.0, self.load + self.random.uniform(-0.1, 0.1)))
        slow = (1 + self.load) * (1 + self.noise * self.random.random())
        if self.random.random() < self.burst:
            slow *= self.random.uniform(1.5, 3.0)
        return Sample(Status.OK, self.true_s(target) * self.speed * slow)


@pytest.fixture
def machine() -> type[Machine]:
    return Machine


@pytest.fixture
def specs() -> Path:
    return SPECS


@pytest.fixture
def host_scale() -> str:
    return f"{SPECS / 'host_scale.py'}:host_scale"
