"""One sweep: for each problem expand, probe, compile, verify, measure, choose, record.

Batches keep compiling and measuring apart: nothing compiles while a variant is
timed. Every outcome is stored as it comes, so that whatever ends the sweep
loses at most the variant in flight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunekit import settings as defaults
from tunekit.compiling import Compiler, Unit, units
from tunekit.errors import UserError
from tunekit.identity import digest
from tunekit.jobs import Event, Limits, Pool
from tunekit.measure import MeasuringWorker, device_lock
from tunekit.model import Footprint, Outcome, Stage, Status, Value, Values, Variant, Winner
from tunekit.progress import ProblemReport, Row, SweepEvent, SweepReport
from tunekit.search import Budget, Told, make_strategy, parse_budget
from tunekit.settings import Settings
from tunekit.space import Expansion, declared_footprint, default_variant, expand
from tunekit.spec import KernelSpec, load_spec
from tunekit.store import ArtifactStore, Store
from tunekit.sweep.measuring import Measurer, incumbent_of
from tunekit.sweep.options import SweepOptions, Target, choose_target, complete_problems, restrict

# How many variants an adaptive strategy proposes at once; fixed, so that the number of workers changes nothing.
BATCH = 8
"""Variants per batch of an adaptive search."""


def sweep(
    reference: str,
    problems: Sequence[Mapping[str, Value]],
    options: SweepOptions,
    settings: Settings,
    on_event: Callable[[SweepEvent], None],
) -> SweepReport:
    """Tune a spec for `problems` (its examples where none is given) and record what came of it.

    Ctrl-C ends it early with state ``interrupted``; what was recorded stays.

    Raises:
        UserError: a mistake in the request, found before anything runs.
    """
    spec = load_spec(reference)
    target = choose_target(spec, options)
    wanted = complete_problems(spec, problems)
    budget = parse_budget(options.budget)
    candidates_of(spec, target, wanted[0], options)  # an unknown search or an empty space ends here, in a sentence
    make_strategy(options.search, [], budget, options.seed)
    store = Store.open(settings.database)
    artifacts = ArtifactStore(settings.artifacts)
    arguments = {"problems": [dict(p) for p in wanted], **dataclasses.asdict(options)}
    number = store.start_sweep(spec.name, spec.version, target.arch.name, arguments)
    reports: list[ProblemReport] = []
    state = "failed"
    try:
        with contextlib.ExitStack() as stack:
            run = _open_run(stack, spec, absolute(reference), target, options, settings, store, artifacts, number, on_event)
            for problem in wanted:
                report = _ProblemRun(run, problem, budget)
                try:
                    report.go()
                finally:
                    reports.append(report.report())
        state = "done"
    except KeyboardInterrupt:
        state = "interrupted"
    finally:
        store.finish_sweep(number, state)
    notes = (target.why,) if target.why else ()
    return SweepReport(spec.name, target.arch.name, tuple(reports), "done" if state == "done" else "interrupted", notes)


def absolute(reference: str) -> str:
    """A spec reference that loads from any working directory."""
    path, colon, name = reference.partition(".py:")
    if colon:
        return f"{Path(path + '.py').resolve()}:{name}"
    return str(Path(reference).resolve()) if reference.endswith(".py") else reference


def candidates_of(
    spec: KernelSpec, target: Target, problem: Values, options: SweepOptions
) -> tuple[Expansion, list[Variant], dict[str, Outcome]]:
    """The expansion of a problem, the variants that fit, and an outcome for each that does not.

    Raises:
        UserError: no variant is valid, with the constraints to blame.
    """
    expansion = expand(spec, target.arch, problem, options.implementation)
    expansion = restrict(expansion, options.variants)
    if not expansion.variants:
        raise UserError(f"{spec.name} has no valid variant for {problem} on {target.arch.name}: {expansion.blame()}")
    fitting: list[Variant] = []
    over: dict[str, Outcome] = {}
    for variant in expansion.variants:
        implementation = spec.implementation(variant.implementation)
        footprint = declared_footprint(implementation, target.arch, problem, variant.tunables)
        misfit = footprint.misfit(target.arch)
        if misfit is None:
            fitting.append(variant)
        else:
            over[variant.id] = Outcome(Stage.PROBE, Status.OVER_BUDGET, misfit, footprint=footprint)
    return expansion, fitting, over


@dataclass(frozen=True)
class _Run:
    """What the problems of one sweep share."""

    spec: KernelSpec
    reference: str
    target: Target
    options: SweepOptions
    store: Store
    artifacts: ArtifactStore
    number: int
    compiler: Compiler
    worker: MeasuringWorker | None
    on_event: Callable[[SweepEvent], None]


def _open_run(
    stack: contextlib.ExitStack,
    spec: KernelSpec,
    reference: str,
    target: Target,
    options: SweepOptions,
    settings: Settings,
    store: Store,
    artifacts: ArtifactStore,
    number: int,
    on_event: Callable[[SweepEvent], None],
) -> _Run:
    limits = Limits(
        trace_s=settings.trace_limit_s or defaults.DEFAULT_TRACE_LIMIT_S,
        backend_s=settings.compile_limit_s or spec.compile_limit_s or defaults.DEFAULT_COMPILE_LIMIT_S,
        memory_bytes=settings.memory_limit_bytes or defaults.DEFAULT_MEMORY_LIMIT_BYTES,
    )
    backends = tuple(dict.fromkeys(i.backend for i in spec.implementations if i.unsupported(target.arch) is None))
    pool = stack.enter_context(Pool(workers=options.jobs or settings.jobs, warm=backends, limits=limits))
    on_event(SweepEvent("note", text=pool.why))
    worker = None
    if target.device is not None:
        stack.enter_context(device_lock(target.device, lambda text: on_event(SweepEvent("note", text=text))))
        run_limit_s = settings.run_limit_s or defaults.DEFAULT_RUN_LIMIT_S
        worker = stack.enter_context(MeasuringWorker(target.device, run_limit_s))
    compiler = Compiler(pool, artifacts, store, target.environment, options.force, options.retry_failed, number)
    return _Run(spec, reference, target, options, store, artifacts, number, compiler, worker, on_event)


@dataclass
class _ProblemRun:
    """The sweep of one problem. `outcomes` grows as variants pass the stages."""

    run: _Run
    problem: Values
    budget: Budget
    expansion: Expansion | None = None
    footprints: dict[str, Footprint] = field(default_factory=dict)
    outcomes: dict[str, dict[Stage, Outcome]] = field(default_factory=dict)
    timed: dict[str, tuple[Unit, Outcome, Outcome]] = field(default_factory=dict)
    winner: Winner | None = None
    why_no_winner: str = "the sweep was interrupted"

    def go(self) -> None:
        run = self.run
        expansion, fitting, over = candidates_of(run.spec, run.target, self.problem, run.options)
        self.expansion = expansion
        self._emit("expanded", text=f"{self.problem}: {expansion.blame()}")
        for variant in expansion.variants:
            if variant.id in over:
                self._finish(variant, over[variant.id], 0, 0)
        protocol = run.worker.protocol(Stage.MEASURE, final=True) if run.worker else ""
        incumbent, seeds = incumbent_of(run.store, run.spec, self.problem, run.target, protocol)
        default = default_variant(run.spec, run.target.arch, self.problem)
        first = [v.id for v in (*([incumbent.variant] if incumbent else []), *([default] if default else []), *seeds)]
        measurer = self._measurer(protocol)
        for batch in self._batches(fitting, first):
            self._evaluate(batch, measurer)
        if measurer is None:
            self.why_no_winner = f"no winner was measured: {run.target.why}"
            return
        note = lambda text: self._emit("phase", text=text)  # noqa: E731 - one line, used once
        self.winner, self.why_no_winner = measurer.final(
            self.timed, incumbent.variant.id if incumbent else None, default.id if default else None, note
        )
        if self.winner is not None:
            self._emit("winner", variant=self.winner.variant, text=f"{self.winner.median_us:.2f} us")

    def _measurer(self, protocol: str) -> Measurer | None:
        run = self.run
        if run.worker is None:
            return None
        earlier: dict[tuple[str, Stage], Outcome] = {}
        if run.options.resume and not run.options.force:
            for trial in run.store.trials(spec=run.spec.name, arch=run.target.arch.name, problem=self.problem):
                same = trial.environment == run.target.environment
                if same and trial.protocol == run.worker.protocol(trial.outcome.stage):
                    earlier[trial.compile_key, trial.outcome.stage] = trial.outcome
            if run.options.retry_failed:
                earlier = {key: outcome for key, outcome in earlier.items() if outcome.ok}
        return Measurer(
            run.spec, self.problem, run.target, run.worker, run.artifacts, run.store, run.number, earlier
        )

    def _batches(self, fitting: list[Variant], first: Sequence[str]) -> Iterator[list[Variant]]:
        """What to evaluate, a batch at a time: the incumbent, default and seeds, then the search's proposals."""
        options, started = self.run.options, time.monotonic()
        by_id = {variant.id: variant for variant in fitting}
        strategy = make_strategy(options.search, fitting, self.budget, options.seed)
        self._emit("note", text=f"search: {strategy.name}, {len(fitting)} candidates, seed {options.seed}")
        done: set[str] = set()
        opening = [by_id[id] for id in dict.fromkeys(first) if id in by_id]
        size = len(fitting) if strategy.name == "exhaustive" and self.budget.seconds is None else BATCH
        pending = opening if strategy.name != "exhaustive" else []
        while self.budget.left(len(done)) > 0:
            if self.budget.seconds is not None and time.monotonic() - started > self.budget.seconds:
                self._emit("note", text=f"the budget of {self.budget.seconds:g} s is spent")
                return
            room = int(min(size, self.budget.left(len(done))))
            batch = [v for v in (pending or strategy.ask(room)) if v.id not in done][:room]
            asked_nothing = not batch and not pending
            pending = []
            if asked_nothing:
                return
            if batch:
                done |= {variant.id for variant in batch}
                yield batch
                strategy.tell([Told(v, self._time(v)) for v in batch])

    def _time(self, variant: Variant) -> float | None:
        measured = self.outcomes.get(variant.id, {}).get(Stage.MEASURE)
        if measured is None or not measured.ok or not measured.samples_us:
            return None
        return sorted(measured.samples_us)[len(measured.samples_us) // 2]

    def _evaluate(self, batch: list[Variant], measurer: Measurer | None) -> None:
        run = self.run
        wanted = units(run.spec, run.reference, self.problem, batch)
        self._emit("phase", text="compile", total=len(wanted))
        compiled: list[tuple[Unit, Outcome]] = []
        for unit, outcome in run.compiler.compile(wanted, self._on_compile(wanted)):
            compiled.append((unit, outcome))
            self._finish(unit.variant, outcome, len(compiled), len(wanted))
        ready = [(unit, outcome) for unit, outcome in compiled if outcome.ok]
        if measurer is None or not ready:
            return
        self._emit("phase", text="verify and measure", total=len(ready))
        for index, (unit, outcome) in enumerate(ready, 1):
            self._emit("started", variant=unit.variant, text="measure", done=index - 1, total=len(ready))
            measured = measurer.check(unit, outcome)
            self._finish(unit.variant, measured, index, len(ready))
            if measured.ok and measured.stage is Stage.MEASURE:
                self.timed[unit.variant.id] = (unit, outcome, measured)

    def _on_compile(self, wanted: Sequence[Unit]) -> Callable[[Event], None]:
        """Turns the pool's events into the sweep's: what compiles now, in which phase, for how long."""
        by_key = {unit.key: unit for unit in wanted}
        total = len(by_key)

        def tell(event: Event) -> None:
            unit = by_key.get(event.id)
            running = tuple(
                (str(by_key[r.id].variant), r.phase, r.seconds) for r in event.running if r.id in by_key
            )
            kind = "started" if event.kind == "started" else "phase"
            variant = unit.variant if unit and kind == "started" else None
            self.run.on_event(SweepEvent(kind, variant=variant, total=total, running=running))  # type: ignore[arg-type]

        return tell

    def _finish(self, variant: Variant, outcome: Outcome, done: int, total: int) -> None:
        self.outcomes.setdefault(variant.id, {})[outcome.stage] = outcome
        if outcome.stage in (Stage.COMPILE, Stage.PROBE):
            self.footprints[variant.id] = outcome.footprint
        self._emit("finished", variant=variant, outcome=outcome, done=done, total=total)

    def _emit(self, kind: str, **fields: object) -> None:
        self.run.on_event(SweepEvent(kind, **fields))  # type: ignore[arg-type]

    def report(self) -> ProblemReport:
        if self.expansion is None:
            return ProblemReport(self.problem, "not begun", (), None, self.why_no_winner)
        rows = tuple(self._row(variant) for variant in self.expansion.variants if variant.id in self.outcomes)
        return ProblemReport(self.problem, self.expansion.blame(), rows, self.winner, self.why_no_winner)

    def _row(self, variant: Variant) -> Row:
        outcomes = self.outcomes[variant.id]
        in_order = [outcomes[stage] for stage in Stage if stage in outcomes]
        last = next((outcome for outcome in in_order if not outcome.ok), in_order[-1])
        compiled = outcomes.get(Stage.COMPILE)
        seconds = sum(float(s) for s in compiled.seconds.values()) if compiled and compiled.seconds else None
        return Row(
            variant=variant,
            footprint=self.footprints.get(variant.id, Footprint()),
            outcomes=outcomes,
            status=str(last.status),
            reason=last.reason,
            compile_s=seconds,
            median_us=self._time(variant),
        )
