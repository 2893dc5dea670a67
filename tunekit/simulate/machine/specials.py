"""Special registers: what each lane sees of its place in the grid (PTX ISA chapter 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.machine.lanes import WARP
from tunekit.simulate.machine.memory import RANK_SHIFT, RESERVED_SHARED_BYTES

if TYPE_CHECKING:
    from tunekit.simulate.machine.program import Program
    from tunekit.simulate.machine.warp import Warp

Value = int | NDArray[Any]
Dim3 = tuple[int, int, int]

_LANE = np.arange(WARP, dtype=np.uint32)
_BIT = np.left_shift(np.uint32(1), _LANE)
_SMS = 132  # of an H200; which one a CTA gets is anybody's guess

_VECTORS: dict[str, Callable[[Warp], Dim3]] = {
    "%ntid": lambda w: w.cta.cluster.launch.block,
    "%ctaid": lambda w: w.cta.coordinates,
    "%nctaid": lambda w: w.cta.cluster.launch.grid,
    "%clusterid": lambda w: _each(w, w.cta.coordinates, "//"),
    "%nclusterid": lambda w: _each(w, w.cta.cluster.launch.grid, "//"),
    "%cluster_ctaid": lambda w: _each(w, w.cta.coordinates, "%"),
    "%cluster_nctaid": lambda w: w.cta.cluster.launch.cluster,
}
_SCALARS: dict[str, Callable[[Warp], Value]] = {
    "%laneid": lambda w: _LANE,
    "%warpid": lambda w: w.number,
    "%nwarpid": lambda w: -(-w.cta.threads // WARP),
    "%smid": lambda w: (w.cta.cluster.number * w.cta.cluster.size + w.cta.rank) % _SMS,
    "%nsmid": lambda w: _SMS,
    "%gridid": lambda w: 1,
    "%cluster_ctarank": lambda w: w.cta.rank,
    "%cluster_nctarank": lambda w: w.cta.cluster.size,
    "%is_explicit_cluster": lambda w: int(w.cta.cluster.size > 1),
    "%lanemask_eq": lambda w: _BIT,
    "%lanemask_lt": lambda w: _BIT - np.uint32(1),
    "%lanemask_le": lambda w: _BIT | (_BIT - np.uint32(1)),
    "%lanemask_gt": lambda w: ~(_BIT | (_BIT - np.uint32(1))),
    "%lanemask_ge": lambda w: ~(_BIT - np.uint32(1)),
    "%dynamic_smem_size": lambda w: w.cta.cluster.launch.shared_bytes,
    "%total_smem_size": lambda w: w.program.symbols.shared_bytes - RESERVED_SHARED_BYTES,
    "%aggr_smem_size": lambda w: w.program.symbols.shared_bytes,
    "%reserved_smem_offset_begin": lambda w: 0,
    "%reserved_smem_offset_end": lambda w: RESERVED_SHARED_BYTES,
    "%reserved_smem_offset_cap": lambda w: RESERVED_SHARED_BYTES,
    "%current_graph_exec": lambda w: 0,
}


def known(name: str) -> bool:
    """Whether `special` has a value for this register. The clocks, which change, are the mov unit's."""
    base, _, axis = name.partition(".")
    return name in _SCALARS or (axis in ("x", "y", "z") and (base == "%tid" or base in _VECTORS))


def special(w: Warp, name: str) -> Value:
    """The value of a special register: one for all lanes, or uint32[32]."""
    base, _, axis = name.partition(".")
    if not axis:
        return _SCALARS[name](w)
    k = "xyz".index(axis)
    if base != "%tid":
        return int(_VECTORS[base](w)[k])
    x, y, _ = w.cta.cluster.launch.block
    linear = _LANE + WARP * w.number
    return (linear % x, linear // x % y, linear // (x * y))[k]


def fill_specials(w: Warp, program: Program) -> None:
    """Sets the slots of special registers and of addresses of variables, which differ from warp to warp."""
    decoder = program.decoder
    for slot, name in decoder.specials.items():
        w.fill(slot, decoder.widths[slot], special(w, name))
    for slot, (space, address) in decoder.symbol_slots.items():
        rank = w.cta.rank << RANK_SHIFT if space == "shared" else 0
        w.fill(slot, decoder.widths[slot], address + rank)


def _each(w: Warp, values: Dim3, operation: str) -> Dim3:
    shape = w.cta.cluster.launch.cluster
    pairs = zip(values, shape, strict=True)
    x, y, z = (value // side if operation == "//" else value % side for value, side in pairs)
    return x, y, z
