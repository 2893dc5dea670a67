"""Random inputs of a problem, by the spec's own declaration: for every device that a kernel may run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunekit.errors import SpecError
from tunekit.model import Values
from tunekit.spec.arguments import ScalarArg, TensorArg
from tunekit.spec.declare import KernelSpec

if TYPE_CHECKING:
    import torch


def torch_dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise SpecError(f"{name} is no dtype of torch", field="signature")
    return found


def draw(spec: KernelSpec, problem: Values, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The inputs and in-place tensors of a problem, by name: the same for the same seed.

    Floats are standard normal, integers uniform in [-100, 100]; what the spec's own
    `inputs` gives takes their place.

    Raises:
        SpecError: the spec's `inputs` names no input, or has the wrong shape or dtype.
    """
    import torch

    generator = torch.Generator(device)
    generator.manual_seed(seed)
    wanted = {a.name: a for a in spec.arguments(problem) if isinstance(a, TensorArg) and a.role != "output"}
    drawn: dict[str, torch.Tensor] = {}
    for name, tensor in (spec.inputs(problem, generator, device) if spec.inputs else {}).items():
        if name not in wanted:
            raise SpecError(f"gives {name}, which is no input (inputs: {', '.join(wanted)})", field="inputs")
        shape, dtype = wanted[name].sizes(problem), torch_dtype(wanted[name].dtype_of(problem))
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            have = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise SpecError(f"{name} is {have}; the signature says {shape} {dtype}", field="inputs")
        drawn[name] = tensor.to(device).contiguous()
    for name, argument in wanted.items():
        if name not in drawn:
            drawn[name] = _random(argument.sizes(problem), torch_dtype(argument.dtype_of(problem)), generator, device)
    return drawn


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    import torch

    if not dtype.is_floating_point:
        return torch.randint(-100, 101, shape, generator=generator, device=device, dtype=dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return torch.randn(shape, generator=generator, device=device, dtype=wide).to(dtype)


def scalars(spec: KernelSpec, problem: Values) -> dict[str, float | int]:
    """The numbers of a problem's call, by name, rounded to their dtypes as the kernel gets them."""
    import torch

    return {
        argument.name: torch.tensor(argument.default(problem), dtype=torch_dtype(argument.dtype)).item()
        for argument in spec.arguments(problem)
        if isinstance(argument, ScalarArg)
    }
