"""A launch as a value: what the host code gave to the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tunekit.arch import Arch

Dim3: TypeAlias = tuple[int, int, int]
Attribute: TypeAlias = int | Dim3 | bytes


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    `grid` and `cluster` count CTAs, `block` threads; `shared_bytes` is the dynamic shared memory of a CTA.
    `attributes` has the launch attributes by name (see capture.py); one that has no name there is kept as
    "attribute 17" with its 64 bytes. `parameters` are the bytes of each kernel parameter, in order.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    attributes: Mapping[str, Attribute]
    parameters: tuple[bytes, ...]

    def refusal(self, arch: Arch, static_shared_bytes: int = 0) -> str | None:
        """Why a device of `arch` would not start this, in a sentence, or None.

        Source of the limits of grid and block: CUDA C++ Programming Guide 13.0, "Technical Specifications".
        """
        threads = self.block[0] * self.block[1] * self.block[2]
        ctas = self.cluster[0] * self.cluster[1] * self.cluster[2]
        shared = self.shared_bytes + static_shared_bytes
        if min(self.grid) < 1 or min(self.block) < 1:
            return f"grid {self.grid} x block {self.block} has a side below 1"
        if min(self.cluster) < 1:
            return f"cluster {self.cluster} has a side below 1"
        if max(self.grid[1:]) > 65_535 or self.grid[0] >= 2**31:
            return f"grid {self.grid} is over the limit (2147483647, 65535, 65535)"
        if self.block[2] > 64:
            return f"block {self.block} is over the limit (1024, 1024, 64)"
        if threads > arch.threads:
            return f"{threads} threads a CTA > {arch.threads} ({arch.name})"
        if shared > arch.smem_bytes:
            return f"smem {shared} B > {arch.smem_bytes} B ({arch.name})"
        if ctas > arch.cluster:
            return f"cluster of {ctas} CTAs > {arch.cluster} ({arch.name})"
        if any(side % part for side, part in zip(self.grid, self.cluster, strict=True)):
            return f"grid {self.grid} is no multiple of the cluster {self.cluster}"
        return None
