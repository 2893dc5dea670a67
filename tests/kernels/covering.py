"""Choosing kernels of a spec's space so that every value of every static axis and tunable is met: of any spec.

A *kernel* is what one compile makes: the static axes' values and the tunables'. Both are factors; a value of a factor
is met when some chosen kernel has it, a pair of values when one has both. Kernels that nothing forbids are found by a
search that asks a broken constraint which values it read, and changes one of those.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunekit import identity
from tunekit.arch import Arch
from tunekit.errors import SpecError
from tunekit.model import Value, Values, Variant
from tunekit.space import misfit
from tunekit.spec import Axis, Implementation, KernelSpec
from tunekit.spec.problems import complete

# What the search may give a dim that lists no values, besides those of its declaration and of the problems given.
SIZES = (1, 64, 128)
STEPS = 4

Kernel = tuple[Values, Variant]
"""A problem and a variant for it."""
Meeting = tuple[str, Value]


@dataclass(frozen=True)
class Choice:
    """Kernels, and what they don't meet. `barred`: the values that none was found for, each with the rules that the
    search broke, most often broken first.

    `pairs` of `all_pairs` pairs of values are met; the latter has impossible ones too.
    """

    kernels: tuple[Kernel, ...]
    barred: Mapping[Meeting, tuple[str, ...]]
    pairs: int
    all_pairs: int


class Reading(Values):
    """Values that remember which of them were asked for."""

    __slots__ = ("read",)
    read: set[str]

    def __init__(self, items: Mapping[str, Value]) -> None:
        super().__init__(items)
        object.__setattr__(self, "read", set())

    def __getitem__(self, name: str) -> Value:
        self.read.add(name)
        return super().__getitem__(name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self.read.add(name)
        return super().__getattr__(name)

    def merged(self, other: Mapping[str, Value]) -> Reading:
        """Of a rule that is another implementation's, with some values given: what it asks for counts here too."""
        both = Reading(super().merged(other))
        object.__setattr__(both, "read", self.read)
        return both


@dataclass
class Space:
    """The kernels of one implementation on one architecture, as points that a search walks over.

    A point has the values that are given: the problem's, but for what follows from them, and the tunables'. `problems`
    are where the search begins; the sizes that they have count as values. `over_tunables` tells whether the tunables
    are factors as the static axes are.
    """

    spec: KernelSpec
    implementation: Implementation
    arch: Arch
    problems: Sequence[Values]
    seed: int = 0
    over_tunables: bool = True
    blame: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed} {self.implementation.name} {self.arch.name}")
        self.tunables = {tunable.name: tunable.values for tunable in self.implementation.tunables}
        static = {axis.name: self._values(axis, ()) for axis in self.spec.axes if axis.static}
        factors = {**static, **self.tunables} if self.over_tunables else static
        self.factors = {name: values for name, values in factors.items() if len(values) > 1}
        free = [axis for axis in self.spec.axes if axis.static or not callable(axis.default)]
        self.values = {**{axis.name: self._values(axis, SIZES) for axis in free}, **self.tunables}

    def _values(self, axis: Axis, more: Sequence[int]) -> tuple[Value, ...]:
        """What an axis may be: what it lists, or its default, its edges, what the problems have, and `more`."""
        if axis.values is not None:
            return axis.values
        default = () if axis.default is None or callable(axis.default) else (axis.default,)
        found = [*default, *axis.edges, *(problem[axis.name] for problem in self.problems), *more]
        return tuple(dict.fromkeys(value for value in found if isinstance(value, int) and value >= axis.minimum))

    def starts(self) -> Iterator[dict[str, Value]]:
        """A point for each problem, of those that differ in their code, that the implementation has a default for."""
        for problem in {self.spec.static(problem): problem for problem in self.problems}.values():
            derived = self.spec.derived(problem)
            given = {name: value for name, value in problem.items() if name not in derived}
            for default in self.implementation.defaults:
                point = self.repaired({**given, **default}, frozenset(given))
                if point is not None:
                    yield point
                    break

    def problem(self, point: Mapping[str, Value]) -> Values:
        """The complete problem of a point."""
        return self.spec.problem({name: value for name, value in point.items() if name not in self.tunables})

    def kernel(self, point: Mapping[str, Value]) -> Kernel | None:
        """The kernel of a point; None if something forbids it."""
        if self._broken(point) is not None:
            return None
        problem, tunables = self.problem(point), Values({name: point[name] for name in self.tunables})
        spec = self.spec
        return problem, identity.variant(spec.name, spec.version, self.implementation.name, self.arch.name, tunables)

    def repaired(
        self, point: dict[str, Value], fixed: frozenset[str], depth: int = 4, budget: list[int] | None = None
    ) -> dict[str, Value] | None:
        """The point with other values than those `fixed` changed until nothing forbids it; None if none is found."""
        budget = [300] if budget is None else budget
        broken = self._broken(point)
        if broken is None:
            return point
        self.blame[broken[0]] += 1
        changes = [
            (name, value)
            for name in sorted(broken[1] - fixed)
            for value in self.values.get(name, ())
            if value != point.get(name) or type(value) is not type(point.get(name))
        ]
        self.random.shuffle(changes)
        first_steps = []  # that don't satisfy the rule alone: it may take two
        for name, value in changes if depth else ():
            if budget[0] <= 0:
                return None
            budget[0] -= 1
            changed = {**point, name: value}
            after = self._broken(changed)
            if after is not None and after[0] == broken[0]:
                first_steps.append((changed, name))
                continue
            found = self.repaired(changed, fixed | {name}, depth - 1, budget)
            if found is not None:
                return found
        for changed, name in first_steps if depth > 1 else ():
            found = self.repaired(changed, fixed | {name}, depth - 1, budget)
            if found is not None:
                return found
        return None

    def _broken(self, point: Mapping[str, Value]) -> tuple[str, set[str]] | None:
        """The first rule that a point breaks, and the names that it asked for."""
        given = {name: value for name, value in point.items() if name not in self.tunables}
        try:
            problem = self.spec.problem(given)
        except SpecError as error:
            return self._problem_fault(given, error)
        tunables = Values({name: point[name] for name in self.tunables})
        values = Reading({**problem, **tunables})
        for constraint in self.implementation.constraints:
            values.read.clear()
            if not constraint.holds(values):
                return constraint.name, set(values.read)
        words = misfit(self.implementation, self.arch, problem, tunables)
        if words is None:
            return None
        return ("workspace", set(point)) if words.startswith("workspace") else ("budget", set(self.tunables))

    def _problem_fault(self, given: Mapping[str, Value], error: SpecError) -> tuple[str, set[str]]:
        """The rule of the spec that values break: by their names, or by what the rule asks of the complete values."""
        try:
            values = Reading(complete(self.spec.axes, given))
        except SpecError:
            return error.message, set(given)
        for rule in self.spec.constraints:
            values.read.clear()
            if not rule.holds(values):
                return rule.name, set(values.read)
        return error.message, set(given)


