"""Expansion: a spec, an architecture and a problem become an ordered list of variants.

The predicate here is the only one: list, sweep, probe and dispatch all ask
:func:`broken`; what works on a whole space also leaves out the libraries that
are not installed (:func:`dropped_by`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tunekit import identity, pruning
from tunekit.arch import ARCHES, Arch, parse_arch
from tunekit.errors import SpecError, UserError, words_of
from tunekit.model import Footprint, Values, Variant
from tunekit.spec import Constraint, Implementation, KernelSpec, Work
from tunekit.spec.packages import absence, tools_of

# What a spec's own functions may raise when they are wrong: anything, sys.exit() included.
SPEC_MISTAKES = (Exception, SystemExit)
# A space beyond this takes minutes and gigabytes to list.
MOST_POINTS = 1_000_000
# Kernels get a workspace's size as an int32, and refuse at the launch what is larger.
LARGEST_WORKSPACE = 2**31 - 1


@dataclass(frozen=True)
class Expansion:
    """The variants that the constraints leave, and how many each constraint removed.

    A variant that breaks several constraints counts for the first alone. `reasons` has the
    sentence of each constraint that removed some; `absent` those for libraries that are not installed.
    """

    variants: tuple[Variant, ...]
    total: int
    removed: dict[str, int]
    reasons: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()

    def blame(self) -> str:
        """One line: how many were dropped, and by which constraint."""
        if not self.removed:
            return f"{self.total} variants, none dropped"
        parts = ", ".join(f"{count} by {name}" for name, count in self.removed.items())
        return f"{len(self.variants)} of {self.total} variants; dropped: {parts}"


def implementations_on(spec: KernelSpec, arch: Arch, only: str | None = None) -> tuple[Implementation, ...]:
    """The implementations of a spec that can run on `arch`.

    Raises:
        UserError: there is none; the sentence says what each one lacks.
    """
    candidates = spec.implementations if only is None else (spec.implementation(only),)
    fitting = tuple(i for i in candidates if i.unsupported(arch) is None)
    if not fitting:
        reasons = "; ".join(str(i.unsupported(arch)) for i in candidates)
        raise UserError(f"{spec.name} can't run on {arch.name}: {reasons}")
    return fitting


def choose_arch(spec: KernelSpec, asked: str | None, detected: str | None, only: str | None = None) -> tuple[Arch, str]:
    """The architecture to work for, and why in a few words.

    The one `asked` for; else the one `detected` on this machine, if the spec runs
    there; else sm_100a; else the first of the table that an implementation supports.
    `only` names the implementation that counts.

    Raises:
        UserError: an unknown name, or no implementation runs on the one asked for.
    """
    if asked is not None:
        arch = parse_arch(asked)
        implementations_on(spec, arch, only)
        return arch, "as asked"
    candidates = spec.implementations if only is None else (spec.implementation(only),)
    runnable = [arch for arch in ARCHES.values() if any(i.unsupported(arch) is None for i in candidates)]
    for name, why in ((detected, "this machine's GPU"), ("sm_100a", "cross-compiled: not this machine's GPU")):
        for arch in runnable:
            if arch.name == name:
                return arch, why
    if not runnable:
        raise UserError(f"{spec.name}: no implementation runs on any known architecture")
    return runnable[0], "the first that the spec supports"


def broken(implementation: Implementation, problem: Values, tunables: Values) -> Constraint | None:
    """The first constraint that a point breaks, or None.

    Raises:
        SpecError: a constraint's own code fails, for example on a misspelt name.
    """
    point = problem.merged(tunables)
    return next((c for c in implementation.constraints if not _holds(implementation, c, point)), None)


def _holds(implementation: Implementation, constraint: Constraint, point: Values) -> bool:
    """Whether a constraint holds; its own mistakes become a SpecError that names it."""
    try:
        holds = constraint.holds(point)
    except SPEC_MISTAKES as error:
        raise _mistake(words_of(error), implementation, f"constraint {constraint.name}", point) from error
    if holds is None:
        raise _mistake("it returned None, not True or False", implementation, f"constraint {constraint.name}", point)
    return bool(holds)


def check_size(implementation: Implementation) -> None:
    """Raise SpecError where there are too many combinations of tunables to list."""
    count = math.prod(len(tunable.values) for tunable in implementation.tunables)
    if count > MOST_POINTS:
        sizes = " x ".join(f"{tunable.name} {len(tunable.values)}" for tunable in implementation.tunables)
        words = f"{count} combinations of tunables ({sizes}); at most {MOST_POINTS} can be listed"
        raise SpecError(words, field=implementation.name)


def dropped_by(implementation: Implementation, problem: Values, tunables: Values) -> Constraint | None:
    """Why a point is not in the space here: its library is not installed, or the constraint that it breaks."""
    return missing_library(implementation) or broken(implementation, problem, tunables)


def missing_library(implementation: Implementation) -> Constraint | None:
    """The rule that all of an implementation breaks whose package is not installed; None if there is none."""
    absent = absence(implementation)
    if absent is None:
        return None
    return Constraint(f"{implementation.package}_installed", f"{implementation.name}: {absent}", lambda point: False)


def points(implementation: Implementation) -> Iterator[Values]:
    """Every combination of tunables, the last one varying fastest.

    Raises:
        SpecError: there are too many to list.
    """
    check_size(implementation)
    names = [tunable.name for tunable in implementation.tunables]
    for combination in itertools.product(*(tunable.values for tunable in implementation.tunables)):
        yield Values(dict(zip(names, combination, strict=True)))


def expand(spec: KernelSpec, arch: Arch, problem: Values, implementation: str | None = None) -> Expansion:
    """All variants of `spec` for a complete `problem` on `arch`, in the order of the declaration."""
    variants: list[Variant] = []
    removed: dict[str, int] = {}
    reasons: dict[str, str] = {}
    total = 0
    candidates = implementations_on(spec, arch, implementation)
    for candidate in candidates:
        check_size(candidate)
        holds = functools.partial(_holds, candidate)
        missing = missing_library(candidate)
        rules = candidate.constraints if missing is None else (missing,)
        for found in pruning.walk(candidate.tunables, rules, problem, holds):
            if isinstance(found, pruning.Kept):
                total += 1
                variants.append(identity.variant(spec.name, spec.version, candidate.name, arch.name, found.tunables))
            else:
                rule = found.constraint
                total += found.points
                removed[rule.name] = removed.get(rule.name, 0) + found.points
                reasons.setdefault(rule.name, rule.why)
    absent = tuple(rule.why for rule in map(missing_library, candidates) if rule is not None)
    return Expansion(tuple(variants), total, removed, reasons, absent)


def named(variants: Sequence[Variant], ids: Sequence[str]) -> list[Variant]:
    """The variants whose ids begin with one of `ids`, in that order, each once; all of them if there are none.

    Raises:
        UserError: no variant, or more than one, begins with an id.
    """
    chosen: list[Variant] = []
    for wanted in ids:
        matching = [variant for variant in variants if variant.id.startswith(wanted)]
        if len(matching) != 1:
            what = "no variant id begins" if not matching else f"{len(matching)} variant ids begin"
            raise UserError(f"{what} with '{wanted}' for this problem and architecture (tunekit list shows them)")
        chosen += matching
    return list(dict.fromkeys(chosen)) if ids else list(variants)


def default_variant(spec: KernelSpec, arch: Arch, problem: Values) -> Variant | None:
    """The variant that serves a problem nobody has tuned: the first allowed default that fits."""
    return next(iter(default_variants(spec, arch, problem)), None)


def default_variants(spec: KernelSpec, arch: Arch, problem: Values) -> list[Variant]:
    """Of each implementation in turn the first default that is allowed and fits."""
    found: list[Variant] = []
    for candidate in implementations_on(spec, arch):
        for tunables in candidate.defaults:
            frozen = Values(tunables)
            if dropped_by(candidate, problem, frozen) is None and misfit(candidate, arch, problem, frozen) is None:
                found.append(identity.variant(spec.name, spec.version, candidate.name, arch.name, frozen))
                break
    return found


def declared_footprint(implementation: Implementation, arch: Arch, problem: Values, tunables: Values) -> Footprint:
    """The footprint by the spec's own arithmetic; all unknown where it declares none."""
    if implementation.footprint is None:
        return Footprint()
    point = problem.merged(tunables)
    try:
        footprint = implementation.footprint(point, arch)
    except SPEC_MISTAKES as error:
        raise _mistake(words_of(error), implementation, "footprint", point) from error
    if not isinstance(footprint, Footprint):
        words = f"it returned {type(footprint).__name__}, not a Footprint"
        raise _mistake(words, implementation, "footprint", point)
    for need in dataclasses.fields(footprint):
        value = getattr(footprint, need.name)
        if value is not None and (type(value) is not int or value < 0):
            raise _mistake(f"{need.name} is {value!r}, not an int from 0", implementation, "footprint", point)
    return footprint


