"""The fallback ladder: which variants may serve a problem, best first, and why.

    exact -> bucket -> nearest -> shipped -> default

Pure: no torch, no database, no artifact. Every step that finds nothing says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from tunekit import space
from tunekit.arch import Arch, parse_arch
from tunekit.errors import SpecError, UserError
from tunekit.model import Artifact, Choice, Environment, Level, Values, Variant, Winner
from tunekit.once import computed_once
from tunekit.spec import KernelSpec
from tunekit.spec.axes import contains
from tunekit.store.standing import differences, missing_identity, other_version


class Candidate(NamedTuple):
    """A variant that may serve a problem; `winner` is the measurement that speaks for it."""

    level: Level
    why: str
    variant: Variant
    winner: Winner | None = None


class Miss(NamedTuple):
    """A level that has nothing for a problem, and why."""

    level: Level
    why: str


@dataclass(frozen=True)
class Known:
    """A winner in the spec's present terms. `strange` says how the environment or the protocol that it was
    measured in differs from the present one; empty where it counts as measured here. `superseded`: a later
    winner counts as measured here for the same problem; their protocols differ, so their times are not compared."""

    spec: KernelSpec
    winner: Winner
    problem: Values
    strange: str
    superseded: bool = False

    # When first asked for: a problem with a winner of its own needs these of no other.
    @computed_once
    def bucket(self) -> Values:
        return self.spec.bucket(self.problem)

    @computed_once
    def derived(self) -> frozenset[str]:
        return self.spec.derived(self.problem)


@dataclass(frozen=True)
class Table:
    """What is known about one spec on one device. `unusable` has a sentence per winner that was left out.

    `later` gives the shipped winners, which are read when the ladder comes down to them.
    """

    spec: KernelSpec
    arch: str
    measured: tuple[Known, ...] = ()
    later: Callable[[], tuple[Known, ...]] = tuple
    unusable: tuple[str, ...] = ()

    @computed_once
    def shipped(self) -> tuple[Known, ...]:
        return self.later()


def make_table(
    spec: KernelSpec,
    arch: str,
    here: Environment,
    measured: Iterable[Winner] = (),
    shipped: Iterable[Winner] = (),
    protocols: frozenset[str] | None = None,
) -> Table:
    """The winners sorted out once. `protocols` are those whose times count as measured here; None: any."""
    own, unusable = sort_out(spec, arch, here, measured, protocols)
    others, of_no_use = sort_out(spec, arch, here, shipped, protocols)
    return Table(spec, arch, own, lambda: others, tuple(dict.fromkeys((*unusable, *of_no_use))))


def sort_out(
    spec: KernelSpec, arch: str, here: Environment, winners: Iterable[Winner], protocols: frozenset[str] | None
) -> tuple[tuple[Known, ...], tuple[str, ...]]:
    """The winners that are of use, in the spec's present terms; and a sentence for each of the others."""
    known: list[Known] = []
    unusable: list[str] = []
    for winner in winners:
        problem, why = usable(spec, arch, winner)
        if problem is None:
            unusable.append(f"a winner of {spec.name} ({winner.problem}) is left out: {why}")
        else:
            known.append(Known(spec, winner, problem, _strange(spec, winner, here, protocols)))
    later = {one.problem: index for index, one in enumerate(known) if not one.strange}
    found = (
        replace(one, superseded=not one.strange and later[one.problem] != index) for index, one in enumerate(known)
    )
    return tuple(found), tuple(dict.fromkeys(unusable))


def steps(table: Table, problem: Values) -> Iterator[Candidate | Miss]:
    """The ladder for a complete `problem`, best first."""
    measured_here = [known for known in table.measured if not known.strange and known.problem == problem]
    exact = sorted((_Match(known, 0.0) for known in measured_here), key=_rank)
    yield from _level(table, problem, Level.EXACT, exact, "nothing was measured here for this problem")
    bucket = table.spec.bucket(problem)
    near: list[_Match] = []
    rest: list[_Match] = []
    for match in _matches(table.spec, table.measured, problem):
        if match.known.strange:
            rest.append(match)
        elif match.distance > 0:
            (near if match.known.bucket == bucket else rest).append(match)
    yield from _level(table, problem, Level.BUCKET, near, "nothing was measured here in this bucket")
    yield from _level(table, problem, Level.NEAREST, rest, "nothing else was measured with the same static axes")
    shipped = _matches(table.spec, table.shipped, problem)
    yield from _level(table, problem, Level.SHIPPED, shipped, "no shipped result has the same static axes")
    yield from _defaults(table, problem)


