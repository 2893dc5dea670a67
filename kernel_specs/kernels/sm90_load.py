"""The producers of the Hopper attention kernel: Q once, and the tiles of K and V through their rings.

The host side makes a TMA atom and the view that it addresses for each operand (`tma_operands`). On the device, a ring
(`Ring`) is filled from a stream for each KV source, over the steps of one walk (sm90_runs). A stream offers
``fill(state, run) -> state``: `TileStream` does it by TMA, and another way of loading can stand in for it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from .attention.packing import rows_view
from .attention.sequences import Sequences
from .sm90_plan import WARPS_PER_GROUP, Plan


@dataclass(frozen=True)
class Ring:
    """A ring of shared-memory stages: `smem` (tile rows, tile columns, stage); `parts` stages hold a tile, and each is
    full after `fills` arrivals."""

    pipe: pipeline.PipelineTmaAsync
    smem: cute.Tensor
    stages: int
    parts: int
    fills: int = 1


def make_ring(plan: Plan, barriers, smem, stages: int, parts: int = 1) -> Ring:
    """A K or V ring: the CTAs of a cluster fill it together; each consumer warp that reads it releases a stage."""
    stage_elements = cute.size(smem, mode=[0]) * cute.size(smem, mode=[1])
    pipe = make_pipe(plan, barriers, stages, stage_elements, plan.cluster_m, plan.fills)
    return Ring(pipe, smem, stages, parts, plan.fills)


def make_pipe(plan: Plan, barriers, stages: int, elements: int, sharers: int, fills: int = 1):
    """A TMA pipeline of ``elements`` and ``fills`` arrivals a stage that ``sharers`` CTAs fill together."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers.data_ptr(),
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, fills),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, plan.row_blocks * WARPS_PER_GROUP * sharers),
        tx_count=elements * plan.element.width // 8,
        cta_layout_vmnk=cute.make_layout((1, sharers, 1, 1)),
        defer_sync=True,
    )


# ---- host side -----------------------------------------------------------------------------------------------------


def tma_operands(plan: Plan, tensors: dict, layouts: dict) -> dict:
    """(TMA atom, view to tile) of every operand, by name: q, o as rows_view; k.. (keys, columns, kv_head, outer); v..
    (columns, keys, kv_head, outer), where `outer` is a sequence, a page, or nothing but 0. Gathered ones have none."""
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    share = cpasync.CopyBulkTensorTileG2SMulticastOp() if plan.cluster_m > 1 else load
    block = (plan.packing.tile,)

    def make(op, view, layout, tile, sharers=1):
        return cpasync.make_tiled_tma_atom(op, view, layout, tile, sharers)

    one_q, one_k, one_v, one_o = (cute.select(layouts[name], mode=[0, 1]) for name in ("q", "k", "v", "o"))
    operands = {"q": make(load, rows_view(tensors["q"]), one_q, (*block, plan.head_dim))}
    if plan.merge == "none":
        operands["o"] = make(store, rows_view(tensors["o"]), one_o, (*block, plan.pv_n_tile))
    sources = ("", "2") if plan.two_sources else ("",)
    for source in sources[:-1] if plan.gather else sources:
        view = keys_view(tensors[f"k{source}"], (0, 1))
        operands[f"k{source}"] = make(share, view, one_k, (plan.kv_tile, plan.k_columns), plan.cluster_m)
        if not plan.kv_shared:
            view = keys_view(tensors[f"v{source}"], (1, 0))
            operands[f"v{source}"] = make(share, view, one_v, (plan.pv_n_tile, plan.kv_tile), plan.cluster_m)
    return operands


def keys_view(tensor, order: tuple[int, int]):
    """[outer, keys, kv_heads, d], or packed [keys, kv_heads, d], as (keys, d, kv_heads, outer), the first two in
    `order`."""
    if cute.rank(tensor) == 3:
        layout = cute.append(cute.select(tensor.layout, mode=[0, 2, 1]), cute.make_layout(1, stride=0))
    else:
        layout = cute.select(tensor.layout, mode=[1, 3, 2, 0])
    return cute.make_tensor(tensor.iterator, cute.select(layout, mode=[*order, 2, 3]))


# ---- device side ---------------------------------------------------------------------------------------------------


