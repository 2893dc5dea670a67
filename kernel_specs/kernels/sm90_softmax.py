"""Online softmax and masks on wgmma accumulators.

A thread of a consumer warp group holds two rows of its 64-row block, r and r + 8, and of each of them the columns
8 j + 2 (lane % 4) + {0, 1}: four lanes share a row. Scores are raw (q.k); scaling happens in the exponent.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .sm90_plan import LOG2_E, WARP_GROUP_THREADS, Plan


def rows_of(acc):
    """An accumulator ((2, 2, N / 8), 1, 1) of one 64-row wgmma as (row r or r + 8, column)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, cute.size(acc) // 4)), stride=(2, (1, 4))))


def first_row(lane):
    """The row r of a warp group's thread; its other row is r + 8."""
    return (lane // 32) * 16 + (lane % 32) // 4


def first_column(lane):
    """The first column of a warp group's thread."""
    return (lane % 4) * 2


def column_offset(i: int) -> int:
    """How far the i-th column of a thread lies behind its first."""
    return i // 2 * 8 + i % 2


@cute.jit
def scale_rows(acc, factor):
    """Multiply both of the thread's rows of an accumulator by their factors."""
    rows = rows_of(acc)
    for r in cutlass.range_constexpr(2):
        rows[r, None].store(rows[r, None].load() * factor[r])


@cute.jit
def round_here(acc, rounded):
    """Round an accumulator, in its register order, into ``rounded`` of a 16-bit type: at this place of the program.

    The compiler moves a conversion to where its result is used: there behind the loop's branches, where no exponential
    is left whose wait it could fill.
    """
    words = cute.recast_tensor(rounded, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pack(acc[2 * i], acc[2 * i + 1], rounded.element_type)


@dsl_user_op
def pack(low: Float32, high: Float32, element: type, *, loc=None, ip=None) -> Int32:
    """Two numbers rounded to a 16-bit type, in one word."""
    kind = "bf16x2" if element is BFloat16 else "f16x2"
    operands = [Float32(value).ir_value(loc=loc, ip=ip) for value in (high, low)]
    word = llvm.inline_asm(
        T.i32(), operands, f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", has_side_effects=True, loc=loc, ip=ip
    )
    return Int32(word)


class OnlineSoftmax:
    """The running maximum and sum of a thread's two rows.

    `maximum` is the raw score that exponents are taken from: the largest so far, or (`rescale_log2` > 0) one that is at
    most 2^rescale_log2 below it after scaling. `total` covers the thread's own columns only. `correction` is what O so
    far must be multiplied by after a step.
    """

    def __init__(self, plan: Plan, scale):
        self.blind_rows = plan.may_idle
        self.rescale_log2 = plan.rescale_log2
        self.scale = scale
        self.scale_log2 = scale * LOG2_E
        self.maximum = cute.make_rmem_tensor(2, Float32)
        self.total = cute.make_rmem_tensor(2, Float32)
        self.correction = cute.make_rmem_tensor(2, Float32)
        self.exact = self.total  # where the sum for O is another one than LSE's
        self.maximum.fill(-Float32.inf)
        self.total.fill(0.0)

    @cute.jit
    def step(self, acc_s):
        """Replace a tile's scores by exp2(scale_log2 * (s - maximum)), and update the rows' values."""
        rows = rows_of(acc_s)
        for r in cutlass.range_constexpr(2):
            before = self.maximum[r]
            highest = row_maximum(rows, r, before)
            highest = cute.arch.warp_reduction_max(highest, threads_in_group=4)
            if const_expr(self.rescale_log2 > 0):
                growth = (highest - before) * self.scale_log2
                highest = before if growth <= Float32(self.rescale_log2) else highest
            self.maximum[r] = highest
            base = self.base(highest)
            self.correction[r] = self.weight(before, base)
            exponents = rows[r, None].load() * self.scale_log2 - base * self.scale_log2
            rows[r, None].store(cute.math.exp2(exponents, fastmath=True))
            self.total[r] = row_sum(rows, r, self.total[r] * self.correction[r])

    def follow(self, r: int, maximum):
        """Take over a row's maximum after a step that another warp group did."""
        self.correction[r] = self.weight(self.maximum[r], self.base(maximum))
        self.maximum[r] = maximum
        self.total[r] = self.total[r] * self.correction[r]

    def weight(self, score, base):
        """exp(scale * (score - base))."""
        return cute.math.exp2((score - base) * self.scale_log2, fastmath=True)

    @cute.jit
    def base(self, maximum):
        """What to subtract from scores whose maximum this is: 0 for a row that has seen nothing, for exp2(-inf - 0) is
        the 0 that exp2(-inf - -inf) is not."""
        if const_expr(self.blind_rows):
            maximum = Float32(0.0) if maximum == -Float32.inf else maximum
        return maximum

    @cute.jit
    def rescale(self, acc_o):
        """Bring O, summed before the last step, to that step's maximum."""
        if const_expr(self.rescale_log2 > 0):
            grew = self.correction[0] != Float32(1.0) or self.correction[1] != Float32(1.0)
            if cute.arch.vote_any_sync(grew):
                scale_rows(acc_o, self.correction)
        else:
            scale_rows(acc_o, self.correction)


@cute.jit
def row_maximum(rows, r: cutlass.Constexpr[int], start):
    """Maximum of one row's columns and ``start``, in four independent chains."""
    chains = [start, rows[r, 0], rows[r, 1], rows[r, 2]]
    for i in cutlass.range_constexpr(3, cute.size(rows, mode=[1])):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], rows[r, i])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


