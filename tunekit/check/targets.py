"""What the check compiles: the chosen variants of a spec, one target per compile.

By default that is all of a spec that is served: the default of every implementation, for each of the spec's examples
and for the problems of the workloads beside it, and the winners that ship. Problems that differ in run-time sizes
only have their compiles in common.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunekit import space
from tunekit.arch import ARCHES, Arch, parse_arch
from tunekit.check import reference_kernel
from tunekit.errors import SpecError, UserError
from tunekit.model import Value, Values, Variant, Winner
from tunekit.spec import KernelSpec
from tunekit.spec.axes import contains, unknown
from tunekit.spec.workloads import workloads_beside
from tunekit.store.shipped import shipped_winners

Which = Literal["default", "all"]


@dataclass(frozen=True)
class Target:
    """One compile: a variant for one set of static problem values.

    `reference` is what ``load_spec`` takes; `backend` who compiles; `file` and `line`
    are where the kernel's build function stands.
    """

    reference: str
    variant: Variant
    static: Values
    backend: str
    file: str
    line: int

    @property
    def name(self) -> str:
        """The kernel's name in reports and baselines: all that tells it from another, in words."""
        return name_of(self.variant, self.static)


@dataclass(frozen=True)
class Selection:
    """The targets chosen, and a sentence for each problem that none of them is for.

    `lost` has the name of each winner that ships and can't be made from the spec any more, with the reason.
    """

    targets: tuple[Target, ...]
    notes: tuple[str, ...]
    lost: Mapping[str, str] = field(default_factory=dict)


def name_of(variant: Variant, static: Values) -> str:
    """A kernel's name in reports and baselines."""
    return f"{variant.spec} {variant.implementation} {variant.arch} [{static}] {variant.tunables}"


def select(
    spec: KernelSpec,
    reference: str,
    arches: Sequence[str] | None,
    problems: Sequence[Mapping[str, Value]] | None,
    which: Which,
    only: Mapping[str, Value] | None,
) -> Selection:
    """The targets: for each architecture and problem every implementation's default variant, or all variants.

    `arches` defaults to one for each implementation, `problems` to the spec's examples and the workloads
    beside it, and with them to the winners that ship; `only` keeps the variants (of all) whose tunables have
    these values.

    Raises:
        UserError: nothing is left, or a name or value is unknown.
    """
    _check_only(spec, only)
    served = problems is None and which == "default" and not only
    if problems is None:
        beside = workloads_beside(spec, reference) if served else {}
        problems = [*spec.examples, *(problem for workload in beside.values() for problem in workload)]
        if not problems and all(axis.default is not None for axis in spec.axes):
            problems = [{}]
    if not problems:
        raise UserError(f"{spec.name} has no examples: name a problem (--problem axis=value ...)")
    targets: dict[tuple[str, Values], Target] = {}
    notes = {
        f"{spec.name}: {i.name} is a library's function: nothing is compiled": None
        for i in spec.implementations
        if i.is_library
    }
    lost: dict[str, str] = {}
    for arch in _arches(spec, arches):
        for given in problems:
            problem = spec.problem(given)
            variants, why = _variants(spec, arch, problem, which, only)
            if not variants:
                notes[f"{spec.name} {spec.static(problem)} on {arch.name}: {why}"] = None
            for variant in variants:
                target = _target(spec, reference, variant, problem)
                targets.setdefault((variant.id, target.static), target)
        if served:
            winners = shipped_winners(spec.name, arch.name)
            current = [winner for winner in winners if winner.variant.version == spec.version]
            if len(current) < len(winners):
                count = len(winners) - len(current)
                notes[f"{count} winners that ship for {arch.name} are of another version of {spec.name}: unused"] = None
            for winner in current:
                if winner.library:
                    continue
                gone = _gone(spec, winner)
                if gone:
                    lost[name_of(winner.variant, spec.static(winner.problem))] = gone
                else:
                    target = _target(spec, reference, winner.variant, spec.problem(winner.problem))
                    targets.setdefault((winner.variant.id, target.static), target)
    if not targets:
        raise UserError(f"there is nothing to check: {'; '.join(notes)}")
    return Selection(tuple(targets.values()), tuple(notes), lost)


def _gone(spec: KernelSpec, winner: Winner) -> str:
    """Why a winner can't be made from the spec any more; empty if it can."""
    try:
        problem = spec.problem(winner.problem)
    except SpecError as error:
        return str(error)
    v = winner.variant
    return vanished(spec, v.implementation, v.arch, spec.static(problem), v.tunables)


