"""Where no GPU can run the kernels: compiled variants are simulated, so that wrong ones are known before one can.

What comes of it is recorded at the stage "simulate". It is no measurement: no winner is made from it, and a sweep on a
GPU verifies again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunekit.compiling import Unit
from tunekit.errors import TunekitError, UserError
from tunekit.model import Values
from tunekit.simulate.client import Simulator
from tunekit.simulate.job import SimulationJob
from tunekit.spec import KernelSpec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.sweep.options import Target
from tunekit.trials import Outcome, Stage, Status, Trial

# A sweep has many variants: of each a few CTAs, the grid's first and last among them, and no longer than this.
CTAS = "sample"
LIMIT_S = 120.0
# What says something about the simulator, or about the time it was given, and nothing about the variant.
UNDECIDED = frozenset({Status.NOT_MODELLED, Status.RUN_TIMEOUT})


@dataclass(frozen=True)
class SimulatingVerifier:
    """Simulates one spec's variants for one problem, and keeps every outcome."""

    spec: KernelSpec
    problem: Values
    target: Target
    simulator: Simulator
    artifacts: ArtifactStore
    store: Store
    sweep: int
    jobs: int | None
    seed: int
    resume: bool

    def earlier(self) -> dict[str, Outcome]:
        """What former sweeps with this version of tunekit simulated for this problem, by compile key."""
        if not self.resume:
            return {}
        trials = self.store.trials(
            spec=self.spec.name, arch=self.target.arch.name, problem=self.problem, stage=Stage.SIMULATE
        )
        mine = self.target.environment.tunekit
        return {
            trial.compile_key: trial.outcome
            for trial in trials
            if trial.environment.tunekit == mine and trial.outcome.status not in UNDECIDED
        }

    def check(self, unit: Unit) -> Outcome:
        """Simulate a variant under one schedule and compare what it wrote with the oracle."""
        artifact = self.artifacts.get(unit.key)
        if artifact is None:
            reason = f"it was compiled, but its artifact is gone from {self.artifacts.root}; sweep again"
            return Outcome(Stage.SIMULATE, Status.LAUNCH_ERROR, reason)
        if artifact.role == "library":
            reason = f"it is a library's function ({artifact.facts['library']}): there is no PTX to simulate"
            return Outcome(Stage.SIMULATE, Status.NOT_MODELLED, reason)
        if "ptx" not in artifact.files:
            return Outcome(Stage.SIMULATE, Status.NOT_MODELLED, "its artifact holds no PTX")
        job = SimulationJob(
            unit.reference,
            self.problem,
            unit.variant,
            str(self.artifacts.path(artifact)),
            str(self.artifacts.path(artifact, "ptx")),
            artifact.symbol,
            seed=self.seed,
            ctas=CTAS,
            jobs=self.jobs,
            time_limit_s=LIMIT_S,
        )
        try:
            outcome = self.simulator.simulate(job).outcome()
        except UserError:
            raise
        except TunekitError as error:  # the simulator's own failure says nothing about the variant
            outcome = Outcome(Stage.SIMULATE, Status.NOT_MODELLED, str(error))
        self.store.record(
            Trial(unit.variant, self.problem, unit.key, outcome, self.target.environment, sweep=self.sweep)
        )
        return outcome
