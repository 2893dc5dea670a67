"""What a spec's oracles give for a problem's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tunekit.errors import SpecError
from tunekit.model import Values
from tunekit.spec import KernelSpec, TensorArg
from tunekit.spec.inputs import scalars, torch_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Expected:
    """The reference's outputs by name, and the rounded oracle's, in the outputs' dtypes, where they are held
    against it."""

    outputs: Mapping[str, torch.Tensor]
    rounded: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Expected:
        """The same on a device."""
        outputs, rounded = (
            {name: tensor.to(device) for name, tensor in part.items()} for part in (self.outputs, self.rounded)
        )
        return Expected(outputs, rounded)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for part in (self.outputs, self.rounded) for tensor in part.values())


def expected(spec: KernelSpec, problem: Values, inputs: Mapping[str, torch.Tensor]) -> Expected:
    """What the outputs must be for `inputs`, on the host.

    Raises:
        SpecError: an oracle leaves an output out, or gives the wrong shape.
    """
    outputs = [a for a in spec.arguments(problem) if isinstance(a, TensorArg) and a.role != "input"]
    wanted = _outputs(spec.reference, "reference", spec, problem, inputs, outputs)
    held = [a for a in outputs if spec.tolerance_of(a.name).rounding is not None]
    if not held or spec.rounded is None:
        return Expected(wanted)
    rounded = _outputs(spec.rounded, "rounded", spec, problem, inputs, held)
    return Expected(wanted, {a.name: rounded[a.name].to(torch_dtype(a.dtype_of(problem))) for a in held})


def _outputs(
    oracle: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    field: str,
    spec: KernelSpec,
    problem: Values,
    inputs: Mapping[str, torch.Tensor],
    wanted: list[TensorArg],
) -> dict[str, torch.Tensor]:
    """What an oracle, the spec's field of that name, gives for the outputs `wanted`."""
    import torch

    copies = {name: tensor.clone() for name, tensor in inputs.items()}  # an oracle may write in place
    given = oracle(problem, {**copies, **scalars(spec, problem)})
    outputs: dict[str, torch.Tensor] = {}
    for argument in wanted:
        tensor = given.get(argument.name)
        if not isinstance(tensor, torch.Tensor):
            raise SpecError(f"gives no output {argument.name} for {problem}", field=field)
        if tuple(tensor.shape) != argument.sizes(problem):
            have, want = tuple(tensor.shape), argument.sizes(problem)
            raise SpecError(f"{argument.name} is {have}; the signature says {want}", field=field)
        outputs[argument.name] = tensor.to("cpu", copy=True)
    return outputs
