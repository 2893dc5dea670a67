"""The declaration of a kernel spec: data, and small pure functions of ``Values``.

A spec says *what* is computed (axes, signature, reference, tolerance, cost) and
holds one or more *implementations*, each a way to compute it on some
architectures, with tunables of its own. Everything is checked when it is made.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tunekit.arch import ARCHES, Arch
from tunekit.errors import SpecError
from tunekit.model import Cost, Footprint, Value, Values, Variant
from tunekit.once import computed_once
from tunekit.spec import problems
from tunekit.spec.arguments import ScalarArg, TensorArg, axis_and_offset
from tunekit.spec.axes import (
    DTYPES,
    Axis,
    Constraint,
    Tolerance,
    Tunable,
    check_name,
    check_unique,
    contains,
    unknown,
)
from tunekit.spec.work import Work

# The name of a distribution, as package indexes take it (PEP 508).
DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
WORKSPACE = "workspace"
"""What messages call an implementation's scratch tensor."""


class Build(NamedTuple):
    """What a build function is told: never a tensor, never a device.

    `problem` holds the static axes only: nothing else may change the code.
    """

    arch: Arch
    problem: Values
    tunables: Values


@dataclass(frozen=True)
class Implementation:
    """One way to compute a spec.

    `requires` names the architecture features that it needs (see arch.py);
    `backend` is who compiles what `build(Build)` returns: for ``cutedsl`` the
    pair (``@cute.jit`` callable, compile arguments), for ``host`` the C source, for ``library`` a Python
    function of `package`, which takes the signature's arguments (and runs on the host only if ``host`` is
    required). `package` is the distribution that must be installed, `install` what pip is told to install
    it, where that is another name. `footprint` is arithmetic over problem + tunables, or None if only
    tracing can tell. `defaults` are tried in order: a problem's default is the first that its constraints allow.
    `workspace`, of the same values, gives the float32 elements of a scratch tensor that the artifact
    takes after the signature's arguments; where it is 0 there is no such argument, which may depend on
    static axes and tunables only. What a call finds in it is undefined. `work`, of the same values, says what a
    launch does: it orders a sweep's first evaluations where a cost model was fitted, and decides nothing.
    """

    name: str
    requires: frozenset[str]
    tunables: tuple[Tunable, ...]
    build: Callable[[Build], Any]
    defaults: tuple[Mapping[str, Value], ...]
    constraints: tuple[Constraint, ...] = ()
    footprint: Callable[[Any, Arch], Footprint] | None = None
    backend: str = "cutedsl"
    compile_options: str = ""
    package: str = ""
    install: str = ""
    workspace: Callable[[Any, Arch], int] | None = None
    work: Callable[[Any, Arch], Work] | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "implementation")
        object.__setattr__(self, "requires", frozenset(self.requires))
        object.__setattr__(self, "tunables", tuple(self.tunables))
        object.__setattr__(self, "constraints", tuple(self.constraints))
        known = frozenset().union(*(arch.features for arch in ARCHES.values()))
        for feature in self.requires - known:
            raise SpecError(f"unknown feature {feature} (known: {', '.join(sorted(known))})", field="requires")
        check_unique(self.tunables, "tunables")
        check_unique(self.constraints, "constraints")
        if not callable(self.build):
            raise SpecError("build must be a function", field="build")
        self._check_package()
        if self.workspace is not None and not callable(self.workspace):
            raise SpecError("workspace must be a function of (values, arch)", field="workspace")
        if self.work is not None and not callable(self.work):
            raise SpecError("work must be a function of (values, arch)", field="work")
        if isinstance(self.defaults, Mapping):
            object.__setattr__(self, "defaults", (self.defaults,))
        if not self.defaults:
            raise SpecError("there must be at least one default", field="defaults")
        frozen = tuple(self._checked_default(default) for default in self.defaults)
        object.__setattr__(self, "defaults", frozen)

    @property
    def is_library(self) -> bool:
        """Whether this is a function of an installed package: nothing is compiled."""
        return self.backend == "library"

    def _check_package(self) -> None:
        if not self.is_library:
            if self.package or self.install:
                raise SpecError("only an implementation of backend 'library' names a package", field="package")
            return
        if not DISTRIBUTION.fullmatch(self.package):
            raise SpecError(f"package is {self.package!r}; a library names its distribution", field="package")
        if self.footprint is not None or self.compile_options:
            what = "footprint" if self.footprint is not None else "compile_options"
            raise SpecError("means nothing for a library: what it launches is its own affair", field=what)

    def _checked_default(self, default: Mapping[str, Value]) -> Values:
        by_name = {tunable.name: tunable for tunable in self.tunables}
        for name, value in default.items():
            if name not in by_name:
                raise SpecError(f"default names {unknown('tunable', name, by_name)}", field="defaults")
            if not contains(by_name[name].values, value):
                allowed = ", ".join(str(v) for v in by_name[name].values)
                raise SpecError(f"default {name}={value} lies outside the space ({allowed})", field="defaults")
        missing = [name for name in by_name if name not in default]
        if missing:
            raise SpecError(f"default leaves out {', '.join(missing)}", field="defaults")
        return Values({name: default[name] for name in by_name})

    def unsupported(self, arch: Arch) -> str | None:
        """Why this can't run on `arch`, in a sentence, or None."""
        missing = sorted(self.requires - arch.features)
        if not missing:
            if arch.is_gpu or self.backend == "host" or (self.is_library and self.requires):
                return None
            if self.is_library:
                return f"{self.name} does not say that it runs on {arch.name} (requires={{'{arch.name}'}})"
            return f"{self.name} is for the {self.backend} backend, which can't build for {arch.name}"
        has = ", ".join(sorted(arch.features)) or "none"
        return f"{self.name} needs {', '.join(missing)}, which {arch.name} has not (it has {has})"


