"""Where in an output something is wrong, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

RANGES = 3


@dataclass(frozen=True)
class Place:
    """Puts a mask over an output's region into words, by the signature's names for the dims."""

    name: str
    shape: Sequence[int]
    offsets: Sequence[int]
    dims: Sequence[str | int]

    def describe(self, fault: str, mask: torch.Tensor, detail: str = "") -> str:
        """``o: mismatch at [3, 5]: ...; 2 of 64 elements, in rows 3-4, cols 5``."""
        return f"{self.name}: {fault} at {self._first(mask)}{detail and ': '}{detail}; {self._spread(mask)}"

    def state(self, mask: torch.Tensor, detail: str) -> str:
        """``lse[3, 5] is -inf, reference 4.2; 2 of 64 elements, in rows 3-4``: `detail` follows the first element."""
        return f"{self.name}{self._first(mask)} {detail}; {self._spread(mask)}"

    def _first(self, mask: torch.Tensor) -> list[int]:
        """The indices of the first element that the mask holds."""
        at = mask.reshape(tuple(self.shape)).nonzero()[0]
        return [int(i) + offset for i, offset in zip(at, self.offsets, strict=True)]

    def _spread(self, mask: torch.Tensor) -> str:
        """How many elements the mask holds, and in which dims they lie where."""
        where = mask.reshape(tuple(self.shape))
        parts = [self._ranges(where, dim) for dim in range(where.ndim)]
        spread = ", ".join(part for part in parts if part)
        return f"{int(where.sum())} of {where.numel()} elements" + (f", in {spread}" if spread else "")

    def _ranges(self, where: torch.Tensor, dim: int) -> str:
        """The indices of one dim that hold a fault, as ranges; empty if all do."""
        others = [d for d in range(where.ndim) if d != dim]
        hit = (where.any(dim=others) if others else where).nonzero().flatten().tolist()
        if len(hit) == where.shape[dim]:
            return ""
        ranges: list[list[int]] = []
        for index in hit:
            if ranges and ranges[-1][1] == index - 1:
                ranges[-1][1] = index
            else:
                ranges.append([index, index])
        offset = self.offsets[dim]
        shown = " ".join(f"{a + offset}" if a == b else f"{a + offset}-{b + offset}" for a, b in ranges[:RANGES])
        more = f" and {len(ranges) - RANGES} more" if len(ranges) > RANGES else ""
        label = self.dims[dim] if isinstance(self.dims[dim], str) else f"dim {dim}"
        return f"{label} {shown}{more}"