def reference_target(like: Target) -> Target:
    """The reference compile for a target: by the same backend, for the same architecture."""
    spec = reference_kernel.reference
    problem = spec.problem(spec.examples[0])
    implementation = spec.implementation(like.backend)
    variant = space.expand(spec, parse_arch(like.variant.arch), problem, implementation.name).variants[0]
    return _target(spec, f"{Path(reference_kernel.__file__).absolute()}:{spec.name}", variant, problem)


def vanished(spec: KernelSpec, implementation: str, arch: str, static: Mapping[str, Value], tunables: Values) -> str:
    """Why a kernel that a baseline knows can't be made from the spec any more; empty if it can."""
    try:
        target = parse_arch(arch)
        found = spec.implementation(implementation)
        refused = found.unsupported(target)
    except UserError as error:
        return str(error)
    if refused:
        return refused
    values = {tunable.name: tunable.values for tunable in found.tunables}
    if set(values) != set(tunables):
        return f"its tunables are now {', '.join(values)}"
    gone = [f"{name}={value}" for name, value in tunables.items() if not contains(values[name], value)]
    if gone:
        return f"{', '.join(gone)} is no longer in the space"
    axes = spec.axis
    names = [axis.name for axis in spec.axes if axis.static]
    if set(names) != set(static):
        return f"its static axes are now {', '.join(names) or 'none'}"
    try:
        for name, value in static.items():
            axes[name].check(value)
        broken = space.broken(found, Values(static), tunables)
    except SpecError as error:
        return str(error)
    except (AttributeError, KeyError):
        return ""  # a constraint over run-time sizes: nothing says that it fails for all of them
    return f"{broken.name}: {broken.why}" if broken else ""


def _target(spec: KernelSpec, reference: str, variant: Variant, problem: Values) -> Target:
    implementation = spec.implementation(variant.implementation)
    build = inspect.unwrap(implementation.build)
    try:
        file, line = inspect.getsourcefile(build) or "", inspect.getsourcelines(build)[1]
    except (OSError, TypeError):
        file, line = "", 1  # a partial or a callable object: it has no source line of its own
    return Target(reference, variant, spec.static(problem), implementation.backend, file, line)


def _arches(spec: KernelSpec, names: Sequence[str] | None) -> list[Arch]:
    if names is not None:
        return [parse_arch(name) for name in names]
    firsts = [
        next(
            (
                arch
                for arch in ARCHES.values()
                if _builds_for(implementation.backend, arch) and implementation.unsupported(arch) is None
            ),
            None,
        )
        for implementation in spec.implementations
        if not implementation.is_library
    ]
    return list(dict.fromkeys(arch for arch in firsts if arch is not None))


def _builds_for(backend: str, arch: Arch) -> bool:
    return (backend == "host") != arch.is_gpu


def _variants(
    spec: KernelSpec, arch: Arch, problem: Values, which: Which, only: Mapping[str, Value] | None
) -> tuple[tuple[Variant, ...], str]:
    """The variants wanted for a problem; or none, and why."""
    if which == "default" and not only:
        compiled = (v for v in space.default_variants(spec, arch, problem) if not spec.is_library(v))
        return tuple(compiled), "no default of the spec fits"
    expansion = space.expand(spec, arch, problem)
    kept = tuple(
        variant
        for variant in expansion.variants
        if not spec.is_library(variant)
        and all(contains((value,), variant.tunables.get(name)) for name, value in (only or {}).items())
        and space.misfit(spec.implementation(variant.implementation), arch, problem, variant.tunables) is None
    )
    wanted = f" with {Values(only)}" if only else ""
    return kept, f"no variant{wanted} fits ({expansion.blame()})"


def _check_only(spec: KernelSpec, only: Mapping[str, Value] | None) -> None:
    known: dict[str, list[Value]] = {}
    for implementation in spec.implementations:
        for tunable in implementation.tunables:
            known.setdefault(tunable.name, []).extend(tunable.values)
    for name, value in (only or {}).items():
        if name not in known:
            raise UserError(unknown("tunable", name, known))
        if not contains(tuple(known[name]), value):
            allowed = ", ".join(str(item) for item in dict.fromkeys(known[name]))
            raise UserError(f"{name}={value} is not in the space (allowed: {allowed})")
