"""Split KV within a thread-block cluster: the CTAs that share a row block merge through distributed shared memory.

A warp group that holds partial results of 64 rows leaves its un-normalised O and its rows' statistics in its own shared
memory, in a *region* of its own. After a barrier of the cluster each of them merges another range of O's columns, its
*share*, over all regions. The merge is that of merge.py. Among few parts the own share stays in registers.

Both halves keep the order of a wgmma accumulator: a thread has, of rows r and r + 8, two neighbouring columns of every
eight, which make a *vector* of 16 bytes. So a thread merges what threads of its own number have left, all addresses are
a constant away from one, and a row's maximum, weights and sum are computed once a thread. (Threads that went over
16-byte chunks of rows took 6 us for 64 x 512 over two CTAs, of which the arithmetic of rows and heads was the most.
H200, 2026-11-30.)

A region (float32): O as [vector][thread][4], then the statistics, (raw maximum, sum) of row r and of r + 8 together.
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
REGION_ALIGNMENT = 32  # float32
LOADS_AHEAD = 8  # 16-byte loads of a thread that are asked for before those of the step before are used
# Parts of which each keeps its own share in registers. Which share that is is known at run time, so the code that leaves
# the others is there once for each part.
KEEPING_PARTS = 4


@dataclass(frozen=True)
class ClusterMerge:
    """Merges ``columns`` of O over ``splits`` CTAs, in each of which ``groups`` warp groups hold partial results of
    each of ``row_blocks`` times 64 rows."""

    columns: int
    splits: int
    groups: int = 1
    row_blocks: int = 1

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

    @property
    def keeps(self) -> bool:
        """Whether the own share stays in registers, and only the others' go through shared memory."""
        return self.groups == 1 and self.parts <= KEEPING_PARTS

    def region(self, scratch, row_block, group):
        """Where a warp group's region begins."""
        number = Int32(group * self.row_blocks + row_block)
        # What is known of the address decides how wide a load is: without it, each number was loaded alone.
        return scratch + cute.assume(number * (ROWS * (self.columns + STATISTICS)), divby=REGION_ALIGNMENT)

    def first_vector(self, rank, group):
        """The first vector that a warp group merges; past the last one, none."""
        return (rank * self.groups + group) * self.share

    def _outputs(self, region):
        layout = cute.make_layout((VECTOR, THREADS, self.vectors), stride=(1, VECTOR, VECTOR * THREADS))
        return cute.make_tensor(region, layout)

    def _statistics(self, region):
        both = ROWS_OF_THREAD * STATISTICS
        return cute.make_tensor(region + ROWS * self.columns, cute.make_layout((both, THREADS // QUAD)))

    @cute.jit
    def leave(self, region, acc, maximum, total, rank: Int32, lane: Int32):
        """Write the rows of the ``rank``-th split's warp group, of its own share nothing if it `keeps` that. Returns
        what it keeps, O (4, share).

        `acc` is a wgmma accumulator of one thread, `maximum` and `total` are those of its two rows, the sums over the
        whole row. The region must be free.
        """
        values = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, self.vectors)))
        kept = cute.make_rmem_tensor((VECTOR, self.share), Float32)
        outputs, statistics = self._outputs(region), self._statistics(region)
        for part in cutlass.range_constexpr(self.parts):
            first = part * self.share
            if self.keeps and rank == part:
                for v in cutlass.range_constexpr(self.share):
                    for j in cutlass.range_constexpr(VECTOR):
                        kept[j, v] = values[j, min(first + v, self.vectors - 1)]
            else:
                for v in cutlass.range_constexpr(first, min(first + self.share, self.vectors)):
                    cute.autovec_copy(values[None, v], outputs[None, lane, v])
        if lane % QUAD == 0:
            both = cute.make_rmem_tensor((STATISTICS, ROWS_OF_THREAD), Float32)
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                both[0, r], both[1, r] = maximum[r], total[r]
            cute.autovec_copy(cute.coalesce(both), statistics[None, lane // QUAD])
        return kept

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
    def take(self, scratch, kept, row_block, rank: Int32, group, lane: Int32, scale_log2: Float32, first_rank=0):
        """Merge the vectors of a group of the ``rank``-th split, from its first one on: (un-normalised O (4, share),
        the raw maxima (2), the sums (2) of the thread's rows). Vectors past the last one repeat it. ``kept``: what
        `leave` returned.

        The splits are the cluster's ranks from ``first_rank`` on. Each begins with its own memory, so that they don't
        all read from the same CTA. (All beginning with the first: 8 splits of 64 x 512, 1.7 us more. H200, 2026-11-30.)
        """
        there = [self._part(scratch, row_block, rank, i, first_rank) for i in range(self.parts)]
        first_vector = self.first_vector(rank, group)
        loads = cute.make_rmem_tensor((VECTOR, self.parts, self.share), Float32)
        merged = cute.make_rmem_tensor((VECTOR, self.share), Float32)
        batch = max(1, LOADS_AHEAD // (self.parts - self.keeps))
        if const_expr(self.keeps):
            loads[None, 0, None].store(kept.load())
        self._load(there, first_vector, lane, loads, 0, batch)
        own = self._statistics_of_quad(scratch, row_block, rank, lane, first_rank)
        weights, maximum, total = self._weights(own, scale_log2)
        for begin in cutlass.range_constexpr(0, self.share, batch):
            self._load(there, first_vector, lane, loads, begin + batch, begin + 2 * batch)
            for v in cutlass.range_constexpr(begin, min(begin + batch, self.share)):
                for j in cutlass.range_constexpr(VECTOR):
                    value = loads[j, 0, v] * weights[j // 2, 0]
                    for i in cutlass.range_constexpr(1, self.parts):
                        value += loads[j, i, v] * weights[j // 2, i]
                    merged[j, v] = value
        return merged, maximum, total

    def _part(self, scratch, row_block, rank, i, first_rank):
        """The region of the ``i``-th part, counted from those of the ``rank``-th split on."""
        region = self.region(scratch, row_block, i % self.groups)
        return cute.arch.map_dsmem_ptr(region, Int32(first_rank + (rank + i // self.groups) % self.splits))

    def _load(self, there: list, first_vector, lane, loads, begin: int, end: int):
        """Ask for the ``begin``-th to ``end``-th vector of all parts, as far as there are any."""
        for v in range(begin, min(end, self.share)):
            vector = first_vector + v
            if self.share * self.parts > self.vectors:
                vector = cutlass.min(vector, self.vectors - 1)
            for i in range(int(self.keeps), self.parts):
                cute.autovec_copy(self._outputs(there[i])[None, lane, vector], loads[None, i, v])

    @cute.jit
    def _statistics_of_quad(self, scratch, row_block, rank, lane: Int32, first_rank):
        """The statistics that a thread weighs for its quad, (maximum, sum) of its rows, of every fourth part: (4,
        parts / 4). For parts past the last one, those of a row without keys."""
        found = cute.make_rmem_tensor((ROWS_OF_THREAD * STATISTICS, -(-self.parts // QUAD)), Float32)
        for turn in cutlass.range_constexpr(cute.size(found, mode=[1])):
            i = turn * QUAD + lane % QUAD
            there = self._part(scratch, row_block, rank, cutlass.min(i, self.parts - 1), first_rank)
            cute.autovec_copy(self._statistics(there)[None, lane // QUAD], found[None, turn])
            if const_expr((turn + 1) * QUAD > self.parts):
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    found[STATISTICS * r, turn] = found[STATISTICS * r, turn] if i < self.parts else -Float32.inf
        return found

    @cute.jit
    def _weights(self, own, scale_log2: Float32):
        """(what each part's rows weigh (2, parts), the rows' raw maxima (2), their sums (2))."""
        turns = cute.size(own, mode=[1])
        weights = cute.make_rmem_tensor((ROWS_OF_THREAD, self.parts), Float32)
        maximum, total = (cute.make_rmem_tensor(ROWS_OF_THREAD, Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            highest = own[STATISTICS * r, 0]
            for turn in cutlass.range_constexpr(1, turns):
                highest = cute.arch.fmax(highest, own[STATISTICS * r, turn])
            highest = cute.arch.warp_reduction_max(highest, threads_in_group=QUAD)
            base, whole = finite(highest), Float32(0.0)
            for turn in cutlass.range_constexpr(turns):
                weight = exponential(own[STATISTICS * r, turn], base, scale_log2)
                whole = whole + weight * own[STATISTICS * r + 1, turn]
                for i in cutlass.range_constexpr(turn * QUAD, min(self.parts, (turn + 1) * QUAD)):
                    first_of_quad = cute.arch.lane_idx() // QUAD * QUAD
                    weights[r, i] = cute.arch.shuffle_sync(weight, first_of_quad + i % QUAD)
            maximum[r] = highest
            total[r] = cute.arch.warp_reduction_sum(whole, threads_in_group=QUAD)
        return weights, maximum, total


@cute.jit
def ordered_by_columns(words, lane: Int32, together: cutlass.Constexpr[int]):
    """A thread's words of a row, one of each vector (columns 8 v + 2 (lane % 4) and the next), exchanged within the
    row's four threads, so that ``together`` (1, 2 or 4) neighbouring words of one vector come to one thread: of vector
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
    thread of a pair gets the even runs of both, the ``second`` one the odd ones; the first thread's words come
    first."""
    found = cute.make_rmem_tensor(cute.size(words), Int32)
    for v in cutlass.range_constexpr(0, cute.size(words), 2 * distance):
        for i in cutlass.range_constexpr(distance):
            even, odd = words[v + i], words[v + distance + i]
            kept = odd if second else even
            got = cute.arch.shuffle_sync_bfly(even if second else odd, offset=distance)
            found[v + i] = got if second else kept
            found[v + distance + i] = kept if second else got
    return found
