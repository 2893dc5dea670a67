"""From compiled variants to a winner: verify, time, race in the final, choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tunekit.compiling import Unit
from tunekit.measure import OUT_OF_MEMORY, SEEDS, Decision, MeasuringWorker, RunJob, choose
from tunekit.measure.protocol import is_current
from tunekit.model import Outcome, Stage, Status, Trial, Values, Variant, Winner
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.store.standing import classify, comparable
from tunekit.sweep.options import Target

FINALISTS = 4
# A variant that the search timed at over this many times the leader can't win the final.
FINAL_MARGIN = 1.15


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
            timed = outcome.ok and outcome.stage is Stage.MEASURE and is_current(trial.protocol, "search")
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
        return self._kept(unit, self.worker.time(job)) if verified.ok else verified

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
        outcomes = self.worker.final([job for job in jobs.values() if isinstance(job, RunJob)])
        for id, outcome in outcomes.items():
            self._kept(timed[id].unit, outcome)
        outcomes |= {id: job for id, job in jobs.items() if isinstance(job, Outcome)}
        failed = {id: outcome for id, outcome in outcomes.items() if not outcome.ok}
        decision = choose(
            {id: outcome.samples_us for id, outcome in outcomes.items() if outcome.ok},
            incumbent=incumbent,
            default=default,
            cheaper={id: cheapness(timed[id].compiled) for id in racing},
        )
        if decision.winner is None:
            reasons = {id: outcome.reason for id, outcome in outcomes.items()} | dict(decision.excluded)
            words = "; ".join(f"{timed[id].unit.variant}: {reason}" for id, reason in reasons.items())
            return None, f"no finalist could be measured: {words}", failed
        winner = self._winner(decision, decision.winner, timed, outcomes)
        self.store.put_winner(winner)
        return winner, "", failed

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
        self, decision: Decision, id: str, timed: Mapping[str, Timed], outcomes: Mapping[str, Outcome]
    ) -> Winner:
        unit, standing = timed[id].unit, decision.standings[id]
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
            method=decision.method,
            tied=decision.tied,
            library=str(timed[id].compiled.facts.get("library", "")),
        )


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
