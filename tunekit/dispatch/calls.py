"""Calls: how what a caller passes becomes the signature's arguments and a problem.

A call is brought into one normal form (:class:`Call`) however it was written, so
that positional, keyword and shuffled calls share a key. All of this module but
:meth:`CallForm.arrange` runs once per key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunekit.errors import UserError
from tunekit.model import Value, Values
from tunekit.spec import KernelSpec, ScalarArg, TensorArg

ALIGNMENT_BYTES = 16
FLOATING = ("float32",)

Slots = tuple[Any, ...]
"""An argument per entry of the signature, None where it was not given."""
Given = tuple[tuple[str, type, Value], ...]
"""The problem axes given as keywords, in the spec's order: name, type, value."""


@dataclass(frozen=True)
class Call:
    """A call that has been checked: its complete problem, its device and its arguments.

    `problem` is complete; `device` is torch's index, -1 for the CPU; `arguments`
    are the signature's entries that exist for this problem, as (slot, argument).
    """

    problem: Values
    device: int
    arguments: tuple[tuple[int, TensorArg | ScalarArg], ...]


class CallForm:
    """The call form of one spec: its arguments by position and name, its problem axes by name."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.names = tuple(arg.name for arg in spec.signature)
        self.blank: Slots = (None,) * len(self.names)
        conditional = [slot for slot, arg in enumerate(spec.signature) if arg.when is not None]
        self.leading = min(conditional, default=len(self.names))
        """How many arguments exist for every problem before one does not: of these, position i is slot i."""
        self._slot = {name: slot for slot, name in enumerate(self.names)}
        self._axes = tuple(axis.name for axis in spec.axes if axis.name not in self._slot)
        self._positions: dict[Given, tuple[int, ...]] = {}

    def arrange(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Slots, Given]:
        """The normal form of a call.

        Raises:
            UserError: an unknown or repeated argument, or too many of them.
        """
        given: Given = ()
        if keywords:
            given = tuple(
                (name, type(keywords[name]), keywords[name]) for name in self._axes if keywords.get(name) is not None
            )
        positions = range(self.leading) if len(args) <= self.leading else self._existing(given)
        if len(args) > len(positions):
            takes = ", ".join(self.names[slot] for slot in positions)
            raise UserError(f"{self.spec.name} takes {len(positions)} arguments ({takes}), not {len(args)}")
        slots = list(self.blank)
        for slot, value in zip(positions, args, strict=False):
            slots[slot] = value
        for name, value in keywords.items():
            slot = self._slot.get(name, -1)
            if slot >= 0:
                if slots[slot] is not None:
                    raise UserError(f"{self.spec.name} got '{name}' twice, by position and by keyword")
                slots[slot] = value
            elif name not in self._axes:
                known = ", ".join((*self.names, *self._axes))
                raise UserError(f"{self.spec.name} has no argument '{name}' (arguments and problem axes: {known})")
        return tuple(slots), given

    def _existing(self, given: Given) -> tuple[int, ...]:
        """The slots that positions stand for: of the arguments that exist under the flags given.

        An argument that depends on more than flags and defaults ends the list: it and
        all after it go by keyword.
        """
        found = self._positions.get(given)
        if found is None:
            known: dict[str, Value] = {a.name: a.default for a in self.spec.axes if a.default is not None}
            values = Values({**known, **{name: value for name, _, value in given}})
            slots: list[int] = []
            for slot, arg in enumerate(self.spec.signature):
                try:
                    exists = arg.when is None or arg.when(values)
                except (AttributeError, KeyError):
                    break
                if exists:
                    slots.append(slot)
            found = self._positions[given] = tuple(slots)
        return found

    def check(self, slots: Slots, given: Given) -> Call:
        """The problem that a call states, with every argument checked against it.

        Raises:
            UserError: what is wrong, with the argument, the axis and both sizes.
        """
        tensors = [
            (arg, value)
            for arg, value in zip(self.spec.signature, slots, strict=True)
            if isinstance(arg, TensorArg) and value is not None
        ]
        for arg, value in zip(self.spec.signature, slots, strict=True):
            if value is None and arg.when is None and isinstance(arg, TensorArg) and arg.role != "output":
                raise UserError(f"{self.spec.name} needs its {arg.role} '{arg.name}'")
        device = _common_device(self.spec, tensors)
        problem = self._problem(tensors, given)
        existing = {arg.name for arg in self.spec.arguments(problem)}
        arguments: list[tuple[int, TensorArg | ScalarArg]] = []
        for slot, arg in enumerate(self.spec.signature):
            value = slots[slot]
            if arg.name not in existing:
                if value is not None:
                    raise UserError(f"{self.spec.name} takes no '{arg.name}' for {problem}")
                continue
            if isinstance(arg, ScalarArg):
                _check_scalar(self.spec, arg, value)
            elif value is None and arg.role != "output":
                raise UserError(f"{self.spec.name} needs its {arg.role} '{arg.name}'")
            arguments.append((slot, arg))
        return Call(problem, device, tuple(arguments))

    def _problem(self, tensors: list[tuple[TensorArg, Any]], given: Given) -> Values:
        """The problem: axes given, then what shapes and dtypes say, then the spec's defaults."""
        known: dict[str, Value] = {}
        source: dict[str, str] = {}
        for name, _, value in given:
            known[name], source[name] = value, f"the keyword {name}"
        for arg, tensor in tensors:
            shape = tuple(tensor.shape)
            if len(shape) != len(arg.shape):
                declared = ", ".join(str(dim) for dim in arg.shape)
                raise UserError(f"'{arg.name}' has {len(shape)} dims {shape}, not the {len(arg.shape)} of [{declared}]")
            for position, (dim, size) in enumerate(zip(arg.shape, shape, strict=True)):
                place = f"'{arg.name}' dim {position}"
                if isinstance(dim, int):
                    if size != dim:
                        raise UserError(f"{place} is {size}; it must be {dim}")
                    continue
                if known.setdefault(dim, size) != size:
                    raise UserError(f"{place} ({dim}) is {size}, but {dim} is {known[dim]} by {source[dim]}")
                source.setdefault(dim, place)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if arg.dtype not in self.spec.axis:
                if dtype != arg.dtype:
                    raise UserError(f"'{arg.name}' is {dtype}; it must be {arg.dtype}")
                continue
            if known.setdefault(arg.dtype, dtype) != dtype:
                raise UserError(
                    f"'{arg.name}' ({arg.dtype}) is {dtype}, but {arg.dtype} is {known[arg.dtype]} by "
                    f"{source[arg.dtype]}"
                )
            source.setdefault(arg.dtype, f"'{arg.name}'")
        problem = self.spec.problem(known)
        _check_layout(tensors)
        return problem


