"""What a simulation is asked and what it answers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.model import Values, Variant, to_json
from tunekit.simulate.report import Report
from tunekit.trials import Outcome, Stage, Status


@dataclass(frozen=True)
class SimulationJob:
    """One compiled variant to simulate on one problem.

    `spec` is what ``load_spec`` takes (an absolute path for files), `problem` is complete; `so` and `ptx` are the
    artifact's paths, `symbol` its exported function. `schedules` runs under the seeds from `seed` on, which also
    draws the inputs. `ctas`: as in run.selected. `jobs`: processes, None for as many as there are cores. `strict`: see
    run.simulate.
    """

    spec: str
    problem: Values
    variant: Variant
    so: str
    ptx: str
    symbol: str
    schedules: int = 1
    seed: int = 0
    ctas: str = "all"
    jobs: int | None = None
    time_limit_s: float | None = None
    strict: bool = False

    def to_payload(self) -> dict[str, Any]:
        """Plain JSON."""
        payload: dict[str, Any] = to_json(self)
        return payload

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> SimulationJob:
        variant = payload["variant"]
        return cls(
            **{
                **payload,
                "problem": Values(payload["problem"]),
                "variant": Variant(**{**variant, "tunables": Values(variant["tunables"])}),
            }
        )


@dataclass(frozen=True)
class Simulation:
    """The answer: a report; or, without one, `status` and `failure` say why nothing ran, or how it was cut short.

    `figures` are the worst over all schedules' results (see oracle.judge.Figures).
    """

    report: Report | None
    figures: Values = Values()
    status: Status = Status.OK
    failure: str = ""
    seconds: Values = Values()

    def outcome(self) -> Outcome:
        """As an outcome of the stage "simulate": never one of verifying or measuring on a device."""
        status, reason = self._verdict()
        facts = self.figures
        if self.report is not None:
            counts = {
                "simulated": True,
                "instructions": self.report.instructions,
                "schedules": len(self.report.schedules),
                "ctas": sum(launched.ctas for launched in self.report.launches),
                "ctas_total": sum(launched.total for launched in self.report.launches),
            }
            facts = facts.merged(counts)
        return Outcome(Stage.SIMULATE, status, reason, seconds=self.seconds, facts=facts)

    def _verdict(self) -> tuple[Status, str]:
        report = self.report
        if report is None:
            return self.status, self.failure
        if report.faults:
            first, more = report.faults[0], len(report.faults) - 1
            also = f" (and {more} more)" if more else ""
            return Status.DEVICE_FAULT, f"{first.kind.value}: {first.message} [{first.place}]{also}"
        if report.refusal is not None:
            return Status.NOT_MODELLED, str(report.refusal)
        for schedule in report.schedules:
            if schedule.state == "time limit":
                return Status.RUN_TIMEOUT, f"the simulation's time limit passed, under seed {schedule.seed}"
            if schedule.wrong:
                return Status.WRONG_RESULT, f"{schedule.wrong} [schedule seed={schedule.seed}]"
            if schedule.changed:
                return Status.NOT_DETERMINISTIC, f"{schedule.changed} [schedule seed={schedule.seed}]"
        return Status.OK, ""

    def to_payload(self) -> dict[str, Any]:
        """Plain JSON."""
        report = self.report.to_payload() if self.report is not None else None
        return {
            "report": report,
            "figures": dict(self.figures),
            "status": self.status.value,
            "failure": self.failure,
            "seconds": dict(self.seconds),
        }

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Simulation:
        report = payload["report"]
        return cls(
            Report.from_payload(report) if report is not None else None,
            Values(payload["figures"]),
            Status(payload["status"]),
            payload["failure"],
            Values(payload["seconds"]),
        )
