"""What the measuring worker is asked: one compiled variant and one problem, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.errors import UserError
from tunekit.measure.statistics import usable
from tunekit.model import Footprint, Values, Variant, to_json
from tunekit.spec import Implementation
from tunekit.trials import Outcome, Stage, Status

# The fact of a failed outcome that memory ran out: how much was free is not the variant's doing.
OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class RunJob:
    """One variant to run on one problem.

    `spec` is what ``load_spec`` takes (an absolute path for files), `problem` is
    complete, `so` the artifact's path (of a library: its entry's) and `symbol` its exported function.
    """

    spec: str
    problem: Values
    variant: Variant
    so: str
    symbol: str

    def to_payload(self) -> dict[str, Any]:
        """Plain JSON."""
        payload: dict[str, Any] = to_json(self)
        return payload

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> RunJob:
        fields = payload["variant"]
        variant = Variant(**{**fields, "tunables": Values(fields["tunables"])})
        return cls(payload["spec"], Values(payload["problem"]), variant, payload["so"], payload["symbol"])

    def __str__(self) -> str:
        return f"{self.variant} [{self.variant.id}] on {self.problem}"


def first_phase(implementation: Implementation) -> str:
    """The phase of a first call: a library may compile then, which is not the time of its kernel."""
    return "first" if implementation.is_library else "run"


def outcome_from_payload(payload: Mapping[str, Any]) -> Outcome:
    """The outcome that ``to_json`` made `payload` of; a sample that is no time makes it a failure."""
    fields = {
        **payload,
        "stage": Stage(payload["stage"]),
        "status": Status(payload["status"]),
        "seconds": Values(payload["seconds"]),
        "facts": Values(payload["facts"]),
        "footprint": Footprint(**payload["footprint"]),
        "samples_us": tuple(payload["samples_us"]),
        "windows": tuple(Values(window) for window in payload["windows"]),
    }
    bad = [sample for sample in fields["samples_us"] if not usable(sample)]
    if bad:
        reason = f"{len(bad)} of {len(fields['samples_us'])} samples are no times (first: {bad[0]!r})"
        fields.update(status=Status.LAUNCH_ERROR, reason=reason, samples_us=())
    return Outcome(**fields)


def positive_int(name: str, value: object, *, least: int = 1) -> int:
    """`value` as a count of at least `least`.

    Raises:
        UserError: it is no int, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} is {value!r}; it must be an int from {least}")
    return value
