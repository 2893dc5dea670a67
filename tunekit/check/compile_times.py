"""``check_compile_times``: compile the chosen kernels cold, and say which are too slow or broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.check.base import Base, in_base
from tunekit.check.baseline import Baseline, read_baseline, write_baseline
from tunekit.check.rounds import CompileOnce, Samples, isolated_compiles, take_once, take_rounds
from tunekit.check.targets import Selection, Target, Which, reference_target, select, vanished
from tunekit.check.verdict import Entry, Row, Rule, Verdict, fastest, judge
from tunekit.errors import UserError
from tunekit.model import Value
from tunekit.settings import (
    DEFAULT_COMPILE_LIMIT_S,
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_TRACE_LIMIT_S,
    Settings,
    load_settings,
)
from tunekit.settings import (
    limit_s as limit_that_holds,
)
from tunekit.spec import KernelSpec, absolute_reference, load_spec

MAX_RATIO = 1.5
FLOOR_S = 0.5
ROUNDS = 3
"""Where times are compared. Against a limit alone one is enough."""
BASELINE_ROUNDS = 3
"""A baseline takes this many times the rounds: every later check is compared with it."""
SUSPECT_PASSES = 3
"""How often a suspect gets the rounds again. Simulated 2026-11-29 (12 kernels, load wandering up to 40 %, bursts of
1.5-3x on 10 % of the compiles): no false alarm in 800 runs, 3 of 1,600 doubled compile times missed."""


@dataclass(frozen=True)
class CheckReport:
    """The check's result. `reference_s` is the fastest reference compile, by its name."""

    rows: tuple[Row, ...]
    rounds: int
    limit_s: Mapping[str, float]
    max_ratio: float
    floor_s: float
    reference_s: Mapping[str, float | None]
    toolchain: Mapping[str, str | None]
    baseline: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.verdict.passes)

    @property
    def exit_code(self) -> int:
        """0: every kernel passes; 1: at least one fails. (A usage error raises UserError: 2.)"""
        return 1 if self.failures else 0


