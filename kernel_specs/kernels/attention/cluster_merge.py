"""Split KV within a thread-block cluster: the CTAs that share a row block merge through distributed shared memory.

A warp group that holds partial results of 64 rows leaves its un-normalised O and its rows' statistics in its own shared
memory, in a *region* of its own. After a barrier of the cluster each of them merges another range of O's columns, over
all regions. The merge is that of merge.py.

Both halves keep the order of a wgmma accumulator: a thread has, of rows r and r + 8, two neighbouring columns of every
eight, which make a *vector* of 16 bytes. So a thread merges what threads of its own number have left, all addresses are
a constant away from one, and a row's maximum, weights and sum are computed once a thread. (Threads that went over
16-byte chunks of rows took 6 us for 64 x 512 over two CTAs, of which the arithmetic of rows and heads was the most.
H200, 2026-11-30.)

A region (float32): O as [vector][thread][4], then the statistics [64 rows][2] (raw maximum, sum).
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .merge import exponential, finite
from .workspace import STATISTICS

ROWS = 64  # of a warp group
THREADS = 128
ROWS_OF_THREAD = 2  # r and r + 8
VECTOR = 4  # float32: rows r, r, r + 8, r + 8 and two columns of each
VECTOR_COLUMNS = 8  # the columns of O among which a vector has two
QUAD = 4  # threads that hold a row
LOADS_AHEAD = 8  # 16-byte loads of a thread that are asked for before those of the step before are used


@dataclass(frozen=True)
class ClusterMerge:
    """Merges ``columns`` of O over ``splits`` CTAs, in each of which ``groups`` warp groups hold partial results."""

    columns: int
    splits: int
    groups: int = 1

    @property
    def parts(self) -> int:
        """Partial results, and ranges of columns, each merged by one of those who hold them."""
        return self.splits * self.groups

    @property
    def vectors(self) -> int:
        """Vectors of a thread."""
        return self.columns // VECTOR_COLUMNS

    @property
    def share(self) -> int:
        """Vectors of a thread that one part merges at most: beyond four, fours of them, which are stored together."""
        share = -(-self.vectors // self.parts)
        return share if share < QUAD else -(-share // QUAD) * QUAD

    @property
    def stored_together(self) -> int:
        """Neighbouring 16-bit pairs of a row that a thread stores together, after an exchange within the quad."""
        return math.gcd(self.share, QUAD)

    def region(self, scratch, number):
        """Where the ``number``-th region of a CTA begins."""
        return scratch + number * (ROWS * (self.columns + STATISTICS))

    def first_vector(self, rank, group):
        """The first vector that a warp group merges; past the last one, none."""
        return (rank * self.groups + group) * self.share

    def _outputs(self, region):
        layout = cute.make_layout((VECTOR, THREADS, self.vectors), stride=(1, VECTOR, VECTOR * THREADS))
        return cute.make_tensor(region, layout)

    def _statistics(self, region):
        layout = cute.make_layout((STATISTICS, ROWS), stride=(1, STATISTICS))
        return cute.make_tensor(region + ROWS * self.columns, layout)

    @cute.jit
    def leave(self, region, acc, maximum, total, lane: Int32):
        """Write one warp group's rows: `acc` is a wgmma accumulator of one thread, `maximum` and `total` are those of
        its two rows, the sums over the whole row. The region must be free."""
        values = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, self.vectors)))
        outputs, statistics = self._outputs(region), self._statistics(region)
        for v in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(values[None, v], outputs[None, lane, v])
        if lane % QUAD == 0:
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                both = cute.make_rmem_tensor(STATISTICS, Float32)
                both[0], both[1] = maximum[r], total[r]
                cute.autovec_copy(both, statistics[None, _row(lane, r)])

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

    @cute.jit
    def take(self, regions: list, first_vector: Int32, lane: Int32, scale_log2: Float32, first_rank=0):
        """Merge the vectors from ``first_vector`` on: (un-normalised O (4, share), the raw maxima (2), the sums (2) of
        the thread's rows). Vectors past the last one repeat it.

        ``regions``: those of the row block's groups, in any CTA; the splits are the cluster's ranks from
        ``first_rank`` on.
        """
        there = [
            cute.arch.map_dsmem_ptr(regions[i % self.groups], Int32(first_rank + i // self.groups))
            for i in range(self.parts)
        ]
        loads = cute.make_rmem_tensor((VECTOR, self.parts, self.share), Float32)
        merged = cute.make_rmem_tensor((VECTOR, self.share), Float32)
        batch = max(1, LOADS_AHEAD // self.parts)
        self._load(there, first_vector, lane, loads, 0, batch)
        weights, maximum, total = self._weights(there, lane, scale_log2)
        for begin in cutlass.range_constexpr(0, self.share, batch):
            self._load(there, first_vector, lane, loads, begin + batch, begin + 2 * batch)
            for v in cutlass.range_constexpr(begin, min(begin + batch, self.share)):
                for j in cutlass.range_constexpr(VECTOR):
                    value = loads[j, 0, v] * weights[j // 2, 0]
                    for i in cutlass.range_constexpr(1, self.parts):
                        value += loads[j, i, v] * weights[j // 2, i]
                    merged[j, v] = value
        return merged, maximum, total

    def _load(self, there: list, first_vector, lane, loads, begin: int, end: int):
        """Ask for the ``begin``-th to ``end``-th vector of all parts, as far as there are any."""
        for v in range(begin, min(end, self.share)):
            vector = first_vector + v
            if self.share * self.parts > self.vectors:
                vector = cutlass.min(vector, self.vectors - 1)
            for i in range(self.parts):
                cute.autovec_copy(self._outputs(there[i])[None, lane, vector], loads[None, i, v])

    def _weights(self, there: list, lane, scale_log2):
        """(what each part's rows weigh (2, parts), the rows' raw maxima (2), their sums (2))."""
        found = cute.make_rmem_tensor((STATISTICS, ROWS_OF_THREAD, self.parts), Float32)
        for i in range(self.parts):
            for r in range(ROWS_OF_THREAD):
                cute.autovec_copy(self._statistics(there[i])[None, _row(lane, r)], found[None, r, i])
        weights = cute.make_rmem_tensor((ROWS_OF_THREAD, self.parts), Float32)
        maximum, total = (cute.make_rmem_tensor(ROWS_OF_THREAD, Float32) for _ in range(2))
        for r in range(ROWS_OF_THREAD):
            highest = found[0, r, 0]
            for i in range(1, self.parts):
                highest = cute.arch.fmax(highest, found[0, r, i])
            whole, base = Float32(0.0), finite(highest)
            for i in range(self.parts):
                weights[r, i] = exponential(found[0, r, i], base, scale_log2)
                whole = whole + weights[r, i] * found[1, r, i]
            maximum[r], total[r] = highest, whole
        return weights, maximum, total


def _row(lane, r: int):
    """The ``r``-th row of a warp group's thread."""
    return lane // 32 * 16 + lane % 32 // QUAD + 8 * r


@cute.jit
def ordered_by_columns(words, lane: Int32, together: cutlass.Constexpr[int]):
    """A thread's words of a row, one of each vector (columns 8 v + 2 (lane % 4) and the next), exchanged within the row's
    four threads, so that ``together`` (1, 2 or 4) neighbouring words of one vector come to one thread: of vector
    v + lane % together, for each v that is a multiple of it.
    """
    odd, upper = lane % 2 == 1, lane % QUAD >= 2
    if const_expr(together >= 2):
        words = _exchanged(words, odd, 1)
    if const_expr(together == 4):
        words = _exchanged(words, upper, 2)
    return words


@cute.jit
def _exchanged(words, second, distance: cutlass.Constexpr[int]):
    """Threads ``distance`` apart exchange half their words. Runs of ``distance`` words, numbered from 0: the first
    thread of a pair gets the even runs of both, the ``second`` one the odd ones; the first thread's words come first."""
    found = cute.make_rmem_tensor(cute.size(words), Int32)
    for v in cutlass.range_constexpr(0, cute.size(words), 2 * distance):
        for i in cutlass.range_constexpr(distance):
            even, odd = words[v + i], words[v + distance + i]
            kept = odd if second else even
            got = cute.arch.shuffle_sync_bfly(even if second else odd, offset=distance)
            found[v + i] = got if second else kept
            found[v + distance + i] = kept if second else got
    return found