@dataclass(frozen=True)
class KernelSpec:
    """A kernel family: what is computed, and the implementations that compete at it.

    `reference(problem, inputs)` takes torch tensors, and the scalars' numbers, by
    argument name and returns the outputs in float64 (or float32); `inputs(problem, generator, device)`
    overrides the random normal inputs where those make no sense. `rounded` is a reference whose intermediate results
    are rounded as a kernel must round them: `Tolerance.rounding` is held against it, for the outputs that have one.
    `cost(problem)` declares unavoidable work. Bump `version` when the meaning of a problem or an output changes.
    """

    name: str
    version: int
    axes: tuple[Axis, ...]
    signature: tuple[TensorArg | ScalarArg, ...]
    implementations: tuple[Implementation, ...]
    reference: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
    tolerance: Mapping[str, Tolerance] | Tolerance = field(default_factory=Tolerance)
    constraints: tuple[Constraint, ...] = ()
    cost: Callable[[Any], Cost] | None = None
    inputs: Callable[[Any, Any, Any], Mapping[str, Any]] | None = None
    rounded: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    examples: tuple[Mapping[str, Value], ...] = ()
    compile_limit_s: float | None = None
    description: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "spec")
        for name in ("axes", "signature", "implementations", "constraints", "examples"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if type(self.version) is not int or self.version < 1:
            raise SpecError(f"version is {self.version!r}; it must be an int from 1", field="version")
        for name in ("axes", "signature", "implementations"):
            if not getattr(self, name):
                raise SpecError("is empty", field=name)
            check_unique(getattr(self, name), name)
        check_unique(self.constraints, "constraints")
        if not callable(self.reference):
            raise SpecError("reference must be a function", field="reference")
        axes = {axis.name: axis for axis in self.axes}
        for implementation in self.implementations:
            for tunable in implementation.tunables:
                if tunable.name in axes:
                    raise SpecError(f"tunable {tunable.name} has the name of an axis", field=implementation.name)
        for arg in self.signature:
            if arg.name in axes:
                raise SpecError(f"argument {arg.name} has the name of an axis", field="signature")
            if arg.name == WORKSPACE and any(implementation.workspace for implementation in self.implementations):
                raise SpecError(f"argument {WORKSPACE} has the name of an implementation's scratch", field="signature")
            if isinstance(arg, TensorArg):
                for dim in (dim for shape in arg.shapes() for dim in shape if isinstance(dim, str)):
                    name, _ = axis_and_offset(dim)
                    if name not in axes or axes[name].kind != "dim":
                        dims = [axis.name for axis in self.axes if axis.kind == "dim"]
                        raise SpecError(f"shape names {unknown('axis', name, dims)}", field=arg.name)
                if arg.dtype not in DTYPES and (arg.dtype not in axes or axes[arg.dtype].kind != "dtype"):
                    raise SpecError(f"dtype names {unknown('dtype', arg.dtype, (*axes, *DTYPES))}", field=arg.name)
        outputs = [a.name for a in self.signature if isinstance(a, TensorArg) and a.role != "input"]
        if not outputs:
            raise SpecError("has no output", field="signature")
        if isinstance(self.tolerance, Mapping):
            for name in self.tolerance:
                if name not in outputs:
                    raise SpecError(f"names {unknown('output', name, outputs)}", field="tolerance")
        if self.rounded is not None and not callable(self.rounded):
            raise SpecError("rounded must be a function", field="rounded")
        for name in outputs if self.rounded is None else ():
            if self.tolerance_of(name).rounding is not None:
                words = f"{name} has rounding={self.tolerance_of(name).rounding:g}, and the spec has no rounded oracle"
                raise SpecError(f"{words} (KernelSpec.rounded)", field="tolerance")
        if self.compile_limit_s is not None and not (0 < self.compile_limit_s < math.inf):
            raise SpecError(f"{self.compile_limit_s} must be positive", field="compile_limit_s")
        for example in self.examples:
            try:
                self.problem(example)
            except SpecError as error:
                of = f"{error.field}: " if error.field else ""
                raise SpecError(f"{dict(example)}: {of}{error.message}", field="examples") from error

    @computed_once
    def axis(self) -> dict[str, Axis]:
        return {axis.name: axis for axis in self.axes}

    def problem(self, given: Mapping[str, Value]) -> Values:
        """`given` completed with the axes' defaults (see problems), in the axes' order, and checked.

        Its text leaves out what the defaults give.

        Raises:
            SpecError: an unknown, missing or disallowed value, named with its axis.
        """
        axes = self.axis
        if not isinstance(given, Mapping):
            raise SpecError(f"a problem is a dict of axis values, not {type(given).__name__}", where=self.name)
        for name in given:
            if name not in axes:
                raise SpecError(unknown("axis", name, axes), where=self.name)
        try:
            problem = problems.complete(self.axes, given)
            problem = problem.implying(problems.implied(self.axes, problem))
        except SpecError as error:
            raise SpecError(error.message, field=error.field, where=self.name) from error
        for constraint in self.constraints:
            if not constraint.holds(problem):
                raise SpecError(f"{problem}: {constraint.name}: {constraint.why}", where=self.name)
        return problem

    def derived(self, problem: Values) -> frozenset[str]:
        """The axes of a complete problem whose values are what the others make them by default."""
        return problems.derived(self.axes, problem)

    def varied(self, problem: Values, changes: Mapping[str, Value]) -> Values:
        """A complete problem with some values changed, and what follows from them by default derived anew.

        Raises:
            SpecError: as for `problem`.
        """
        dependent = problems.derived(self.axes, problem, keep=changes)
        given = {name: value for name, value in problem.items() if name not in dependent}
        return self.problem({**given, **changes})

    def static(self, problem: Values) -> Values:
        """The part of a problem that is compiled into the kernel."""
        return problem.only({axis.name for axis in self.axes if axis.static})

    def bucket(self, problem: Values) -> Values:
        """The bucket that a problem's winner is kept under."""
        return problems.bucket(self.axes, problem)

    def implementation(self, name: str) -> Implementation:
        for implementation in self.implementations:
            if implementation.name == name:
                return implementation
        names = [implementation.name for implementation in self.implementations]
        raise SpecError(f"{self.name}: {unknown('implementation', name, names)}")

    def is_library(self, variant: Variant) -> bool:
        """Whether a variant is a function of an installed package: nothing is compiled for it."""
        return self.implementation(variant.implementation).is_library

    def arguments(self, problem: Values) -> tuple[TensorArg | ScalarArg, ...]:
        """The signature's arguments that exist for a problem, in call order."""
        return tuple(arg for arg in self.signature if arg.when is None or arg.when(problem))

    def tolerance_of(self, output: str) -> Tolerance:
        if isinstance(self.tolerance, Tolerance):
            return self.tolerance
        return self.tolerance.get(output, Tolerance())


def misspelt_field(error: TypeError) -> tuple[str, str | None] | None:
    """For the TypeError of a wrong call of a declaration: a better message, and the field where it is misspelt."""
    for declared in (KernelSpec, Implementation, Axis, TensorArg, ScalarArg, Tunable, Constraint, Tolerance):
        if f"{declared.__name__}.__init__()" in str(error):
            known = list(inspect.signature(declared).parameters)
            for name in str(error).split("'")[1::2]:
                if name not in known:
                    return f"{declared.__name__} has {unknown('field', name, known)}", name
            return str(error).replace(".__init__() missing", " lacks").replace(".__init__()", ""), None
    return None
