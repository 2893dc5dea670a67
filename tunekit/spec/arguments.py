"""A kernel's arguments: tensors, whose shapes are made of the problem's axes, and numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from tunekit.errors import SpecError
from tunekit.model import Values
from tunekit.spec.axes import Predicate, check_name

Shape = tuple[str | int, ...]
"""A size for each dim: an int, the name of an axis, or an axis and a constant, as in ``batch + 1``."""
DIM = re.compile(r"\s*([^\W\d]\w*)\s*(?:([+-])\s*(\d+)\s*)?")


@dataclass(frozen=True)
class TensorArg:
    """A tensor of the kernel's signature.

    `shape` names problem axes (also ``"batch + 1"``) or gives ints; `dtype` names a dtype axis or a
    dtype. `forms` are other shapes, each with a predicate of the problem: the first that holds gives the
    shape. `when` tells for which problems the argument exists. `valid` declares
    the region of an output that must be written, a slice per dim; outside it
    anything goes. Outputs that the caller does not pass are allocated.
    """

    name: str
    shape: Shape
    dtype: str
    role: Literal["input", "output", "inout"] = "input"
    when: Predicate | None = None
    valid: Callable[[Any], tuple[slice, ...]] | None = None
    forms: tuple[tuple[Predicate, Shape], ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "tensor")
        if self.role not in ("input", "output", "inout"):
            raise SpecError(f"role is {self.role!r}; it must be input, output or inout", field=self.name)
        object.__setattr__(self, "shape", _checked_shape(self.name, self.shape))
        forms = []
        for form in self.forms:
            if not isinstance(form, tuple) or len(form) != 2 or not callable(form[0]):
                raise SpecError(f"a form is a pair (predicate, shape), not {form!r}", field=self.name)
            forms.append((form[0], _checked_shape(self.name, form[1])))
        object.__setattr__(self, "forms", tuple(forms))

    def dims(self, values: Any) -> Shape:
        """The shape's axes and numbers for a problem; of one that is not complete, what the predicates ask for."""
        for holds, shape in self.forms:
            if holds(values):
                return shape
        return self.shape

    def sizes(self, values: Values) -> tuple[int, ...]:
        """The shape for a problem."""
        return tuple(size_of(dim, values) for dim in self.dims(values))

    def shapes(self) -> Iterator[Shape]:
        """Every shape that it may have."""
        yield self.shape
        for _, shape in self.forms:
            yield shape

    def dtype_of(self, values: Values) -> str:
        return str(values[self.dtype]) if self.dtype in values else self.dtype


@dataclass(frozen=True)
class ScalarArg:
    """A run-time number of the signature, with its default as a function of the problem.

    `positive`: the kernels are right for no other, and calls are refused that give one.
    """

    name: str
    default: Callable[[Any], float]
    dtype: Literal["float32", "int32", "int64"] = "float32"
    when: Predicate | None = None
    positive: bool = False

    def __post_init__(self) -> None:
        check_name(self.name, "scalar")
        if type(self.positive) is not bool:
            raise SpecError(f"positive is {self.positive!r}; it must be a bool", field=self.name)


SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of the normal float32 above 0. GPUs' fast arithmetic takes what is smaller for 0."""


def is_positive(number: Real | float) -> bool:
    """Whether a number is above 0 where a kernel reads it, and finite there; NaN is not."""
    # numpy's small floats would round the bounds to their own type.
    return SMALLEST <= (int(number) if isinstance(number, Integral) else float(number)) <= LARGEST


@functools.cache
def axis_and_offset(dim: str) -> tuple[str, int]:
    """``("batch", 1)`` of ``batch + 1``."""
    match = DIM.fullmatch(dim)
    if match is None:
        raise SpecError(f"'{dim}' is no dim: it is an axis, or an axis + or - a number")
    name, sign, number = match.groups()
    return name, int(f"{sign}{number}") if sign else 0


def size_of(dim: str | int, values: Values) -> int:
    """A dim's size for a problem."""
    if isinstance(dim, int):
        return dim
    name, offset = axis_and_offset(dim)
    return int(values[name]) + offset


def shape_words(shape: Shape) -> str:
    """A shape as messages show it."""
    return f"[{', '.join(str(dim) for dim in shape)}]"


def _checked_shape(name: str, shape: object) -> Shape:
    if isinstance(shape, str) or not isinstance(shape, (tuple, list)):
        raise SpecError(f"shape is {shape!r}; it must be a tuple of axes and ints", field=name)
    for dim in shape:
        if isinstance(dim, str):
            try:
                axis_and_offset(dim)
            except SpecError as error:
                raise SpecError(error.message, field=name) from None
        elif type(dim) is not int:
            raise SpecError(f"shape holds {dim!r}; it must hold axes and ints", field=name)
    return tuple(shape)
