"""The correction warps: they keep O at its row's base, and write it out."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.experimental.primitives import nvvm_wrapper as nvvm

from . import sm100_rings as rings
from . import sm100_views as views
from .attention.sequences import Sequences
from .sm100_plan import SWIZZLE_COLUMNS, WARP, Fixed, Plan
from .sm100_softmax import RowOfThread, Statistics, partial_row

CHUNK = 8  # 16-bit elements of a 16-byte store
WORDS = 4  # float32 elements of one
PIECE = views.COPY_COLUMNS  # columns of O that a thread holds at a time


@dataclass(frozen=True)
class Correction(Fixed):
    """One warp group for all softmax groups: thread t works on the row that thread t of each of them works on."""

    plan: Plan
    sequences: Sequences
    tensors: dict[str, Any]
    tma_o: Any  # (atom, tensor), or None where O is written from registers
    o_blocks: Any  # the O tiles on their way out: (row, column, block, group), in Q's memory
    o_chunks: Any  # the same memory by chunks
    o_ring: rings.Ring
    statistics: Statistics
    epilogue_barrier: Any

    @cute.jit
    def run(self, work, tmem_ptr, tmem):
        """`tmem`: the allocator, whose memory is freed when all is read."""
        plan = self.plan
        me = RowOfThread.of(plan)
        columns = views.ThreadColumns(tmem_ptr, me.thread)
        o_place = self.o_ring.user()
        for _ in cutlass.range(1, work.tiles, unroll=1):
            for group in cutlass.range_constexpr(plan.groups):
                factor = self._factor(group, me)
                self.statistics.empty[group].arrive()
                # O holds every tile before the one that the factor belongs to.
                self.o_ring.wait_full(o_place)
                if cute.arch.vote_any_sync(factor != Float32(1.0)):
                    self._rescale(columns, group, factor)
                rings.arrive_group(self.o_ring.empty(o_place.index), plan.pair)
                o_place.advance()
        for group in cutlass.range_constexpr(plan.groups):
            factor = self._factor(group, me)
            if work.tiles > 0:
                self.o_ring.wait_full(o_place)
                o_place.advance()
            self._epilogue(group, work, columns, me, factor)
        cute.arch.fence_view_async_shared()
        nvvm.tcgen05_fence("before_thread_sync")
        self.epilogue_barrier.arrive_and_wait()
        # Every reader of tensor memory is done: the softmax warps' last use came before the last PV product.
        nvvm.tcgen05_fence("after_thread_sync")
        tmem.free(tmem_ptr)
        if const_expr(self.tma_o is not None):
            if me.thread < WARP:
                self._store_tiles(work)

    @cute.jit
    def _factor(self, group: cutlass.Constexpr, me: cutlass.Constexpr):
        """The next factor of the thread's row."""
        self.statistics.full[group].arrive_and_wait()
        return self.statistics.factors[me.thread, group]

    @cute.jit
    def _rescale(self, columns: cutlass.Constexpr, group: cutlass.Constexpr, factor):
        """O *= factor, in tensor memory."""
        plan = self.plan
        nvvm.tcgen05_fence("after_thread_sync")
        for i in cutlass.range_constexpr(plan.o_columns // views.COPY_COLUMNS):
            column = plan.tmem.o + group * plan.o_columns + i * views.COPY_COLUMNS
            part = columns.load(column, views.COPY_COLUMNS)
            cute.arch.fence_view_async_tmem_load()
            self._scale(part, factor)
            columns.store(part, column)
        cute.arch.fence_view_async_tmem_store()
        nvvm.tcgen05_fence("before_thread_sync")

    @cute.jit
    def _scale(self, registers, factor):
        for j in cutlass.range_constexpr(0, cute.size(registers), 2):
            registers[j], registers[j + 1] = cute.arch.mul_packed_f32x2(
                (registers[j], registers[j + 1]), (factor, factor)
            )

    @cute.jit
    def _epilogue(self, group: cutlass.Constexpr, work, columns: cutlass.Constexpr, me: cutlass.Constexpr, factor):
        """A group's O: tensor memory -> registers, where `factor` (the normalisation) joins -> out. Nothing goes back.

        Shared memory is Q's: the commit that filled O's barrier follows every QK product.
        """
        plan = self.plan
        nvvm.tcgen05_fence("after_thread_sync")
        rows = work.rows[group]
        position = rows.first_position + me.row // plan.packing.heads
        exists = Boolean(position < work.queries)
        if const_expr(plan.problem.gather):
            exists = Boolean(me.row < plan.rows)
        whole = self._is_whole(work, rows)
        pieces = plan.o_columns // PIECE
        for i in cutlass.range_constexpr(pieces):
            part = self._output(work, columns, plan.tmem.o + group * plan.o_columns + i * PIECE)
            self._scale(part, factor)
            piece = me.half * pieces + i
            if const_expr(plan.partial):
                if exists:
                    self._store_partial(part, work, plan.packing.head(me.row, rows.head_block), position, piece)
            else:
                rounded = cute.make_rmem_tensor(PIECE, plan.element)
                rounded.store(part.load().to(plan.element))
                if const_expr(self.tma_o is not None):
                    if whole:
                        self._stage(rounded, me, piece, group)
                if exists and not whole:
                    self._store_row(rounded, work, plan.packing.head(me.row, rows.head_block), position, piece)

    def _is_whole(self, work, rows):
        """Whether a group's rows leave by TMA: not where the box would reach into the next packed sequence."""
        if self.tma_o is None:
            return Boolean(False)
        if self.plan.problem.varlen:
            return rows.first_position + self.plan.positions <= work.queries
        return Boolean(True)

    @cute.jit
    def _output(self, work, columns: cutlass.Constexpr, column):
        """PIECE columns of the row's O; zeros where no product wrote any."""
        part = cute.make_rmem_tensor(PIECE, Float32)
        part.fill(0.0)
        if work.tiles > 0:
            loaded = columns.load(column, PIECE)
            cute.arch.fence_view_async_tmem_load()
            part.store(loaded.load())
        return part

    @cute.jit
    def _stage(self, rounded, me: cutlass.Constexpr, piece, group: cutlass.Constexpr):
        """PIECE columns of a row to shared memory."""
        chunks = cute.flat_divide(rounded, (CHUNK,))
        for chunk in cutlass.range_constexpr(PIECE // CHUNK):
            at = piece * (PIECE // CHUNK) + chunk
            cute.autovec_copy(chunks[None, chunk], self.o_chunks[me.row, None, at, group])

    @cute.jit
    def _store_row(self, rounded, work, head, position, piece):
        """PIECE columns of a row from registers to O."""
        at = (self.sequences.batch_mode(work.batch), position, head, None)
        if const_expr(self.plan.problem.varlen):
            at = (work.first_query + position, head, None)
        column = cute.assume(work.column + piece * PIECE, divby=PIECE)
        target = cute.flat_divide(cute.domain_offset((column,), self.tensors["o"][at]), (CHUNK,))
        chunks = cute.flat_divide(rounded, (CHUNK,))
        for chunk in cutlass.range_constexpr(PIECE // CHUNK):
            cute.autovec_copy(chunks[None, chunk], target[None, chunk])

    @cute.jit
    def _store_partial(self, part, work, head, position, piece):
        """PIECE float32 columns of a row to the workspace."""
        row = partial_row(self.plan, self.tensors, work, head, position)
        column = cute.assume(work.column + piece * PIECE, divby=PIECE)
        target = self.tensors["partial_outputs"][None, row, work.split]
        target = cute.flat_divide(cute.domain_offset((column,), target), (WORDS,))
        chunks = cute.flat_divide(part, (WORDS,))
        for chunk in cutlass.range_constexpr(PIECE // WORDS):
            cute.autovec_copy(chunks[None, chunk], target[None, chunk])

    @cute.jit
    def _store_tiles(self, work):
        """The staged tiles by TMA, which clips rows past the last query. One warp; waits until they are read."""
        plan = self.plan
        atom, tensor = self.tma_o
        batch = self.sequences.batch_mode(work.batch)
        for group in cutlass.range_constexpr(plan.groups):
            rows = work.rows[group]
            if self._is_whole(work, rows):
                offset = ((0, work.first_query + rows.first_position), 0, 0)
                target = cute.zipped_divide(cute.domain_offset(offset, tensor), (plan.o_tile, SWIZZLE_COLUMNS))
                source, target = cpasync.tma_partition(
                    atom, 0, cute.make_layout(1), cute.group_modes(self.o_blocks, 0, 2), target
                )
                blocks = plan.pv_n_tile // SWIZZLE_COLUMNS
                for block in cutlass.range_constexpr(blocks):
                    at = ((rows.head_block, 0), work.pv_slice * blocks + block, batch)
                    cute.copy(atom, source[None, block, group], target[None, at])
        cute.arch.cp_async_bulk_commit_group()
        # Shared memory must live until the TMA has read it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
