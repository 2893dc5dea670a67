"""``tunekit.torch_op``: a served kernel as a custom operator of torch, for torch.compile and whatever else traces.

The operator ``torch.ops.tunekit.NAME`` takes the signature's inputs and numbers, then the spec's axes by keyword, each
optional where a call of the kernel may leave it out. It allocates its outputs and returns them as a list, since flags
say how many there are; with in-place arguments as a tensor or a tuple, for torch traces no list beside those. It
computes forward only, and autocast passes it by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.dispatch.calls import CallForm, Slots
from tunekit.dispatch.checks import FLOATING
from tunekit.dispatch.forked import Guard
from tunekit.dispatch.kernel import Kernel
from tunekit.dispatch.loading import load
from tunekit.dispatch.symbolic import outputs_of
from tunekit.errors import UserError, words_of
from tunekit.model import Value
from tunekit.spec import KernelSpec, ScalarArg, TensorArg, absolute_reference
from tunekit.spec.axes import Axis
from tunekit.spec.inputs import torch_dtype

if TYPE_CHECKING:
    import torch

NAMESPACE = "tunekit"
BACKENDS = ("CPU", "CUDA")
LIST = "Tensor[]"

_ops: dict[str, TorchOp] = {}
"""The operators of this process, by spec name."""
_registering = Guard()


def torch_op(name: str | Path, **options: Any) -> TorchOp:
    """The custom operator of the spec `name`, registered when it is first asked for; call it like the kernel.

    `name` and `options` are those of :func:`tunekit.load`. A process has one operator a spec name, with the options of
    the first call: asked for again with the same ones, it is the same.

    Raises:
        UserError: no such spec; it was registered from another file or with other options; or torch
            takes no operator of such a name or signature.
    """
    reference = absolute_reference(str(name))
    asked = {key: value for key, value in options.items() if value is not None}
    with _registering:
        for op in _ops.values():
            if (op.reference, op.options) == (reference, asked):
                return op
        kernel = load(name, **options)
        known = _ops.get(kernel.spec.name)
        if known is not None:
            raise UserError(
                f"torch.ops.{NAMESPACE}.{kernel.spec.name} is registered from {known.reference} with "
                f"{_options_words(known.options)}, and a process has one: it can't be had from {reference} with "
                f"{_options_words(asked)}"
            )
        made = _ops[kernel.spec.name] = TorchOp(kernel, reference, asked)
    return made


class TorchOp:
    """A kernel's custom operator. Call it as the kernel, but for outputs, which it always allocates.

    Returns one tensor, a tuple in the signature's order, or None where all outputs are in-place. `op` is
    torch's overload, `kernel` what serves it in eager calls, `reference` and `options` what it was loaded with.
    """

    def __init__(self, kernel: Kernel, reference: str, options: dict[str, Any]) -> None:
        import torch

        spec = kernel.spec
        self.kernel = kernel
        self.reference = reference
        self.options = options
        self._library, self.op = _register(kernel)
        self._names = tuple(entry.name for entry in (*spec.signature, *spec.axes))
        self._outputs = tuple(arg.name for arg in spec.signature if _is_output(arg))
        self._is_list = _returns(spec) == LIST
        always = itertools.takewhile(lambda arg: arg.when is None, spec.signature)
        self._leading = tuple(arg.name for arg in always)
        self._static = tuple(axis.name for axis in spec.axes if axis.static)
        compiler: Any = torch.compiler  # of no types
        self._positions = compiler.assume_constant_result(_positions_of(CallForm(spec), self._static))

    def __repr__(self) -> str:
        return f"<torch.ops.{NAMESPACE}.{self.kernel.spec.name}>"

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        named = {}
        for name, value in keywords.items():
            if name not in self._names:
                raise UserError(f"{self.kernel.spec.name} has no argument '{name}' (known: {', '.join(self._names)})")
            if value is not None:
                named[name] = value
        if args:
            names = self._leading
            if len(args) > len(names):
                names = self._positions(len(args), *[named.get(axis) for axis in self._static])
            for name, value in zip(names, args, strict=False):
                if value is not None:
                    if name in named:
                        raise UserError(f"{self.kernel.spec.name} got '{name}' twice, by position and by keyword")
                    named[name] = value
        for name in self._outputs:
            if name in named:
                raise UserError(f"{self!r} allocates its outputs: leave out '{name}'")
        outputs = self.op(**named)
        if not self._is_list:
            return outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _positions_of(form: CallForm, static: tuple[str, ...]) -> Callable[..., tuple[str, ...]]:
    """What the positions of a call stand for: a function of their number and of the static axes given (None: not).

    It runs the spec's predicates, which torch.compile need not look into: for the same flags it is the same.
    """

    def positions(count: int, *values: Value | None) -> tuple[str, ...]:
        given = {name: value for name, value in zip(static, values, strict=True) if value is not None}
        slots = form.arrange(tuple(range(count)), given)[0]
        taken = {place: name for name, place in zip(form.names, slots, strict=True) if place is not None}
        return tuple(taken[place] for place in range(count))

    return positions


def _register(kernel: Kernel) -> tuple[Any, Any]:
    """Define a kernel's operator and what it does: computing, and tracing; the library must stay alive with it.

    Raises:
        UserError: torch takes no operator of this name or signature.
    """
    import torch

    spec = kernel.spec
    name, order = f"{NAMESPACE}::{spec.name}", _order(spec)
    names = tuple(arg.name for arg in order)

    def by_name(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(names, args, strict=False)), **keywords}
        return {key: value for key, value in given.items() if value is not None}

    returns = _returns(spec)

    def compute(*args: Any, **keywords: Any) -> Any:
        outputs = kernel(**by_name(args, keywords))
        if returns != LIST:
            return outputs
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

    def fake(*args: Any, **keywords: Any) -> Any:
        given = by_name(args, keywords)
        slots: Slots = tuple(given.pop(arg.name, None) for arg in spec.signature)
        like = next((value for value in slots if isinstance(value, torch.Tensor)), None)
        if like is None:
            raise UserError(f"{spec.name} got no tensor")
        outputs = [like.new_empty(sizes, dtype=torch_dtype(dtype)) for sizes, dtype in outputs_of(spec, slots, given)]
        if returns == LIST:
            return outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    def forward_only(*args: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            for key, value in by_name(args, keywords).items():
                if isinstance(value, torch.Tensor) and (value.requires_grad or _has_tangent(value)):
                    raise UserError(
                        f"'{key}' asks for a gradient, and {name} computes forward only: call it under "
                        f"torch.no_grad() or torch.inference_mode(), or pass {key}.detach()"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **keywords)

    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        library.define(
            f"{spec.name}({_schema(spec, order)}) -> {returns}",
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
        )
    except RuntimeError as error:
        raise UserError(f"torch takes no operator {name}: {words_of(error)}") from error
    for backend in BACKENDS:
        library.impl(spec.name, compute, backend)
    library.impl(spec.name, forward_only, "Autograd")
    torch.library.register_fake(name, fake, lib=library)
    op = getattr(getattr(torch.ops, NAMESPACE), spec.name).default
    return library, op


def _order(spec: KernelSpec) -> list[TensorArg | ScalarArg]:
    """The operator's arguments: the signature's but for outputs, those that every call has first."""
    kept = [arg for arg in spec.signature if not _is_output(arg)]
    return sorted(kept, key=lambda arg: isinstance(arg, ScalarArg) or arg.when is not None)


def _schema(spec: KernelSpec, order: list[TensorArg | ScalarArg]) -> str:
    """The operator's arguments as torch's schemas write them."""
    parts: list[str] = []
    for number, arg in enumerate(order):
        if isinstance(arg, ScalarArg):
            parts.append(f"{'float' if arg.dtype in FLOATING else 'SymInt'}? {arg.name}=None")
            continue
        written = f"Tensor(a{number}!)" if arg.role == "inout" else "Tensor"
        parts.append(f"{written} {arg.name}" if arg.when is None else f"{written}? {arg.name}=None")
    parts.append("*")
    parts += [f"{_axis_type(axis)}? {axis.name}=None" for axis in spec.axes]
    return ", ".join(parts)


def _returns(spec: KernelSpec) -> str:
    """What the operator returns, as torch's schemas write it.

    Raises:
        UserError: flags decide about outputs beside in-place arguments.
    """
    if not any(isinstance(arg, TensorArg) and arg.role == "inout" for arg in spec.signature):
        return LIST
    outputs = [arg for arg in spec.signature if _is_output(arg)]
    for arg in outputs:
        if arg.when is not None:
            raise UserError(
                f"torch takes no operator {NAMESPACE}::{spec.name}: it writes arguments in place, and then its outputs "
                f"must be the same for every call, but '{arg.name}' is there for some problems only"
            )
    return "Tensor" if len(outputs) == 1 else f"({', '.join('Tensor' for _ in outputs)})"


def _axis_type(axis: Axis) -> str:
    """A run-time size may be a symbol; a static one is compiled in, so each value is a kernel of its own."""
    if axis.kind == "dim":
        return "int" if axis.static else "SymInt"
    return "bool" if axis.kind == "flag" else "str"


def _is_output(arg: TensorArg | ScalarArg) -> bool:
    return isinstance(arg, TensorArg) and arg.role == "output"


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation is under way through a tensor."""
    from torch.autograd import forward_ad

    unpacked: Any = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return unpacked.tangent is not None


def _options_words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "no options"
