"""What the GPU does while it is timed, read through NVML: clock, power, temperature, throttling.

NVML answers in a process that has not touched the GPU otherwise; without a driver
every reading is empty. Reasons to throttle: NVML API reference, "nvmlClocksEventReasons".
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tunekit.environment import nvml_handle
from tunekit.model import Value, Values

REASONS = {
    0x01: "gpu_idle",
    0x02: "application_clocks",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clock",
}

# These come from outside the kernel (heat, the power supply) and pass: what is timed
# meanwhile says nothing about the variant. sw_power_cap is not among them: at the
# board's power limit the clock settles where *this* kernel's power draw puts it, so for
# a large GEMM it is the sustained state, and the slower clock is the variant's own cost.
DISTURBING = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sync_boost"})


@dataclass(frozen=True)
class GpuState:
    """One reading. `throttle` holds the names in `REASONS`; None is "could not be read"."""

    sm_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()

    @property
    def disturbed(self) -> tuple[str, ...]:
        """The reasons for which a window must be taken again."""
        return tuple(reason for reason in self.throttle if reason in DISTURBING)

    def joined(self, later: GpuState) -> GpuState:
        """This reading, taken during work, with the reasons to throttle that were left just after it.

        Being idle by then is no news.
        """
        both = tuple(dict.fromkeys(self.throttle + tuple(name for name in later.throttle if name != "gpu_idle")))
        return GpuState(self.sm_mhz, self.power_w, self.temperature_c, both)

    def values(self) -> Values:
        """The readings that there are, as plain values."""
        found: dict[str, Value] = {}
        if self.sm_mhz is not None:
            found["sm_mhz"] = self.sm_mhz
        if self.power_w is not None:
            found["power_w"] = round(self.power_w, 1)
        if self.temperature_c is not None:
            found["temperature_c"] = self.temperature_c
        if self.throttle:
            found["throttle"] = "+".join(self.throttle)
        return Values(found)


def reasons(bits: int) -> tuple[str, ...]:
    """The names of NVML's reason bits; an unknown bit keeps its number."""
    known = [name for bit, name in REASONS.items() if bits & bit]
    unknown = bits & ~sum(REASONS)
    return tuple(known + ([f"reason_{unknown:#x}"] if unknown else []))


class GpuMonitor:
    """Reads the state of one CUDA device; `device` is None for the host, which has none to read."""

    def __init__(self, device: int | None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device is None:
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver here
            return
        try:
            self._handle = nvml_handle(pynvml, device)
            self._nvml = pynvml
        except (pynvml.NVMLError, IndexError):
            pynvml.nvmlShutdown()

    def read(self) -> GpuState:
        """The state now. A reading that this GPU does not offer is None."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return GpuState()
        bits = self._try(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        power_mw = self._try(nvml.nvmlDeviceGetPowerUsage, handle)
        return GpuState(
            sm_mhz=self._try(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=self._try(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            throttle=() if bits is None else reasons(bits),
        )

    def uuid(self) -> str | None:
        """The GPU's (or MIG instance's) UUID."""
        if self._nvml is None:
            return None
        found = self._try(self._nvml.nvmlDeviceGetUUID, self._handle)
        return found.decode() if isinstance(found, bytes) else found

    def _try(self, read: Any, *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = self._handle = None

    def __enter__(self) -> GpuMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
