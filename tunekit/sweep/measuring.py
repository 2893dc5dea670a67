"""From compiled variants to a winner: verify, time, race in the final, choose."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunekit.compiling import Unit
from tunekit.jobs import Pool
from tunekit.measure import OUT_OF_MEMORY, SEEDS, Decision, MeasuringWorker, Rules, RunJob
from tunekit.measure.plausible import implausible
from tunekit.measure.protocol import is_current, searched_alike
from tunekit.measure.record import decide_again, noted
from tunekit.model import Values, Variant, Winner
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.store.standing import classify, comparable
from tunekit.sweep.options import Target
from tunekit.trials import Outcome, Stage, Status, Trial

# The search's timing is cheap and misranks: so many go on, of those within this ratio of its leader. Whoever is
# clearly worse leaves the final after a few rounds.
FINALISTS = 10
FINAL_MARGIN = 1.25


@dataclass(frozen=True)
class Timed:
    """A variant that is right and was timed: its compile, and both outcomes."""

    unit: Unit
    compiled: Outcome
    measured: Outcome


@dataclass(frozen=True)
class Measurer:
    """Verifies and times one spec's variants for one problem on one device, and keeps every outcome."""

    spec: KernelSpec
    problem: Values
    target: Target
    worker: MeasuringWorker
    artifacts: ArtifactStore
    store: Store
    sweep: int
    resume: bool
    retry_failed: bool
    rules: Rules = field(default_factory=Rules)
    pool: Pool | None = None  # whose compiles pause during a final
    full: bool = True  # verify under several seeds and at every edge, not one draw of the problem alone

    def earlier(self) -> dict[str, Outcome]:
        """What former sweeps found out here for this problem, by compile key: search times, and failures.

        Of the failures only those that are the variant's own: a final whose windows were all
        throttled, or memory that others had taken, is no reason not to try again. Nor does a time
        count that is older than such a failure, or, for a full verification, that of a variant which
        passed a smaller one alone.
        """
        if not self.resume:
            return {}
        here = comparable(self.target.environment)
        known: dict[str, Outcome] = {}
        checked: dict[str, int] = {}
        for trial in self.store.trials(spec=self.spec.name, arch=self.target.arch.name, problem=self.problem):
            outcome = trial.outcome
            if comparable(trial.environment) != here or outcome.stage not in (Stage.VERIFY, Stage.MEASURE):
                continue
            if outcome.ok and outcome.stage is Stage.VERIFY:
                checked[trial.compile_key] = max(checked.get(trial.compile_key, 0), int(outcome.facts.get("cases", 0)))
            timed = outcome.ok and outcome.stage is Stage.MEASURE and searched_alike(trial.protocol, self.rules.cache)
            own_fault = not outcome.ok and not outcome.windows and not outcome.facts.get(OUT_OF_MEMORY, False)
            if timed or (own_fault and not self.retry_failed):
                known[trial.compile_key] = outcome
            elif own_fault:
                known.pop(trial.compile_key, None)
        least = SEEDS if self.full else 1
        return {key: outcome for key, outcome in known.items() if not outcome.ok or checked.get(key, least) >= least}

    def check(self, unit: Unit) -> Outcome:
        """Verify a variant and, if it is right, time it; the last outcome."""
        job = self._job(unit)
        if isinstance(job, Outcome):
            return job
        verified = self._kept(unit, self.worker.verify(job, seeds=SEEDS if self.full else 1, edges=self.full))
        if not verified.ok:
            return verified
        timed = self._plausible(self.worker.time(job, cache=self.rules.cache))
        cases = verified.facts.only(("cases",))
        return self._kept(unit, dataclasses.replace(timed, facts=timed.facts.merged(cases)))

    def final(
        self, timed: Mapping[str, Timed], incumbent: str | None, default: str | None, note: Callable[[str], None]
    ) -> tuple[Winner | None, str, dict[str, Outcome]]:
        """Race the fastest variants, the incumbent and the default (`timed` by variant id), and record who won.

        Returns the winner, or None and why there is none; and the finalists that failed, by variant id.
        """
        racing = finalists({id: t.measured.samples_us for id, t in timed.items()}, [incumbent, default])
        if not racing:
            return None, "no variant was both right and measured", {}
        note(f"final: {len(racing)} variants take turns")
        jobs = {id: self._job(timed[id].unit) for id in racing}
        protected = tuple(id for id in dict.fromkeys((incumbent, default)) if id in jobs)
        rules = dataclasses.replace(self.rules, protected=protected)
        with self._paused():
            outcomes = self.worker.final([job for job in jobs.values() if isinstance(job, RunJob)], rules=rules)
        name = uuid.uuid4().hex
        for id, outcome in outcomes.items():
            record = noted(
                self._plausible(outcome),
                id,
                final=name,
                incumbent=incumbent,
                default=default,
                cost=cheapness(timed[id].compiled),
                margin=rules.margin,
                confidence=rules.confidence,
            )
            outcomes[id] = self._kept(timed[id].unit, record)
        decision = decide_again(outcomes)
        outcomes |= {id: job for id, job in jobs.items() if isinstance(job, Outcome)}
        failed = {id: outcome for id, outcome in outcomes.items() if not outcome.ok}
        if decision.winner is None:
            reasons = {id: outcome.reason for id, outcome in outcomes.items()} | dict(decision.excluded)
            words = "; ".join(f"{timed[id].unit.variant}: {reason}" for id, reason in reasons.items())
            return None, f"no finalist could be measured: {words}", failed
        note(f"final: {outcome_words(decision)}")
        winner = self._winner(name, decision, decision.winner, timed, outcomes)
        self.store.put_winner(winner)
        return winner, "", failed

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop this sweep's compile workers where they are; those of other processes hear of a final themselves."""
        if self.pool is None:
            yield
            return
        self.pool.pause()
        try:
            yield
        finally:
            self.pool.resume()

    def _job(self, unit: Unit) -> RunJob | Outcome:
        """What the worker is asked; or, where the artifact was collected or damaged meanwhile, a failure to say so."""
        artifact = self.artifacts.get(unit.key)
        if artifact is None:
            reason = f"it was compiled, but its artifact is gone from {self.artifacts.root}; sweep again"
            return Outcome(Stage.VERIFY, Status.LAUNCH_ERROR, reason)
        so = str(self.artifacts.path(artifact))
        return RunJob(unit.reference, self.problem, unit.variant, so, artifact.symbol)

    def _kept(self, unit: Unit, outcome: Outcome) -> Outcome:
        self.store.record(
            Trial(
                unit.variant,
                self.problem,
                unit.key,
                outcome,
                self.target.environment,
                protocol=outcome.protocol,
                sweep=self.sweep,
            )
        )
        return outcome

    def _winner(
        self, final: str, decision: Decision, id: str, timed: Mapping[str, Timed], outcomes: Mapping[str, Outcome]
    ) -> Winner:
        unit, standing = timed[id].unit, decision.standings[id]
        cases = timed[id].measured.facts.get("cases")
        return Winner(
            variant=unit.variant,
            problem=self.problem,
            bucket=self.spec.bucket(self.problem),
            environment=self.target.environment,
            protocol=outcomes[id].protocol,
            artifact=unit.key,
            symbol=unit.symbol,
            median_us=standing.median_us,
            spread_us=standing.spread_us,
            samples=standing.samples,
            runner_up=decision.runner_up,
            margin=decision.margin,
            confidence=decision.confidence,
            method=decision.method,
            tied=decision.tied,
            library=str(timed[id].compiled.facts.get("library", "")),
            outcome=decision.outcome,
            rounds=decision.rounds,
            cases=None if cases is None else int(cases),
            final=final,
        )

    def _plausible(self, outcome: Outcome) -> Outcome:
        """The outcome, or a failure where its time can't be."""
        if not outcome.ok or self.spec.cost is None:
            return outcome
        cost, gpu = self.spec.cost(self.problem), self.target.environment.gpu
        why = None
        if self.target.arch.is_gpu:
            why = implausible(middle(outcome.samples_us), cost, gpu, self.problem, self.rules.cache)
        if why is None:
            return outcome
        return dataclasses.replace(outcome, status=Status.LAUNCH_ERROR, reason=why, samples_us=())


