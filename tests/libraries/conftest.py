"""Libraries that a test installs: a module and its metadata in a directory of its own, first on sys.path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tunekit import identity
from tunekit.arch import ARCHES
from tunekit.dispatch import library as dispatch_library
from tunekit.measure.sequential import LOOKS
from tunekit.progress import SweepEvent, SweepReport
from tunekit.settings import Settings
from tunekit.space import expand
from tunekit.spec import load_spec
from tunekit.store.database import Store
from tunekit.sweep import SweepOptions, sweep

SPECS = Path(__file__).resolve().parents[1] / "specs"
BY_TORCH, BY_FAKE, ONLY_FAKE, ON_GPU = (
    f"{SPECS / 'library_scale.py'}:{name}" for name in ("library_scale", "library_fake", "library_only", "library_gpu")
)
SLOW = 20_000
"""The pause, in microseconds, of a variant that must not win: more than a busy machine adds to any call."""
PACKAGE = "tunekit-fake-library"
ABSENT = f"fake: {PACKAGE} is not installed (pip install 'tunekit[fake]')"
MODULE = """
import time

first = True


def function(pause_us):
    def scale_by_fake(x, y, scale):
        global first
        import torch

        pause_s = {first_s} if first else pause_us * 1e-6
        if pause_s:
            time.sleep(pause_s)
        first = False
        torch.mul(x, scale, out=y)

    return scale_by_fake
"""
Install = Callable[..., None]
ROUNDS = LOOKS[0]  # the fewest after which a final may be decided


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a version of the fake library, in place of the one before; None uninstalls it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def forget() -> None:
        identity.distribution_version.cache_clear()
        identity._records_in.cache_clear()
        importlib.invalidate_caches()
        sys.modules.pop("tunekit_fake_library", None)
        dispatch_library._loaded.clear()

    def put(version: str | None, module: str = MODULE, first_s: float = 0.0) -> None:
        for old in site.glob("*.dist-info/METADATA"):
            old.unlink()
            old.parent.rmdir()
        if version is not None:
            (site / "tunekit_fake_library.py").write_text(module.replace("{first_s}", str(first_s)))
            metadata = site / f"tunekit_fake_library-{version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
        forget()

    put(None)
    yield put
    forget()


@dataclass
class Cache:
    """One user's cache. `run` sweeps a spec there for 8 rows; `events` are those of the last run."""

    root: Path
    events: list[SweepEvent] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=lambda: {"run_limit_s": 5.0, "jobs": 2})

    @property
    def places(self) -> dict[str, Path]:
        return {"database": self.root / "tunekit.db", "artifacts": self.root / "artifacts"}

    def run(self, reference: str, **options: Any) -> SweepReport:
        self.events = []
        chosen = SweepOptions(**{"arch": "host", "final_rounds": ROUNDS, **options})
        return sweep(reference, [{"rows": 8}], chosen, Settings(**self.places, **self.limits), self.events.append)

    def store(self) -> Store:
        return Store.open(self.places["database"])


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def ids(reference: str, arch: str = "host", **pauses: int) -> tuple[str, ...]:
    """The ids of the variants with these pauses, by implementation."""
    spec = load_spec(reference)
    variants = expand(spec, ARCHES[arch], spec.problem({"rows": 8})).variants
    wanted = set(pauses.items())
    return tuple(v.id for v in variants if (v.implementation, v.tunables.pause_us) in wanted)


def statuses(report: SweepReport) -> dict[str, str]:
    (problem,) = report.problems
    return {str(row.variant): row.status for row in problem.rows}
