"""What all kernels of a process did: as numbers by spec, and as text for Prometheus.

What a kernel counted stays when it is collected: a counter that falls is a restart to Prometheus.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tunekit.dispatch.forked import Guard
from tunekit.model import Level

if TYPE_CHECKING:
    from tunekit.dispatch.counters import Counters
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
MOST_ENDED = 16
"""Kernels that are gone whose counts are kept apart; past it they become one of each spec."""


@dataclass(eq=False)
class Tally:
    """The counts of one kernel, or of several that are gone: `counts` by a resolver's names, `calls` by level."""

    spec: str
    counts: Counter[str]
    calls: Callable[[], Counter[Level]]
    ended: bool = False

    def end(self) -> None:
        """The kernel is gone: keep its numbers, and nothing else of it. Its last compile may still be counted."""
        self.calls = partial(Counter, self.calls())
        self.ended = True


_living: weakref.WeakSet[Kernel] = weakref.WeakSet()
_tallies: list[Tally] = []
_guard = Guard()
"""For who changes or lists the kernels and tallies. A kernel's end, which may come amid anything, changes no tally."""


def live(kernel: Kernel, counts: Counter[str], counters: Counters) -> None:
    """Count a kernel in, and what it counted also when it is gone."""
    tally = Tally(kernel.spec.name, counts, counters.by_level)
    with _guard:
        ended = [each for each in _tallies if each.ended]
        if len(ended) > MOST_ENDED:
            _tallies[:] = [*(each for each in _tallies if each not in ended), *_summed(ended)]
        _tallies.append(tally)
        _living.add(kernel)
    weakref.finalize(kernel, tally.end).atexit = False


def _summed(ended: list[Tally]) -> list[Tally]:
    """One for each spec."""
    counts: dict[str, Counter[str]] = {}
    calls: dict[str, Counter[Level]] = {}
    for tally in ended:
        counts.setdefault(tally.spec, Counter()).update(dict(tally.counts))
        calls.setdefault(tally.spec, Counter()).update(tally.calls())
    return [Tally(spec, counts[spec], partial(Counter, calls[spec]), ended=True) for spec in counts]


def living() -> list[Kernel]:
    """The kernels of this process that are alive."""
    with _guard:
        return list(_living)


def stats() -> dict[str, dict[str, Any]]:
    """By spec's name, what its kernels did, those too that are gone; and what there is now.

    ``kernels`` alive; ``problems`` resolved, and how many at each level; ``calls`` that found an entry, by level;
    ``entries`` kept; whether all that are alive are dispatched ``native``; ``loaded``, ``compiled``, ``recovered``,
    ``would_compile`` and ``error`` as in ``Kernel.stats``.
    """
    alive = living()  # none of these ends meanwhile
    with _guard:
        tallies = sorted(_tallies, key=lambda tally: tally.spec)
    found: dict[str, dict[str, Any]] = {}
    for tally in tallies:
        levels = dict.fromkeys(map(str, Level), 0)
        empty = {"kernels": 0, "problems": 0, **levels, **dict.fromkeys(COUNTERS, 0), "entries": 0, "native": True}
        total = found.setdefault(tally.spec, {**empty, "calls": dict(levels)})
        for name in ("problems", *levels, *COUNTERS):
            total[name] += tally.counts[name]
        for level, calls in tally.calls().items():
            total["calls"][str(level)] += calls
    for kernel in alive:
        total = found[kernel.spec.name]
        total["kernels"] += 1
        total["entries"] += kernel.entries
        total["native"] = total["native"] and kernel.native
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
