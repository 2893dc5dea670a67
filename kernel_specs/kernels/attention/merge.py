"""Split KV, second half: the kernel that merges the partial results of several ranges of keys. For any architecture.

The merge is that of online softmax: with the ranges' maxima m_i, sums l_i and un-normalised outputs O_i, and m the
largest m_i, ``O = sum w_i O_i / (sum w_i l_i + exp(sink - scale m))`` with ``w_i = exp(scale (m_i - m))``. The sink
joins here, once. A row without any key has m = -inf and gets O = 0, LSE = -inf.

A row of O is shared by ``row_threads`` threads: ``columns / 4`` of them read 16 bytes each of one range, and ``groups``
such sets take every ``groups``-th range, so that few rows with many ranges, which is decode, have few serial loads. The
sets meet in shared memory.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from .workspace import STATISTICS, statistics_at

LOG2_E = math.log2(math.e)
WARP = 32
VECTOR = 4  # float32 values of a 16-byte load
BLOCK_THREADS = 128  # of a CTA, unless a row needs more
MOST_ROW_THREADS = 256
LOADS_AHEAD = 8  # 16-byte loads of a thread that are under way together


def partial_outputs(workspace, rows, splits: int, columns: int):
    """The workspace's outputs as (column, row, split)."""
    stride = cute.assume(Int64(rows) * columns, divby=64)
    return cute.make_tensor(workspace.iterator, cute.make_layout((columns, rows, splits), stride=(1, columns, stride)))


def partial_statistics(workspace, rows, splits: int, columns: int):
    """The workspace's statistics as ((maximum, sum), split, row)."""
    offset = cute.assume(statistics_at(Int64(rows), splits, columns), divby=64)
    layout = cute.make_layout((STATISTICS, splits, rows), stride=(1, STATISTICS, STATISTICS * splits))
    return cute.make_tensor(workspace.iterator + offset, layout)


@cute.jit
def finite(maximum: Float32):
    """A row's maximum, or 0 for that of a row without keys, so that differences from it are no NaN."""
    return Float32(0.0) if maximum == -Float32.inf else maximum


def exponential(raw, maximum, scale_log2):
    """exp(scale * (raw - maximum)) of raw scores; 0 for the -inf of a range without keys."""
    return cute.math.exp2((raw - maximum) * scale_log2, fastmath=True)


def sink_term(sink, maximum, scale_log2):
    """What a sink logit, in natural logarithm, adds to a row's sum of exponentials over its finite `maximum`."""
    return cute.math.exp2(sink * LOG2_E - maximum * scale_log2, fastmath=True)


@cute.jit
def reciprocal(total: Float32, extra: Float32):
    """1 / (total + extra) for the sum of a row; 0 for a row without keys."""
    return Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total + extra)


def log_sum_exp(maximum, total, scale):
    """Natural LSE of a row from its raw maximum and its sum; -inf for a row without keys."""
    return maximum * scale + cute.math.log(total)


