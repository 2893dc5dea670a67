"""Times that can't be: faster than the GPU's arithmetic or memory allows for the work that the spec declares.

Peaks are a GPU's own at its boost clock, dense, per the makers' data sheets; a time is refused only
where it beats them by more than `SLACK`, for a declared cost may count a little that a kernel
can leave out. Bytes count only where the cache was cold; of what a kernel writes, L2 may keep as much
as it holds until the window is over, so that much of the bytes, half of them at most, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunekit.measure.protocol import Cache
from tunekit.model import Cost, Values

SLACK = 0.10


@dataclass(frozen=True)
class Peak:
    """A GPU's dense tensor TFLOP/s at 16 bits, at 8 and at 4 (0: it has none), its memory's TB/s, its L2's MB."""

    name: str
    at_16: float
    at_8: float
    at_4: float
    memory: float
    l2: float

    def tflops(self, bits: int) -> float:
        best = self.at_16
        if bits <= 8:
            best = max(best, self.at_8)
        return max(best, self.at_4) if bits <= 4 else best


# NVIDIA's data sheets: H100 and H200 Tensor Core GPU (2024), HGX B200/B300 and GB200/GB300 NVL72 (2025),
# halved where they state sparse figures; of a family the fastest board.
PEAKS = (
    Peak("H200", 990.0, 1980.0, 0.0, 4.8, 60.0),
    Peak("GH200", 990.0, 1980.0, 0.0, 4.9, 60.0),
    Peak("H100", 990.0, 1980.0, 0.0, 3.9, 60.0),
    Peak("GB200", 2500.0, 5000.0, 10000.0, 8.0, 132.0),
    Peak("B200", 2500.0, 5000.0, 10000.0, 8.0, 132.0),
    Peak("GB300", 2500.0, 5000.0, 15000.0, 8.0, 132.0),
    Peak("B300", 2500.0, 5000.0, 15000.0, 8.0, 132.0),
)


def peak_of(gpu: str | None) -> Peak | None:
    """The row of a GPU by the name that its driver gives; None where none is known."""
    words = (gpu or "").replace("-", " ").split()
    return next((peak for peak in PEAKS if peak.name in words), None)


def implausible(us: float, cost: Cost | None, gpu: str | None, problem: Values, cache: Cache) -> str | None:
    """Why a time of `us` microseconds can't be, in a sentence with both numbers; None if it can, or nothing is known.

    A MIG instance's name is its GPU's: the whole GPU's peak is a bound for it, too.
    """
    peak = peak_of(gpu)
    if cost is None or peak is None:
        return None
    tflops = peak.tflops(_bits(problem))
    bounds = [(cost.flops / tflops / 1e6, f"{cost.flops:.4g} FLOPs at {tflops:g} TFLOP/s")]
    if cache != "warm":
        moved = max(cost.bytes - 1e6 * peak.l2, cost.bytes / 2)
        bounds.append((moved / peak.memory / 1e6, f"{moved:.4g} of {cost.bytes:.4g} bytes at {peak.memory:g} TB/s"))
    least_us, why = max(bounds)
    if us * (1 + SLACK) >= least_us:
        return None
    return f"implausible: {us:.4g} us is faster than a {peak.name} can be, which takes {least_us:.4g} us for {why}"


def _bits(problem: Values) -> int:
    """The narrowest type that a problem names, 16 where it names none: it decides which peak bounds the arithmetic."""
    text = " ".join(value for value in problem.values() if isinstance(value, str)).lower()
    if "float4" in text or "fp4" in text or "e2m1" in text:
        return 4
    return 8 if any(word in text for word in ("float8", "fp8", "e4m3", "e5m2", "int8")) else 16
