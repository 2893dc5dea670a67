"""What the device of a call is: its architecture, its SM count, its environment."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from tunekit.arch import arch_of_device
from tunekit.environment import environment
from tunekit.errors import UserError
from tunekit.model import Environment

CPU = -1


@dataclass(frozen=True)
class DeviceFacts:
    """One device: `index` as CUDA counts (``CPU`` for the host), `sm_count` where it is a GPU."""

    index: int
    arch: str
    sm_count: int | None
    environment: Environment


class Devices(Protocol):
    """The devices of a process, by index."""

    def facts(self, index: int) -> DeviceFacts: ...

    def current(self) -> int:
        """The device that work goes to where none is named."""
        ...


class TorchDevices:
    """The devices that torch sees.

    CUDA may order GPUs otherwise than NVML does: the architecture is asked of CUDA,
    and where NVML's GPU of that index is of another one, NVML is asked by UUID.
    """

    def facts(self, index: int) -> DeviceFacts:
        """The facts of CUDA device `index`, or of the host for ``CPU``.

        Raises:
            UserError: a GPU whose architecture is not in the table, or no such GPU.
        """
        return _host_facts() if index == CPU else _cuda_facts(index)

    def current(self) -> int:
        """torch's current CUDA device; ``CPU`` where there is none."""
        import torch

        return torch.cuda.current_device() if torch.cuda.is_available() else CPU


@functools.cache
def _host_facts() -> DeviceFacts:
    return DeviceFacts(CPU, "host", None, environment(0))


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    import torch

    if not 0 <= index < torch.cuda.device_count():
        raise UserError(f"there is no CUDA device {index} (this process sees {torch.cuda.device_count()})")
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    arch = arch_of_device(capability)
    if arch is None:
        raise UserError(
            f"CUDA device {index} ({properties.name}) has compute capability {capability[0]}.{capability[1]}, "
            "which is not in tunekit's table of architectures"
        )
    here = environment(index)
    if here.arch != arch.name:
        here = environment(index, str(properties.uuid))
    return DeviceFacts(index, arch.name, properties.multi_processor_count, here)