T = TypeVar("T")


@dataclass(frozen=True)
class Walk(Generic[T]):
    """How a walk down the ladder ended: at a candidate with what it needs, or (`thing` None) at the bottom.

    `candidate` is then the best one that lacked something; None if there was none at
    all. `missed` has a sentence for each level and candidate that was passed, `better`
    is the best candidate among these.
    """

    candidate: Candidate | None
    thing: T | None
    missed: tuple[str, ...]
    better: Candidate | None = None

    def choice(self, picked: Candidate, artifact: Artifact | None, why: str = "") -> Choice:
        """What becomes of `candidate`, `picked`, with the artifact that serves it; `why` goes on from its own."""
        return Choice(
            variant=picked.variant,
            level=picked.level,
            why=picked.why + why,
            artifact=artifact.key if artifact else None,
            symbol=artifact.symbol if artifact else None,
            fell_back_from=self.missed,
            winner=picked.winner,
            better=self.better.variant if self.better else None,
        )


def walk(table: Table, problem: Values, acquire: Callable[[Candidate], tuple[T | None, str]]) -> Walk[T]:
    """Go down the ladder until `acquire` yields what serving a candidate needs; else it says what lacks."""
    missed: list[str] = []
    first: Candidate | None = None
    for step in steps(table, problem):
        if isinstance(step, Miss):
            missed.append(f"{step.level}: {step.why}")
            continue
        thing, lacks = acquire(step)
        if thing is not None:
            return Walk(step, thing, tuple(dict.fromkeys(missed)), first)
        first = first or step
        missed.append(f"{step.level}: {step.variant}: {lacks}")
    return Walk(first, None, tuple(dict.fromkeys(missed)))


def usable(spec: KernelSpec, arch: str, winner: Winner) -> tuple[Values | None, str]:
    """A winner's problem in the spec's present terms; or None and why the winner is of no use."""
    variant = winner.variant
    if variant.spec != spec.name or variant.arch != arch:
        return None, f"it is for {variant.spec} on {variant.arch}"
    if variant.version != spec.version:
        return None, f"it is for version {variant.version} of {spec.name}, now {spec.version}"
    lacking = missing_identity(winner.environment, arch)
    if lacking:
        return None, lacking
    try:
        implementation = spec.implementation(variant.implementation)
        allowed = {tunable.name: tunable.values for tunable in implementation.tunables}
        if set(variant.tunables) != set(allowed) or not all(
            contains(allowed[n], v) for n, v in variant.tunables.items()
        ):
            return None, f"{variant} is no longer in the space of {spec.name}"
        return spec.problem(winner.problem), ""
    except SpecError as error:
        return None, str(error)


def _strange(spec: KernelSpec, winner: Winner, here: Environment, protocols: frozenset[str] | None) -> str:
    """How a winner's environment, library and protocol differ from the present ones, in words; empty if they don't."""
    there = winner.environment
    if here.cutlass_dsl is None:  # no compiler here, so none that could differ
        here = replace(here, cutlass_dsl=there.cutlass_dsl)
    strange = differences(there, here)
    implementation = spec.implementation(winner.variant.implementation)
    if implementation.is_library:
        unknown = "" if winner.library else f"the record does not say which version of {implementation.package} it was"
        strange += filter(None, [unknown, other_version(winner)])
    if protocols is not None and winner.protocol not in protocols:
        strange.append(f"protocol '{winner.protocol}', not comparable with this version's")
    return "; ".join(strange)


def distance(spec: KernelSpec, measured: Values, asked: Values, dependent: frozenset[str] | None = None) -> float:
    """How far apart two problems are: the sum over dynamic dims of |log2 ratio|.

    Infinite where a static axis, or an axis that is no size (in one of the two: 0, -1), differs. Sizes that follow
    from the others in both problems (`dependent`, found here where not given) do not count again.
    """
    if dependent is None:
        dependent = spec.derived(measured) & spec.derived(asked)
    total = 0.0
    for axis in spec.axes:
        old, new = measured[axis.name], asked[axis.name]
        if type(old) is type(new) and old == new:
            continue
        if axis.static or axis.kind != "dim":
            return math.inf
        if axis.name in dependent:
            continue
        if float(new) <= 0 or float(old) <= 0:
            return math.inf
        total += abs(math.log2(float(new) / float(old)))
    return total


