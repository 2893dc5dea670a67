"""Special registers: what each lane sees of its place in the grid (PTX ISA chapter 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.lanes import WARP
from tunekit.simulate.memory import RANK_SHIFT, RESERVED_SHARED_BYTES
from tunekit.simulate.program import Program

if TYPE_CHECKING:
    from tunekit.simulate.warp import Warp

Value = int | NDArray[Any]


def fill_specials(w: Warp, program: Program) -> None:
    """Sets the slots of special registers and of addresses of variables, which differ from warp to warp."""
    decoder = program.decoder
    for slot, name in decoder.specials.items():
        value = special(w, name)
        if value is not None:
            w.fill(slot, decoder.widths[slot], value)
    for slot, (space, address) in decoder.symbol_slots.items():
        rank = w.cta.rank << RANK_SHIFT if space == "shared" else 0
        w.fill(slot, decoder.widths[slot], address + rank)


def special(w: Warp, name: str) -> Value | None:
    """The value of a special register: one for all lanes, or one a lane; None for what is unknown here.

    %clock and its like change with time: the mov unit reads them, not this table.
    """
    cta, cluster = w.cta, w.cta.cluster
    base, _, axis = name.partition(".")
    lane = np.arange(WARP, dtype=np.uint32)
    if axis:
        k = "xyz".index(axis)
        block, grid, shape = cluster.launch.block, cluster.launch.grid, cluster.launch.cluster
        if base == "%tid":
            linear = lane + WARP * w.number
            return [linear % block[0], linear // block[0] % block[1], linear // (block[0] * block[1])][k]
        vectors = {
            "%ntid": block,
            "%ctaid": cta.coordinates,
            "%nctaid": grid,
            "%clusterid": tuple(c // s for c, s in zip(cta.coordinates, shape, strict=True)),
            "%nclusterid": tuple(g // s for g, s in zip(grid, shape, strict=True)),
            "%cluster_ctaid": tuple(c % s for c, s in zip(cta.coordinates, shape, strict=True)),
            "%cluster_nctaid": shape,
        }
        vector = vectors.get(base)
        return None if vector is None else int(vector[k])
    symbols = w.program.symbols
    values: dict[str, Value] = {
        "%laneid": lane,
        "%warpid": w.number,
        "%nwarpid": len(cta.warps) or 1,
        "%smid": cluster.number % 132,
        "%nsmid": 132,
        "%gridid": 1,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": cluster.size,
        "%is_explicit_cluster": 1,
        "%lanemask_eq": np.left_shift(np.uint32(1), lane),
        "%lanemask_lt": np.left_shift(np.uint32(1), lane) - np.uint32(1),
        "%lanemask_le": ((np.uint64(2) << lane.astype(np.uint64)) - np.uint64(1)).astype(np.uint32),
        "%lanemask_gt": ~((np.uint64(2) << lane.astype(np.uint64)) - np.uint64(1)).astype(np.uint32),
        "%lanemask_ge": ~(np.left_shift(np.uint32(1), lane) - np.uint32(1)),
        "%dynamic_smem_size": cluster.launch.shared_bytes,
        "%total_smem_size": symbols.shared_bytes - RESERVED_SHARED_BYTES,
        "%aggr_smem_size": symbols.shared_bytes,
        "%reserved_smem_offset_begin": 0,
        "%reserved_smem_offset_end": RESERVED_SHARED_BYTES,
        "%reserved_smem_offset_cap": RESERVED_SHARED_BYTES,
        "%current_graph_exec": 0,
    }
    return values.get(name)
