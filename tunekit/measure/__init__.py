"""Verifying and timing compiled variants on a device, and choosing among them.

The parent's side imports nothing heavy: what is asked (client, process, job, protocol), a
final's schedule (final), the test and the choice (signed_rank, sequential, statistics), its
record (record), whether a time can be (plausible), what the GPU does (gpu_state), and who
waits for whom (lock, silence). The device half (worker, device, inputs, verify, timing,
bench) imports torch and runs in the child process only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunekit.measure.client import SEEDS, LateFault, MeasuringWorker
    from tunekit.measure.final import Rules
    from tunekit.measure.job import OUT_OF_MEMORY, RunJob
    from tunekit.measure.lock import lock_path, turn
    from tunekit.measure.sequential import DEFAULT_CONFIDENCE, DEFAULT_MARGIN
    from tunekit.measure.statistics import Decision, Standing, choose, spread, usable

__all__ = [
    "DEFAULT_CONFIDENCE",
    "DEFAULT_MARGIN",
    "OUT_OF_MEMORY",
    "SEEDS",
    "Decision",
    "LateFault",
    "MeasuringWorker",
    "Rules",
    "RunJob",
    "Standing",
    "choose",
    "lock_path",
    "spread",
    "turn",
    "usable",
]

_HOMES = {
    "client": ("SEEDS", "LateFault", "MeasuringWorker"),
    "final": ("Rules",),
    "job": ("OUT_OF_MEMORY", "RunJob"),
    "lock": ("lock_path", "turn"),
    "sequential": ("DEFAULT_CONFIDENCE", "DEFAULT_MARGIN"),
    "statistics": ("Decision", "Standing", "choose", "spread", "usable"),
}


def __getattr__(name: str) -> Any:
    """What the package offers, each imported when it is asked for: a lookup needs the protocol's words alone."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"tunekit.measure.{module}"), name)
    raise AttributeError(f"module 'tunekit.measure' has no attribute '{name}'")
