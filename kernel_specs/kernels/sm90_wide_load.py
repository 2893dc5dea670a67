"""The producer of the wide Hopper attention kernel: the parts of K's and V's tiles, through one ring.

A part is ``kv_tile`` keys times ``part_columns`` columns, keys by columns in memory, be it K's or V's.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .attention.packing import rows_view
from .attention.sequences import Sequences
from .sm90_gather import PRESENT_BUFFERS, RowGather
from .sm90_load import keys_view
from .sm90_plan import WARP_THREADS
from .sm90_ring import PartRing
from .sm90_streams import PartStreams
from .sm90_wide_plan import HEAD_DIM, OWN_COLUMNS, WidePlan, key_position, value_position


def tma_operands(plan: WidePlan, tensors: dict, layouts: dict) -> dict:
    """(TMA atom, view to tile) of every operand, by name: q, o as rows_view; k.., v.. (keys, columns, kv_head, outer).

    Gathered ones and an O that is merged have none.
    """
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    share = cpasync.CopyBulkTensorTileG2SMulticastOp() if plan.cluster_m > 1 else load
    make, tile = cpasync.make_tiled_tma_atom, plan.packing.tile
    one_q, one_part, one_o = (cute.select(layouts[name], mode=[0, 1]) for name in ("q", "k", "o"))
    operands = {
        "q": make(load, rows_view(tensors["q"]), one_q, (tile, HEAD_DIM)),
    }
    if plan.merge == "none":
        operands["o"] = make(store, rows_view(tensors["o"]), one_o, (tile, OWN_COLUMNS))
    gathered = {"k2", "v2"} if plan.two_sources else {"k", "v"}
    for name in ("k", "v", "k2", "v2"):
        if name in tensors and not (plan.gather and name in gathered):
            box = (plan.kv_tile, plan.part_columns)
            operands[name] = make(share, keys_view(tensors[name], (0, 1)), one_part, box, plan.cluster_m)
    return operands


class KeyLoader:
    """Streams a CTA's tiles of K, and those of V if they are others, through the ring: by the first producer warp, and
    by all of them where a source is gathered.

    `smem`: the ring's slots (keys, columns, slot); `operands`: TMA's, by name; `present`: for `ScoreMask`.
    """

    def __init__(self, plan: WidePlan, operands: dict, given: dict, smem, ring: PartRing, sequences: Sequences, place):
        self.plan, self.ring = plan, ring
        box = plan.kv_tile, plan.part_columns
        self.streams = PartStreams(plan, operands, smem.k, sequences, place, box, place.rank, plan.cluster_m)
        # The CTAs that share these tiles: every cluster_splits-th rank.
        ranks = sum(1 << rank * plan.cluster_splits for rank in range(plan.cluster_m))
        sharers = cutlass.Int16(Int32(ranks) << place.share_rank)
        self.multicast = {"mcast_mask": sharers} if plan.cluster_m > 1 else {}
        # Row blocks side by side read the same tiles at about the same time: they take turns at prefetching them.
        self.turns = max(1, plan.packing.head_blocks // plan.cluster_m)
        self.turn = place.first_block // plan.cluster_m % self.turns
        if const_expr(plan.gather):
            _, position = plan.packing.coordinates(place.first_block, place.kv_head)
            position = cutlass.min(position, given["q"].shape[1] - 1)
            entries = given["indices"][place.batch, position, None]
            self.gather = RowGather(entries, plan.kv_tile, plan.part_columns, plan.element, plan.gather_threads)
            source = "2" if plan.two_sources else ""
            self.rows = {
                name: given[name + source][place.batch, None, place.kv_head, None]
                for name in ("k", "v")
                if name + source in given
            }
            self.slots, self.present = smem.slots, smem.present

    @cute.jit
    def run(self, runs, warp_index):
        """Load all steps of a walk: with K and V apart, K of a step before V of the step before it."""
        plan = self.plan
        if const_expr(plan.gather):
            self._run_gathering(runs)
        else:
            if warp_index == 0:
                self._run_by_tma(runs)

    @cute.jit
    def _run_by_tma(self, runs):
        """`run` where nothing is gathered."""
        plan = self.plan
        for step in cutlass.range(runs.steps, unroll=1):
            self._load("k", runs, step, key_position(plan, step))
            if const_expr(not plan.kv_shared):
                if step > 0:
                    self._load("v", runs, step - 1, value_position(plan, step - 1))
            if const_expr(plan.prefetch > 0):
                ahead = step + plan.prefetch
                if ahead < runs.steps and ahead % self.turns == self.turn:
                    self._prefetch(runs, ahead)
        if const_expr(not plan.kv_shared):
            if runs.steps > 0:
                self._load("v", runs, runs.steps - 1, value_position(plan, runs.steps - 1))

    # ---- by TMA ----------------------------------------------------------------------------------------------------

    def _prefetch(self, runs, step):
        """Fetch a step's tile into L2: the ring holds little more than two tiles, which is less than a fetch from
        memory takes. After the loads: a fetch takes the copy engine as long as a load, and the first scores wait for
        these."""
        for operand in ("k",) if self.plan.kv_shared else ("k", "v"):
            self._load(operand, runs, step, None)

    def _load(self, operand, runs, step, position):
        """Load the parts of K or V of a step's tile, whichever source it lies in; without a position, into L2 alone."""
        self.streams.of_step(operand, runs, step, partial(self._load_parts, position))

    def _load_first(self, operand, tile, position):
        """A tile of source 1."""
        self.streams.of_first(operand, tile, partial(self._load_parts, position))

    @cute.jit
    def _load_parts(self, position, stream: tuple, tile, outer):
        """Load a tile of one of the `streams`."""
        atom, shared, source = stream
        if const_expr(position is None):
            for part in cutlass.range_constexpr(self.plan.parts):
                cute.prefetch(atom, source[None, tile, part, outer])
        else:
            self._load_into_ring(atom, shared, source, tile, outer, position)

    @cute.jit
    def _load_into_ring(self, atom, shared, source, tile, outer, position):
        """All warps that call this wait for the slots, so that none misses a phase; the first one loads."""
        first_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        for part in cutlass.range_constexpr(self.plan.parts):
            self.ring.wait_empty(position + part)
            if const_expr(not self.plan.gather):
                self._load_part(atom, source[None, tile, part, outer], shared, position + part)
            else:
                if first_warp:
                    self._load_part(atom, source[None, tile, part, outer], shared, position + part)

    def _load_part(self, atom, source, shared, position):
        self.ring.expect(position)
        target = shared[None, self.ring.slot(position)]
        cute.copy(atom, source, target, tma_bar_ptr=self.ring.full(position), **self.multicast)

    # ---- gathered --------------------------------------------------------------------------------------------------

    @cute.jit
    def _run_gathering(self, runs):
        """`run` for all producer warps: source 1 by TMA, if the gathered one is the second, then the listed rows."""
        plan = self.plan
        dense = Int32(0)
        if const_expr(plan.two_sources):
            dense = runs.first_steps
            for step in cutlass.range(dense, unroll=1):
                self._load_first("k", runs.first.end - 1 - step, key_position(plan, step))
                if const_expr(not plan.kv_shared):
                    if step > 0:
                        self._load_first("v", runs.first.end - step, value_position(plan, step - 1))
        last = runs.second.end - 1 if const_expr(plan.two_sources) else runs.first.end - 1
        before, now, following = (self.gather.make_entries() for _ in range(3))
        self.gather.ask(last, following)
        for step in cutlass.range(dense, runs.steps, unroll=1):
            for i in cutlass.range_constexpr(plan.kv_tile // WARP_THREADS):
                before[i] = now[i]
                now[i] = following[i]
            self.gather.ask(last - 1 - (step - dense), following)
            self.gather.tell(now, self.present[None, step % PRESENT_BUFFERS])
            self._gather_parts("k", now, key_position(plan, step))
            if const_expr(not plan.kv_shared):
                if step > dense:
                    self._gather_parts("v", before, value_position(plan, step - 1))
                else:
                    self._load_last_dense(runs, step)
        if const_expr(not plan.kv_shared):
            if runs.steps > dense:
                self._gather_parts("v", now, value_position(plan, runs.steps - 1))
            else:
                self._load_last_dense(runs, runs.steps)

    @cute.jit
    def _load_last_dense(self, runs, step):
        """V of the last dense tile, before ``step``, if there is one."""
        if const_expr(self.plan.two_sources):
            if step > 0:
                self._load_first("v", runs.first.begin, value_position(self.plan, step - 1))

    def _gather_parts(self, operand, entries, position):
        """Fetch the parts of K or V of a tile's entries."""
        plan = self.plan
        for part in range(plan.parts):
            self.ring.wait_empty(position + part)
            target = self.slots + self.ring.slot(position + part) * (plan.kv_tile * plan.part_columns)
            self.gather.fetch(entries, self.rows[operand], part * plan.part_columns, target)
            self.gather.complete(self.ring.full(position + part))
