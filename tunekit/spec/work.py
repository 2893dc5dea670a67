"""What one variant's launch does: what its spec declares for the cost model (see tunekit.search.cost_model)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One launch, as arithmetic over problem and tunables; the numbers of a CTA are those of the busiest ones.

    `ctas` of the grid; `ctas_per_sm` that the registers of an SM have room for, None where only a compile can tell;
    `steps` of the main loop that a CTA does one after the other, `stages` of them in flight at once, whole or not;
    `flops` of a CTA, padding included; `step_bytes` that it moves in its
    steps, `edge_bytes` before the first and after the last; `launches` in all, with those that merge its results.
    """

    ctas: int
    steps: float
    stages: float
    flops: float
    step_bytes: float
    edge_bytes: float
    ctas_per_sm: int | None = None
    launches: int = 1
