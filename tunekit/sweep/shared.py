"""What the problems of one sweep share: the compiler, the measuring worker, the stores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tunekit.compiling import Compiler, compile_limits
from tunekit.jobs import Pool
from tunekit.measure import MeasuringWorker
from tunekit.progress import SweepEvent
from tunekit.settings import DEFAULT_RUN_LIMIT_S, Settings, limit_s
from tunekit.simulate.client import Simulator
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.sweep.options import SweepOptions, Target


@dataclass(frozen=True)
class Shared:
    """One sweep's means. `number` is its row in the store; `worker` is None where nothing here can run kernels;
    `simulator` is there where they are simulated instead."""

    spec: KernelSpec
    reference: str
    target: Target
    options: SweepOptions
    store: Store
    artifacts: ArtifactStore
    number: int
    compiler: Compiler
    worker: MeasuringWorker | None
    simulator: Simulator | None
    on_event: Callable[[SweepEvent], None]

    def note(self, text: str) -> None:
        self.on_event(SweepEvent("note", text=text))


@contextlib.contextmanager
def shared(
    spec: KernelSpec,
    reference: str,
    target: Target,
    options: SweepOptions,
    settings: Settings,
    store: Store,
    number: int,
    on_event: Callable[[SweepEvent], None],
) -> Iterator[Shared]:
    """Start the compile workers and, where the target can run here, the measuring worker; end both afterwards."""
    backends = tuple(dict.fromkeys(i.backend for i in spec.implementations if i.unsupported(target.arch) is None))
    artifacts = ArtifactStore(settings.artifacts)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(
            Pool(workers=options.jobs or settings.jobs, warm=backends, limits=compile_limits(spec, settings))
        )
        on_event(SweepEvent("note", text=pool.why))
        worker = None
        if target.device is not None:
            run_limit_s = limit_s(None, settings.run_limit_s, None, DEFAULT_RUN_LIMIT_S)
            worker = stack.enter_context(
                MeasuringWorker(
                    target.device, run_limit_s, on_wait=lambda text: on_event(SweepEvent("note", text=text))
                )
            )
        compiler = Compiler(pool, artifacts, store, target.environment, options.force, options.retry_failed, number)
        simulator = stack.enter_context(Simulator()) if target.simulated else None
        yield Shared(spec, reference, target, options, store, artifacts, number, compiler, worker, simulator, on_event)
