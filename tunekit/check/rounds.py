"""The rounds: every kernel compiled cold, again and again, its base and the reference compile beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tunekit import identity
from tunekit.backends import CompileRequest, symbol_of
from tunekit.check.targets import Target, reference_target
from tunekit.check.verdict import Sample
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Status, Values, to_json

CompileOnce = Callable[[Target], Sample]
Progress = Callable[[str], None]

TRIES_AT_A_LIMIT = 2
"""How often a compile may hit the limit before it is given up: once may be the machine's fault."""


@dataclass
class Samples:
    """All that was measured so far: samples by target name, of the base's kernels too, and the reference's
    by backend and arch."""

    kernels: dict[str, list[Sample]] = field(default_factory=dict)
    base: dict[str, list[Sample]] = field(default_factory=dict)
    references: dict[str, list[Sample]] = field(default_factory=dict)

    def of(self, target: Target) -> list[Sample]:
        return self.kernels.setdefault(target.name, [])

    def reference_of(self, target: Target) -> list[Sample]:
        return self.references.setdefault(reference_target(target).name, [])


def take_rounds(
    targets: Sequence[Target],
    rounds: int,
    compile_once: CompileOnce,
    samples: Samples,
    progress: Progress,
    base: Mapping[str, Target],
) -> None:
    """Add `rounds` rounds to `samples`. Each compile of a kernel is followed by one of the same kernel in
    `base` (by target name) and one of its reference, so that the machine's moods meet all three.

    What failed is not compiled again; what hit the limit is, once.
    """
    for number in range(rounds):
        for target in targets:
            taken = samples.of(target)
            if _given_up(taken):
                continue
            progress(f"round {number + 1} of {rounds}: {target.name}")
            taken.append(compile_once(target))
            if target.name in base:
                before = samples.base.setdefault(target.name, [])
                if not _given_up(before):
                    before.append(compile_once(base[target.name]))
            calibration = samples.reference_of(target)
            if not _given_up(calibration):
                calibration.append(compile_once(reference_target(target)))


def _given_up(taken: Sequence[Sample]) -> bool:
    failed = [sample for sample in taken if sample.status is not Status.OK]
    timed_out = [sample for sample in failed if sample.status is Status.COMPILE_TIMEOUT]
    return len(failed) > len(timed_out) or len(timed_out) >= TRIES_AT_A_LIMIT


@contextmanager
def isolated_compiles(
    backends: Sequence[str], trace_s: float, limit_s: float, memory_bytes: int
) -> Iterator[CompileOnce]:
    """Compiles in processes of their own, one at a time, killed at the limits; nothing is cached."""
    limits = Limits(trace_s=trace_s, backend_s=limit_s, memory_bytes=memory_bytes)
    with Pool(workers=1, warm=tuple(sorted(set(backends))), limits=limits) as pool:

        def compile_once(target: Target) -> Sample:
            with tempfile.TemporaryDirectory(prefix="tunekit-check-") as scratch:
                key = identity.digest([target.name, target.reference, to_json(target.variant)])
                request = CompileRequest(
                    target.reference,
                    target.variant.implementation,
                    target.variant.arch,
                    target.static,
                    target.variant.tunables,
                    symbol_of(key),
                    scratch,
                )
                (result,) = pool.run([compile_task(request)])
            return Sample(result.status, _total(result.seconds), result.reason, result.phase)

        yield compile_once


def _total(seconds: Values) -> float:
    return sum(float(value) for value in seconds.values())
