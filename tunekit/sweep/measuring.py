"""From compiled variants to a winner: verify, time, race in the final, choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tunekit.compiling import Unit
from tunekit.measure import FINAL_PROTOCOL, Decision, MeasuringWorker, RunJob, choose
from tunekit.model import Outcome, Stage, Status, Trial, Values, Variant, Winner
from tunekit.spec import KernelSpec
from tunekit.store import ArtifactStore, Store
from tunekit.sweep.options import Target

FINALISTS = 4
# A variant that the search timed at over this many times the leader can't win the final.
FINAL_MARGIN = 1.15


@dataclass
class Measurer:
    """Verifies and times one spec's variants on one device, and keeps every outcome.

    `earlier` maps (compile key, stage) to an outcome that an interrupted or former
    sweep recorded for this problem, environment and protocol.
    """

    spec: KernelSpec
    problem: Values
    target: Target
    worker: MeasuringWorker
    artifacts: ArtifactStore
    store: Store
    sweep: int
    earlier: Mapping[tuple[str, Stage], Outcome] = field(default_factory=dict)

    def job(self, unit: Unit, compiled: Outcome) -> RunJob:
        artifact = self.artifacts.get(unit.key)
        if artifact is None:
            raise LookupError(f"{unit.variant} was compiled, but its artifact is gone from {self.artifacts.root}")
        so = str(self.artifacts.path(artifact))
        return RunJob(unit.reference, self.problem, unit.variant, so, artifact.symbol)

    def check(self, unit: Unit, compiled: Outcome) -> Outcome:
        """Verify a variant and, if it is right, time it; the last outcome."""
        known = self.earlier.get((unit.key, Stage.MEASURE)) or self.earlier.get((unit.key, Stage.VERIFY))
        if known is not None and (known.stage is Stage.MEASURE or not known.ok):
            return known
        job = self.job(unit, compiled)
        verified = self._kept(unit, self.worker.verify(job))
        return self._kept(unit, self.worker.time(job)) if verified.ok else verified

    def _kept(self, unit: Unit, outcome: Outcome, protocol: str | None = None) -> Outcome:
        trial = Trial(
            unit.variant,
            self.problem,
            unit.key,
            outcome,
            self.target.environment,
            protocol=protocol or self.worker.protocol(outcome.stage),
            sweep=self.sweep,
        )
        self.store.record(trial)
        return outcome

    def final(
        self,
        timed: Mapping[str, tuple[Unit, Outcome, Outcome]],
        incumbent: str | None,
        default: str | None,
        note: Callable[[str], None],
    ) -> tuple[Winner | None, str]:
        """Race the fastest variants, with the incumbent and the default, and record the winner.

        `timed` maps variant ids to (unit, compiled, measured). Returns the winner, or
        None and why there is none.
        """
        finalists = finalists_of({id: m.samples_us for id, (_, _, m) in timed.items()}, [incumbent, default])
        if not finalists:
            return None, "no variant was both right and measured"
        jobs = [self.job(timed[id][0], timed[id][1]) for id in finalists]
        note(f"final: {len(jobs)} variants")
        outcomes = self.worker.final(jobs)
        for id, outcome in outcomes.items():
            self._kept(timed[id][0], outcome, FINAL_PROTOCOL)
        raced = {id: outcome.samples_us for id, outcome in outcomes.items() if outcome.ok and outcome.samples_us}
        if not raced:
            reasons = "; ".join(f"{timed[id][0].variant}: {o.reason}" for id, o in outcomes.items())
            return None, f"no finalist could be measured: {reasons}"
        cheaper = {id: cheapness(timed[id][1]) for id in raced}
        decision = choose(raced, incumbent=incumbent, default=default, cheaper=cheaper)
        winner = self._winner(decision, timed)
        self.store.put_winner(winner)
        return winner, ""

    def _winner(self, decision: Decision, timed: Mapping[str, tuple[Unit, Outcome, Outcome]]) -> Winner:
        unit, compiled, _ = timed[decision.winner]
        artifact = self.artifacts.get(unit.key)
        standing = decision.standings[decision.winner]
        return Winner(
            variant=unit.variant,
            problem=self.problem,
            bucket=self.spec.bucket(self.problem),
            environment=self.target.environment,
            protocol=self.worker.protocol(Stage.MEASURE, final=True),
            artifact=unit.key,
            symbol=artifact.symbol if artifact else unit.symbol,
            median_us=standing.median_us,
            spread_us=standing.spread_us,
            samples=standing.samples,
            runner_up=decision.runner_up,
            margin=decision.margin,
            method=decision.method,
            tied=decision.tied,
        )


def finalists_of(samples: Mapping[str, Sequence[float]], always: Iterable[str | None]) -> list[str]:
    """The variants that race: the fastest few in the search, and those that always do."""
    medians = {id: sorted(times)[len(times) // 2] for id, times in samples.items() if times}
    if not medians:
        return []
    ranked = sorted(medians, key=lambda id: medians[id])
    close = [id for id in ranked[:FINALISTS] if medians[id] <= FINAL_MARGIN * medians[ranked[0]]]
    return close + [id for id in dict.fromkeys(always) if id is not None and id in medians and id not in close]


def cheapness(compiled: Outcome) -> tuple[float, ...]:
    """What decides a tie, least first: registers, shared memory, seconds of compiling."""
    footprint = compiled.footprint
    seconds = sum(float(s) for s in compiled.seconds.values())
    return (float(footprint.registers or 0), float(footprint.smem_bytes or 0), seconds)


def incumbent_of(
    store: Store, spec: KernelSpec, problem: Values, target: Target, protocol: str
) -> tuple[Winner | None, list[Variant]]:
    """The winner measured here for the problem's bucket, and the seeds: winners of other environments."""
    incumbent: Winner | None = None
    seeds: list[Variant] = []
    bucket = spec.bucket(problem)
    for winner in store.winners(spec.name, target.arch.name):
        if winner.bucket != bucket or winner.variant.version != spec.version:
            continue
        if store.standing(winner, target.environment, protocol).here:
            incumbent = winner
        else:
            seeds.append(winner.variant)
    return incumbent, seeds


def failed(status: Status) -> bool:
    return status is not Status.OK
