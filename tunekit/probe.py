"""The probe: three readings of one kernel's footprint, and whether they agree.

*Declared* is the spec's arithmetic, *traced* what the IR allocates, *compiled* what
the machine code uses. A reading that doesn't know a field leaves it None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunekit.model import Footprint

# The fact of a compile whose readings don't agree: where they part.
DISAGREEMENT = "footprint_disagreement"

LABELS = {
    "smem_bytes": "smem",
    "tmem_columns": "tmem",
    "threads": "threads",
    "cluster": "cluster",
    "registers": "registers",
    "spill_bytes": "spills",
    "local_bytes": "local memory",
}


@dataclass(frozen=True)
class Probe:
    """The readings of one kernel."""

    declared: Footprint = field(default_factory=Footprint)
    traced: Footprint = field(default_factory=Footprint)
    compiled: Footprint = field(default_factory=Footprint)

    @classmethod
    def of_report(cls, report: Mapping[str, Any], declared: Footprint | None = None) -> Probe:
        """From what a compile process returned (see tunekit.backends.entry)."""
        return cls(declared or Footprint(), Footprint(**report["traced"]), Footprint(**report["compiled"]))

    def readings(self) -> dict[str, Footprint]:
        """By name, the cheapest first."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def disagreements(self) -> list[str]:
        """A sentence for each field that two readings know differently."""
        return [
            f"{LABELS[name]}: " + ", ".join(f"{reading} {value}" for reading, value in values.items())
            for name, values in self._fields()
            if len(set(values.values())) > 1
        ]

    @property
    def agrees(self) -> bool:
        return not self.disagreements()

    def footprint(self) -> Footprint:
        """The best that is known of each field: compiled before traced before declared."""
        return Footprint(**{name: next(reversed(values.values())) for name, values in self._fields() if values})

    def _fields(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Each field with the readings that know it."""
        for f in dataclasses.fields(Footprint):
            values = {name: getattr(reading, f.name) for name, reading in self.readings().items()}
            yield f.name, {name: value for name, value in values.items() if value is not None}