def check_compile_times(
    specs: str | Sequence[str],
    arches: str | Sequence[str] | None = None,
    *,
    problems: Sequence[Mapping[str, Value]] | None = None,
    which: Which = "default",
    only: Mapping[str, Value] | None = None,
    limit_s: float | None = None,
    baseline: Path | None = None,
    base: Path | None = None,
    max_ratio: float = MAX_RATIO,
    floor_s: float = FLOOR_S,
    rounds: int | None = None,
    update_baseline: bool = False,
    settings: Settings | None = None,
    compile_once: CompileOnce | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Compile the chosen variants of `specs` cold, `rounds` times, against a limit and a baseline.

    Chosen are, for each of `arches` (default: one an implementation) and `problems`, every
    implementation's default variant, all with `which="all"`, or those with the tunables in `only`.
    `problems` defaults to the spec's examples and the workloads beside it, and with them come the winners
    that ship. `rounds` defaults to 3, or to 1 where there is nothing to compare with; one round is taken
    with as many compiles side by side as the machine bears. `limit_s` is a compile's limit in seconds; it
    defaults to TUNEKIT_COMPILE_TIMEOUT, then the spec's, then 300. A kernel regresses
    when it takes over `max_ratio` times as long as in the `baseline`, or as in the
    checkout `base`, whose kernels are compiled in the same rounds, and `floor_s`
    seconds longer; suspects are compiled again before they are accused. With
    `update_baseline` three times the rounds are taken, and then the file is written.
    `compile_once` replaces the isolated compiler.

    Raises:
        UserError: the request can't be carried out (exit status 2).
    """
    names = [specs] if isinstance(specs, str) else list(specs)
    listed = [arches] if isinstance(arches, str) else arches
    chosen_arches = None if listed is None else [parse_arch(arch).name for arch in listed]
    compared = baseline is not None or base is not None
    if rounds is None:
        rounds = ROUNDS if compared else 1
    _check_numbers(rounds, max_ratio, floor_s)
    rounds *= BASELINE_ROUNDS if update_baseline else 1
    once = rounds == 1 and not compared
    if update_baseline and baseline is None:
        raise UserError("name the baseline file to write (--baseline FILE)")
    if base is not None and baseline is not None:
        raise UserError("compare with a baseline file or with a base checkout, not with both")
    settings = settings or load_settings()
    known = _known(baseline, update_baseline)
    rows: list[Row] = []
    notes: list[str] = []
    limits: dict[str, float] = {}
    references: dict[str, float | None] = {}
    fresh: dict[str, Entry] = {}
    for name in names:
        reference = absolute_reference(name)
        spec = load_spec(reference)
        selection = select(spec, reference, chosen_arches, problems, which, only)
        before = _base(reference, base, chosen_arches, problems, which, only, notes)
        rule = Rule(
            limit_that_holds(limit_s, settings.compile_limit_s, spec.compile_limit_s, DEFAULT_COMPILE_LIMIT_S),
            max_ratio,
            floor_s,
        )
        limits[spec.name] = rule.limit_s
        notes += selection.notes
        source = nullcontext(compile_once) if compile_once else _compiler(selection, settings, rule.limit_s, once)
        if once:
            samples = Samples()
            with source as compiles:
                take_once(selection.targets, compiles, samples, progress, rule.limit_s)
        else:
            samples = _measure(selection.targets, rounds, source, known, before, rule, progress)
        earlier = before.baseline(selection.targets, samples) if base is not None else known
        judged = [_judge(target, samples, earlier, rule) for target in selection.targets]
        rows += judged + _lost(selection) + _not_selected(spec, selection, chosen_arches, known)
        rows += before.gone(spec, selection)
        for target, row in zip(selection.targets, judged, strict=True):
            unit = fastest(samples.reference_of(target))
            references[reference_target(target).name] = unit if unit < float("inf") else None
            if row.relative is not None and row.seconds is not None:
                fresh[row.name] = _entry(target, row.relative, row.seconds)
    toolchain = identity.toolchain()
    if known.toolchain and dict(known.toolchain) != toolchain:
        there, here = _versions(known.toolchain), _versions(toolchain)
        notes.append(f"the baseline was made with another toolchain: {there}; this is {here}")
    if update_baseline and baseline is not None:
        gone = [row.name for row in rows if row.verdict is Verdict.VANISHED]
        write_baseline(baseline, known.updated(fresh, gone, toolchain))
        notes.append(f"wrote {len(fresh)} kernels to {baseline}")
    return CheckReport(
        tuple(rows),
        rounds,
        limits,
        max_ratio,
        floor_s,
        references,
        toolchain,
        str(baseline) if baseline else None,
        tuple(notes),
    )


def _measure(
    targets: Sequence[Target],
    rounds: int,
    source: AbstractContextManager[CompileOnce],
    known: Baseline,
    base: Base,
    rule: Rule,
    progress: Callable[[str], None],
) -> Samples:
    """The rounds, and more of them for what looks regressed: noise only ever makes a compile slower."""
    samples = Samples()
    with source as compile_one:
        take_rounds(targets, rounds, compile_one, samples, progress, base.targets)
        for _ in range(SUSPECT_PASSES):
            compared = base.baseline(targets, samples) if base.targets else known
            suspects = [t for t in targets if _judge(t, samples, compared, rule).verdict is Verdict.REGRESSED]
            take_rounds(suspects, rounds, compile_one, samples, progress, base.targets)
    return samples


def _base(
    reference: str,
    base: Path | None,
    arches: Sequence[str] | None,
    problems: Sequence[Mapping[str, Value]] | None,
    which: Which,
    only: Mapping[str, Value] | None,
    notes: list[str],
) -> Base:
    """The same selection in the base checkout; with a note where the base has no such spec, or none that loads."""
    if base is None:
        return Base()
    there = in_base(reference, base)
    try:
        selection = select(load_spec(there), there, arches, problems, which, only)
    except UserError as error:
        notes.append(f"all kernels of {reference} are new: the base can't be compiled ({error})")
        return Base()
    return Base({target.name: target for target in selection.targets})


def _judge(target: Target, samples: Samples, known: Baseline, rule: Rule) -> Row:
    return judge(target, samples.of(target), samples.reference_of(target), known.kernels, rule)


def _compiler(
    selection: Selection, settings: Settings, limit_s: float, side_by_side: bool
) -> AbstractContextManager[CompileOnce]:
    backends = [target.backend for target in selection.targets]
    trace_s = min(limit_s, limit_that_holds(None, settings.trace_limit_s, None, DEFAULT_TRACE_LIMIT_S))
    memory = settings.memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES
    return isolated_compiles(backends, trace_s, limit_s, memory, settings.jobs if side_by_side else 1)


def _lost(selection: Selection) -> list[Row]:
    """A failing row for each winner that ships and can't be made any more."""
    file = selection.targets[0].file
    words = "ships as a winner, but is no longer in the spec: "
    return [Row(name, Verdict.VANISHED, words + why, file=file) for name, why in selection.lost.items()]


def _not_selected(spec: KernelSpec, selection: Selection, arches: Sequence[str] | None, known: Baseline) -> list[Row]:
    """The baseline's kernels of a spec (on `arches`) that were not compiled: gone from the spec, or not asked for."""
    compiled = {target.name for target in selection.targets}
    rows = []
    for name, entry in known.kernels.items():
        if entry.spec == spec.name and (arches is None or entry.arch in arches) and name not in compiled:
            why = vanished(spec, entry.implementation, entry.arch, entry.static, entry.tunables)
            file = selection.targets[0].file
            if why:
                reason = f"is in the baseline, but no longer in the spec: {why}"
                rows.append(Row(name, Verdict.VANISHED, reason, baseline=entry.relative, file=file))
            else:
                rows.append(Row(name, Verdict.UNCHECKED, "not asked for", baseline=entry.relative, file=file))
    return rows


def _entry(target: Target, relative: float, seconds: float) -> Entry:
    v = target.variant
    return Entry(v.spec, v.implementation, v.arch, target.static, v.tunables, relative, seconds)


def _known(path: Path | None, update: bool) -> Baseline:
    if path is None or (update and not path.exists()):
        return Baseline()
    return read_baseline(path)


def _versions(toolchain: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in toolchain.items())


def _check_numbers(rounds: int, max_ratio: float, floor_s: float) -> None:
    if type(rounds) is not int or rounds < 1:
        raise UserError(f"rounds is {rounds}; it must be at least 1")
    if not (1 < max_ratio < float("inf")):
        raise UserError(f"max_ratio is {max_ratio}; it must be over 1")
    if not (0 <= floor_s < float("inf")):
        raise UserError(f"floor_s is {floor_s}; it must not be negative")