def state_at(position, stages: int):
    """Producer state of the ring stage that the ``position``-th load fills."""
    return pipeline.PipelineState(stages, Int32(0), Int32(position % stages), Int32((position // stages + 1) % 2))


@cute.jit
def load_q(plan, tma, smem_q, pipe, sequences, place, loads=0):
    """Load every consumer's row block, after as many ``loads`` of Q before. Rows past the tensor's end arrive as zeros;
    past a packed sequence's end lie another one's, whose results are thrown away."""
    state = state_at(loads, 1)
    pipe.producer_acquire(state)
    view = first_rows(plan, sequences, tma[1], place.batch)
    for row_block in cutlass.range_constexpr(plan.row_blocks):
        where = plan.packing.coordinates(place.first_block + row_block, place.kv_head)
        tile = cute.local_tile(view, (plan.packing.tile, plan.head_dim), (where, 0))
        shared, source = cpasync.tma_partition(
            tma[0],
            0,
            cute.make_layout(1),
            cute.group_modes(smem_q[None, None, row_block], 0, 2),
            cute.group_modes(tile, 0, 2),
        )
        cute.copy(tma[0], source, shared, tma_bar_ptr=pipe.producer_get_barrier(state))


def first_rows(plan: Plan, sequences: Sequences, view, batch):
    """A `rows_view` of Q or O as ((heads, positions), d) of one sequence."""
    rows = view[None, None, sequences.batch_mode(batch)]
    if const_expr(plan.problem.varlen):
        rows = cute.domain_offset(((0, sequences.first_query(batch)), 0), rows)
    return rows


class TileStream:
    """The tiles of K or V of one source, by TMA. In a cluster each CTA fetches its part of a tile for all."""

    def __init__(self, plan: Plan, tma, ring: Ring, sequences: Sequences, place, name: str):
        """`name`: the operand's, such as k or v2."""
        self.plan, self.ring, self.sequences, self.batch = plan, ring, sequences, place.batch
        self.atom = tma[0]
        self.first_source = not name.endswith("2")
        view = tma[1][None, None, place.kv_head, None]
        is_k = name.startswith("k")
        if const_expr(plan.problem.varlen and plan.problem.page == 0):
            start = sequences.first_key(place.batch)
            view = cute.domain_offset((start, 0, 0) if is_k else (0, start, 0), view)
        if const_expr(is_k):
            part = 0 if const_expr(plan.k_sub == 1) else None
            tiled = cute.local_tile(view, (plan.kv_tile, plan.k_columns), (None, part, None))
        else:
            tiled = cute.local_tile(view, (plan.pv_n_tile, plan.kv_tile), (place.column_slice, None, None))
        self.shared, self.source = cpasync.tma_partition(
            self.atom,
            place.rank,
            cute.make_layout(plan.cluster_m),
            cute.group_modes(ring.smem, 0, 2),
            cute.group_modes(tiled, 0, 2),
        )
        self.multicast = {"mcast_mask": cutlass.Int16(2**plan.cluster_m - 1)} if plan.cluster_m > 1 else {}

    @cute.jit
    def fill(self, state, run):
        """Load a run of tiles, the last one first, into the ring from ``state`` on; returns the state after them."""
        # A page's number comes from memory: it is asked for one tile ahead.
        outer = self._outer(run.end - 1)
        for i in cutlass.range(run.end - run.begin, unroll=1):
            tile = run.end - 1 - i
            following = self._outer(tile - 1)
            for part in cutlass.range_constexpr(self.ring.parts):
                self.ring.pipe.producer_acquire(state)
                if const_expr(self.ring.fills > 1):
                    with cute.arch.elect_one():
                        barrier = self.ring.pipe.producer_get_barrier(state)
                        cute.arch.mbarrier_arrive(barrier, arrive_count=self.ring.fills - 1)
                self._fetch(tile, outer, part, state.index, self.ring.pipe.producer_get_barrier(state))
                state.advance()
            outer = following
        return state

    def _outer(self, tile):
        """The outer coordinate of a tile; of tile -1, some page's."""
        if const_expr(self.first_source):
            return self.sequences.tile_outer(self.batch, cutlass.max(tile, 0), self.plan.kv_tile)
        return self.batch

    def _fetch(self, tile, outer, part: int, stage, barrier):
        """Start to load a tile, or the ``part``-th of its K stages, into a stage."""
        row = self.sequences.tile_row(tile, self.plan.kv_tile) if self.first_source else tile
        coordinates = (None, row, outer) if self.ring.parts == 1 else (None, row, part, outer)
        cute.copy(self.atom, self.source[coordinates], self.shared[None, stage], tma_bar_ptr=barrier, **self.multicast)


def fill_ring(ring: Ring, streams, runs, tiles):
    """Stream the walk's tiles through a ring, after as many ``tiles`` before. ``streams``: one for each source."""
    state = state_at(tiles * ring.parts, ring.stages)
    state = streams[0].fill(state, runs.first)
    if const_expr(len(streams) == 2):
        streams[1].fill(state, runs.second)
