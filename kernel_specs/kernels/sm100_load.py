"""The load warp: Q once, then K and V tile by tile, by TMA; and the warps that put right what TMA leaves."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from . import sm100_rings as rings
from .attention.sequences import Sequences
from .sm100_plan import GROUP, SWIZZLE_COLUMNS, Fixed, Plan

# The suffix of the loads of a pair that report to their own CTA.
OWN = " of one CTA"


@dataclass(frozen=True)
class Load(Fixed):
    """Fills Q and the rings of K and V. `smem`: name -> blocks (row, column, block, stage)."""

    plan: Plan
    sequences: Sequences
    tma: dict[str, Any]
    smem: dict[str, Any]
    q_full: Any
    k_ring: rings.Ring
    v_ring: rings.Ring | None
    handed_over: Any  # a named barrier: the gather warps go on with the rings

    @cute.jit
    def run(self, work):
        """The order is K0, K1, V0, K2, V1, ...: that in which the MMA warp uses them. With one stage each it is the
        only one that can't deadlock, since this warp waits for the buffer of the next load and of no later one.

        Gathered tiles come last and are others' work: who waited along with those who fill a ring, without filling it,
        could be overtaken by two phases of a barrier, and never see the end of the one that it waits for.
        """
        k_place = self.k_ring.filler()
        v_place = self.k_ring.filler() if const_expr(self.v_ring is None) else self.v_ring.filler()
        if work.tiles > 0:
            self._load_q(work)
        last = work.last
        if const_expr(self.plan.problem.gather):
            last = work.first + work.own_dense_tiles
        if last > work.first:
            k_place = self._load_k(work, work.first, k_place)
            for i in cutlass.range(work.first + 1, last, unroll=1):
                k_place = self._load_k(work, i, k_place)
                v_place = self._load_v(work, i - 1, v_place)
            v_place = self._load_v(work, last - 1, v_place)
            if const_expr(not self.plan.problem.gather):
                self.k_ring.drain(k_place)
                if const_expr(self.v_ring is not None):
                    self.v_ring.drain(v_place)
        if const_expr(self.plan.problem.gather):
            self.handed_over.arrive()

    def _load_q(self, work):
        plan = self.plan
        rings.expect(self.q_full, plan.groups * plan.m_tile * plan.head_dim * 2, plan.pair)
        atom, tensor = self.tma["q"]
        for group, rows in enumerate(work.rows):
            offset = ((0, work.first_query + rows.first_position), 0, 0)
            source = cute.zipped_divide(cute.domain_offset(offset, tensor), (plan.packing.tile, SWIZZLE_COLUMNS))
            to, source = _partition(atom, self.smem["q"], source)
            batch = self.sequences.batch_mode(work.batch)
            for block in range(plan.head_dim // SWIZZLE_COLUMNS):
                at = ((rows.head_block, 0), block, batch)
                cute.copy(atom, source[None, at], to[None, block, group], tma_bar_ptr=self.q_full)

    @cute.jit
    def _load_k(self, work, i, place):
        """Tile i of K: as many stages as it has parts."""
        for part in cutlass.range_constexpr(self.plan.k_sub):
            place = self._load_stage("k", self.k_ring, work, i, part * self.plan.k_columns, self.plan.k_columns, place)
        return place

    @cute.jit
    def _load_v(self, work, i, place):
        """The CTA's columns of tile i of V, if V is not K."""
        if const_expr(self.v_ring is not None):
            columns = self.plan.own_columns
            place = self._load_stage("v", self.v_ring, work, i, work.column + work.rank * columns, columns, place)
        return place

    @cute.jit
    def _load_stage(self, name: cutlass.Constexpr, ring, work, i, column, columns: cutlass.Constexpr, place):
        """Fill one stage of K or V with `columns` columns from `column` on of tile i."""
        ring.wait_empty(place)
        if const_expr(self.plan.problem.sources == 2 and not self.plan.problem.gather):
            if i < work.dense_tiles:
                self._copy_dense(name, ring, work, i, column, columns, place)
            else:
                self._copy_second(name, ring, work, i, column, columns, place)
        elif const_expr(self.plan.dense):
            self._copy_dense(name, ring, work, i, column, columns, place)
        place.advance()
        return place

    def _copy_dense(self, name, ring, work, i, column, columns, place):
        tile = work.begin + i
        row, outer = self.sequences.key_place(work.batch, tile, self.plan.kv_tile)
        self._copy_counted(name, 0, ring, work, tile, work.keys, (row, column, work.kv_head, outer), columns, place)

    def _copy_second(self, name, ring, work, i, column, columns, place):
        tile = i - work.dense_tiles
        at = (tile * self.plan.kv_tile, column, work.kv_head, work.batch)
        self._copy_counted(name, 1, ring, work, tile, work.keys2, at, columns, place)

    @cute.jit
    def _copy_counted(
        self,
        name: cutlass.Constexpr,
        source: cutlass.Constexpr,
        ring,
        work,
        tile,
        keys,
        at,
        columns: cutlass.Constexpr,
        place,
    ):
        """Copies what begins at `at` of the source. The stage's full barrier counts its bytes, or the source's boundary
        barrier does, after which the clearing warps clear the rows past the last key and report the stage full."""
        plan, full = self.plan, ring.full(place.index)
        tensor = name + "2" * source
        if const_expr(name == "k" and plan.pair):
            row, column, kv_head, outer = at
            at = (row + work.rank * plan.own_keys, column, kv_head, outer)
        if const_expr(not (plan.ragged and (name == "v" or plan.kv_shared))):
            self._copy(tensor, full, at, columns, place, plan.pair)
        else:
            past_end = Boolean((tile + 1) * plan.kv_tile > keys)
            if const_expr(plan.pair):
                # Each CTA clears its own columns, and so counts their bytes by itself.
                if past_end:
                    self._copy(tensor + OWN, ring.boundary(source), at, columns, place, False)
                else:
                    self._copy(tensor, full, at, columns, place, True)
            else:
                barrier = ring.barriers + _select(past_end, ring.boundary_at(source), place.index)
                self._copy(tensor, barrier, at, columns, place, False)

    def _copy(self, name, barrier, at, columns, place, pair):
        """`columns` columns of K's or V's rows from (row, column, head, outer) on to a stage."""
        row, column, kv_head, outer = at
        rows = self.plan.own_keys if name[0] == "k" else self.plan.kv_tile
        rings.expect(barrier, rows * columns * 2, pair)
        atom, tensor = self.tma[name]
        source = cute.domain_offset((row, column, 0, 0), tensor)
        to, source = _partition(atom, self.smem[name[0]], cute.zipped_divide(source, (rows, SWIZZLE_COLUMNS)))
        for block in range(columns // SWIZZLE_COLUMNS):
            cute.copy(atom, source[None, (0, block, kv_head, outer)], to[None, block, place.index], tma_bar_ptr=barrier)


def _partition(atom, smem, source):
    """(shared memory as (box, block, stage), the tensor as (box, rest))."""
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), source)


