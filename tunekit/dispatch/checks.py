"""From a call in its normal form to a problem: what tensors and keywords say, checked against the signature.

Runs once per key of dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunekit.dispatch.calls import Given, Slots, said
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.spec import KernelSpec, ScalarArg, TensorArg
from tunekit.spec.arguments import Shape, axis_and_offset, shape_words
from tunekit.spec.problems import NotYetError, Partial, fill

ALIGNMENT_BYTES = 16
FLOATING = ("float32",)


@dataclass(frozen=True)
class Call:
    """A call that has been checked: its complete problem, its device and its arguments.

    `problem` is complete; `device` is torch's index, -1 for the CPU; `arguments`
    are the signature's entries that exist for this problem, as (slot, argument).
    """

    problem: Values
    device: int
    arguments: tuple[tuple[int, TensorArg | ScalarArg], ...]


def check(spec: KernelSpec, slots: Slots, given: Given) -> Call:
    """The problem that a call states, with every argument checked against it.

    Raises:
        UserError: what is wrong, with the argument, the axis and both sizes.
    """
    tensors = [
        (arg, value)
        for arg, value in zip(spec.signature, slots, strict=True)
        if isinstance(arg, TensorArg) and value is not None
    ]
    for arg, value in zip(spec.signature, slots, strict=True):
        if value is None and arg.when is None and isinstance(arg, TensorArg) and arg.role != "output":
            raise UserError(f"{spec.name} needs its {arg.role} '{arg.name}'")
    device = _common_device(spec, tensors)
    problem = _Reading(spec, given).problem(tensors)
    existing = {arg.name for arg in spec.arguments(problem)}
    arguments: list[tuple[int, TensorArg | ScalarArg]] = []
    for slot, arg in enumerate(spec.signature):
        value = slots[slot]
        if arg.name not in existing:
            if value is not None:
                raise UserError(f"{spec.name} takes no '{arg.name}' for {problem.implying(())}")
            continue
        if isinstance(arg, ScalarArg):
            _check_scalar(spec, arg, value)
        elif value is None and arg.role != "output":
            raise UserError(f"{spec.name} needs its {arg.role} '{arg.name}' for {problem.implying(())}")
        arguments.append((slot, arg))
    return Call(problem, device, tuple(arguments))


class _Reading:
    """The axes of one call as they become known: from keywords, then from tensors. `source` says where from."""

    def __init__(self, spec: KernelSpec, given: Given) -> None:
        self.spec = spec
        self.known = said(spec, given)
        self.source = {name: f"the keyword {name}" for name in self.known}

    def problem(self, tensors: list[tuple[TensorArg, Any]]) -> Values:
        """The problem: axes given, then what shapes and dtypes say, then the spec's defaults.

        A tensor of several forms is read once what its predicates ask for is known; where that takes
        defaults, after all others.
        """
        used: list[tuple[TensorArg, Shape]] = []
        waiting = tensors
        while waiting:
            view = Partial(self.known, self.spec.axis)
            left = [pair for pair in waiting if not self._read_if_known(pair, view, used)]
            if len(left) == len(waiting):
                break
            waiting = left
        for arg, tensor in waiting:
            view = Partial(fill(self.spec.axes, self.known).known, self.spec.axis)
            try:
                shape = arg.dims(view)
            except NotYetError as missing:
                raise UserError(
                    f"the shape of '{arg.name}' depends on {missing.axis}, which nothing in the call states: "
                    f"give {missing.axis}=... by keyword"
                ) from None
            self._read(arg, tensor, shape)
            used.append((arg, shape))
        problem = self.spec.problem(self.known)
        for arg, shape in used:
            if arg.dims(problem) != shape:
                raise UserError(
                    f"'{arg.name}' was read as {shape_words(shape)}, but for {problem.implying(())} it is "
                    f"{shape_words(arg.dims(problem))}: give the axes that this depends on by keyword"
                )
        _check_layout(tensors)
        return problem

    def _read_if_known(self, pair: tuple[TensorArg, Any], view: Partial, used: list[tuple[TensorArg, Shape]]) -> bool:
        arg, tensor = pair
        try:
            shape = arg.dims(view)
        except NotYetError:
            return False
        self._read(arg, tensor, shape)
        used.append((arg, shape))
        return True

    def _read(self, arg: TensorArg, tensor: Any, dims: Shape) -> None:
        """Take the axes from a tensor's shape and dtype."""
        shape = tuple(tensor.shape)
        if len(shape) != len(dims):
            others = [shape_words(other) for other in arg.shapes() if other != dims and len(other) == len(shape)]
            hint = f"; it is {' or '.join(others)} for other problems" if others else ""
            raise UserError(
                f"'{arg.name}' has {len(shape)} dims {shape}, not the {len(dims)} of {shape_words(dims)}{hint}"
            )
        for position, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            place = f"'{arg.name}' dim {position}"
            if isinstance(dim, int):
                if size != dim:
                    raise UserError(f"{place} is {size}; it must be {dim}")
                continue
            name, offset = axis_and_offset(dim)
            if self.known.setdefault(name, size - offset) != size - offset:
                known, source = self.known[name], self.source[name]
                raise UserError(f"{place} ({dim}) is {size}, but {name} is {known} by {source}")
            self.source.setdefault(name, place)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if arg.dtype not in self.spec.axis:
            if dtype != arg.dtype:
                raise UserError(f"'{arg.name}' is {dtype}; it must be {arg.dtype}")
            return
        if self.known.setdefault(arg.dtype, dtype) != dtype:
            raise UserError(
                f"'{arg.name}' ({arg.dtype}) is {dtype}, but {arg.dtype} is {self.known[arg.dtype]} by "
                f"{self.source[arg.dtype]}"
            )
        self.source.setdefault(arg.dtype, f"'{arg.name}'")


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