def declared_work(implementation: Implementation, arch: Arch, problem: Values, tunables: Values) -> Work | None:
    """What a variant's launch does by the spec's own arithmetic; None where it declares nothing.

    Raises:
        SpecError: the implementation's function fails, or gives numbers that no launch has.
    """
    if implementation.work is None:
        return None
    point = problem.merged(tunables)
    try:
        work = implementation.work(point, arch)
    except SPEC_MISTAKES as error:
        raise _mistake(words_of(error), implementation, "work", point) from error
    if not isinstance(work, Work):
        raise _mistake(f"it returned {type(work).__name__}, not a Work", implementation, "work", point)
    for each in dataclasses.fields(work):
        value = getattr(work, each.name)
        least = 1 if each.name in ("ctas", "ctas_per_sm", "launches") else 0
        known = isinstance(value, (int, float)) and math.isfinite(value) and value >= least
        if not known and (each.name, value) != ("ctas_per_sm", None):
            raise _mistake(f"{each.name} is {value!r}, not a number from {least}", implementation, "work", point)
    if work.stages == 0:
        raise _mistake("stages is 0: a step in flight is a part of one at least", implementation, "work", point)
    return work


def workspace(spec: KernelSpec, variant: Variant, problem: Values) -> int:
    """The float32 elements of the scratch tensor that a variant's artifact takes after its arguments; 0: it takes none.

    Raises:
        SpecError: the implementation's function fails, or gives no number of elements.
    """
    implementation = spec.implementation(variant.implementation)
    return _workspace(implementation, ARCHES[variant.arch], problem.merged(variant.tunables))


