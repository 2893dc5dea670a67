"""Sweeps of the host specs in caches of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tunekit.arch import ARCHES
from tunekit.measure.sequential import LOOKS
from tunekit.progress import SweepEvent, SweepReport
from tunekit.settings import Settings
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.store.database import Store
from tunekit.sweep import SweepOptions, sweep

SPECS = Path(__file__).resolve().parents[1] / "specs"
# The fewest after which a final may be decided: equal variants would race for 160, a second for each of them.
ROUNDS = LOOKS[0]


@dataclass
class Cache:
    """One user's cache. `run` sweeps a spec there; `events` are those of the last run."""

    root: Path
    events: list[SweepEvent] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=lambda: {"run_limit_s": 5.0, "jobs": 2})

    @property
    def settings(self) -> Settings:
        return Settings(database=self.root / "tunekit.db", artifacts=self.root / "artifacts", **self.limits)

    def run(self, reference: str, problem: dict[str, Any], **options: Any) -> SweepReport:
        self.events = []
        chosen = SweepOptions(**{"arch": "host", "final_rounds": ROUNDS, **options})
        return sweep(reference, [problem], chosen, self.settings, self.events.append)

    def store(self) -> Store:
        return Store.open(self.settings.database)

    def compiled(self) -> int:
        """How many variants the last run really compiled."""
        finished = [
            e.outcome for e in self.events if e.kind == "finished" and e.outcome and e.outcome.stage == "compile"
        ]
        return sum(not outcome.facts.get("cached") and outcome.status != "known_bad" for outcome in finished)


@pytest.fixture
def cache(tmp_path: Path, nurseries: Callable[[str], object]) -> Cache:
    for kind in ("host", "measure"):
        nurseries(kind)  # not in the midst of a test that looks for processes left behind
    return Cache(tmp_path / "cache")


def reference(file: str, name: str) -> str:
    return f"{SPECS / file}.py:{name}"


def ids(spec_reference: str, problem: dict[str, Any], **tunable: Any) -> tuple[str, ...]:
    """The ids of the variants whose one tunable has one of the given values."""
    spec = load_spec(spec_reference)
    ((name, values),) = tunable.items()
    variants = expand(spec, ARCHES["host"], spec.problem(problem)).variants
    return tuple(v.id for value in values for v in variants if v.tunables[name] == value)