def _select(condition, yes, no):
    # Without a branch: with one, the compiler fails on a ring that K and V share, where no mask hides keys.
    return no + Int32(condition) * (yes - no)


@dataclass(frozen=True)
class Clear(Fixed):
    """The clearing warps, where sources end within a tile: rows past the last key are set to zero before the tile is
    used, because 0 * NaN in the PV product would reach every row of O."""

    plan: Plan
    ring: rings.Ring  # V's, or K's if that is V too
    chunks: Any  # the ring's memory: views.plain_chunks
    done: Any  # a named barrier of the helper threads

    @cute.jit
    def run(self, work):
        thread = cute.arch.thread_idx()[0] % self.plan.clear_threads
        self._clear(work, work.begin, work.first, cutlass.min(work.last, work.dense_tiles), work.keys, 0, thread)
        if const_expr(self.plan.problem.sources == 2 and not self.plan.problem.gather):
            first = cutlass.max(work.first, work.dense_tiles)
            self._clear(work, -work.dense_tiles, first, work.last, work.keys2, 1, thread)

    @cute.jit
    def _clear(self, work, shift, first, last, keys, source: cutlass.Constexpr, thread):
        """The source's last tile, if it is among ``first <= i < last`` (i + shift is a tile of the source) and ends
        with rows that are no keys."""
        tile = keys // self.plan.kv_tile
        i = tile - shift
        begin = keys - tile * self.plan.kv_tile
        if begin > 0 and i >= first and i < last:
            stage = (i - work.first) % self.plan.kv_stage
            cute.arch.mbarrier_wait(self.ring.boundary(source), 0)
            zeros = cute.make_rmem_tensor(8, self.plan.element)
            zeros.fill(0)
            for row in cutlass.range(begin + thread, self.plan.kv_tile, self.plan.clear_threads, unroll=1):
                for chunk in cutlass.range_constexpr(cute.size(self.chunks, mode=[2])):
                    cute.autovec_copy(zeros, self.chunks[row, None, chunk, stage])
            cute.arch.fence_view_async_shared()
            self.done.arrive_and_wait()
            if thread == 0:
                rings.arrive(self.ring.full(stage), self.plan.pair)


