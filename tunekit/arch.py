"""The GPU architectures: one table of limits, each with its source.

Limits are per CTA, after what the system reserves (1 KiB of shared memory):
CUDA C++ Programming Guide 13.0, "Compute Capabilities", table "Technical
Specifications"; TMEM from the PTX ISA 9.0, "Tensor Memory". The dynamic
shared-memory figures equal CuTeDSL 4.8.1's ``get_smem_capacity_in_bytes``.
"""

from __future__ import annotations

from typing import NamedTuple

from tunekit.errors import UserError, suggestion


class Arch(NamedTuple):
    """One architecture's limits per CTA.

    `smem_bytes`: dynamic + static shared memory; `tmem_columns`: tensor-memory
    columns of 128 lanes x 4 bytes (0: no tensor memory); `threads`: per CTA;
    `cluster`: CTAs per cluster, the non-portable size; `registers`: 32-bit, per
    thread; `features`: what kernels may require.
    """

    name: str
    compute_capability: tuple[int, int]
    smem_bytes: int
    tmem_columns: int
    cluster: int
    features: frozenset[str]
    gpus: str
    threads: int = 1024
    registers: int = 255

    @property
    def is_gpu(self) -> bool:
        return self.compute_capability != (0, 0)


_HOPPER = frozenset({"tma", "wgmma"})
_BLACKWELL = frozenset({"tma", "tcgen05"})
_BLACKWELL_RTX = frozenset({"tma"})

ARCHES: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_90a", (9, 0), 232_448, 0, 16, _HOPPER, "H100, H200, GH200"),
        Arch("sm_100a", (10, 0), 232_448, 512, 16, _BLACKWELL, "B200, GB200"),
        Arch("sm_103a", (10, 3), 232_448, 512, 16, _BLACKWELL, "B300, GB300"),
        Arch("sm_110a", (11, 0), 232_448, 512, 16, _BLACKWELL, "Jetson Thor"),
        Arch("sm_120a", (12, 0), 101_376, 0, 8, _BLACKWELL_RTX, "RTX PRO 6000, RTX 50"),
        Arch("sm_121a", (12, 1), 101_376, 0, 8, _BLACKWELL_RTX, "DGX Spark"),
        # The CPU that runs tunekit: kernels in C, for specs that need no GPU.
        Arch("host", (0, 0), 2**31, 0, 1, frozenset({"host"}), "this machine's CPU"),
    )
}


def parse_arch(text: str) -> Arch:
    """The architecture called `text`, e.g. ``sm_100a``.

    Raises:
        UserError: an unknown name, with the nearest known one.
    """
    name = text.strip().lower()
    if name in ARCHES:
        return ARCHES[name]
    raise UserError(f"unknown architecture '{text}'{suggestion(name, ARCHES)} (known: {', '.join(ARCHES)})")


def arch_of_device(compute_capability: tuple[int, int]) -> Arch | None:
    """The architecture of a GPU with this compute capability; None if not in the table."""
    for arch in ARCHES.values():
        if arch.is_gpu and arch.compute_capability == compute_capability:
            return arch
    return None
