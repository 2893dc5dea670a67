"""A GPU that is only noise: finalists with true times, timed through the very schedule that times kernels.

What happens to each window is written down in `Noise`; everything is drawn from one seed.
Time goes by windows: a drift or a step that begins at window 40 hits whichever finalist
is timed then, as on a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.measure.gpu_state import GpuState

FAST_MHZ, SLOW_MHZ = 1980, 1755


@dataclass(frozen=True)
class Noise:
    """What a simulated GPU does to its windows; every number is a share of the time.

    `jitter`: the standard deviation of each window by itself. `drift`: by how much all slow down,
    for the most part over `drift_windows`. `step`: by how much all slow down at once, from one
    random window within the first `step_within` on; `reported` for that many windows by NVML as
    thermal slowdown (they are rejected), else not at all. `tail`: this share of the windows takes
    longer by an exponential of mean `tail_size`. `slow_clock`: this share of the time is spent at
    a clock lower by 11 %, for `dwell` windows a time. `offset`: the standard deviation of one
    factor for the whole process. `placement`: that of one for each finalist, the process long.
    """

    jitter: float = 0.005
    drift: float = 0.0
    drift_windows: float = 100.0
    step: float = 0.0
    step_within: int = 200
    reported: int = 0
    tail: float = 0.0
    tail_size: float = 0.1
    slow_clock: float = 0.0
    dwell: float = 30.0
    offset: float = 0.0
    placement: float = 0.0


MODELS = {
    "jitter 0.5 %": Noise(),
    "jitter 1 %": Noise(jitter=0.01),
    "drift 10 %": Noise(drift=0.10),
    "throttle step 15 %, unreported": Noise(step=0.15),
    "throttle step 15 %, reported": Noise(step=0.15, reported=6),
    "heavy tails": Noise(tail=0.10, tail_size=0.10),
    "bimodal clock, by turns": Noise(slow_clock=0.3),
    "bimodal clock, any window": Noise(slow_clock=0.1, dwell=1.0),
    "offset of the process": Noise(offset=0.05),
    "placement of each": Noise(placement=0.0015),
    "all at once": Noise(
        drift=0.05, step=0.10, tail=0.05, tail_size=0.05, slow_clock=0.1, offset=0.05, placement=0.001
    ),
}
# Noise beyond what a final's budget can decide ties under: it must say so, and still find a gap.
BEYOND = {"jitter 2 %": Noise(jitter=0.02), "placement of each, 0.3 %": Noise(placement=0.003)}


class SimulatedGpu:
    """One process on one simulated GPU; `finalists` are ready for ``final.race``."""

    def __init__(self, times_us: Mapping[str, float], noise: Noise, seed: int) -> None:
        self._noise, self._random = noise, random.Random(seed)
        draw = self._random
        self._factor = math.exp(draw.gauss(0, noise.offset))
        self._step_at = draw.randrange(noise.step_within) if noise.step else -1
        self._window, self._slow = 0, draw.random() < noise.slow_clock
        self.finalists = [
            SimulatedFinalist(self, id, us * math.exp(draw.gauss(0, noise.placement))) for id, us in times_us.items()
        ]

    def window(self, us: float) -> tuple[float, GpuState]:
        """The time of a window of a kernel that truly takes `us`, and what NVML says of it."""
        noise, draw = self._noise, self._random
        now, self._window = self._window, self._window + 1
        factor = self._factor * math.exp(draw.gauss(0, noise.jitter))
        factor *= 1 + noise.drift * -math.expm1(-now / noise.drift_windows)
        stepped = 0 <= self._step_at <= now
        throttle: tuple[str, ...] = ()
        if stepped and (not noise.reported or now < self._step_at + noise.reported):
            factor *= 1 + noise.step
            throttle = ("hw_thermal_slowdown",) if noise.reported else ()
        if noise.slow_clock and draw.random() < 1 / noise.dwell:
            self._slow = draw.random() < noise.slow_clock
        if noise.slow_clock and self._slow:
            factor *= FAST_MHZ / SLOW_MHZ
        if noise.tail and draw.random() < noise.tail:
            factor *= 1 + draw.expovariate(1 / noise.tail_size)
        return us * factor, GpuState(SLOW_MHZ if self._slow else FAST_MHZ, 500.0, 60, throttle)


class SimulatedFinalist:
    """A finalist of a simulated GPU."""

    def __init__(self, gpu: SimulatedGpu, id: str, us: float) -> None:
        self.id, self._gpu, self._us = id, gpu, us

    def take(self) -> tuple[float, GpuState]:
        return self._gpu.window(self._us)
