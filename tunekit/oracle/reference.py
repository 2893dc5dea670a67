"""What a spec's reference gives for a problem's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tunekit.errors import SpecError
from tunekit.model import Values
from tunekit.spec import KernelSpec, TensorArg
from tunekit.spec.inputs import scalars

if TYPE_CHECKING:
    import torch


def reference_outputs(spec: KernelSpec, problem: Values, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference's outputs for `inputs`, by name, on the host.

    Raises:
        SpecError: it leaves an output out, or gives the wrong shape.
    """
    import torch

    copies = {name: tensor.clone() for name, tensor in inputs.items()}  # a reference may write in place
    given = spec.reference(problem, {**copies, **scalars(spec, problem)})
    outputs: dict[str, torch.Tensor] = {}
    for argument in spec.arguments(problem):
        if not isinstance(argument, TensorArg) or argument.role == "input":
            continue
        tensor = given.get(argument.name)
        if not isinstance(tensor, torch.Tensor):
            raise SpecError(f"gives no output {argument.name} for {problem}", field="reference")
        if tuple(tensor.shape) != argument.sizes(problem):
            have, want = tuple(tensor.shape), argument.sizes(problem)
            raise SpecError(f"{argument.name} is {have}; the signature says {want}", field="reference")
        outputs[argument.name] = tensor.to("cpu", copy=True)
    return outputs
