"""One problem's way through a sweep: expand, probe, compile, verify, measure, choose.

Batches keep compiling and measuring apart: nothing compiles while a variant is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunekit.compiling import Unit, units
from tunekit.errors import SpecError, UserError
from tunekit.jobs import Event
from tunekit.measure import MeasuringWorker
from tunekit.model import Footprint, Values, Variant, Winner
from tunekit.probe import DISAGREEMENT
from tunekit.progress import ProblemReport, Row, SweepEvent
from tunekit.search import Budget, Told, choose_strategy, make_strategy
from tunekit.search.encoding import Space, in_order
from tunekit.space import Expansion, declared_footprint, default_variants, expand
from tunekit.spec import KernelSpec
from tunekit.store.shipped import shipped_winners
from tunekit.sweep.measuring import Measurer, Timed, incumbent_of, middle
from tunekit.sweep.neighbours import neighbours_winners
from tunekit.sweep.options import SweepOptions, Target, restrict
from tunekit.sweep.predicting import Predictor, cost_model_of
from tunekit.sweep.shared import Shared
from tunekit.sweep.simulating import UNDECIDED, SimulatingVerifier
from tunekit.trials import Outcome, Stage, Status

# How many variants an adaptive strategy proposes at once; fixed, so that the number of workers changes nothing.
BATCH = 8
# The strategies that begin with what the cost model predicts.
PREDICTED = ("exhaustive", "surrogate")


@dataclass(frozen=True)
class Candidates:
    """The expansion of a problem, the variants that fit, and an outcome for each that does not, by id."""

    expansion: Expansion
    fitting: list[Variant]
    over: dict[str, Outcome]


def candidates_of(spec: KernelSpec, target: Target, problem: Values, options: SweepOptions) -> Candidates:
    """What a sweep may try for a problem.

    Raises:
        UserError: no variant is valid, with the constraints to blame.
    """
    expansion = restrict(expand(spec, target.arch, problem, options.implementation), options.variants)
    if not expansion.variants:
        why = "; ".join((expansion.blame(), *expansion.absent))
        raise UserError(f"{spec.name} has no valid variant for {problem} on {target.arch.name}: {why}")
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
    return Candidates(expansion, fitting, over)


def _over_budget(over: Mapping[str, Outcome]) -> str:
    """How many variants don't fit as declared, and the first's reason; the report groups them all."""
    if not over:
        return ""
    name, outcome = next(iter(over.items()))
    return f"; {len(over)} over budget as declared, {name} the first: {outcome.reason}"


@dataclass
class ProblemRun:
    """The sweep of one problem. `outcomes` grows as variants pass the stages."""

    run: Shared
    problem: Values
    candidates: Candidates
    budget: Budget
    expansion: Expansion | None = None
    footprints: dict[str, Footprint] = field(default_factory=dict)
    outcomes: dict[str, dict[Stage, Outcome]] = field(default_factory=dict)
    timed: dict[str, Timed] = field(default_factory=dict)
    winner: Winner | None = None
    why_no_winner: str = "the sweep was interrupted"
    notes: list[str] = field(default_factory=list)
    _units: dict[str, Unit] = field(default_factory=dict)
    _earlier: dict[str, Outcome] = field(default_factory=dict)
    _predictor: Predictor = field(init=False)

    def go(self) -> None:
        run = self.run
        expansion, fitting, over = self.candidates.expansion, self.candidates.fitting, self.candidates.over
        self.expansion = expansion
        self._emit("expanded", text=f"{self.problem}: {expansion.blame()}{_over_budget(over)}")
        for absent in expansion.absent:
            self._note(absent)
        for variant in expansion.variants:
            if variant.id in over:
                self._finish(variant, over[variant.id], 0, 0)
        shipped = shipped_winners(run.spec.name, run.target.arch.name)
        incumbent, seeds = incumbent_of(run.store, run.spec, self.problem, run.target, shipped)
        defaults = default_variants(run.spec, run.target.arch, self.problem)
        default = defaults[0] if defaults else None
        near = neighbours_winners(run.spec, self.problem, run.store.winners(run.spec.name, run.target.arch.name))
        opening = (*([incumbent.variant] if incumbent else []), *defaults[:1], *seeds, *defaults[1:], *near)
        first = [variant.id for variant in opening]
        if not fitting:
            self.why_no_winner = f"no variant fits {run.target.arch.name}: all are over budget"
            return
        measurer = self._measurer()
        self._units = {unit.variant.id: unit for unit in units(run.spec, run.reference, self.problem, fitting)}
        simulating = self._simulating()
        judging = measurer or simulating
        self._earlier = judging.earlier() if judging else {}
        for batch in self._batches(fitting, first):
            self._evaluate(batch, judging)
        self._tell_disagreements()
        if measurer is None:
            self.why_no_winner = f"nothing was measured: {run.target.why}"
            if simulating is not None:
                self.why_no_winner += "; what was compiled was simulated"
                self._tell_undecided()
            return
        self._tell_late_faults(measurer.worker)
        self.winner, self.why_no_winner, failed = measurer.final(
            self.timed,
            incumbent.variant.id if incumbent else None,
            default.id if default else None,
            lambda text: self._emit("phase", text=text),
        )
        for id, outcome in failed.items():
            self._finish(self.timed[id].unit.variant, outcome, 0, 0)
        if self.winner is not None:
            self._emit("winner", variant=self.winner.variant, text=f"{self.winner.median_us:.2f} us")

    def _measurer(self) -> Measurer | None:
        run, options = self.run, self.run.options
        if run.worker is None:
            return None
        return Measurer(
            run.spec,
            self.problem,
            run.target,
            run.worker,
            run.artifacts,
            run.store,
            run.number,
            resume=options.resume and not options.force,
            retry_failed=options.retry_failed,
            rules=options.rules(),
            pool=run.compiler.pool,
            full=options.cases == "full",
        )

    def _simulating(self) -> SimulatingVerifier | None:
        run, options = self.run, self.run.options
        if run.simulator is None:
            return None
        return SimulatingVerifier(
            run.spec,
            self.problem,
            run.target,
            run.simulator,
            run.artifacts,
            run.store,
            run.number,
            jobs=options.jobs,
            seed=options.seed,
            resume=options.resume and not options.force,
        )

    def _tell_undecided(self) -> None:
        """A note on the variants that pass though the simulation said nothing about them."""
        simulated = [outcomes.get(Stage.SIMULATE) for outcomes in self.outcomes.values()]
        undecided = [outcome for outcome in simulated if outcome is not None and self._passes_over(outcome)]
        if undecided:
            self._note(f"simulating left {len(undecided)} variants undecided, the first because: {undecided[0].reason}")

    def _tell_late_faults(self, worker: MeasuringWorker) -> None:
        for late in worker.late_faults:
            self._emit("note", text=f"a fault surfaced after {late.suspect.variant} had run: {late.reason}")
        worker.late_faults.clear()

    def _tell_disagreements(self) -> None:
        """One note where a spec's arithmetic, the trace and the machine code don't say the same of some variants."""
        parted = [unit for unit in self._units.values() if DISAGREEMENT in self._facts(unit)]
        if parted:
            first, last = parted[0], "" if len(parted) == 1 else f" (and {len(parted) - 1} more)"
            self._note(
                f"the footprint's readings disagree for {first.variant}: {self._facts(first)[DISAGREEMENT]}{last}"
            )

    def _facts(self, unit: Unit) -> Values:
        """What the probe or the compile of a unit found out; nothing where it was not tried."""
        outcomes = self.outcomes.get(unit.variant.id, {})
        tried = outcomes.get(Stage.COMPILE) or outcomes.get(Stage.PROBE)
        return tried.facts if tried else Values()

    def _batches(self, fitting: list[Variant], first: Sequence[str]) -> Iterator[list[Variant]]:
        """What to evaluate, a batch at a time: incumbent, defaults, seeds, neighbours' winners, then the proposals."""
        options, started = self.run.options, time.monotonic()
        by_id = {variant.id: variant for variant in fitting}
        chosen = choose_strategy(options.search, len(fitting), self.budget)
        strategy = make_strategy(chosen.name, Space(fitting, self._predicted(fitting)), self.budget, options.seed)
        self._emit("note", text=f"search: {chosen.name} ({chosen.why}), seed {options.seed}")
        if chosen.name in PREDICTED and self._predictor.model is not None:
            self._note(f"the cost model orders the first evaluations: {self._predictor.model.words()}")
        done: set[str] = set()
        pending = [by_id[id] for id in dict.fromkeys(first) if id in by_id]
        size = len(fitting) if strategy.name == "exhaustive" and self.budget.seconds is None else BATCH
        while self.budget.left(len(done)) > 0:
            if self.budget.seconds is not None and time.monotonic() - started > self.budget.seconds:
                self._emit("note", text=f"the budget of {self.budget.seconds:g} s is spent")
                return
            room = int(min(size, self.budget.left(len(done))))
            batch, pending = pending[:room], pending[room:]
            done |= {variant.id for variant in batch}
            # A strategy doesn't know what the opening took: asking goes on until the batch is full or nothing is left.
            while len(batch) < room and (asked := strategy.ask(room - len(batch))):
                batch += [variant for variant in asked if variant.id not in done]
                done |= {variant.id for variant in asked}
            if not batch:
                return
            yield batch
            strategy.tell([self._told(variant) for variant in batch])

    def _predicted(self, fitting: list[Variant]) -> dict[str, float]:
        """The times by the cost model, by variant id. It is an opinion: where it fails, nothing is ordered by it."""
        self._predictor = Predictor(
            self.run.spec, self.problem, cost_model_of(self.run.spec, self.run.target.arch.name)
        )
        try:
            predicted = self._predictor.all_us(fitting)
        except SpecError as error:
            self._note(f"the cost model orders nothing: {error}")
            predicted = {}
        if not predicted:
            self._predictor = Predictor(self.run.spec, self.problem, None)
        return predicted

    def _told(self, variant: Variant) -> Told:
        """What came of a variant, for the search: its time; else the status of what failed; else that nothing did."""
        outcomes = [o for o in self.outcomes.get(variant.id, {}).values() if not self._passes_over(o)]
        failed = next((outcome.status for outcome in outcomes if not outcome.ok), Status.OK)
        return Told(variant, self._time(variant), failed)

    def _time(self, variant: Variant) -> float | None:
        measured = self.outcomes.get(variant.id, {}).get(Stage.MEASURE)
        if measured is None or not measured.ok or not measured.samples_us:
            return None
        return middle(measured.samples_us)

    def _evaluate(self, batch: list[Variant], judging: Measurer | SimulatingVerifier | None) -> None:
        run = self.run
        wanted = [self._units[variant.id] for variant in batch]
        self._emit("phase", text="compile", total=len(wanted))
        compiled: list[tuple[Unit, Outcome]] = []
        for unit, outcome in run.compiler.compile(wanted, self._on_compile(wanted)):
            compiled.append((unit, outcome))
            self._finish(unit.variant, outcome, len(compiled), len(wanted))
        ready = [(unit, outcome) for unit, outcome in compiled if outcome.ok]
        if judging is None or not ready:
            return
        # What was compiled is known better: its registers, and so how many CTAs an SM holds.
        ready = in_order(ready, [self._predictor.predict_us(unit.variant, done.footprint) for unit, done in ready])
        verb = "measure" if isinstance(judging, Measurer) else "simulate"
        self._emit("phase", text="verify and measure" if verb == "measure" else verb, total=len(ready))
        for index, (unit, outcome) in enumerate(ready, 1):
            self._emit("started", variant=unit.variant, text=verb, done=index - 1, total=len(ready))
            judged = self._earlier.get(unit.key) or judging.check(unit)
            self._finish(unit.variant, judged, index, len(ready))
            if judged.ok and judged.stage is Stage.MEASURE:
                self.timed[unit.variant.id] = Timed(unit, outcome, judged)

    def _on_compile(self, wanted: Sequence[Unit]) -> Callable[[Event], None]:
        """Turns the pool's events into the sweep's: what compiles now, in which phase, for how long."""
        variants = {unit.key: unit.variant for unit in wanted}
        pool = self.run.compiler.pool

        def tell(event: Event) -> None:
            running = tuple((str(variants[now.task]), now.phase, now.seconds) for now in pool.running())
            if event.kind == "started":
                self._emit("started", variant=variants[event.task], total=len(variants), running=running)
            else:
                self._emit("phase", total=len(variants), running=running)

        return tell

    def _finish(self, variant: Variant, outcome: Outcome, done: int, total: int) -> None:
        self.outcomes.setdefault(variant.id, {})[outcome.stage] = outcome
        if outcome.stage in (Stage.COMPILE, Stage.PROBE):
            self.footprints[variant.id] = outcome.footprint
        self._emit("finished", variant=variant, outcome=outcome, done=done, total=total)

    def _note(self, text: str) -> None:
        """Say something now, and in the report."""
        self.notes.append(text)
        self._emit("note", text=text)

    def _emit(self, kind: str, **fields: object) -> None:
        self.run.on_event(SweepEvent(kind, **fields))  # type: ignore[arg-type]

    def report(self) -> ProblemReport:
        if self.expansion is None:
            return ProblemReport(self.problem, "not begun", (), None, self.why_no_winner)
        rows = tuple(self._row(variant) for variant in self.expansion.variants if variant.id in self.outcomes)
        return ProblemReport(self.problem, self.expansion.blame(), rows, self.winner, self.why_no_winner)

    def _passes_over(self, outcome: Outcome) -> bool:
        """Whether an outcome counts for nothing: a simulation that nobody demanded, and that decided nothing."""
        undecided = outcome.stage is Stage.SIMULATE and outcome.status in UNDECIDED
        return undecided and self.run.options.verify != "simulate"

    def _row(self, variant: Variant) -> Row:
        outcomes = self.outcomes[variant.id]
        in_order = [outcomes[stage] for stage in Stage if stage in outcomes]
        decided = [outcome for outcome in in_order if not self._passes_over(outcome)]
        last = next((outcome for outcome in decided if not outcome.ok), decided[-1])
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
