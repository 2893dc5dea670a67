"""What the simulator finds: faults with their place, collected once each and counted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from tunekit.simulate.ptx.module import Instruction

NOT_MODELLED = "not modelled"
_VECTOR = re.compile(r"\{([^{},]+),(?:[^{},]+,){3,} ?([^{},]+)\}")


class FaultKind(str, Enum):
    """What went wrong, in the words of a report."""

    OUT_OF_BOUNDS = "out of bounds"
    MISALIGNED = "misaligned address"
    UNINITIALISED = "uninitialised read"
    UNDEFINED_REGISTER = "undefined register"
    EARLY_REGISTER = "register used before its operation is complete"
    RACE = "data race"
    MISSING_PROXY_FENCE = "missing proxy fence"
    MISSING_TENSOR_FENCE = "missing tcgen05 fence"
    MISSING_WGMMA_FENCE = "missing wgmma fence"
    DEADLOCK = "deadlock"
    LIVELOCK = "livelock"
    DIVERGENCE = "divergence"
    BARRIER = "barrier misuse"
    MBARRIER = "mbarrier misuse"
    TRANSACTIONS = "transaction count"
    TMEM_ALLOCATION = "tmem allocation"
    TMEM_LEAK = "tmem not freed"
    TMEM_ACCESS = "tmem access"
    DESCRIPTOR = "descriptor"
    TENSOR_MAP = "tensor map"
    UNFINISHED = "work unfinished at exit"
    ILLEGAL = "illegal operation"
    ASSERTION = "device assertion"
    TRAP = "trap"


@dataclass(frozen=True)
class Place:
    """Where: the CTA (x, y, z), the warp, and the instruction with its line of PTX and, where known, of the source."""

    cta: tuple[int, int, int]
    warp: int | None
    line: int | None
    text: str
    source: tuple[str, int] | None = None

    def __str__(self) -> str:
        parts = [f"cta {self.cta}"]
        if self.warp is not None:
            parts.append(f"warp {self.warp}")
        if self.line is not None:
            parts.append(f"PTX line {self.line}: {abridged(self.text)}")
        if self.source is not None:
            parts.append(f"{self.source[0]}:{self.source[1]}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Fault:
    """One fault: its first instance in full, and how often the same kind was seen at the same instruction."""

    kind: FaultKind
    message: str
    place: Place
    lanes: tuple[int, ...] = ()
    count: int = 1


def abridged(text: str) -> str:
    """An instruction's text with the middle of its long vectors left out: ``{%r1, ..., %r32}``."""
    return _VECTOR.sub(r"{\1, ..., \2}", text)


class Stop(Exception):
    """Ends the simulation of this cluster; the fault that caused it is already collected."""


class Unsupported(Exception):
    """An instruction, or a form of one, that is not modelled: refused, never guessed."""

    def __init__(self, instruction: Instruction, why: str = NOT_MODELLED) -> None:
        super().__init__(f"{instruction.dotted}: {why} (PTX line {instruction.line}: {abridged(instruction.text)})")
        self.instruction = instruction
        self.why = why


class Faults:
    """Collects faults; one entry for each kind and instruction."""

    def __init__(self) -> None:
        self._found: dict[tuple[FaultKind, int | None], Fault] = {}
        self.notes: list[str] = []

    def add(self, kind: FaultKind, message: str, place: Place, lanes: tuple[int, ...] = (), count: int = 1) -> None:
        key = (kind, place.line)
        seen = self._found.get(key)
        if seen is None:
            self._found[key] = Fault(kind, message, place, lanes, count)
        else:
            self._found[key] = Fault(seen.kind, seen.message, seen.place, seen.lanes, seen.count + count)

    def merge(self, other: Faults) -> None:
        for fault in other.all():
            self.add(fault.kind, fault.message, fault.place, fault.lanes, fault.count)
        self.notes.extend(note for note in other.notes if note not in self.notes)

    def all(self) -> tuple[Fault, ...]:
        return tuple(self._found.values())

    def __len__(self) -> int:
        return len(self._found)