@cute.jit
def row_sum(rows, r: cutlass.Constexpr[int], start):
    """Sum of one row's columns and ``start``, in four independent chains."""
    chains = [start + rows[r, 0], rows[r, 1], rows[r, 2], rows[r, 3]]
    for i in cutlass.range_constexpr(4, cute.size(rows, mode=[1])):
        chains[i % 4] = chains[i % 4] + rows[r, i]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


class ScoreMask:
    """Which scores of a tile a consumer thread must hide.

    `runs`: the CTA's KV tiles (sm90_runs.Runs); `block`: the warp group's row block, of a KV head's; `sides`: (left,
    right) of a window; `present`: of a gathered source, which entries of a step's tile exist (sm90_gather), as (word of
    32, step % buffers).
    """

    def __init__(self, plan: Plan, runs, block, sides, present=None):
        self.plan, self.runs, self.block, self.sides, self.present = plan, runs, block, sides, present
        self.lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS

    @cute.jit
    def apply(self, acc_s, step):
        """Set the scores of a step's tile that a row does not see to -inf. It does nothing for a tile that all see.

        A score that is not a number (of a key past the end) is replaced like any other.
        """
        runs = self.runs
        if const_expr(self.plan.two_sources):
            if step < runs.first_steps:
                self._hide_in_first(acc_s, runs.first.end - 1 - step)
            elif const_expr(self.plan.problem.gather):
                self._hide_absent(acc_s, step)
            else:
                tile = runs.second.end - 1 - (step - runs.first_steps)
                self._hide_past(acc_s, runs.keys2 - tile * self.plan.kv_tile)
        elif const_expr(self.plan.problem.gather):
            self._hide_absent(acc_s, step)
        else:
            self._hide_in_first(acc_s, runs.first.end - 1 - step)

    @cute.jit
    def _hide_absent(self, acc_s, step):
        """Keep the keys of a gathered tile that are listed, in every row."""
        count, buffers = cute.size(self.present, mode=[0]), cute.size(self.present, mode=[1])
        words = [self.present[i, step % buffers] for i in range(count)]
        rows = rows_of(acc_s)
        all_there = words[0]
        for i in cutlass.range_constexpr(1, count):
            all_there = all_there & words[i]
        if all_there != Int32(-1):
            for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                column = column_offset(i)
                bit = (words[column // 32] >> (column % 32 + first_column(self.lane))) & 1
                for r in cutlass.range_constexpr(2):
                    rows[r, i] = rows[r, i] if bit != 0 else -Float32.inf

    @cute.jit
    def _hide_in_first(self, acc_s, tile):
        """Apply the mask of source 1."""
        if const_expr(self.plan.mask.by_position):
            if self._is_cut(tile):
                self._hide_by_position(acc_s, tile * self.plan.kv_tile)
        else:
            self._hide_past(acc_s, self.runs.keys - tile * self.plan.kv_tile)

    @cute.jit
    def _is_cut(self, tile):
        """Whether some row of the CTA sees only a part of a tile of source 1."""
        first = self.runs.first
        cut = tile >= first.full_end
        if const_expr(self.plan.mask.has_left_side):
            cut = cut or tile < first.full_begin
        return cut

    @cute.jit
    def _hide_past(self, acc_s, valid):
        """Keep the first ``valid`` keys of a tile, in every row."""
        if valid < self.plan.kv_tile:
            rows = rows_of(acc_s)
            limit = valid - first_column(self.lane)
            # Rows within columns: each comparison serves both rows at once and need not be kept for later.
            for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                seen = column_offset(i) < limit
                for r in cutlass.range_constexpr(2):
                    rows[r, i] = rows[r, i] if seen else -Float32.inf

    @cute.jit
    def _hide_by_position(self, acc_s, first_key):
        """Keep the keys that each row's position sees, of the tile that starts with ``first_key``."""
        rows = rows_of(acc_s)
        own = first_key + first_column(self.lane)
        _, position_block = self.plan.packing.coordinates(self.block, 0)
        seen = []
        for r in cutlass.range_constexpr(2):
            position = self.plan.packing.position(first_row(self.lane) + 8 * r, position_block)
            seen.append(self.plan.mask.visible(position, self.runs.queries, self.runs.keys, *self.sides))
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            for r in cutlass.range_constexpr(2):
                begin, end = seen[r]
                rows[r, i] = rows[r, i] if column_offset(i) < end - own else -Float32.inf
                if const_expr(self.plan.mask.has_left_side):
                    rows[r, i] = rows[r, i] if column_offset(i) >= begin - own else -Float32.inf
