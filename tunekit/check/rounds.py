"""The rounds: every kernel compiled cold, again and again, its base and the reference compile beside it; or once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tunekit import identity
from tunekit.backends import symbol_of
from tunekit.backends.contract import CompileRequest
from tunekit.check.targets import Target, reference_target
from tunekit.check.verdict import Sample
from tunekit.jobs import Limits, Pool, Task, compile_task
from tunekit.measure.silence import Compiles
from tunekit.model import Values, to_json
from tunekit.trials import Status

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


def take_once(
    targets: Sequence[Target], compiles: CompileOnce, samples: Samples, progress: Progress, limit_s: float
) -> None:
    """One sample of each target and of its reference: enough where nothing but a limit is held against them.

    Side by side, as far as `compiles` can. What took over `limit_s` seconds then is compiled again, alone.
    """
    references = {reference_target(target).name: reference_target(target) for target in targets}
    for name, target in references.items():
        samples.references.setdefault(name, []).append(compiles(target))
    together = compiles.together if isinstance(compiles, Isolated) else None
    done = together(targets) if together else ((target, compiles(target)) for target in targets)
    for number, (target, sample) in enumerate(done, start=1):
        progress(f"{number} of {len(targets)}: {target.name}")
        samples.of(target).append(sample)
    for target in targets:
        (sample,) = samples.of(target)
        if sample.status is Status.COMPILE_TIMEOUT or (sample.status is Status.OK and sample.seconds > limit_s):
            progress(f"again, alone: {target.name}")
            samples.of(target).append(compiles(target))


def _given_up(taken: Sequence[Sample]) -> bool:
    failed = [sample for sample in taken if sample.status is not Status.OK]
    timed_out = [sample for sample in failed if sample.status is Status.COMPILE_TIMEOUT]
    return len(failed) > len(timed_out) or len(timed_out) >= TRIES_AT_A_LIMIT


class Isolated:
    """Compiles in processes of their own, killed at the limits; nothing is cached. One at a time, if called."""

    def __init__(self, pool: Pool, scratch: Path) -> None:
        self._pool, self._scratch = pool, scratch

    def __call__(self, target: Target) -> Sample:
        ((_, sample),) = self.together([target])
        return sample

    def together(self, targets: Sequence[Target]) -> Iterator[tuple[Target, Sample]]:
        """As many at a time as the pool has workers; in the order in which they end."""
        by_key = {_key(target): target for target in targets}
        for result in self._pool.run(self._task(key, target) for key, target in by_key.items()):
            shutil.rmtree(self._scratch / result.id, ignore_errors=True)
            yield by_key[result.id], Sample(result.status, _total(result.seconds), result.reason, result.phase)

    def _task(self, key: str, target: Target) -> Task:
        v, out = target.variant, str(self._scratch / key)
        request = CompileRequest(
            target.reference, v.implementation, v.arch, target.static, v.tunables, symbol_of(key), out
        )
        return compile_task(request, id=key)


@contextmanager
def isolated_compiles(
    backends: Sequence[str], trace_s: float, limit_s: float, memory_bytes: int, workers: int | None
) -> Iterator[CompileOnce]:
    """The isolated compiler, with a pool of its own; `workers` None: as many as cores and memory allow.

    It begins once no final is held on this machine; it gives way to none, for its times would count the pause.
    """
    limits = Limits(trace_s=trace_s, backend_s=limit_s, memory_bytes=memory_bytes)
    warm = tuple(sorted(set(backends)))
    with (
        tempfile.TemporaryDirectory(prefix="tunekit-check-") as scratch,
        Pool(workers=workers, warm=warm, limits=limits) as pool,
        Compiles(),
    ):
        yield Isolated(pool, Path(scratch))


def _key(target: Target) -> str:
    return identity.digest([target.name, target.reference, to_json(target.variant)])


def _total(seconds: Values) -> float:
    return sum(float(value) for value in seconds.values())
