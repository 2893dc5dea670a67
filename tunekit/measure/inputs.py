"""A call's arguments: random inputs, and outputs poisoned inside guard bands. Part of the device half.

Every tensor lies between two bands of 0xFF bytes, a NaN in each float dtype: a write
outside an output shows in the bands, and a read outside an input that matters turns
the result into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tunekit.model import Values, Variant
from tunekit.oracle.patterns import SCRATCH_POISON, bits, poison
from tunekit.space import workspace
from tunekit.spec import KernelSpec, ScalarArg, TensorArg
from tunekit.spec.declare import WORKSPACE
from tunekit.spec.inputs import scalars, torch_dtype

# A kernel that forgets its row mask overruns by up to a tile of rows: 128 rows x 4 KiB.
GUARD_BYTES = 512 * 1024
GUARD_BYTE = 0xFF


@dataclass(frozen=True)
class Guarded:
    """A contiguous tensor between two guard bands of one buffer."""

    argument: TensorArg
    buffer: torch.Tensor
    tensor: torch.Tensor

    @classmethod
    def allocate(cls, argument: TensorArg, problem: Values, device: torch.device, guard: int) -> Guarded:
        """`guard` bytes on either side; a multiple of 256, which keeps the tensor's alignment."""
        dtype, shape = torch_dtype(argument.dtype_of(problem)), argument.sizes(problem)
        size = math.prod(shape) * dtype.itemsize
        buffer = torch.empty(guard + size + guard, dtype=torch.uint8, device=device)
        buffer[:guard] = GUARD_BYTE
        buffer[guard + size :] = GUARD_BYTE
        return cls(argument, buffer, buffer[guard : guard + size].view(dtype).view(shape))

    def overrun(self) -> str | None:
        """Where something was written outside the tensor, in words; None if nowhere."""
        size = self.tensor.nbytes
        guard = (self.buffer.numel() - size) // 2
        for band, side in ((self.buffer[:guard], "before its start"), (self.buffer[guard + size :], "past its end")):
            if band.numel() and bool((band != GUARD_BYTE).any()):
                places = (band != GUARD_BYTE).nonzero().flatten()
                near = guard - int(places[-1]) if side == "before its start" else int(places[0]) + 1
                return f"{places.numel()} bytes written {side}, the nearest {near} bytes away"
        return None


class Arguments:
    """The arguments of one call: `call` holds tensors and numbers in the signature's order, then the variant's
    workspace, if it has one. Without a variant there is none."""

    def __init__(
        self,
        spec: KernelSpec,
        problem: Values,
        inputs: Mapping[str, torch.Tensor],
        device: torch.device,
        guard: int = GUARD_BYTES,
        variant: Variant | None = None,
    ) -> None:
        self.drawn = inputs
        self.guarded: dict[str, Guarded] = {}
        numbers = scalars(spec, problem)
        call: list[Any] = []
        for argument in spec.arguments(problem):
            if isinstance(argument, ScalarArg):
                call.append(numbers[argument.name])
            else:
                self.guarded[argument.name] = Guarded.allocate(argument, problem, device, guard)
                call.append(self.guarded[argument.name].tensor)
        elements = workspace(spec, variant, problem) if variant is not None else 0
        self._scratch: Guarded | None = None
        if elements:
            scratch = TensorArg(WORKSPACE, (elements,), "float32", role="inout")
            self._scratch = Guarded.allocate(scratch, problem, device, guard)
            call.append(self._scratch.tensor)
        self.call = tuple(call)
        self.reset(1)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, without their guards."""
        return sum(guarded.tensor.nbytes for guarded in self._all())

    def outputs(self) -> dict[str, torch.Tensor]:
        """The tensors that a call writes, in-place ones too."""
        return {name: g.tensor for name, g in self.guarded.items() if g.argument.role != "input"}

    def reset(self, launch: int) -> None:
        """Inputs and in-place tensors as drawn; outputs and workspace poisoned as before launch number `launch`."""
        if self._scratch is not None:
            bits(self._scratch.tensor).fill_(SCRATCH_POISON)
        for name, guarded in self.guarded.items():
            if guarded.argument.role == "output":
                bits(guarded.tensor).fill_(poison(guarded.tensor.dtype, launch))
            else:
                guarded.tensor.copy_(self.drawn[name])

    def restore_in_place(self) -> None:
        """In-place tensors as drawn, the rest untouched: what repeated calls need."""
        for name, guarded in self.guarded.items():
            if guarded.argument.role == "inout":
                guarded.tensor.copy_(self.drawn[name])

    def damage(self) -> str | None:
        """What a call changed that it must not, in words: an input, or memory outside its tensors."""
        for guarded in self._all():
            name = guarded.argument.name
            if guarded.argument.role == "input":
                changed = (bits(guarded.tensor) != bits(self.drawn[name])).nonzero()
                if changed.numel():
                    at = [int(i) for i in changed[0]]
                    return f"input {name} was changed: {len(changed)} elements, the first at {at}"
            overrun = guarded.overrun()
            if overrun:
                return f"write outside {name}: {overrun}"
        return None

    def _all(self) -> list[Guarded]:
        return [*self.guarded.values(), *([] if self._scratch is None else [self._scratch])]


def scratch(spec: KernelSpec, variant: Variant, problem: Values, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What an artifact takes after the signature's arguments: its workspace, if it has one, uninitialised."""
    elements = workspace(spec, variant, problem)
    return (torch.empty(elements, dtype=torch.float32, device=device),) if elements else ()
