"""What a sweep says while it runs, and what it hands back: plain values for reports and the command line.

These sit below both the pipeline (which makes them) and the reports (which
draw them), so that neither imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tunekit.model import Footprint, Values, Variant, Winner
from tunekit.trials import Outcome, Stage

Running = tuple[str, str, float]
"""What is under way now: its label, its phase, and for how many seconds."""


@dataclass(frozen=True)
class SweepEvent:
    """One thing that happened in a sweep.

    `kind`: ``phase`` (a stage begins; `text` names it), ``expanded`` (`text` is the
    expansion's line), ``started`` and ``finished`` (one variant at one stage; `outcome`
    on ``finished``, which comes alone for what was known before it began: over budget
    as declared, cached, failed in the final), ``note`` (a sentence for the user), ``winner``, and
    ``phase`` with an empty `text` as a mere tick that renews `running`. `done` of
    `total` count the variants of the current stage.
    """

    kind: Literal["phase", "expanded", "started", "finished", "note", "winner"]
    variant: Variant | None = None
    outcome: Outcome | None = None
    text: str = ""
    done: int = 0
    total: int = 0
    running: tuple[Running, ...] = ()


@dataclass(frozen=True)
class Row:
    """How one variant fared in one sweep: its outcome by stage, and the last word.

    `status` is the first failure's, else that of the last stage done; `compile_s`
    is wall time and None where nothing was compiled now or before; `median_us` is
    microseconds a call, None where nothing was measured.
    """

    variant: Variant
    footprint: Footprint
    outcomes: Mapping[Stage, Outcome]
    status: str
    reason: str = ""
    compile_s: float | None = None
    median_us: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class ProblemReport:
    """A sweep's result for one problem; `expansion` is the expansion's one line."""

    problem: Values
    expansion: str
    rows: tuple[Row, ...]
    winner: Winner | None = None
    why_no_winner: str = ""


@dataclass(frozen=True)
class SweepReport:
    """A whole sweep. `state` is ``interrupted`` after Ctrl-C or SIGTERM: what is there is kept."""

    spec: str
    arch: str
    problems: tuple[ProblemReport, ...]
    state: Literal["done", "interrupted"] = "done"
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Agreement:
    """What several sweeps from empty, each with a winner or none, say of one problem together.

    `verdict`: ``agree`` (one winner); ``within ties`` (where two differ, one of the two runs found both
    in one tie); ``undecided`` (the same, with a run that ended undecided between them); ``disagree``;
    or ``no winner`` (of some run). `why` says it in a sentence.
    """

    problem: Values
    winners: tuple[Winner | None, ...]
    verdict: Literal["agree", "within ties", "undecided", "disagree", "no winner"]
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict not in ("disagree", "no winner")


@dataclass(frozen=True)
class AuditReport:
    """Several sweeps of the same from empty: their reports, the databases that keep them, and how far they agree."""

    spec: str
    arch: str
    runs: tuple[SweepReport, ...]
    databases: tuple[str, ...]
    agreements: tuple[Agreement, ...]
