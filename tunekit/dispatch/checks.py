"""From a call in its normal form to a problem: what tensors and keywords say, checked against the signature.

Runs once per key of dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from tunekit.dispatch.calls import Given, Slots, said
from tunekit.dispatch.kinds import refusal
from tunekit.errors import SpecError, UserError
from tunekit.model import Value, Values
from tunekit.spec import KernelSpec, ScalarArg, TensorArg
from tunekit.spec.arguments import Shape, axis_and_offset, is_positive, shape_words
from tunekit.spec.problems import NotYetError, Partial, fill

ALIGNMENT_BYTES = 16
LARGEST_SIZE = 2**31 - 1
"""The largest size of a dim that a GPU's kernels take: CuTeDSL passes sizes as int32, and strides as int64, so a tensor
may have more elements than that."""
FLOATING = ("float32",)


class Call(NamedTuple):
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
    import torch

    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]  # sizes are tensors then
        raise UserError(f"torch.jit.trace would record nothing of {spec.name}: trace tunekit.torch_op instead")
    tensors = [
        (arg, value)
        for arg, value in zip(spec.signature, slots, strict=True)
        if isinstance(arg, TensorArg) and value is not None
    ]
    for arg, value in zip(spec.signature, slots, strict=True):
        if value is None and arg.when is None and isinstance(arg, TensorArg) and arg.role != "output":
            raise UserError(f"{spec.name} needs its {arg.role} '{arg.name}'")
    device = _common_device(spec, tensors)
    reading = Reading(spec, said(spec, given), lambda known: Partial(fill(spec.axes, known).known, spec.axis))
    problem = reading.problem(tensors)
    _check_layout(tensors)
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


class Reading:
    """The axes of one call as they become known: from keywords, then from tensors. `source` says where from.

    `known` are the axes given by keyword; `presume` makes of what is known a view in which the others are at their
    defaults.
    """

    def __init__(
        self, spec: KernelSpec, known: dict[str, Value], presume: Callable[[Mapping[str, Value]], Partial]
    ) -> None:
        self.spec = spec
        self.known = known
        self.source = {name: f"the keyword {name}" for name in known}
        self._presume = presume

    def problem(self, tensors: list[tuple[TensorArg, Any]]) -> Values:
        """The problem: axes given, then what shapes and dtypes say, then the spec's defaults.

        Raises:
            UserError: tensors that don't fit each other, the axes given or the spec.
        """
        used = self.read(tensors)
        for name, place in self.source.items():
            if self.known[name] == 0 and self.spec.axis[name].kind == "dim":
                try:
                    self.spec.axis[name].check(0)
                except SpecError as error:
                    raise UserError(
                        f"{place} makes {name} 0: {error.message}. There is nothing to compute: skip the call"
                    ) from None
        problem = self.spec.problem(self.known)
        for arg, shape in used:
            if arg.dims(problem) != shape:
                raise UserError(
                    f"'{arg.name}' was read as {shape_words(shape)}, but for {problem.implying(())} it is "
                    f"{shape_words(arg.dims(problem))}: give the axes that this depends on by keyword"
                )
        return problem

    def read(self, tensors: list[tuple[TensorArg, Any]]) -> list[tuple[TensorArg, Shape]]:
        """Take the axes that the tensors show; returns the form in which each was read.

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
            try:
                shape = arg.dims(self._presume(self.known))
            except NotYetError as missing:
                raise UserError(
                    f"the shape of '{arg.name}' depends on {missing.axis}, which nothing in the call states: "
                    f"give {missing.axis}=... by keyword"
                ) from None
            self._read(arg, tensor, shape)
            used.append((arg, shape))
        return used

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
    """Whether a tensor lies in memory as every artifact takes it: contiguous, 16-byte aligned, and there at all."""
    at = tensor.data_ptr() if tensor.is_contiguous() else 0
    return bool(at) and not at % ALIGNMENT_BYTES and not tensor.is_neg()


def _check_layout(tensors: list[tuple[TensorArg, Any]]) -> None:
    """Refuse strides, addresses and sizes that no artifact takes."""
    for arg, tensor in tensors:
        if tensor.is_cuda and max(tensor.shape, default=0) > LARGEST_SIZE:
            raise UserError(
                f"'{arg.name}' has a dim of {max(tensor.shape)} (shape {tuple(tensor.shape)}); a GPU kernel's sizes "
                f"go up to {LARGEST_SIZE} (int32): split the call"
            )
        if not tensor.is_contiguous():
            raise UserError(
                f"'{arg.name}' is not contiguous (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}); "
                f"pass {arg.name}.contiguous()"
            )
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            raise UserError(
                f"'{arg.name}' starts {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a {ALIGNMENT_BYTES}-byte "
                f"boundary (storage offset {tensor.storage_offset()}); pass {arg.name}.clone()"
            )


def _check_scalar(spec: KernelSpec, arg: ScalarArg, value: Any) -> None:
    """Refuse what is no number. Numpy's are: TVM-FFI hands them on as Python's, so that the hot path can't tell."""
    if value is None:
        return
    is_float = arg.dtype in FLOATING
    if isinstance(value, bool) or not isinstance(value, Real if is_float else Integral):
        kinds = "a float or int" if is_float else "an int"
        raise UserError(f"{spec.name}'s '{arg.name}' is {type(value).__name__}; it must be {kinds}")
    bits, most = int(value).bit_length() if isinstance(value, Integral) else 0, 1023 if is_float else 63
    if bits > most:
        raise UserError(f"{spec.name}'s '{arg.name}' is an int of {bits} bits; {most} is the most")
    if arg.positive and not is_positive(value):
        raise UserError(f"{spec.name}'s '{arg.name}' is {value}; it must be above 0, and a normal float32")


def _common_device(spec: KernelSpec, tensors: list[tuple[TensorArg, Any]]) -> int:
    """The index of the one device that all tensors lie on."""
    if not tensors:
        raise UserError(f"{spec.name} got no tensor")
    for arg, tensor in tensors:
        refused = refusal(arg.name, tensor)
        if refused is not None:
            raise UserError(refused)
    first_arg, first = tensors[0]
    for arg, tensor in tensors[1:]:
        if tensor.device != first.device:
            raise UserError(f"'{arg.name}' is on {tensor.device}, but '{first_arg.name}' is on {first.device}")
    return int(first.get_device())
