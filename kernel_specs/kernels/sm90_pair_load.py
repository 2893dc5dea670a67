"""The producers of the paired Hopper attention kernel: Q's halves, then the parts of K's and V's tiles, through two
rings.

A part is 64 rows times 256 columns, rows by columns in memory, be it Q's, K's or V's. sm90_pair_plan.py has the order.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from .attention.packing import rows_view
from .attention.sequences import Sequences
from .fmha_sm90_pair_space import KV_TILE, OWN_COLUMNS
from .sm90_load import first_rows, keys_view
from .sm90_pair_plan import CTAS, PairPlan, key_position, value_position
from .sm90_ring import PartRing
from .sm90_streams import PartStreams


def tma_operands(plan: PairPlan, tensors: dict, layouts: dict) -> dict:
    """(TMA atom, view to tile) of every operand, by name: q, o as rows_view; k.., v.. as keys_view."""
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    make, rows, box = cpasync.make_tiled_tma_atom, (plan.packing.tile, OWN_COLUMNS), (KV_TILE, OWN_COLUMNS)
    part, one_o = (cute.select(layouts[name], mode=[0, 1]) for name in ("keys", "o"))
    operands = {
        "q": make(load, rows_view(tensors["q"]), part, rows),
        "o": make(store, rows_view(tensors["o"]), one_o, rows),
    }
    for source in ("", "2") if plan.two_sources else ("",):
        operands[f"k{source}"] = make(load, keys_view(tensors[f"k{source}"], (0, 1)), part, box)
        if not plan.kv_shared:
            operands[f"v{source}"] = make(load, keys_view(tensors[f"v{source}"], (0, 1)), part, box)
    return operands


class PairLoader:
    """Streams what a CTA needs of all tiles through one of its rings.

    `slots` (rows, columns, slot): the ring's; `operands`: TMA's.
    """

    def __init__(self, plan: PairPlan, operands: dict, slots, ring: PartRing, sequences: Sequences, place):
        self.plan, self.slots, self.ring, self.sequences, self.place = plan, slots, ring, sequences, place
        self.rank, self.q = place.column_slice, operands["q"]
        self.streams = PartStreams(plan, operands, slots, sequences, place, (KV_TILE, OWN_COLUMNS))
        # Row blocks side by side read the same tiles at about the same time: they take turns at prefetching them.
        self.turns = plan.packing.head_blocks
        self.turn = place.first_block % self.turns

    @cute.jit
    def load_q(self, half):
        """A half of Q's columns. Rows past the tensor's end arrive as zeros; past a packed sequence's end lie another
        one's, whose results are thrown away."""
        plan, place, (atom, view) = self.plan, self.place, self.q
        rows = first_rows(plan, self.sequences, view, place.batch)
        where = plan.packing.coordinates(place.first_block, place.kv_head)
        tile = cute.local_tile(rows, (plan.packing.tile, OWN_COLUMNS), (where, half))
        shared, source = cpasync.tma_partition(
            *(atom, 0, cute.make_layout(1)),
            cute.group_modes(self.slots[None, None, 0], 0, 2),
            cute.group_modes(tile, 0, 2),
        )
        self.ring.expect(0)
        cute.copy(atom, source, shared, tma_bar_ptr=self.ring.full(0))

    @cute.jit
    def load_keys(self, runs):
        """What only scores need, and the half of Q for it: K of the own tiles, or of one latent the columns of them
        that are not the own ones."""
        plan, rank = self.plan, self.rank
        self.load_q(1 - rank if const_expr(plan.kv_shared) else 0)
        for pair in cutlass.range((runs.steps + 1 - rank) // 2, unroll=1):
            step, position = CTAS * pair + rank, key_position(plan, pair)
            if const_expr(plan.kv_shared):
                self._load("k", runs, step, 1 - rank, position)
            else:
                self._load("k", runs, step, 0, position)
                self._load("k", runs, step, 1, position + 1)

    @cute.jit
    def load_values(self, runs):
        """What O needs, and the other half of Q: the own columns of V of all tiles; of one latent first those of the
        own tile, which its scores need too."""
        plan, rank = self.plan, self.rank
        self.load_q(rank if const_expr(plan.kv_shared) else 1)
        for pair in cutlass.range((runs.steps + 1) // 2, unroll=1):
            first = value_position(plan, pair, 0, 0)
            for i in cutlass.range_constexpr(CTAS):
                if const_expr(plan.kv_shared):
                    step = CTAS * pair + (rank if const_expr(i == 0) else 1 - rank)
                    if step < runs.steps:
                        self._load("k", runs, step, rank, first + i)
                elif CTAS * pair + i < runs.steps:
                    self._load("v", runs, CTAS * pair + i, rank, first + i)
            if const_expr(plan.prefetch > 0):
                ahead = pair + plan.prefetch
                if ahead % self.turns == self.turn and CTAS * ahead + rank < runs.steps:
                    self._prefetch(runs, CTAS * ahead + rank)

    def _prefetch(self, runs, step):
        """Fetch the own tile of a pair to come into L2, for both CTAs."""
        for operand in ("k",) if self.plan.kv_shared else ("k", "v"):
            for part in range(CTAS):
                self._load(operand, runs, step, part, None)

    def _load(self, operand, runs, step, part, position):
        """Load a part of a step's tile, whichever source it lies in; without a position, into L2 alone."""
        self.streams.of_step(operand, runs, step, partial(self._load_part, part, position))

    def _load_part(self, part, position, stream: tuple, tile, outer):
        """Load a part of a tile of one of the `streams`."""
        atom, shared, source = stream
        if position is None:
            cute.prefetch(atom, source[None, tile, part, outer])
            return
        self.ring.wait_empty(position)
        self.ring.expect(position)
        target = shared[None, self.ring.slot(position)]
        cute.copy(atom, source[None, tile, part, outer], target, tma_bar_ptr=self.ring.full(position))
