"""What the runs of one kernel under several schedules have in common."""

from __future__ import annotations

from typing import Any

import numpy as np


def clean(runs: list[Any]) -> np.ndarray[Any, Any]:
    """The one result that all schedules agree on."""
    for ran in runs:
        assert not ran.faults, ran.faults[0]
        assert (ran.buffers["out"] == runs[0].buffers["out"]).all()
    return runs[0].buffers["out"]


def kinds(runs: list[Any]) -> set[str]:
    return set().union(*(ran.kinds for ran in runs))


def messages(runs: list[Any]) -> str:
    return "\n".join(fault.message for ran in runs for fault in ran.faults)
