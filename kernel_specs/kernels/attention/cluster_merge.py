"""Split KV within a thread-block cluster: the CTAs that share a row block merge through distributed shared memory.

Each CTA leaves its un-normalised O and its rows' statistics in its own shared memory; after a barrier of the cluster
each thread merges 16-byte chunks of O over all CTAs, every CTA another part of the rows. The merge is that of merge.py.

Shared memory (float32): O [rows, columns], then the statistics [rows, 2] (raw maximum, sum). Four neighbouring rows
keep their chunks in another order, ``chunk ^ 2 (row % 4)``, so that the rows that a warp writes together, and the
chunks that it reads together, fall into different banks.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .merge import VECTOR, exponential, finite
from .workspace import STATISTICS

QUAD = 4  # threads that hold a row of an accumulator; also the rows with another order of chunks


@dataclass(frozen=True)
class ClusterMerge:
    """Merges the `rows` x `columns` of ``splits`` CTAs, with ``threads`` threads of each. In each CTA ``groups`` warp
    groups may hold partial results of the same rows, each in a part of its own."""

    rows: int
    columns: int
    splits: int
    threads: int
    groups: int = 1

    @property
    def chunks(self) -> int:
        """16-byte chunks of a row."""
        return self.columns // VECTOR

    @property
    def turns(self) -> int:
        """Chunks that a thread merges at most."""
        return -(-self.rows * self.chunks // (self.splits * self.threads))

    def part(self, pointer, group):
        """Where a group's part begins."""
        return pointer + group * (self.rows * (self.columns + STATISTICS))

    def _statistics(self, pointer):
        layout = cute.make_layout((STATISTICS, self.rows), stride=(1, STATISTICS))
        return cute.make_tensor(pointer + self.rows * self.columns, layout)

    @cute.jit
    def leave(self, pointer, acc, maximum, total, first_row: Int32, lane: Int32):
        """Write one warp group's 64 rows from ``first_row`` on: `acc` is a wgmma accumulator of one thread, `maximum`
        and `total` are those of its two rows, the sums over the whole row. Shared memory must be free."""
        # Column 8 j + 2 (lane % 4) is half of chunk 2 j + lane % 4 / 2; the order makes j to j ^ (row % 4).
        quad = lane % 32 // QUAD
        row = first_row + lane // 32 * 16 + quad
        pair = lane % QUAD
        pieces = cute.make_layout((2, 4, self.columns // 32, self.rows), stride=(1, 8, 32, self.columns))
        own = cute.make_tensor(pointer + 2 * pair, pieces)
        values = cute.make_tensor(acc.iterator, cute.make_layout((2, 2, self.columns // 8)))
        statistics = self._statistics(pointer)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(self.columns // 8):
                where = (None, (j % 4) ^ (quad % QUAD), j // 4, row + 8 * r)
                cute.autovec_copy(values[None, r, j], own[where])
            if pair == 0:
                both = cute.make_rmem_tensor(STATISTICS, Float32)
                both[0], both[1] = maximum[r], total[r]
                cute.autovec_copy(both, statistics[None, row + 8 * r])

    def meet(self):
        """Barrier of all threads of the cluster: what was left before is there after it."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def done_reading(self):
        """Tell the cluster that this thread reads no shared memory of others any more."""
        cute.arch.cluster_arrive()

    def await_readers(self):
        """Wait until all threads of the cluster are `done_reading`, before which no CTA may exit."""
        cute.arch.cluster_wait()

    def chunk(self, turn: int, thread, rank):
        """(whether it exists, its row, its number in the row) of the chunk that ``thread`` of ``threads`` in CTA
        ``rank`` merges in its ``turn``-th turn. For one that does not exist, another one's place."""
        every = self.rows * self.chunks
        item = thread + (rank + turn * self.splits) * self.threads
        exists = item < every
        item = cutlass.min(item, every - 1)
        return exists, item // self.chunks, item % self.chunks

    @cute.jit
    def take(self, pointer, row: Int32, chunk: Int32, scale_log2: Float32, first_rank=0):
        """Merge one chunk: (its un-normalised O, the row's raw maximum, the row's sum). The splits are the cluster's
        ranks from ``first_rank`` on."""
        chunks = cute.make_layout((VECTOR, self.chunks, self.rows), stride=(1, VECTOR, self.columns))
        ordered = chunk ^ (2 * (row % QUAD))
        parts = self.splits * self.groups
        statistics = cute.make_rmem_tensor((STATISTICS, parts), Float32)
        outputs = cute.make_rmem_tensor((VECTOR, parts), Float32)
        for i in cutlass.range_constexpr(parts):
            there = self.part(cute.arch.map_dsmem_ptr(pointer, Int32(first_rank + i // self.groups)), i % self.groups)
            cute.autovec_copy(self._statistics(there)[None, row], statistics[None, i])
            cute.autovec_copy(cute.make_tensor(there, chunks)[None, ordered, row], outputs[None, i])
        maximum = statistics[0, 0]
        for i in cutlass.range_constexpr(1, parts):
            maximum = cute.arch.fmax(maximum, statistics[0, i])
        base = finite(maximum)
        total = Float32(0.0)
        values = cute.make_rmem_tensor(VECTOR, Float32)
        values.fill(0.0)
        for i in cutlass.range_constexpr(parts):
            weight = exponential(statistics[0, i], base, scale_log2)
            total = total + weight * statistics[1, i]
            values.store(values.load() + outputs[None, i].load() * weight)
        return values, maximum, total