@dataclass(frozen=True)
class Combine:
    """Merges ``splits`` ranges. `heads` and `columns` (of O) are static; `normalize` divides by the sums; `pdl`: the
    grid may start before the one that it depends on has ended, and waits for it itself."""

    heads: int
    columns: int
    splits: int
    normalize: bool = True
    pdl: bool = True

    @property
    def chunks(self) -> int:
        """Threads that cover a row of O once."""
        return self.columns // VECTOR

    @property
    def groups(self) -> int:
        """Sets of threads that share a row's ranges: a power of two; some four loads a thread, and whole warps."""
        wanted = 1 << max(0, math.ceil(math.log2(self.splits / 4)))
        return max(min(wanted, MOST_ROW_THREADS // self.chunks), WARP // self.chunks, 1)

    @property
    def row_threads(self) -> int:
        """Threads of a row: whole warps."""
        return self.chunks * self.groups

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return max(BLOCK_THREADS, self.row_threads)

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.threads // self.row_threads

    @property
    def parts(self) -> int:
        """Partial sums of a row that meet in shared memory: one a warp, or one a set where that is wider."""
        return max(1, self.row_threads // max(WARP, self.chunks))

    def launch(self, workspace, o, lse, row_max, sink, scale, stream, starts=None):
        """Merge into `o` ([batch, T, heads, columns], or packed [T, heads, columns] with `starts`, the sequences' first
        tokens and the end of the last), `lse` and `row_max`. Those two and `sink` may be None."""
        packed = cute.rank(o) == 3
        batch, tokens = (Int32(1), o.shape[0]) if packed else (o.shape[0], o.shape[1])
        blocks = cute.ceil_div(tokens * self.heads, self.rows)
        self._kernel(workspace, o, lse, row_max, sink, starts, scale).launch(
            grid=(blocks, batch, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def _kernel(self, workspace: cute.Tensor, o: cute.Tensor, lse, row_max, sink, starts, scale: Float32):
        block, batch, _ = cute.arch.block_idx()
        packed = const_expr(cute.rank(o) == 3)
        if const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        tokens = o.shape[0] if packed else o.shape[1]
        rows = tokens * self.heads
        first_row, every_row = (0, rows) if packed else (batch * rows, o.shape[0] * rows)
        outputs = partial_outputs(workspace, every_row, self.splits, self.columns)
        statistics = partial_statistics(workspace, every_row, self.splits, self.columns)
        if const_expr(packed):
            # Behind the last sequence nobody has left anything.
            rows = starts[starts.shape[0] - 1] * self.heads
        if block * self.rows < rows:
            self._merge(outputs, statistics, o, lse, row_max, sink, scale, block, batch, first_row, rows)

    @cute.jit
    def _merge(self, outputs, statistics, o, lse, row_max, sink, scale, block, batch, first_row, rows):
        """Merge the CTA's rows; the batch has ``rows``, in the workspace from ``first_row`` on."""
        thread, _, _ = cute.arch.thread_idx()
        row = block * self.rows + thread // self.row_threads
        exists = row < rows
        # Threads past the last row go along with it, since whole warps shuffle, and write nothing.
        row = cutlass.min(row, rows - 1)
        token, head = row // self.heads, row % self.heads
        of_row = thread % self.row_threads
        chunk, group = of_row % self.chunks, of_row // self.chunks
        source = cute.zipped_divide(outputs[None, first_row + row, None], (VECTOR, 1))[(None, 0), (chunk, None)]

        scale_log2 = scale * LOG2_E
        # The outputs are asked for before the statistics that weigh them: neither waits for the other.
        loads = -(-self.splits // self.groups)
        first = self._load(source, group, 0, min(loads, LOADS_AHEAD))
        weights, maximum, total = self._weights(statistics[None, None, first_row + row], scale_log2)
        acc = cute.make_rmem_tensor(VECTOR, Float32)
        acc.fill(0.0)
        self._add(acc, first, weights, group, 0)
        for begin in cutlass.range_constexpr(LOADS_AHEAD, loads, LOADS_AHEAD):
            following = self._load(source, group, begin, min(loads - begin, LOADS_AHEAD))
            self._add(acc, following, weights, group, begin)
        self._meet(acc, thread // self.row_threads, of_row, chunk)

        if const_expr(self.normalize):
            extra = Float32(0.0) if const_expr(sink is None) else sink_term(sink[head], finite(maximum), scale_log2)
            factor = reciprocal(total, extra)
            acc.store(acc.load() * factor)
        packed = const_expr(cute.rank(o) == 3)
        if exists and of_row < self.chunks:
            where = (token, head, None) if packed else (batch, token, head, None)
            target = cute.zipped_divide(o[where], (VECTOR,))[None, chunk]
            rounded = cute.make_rmem_tensor(VECTOR, o.element_type)
            rounded.store(acc.load().to(o.element_type))
            cute.autovec_copy(rounded, target)
        if exists and of_row == 0:
            place = (head, token) if packed else (batch, head, token)
            if const_expr(lse is not None):
                lse[place] = log_sum_exp(maximum, total, scale)
            if const_expr(row_max is not None):
                row_max[place] = maximum

    def _load(self, source, group, begin: int, count: int):
        """Ask for ``count`` of the thread's ranges from its ``begin``-th on; past the last one, for that one again."""
        found = cute.make_rmem_tensor((VECTOR, count), Float32)
        for i in range(count):
            split = group + (begin + i) * self.groups
            if (begin + i + 1) * self.groups > self.splits:
                split = cutlass.min(split, self.splits - 1)
            cute.autovec_copy(source[None, split], found[None, i])
        return found

    def _add(self, acc, values, weights, group, begin: int):
        """acc += weight * output over the ranges that `_load` fetched."""
        for i in range(cute.size(values, mode=[1])):
            first = (begin + i) * self.groups
            weight = cute.arch.shuffle_sync(weights[first // WARP], first % WARP + group)
            if first + self.groups > self.splits:
                weight = weight * Float32(first + group < self.splits)
            acc.store(acc.load() + values[None, i].load() * weight)

    def _weights(self, statistics, scale_log2):
        """(each lane's ranges' weights, the row's raw maximum, the row's sum); lane i has ranges i, i + 32, ..."""
        lane = cute.arch.lane_idx()
        turns = -(-self.splits // WARP)
        found = cute.make_rmem_tensor((STATISTICS, turns), Float32)
        for i in range(turns):
            split = lane + i * WARP
            cute.autovec_copy(statistics[None, cutlass.min(split, self.splits - 1)], found[None, i])
        maximum = found[0, 0]
        for i in range(1, turns):
            maximum = cute.arch.fmax(maximum, found[0, i])
        maximum = cute.arch.warp_reduction_max(maximum)
        base = finite(maximum)
        weights, total = [], Float32(0.0)
        for i in range(turns):
            weight = exponential(found[0, i], base, scale_log2)
            if (i + 1) * WARP > self.splits:
                weight = weight * Float32(lane + i * WARP < self.splits)
            weights.append(weight)
            total = total + weight * found[1, i]
        return weights, maximum, cute.arch.warp_reduction_sum(total)

    def _meet(self, acc, row, of_row, chunk):
        """Sum `acc` over the sets of threads of each row; the row's first ``chunks`` threads get the sums."""
        if self.chunks < WARP:
            offset = self.chunks
            while offset < WARP:
                for i in range(VECTOR):
                    acc[i] = acc[i] + cute.arch.shuffle_sync_bfly(acc[i], offset=offset)
                offset *= 2
        if self.parts > 1:
            self._meet_in_smem(acc, row, of_row, chunk)

    @cute.jit
    def _meet_in_smem(self, acc, row, of_row, chunk):
        width = max(WARP, self.chunks)
        layout = cute.make_layout((VECTOR, self.chunks, self.parts, self.rows))
        scratch = SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
        if of_row % width < self.chunks:
            cute.autovec_copy(acc, scratch[None, chunk, of_row // width, row])
        cute.arch.barrier()
        if of_row < self.chunks:
            for part in cutlass.range_constexpr(1, self.parts):
                other = cute.make_rmem_tensor(VECTOR, Float32)
                cute.autovec_copy(scratch[None, chunk, part, row], other)
                acc.store(acc.load() + other.load())