@dataclass(frozen=True)
class Gather(Fixed):
    """The gather warps, where a source is read through lists: they fill the stages of its tiles, row by row.

    ``smem``: K's and V's memory as views.chunk_tensor. Entries of -1 become rows of zeros.
    """

    plan: Plan
    tensors: dict[str, Any]
    k_ring: rings.Ring
    v_ring: rings.Ring | None
    smem: dict[str, Any]
    done: Any  # a named barrier of the gather warps
    handed_over: Any  # one with the load warp: it has filled its last stage

    @cute.jit
    def run(self, work):
        """Goes on with the rings where the load warp left them, in the same order."""
        thread = cute.arch.thread_idx()[0] % GROUP
        k_place = self.k_ring.filler()
        k_place.advance(work.own_dense_tiles * self.plan.k_sub)
        v_place = self.k_ring.filler() if const_expr(self.v_ring is None) else self.v_ring.filler()
        if const_expr(self.v_ring is not None):
            v_place.advance(work.own_dense_tiles)
        self.handed_over.arrive_and_wait()
        first = work.first + work.own_dense_tiles
        if work.last > first:
            k_place = self._fill_k(work, first, k_place, thread)
            for i in cutlass.range(first + 1, work.last, unroll=1):
                k_place = self._fill_k(work, i, k_place, thread)
                v_place = self._fill_v(work, i - 1, v_place, thread)
            v_place = self._fill_v(work, work.last - 1, v_place, thread)
        if work.tiles > 0:
            self.k_ring.drain(k_place)
            if const_expr(self.v_ring is not None):
                self.v_ring.drain(v_place)

    @cute.jit
    def _fill_k(self, work, i, place, thread):
        for part in cutlass.range_constexpr(self.plan.k_sub):
            column = part * self.plan.k_columns
            place = self._fill_stage("k", self.k_ring, work, i, column, self.plan.k_columns, place, thread)
        return place

    @cute.jit
    def _fill_v(self, work, i, place, thread):
        if const_expr(self.v_ring is not None):
            place = self._fill_stage("v", self.v_ring, work, i, work.column, self.plan.pv_n_tile, place, thread)
        return place

    @cute.jit
    def _fill_stage(self, name: cutlass.Constexpr, ring, work, i, column, columns: cutlass.Constexpr, place, thread):
        """Fill one stage of K or V with `columns` columns from `column` on of tile i."""
        ring.wait_empty(place)
        self._copy_rows(name, work, i - work.dense_tiles, column, columns, place, thread)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        self.done.arrive_and_wait()
        if thread == 0:
            rings.arrive(ring.full(place.index), False)
        place.advance()
        return place

    @cute.jit
    def _copy_rows(self, name: cutlass.Constexpr, work, tile, column, columns: cutlass.Constexpr, place, thread):
        """Eight threads share a row, 16 bytes each of every block, so that a warp reads whole 128-byte lines."""
        plan = self.plan
        source = self.tensors[name + plan.gathered]
        lane, first_row = thread % 8, thread // 8
        step = GROUP // 8
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), plan.element, num_bits_per_copy=128)
        for j in cutlass.range(plan.kv_tile // step, unroll=1):
            row = first_row + j * step
            listed = self._entry(work, tile * plan.kv_tile + row)
            found = listed >= 0
            place_in_source = (work.batch, cutlass.max(listed, 0), work.kv_head, None)
            chunks = cute.flat_divide(cute.domain_offset((column,), source[place_in_source]), (8,))
            for block in cutlass.range_constexpr(columns // SWIZZLE_COLUMNS):
                chunk = block * 8 + lane
                self._copy_chunk(atom, chunks[None, chunk], self.smem[name][row, None, chunk, place.index], found)

    @cute.jit
    def _copy_chunk(self, atom, source, target, found):
        """16 bytes of a listed row, or zeros."""
        if found:
            cute.copy(atom, source, target)
        else:
            zeros = cute.make_rmem_tensor(8, self.plan.element)
            zeros.fill(0)
            cute.autovec_copy(zeros, target)

    @cute.jit
    def _entry(self, work, place):
        """The list's entry, -1 past its end."""
        entry = Int32(-1)
        if place < work.keys2:
            entry = self.tensors["indices"][work.batch, work.rows[0].first_position, place]
        return entry
