"""Split KV within a thread-block cluster: the CTAs that share a row block merge through distributed shared memory.

A warp group that holds partial results of 64 rows leaves its un-normalised O and its rows' statistics in its own shared
memory, in a *region* of its own. After a barrier of the cluster each of them merges another range of O's columns, its
*share*, over all regions. The merge is that of merge.py.

Both halves keep the order of a wgmma accumulator: a thread has, of rows r and r + 8, two neighbouring columns of every
eight, which make a *vector* of four. So a thread merges what threads of its own number have left, all addresses are a
constant away from one, and a row's maximum, weights and sum are computed once a thread. (Threads that went over 16-byte
chunks of rows took 6 us for 64 x 512 over two CTAs, of which the arithmetic of rows and heads was the most. H200,
2026-11-30.)

A `compact` merge moves a quarter of the bytes where two parts meet: the own share stays in registers, and the rest is
left in float16, each row multiplied by the power of two that brings its largest element just below float16's end. That
adds an eighth of the error of the rounding to bfloat16 that follows, and instructions that only few parts of a wide O
pay for: at 512 columns two splits of batch 32 take 2 % less, four of batch 8 4 %, 16 of batch 1 16 % more. (H200,
2026-11-30.)

A region: O as [chunk][thread][numbers], a chunk being one vector in float32, or one or two in float16; then the records
of rows r and r + 8 together, in float32: raw maximum, sum, and if compact what O is to be multiplied by.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from .merge import exponential, finite
from .workspace import STATISTICS

ROWS = 64  # of a warp group
THREADS = 128
ROWS_OF_THREAD = 2  # r and r + 8
VECTOR = 4  # numbers: rows r, r, r + 8, r + 8 and two columns of each
VECTOR_COLUMNS = 8  # the columns of O among which a vector has two
QUAD = 4  # threads that hold a row
COMPACT_RECORD = 4  # float32 of a row's record, of which the last is unused: 16 bytes
REGION_ALIGNMENT = 32  # float32
LOADS_AHEAD = 8  # loads of a thread that are asked for before those of the step before are used
# Float32 as bits: where the exponent begins and what it is of 1; that of the largest element of a row, scaled.
EXPONENT_SHIFT = 23
EXPONENT_BIAS = 127
PEAK_EXPONENT = 14


@dataclass(frozen=True)
class ClusterMerge:
    """Merges ``columns`` of O over ``splits`` CTAs, in each of which ``groups`` warp groups hold partial results of
    each of ``row_blocks`` times 64 rows. ``compact``: see the module; with one group only."""

    columns: int
    splits: int
    groups: int = 1
    row_blocks: int = 1
    compact: bool = False

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
    def element(self):
        """What O is left in."""
        return Float16 if self.compact else Float32

    @property
    def together(self) -> int:
        """Vectors of a chunk, which is stored and loaded at once: 16 bytes where a share allows."""
        return math.gcd(self.share, 2) if self.compact else 1

    @property
    def chunks(self) -> int:
        """Chunks of a thread."""
        return self.vectors // self.together

    @property
    def record(self) -> int:
        """Float32 elements of a row's record."""
        return COMPACT_RECORD if self.compact else STATISTICS

    @property
    def region_words(self) -> int:
        """Float32 elements of a region."""
        return ROWS * (self.columns * self.element.width // Float32.width + self.record)

    def region(self, scratch, row_block, group):
        """Where a warp group's region begins."""
        number = Int32(group * self.row_blocks + row_block)
        # What is known of the address decides how wide a load is: without it, each number was loaded alone.
        return scratch + cute.assume(number * self.region_words, divby=REGION_ALIGNMENT)

    def first_vector(self, rank, group):
        """The first vector that a warp group merges; past the last one, none."""
        return (rank * self.groups + group) * self.share

    def _outputs(self, region):
        chunk = VECTOR * self.together
        layout = cute.make_layout((chunk, THREADS, self.chunks), stride=(1, chunk, chunk * THREADS))
        return cute.make_tensor(cute.recast_ptr(region, dtype=self.element), layout)

    def _records(self, region):
        both = ROWS_OF_THREAD * self.record
        records = region + (self.region_words - ROWS * self.record)
        return cute.make_tensor(records, cute.make_layout((both, THREADS // QUAD)))

    @cute.jit
    def leave(self, region, acc, maximum, total, rank: Int32, lane: Int32):
        """Write the rows of the ``rank``-th split's warp group; if compact, but for its own share, which is returned:
        O (4, share).

        `acc` is a wgmma accumulator of one thread, `maximum` and `total` are those of its two rows, the sums over the
        whole row. The region must be free.
        """
        values = cute.make_tensor(acc.iterator, cute.make_layout((VECTOR, self.vectors)))
        kept = cute.make_rmem_tensor((VECTOR, self.share), Float32)
        records = cute.make_rmem_tensor((self.record, ROWS_OF_THREAD), Float32)
        left, outputs = values, self._outputs(region)
        if const_expr(self.compact):
            left = self._rounded(values, records)
        for part in cutlass.range_constexpr(self.parts):
            first = part * self.share
            if self.compact and rank == part:
                for v in cutlass.range_constexpr(self.share):
                    for j in cutlass.range_constexpr(VECTOR):
                        kept[j, v] = values[j, min(first + v, self.vectors - 1)]
            else:
                for v in cutlass.range_constexpr(first, min(first + self.share, self.vectors), self.together):
                    chunk = v // self.together
                    cute.autovec_copy(left[None, chunk], outputs[None, lane, chunk])
        if lane % QUAD == 0:
            for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                records[0, r], records[1, r] = maximum[r], total[r]
            cute.autovec_copy(cute.coalesce(records), self._records(region)[None, lane // QUAD])
        return kept

    def _rounded(self, values, records):
        """A thread's vectors in float16, scaled by rows, as chunks; what undoes the scaling goes into the `records`."""
        rounded = cute.make_rmem_tensor((VECTOR * self.together, self.chunks), Float16)
        layout = cute.make_layout((2, self.vectors), stride=(1, VECTOR))
        for r in range(ROWS_OF_THREAD):
            row = cute.make_tensor(values.iterator + 2 * r, layout)
            peak = cute.arch.warp_reduction_max(largest(row), threads_in_group=QUAD)
            factor, records[2, r] = scale_of(peak)
            records[3, r] = Float32(0.0)
            cute.make_tensor(rounded.iterator + 2 * r, layout).store((row.load() * factor).to(Float16))
        return rounded

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
        share = self.share // self.together
        loads = cute.make_rmem_tensor((VECTOR * self.together, self.parts, share), self.element)
        merged = cute.make_rmem_tensor((VECTOR, self.share), Float32)
        batch = max(1, LOADS_AHEAD // (self.parts - self.compact))
        self._load(there, first_vector, lane, loads, 0, batch)
        own = self._records_of_quad(scratch, row_block, rank, lane, first_rank)
        weights, maximum, total = self._weights(own, scale_log2)
        for begin in cutlass.range_constexpr(0, share, batch):
            self._load(there, first_vector, lane, loads, begin + batch, begin + 2 * batch)
            for n in cutlass.range_constexpr(begin * self.together, min(begin + batch, share) * self.together):
                for j in cutlass.range_constexpr(VECTOR):
                    chunk, at = n // self.together, n % self.together * VECTOR + j
                    value = (kept[j, n] if self.compact else Float32(loads[at, 0, chunk])) * weights[j // 2, 0]
                    for i in cutlass.range_constexpr(1, self.parts):
                        value += Float32(loads[at, i, chunk]) * weights[j // 2, i]
                    merged[j, n] = value
        return merged, maximum, total

    def _part(self, scratch, row_block, rank, i, first_rank):
        """The region of the ``i``-th part, counted from those of the ``rank``-th split on."""
        region = self.region(scratch, row_block, i % self.groups)
        return cute.arch.map_dsmem_ptr(region, Int32(first_rank + (rank + i // self.groups) % self.splits))

    def _load(self, there: list, first_vector, lane, loads, begin: int, end: int):
        """Ask for the ``begin``-th to ``end``-th chunk of all parts, as far as there are any, but for what is kept."""
        for n in range(begin, min(end, self.share // self.together)):
            chunk = first_vector // self.together + n
            if self.share * self.parts > self.vectors:
                chunk = cutlass.min(chunk, self.chunks - 1)
            for i in range(int(self.compact), self.parts):
                cute.autovec_copy(self._outputs(there[i])[None, lane, chunk], loads[None, i, n])

    @cute.jit
    def _records_of_quad(self, scratch, row_block, rank, lane: Int32, first_rank):
        """The records that a thread weighs for its quad, those of its two rows, of every fourth part: (record, row,
        parts / 4). For parts past the last one, those of a row without keys."""
        shape = (self.record, ROWS_OF_THREAD, -(-self.parts // QUAD))
        found = cute.make_rmem_tensor(shape, Float32)
        for turn in cutlass.range_constexpr(shape[2]):
            i = turn * QUAD + lane % QUAD
            there = self._part(scratch, row_block, rank, cutlass.min(i, self.parts - 1), first_rank)
            cute.autovec_copy(self._records(there)[None, lane // QUAD], cute.coalesce(found[None, None, turn]))
            if const_expr((turn + 1) * QUAD > self.parts):
                for r in cutlass.range_constexpr(ROWS_OF_THREAD):
                    found[0, r, turn] = found[0, r, turn] if i < self.parts else -Float32.inf
        return found

    @cute.jit
    def _weights(self, own, scale_log2: Float32):
        """(what each part's rows, as they come, weigh (2, parts), the rows' raw maxima (2), their sums (2))."""
        turns = cute.size(own, mode=[2])
        weights = cute.make_rmem_tensor((ROWS_OF_THREAD, self.parts), Float32)
        maximum, total = (cute.make_rmem_tensor(ROWS_OF_THREAD, Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS_OF_THREAD):
            highest = own[0, r, 0]
            for turn in cutlass.range_constexpr(1, turns):
                highest = cute.arch.fmax(highest, own[0, r, turn])
            highest = cute.arch.warp_reduction_max(highest, threads_in_group=QUAD)
            base, whole = finite(highest), Float32(0.0)
            for turn in cutlass.range_constexpr(turns):
                weight = exponential(own[0, r, turn], base, scale_log2)
                whole = whole + weight * own[1, r, turn]
                scaled = weight * own[2, r, turn] if self.compact else weight
                for i in cutlass.range_constexpr(turn * QUAD, min(self.parts, (turn + 1) * QUAD)):
                    first_of_quad = cute.arch.lane_idx() // QUAD * QUAD
                    is_kept = self.compact and i == 0
                    weights[r, i] = cute.arch.shuffle_sync(weight if is_kept else scaled, first_of_quad + i % QUAD)
            maximum[r] = highest
            total[r] = cute.arch.warp_reduction_sum(whole, threads_in_group=QUAD)
        return weights, maximum, total


def largest(values):
    """The largest magnitude of at least four values of a thread: four at a time, so that none waits for the one before.
    `fmax` with `abs` compares magnitudes at no cost, but its result has the product of the signs."""
    peaks = [values[i] for i in range(4)]
    for i in range(4, cute.size(values)):
        peaks[i % 4] = cute.arch.fmax(peaks[i % 4], values[i], abs=True)
    pairs = [cute.arch.fmax(peaks[i], peaks[i + 2], abs=True) for i in range(2)]
    peak = cute.arch.fmax(*pairs, abs=True)
    return cute.arch.fmax(peak, -peak)


@cute.jit
def scale_of(peak: Float32):
    """The power of two that brings a row's ``peak`` to 2^14 or more, but below 2^15, and its inverse. Peaks so small
    that it has no inverse stay smaller. A row with an infinity stays as it is: what says of its other columns how
    large they are is lost, and as small as its peak would be they are 0."""
    bits = cute.make_rmem_tensor(1, Float32)
    bits[0] = peak
    exponent = cute.recast_tensor(bits, Int32)[0] >> EXPONENT_SHIFT
    wanted = cutlass.min(2 * EXPONENT_BIAS + PEAK_EXPONENT - exponent, 2 * EXPONENT_BIAS - 1)
    both = cute.make_rmem_tensor(2, Int32)
    both[0] = wanted if exponent <= 2 * EXPONENT_BIAS else Int32(EXPONENT_BIAS)
    both[1] = 2 * EXPONENT_BIAS - both[0]
    for i in range(2):
        both[i] = both[i] << EXPONENT_SHIFT
    powers = cute.recast_tensor(both, Float32)
    return powers[0], powers[1]


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