def _workspace(implementation: Implementation, arch: Arch, point: Values) -> int:
    if implementation.workspace is None:
        return 0
    try:
        elements = implementation.workspace(point, arch)
    except SPEC_MISTAKES as error:
        raise _mistake(words_of(error), implementation, "workspace", point) from error
    if type(elements) is not int or elements < 0:
        raise _mistake(f"it is {elements!r}, not an int from 0", implementation, "workspace", point)
    return elements


def _mistake(words: str, implementation: Implementation, what: str, point: Values) -> SpecError:
    return SpecError(f"{what} fails for {point}: {words}", field=implementation.name)


def misfit(implementation: Implementation, arch: Arch, problem: Values, tunables: Values) -> str | None:
    """Why a point's declared footprint exceeds the architecture, or its workspace what can be passed; or None."""
    over = declared_footprint(implementation, arch, problem, tunables).misfit(arch)
    if over is None and (elements := _workspace(implementation, arch, problem.merged(tunables))) > LARGEST_WORKSPACE:
        over = f"workspace {elements} elements > {LARGEST_WORKSPACE} (an int32 size)"
    return over


def serves(spec: KernelSpec, variant: Variant, problem: Values) -> str | None:
    """Why `variant` may not be used for `problem`: the constraint it breaks; None if it may."""
    constraint = broken(spec.implementation(variant.implementation), problem, variant.tunables)
    return f"{constraint.name}: {constraint.why}" if constraint else None


def compile_key(
    spec: KernelSpec,
    variant: Variant,
    problem: Values,
    *,
    sources: str | None = None,
    tools: Mapping[str, str | None] | None = None,
    options: str = "",
) -> str:
    """The compile key of `variant` for a complete `problem`: what its artifact is stored under.

    `sources` is the :func:`identity.fingerprint` of the implementation's build function,
    taken here where it isn't given; `tools` are the versions that count, where they are not those
    installed here; `options` is added to the implementation's own compile options.
    """
    implementation = spec.implementation(variant.implementation)
    if sources is None:
        sources = identity.fingerprint(implementation.build)
    together = f"{implementation.compile_options} {options}".strip() if options else implementation.compile_options
    if tools is None:
        tools = tools_of(implementation)
    return identity.compile_key(variant, spec.static(problem), sources, together, tools)
