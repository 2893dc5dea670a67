"""A variant's time before it is measured, from what its spec declares: a sum of terms, each the time of one resource.

The terms are physics, the microseconds that a unit of each costs are fitted (see cost_fit) on recorded trials of
one spec and architecture. The sum orders variants; it is no measurement, and stands beside none. Nothing here is
about any one kernel: a spec declares what its launches do (`Implementation.work`), its footprint and its cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.arch import ARCHES
from tunekit.model import Cost, Footprint, Values, Variant, to_json
from tunekit.space import declared_footprint, declared_work
from tunekit.spec import KernelSpec, Work

REGISTER_UNIT = 8  # registers a thread are allocated by
SMEM_RESERVED_BYTES = 1024  # by the system, per resident CTA
# A model whose ranks agree less than that with those of problems that it was not fitted on, at the median, orders
# nothing.
LEAST_RANK_CORRELATION = 0.5


@dataclass(frozen=True)
class Machine:
    """The GPU that the trials are of: its SMs, and what one SM holds."""

    gpu: str
    sms: int
    smem_bytes: int
    threads: int
    registers: int


@dataclass(frozen=True)
class Launch:
    """What is known of a variant without running it. `footprint` is the declared one, or the compiled one."""

    cost: Cost | None
    work: Work
    footprint: Footprint


def resident(launch: Launch, machine: Machine) -> int:
    """How many of its CTAs an SM holds at once, as far as is known; one at least."""
    work, footprint = launch.work, launch.footprint
    most = [work.ctas_per_sm] if work.ctas_per_sm is not None else []
    if footprint.smem_bytes is not None:
        most.append(machine.smem_bytes // (footprint.smem_bytes + SMEM_RESERVED_BYTES))
    if footprint.threads:
        most.append(machine.threads // footprint.threads)
        if footprint.registers:
            each = -(-footprint.registers // REGISTER_UNIT) * REGISTER_UNIT
            most.append(machine.registers // (each * footprint.threads))
    return max(1, min(most, default=1))


def terms(launch: Launch, machine: Machine) -> dict[str, float]:
    """What each resource has to do, in the order in which the coefficients are kept.

    `launch`, `merge`: the first launch, and further ones; `arithmetic`: MFLOP of the busiest SM; `memory`: MB that the
    problem can't do without; `traffic`: MB that the CTAs move; `step`, `latency`, `cta`, `cluster`: of the CTAs that
    follow each other on an SM, the steps, the steps over the stages in flight, the CTAs themselves, and those
    times log2 of the cluster; `edge`: MB that the busiest SM moves outside the steps.
    """
    work = launch.work
    busiest = -(-work.ctas // machine.sms)
    waves = -(-work.ctas // (machine.sms * resident(launch, machine)))
    return {
        "launch": 1.0,
        "merge": work.launches - 1.0,
        "arithmetic": busiest * work.flops / 1e6,
        "memory": (launch.cost.bytes if launch.cost else 0.0) / 1e6,
        "traffic": work.ctas * (work.step_bytes + work.edge_bytes) / 1e6,
        "step": waves * work.steps,
        "latency": waves * work.steps / work.stages,
        "cta": float(waves),
        "cluster": waves * math.log2(launch.footprint.cluster or 1),
        "edge": busiest * work.edge_bytes / 1e6,
    }


@dataclass(frozen=True)
class Ranking:
    """How the predicted order of a problem's variants held on problems that the fit had not seen.

    Over `problems` problems with at least `least_trials` trials each: Spearman's rank correlation, and by the first k
    the best time among the k predicted fastest over the best time measured; (median, worst) each.
    """

    least_trials: int
    problems: int
    spearman: tuple[float, float]
    regret: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class CostModel:
    """Fitted coefficients (microseconds a unit of each term), their error, and where they come from.

    `error` is the root mean square of log(predicted / measured), `rankings` the order's error, both on held-out
    problems; `fitted` is plain provenance: versions, trials, command.
    """

    spec: str
    version: int
    arch: str
    machine: Machine
    coefficients: Mapping[str, float]
    error: float
    rankings: tuple[Ranking, ...]
    trials: int
    fitted: Mapping[str, Any]

    def predict_us(self, launch: Launch) -> float:
        """Microseconds a call."""
        found = terms(launch, self.machine)
        return sum(each * found[name] for name, each in self.coefficients.items())

    @property
    def usable(self) -> bool:
        """Whether its order is worth following."""
        return bool(self.rankings) and all(each.spearman[0] >= LEAST_RANK_CORRELATION for each in self.rankings)

    def words(self) -> str:
        """Where it comes from and how far it is off, on one line."""
        made = f"fitted on {self.trials} trials of an {self.machine.gpu}"
        if not self.rankings:
            return made
        whole = self.rankings[0]
        first = sorted(whole.regret)[len(whole.regret) // 2]
        over = 100 * (whole.regret[first][1] - 1)
        return (
            f"{made}; on {whole.problems} held-out problems Spearman {whole.spearman[0]:.2f} (worst "
            f"{whole.spearman[1]:.2f}), the best of its first {first} at most {over:.1f} % over the best"
        )

    def to_json(self) -> dict[str, Any]:
        """The form that ships."""
        raw: dict[str, Any] = to_json(self)
        return raw


def parse_cost_model(raw: Any) -> CostModel:
    """A model from the form that ships.

    Raises:
        ValueError: it is none; the sentence says why.
    """
    try:
        model = CostModel(
            spec=str(raw["spec"]),
            version=int(raw["version"]),
            arch=str(raw["arch"]),
            machine=Machine(**raw["machine"]),
            coefficients={str(name): float(value) for name, value in raw["coefficients"].items()},
            error=float(raw["error"]),
            rankings=tuple(_ranking(each) for each in raw["rankings"]),
            trials=int(raw["trials"]),
            fitted=dict(raw["fitted"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no cost model: {type(error).__name__} {error}") from None
    bad = [name for name, value in model.coefficients.items() if not (math.isfinite(value) and value >= 0)]
    unknown = sorted(set(model.coefficients) - set(TERMS))
    if bad or unknown or not sum(model.coefficients.values()) > 0:
        raise ValueError(f"no cost model: its coefficients are {dict(model.coefficients)}")
    return model


def _ranking(raw: Mapping[str, Any]) -> Ranking:
    low, high = raw["spearman"]
    regret = {int(k): (float(median), float(worst)) for k, (median, worst) in raw["regret"].items()}
    if not regret:
        raise KeyError("regret")
    return Ranking(int(raw["least_trials"]), int(raw["problems"]), (float(low), float(high)), regret)


def launch_of(spec: KernelSpec, problem: Values, variant: Variant, compiled: Footprint | None = None) -> Launch | None:
    """What is known of a variant's launch; None where its implementation doesn't declare its work.

    What a compile found out (`compiled`: registers, shared memory) comes before what is declared.

    Raises:
        SpecError: one of the spec's functions fails.
    """
    implementation, arch = spec.implementation(variant.implementation), ARCHES[variant.arch]
    work = declared_work(implementation, arch, problem, variant.tunables)
    if work is None:
        return None
    declared = declared_footprint(implementation, arch, problem, variant.tunables)
    if compiled is not None:
        names = Footprint.__dataclass_fields__
        known = {name: getattr(compiled, name) for name in names if getattr(compiled, name) is not None}
        declared = Footprint(**{**{name: getattr(declared, name) for name in names}, **known})
    return Launch(spec.cost(problem) if spec.cost else None, work, declared)


_NOTHING = Launch(None, Work(1, 0, 1, 0, 0, 0), Footprint())
TERMS: tuple[str, ...] = tuple(terms(_NOTHING, Machine("", 1, 1, 1, 1)))
