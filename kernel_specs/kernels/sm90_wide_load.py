"""The producer of the wide Hopper attention kernel: the parts of K's and V's tiles, through one ring.

A part is ``kv_tile`` keys times ``part_columns`` columns, keys by columns in memory, be it K's or V's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from .attention.packing import rows_view
from .attention.sequences import Sequences
from .sm90_load import keys_view
from .sm90_ring import PartRing
from .sm90_wide_plan import HEAD_DIM, OWN_COLUMNS, WidePlan, key_position, value_position


def tma_operands(plan: WidePlan, tensors: dict, layouts: dict) -> dict:
    """(TMA atom, view to tile) of every operand, by name: q, o as rows_view; k.., v.. (keys, columns, kv_head, outer)."""
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    share = cpasync.CopyBulkTensorTileG2SMulticastOp() if plan.cluster_m > 1 else load
    make, tile = cpasync.make_tiled_tma_atom, plan.packing.tile
    one_q, one_part, one_o = (cute.select(layouts[name], mode=[0, 1]) for name in ("q", "k", "o"))
    operands = {
        "q": make(load, rows_view(tensors["q"]), one_q, (tile, HEAD_DIM)),
    }
    if plan.merge == "none":
        operands["o"] = make(store, rows_view(tensors["o"]), one_o, (tile, OWN_COLUMNS))
    for name in ("k", "v", "k2", "v2"):
        if name in tensors:
            box = (plan.kv_tile, plan.part_columns)
            operands[name] = make(share, keys_view(tensors[name], (0, 1)), one_part, box, plan.cluster_m)
    return operands


class KeyLoader:
    """Streams a CTA's tiles of K, and those of V if they are others, through the ring: by one warp.

    `smem`: the ring's slots (keys, columns, slot); `operands`: TMA's, by name.
    """

    def __init__(self, plan: WidePlan, operands: dict, smem, ring: PartRing, sequences: Sequences, place):
        self.plan, self.ring, self.sequences, self.batch = plan, ring, sequences, place.batch
        self.streams = {}
        for name in operands:
            if name not in ("q", "o"):
                self.streams[name] = self._stream(operands[name], smem, place)
        # The CTAs that share these tiles: every cluster_splits-th rank.
        ranks = sum(1 << rank * plan.cluster_splits for rank in range(plan.cluster_m))
        sharers = cutlass.Int16(cutlass.Int32(ranks) << place.share_rank)
        self.multicast = {"mcast_mask": sharers} if plan.cluster_m > 1 else {}

    def _stream(self, operand, smem, place):
        """(atom, shared, source): in a cluster each CTA fetches its share of a part's keys for all."""
        plan = self.plan
        view = operand[1][None, None, place.kv_head, None]
        if const_expr(plan.problem.varlen and plan.problem.page == 0):
            view = cute.domain_offset((self.sequences.first_key(place.batch), 0, 0), view)
        tiled = cute.local_tile(view, (plan.kv_tile, plan.part_columns), (None, None, None))
        shared, source = cpasync.tma_partition(
            operand[0],
            place.rank,
            cute.make_layout(plan.cluster_m),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(tiled, 0, 2),
        )
        return operand[0], shared, source

    @cute.jit
    def run(self, runs):
        """Load all steps of a walk: with K and V apart, K of a step before V of the step before it."""
        plan = self.plan
        separate = const_expr(not plan.kv_shared)
        for step in cutlass.range(runs.steps + (1 if separate else 0), unroll=1):
            if const_expr(separate):
                if step < runs.steps:
                    self._load("k", runs, step, key_position(plan, step))
                if step > 0:
                    self._load("v", runs, step - 1, value_position(plan, step - 1))
            else:
                self._load("k", runs, step, key_position(plan, step))

    @cute.jit
    def _load(self, operand: cutlass.Constexpr[str], runs, step, position):
        """Load the parts of K or V of a step's tile, whichever source it lies in."""
        if const_expr(self.plan.two_sources):
            if step < runs.first_steps:
                self._load_first(operand, runs.first.end - 1 - step, position)
            else:
                tile = runs.second.end - 1 - (step - runs.first_steps)
                self._load_parts(self.streams[f"{operand}2"], tile, self.batch, position)
        else:
            self._load_first(operand, runs.first.end - 1 - step, position)

    def _load_first(self, operand, tile, position):
        """A tile of source 1."""
        where, outer = self.sequences.tile_place(self.batch, tile, self.plan.kv_tile)
        self._load_parts(self.streams[operand], where, outer, position)

    def _load_parts(self, stream, tile, outer, position):
        atom, shared, source = stream
        for part in range(self.plan.parts):
            self.ring.wait_empty(position + part)
            self.ring.expect(position + part)
            cute.copy(
                atom,
                source[None, tile, part, outer],
                shared[None, self.ring.slot(position + part)],
                tma_bar_ptr=self.ring.full(position + part),
                **self.multicast,
            )