def outcome_words(decision: Decision) -> str:
    """How a final ended, in words."""
    dropped = sum(standing.rounds < decision.rounds for standing in decision.standings.values())
    left = f"; {dropped} were dropped before" if dropped else ""
    if decision.outcome == "winner":
        return f"decided after {decision.rounds} rounds{left}"
    between = f"{len(decision.tied) or 1} variants"
    if decision.outcome == "tie":
        return f"a tie of {between} after {decision.rounds} rounds{left} ({decision.tie_rule})"
    return f"undecided between {between} after {decision.rounds} rounds, which is the budget{left}"


def finalists(samples: Mapping[str, Sequence[float]], always: Iterable[str | None]) -> list[str]:
    """The variants that race: the fastest few in the search, and those that always do."""
    medians = {id: middle(times) for id, times in samples.items() if times}
    if not medians:
        return []
    ranked = sorted(medians, key=lambda id: medians[id])
    close = [id for id in ranked[:FINALISTS] if medians[id] <= FINAL_MARGIN * medians[ranked[0]]]
    return close + [id for id in dict.fromkeys(always) if id is not None and id in medians and id not in close]


def middle(times: Sequence[float]) -> float:
    """The median of a non-empty series; the upper one of two."""
    return sorted(times)[len(times) // 2]


def cheapness(compiled: Outcome) -> tuple[float, ...]:
    """What decides a tie, least first: whether it needs a library, registers, shared memory, seconds of compiling."""
    footprint = compiled.footprint
    seconds = sum(float(s) for s in compiled.seconds.values())
    library = float("library" in compiled.facts)
    return (library, float(footprint.registers or 0), float(footprint.smem_bytes or 0), seconds)


def incumbent_of(
    store: Store, spec: KernelSpec, problem: Values, target: Target, shipped: Iterable[Winner]
) -> tuple[Winner | None, list[Variant]]:
    """The winner measured here for the problem's bucket, and the seeds: what won elsewhere or under other rules."""
    incumbent: Winner | None = None
    seeds: list[Variant] = []
    bucket = spec.bucket(problem)
    for winner in (*store.winners(spec.name, target.arch.name), *shipped):
        if winner.bucket != bucket or winner.variant.version != spec.version:
            continue
        current = is_current(winner.protocol, "final")
        if current and classify(winner, target.environment, winner.protocol, version=spec.version).here:
            incumbent = winner
        else:
            seeds.append(winner.variant)
    return incumbent, seeds
