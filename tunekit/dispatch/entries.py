"""Entries: how the calls of one key are carried out, in Python or by the native hot path."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from numbers import Integral
from operator import itemgetter
from typing import Any, NamedTuple

from tunekit.dispatch.calls import Order, Slots, select
from tunekit.dispatch.checks import Call
from tunekit.dispatch.kinds import refusal
from tunekit.dispatch.library import Function
from tunekit.errors import UserError
from tunekit.model import Choice, Values
from tunekit.spec import ScalarArg, TensorArg
from tunekit.spec.arguments import is_positive

GIVEN, GIVEN_AS_FLOAT, INTEGER, FLOATING, WORKSPACE = range(5)
"""What an argument of the kernel is made of: as in hot_path.c."""
WORDS = {INTEGER: "iiq", FLOATING: "iid"}
MOST_STEPS = 64
LATER = -2
"""The native hot path answers this, or one less for each further entry, where Python has to do the rest."""


class Kind(NamedTuple):
    """What all calls of one key have in common: of the signature's slots, which are `missing`, and which hold an int.

    `device` is torch's, that new tensors are made on.
    """

    call: Call
    order: Order
    missing: frozenset[int]
    ints: frozenset[int]
    device: Any


def kind_of(call: Call, order: Order, slots: Slots) -> Kind:
    """The kind of a checked call."""
    missing = frozenset(slot for slot, value in enumerate(slots) if value is None)
    ints = frozenset(slot for slot, value in enumerate(slots) if isinstance(value, Integral))
    tensor = next(slots[slot] for slot, arg in call.arguments if isinstance(arg, TensorArg) and slot not in missing)
    return Kind(call, order, missing, ints, tensor.device)


class Recipe(NamedTuple):
    """What hot_path.c needs: `packed` has a step for each argument of the kernel.

    `answer` is what it answers: the place of the one output among the call's values; `LATER`, if there is more to
    return than that. An output that is left out comes behind the call's values, and `likes` says which of these it
    has the shape and dtype of.
    """

    packed: bytes
    answer: int
    likes: tuple[int, ...]


class Entry(NamedTuple):
    """What serves the calls of one kind: `run` does all of a call, `recipe` is None where only Python can.

    `returned` picks what a call returns from its slots, after the kernel ran natively.
    """

    kind: Kind
    choice: Choice
    function: Function
    run: Callable[[Slots], Any]
    recipe: Recipe | None
    returned: Callable[[Slots], Any]

    @property
    def asked(self) -> tuple[int, Values]:
        """The device and the problem that it serves."""
        return self.kind.call.device, self.kind.call.problem

    @property
    def like(self) -> int | None:
        """Which of a call's values has the shape and dtype of the output that is left out, if that goes natively."""
        return self.recipe.likes[0] if self.recipe is not None and self.recipe.likes else None


def make_entry(kind: Kind, served: tuple[Choice, Function], workspace: int, native: bool) -> Entry:
    """The entry for calls of a kind; `workspace` in float32 elements; `native`: where the native hot path is to be had.

    Raises:
        UserError: torch makes no tensors now that an output could lie in.
    """
    choice, function = served
    fill = _fill(kind, workspace)
    recipe = None
    if native and kind.order.places is not None and type(function).__module__.partition(".")[0] == "tvm_ffi":
        recipe = _recipe(kind, fill, kind.order.places)
    returned = [kind.call.arguments[position][0] for position in fill.outputs]
    return Entry(kind, choice, function, _runner(function, kind, fill), recipe, _picker(returned))


class _Fill(NamedTuple):
    """What a call leaves out: tensors to allocate and numbers, by the kernel's argument.

    `floats`: where a Python int is given for a float. `outputs`: which of the arguments are returned. `workspace`
    is allocated for each call, on its stream, so that calls that run at once share none.
    """

    new: tuple[tuple[int, tuple[int, ...], str], ...]
    constants: tuple[tuple[int, float | int], ...]
    floats: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace: int


def _fill(kind: Kind, workspace: int) -> _Fill:
    new: list[tuple[int, tuple[int, ...], str]] = []
    constants: list[tuple[int, float | int]] = []
    floats: list[int] = []
    outputs: list[int] = []
    problem = kind.call.problem
    for position, (slot, arg) in enumerate(kind.call.arguments):
        missing = slot in kind.missing
        if isinstance(arg, TensorArg):
            if arg.role == "output":
                outputs.append(position)
            if missing:
                new.append((position, arg.sizes(problem), arg.dtype_of(problem)))
        elif missing:
            number = _number(arg, arg.default(problem))
            if arg.positive and not is_positive(number):
                raise UserError(f"the default of '{arg.name}' is {number} for {problem}; it must be above 0")
            constants.append((position, number))
        elif arg.dtype == "float32" and slot in kind.ints:
            floats.append(position)
    return _Fill(tuple(new), tuple(constants), tuple(floats), tuple(outputs), workspace)


