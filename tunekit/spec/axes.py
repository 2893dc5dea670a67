"""The pieces of a declaration: axes, tunables, constraints, tolerances; each checks itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunekit.errors import SpecError, suggestion
from tunekit.model import Value

DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "float8_e4m3fn", "float8_e5m2")
Predicate = Callable[[Any], bool]
Derivation = Callable[[Any], Any]
"""An axis's value from the problem's other values; None where it does not follow from them."""
TYPES: dict[str, type] = {"dim": int, "dtype": str, "flag": bool, "name": str}
# A name is written on the command line, between spaces and commas.
WORD = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Axis:
    """One problem axis.

    `kind` is ``dim`` (an int), ``dtype``, ``flag`` (bool) or ``name`` (one of a few words). `values`
    lists what is allowed; dims may give `minimum` instead and take any int from
    there. A *static* axis is compiled into the kernel; the others are run-time
    sizes, which winners are bucketed over: ``exact``, or ``pow2``, which rounds
    up to a power of two. `edges` are sizes that verification tries besides the
    problem's own. `default` fills the axis where a problem leaves it out: a value, or a function
    of the problem's other values (None from it: there is no default for this problem).
    """

    name: str
    kind: Literal["dim", "dtype", "flag", "name"] = "dim"
    values: tuple[Value, ...] | None = None
    minimum: int = 1
    static: bool = False
    bucket: Literal["exact", "pow2"] = "exact"
    edges: tuple[int, ...] = ()
    default: Value | Derivation | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "axis")
        if self.kind not in TYPES:
            raise SpecError(f"kind is {self.kind!r}; it must be dim, dtype, flag or name", field=self.name)
        if self.kind == "flag" and self.values is None:
            object.__setattr__(self, "values", (False, True))
        if self.values is not None:
            object.__setattr__(self, "values", check_values(self.name, self.values))
        elif self.kind in ("dtype", "name"):
            raise SpecError(f"a {self.kind} axis must list its values", field=self.name)
        if self.kind == "name":
            for value in self.values or ():
                if not isinstance(value, str) or not WORD.fullmatch(value):
                    raise SpecError(f"{value!r} is no word (letters, digits, _ . -)", field=self.name)
        if self.bucket not in ("exact", "pow2"):
            raise SpecError(f"bucket is {self.bucket!r}; it must be exact or pow2", field=self.name)
        object.__setattr__(self, "edges", tuple(self.edges))
        if self.edges and self.kind != "dim":
            raise SpecError(f"has edges, but it is a {self.kind}, not a dim", field=self.name)
        if self.default is not None and not callable(self.default):
            self.check(self.default)

    def check(self, value: object) -> None:
        """Raise SpecError unless `value` is allowed on this axis."""
        wanted = TYPES[self.kind]
        if type(value) is not wanted:
            raise SpecError(f"{value!r} is {type(value).__name__}, not {wanted.__name__}", field=self.name)
        if self.values is not None and value not in self.values:
            allowed = ", ".join(str(v) for v in self.values)
            raise SpecError(f"{value} is not allowed (allowed: {allowed})", field=self.name)
        if self.kind == "dtype" and value not in DTYPES:
            raise SpecError(f"unknown dtype {value} (known: {', '.join(DTYPES)})", field=self.name)
        if self.kind == "dim" and self.values is None and isinstance(value, int) and value < self.minimum:
            raise SpecError(f"{value} is below the minimum {self.minimum}", field=self.name)

    def bucketed(self, value: Value) -> Value:
        """The bucket's representative: `value` itself, or the next power of two. What is no size (0, -1) is itself."""
        if self.bucket == "pow2" and isinstance(value, int) and value > 0:
            return 1 << (value - 1).bit_length()
        return value


@dataclass(frozen=True)
class Tunable:
    """One knob of an implementation and the values that it may take, in search order."""

    name: str
    values: tuple[Value, ...]

    def __init__(self, name: str, values: Sequence[Value]) -> None:
        check_name(name, "tunable")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "values", check_values(name, values))


@dataclass(frozen=True)
class Constraint:
    """A named rule over problem and tunables together; `why` completes "dropped because"."""

    name: str
    why: str
    holds: Predicate

    def __post_init__(self) -> None:
        if not self.name or not self.why or not callable(self.holds):
            raise SpecError("a constraint needs a name, a reason and a predicate", field=self.name or "constraints")


@dataclass(frozen=True)
class Tolerance:
    """What an output must reach against the oracle.

    `cosine`: smallest cosine similarity; `relative_norm`: largest
    ||out - ref|| / ||ref||. Where given, `max_abs`: largest absolute error; `relative`: largest
    |out - ref| / max(|ref|, 1); `rounding`: how many times the error of the spec's `rounded` oracle,
    which rounds as a kernel must, the error may be.
    """

    cosine: float = 0.9999
    relative_norm: float = 1e-2
    max_abs: float | None = None
    relative: float | None = None
    rounding: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.cosine <= 1) or not (self.relative_norm >= 0):
            raise SpecError("cosine must lie in (0, 1] and relative_norm be >= 0", field="tolerance")
        if self.relative is not None and not (self.relative >= 0):
            raise SpecError(f"relative is {self.relative}; it must be >= 0", field="tolerance")
        if self.rounding is not None and not (1 <= self.rounding < math.inf):
            raise SpecError(f"rounding is {self.rounding}; no kernel beats 1, the rounded oracle", field="tolerance")


def contains(values: tuple[Value, ...], value: object) -> bool:
    """Whether `value` is among `values`, telling True from 1."""
    return any(type(v) is type(value) and v == value for v in values)


def check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise SpecError(f"{what} name {name!r} is not an identifier", field=str(name))


def check_values(name: str, values: object) -> tuple[Value, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise SpecError(f"values must be a list, not {type(values).__name__}", field=name)
    if not values:
        raise SpecError("has no values", field=name)
    seen: set[Value] = set()
    for value in values:
        if not isinstance(value, (bool, int, float, str)):
            raise SpecError(f"{value!r} is {type(value).__name__}, not a bool, int, float or str", field=name)
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{value!r} is not finite", field=name)
        if type(value) is not type(values[0]):
            raise SpecError(f"mixes {type(values[0]).__name__} and {type(value).__name__}", field=name)
        if value in seen:
            raise SpecError(f"lists {value!r} twice", field=name)
        if isinstance(value, str) and not value.isprintable():
            raise SpecError(f"{value!r} holds characters that can't be printed", field=name)
        seen.add(value)
    return tuple(values)


def check_unique(things: Sequence[Any], what: str) -> None:
    names = [getattr(thing, "name", None) for thing in things]
    for name in names:
        if name is None:
            raise SpecError("holds something without a name", field=what)
        if names.count(name) > 1:
            raise SpecError(f"names {name} twice", field=what)


def unknown(what: str, name: str, known: Any) -> str:
    return f"unknown {what} '{name}'{suggestion(name, known)} (known: {', '.join(known)})"
