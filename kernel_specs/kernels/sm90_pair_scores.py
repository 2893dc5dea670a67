"""The scoring warp group of a paired Hopper attention kernel's CTA: S of its own tiles, and their softmax.

Q stays in its registers, all 64 rows by 512 columns, for it holds no O. That frees Q's shared memory for the ring, and
halves what a product reads from there.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .attention.merge import finite
from .fmha_sm90_pair_space import HEAD_DIM, KV_TILE
from .sm90_consumer import issue
from .sm90_pair_messages import Messages
from .sm90_pair_plan import CONSUMER_THREADS, CTAS, PairPlan, key_position, value_position
from .sm90_plan import BARRIER_MEET, BLOCK_ROWS, LOG2_E, WARP_GROUP_THREADS, WARPS_PER_GROUP
from .sm90_ring import PartRing
from .sm90_softmax import round_here, row_maximum, row_sum, rows_of


class WholeSoftmax:
    """Exponentials of a thread's two rows.

    A row's exponents *start* from a whole number, the running maximum of scale * log2(e) * (q.k) rounded up, or
    (`rescale_log2` > 0) one that is at most that much less. So what has to be brought to another start, P too, is
    multiplied by a power of two and not rounded once more. `correction` is what sums so far must be multiplied by.
    """

    def __init__(self, plan: PairPlan, scale):
        self.blind_rows, self.rescale_log2 = plan.blind_rows, plan.rescale_log2
        self.scale_log2 = scale * LOG2_E
        self.starts = cute.make_rmem_tensor(2, Float32)
        self.correction = cute.make_rmem_tensor(2, Float32)
        self.starts.fill(-Float32.inf)

    @cute.jit
    def step(self, acc_s):
        """Replace a tile's scores by exp2(scale_log2 * s - start)."""
        rows = rows_of(acc_s)
        for r in cutlass.range_constexpr(2):
            before = self.starts[r]
            highest = cute.arch.warp_reduction_max(row_maximum(rows, r, -Float32.inf), threads_in_group=4)
            start = cute.math.ceil(highest * self.scale_log2)
            start = start if start - before > Float32(self.rescale_log2) else before
            self.starts[r] = start
            if const_expr(self.blind_rows):
                start = finite(start)
            exponents = rows[r, None].load() * self.scale_log2 - start
            rows[r, None].store(cute.math.exp2(exponents, fastmath=True))
            self.correction[r] = cute.math.exp2(before - start, fastmath=True)

    @cute.jit
    def add(self, acc, totals):
        """Add a tile's exponentials to the thread's sums."""
        rows = rows_of(acc)
        for r in cutlass.range_constexpr(2):
            totals[r] = row_sum(rows, r, totals[r] * self.correction[r])


class ScoreGroup:
    """The scoring warp group of a CTA.

    `smem`: keys and values (rows, columns, slot), each with a half of Q in its first slot; `keys`, `values`: the rings.
    A tile's owner scores it by halves of K's columns: of one latent first those that are not its own columns of V, for
    they are let go of, and loaded, earlier. Q comes in that order too.
    """

    def __init__(
        self, plan: PairPlan, rank, smem, keys: PartRing, values: PartRing, messages: Messages, mask, runs, scale
    ):
        self.plan, self.rank, self.smem, self.keys, self.values = plan, rank, smem, keys, values
        self.messages, self.mask, self.runs = messages, mask, runs
        self.softmax = WholeSoftmax(plan, scale)
        element, k_major = plan.element, OperandMajorMode.K
        source = warpgroup.OperandSource.RMEM
        self.mma = make_trivial_tiled_mma(
            element, element, k_major, k_major, Float32, (1, 1, 1), (BLOCK_ROWS, KV_TILE), a_source=source
        )
        self.lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        slice_s = self.mma.get_slice(self.lane)
        self.k, self.own = (slice_s.make_fragment_B(slice_s.partition_B(slots)) for slots in (smem.keys, smem.values))
        self.q = slice_s.make_fragment_A(slice_s.partition_shape_A((BLOCK_ROWS, HEAD_DIM)))
        self.acc = cute.make_rmem_tensor(self.mma.partition_shape_C((BLOCK_ROWS, KV_TILE)), Float32)
        self.p = cute.make_rmem_tensor(self.acc.layout, element)
        # What O is divided by is the sum of P as rounded: where few keys have a row's weight, their error cancels.
        self.totals, self.exact = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        self.totals.fill(0.0)
        self.exact.fill(0.0)

    @cute.jit
    def take_q(self):
        """Q into registers, a half from each ring."""
        load = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.plan.element), self.mma
        ).get_slice(self.lane)
        blocks = cute.size(self.q, mode=[2]) // 2
        target = load.retile(self.q)
        for half, ring, slots in ((0, self.keys, self.smem.keys), (1, self.values, self.smem.values)):
            ring.wait_full(0)
            source = load.partition_S(slots[None, None, 0])
            for k in cutlass.range_constexpr(blocks):
                cute.copy(load, source[None, None, k], target[None, None, half * blocks + k])
        cute.arch.sync_warp()
        self.keys.release(0)
        self.values.release(0, self.plan.value_releases // WARPS_PER_GROUP)

    @cute.jit
    def attend(self):
        """Score the own tile of each pair, and send it; then the rows' sums."""
        steps = self.runs.steps
        self.take_q()
        for pair in cutlass.range((steps + 1 - self.rank) // 2, unroll=1):
            self._scores(pair)
            self.mask.apply(self.acc, CTAS * pair + self.rank)
            self.softmax.step(self.acc)
            round_here(self.acc, self.p)
            self.messages.send(pair, self.p, self.softmax.starts)
            if const_expr(self.plan.writes_lse):
                self.softmax.add(self.acc, self.exact)
            self.acc.store(self.p.load().to(Float32))
            self.softmax.add(self.acc, self.totals)
        for totals in (self.totals, self.exact):
            for r in cutlass.range_constexpr(2):
                totals[r] = cute.arch.warp_reduction_sum(totals[r], threads_in_group=4)
        self.messages.send_end(self.softmax.starts, self.totals, self.exact)
        # The rings are spent, as far as this warp group is concerned.
        cute.arch.barrier_arrive(barrier_id=BARRIER_MEET, number_of_threads=CONSUMER_THREADS)

    def _halves(self, pair):
        """(ring, position, operand) of the halves of the own tile's K."""
        first = key_position(self.plan, pair)
        if const_expr(self.plan.kv_shared):
            return (self.keys, first, self.k), (self.values, value_position(self.plan, pair, 0, 0), self.own)
        return (self.keys, first, self.k), (self.keys, first + 1, self.k)

    @cute.jit
    def _scores(self, pair):
        """S = Q K^T of the own tile, a wgmma group for each half of K, which is let go as its group ends."""
        halves = self._halves(pair)
        for half in cutlass.range_constexpr(2):
            ring, position, k = halves[half]
            ring.wait_full(position)
            columns = k[None, None, None, ring.slot(position)]
            issue(self.mma, self.acc, self.q, columns, half * (cute.size(self.q, mode=[2]) // 2), clear=half == 0)
        for half in cutlass.range_constexpr(2):
            warpgroup.wait_group(1 - half)
            ring, position, _ = halves[half]
            ring.release(position)