def _runner(function: Function, kind: Kind, fill: _Fill) -> Callable[[Slots], Any]:
    """The whole of a call, in Python."""
    import torch

    pick = select([slot for slot, _ in kind.call.arguments])
    device = kind.device
    new = [
        (position, maker(kind.call.arguments[position][1].name, shape, getattr(torch, dtype), device))
        for position, shape, dtype in fill.new
    ]
    scratch = maker("workspace", (fill.workspace,), torch.float32, device) if fill.workspace else None
    returned = _picker(list(fill.outputs))

    def given(slots: Slots) -> Any:
        arguments = pick(slots)
        function(*arguments)
        return returned(arguments)

    def filled(slots: Slots) -> Any:
        arguments = list(pick(slots))
        for position, make in new:
            arguments[position] = make()
        for position, value in fill.constants:
            arguments[position] = value
        for position in fill.floats:
            arguments[position] = float(arguments[position])
        if scratch is not None:
            arguments.append(scratch())
        function(*arguments)
        return returned(arguments)

    return filled if new or fill.constants or fill.floats or scratch else given


def maker(name: str, shape: tuple[int, ...], dtype: Any, device: Any) -> Callable[[], Any]:
    """What allocates a tensor, dense and row-major: `empty_like` of a single element that is expanded to the shape.
    (`empty` takes twice as long, of which most goes into reading the shape, dtype and device that it is given.)

    Raises, as what it returns does when called:
        UserError: torch makes no tensors now that have memory, but fake ones.
    """
    import torch

    def checked(made: Any) -> Any:
        refused = refusal(name, made)
        if refused is not None:
            raise UserError(refused)
        return made

    def make() -> Any:
        made = torch.empty_like(pattern)
        return made if type(made) is torch.Tensor and made.data_ptr() else checked(made)

    # Of a single element or none torch would take the strides of `expand` too.
    few = math.prod(shape) < 2
    pattern = checked(torch.empty(shape if few else (), dtype=dtype, device=device))
    pattern = pattern if few else pattern.expand(shape)
    return make


def _recipe(kind: Kind, fill: _Fill, places: tuple[int, ...]) -> Recipe | None:
    """The same natively; None where it takes too many steps, or an output that is left out is not the only one, or is
    like no tensor given: torch makes it from Python then, since no other allocation knows `record_stream`."""
    likes = _likes(kind, fill, places)
    if (fill.new and not likes) or len(kind.call.arguments) + bool(fill.workspace) > MOST_STEPS:
        return None
    new = [position for position, _, _ in fill.new]
    constants = dict(fill.constants)
    steps: list[bytes] = []
    for position, (slot, _) in enumerate(kind.call.arguments):
        if position in constants:
            value = constants[position]
            step = FLOATING if isinstance(value, float) else INTEGER
            steps.append(struct.pack(WORDS[step], step, 0, value))
        else:
            step = GIVEN_AS_FLOAT if position in fill.floats else GIVEN
            steps.append(struct.pack(WORDS[INTEGER], step, kind.order.size if position in new else places[slot], 0))
    if fill.workspace:
        steps.append(struct.pack(WORDS[INTEGER], WORKSPACE, 0, fill.workspace))
    answer = LATER
    if likes:
        answer = kind.order.size
    elif len(fill.outputs) == 1:
        answer = places[kind.call.arguments[fill.outputs[0]][0]]
    return Recipe(b"".join(steps), answer, likes)


def _likes(kind: Kind, fill: _Fill, places: tuple[int, ...]) -> tuple[int, ...]:
    """Which of a call's values have the shape and dtype of the one output, if that is left out."""
    if len(fill.outputs) != 1 or not fill.new:
        return ()
    problem = kind.call.problem
    ((_, shape, dtype),) = fill.new
    return tuple(
        places[slot]
        for slot, arg in kind.call.arguments
        if isinstance(arg, TensorArg) and slot not in kind.missing
        if arg.sizes(problem) == shape and arg.dtype_of(problem) == dtype
    )


def _picker(places: list[int]) -> Callable[[tuple[Any, ...] | list[Any]], Any]:
    """What picks the outputs: one as it is, several as a tuple; None for a kernel whose outputs are all in-place."""
    return itemgetter(*places) if places else lambda values: None


def _number(arg: ScalarArg, value: float) -> float | int:
    return float(value) if arg.dtype == "float32" else int(value)