def choose(space: Space, count: int, tries: int = 8) -> Choice:
    """Kernels that meet every value that can be met, and at least `count`, as far as there are pairs to be met: each is
    the one of `tries` that meets most that is new."""
    chosen = _Chosen(space)
    values = [(name, value) for name in space.factors for value in space.factors[name]]
    space.random.shuffle(values)
    for meeting in values:
        if meeting not in chosen.met:
            space.blame.clear()
            chosen.add_best((meeting,), tries)
            if meeting not in chosen.met:
                chosen.barred[meeting] = tuple(name for name, _ in space.blame.most_common())
    pairs = [pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]]
    for pair in pairs:
        if len(chosen.kernels) >= count:
            break
        if frozenset(pair) not in chosen.pairs and not any(meeting in chosen.barred for meeting in pair):
            chosen.add_best(pair, tries)
    return Choice(tuple(chosen.kernels), chosen.barred, len(chosen.pairs), len(pairs))


class _Chosen:
    """The kernels chosen so far, and what they meet."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.kernels: list[Kernel] = []
        self.points = list(space.starts())
        self.met: set[Meeting] = set()
        self.pairs: set[frozenset[Meeting]] = set()
        self.barred: dict[Meeting, tuple[str, ...]] = {}

    def add_best(self, wanted: Sequence[Meeting], tries: int) -> None:
        """Of some random kernels with the values wanted, the one that meets most new values, then most new pairs."""
        made = [point for point in (self._with(wanted) for _ in range(tries)) if point is not None]
        best = max(made, key=self._new, default=None) or self._near(wanted)
        kernel = None if best is None else self.space.kernel(best)
        if best is not None and kernel is not None and not self._pairs(best) <= self.pairs:
            self.kernels.append(kernel)
            self.points.append(best)
            self.met.update(self._meetings(best))
            self.pairs |= self._pairs(best)

    def _with(self, wanted: Sequence[Meeting]) -> dict[str, Value] | None:
        """A random point with the values wanted: some random steps and those, from a point known to be valid."""
        space = self.space
        if not self.points:
            return None
        point = space.random.choice(self.points)
        for name in space.random.sample(list(space.factors), min(STEPS, len(space.factors))):
            step = {**point, name: space.random.choice(space.factors[name])}
            point = space.repaired(step, frozenset((name,)), depth=2, budget=[30]) or point
        return space.repaired({**point, **dict(wanted)}, frozenset(name for name, _ in wanted))

    def _near(self, wanted: Sequence[Meeting]) -> dict[str, Value] | None:
        """A valid point with the values wanted, from any of the known ones: before they are given up."""
        fixed = frozenset(name for name, _ in wanted)
        found = (self.space.repaired({**point, **dict(wanted)}, fixed, depth=6, budget=[2000]) for point in self.points)
        return next((point for point in found if point is not None), None)

    def _new(self, point: Mapping[str, Value]) -> tuple[int, int]:
        return len(set(self._meetings(point)) - self.met), len(self._pairs(point) - self.pairs)

    def _meetings(self, point: Mapping[str, Value]) -> list[Meeting]:
        """Each factor with its value in a point's kernel."""
        problem = self.space.problem(point)
        return [(name, point[name] if name in self.space.tunables else problem[name]) for name in self.space.factors]

    def _pairs(self, point: Mapping[str, Value]) -> set[frozenset[Meeting]]:
        return {frozenset(pair) for pair in itertools.combinations(self._meetings(point), 2)}
