"""What a simulation found out, as values: for reports, JSON and whoever asks another process for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.model import to_json
from tunekit.simulate.faults import NOT_MODELLED, Fault, FaultKind, Place


@dataclass(frozen=True)
class Refusal:
    """An instruction that the simulator does not model, reached by the kernel."""

    instruction: str
    why: str
    line: int
    text: str
    source: tuple[str, int] | None = None

    def __str__(self) -> str:
        source = "" if self.source is None else f", {self.source[0]}:{self.source[1]}"
        why = "" if self.why == NOT_MODELLED else f": {self.why}"
        return f"{NOT_MODELLED}: {self.instruction} at PTX line {self.line}{source}{why} ({self.text})"

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Refusal:
        source = payload["source"]
        return cls(**{**payload, "source": tuple(source) if source else None})


@dataclass(frozen=True)
class Launched:
    """One kernel launch, and how much of it was simulated. `ctas` of `grid`'s were."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    ctas: int

    @property
    def total(self) -> int:
        x, y, z = self.grid
        return x * y * z


@dataclass(frozen=True)
class ScheduleResult:
    """One run of everything under one seed.

    state: "done"; "stopped" by a fatal fault; "time limit"; "not modelled". wrong: what is wrong with the results,
    in words, "" if nothing or if nobody looked. changed: where they differ from the first run's in any bit, or "".
    """

    seed: int
    state: str
    instructions: int
    seconds: float
    wrong: str = ""
    changed: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "done" and not self.wrong and not self.changed


@dataclass(frozen=True)
class Report:
    """A whole simulation. Faults are merged over CTAs and schedules: each instruction and kind once, counted."""

    launches: tuple[Launched, ...]
    schedules: tuple[ScheduleResult, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()
    refusal: Refusal | None = None

    @property
    def ok(self) -> bool:
        """Everything ran, without a fault, to results in which nothing was found wrong."""
        return not self.faults and self.refusal is None and all(schedule.ok for schedule in self.schedules)

    @property
    def partial(self) -> bool:
        """Some CTAs were left out."""
        return any(launched.ctas < launched.total for launched in self.launches)

    @property
    def instructions(self) -> int:
        """Warp instructions executed, over all schedules."""
        return sum(schedule.instructions for schedule in self.schedules)

    @property
    def seconds(self) -> float:
        return sum(schedule.seconds for schedule in self.schedules)

    def to_payload(self) -> dict[str, Any]:
        """Plain JSON."""
        payload: dict[str, Any] = to_json(self)
        return {**payload, "ok": self.ok}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Report:
        refusal = payload["refusal"]
        return cls(
            launches=tuple(Launched(**_triples(item)) for item in payload["launches"]),
            schedules=tuple(ScheduleResult(**item) for item in payload["schedules"]),
            faults=tuple(fault_from(item) for item in payload["faults"]),
            notes=tuple(payload["notes"]),
            refusal=Refusal.from_payload(refusal) if refusal else None,
        )


def fault_from(payload: Mapping[str, Any]) -> Fault:
    """The fault that ``to_json`` made `payload` of."""
    place = payload["place"]
    source = place["source"]
    return Fault(
        FaultKind(payload["kind"]),
        payload["message"],
        Place(tuple(place["cta"]), place["warp"], place["line"], place["text"], tuple(source) if source else None),
        tuple(payload["lanes"]),
        payload["count"],
    )


def _triples(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}