def explain_no_kernel(spec: KernelSpec, arch: str, problem: Values) -> str:
    """Why nothing can serve `problem`: what each constraint removed and what did not fit."""
    target = parse_arch(arch)
    try:
        expansion = space.expand(spec, target, problem)
    except UserError as error:
        return str(error)
    if expansion.variants:
        implementations = {v.implementation: spec.implementation(v.implementation) for v in expansion.variants}
        misfits = [
            space.misfit(implementations[v.implementation], target, problem, v.tunables) for v in expansion.variants
        ]
        if all(misfits):
            return f"{expansion.blame()}; the rest don't fit: {misfits[0]}"
        fitting = sum(misfit is None for misfit in misfits)
        return f"{fitting} of {expansion.total} variants could serve, but none that may be picked is compiled"
    why = "; ".join(f"{name}: {why}" for name, why in expansion.reasons.items())
    return f"{expansion.blame()} ({why})" if why else expansion.blame()


class _Match(NamedTuple):
    """A winner of a problem like the one asked for; `distance` 0 is the same problem."""

    known: Known
    distance: float


def _matches(spec: KernelSpec, winners: tuple[Known, ...], problem: Values) -> list[_Match]:
    """The winners of problems that only sizes keep apart from this one, nearest first and ours before others'."""
    derived = spec.derived(problem) if winners else frozenset()
    gaps = ((known, distance(spec, known.problem, problem, known.derived & derived)) for known in winners)
    return sorted((_Match(known, gap) for known, gap in gaps if not math.isinf(gap)), key=_rank)


def _rank(match: _Match) -> tuple[float, bool, bool, float, str]:
    known, winner = match.known, match.known.winner
    return match.distance, bool(known.strange), known.superseded, winner.median_us, winner.variant.id


def _cannot_serve(spec: KernelSpec, arch: Arch, variant: Variant, problem: Values) -> str | None:
    """Why `variant` can't run `problem`: a constraint, the architecture, or the room that it takes."""
    implementation = spec.implementation(variant.implementation)
    return (
        space.serves(spec, variant, problem)
        or implementation.unsupported(arch)
        or space.misfit(implementation, arch, problem, variant.tunables)
    )


def _level(
    table: Table, problem: Values, level: Level, matches: list[_Match], otherwise: str
) -> Iterator[Candidate | Miss]:
    """What a level has. Whether a winner may serve is asked when the ladder comes down to it: most are never."""
    if not matches:
        yield Miss(level, otherwise)
    arch = parse_arch(table.arch)
    for match in matches:
        winner = match.known.winner
        broken = _cannot_serve(table.spec, arch, winner.variant, problem)
        if broken:
            yield Miss(level, f"{winner.variant} may not serve it ({broken})")
        else:
            yield Candidate(level, _words(level, match), winner.variant, winner)


def _words(level: Level, match: _Match) -> str:
    """Why a winner is picked: how it was measured, for what, and where."""
    winner, strange = match.known.winner, match.known.strange
    figure = f"{winner.median_us:.4g} us"
    if winner.margin is not None:
        figure += f", {winner.margin:.1%} ahead of the next"
    here = f"measured here on {winner.environment.gpu or 'this machine'}"
    if level is Level.EXACT:
        return f"{here} for this problem: {figure}"
    if level is Level.BUCKET:
        return f"{here} in the same bucket, at {match.known.problem}: {figure}"
    source = "it comes with tunekit" if level is Level.SHIPPED else "a fallback"
    origin = f"measured elsewhere ({strange})" if strange else here
    which = "this problem" if not match.distance else f"{match.known.problem} ({_apart(match.distance)})"
    return f"{source}, {origin} for {which}: {figure}"


def _apart(distance: float) -> str:
    """The distance of two problems in words: the product of the ratios of their sizes."""
    ratio = 2**distance
    return f"sizes {ratio:.3g}x apart" if ratio < 1000 else "sizes over 1000x apart"


def _defaults(table: Table, problem: Values) -> Iterator[Candidate | Miss]:
    """The spec's default; and those of its libraries, which serve without a compile."""
    try:
        defaults = space.default_variants(table.spec, parse_arch(table.arch), problem)
    except UserError as error:
        yield Miss(Level.DEFAULT, str(error))
        return
    if not defaults:
        yield Miss(Level.DEFAULT, "no default of the spec can serve it")
    for variant in defaults:
        if variant is defaults[0]:
            why = "the spec's default: no measured winner that may serve it is compiled"
        elif table.spec.is_library(variant):
            why = "a library's default: neither a measured winner that may serve it nor the spec's default is compiled"
        else:
            continue
        yield Candidate(Level.DEFAULT, why, variant)
