"""Tracing (or compiling) variants without storing anything, with limits and progress: for `probe`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tunekit.compiling import Unit, compile_limits
from tunekit.jobs import Event, Pool, TaskResult, compile_task
from tunekit.measure.silence import Compiles
from tunekit.progress import SweepEvent
from tunekit.settings import Settings
from tunekit.spec import KernelSpec

OnEvent = Callable[[SweepEvent], None]


def trace(
    spec: KernelSpec, units: Sequence[Unit], settings: Settings, on_event: OnEvent, *, back_end: bool
) -> Iterator[tuple[Unit, TaskResult]]:
    """Trace each unit in a process of its own, and run its back end too if `back_end`; results as they end."""
    by_key = {unit.key: unit for unit in units}
    backends = tuple(dict.fromkeys(spec.implementation(unit.variant.implementation).backend for unit in units))
    with tempfile.TemporaryDirectory(prefix="tunekit-probe-") as scratch:
        tasks = []
        for key, unit in by_key.items():
            out_dir = Path(scratch) / key[:24]
            out_dir.mkdir()
            tasks.append(compile_task(unit.request(out_dir, trace_only=not back_end), id=key))
        limits = compile_limits(spec, settings)
        with Pool(workers=settings.jobs, warm=backends, limits=limits) as pool, Compiles() as compiles:
            done = 0

            def tell(event: Event) -> None:
                running = tuple((str(by_key[now.task].variant), now.phase, now.seconds) for now in pool.running())
                on_event(SweepEvent("phase", done=done, total=len(by_key), running=running))

            for result in pool.run(tasks, tell, lambda: compiles.give_way(pool.pause, pool.resume)):
                done += 1
                yield by_key[result.id], result