def is_plain(tensor: Any) -> bool:
    """Whether a tensor lies in memory as every artifact takes it: contiguous, 16-byte aligned."""
    return bool(tensor.is_contiguous()) and not tensor.data_ptr() % ALIGNMENT_BYTES


def _check_layout(tensors: list[tuple[TensorArg, Any]]) -> None:
    for arg, tensor in tensors:
        if not tensor.is_contiguous():
            raise UserError(
                f"'{arg.name}' is not contiguous (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}); "
                f"pass {arg.name}.contiguous()"
            )
        if not is_plain(tensor):
            raise UserError(
                f"'{arg.name}' starts {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a {ALIGNMENT_BYTES}-byte "
                f"boundary (storage offset {tensor.storage_offset()}); pass {arg.name}.clone()"
            )


def _check_scalar(spec: KernelSpec, arg: ScalarArg, value: Any) -> None:
    if value is None:
        return
    wanted: tuple[type, ...] = (float, int) if arg.dtype in FLOATING else (int,)
    if isinstance(value, bool) or not isinstance(value, wanted):
        kinds = " or ".join(kind.__name__ for kind in wanted)
        raise UserError(f"{spec.name}'s '{arg.name}' is {type(value).__name__}; it must be a Python {kinds}")


def _common_device(spec: KernelSpec, tensors: list[tuple[TensorArg, Any]]) -> int:
    """The index of the one device that all tensors lie on."""
    import torch

    if not tensors:
        raise UserError(f"{spec.name} got no tensor")
    for arg, tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"'{arg.name}' is {type(tensor).__name__}, not a torch.Tensor")
        if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
            raise UserError(
                f"'{arg.name}' is a {tensor.layout} tensor on {tensor.device}; dense, on cpu or cuda is served"
            )
    first_arg, first = tensors[0]
    for arg, tensor in tensors[1:]:
        if tensor.device != first.device:
            raise UserError(f"'{arg.name}' is on {tensor.device}, but '{first_arg.name}' is on {first.device}")
    return int(first.get_device())
