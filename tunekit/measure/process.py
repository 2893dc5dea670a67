"""The measuring child, as its parent starts it."""

from __future__ import annotations

from collections.abc import Mapping

from tunekit import child


class Child(child.Child):
    """One measuring process on a device (an index, or "host"). `limits_s` gives a phase's limit."""

    def __init__(self, device: int | str, run_limit_s: float, limits_s: Mapping[str, float]) -> None:
        arguments = ("--device", str(device), "--run-limit-s", str(run_limit_s))
        super().__init__("tunekit.measure.start", arguments, limits_s, "the measuring process")
