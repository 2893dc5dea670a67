"""The softmax warps: scores to probabilities, row maxima and row sums, LSE."""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.experimental.primitives import nvvm_wrapper as nvvm

from . import sm100_rings as rings
from . import sm100_views as views
from .sm100_plan import GROUP, HALF_LANES, WARP, Fixed, Plan
from .sm100_work import Work

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@dataclass(frozen=True)
class Statistics(Fixed):
    """The factors that a softmax group hands to the correction warps, a float32 a thread, and the named barriers of
    the hand-over: by group, full and empty. In a pair, threads of different warps share a row, and tell each other what
    they found of it through `exchange`."""

    factors: Any  # (thread, group)
    full: tuple[Any, ...]
    empty: tuple[Any, ...]
    exchange: Any  # (thread, turn)
    exchanged: Any  # a named barrier


@dataclass(frozen=True)
class RowOfThread(Fixed):
    """Which row a thread of a warp group works on, and which half of an accumulator's columns it holds.

    At M = 128, thread t owns row t. At M = 64, rows 16 w to 16 w + 15 lie in lanes 0-15 of warp w, the first half of
    their columns, and in lanes 16-31, the second half: two threads share a row. In a pair, a CTA's 64 rows lie in lanes
    0-63, the first half, and in lanes 64-127.
    """

    thread: Any
    row: Any
    half: Any

    @staticmethod
    def of(plan: Plan):
        thread = cute.arch.thread_idx()[0] % GROUP
        if plan.halves == 1:
            return RowOfThread(thread, thread, Int32(0))
        if plan.pair:
            return RowOfThread(thread, thread % plan.m_tile, thread // plan.m_tile)
        lane = thread % WARP
        return RowOfThread(thread, thread // WARP * HALF_LANES + lane % HALF_LANES, lane // HALF_LANES)


@dataclass(frozen=True)
class Softmax(Fixed):
    """Turns each S into P. A row's statistics are relative to its `base`: the raw maximum that its exponentials are
    relative to, which follows the row's maximum at once (threshold 0), or when that has grown by more than `threshold`
    powers of two: the probabilities are then at most 2**threshold, and O needs a rescale less often."""

    plan: Plan
    tensors: dict[str, Any]
    s_ring: rings.Ring
    p_ring: rings.Ring
    p_chunks: Any  # P's shared memory (row, element, chunk, stage), or None
    statistics: Statistics

    @cute.jit
    def run(self, group: cutlass.Constexpr, work, tmem_ptr, scale, left, right):
        plan = self.plan
        scale_log2 = scale * LOG2_E
        me = RowOfThread.of(plan)
        columns = views.ThreadColumns(tmem_ptr, me.thread)
        rows = work.rows[group]
        position = rows.first_position + me.row // plan.packing.heads
        first_key, end_key = Int32(0), Int32(0)
        if const_expr(plan.dense):
            first_key, end_key = plan.mask.visible(position, work.queries, work.keys, left, right)
        s_place, p_place = self.s_ring.user(), self.p_ring.filler()
        if const_expr(group == 1):
            s_place.advance()
            p_place.advance()

        peak, base, total = -Float32.inf, -Float32.inf, Float32(0.0)
        for i in cutlass.range(work.first, work.last, unroll=1):
            scores = self._read(columns, s_place)
            self._mask(scores, work, i, first_key, end_key, me)
            peak = self._row_max(scores, peak, i, me)
            base, factor = self._follow(peak, base, scale_log2)
            if i > work.first:
                if i > work.first + 1:
                    self.statistics.empty[group].arrive_and_wait()
                self.statistics.factors[me.thread, group] = factor
                self.statistics.full[group].arrive()
            tile_total = self._exponentials(scores, scale_log2, -_or_zero(base) * scale_log2)
            total = total * factor + tile_total
            self._write(scores, columns, me, p_place)
            for _ in cutlass.range_constexpr(plan.groups):
                s_place.advance()
                p_place.advance()

        if const_expr(plan.halves == 2):
            total = total + self._other_half(total, work.last, me)
        exists = Boolean(position < work.queries)
        if const_expr(plan.problem.gather):
            exists = Boolean(me.row < plan.rows)
        if work.tiles > 1:
            self.statistics.empty[group].arrive_and_wait()
        head = plan.packing.head(me.row, rows.head_block)
        self.statistics.factors[me.thread, group] = self._last_factor(head, exists, peak, base, total, scale_log2)
        self.statistics.full[group].arrive()
        if exists and work.pv_slice == 0 and me.half == 0:
            self._report(head, position, work, peak, base, total, scale, scale_log2)

    @cute.jit
    def _read(self, columns: cutlass.Constexpr, place):
        """The thread's part of the next S; its stage is free for the next product then."""
        self.s_ring.wait_full(place)
        nvvm.tcgen05_fence("after_thread_sync")
        scores = columns.load(self.plan.tmem.s + place.index * self.plan.s_columns, self.plan.s_columns)
        cute.arch.fence_view_async_tmem_load()
        nvvm.tcgen05_fence("before_thread_sync")
        rings.arrive_group(self.s_ring.empty(place.index), self.plan.pair)
        return scores

    @cute.jit
    def _mask(self, scores, work, i, first_key, end_key, me: cutlass.Constexpr):
        """Scores of keys that the row doesn't see become -inf, in the tiles that have any."""
        plan = self.plan
        if const_expr(plan.dense):
            if i < work.dense_tiles:
                tile = work.begin + i
                if tile < work.full_begin or tile >= work.full_end:
                    begin = tile * plan.kv_tile + me.half * plan.s_columns
                    self._hide(scores, first_key - begin, end_key - begin)
            if const_expr(plan.problem.sources == 2):
                if i >= work.dense_tiles:
                    self._mask_second(scores, work, (i - work.dense_tiles) * plan.kv_tile, me)
        else:
            self._mask_second(scores, work, i * plan.kv_tile, me)

    @cute.jit
    def _mask_second(self, scores, work, tile_begin, me: cutlass.Constexpr):
        """The same for source 2 and gathered ones, without a mask by position; `tile_begin`: the tile's first key."""
        if const_expr(self.plan.problem.gather):
            self._hide_unlisted(scores, work, tile_begin, me)
        elif tile_begin + self.plan.kv_tile > work.keys2:
            self._hide(scores, Int32(0), work.keys2 - tile_begin - me.half * self.plan.s_columns)

    @cute.jit
    def _hide(self, scores, first, end):
        """Hides all columns but ``first <= column < end``."""
        for j in cutlass.range_constexpr(cute.size(scores)):
            hidden = j >= end
            if const_expr(self.plan.mask.has_left_side):
                hidden = hidden or j < first
            scores[j] = -Float32.inf if hidden else scores[j]

    @cute.jit
    def _hide_unlisted(self, scores, work, tile_begin, me: cutlass.Constexpr):
        """Hides the columns whose list entry is -1 or lies past the list's end.

        All rows of a CTA share the list, so each lane looks at one entry in 32, and a ballot tells the others.
        """
        words = [self._listed(work, tile_begin + word * WARP) for word in range(self.plan.kv_tile // WARP)]
        own = self.plan.s_columns // WARP
        for j in cutlass.range_constexpr(cute.size(scores)):
            listed = words[j // WARP]
            if const_expr(self.plan.halves == 2):
                listed = words[own + j // WARP] if me.half == 1 else listed
            scores[j] = scores[j] if (listed >> (j % WARP)) & 1 != 0 else -Float32.inf

    @cute.jit
    def _listed(self, work, begin):
        """A bit for each of 32 entries of the list from `begin` on: whether it names a row."""
        place = begin + cute.arch.lane_idx()
        entry = Int32(-1)
        if place < work.keys2:
            entry = self.tensors["indices"][work.batch, work.rows[0].first_position, place]
        return cute.arch.vote_ballot_sync(entry >= 0)

    @cute.jit
    def _row_max(self, scores, peak, i, me: cutlass.Constexpr):
        """The maximum of the row's scores of tile i and `peak`, in four chains so that they overlap."""
        chains = [cute.arch.fmax(peak, scores[0]), scores[1], scores[2], scores[3]]
        for j in cutlass.range_constexpr(4, cute.size(scores)):
            chains[j % 4] = cute.arch.fmax(chains[j % 4], scores[j])
        highest = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
        if const_expr(self.plan.halves == 2):
            highest = cute.arch.fmax(highest, self._other_half(highest, i, me))
        return highest

    @cute.jit
    def _other_half(self, value, turn, me: cutlass.Constexpr):
        """The value of the thread that has the other half of the row's columns; `turn` counts such exchanges, of which
        two use different memory: who is at the second one has read what the first one brought."""
        if const_expr(self.plan.pair):
            exchange = self.statistics.exchange
            exchange[me.thread, turn % 2] = value
            self.statistics.exchanged.arrive_and_wait()
            other = exchange[me.thread ^ self.plan.m_tile, turn % 2]
        else:
            other = cute.arch.shuffle_sync_bfly(value, offset=HALF_LANES)
        return other

    @cute.jit
    def _follow(self, peak, base, scale_log2):
        """(the base for this tile, the factor that brings O and the row sum to it)."""
        moved = peak
        if const_expr(self.plan.tunables.rescale_log2 > 0):
            # -inf - -inf is NaN, which is not greater: the base of a row without keys stays.
            grown = (peak - base) * scale_log2
            moved = peak if grown > Float32(self.plan.tunables.rescale_log2) else base
        factor = cute.math.exp2((base - _or_zero(moved)) * scale_log2, fastmath=True)
        return moved, Float32(1.0) if moved == base else factor

    @cute.jit
    def _exponentials(self, scores, scale_log2, minus_base):
        """Replaces each score s by exp2(s * scale_log2 + minus_base); returns the row's sum."""
        sums = [(Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))]
        for j in cutlass.range_constexpr(0, cute.size(scores), 2):
            low, high = cute.arch.fma_packed_f32x2(
                (scores[j], scores[j + 1]), (scale_log2, scale_log2), (minus_base, minus_base)
            )
            scores[j] = cute.math.exp2(low, fastmath=True)
            scores[j + 1] = cute.math.exp2(high, fastmath=True)
            chain = j // 2 % 2
            sums[chain] = cute.arch.add_packed_f32x2(sums[chain], (scores[j], scores[j + 1]))
        low, high = cute.arch.add_packed_f32x2(sums[0], sums[1])
        return low + high

    @cute.jit
    def _write(self, scores, columns: cutlass.Constexpr, me: cutlass.Constexpr, place):
        """P, rounded, to where the PV product reads it."""
        plan = self.plan
        self.p_ring.wait_empty(place)
        nvvm.tcgen05_fence("after_thread_sync")
        if const_expr(plan.smem_p):
            rounded = cute.make_rmem_tensor(cute.size(scores), plan.element)
            rounded.store(scores.load().to(plan.element))
            chunks = cute.flat_divide(rounded, (8,))
            for chunk in cutlass.range_constexpr(cute.size(chunks, mode=[1])):
                at = me.half * (plan.s_columns // 8) + chunk
                cute.autovec_copy(chunks[None, chunk], self.p_chunks[me.row, None, at, place.index])
            cute.arch.fence_view_async_shared()
        else:
            # A 32-bit column of P holds the probabilities of keys 2c (low half) and 2c + 1.
            pairs = cute.make_rmem_tensor(plan.kv_tile // 2, Float32)
            rounded = cute.make_tensor(cute.recast_ptr(pairs.iterator, dtype=plan.element), scores.layout)
            rounded.store(scores.load().to(plan.element))
            columns.store(pairs, plan.tmem.p + place.index * plan.tmem.p_stride)
            cute.arch.fence_view_async_tmem_store()
            nvvm.tcgen05_fence("before_thread_sync")
        rings.arrive_group(self.p_ring.full(place.index), plan.pair)

    @cute.jit
    def _last_factor(self, head, exists, peak, base, total, scale_log2):
        """What O is multiplied by in the epilogue. Normalised: 1 / row sum, the sink's share in it; else what makes it
        relative to the row's maximum. 0 for a row without keys."""
        plan = self.plan
        if const_expr(plan.problem.normalize and not plan.partial):
            if const_expr(plan.problem.has_sink):
                if exists:
                    sink = self.tensors["sink"][head] * LOG2_E - _or_zero(base) * scale_log2
                    total = total + (cute.math.exp2(sink, fastmath=True) if total > 0.0 else Float32(0.0))
            factor = Float32(1.0) / total if total > 0.0 else Float32(0.0)
        else:
            factor = cute.math.exp2((base - _or_zero(peak)) * scale_log2, fastmath=True)
        return factor

    @cute.jit
    def _report(self, head, position, work, peak, base, total, scale, scale_log2):
        """LSE (natural logarithm, without the sink) and the raw row maximum; for a merge, maximum and sum."""
        plan, tensors = self.plan, self.tensors
        if const_expr(plan.partial):
            place = self.partial_row(work, head, position)
            ratio = cute.math.exp2((base - _or_zero(peak)) * scale_log2, fastmath=True)
            tensors["partial_statistics"][0, work.split, place] = peak
            tensors["partial_statistics"][1, work.split, place] = total * ratio
        elif const_expr("lse" in tensors):
            at = (work.batch, head, position)
            if const_expr(plan.problem.varlen):
                at = (head, work.first_query + position)
            # log2(0) is -inf: a row without keys has no exponentials.
            tensors["lse"][at] = _or_zero(base) * scale + cute.math.log2(total, fastmath=True) * Float32(LN_2)
            if const_expr("row_max" in tensors):
                tensors["row_max"][at] = peak

    def partial_row(self, work: Work, head, position):
        return partial_row(self.plan, self.tensors, work, head, position)


def partial_row(plan: Plan, tensors, work: Work, head, position):
    """A row's number in the workspace: tokens in the order of O, heads fastest."""
    token = work.first_query + position
    if not plan.problem.varlen:
        token = work.batch * tensors["q"].shape[1] + position
    return token * plan.problem.heads + head


@cute.jit
def _or_zero(maximum):
    """A row's maximum, or 0 for that of a row without keys, so that differences from it are no NaN."""
    return Float32(0.0) if maximum == -Float32.inf else maximum
