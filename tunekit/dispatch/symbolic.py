"""The outputs of a call whose sizes may be symbols: what torch.compile asks for while it traces.

Sizes stay what the tensors give, so that a dynamic shape is not fixed by being looked at; only flags and the axes that
the spec's predicates ask for are looked into. Whether a kernel takes the call is checked when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunekit.dispatch.calls import Slots
from tunekit.dispatch.checks import Reading
from tunekit.errors import UserError
from tunekit.model import Value
from tunekit.spec import KernelSpec, TensorArg
from tunekit.spec.arguments import axis_and_offset
from tunekit.spec.axes import Axis
from tunekit.spec.problems import NotYetError, Partial

Output = tuple[tuple[Any, ...], str]
"""An output's sizes, ints or symbols, and its dtype by name."""


class Presumed(Partial):
    """What is known of a problem, and each other axis at its default, derived when it is asked for and not checked."""

    def __init__(self, known: Mapping[str, Value], axes: Mapping[str, Axis]) -> None:
        super().__init__(known, axes)
        self._axis = axes
        self._asked: list[str] = []

    def __getitem__(self, name: str) -> Value:
        try:
            return super().__getitem__(name)
        except NotYetError:
            default = self._axis[name].default
            if default is None or name in self._asked:  # of two that are derived from each other, neither is there
                raise
        if not callable(default):
            return default
        self._asked.append(name)
        try:
            value: Value | None = default(self)
        finally:
            self._asked.pop()
        if value is None:
            raise NotYetError(name)
        return value


def outputs_of(spec: KernelSpec, slots: Slots, axes: Mapping[str, Any]) -> list[Output]:
    """The outputs of a call in the signature's order, as the kernel allocates them.

    `slots` has an argument per entry of the signature, None where it was not given; `axes` those given by keyword.

    Raises:
        UserError: tensors that don't fit each other or the spec; or nothing tells what an output looks like.
    """
    reading = Reading(spec, dict(axes), lambda known: Presumed(known, spec.axis))
    reading.read(
        [
            (arg, value)
            for arg, value in zip(spec.signature, slots, strict=True)
            if isinstance(arg, TensorArg) and value is not None
        ]
    )
    problem = Presumed(reading.known, spec.axis)
    try:
        return [
            (_sizes(arg, problem), str(problem[arg.dtype]) if arg.dtype in spec.axis else arg.dtype)
            for arg in spec.signature
            if isinstance(arg, TensorArg) and arg.role == "output" and (arg.when is None or arg.when(problem))
        ]
    except NotYetError as missing:
        raise UserError(
            f"the outputs of {spec.name} depend on {missing.axis}, which nothing in the call states: "
            f"give {missing.axis}=... by keyword"
        ) from None


def _sizes(arg: TensorArg, problem: Presumed) -> tuple[Any, ...]:
    sizes: list[Any] = []
    for dim in arg.dims(problem):
        if isinstance(dim, int):
            sizes.append(dim)
        else:
            name, offset = axis_and_offset(dim)
            size: Any = problem[name]
            sizes.append(size + offset if offset else size)
    return tuple(sizes)
