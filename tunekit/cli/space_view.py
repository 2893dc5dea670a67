"""A spec's space as the commands show it: each point with its fate, by the one predicate of `space`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunekit import identity, space
from tunekit.arch import Arch
from tunekit.environment import environment
from tunekit.model import Footprint, Values, Variant
from tunekit.spec import Constraint, KernelSpec


@dataclass(frozen=True)
class Point:
    """One combination of tunables: the constraint that drops it, or its footprint and why that can't fit.

    `library`: it is a package's function, of which there is no footprint.
    """

    variant: Variant
    dropped_by: Constraint | None
    footprint: Footprint
    misfit: str | None
    library: bool = False

    @property
    def fits(self) -> bool:
        return self.dropped_by is None and self.misfit is None

    @property
    def verdict(self) -> str:
        """Whether the declared footprint fits, in a few words."""
        if self.misfit is not None:
            return f"can't fit: {self.misfit}"
        if self.library:
            return "a library's function"
        return "fits" if self.footprint != Footprint() else "not declared: tracing tells"


def choose_arch(spec: KernelSpec, asked: str | None, device: int = 0) -> tuple[Arch, str]:
    """The architecture to work for (see `space.choose_arch`), looking at this machine's GPU if none is asked for."""
    return space.choose_arch(spec, asked, None if asked else environment(device).arch)


def all_points(spec: KernelSpec, arch: Arch, problem: Values, implementation: str | None = None) -> list[Point]:
    """Every combination of tunables of the implementations that can run on `arch`, in the order of the declaration."""
    found: list[Point] = []
    for candidate in space.implementations_on(spec, arch, implementation):
        for tunables in space.points(candidate):
            variant = identity.variant(spec.name, spec.version, candidate.name, arch.name, tunables)
            constraint = space.dropped_by(candidate, problem, tunables)
            if constraint is None:
                footprint = space.declared_footprint(candidate, arch, problem, tunables)
                found.append(Point(variant, None, footprint, footprint.misfit(arch), candidate.is_library))
            else:
                found.append(Point(variant, constraint, Footprint(), None, candidate.is_library))
    return found


def select(points: Sequence[Point], ids: Sequence[str]) -> list[Point]:
    """The points whose variant id begins with one of `ids`; all of them if `ids` is empty.

    Raises:
        UserError: an id that none, or more than one, begins with.
    """
    by_id = {point.variant.id: point for point in points}
    return [by_id[variant.id] for variant in space.named([point.variant for point in points], ids)]
