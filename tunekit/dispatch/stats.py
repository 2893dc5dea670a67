"""What all kernels of a process did: as numbers by spec, and as text for Prometheus."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tunekit.model import Level

if TYPE_CHECKING:
    from tunekit.dispatch.kernel import Kernel

COUNTERS = {
    "loaded": "Artifacts loaded.",
    "compiled": "Artifacts compiled by this process for its calls.",
    "recovered": "Recorded winners that could not serve, so that the next choice did.",
    "would_compile": "Artifacts wanted and missing where compiling is not allowed.",
    "error": "Problems that nothing could serve.",
}
GAUGES = {
    "kernels": "Kernels loaded and alive.",
    "entries": "Keys of calls that are kept.",
    "native": "Whether all calls are dispatched natively.",
}
_living: weakref.WeakSet[Kernel] = weakref.WeakSet()


def live(kernel: Kernel) -> None:
    """Count a kernel in, for as long as it lives."""
    _living.add(kernel)


def living() -> Iterator[Kernel]:
    """The kernels of this process that are alive."""
    yield from list(_living)


def stats() -> dict[str, dict[str, Any]]:
    """By spec's name, summed over its live kernels.

    ``kernels`` alive; ``problems`` resolved, and how many at each level; ``calls`` that found an entry, by level;
    ``entries`` kept; whether all are dispatched ``native``; ``loaded``, ``compiled``, ``recovered``,
    ``would_compile`` and ``error`` as in ``Kernel.stats``.
    """
    found: dict[str, dict[str, Any]] = {}
    for kernel in sorted(living(), key=lambda kernel: kernel.spec.name):
        levels = dict.fromkeys(map(str, Level), 0)
        empty = {"kernels": 0, "problems": 0, **levels, **dict.fromkeys(COUNTERS, 0), "entries": 0, "native": True}
        total = found.setdefault(kernel.spec.name, {**empty, "calls": dict(levels)})
        counts = kernel.stats()
        for name in ("problems", *levels, *COUNTERS):
            total[name] += counts[name]
        total["kernels"] += 1
        total["entries"] += kernel.entries
        total["native"] = total["native"] and kernel.native
        for level, calls in kernel.calls().items():
            total["calls"][str(level)] += calls
    return found


def prometheus() -> str:
    """`stats` in Prometheus' text format (version 0.0.4)."""
    found = stats()
    lines: list[str] = []

    def metric(name: str, kind: str, words: str, samples: list[tuple[dict[str, str], int]]) -> None:
        lines.extend((f"# HELP tunekit_{name} {words}", f"# TYPE tunekit_{name} {kind}"))
        lines.extend(f"tunekit_{name}{_labels(labels)} {value}" for labels, value in samples)

    def by_level(of: str) -> list[tuple[dict[str, str], int]]:
        return [
            ({"spec": spec, "level": str(level)}, (total if of == "problems" else total[of])[str(level)])
            for spec, total in found.items()
            for level in Level
        ]

    metric("calls_total", "counter", "Calls that found an entry, by the level that serves them.", by_level("calls"))
    metric("problems_total", "counter", "Problems resolved, by the level that serves them.", by_level("problems"))
    for name, words in COUNTERS.items():
        metric(f"{name}_total", "counter", words, [({"spec": spec}, total[name]) for spec, total in found.items()])
    for name, words in GAUGES.items():
        metric(name, "gauge", words, [({"spec": spec}, int(total[name])) for spec, total in found.items()])
    return "\n".join([*lines, ""])


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
