"""A producer that gathers listed rows of K and V into tiles, by cp.async, for Hopper: what TMA can't do there.

A query token lists rows of the source, -1 for none, anywhere in the list. A tile is ``kv_tile`` neighbouring entries of
the list. Whole warps of the producer warp group fetch it; an entry of -1, or past the list's end, becomes a row of
zeros, and a bit tells the consumers not to count it. Each warp holds a tile's entries in its lanes, and asks for those
of the next tile before it fetches this one, so that no fetch waits for an index.

Completion. A thread's copies arrive on the full barrier by themselves; the thread that has written the bits arrives in
its own name: one more arrival than threads. A tile that comes by TMA into the same ring makes the same number. The
copies write through the generic proxy, so a consumer that lets wgmma read them needs a proxy fence after its wait.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op

from .sm90_load import Ring
from .sm90_plan import WARP_THREADS, Plan

PRESENT_BUFFERS = 8  # more than the tiles that a ring can hold and the consumers have at hand
VECTOR_BYTES = 16
BLOCK_COLUMNS = 64  # 16-bit columns in a row of the 128-byte swizzle
SWIZZLE_ROWS = 8


class RowGather:
    """`entries`: one token's list, int32; `kv_tile` entries a tile; `columns` of the shared tiles, of `element`;
    `threads` fetch them: aligned in the producer warp group, 64 at least.

    A shared tile is [kv_tile, columns] in the 128-byte swizzle: blocks of 64 columns one after the other, in which the
    16-byte vectors of row r are exchanged by ``vector ^ (r % 8)``.
    """

    def __init__(self, entries, kv_tile: int, columns: int, element, threads: int):
        self.entries, self.kv_tile, self.columns, self.element = entries, kv_tile, columns, element
        self.vector = VECTOR_BYTES * 8 // element.width
        # Neighbouring threads fetch neighbouring vectors of a row: 256 bytes of it, if it has as many, and whole
        # periods of the swizzle at a time.
        self.row_threads = min(16, columns // self.vector, threads // SWIZZLE_ROWS)
        self.pass_rows = threads // self.row_threads
        self.thread = cute.arch.thread_idx()[0] % threads
        row, vector = self.thread // self.row_threads, self.thread % self.row_threads
        block, in_block = vector // SWIZZLE_ROWS, vector % SWIZZLE_ROWS
        self.first_row, self.first_column = row, vector * self.vector
        self.offset = (
            block * (kv_tile * BLOCK_COLUMNS) + row * BLOCK_COLUMNS + (in_block ^ (row % SWIZZLE_ROWS)) * self.vector
        )

    def make_entries(self):
        """Room for a tile's entries: lane i of each warp has the i-th, i + 32-th, ..."""
        return cute.make_rmem_tensor(self.kv_tile // WARP_THREADS, Int32)

    @cute.jit
    def ask(self, tile, asked):
        """Load a tile's entries; -1 for those before the list's begin or past its end."""
        count = self.entries.shape[0]
        for i in range(self.kv_tile // WARP_THREADS):
            place = tile * self.kv_tile + i * WARP_THREADS + self.thread % WARP_THREADS
            asked[i] = Int32(-1)
            if place >= 0 and place < count:
                asked[i] = self.entries[place]

    @cute.jit
    def tell(self, asked, present):
        """Write which of a tile's entries exist into `present`: a bit each, 32 a word. By one thread."""
        for i in range(self.kv_tile // WARP_THREADS):
            bits = cute.arch.vote_ballot_sync(asked[i] >= 0)
            if self.thread == 0:
                present[i] = bits

    @cute.jit
    def fetch(self, asked, rows, first_column: int, target):
        """Start to fetch the tile's columns from ``first_column`` on. `rows`: the source, [rows, columns]; `target`:
        pointer to the shared tile, without its swizzle."""
        step = self.row_threads * self.vector
        for i in range(self.kv_tile // self.pass_rows):
            first = i * self.pass_rows
            entry = cute.arch.shuffle_sync(asked[first // WARP_THREADS], first % WARP_THREADS + self.first_row)
            row = entry if entry >= 0 else Int32(0)
            size = Int32(VECTOR_BYTES) if entry >= 0 else Int32(0)
            source = rows.iterator + cute.crd2idx((row, first_column + self.first_column), rows.layout)
            for group in range(self.columns // step):
                blocks = group * step // BLOCK_COLUMNS
                there = self.offset + first * BLOCK_COLUMNS + blocks * (self.kv_tile * BLOCK_COLUMNS)
                _copy_or_zero(target + there, source + group * step, size)

    @cute.jit
    def complete(self, barrier):
        """Arrive on a tile's full barrier: when the thread's copies are there, and for what `tell` wrote."""
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
        if self.thread == 0:
            cute.arch.mbarrier_arrive(barrier)


class GatherStream:
    """The tiles of a gathered source's K or V, through its ring of the kernel of fmha_sm90.py: by all threads that
    gather it. Rows of a CTA belong to one token, whose `entries` these are.

    `rows`: K or V of the CTA's KV head, [rows, columns], of which the ring gets those from `first_column` on; `slots`:
    pointer to the ring's shared memory, without its swizzle; `present`: for `ScoreMask` (of V: None); `first_step`: the
    walk's first step in this source.
    """

    def __init__(self, plan: Plan, entries, rows, first_column, ring: Ring, slots, present, first_step):
        self.rows, self.first_column, self.ring, self.slots = rows, first_column, ring, slots
        self.present, self.first_step = present, first_step
        self.columns = plan.k_columns if present is not None else plan.pv_n_tile
        self.stage_elements = plan.kv_tile * self.columns
        self.gather = RowGather(entries, plan.kv_tile, self.columns, plan.element, plan.gather_threads)

    @cute.jit
    def fill(self, state, run):
        """Fetch a run of tiles, the last one first, into the ring from ``state`` on; returns the state after them."""
        now, following = self.gather.make_entries(), self.gather.make_entries()
        self.gather.ask(run.end - 1, following)
        for i in cutlass.range(run.end - run.begin, unroll=1):
            now.store(following.load())
            self.gather.ask(run.end - 2 - i, following)
            for part in cutlass.range_constexpr(self.ring.parts):
                self.ring.pipe.sync_object_empty.wait(state.index, state.phase)
                if const_expr(part == 0 and self.present is not None):
                    self.gather.tell(now, self.present[None, (self.first_step + i) % PRESENT_BUFFERS])
                target = self.slots + state.index * self.stage_elements
                self.gather.fetch(now, self.rows, self.first_column + part * self.columns, target)
                self.gather.complete(self.ring.pipe.producer_get_barrier(state))
                state.advance()
        return state


@dsl_user_op
def _copy_or_zero(target, source, size: Int32, *, loc=None, ip=None):
    """cp.async of 16 bytes from global to shared memory, of which only the first ``size`` are read; the rest are 0."""
    nvvm.cp_async_shared_global(
        target.to_llvm_ptr(loc=loc, ip=ip),
        source.to_llvm_ptr(loc=loc, ip=ip),
        VECTOR_BYTES,
        nvvm.LoadCacheModifierKind.CG,
        cp_size=Int32(size).ir_value(loc=loc, ip=ip),
        loc=loc,
        ip=ip,
    )
