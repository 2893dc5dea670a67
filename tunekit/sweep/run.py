"""A sweep: every problem in turn, every outcome stored as it comes.

Whatever ends a sweep loses at most the variant in flight; another one goes on from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunekit.errors import UserError
from tunekit.model import Value, Values
from tunekit.progress import ProblemReport, SweepEvent, SweepReport
from tunekit.search import Budget, choose_strategy, parse_budget
from tunekit.settings import Settings
from tunekit.spec import KernelSpec, absolute_reference, load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.sweep.options import SweepOptions, Target, check_named, choose_target, complete_problems
from tunekit.sweep.problem import Candidates, ProblemRun, candidates_of
from tunekit.sweep.shared import shared


@dataclass(frozen=True)
class Asked:
    """A request without a mistake, and what follows from it."""

    spec: KernelSpec
    target: Target
    budget: Budget
    candidates: Mapping[Values, Candidates]


def checked(
    reference: str, problems: Sequence[Mapping[str, Value]], options: SweepOptions, settings: Settings
) -> Asked:
    """What a sweep is asked, checked whole; nothing is written.

    Raises:
        UserError: a mistake in it.
    """
    spec = load_spec(reference)
    target = choose_target(spec, options)
    wanted = complete_problems(spec, problems)
    options.rules()
    budget = parse_budget(options.budget)
    choose_strategy(options.search, 0, budget)
    candidates = {problem: candidates_of(spec, target, problem, options) for problem in wanted}
    check_named([found.expansion for found in candidates.values()], options.variants)
    unwritable = ArtifactStore(settings.artifacts).unwritable()
    if unwritable:
        raise UserError(f"a sweep keeps its artifacts, and can't: {unwritable}; set TUNEKIT_CACHE to another directory")
    return Asked(spec, target, budget, candidates)


def sweep(
    reference: str,
    problems: Sequence[Mapping[str, Value]],
    options: SweepOptions,
    settings: Settings,
    on_event: Callable[[SweepEvent], None],
) -> SweepReport:
    """Tune a spec for `problems` (its examples where none is given) and record what came of it.

    Ctrl-C ends it early with state ``interrupted``; what was recorded stays.

    Raises:
        UserError: a mistake in the request, found before anything runs.
    """
    asked = checked(reference, problems, options, settings)
    spec, target = asked.spec, asked.target
    reports: list[ProblemReport] = []
    notes: list[str] = [target.why] if target.why else []
    state: Literal["done", "interrupted", "failed"] = "failed"
    with Store.open(settings.database) as store:
        arguments = {"problems": [dict(p) for p in asked.candidates], **dataclasses.asdict(options)}
        number = store.start_sweep(spec.name, spec.version, target.arch.name, arguments)
        try:
            with shared(
                spec, absolute_reference(reference), target, options, settings, store, number, on_event
            ) as means:
                for problem, candidates in asked.candidates.items():
                    one = ProblemRun(means, problem, candidates, asked.budget)
                    try:
                        one.go()
                    finally:
                        reports.append(one.report())
                        notes += one.notes
            state = "done"
        except KeyboardInterrupt:
            state = "interrupted"
        finally:
            store.finish_sweep(number, state)
    return SweepReport(
        spec.name,
        target.arch.name,
        tuple(reports),
        "done" if state == "done" else "interrupted",
        tuple(dict.fromkeys(notes)),
    )
