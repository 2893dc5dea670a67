"""What machine and toolchain this is, read without torch or CUDA's runtime.

The GPU's facts come from NVML (`nvidia-ml-py`), in a process that never touches
the GPU otherwise; without a driver they are None.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from typing import Any, TypeVar

from tunekit.arch import arch_of_device
from tunekit.identity import distribution_version
from tunekit.model import Environment

T = TypeVar("T")


def visible_index(device: int, environ: dict[str, str] | None = None) -> int | str:
    """NVML's index (or UUID) of CUDA device `device`: CUDA_VISIBLE_DEVICES renumbers devices."""
    env = os.environ if environ is None else environ
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return device
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if device >= len(entries):
        raise IndexError(f"CUDA device {device} is not visible (CUDA_VISIBLE_DEVICES={visible!r})")
    return int(entries[device]) if entries[device].isdigit() else entries[device]


@functools.cache
def environment(device: int = 0, uuid: str | None = None) -> Environment:
    """The environment of CUDA device `device`; its GPU fields are None where there is none.

    `uuid`, where known, names the GPU beyond doubt: CUDA's order of devices may differ from NVML's.
    """
    versions = {
        "cutlass_dsl": distribution_version("nvidia-cutlass-dsl"),
        "tvm_ffi": distribution_version("apache-tvm-ffi"),
        "torch": distribution_version("torch"),
        "python": platform.python_version(),
        "tunekit": distribution_version("tunekit") or "0+unknown",
    }
    gpu = _gpu_facts(device, uuid)
    return Environment(**versions, **gpu)  # type: ignore[arg-type]


def _gpu_facts(device: int, uuid: str | None) -> dict[str, str | float | None]:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # what pynvml would load; without a driver its 10 ms are spared
        import pynvml
    except (OSError, ImportError):
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handle = nvml_handle(pynvml, device, uuid)
        arch = arch_of_device(tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)))
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return {
            "gpu": _text(pynvml.nvmlDeviceGetName(handle)),
            "arch": arch.name if arch else None,
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": _try(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
            "mig": _try(lambda: "on" if pynvml.nvmlDeviceGetMigMode(handle)[0] else "off"),
            "clocks_policy": _try(lambda: _clocks_policy(pynvml, handle)),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
    except (pynvml.NVMLError, IndexError):
        return {}
    finally:
        pynvml.nvmlShutdown()


def nvml_handle(pynvml: Any, device: int, uuid: str | None = None) -> Any:
    """NVML's handle of a GPU: by UUID where that is known and found, else by visible index."""
    if uuid is not None:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except pynvml.NVMLError:
            pass  # a MIG slice's UUID, as CUDA tells it, may not be one that NVML knows
    index = visible_index(device)
    by_index = isinstance(index, int)
    return pynvml.nvmlDeviceGetHandleByIndex(index) if by_index else pynvml.nvmlDeviceGetHandleByUUID(index)


def _clocks_policy(pynvml: Any, handle: Any) -> str:
    """``locked`` where application clocks differ from the default, else ``default``."""
    current = pynvml.nvmlDeviceGetApplicationsClock(handle, pynvml.NVML_CLOCK_SM)
    default = pynvml.nvmlDeviceGetDefaultApplicationsClock(handle, pynvml.NVML_CLOCK_SM)
    return "default" if current == default else f"application clock {current} MHz"


def _try(read: Callable[[], T]) -> T | None:
    """A reading that some GPUs do not offer: None there."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
