"""The multiplying warp group of a paired Hopper attention kernel's CTA: O of 64 rows and the CTA's half of the columns.

It takes P of all tiles, in order, whichever CTA scored them.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .attention.merge import finite
from .fmha_sm90_pair_space import KV_TILE, OWN_COLUMNS
from .sm90_consumer import issue, warp_group_barrier
from .sm90_pair_messages import QUAD, Messages
from .sm90_pair_plan import CONSUMER_THREADS, CTAS, PairPlan, value_position
from .sm90_plan import BARRIER_MEET, BLOCK_ROWS, LOG2_E, WARP_GROUP_THREADS
from .sm90_ring import PartRing
from .sm90_runs import Runs, valid_keys
from .sm90_softmax import pack, scale_rows
from .sm90_tails import zero_rows

FLOAT16_LEAST_LOG2 = -24.0  # the least power of two that float16 has


class ValueGroup:
    """`smem`: v (columns, rows, slot) and values (rows, columns, slot), two views of the values' slots; `ring`: theirs.

    `acc_o` and `softmax` are its results, as sm90_output takes them: un-normalised O, and the rows' maxima and sums.
    """

    def __init__(self, plan: PairPlan, rank, smem, ring: PartRing, messages: Messages, runs: Runs, scale):
        self.plan, self.rank, self.slots, self.ring, self.messages = plan, rank, smem.values, ring, messages
        self.runs, self.index, self.row_block = runs, 1, 0
        self.lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        element, source = plan.element, warpgroup.OperandSource.RMEM
        self.mma_o = make_trivial_tiled_mma(
            *(element, element, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1)),
            (BLOCK_ROWS, OWN_COLUMNS),
            a_source=source,
        )
        slice_o = self.mma_o.get_slice(self.lane)
        self.v = slice_o.make_fragment_B(slice_o.partition_B(smem.v))
        self.p = slice_o.make_fragment_A(slice_o.partition_shape_A((BLOCK_ROWS, KV_TILE)))
        self.acc_o = cute.make_rmem_tensor(self.mma_o.partition_shape_C((BLOCK_ROWS, OWN_COLUMNS)), Float32)
        self.acc_o.fill(0.0)
        self.taken = cute.make_rmem_tensor(2, Float32)  # where the message's exponents start from
        self.starts = cute.make_rmem_tensor(2, Float32)  # and those of O
        self.correction = cute.make_rmem_tensor(2, Float32)  # of O, to what was received last
        self.starts.fill(-Float32.inf)
        self.softmax = SimpleNamespace(
            maximum=cute.make_rmem_tensor(2, Float32),
            total=cute.make_rmem_tensor(2, Float32),
            exact=cute.make_rmem_tensor(2, Float32),
            scale=scale,
            scale_log2=scale * LOG2_E,
        )

    @cute.jit
    def attend(self):
        """Visit all tiles, then learn the rows' sums."""
        steps = self.runs.steps
        for pair in cutlass.range((steps + 1) // 2, unroll=1):
            self._multiply(pair, 0)
            if CTAS * pair + 1 < steps:
                self._multiply(pair, 1)
        self._close()

    @cute.jit
    def _receive(self, pair, owner: cutlass.Constexpr[int]):
        """Take P of a pair's tile that CTA ``owner`` scored, and bring it and the rows' exponents to one start, the
        greater one."""
        self.messages.receive(pair, owner, self.p, self.taken)
        words = cute.recast_tensor(self.p, Int32)
        for r in cutlass.range_constexpr(2):
            start = cute.arch.fmax(self.starts[r], self.taken[r])
            base = finite(start)
            self.correction[r] = cute.math.exp2(self.starts[r] - base, fastmath=True)
            self.starts[r] = start
            for power in self._powers(self.taken[r] - base):
                factor = cute.math.exp2(power, fastmath=True)
                both = pack(factor, factor, self.plan.element)
                for i in cutlass.range_constexpr(r, cute.size(words), 2):
                    words[i] = multiply_packed(words[i], both, self.plan.element)

    def _powers(self, power):
        """A whole number up to 0 as what P is multiplied by: powers of two that its type has. P may be greater than 1
        by as much as 2^rescale_log2, and a product that float16 has may be of a factor that it lacks."""
        if self.plan.element is not Float16 or self.plan.rescale_log2 == 0:
            return (power,)
        least = Float32(FLOAT16_LEAST_LOG2)
        return cute.arch.fmax(power, least), cute.arch.fmin(power - least, Float32(0.0))

    @cute.jit
    def _multiply(self, pair, owner: cutlass.Constexpr[int]):
        """O += P V of a pair's tile that CTA ``owner`` scored. (To take the other tile's P under the first's product
        makes that one's V wait for it, and so its slot: 1,000 cycles of 3,200 a pair. H200, 2026-11-30.)"""
        plan, position = self.plan, value_position(self.plan, pair, owner, self.rank)
        self._receive(pair, owner)
        grew = self.correction[0] != Float32(1.0) or self.correction[1] != Float32(1.0)
        if cute.arch.vote_any_sync(grew):
            scale_rows(self.acc_o, self.correction)
        self.ring.wait_full(position)
        self._clean(CTAS * pair + owner, position)
        issue(self.mma_o, self.acc_o, self.p, self.v[None, None, None, self.ring.slot(position)], 0, clear=False)
        warpgroup.wait_group(0)
        if const_expr(plan.kv_shared):
            # The scoring warp group lets go of the own tile, and has no use for the other CTA's.
            if owner == self.rank:
                self.ring.release(position)
            else:
                self.ring.release(position, 2)
        else:
            self.ring.release(position)

    @cute.jit
    def _close(self):
        """The rows' sums over both CTAs' tiles. A row's four threads add theirs up later: so only one has them."""
        (starts, sums, exact), softmax = self.messages.receive_ends(), self.softmax
        # O is staged in the ring.
        cute.arch.barrier(barrier_id=BARRIER_MEET, number_of_threads=CONSUMER_THREADS)
        for r in cutlass.range_constexpr(2):
            base = finite(self.starts[r])
            weights = [cute.math.exp2(starts[r, owner] - base, fastmath=True) for owner in range(CTAS)]
            total = sums[r, 0] * weights[0] + sums[r, 1] * weights[1]
            softmax.total[r] = total if self.lane % QUAD == 0 else Float32(0.0)
            softmax.exact[r] = exact[r, 0] * weights[0] + exact[r, 1] * weights[1]
            # As a raw score. Without a scale all exponents are 0.
            maximum = self.starts[r] / softmax.scale_log2
            softmax.maximum[r] = self.starts[r] if softmax.scale_log2 == Float32(0.0) else maximum

    @cute.jit
    def _clean(self, step, position):
        """If a step's tile reaches past its sequence's end, zero those rows of the own columns. S is known by then."""
        if const_expr(self.plan.unclean_tails):
            valid = valid_keys(self.plan, self.runs, step)
            if valid < KV_TILE:
                part = self.slots[None, None, self.ring.slot(position)]
                zero_rows(self.plan, part, valid, self.lane, WARP_GROUP_THREADS)
                cute.arch.fence_view_async_shared()
                warp_group_barrier(self.index)


@dsl_user_op
def multiply_packed(a: Int32, b: Int32, element: type, *, loc=None, ip=None) -> Int32:
    """The products of two words' 16-bit numbers."""
    kind = "bf16x2" if element is BFloat16 else "f16x2"
    operands = [Int32(word).ir_value(loc=loc, ip=ip) for word in (a, b)]
    word = llvm.inline_asm(
        T.i32(), operands, f"mul.rn.{kind} $0, $1, $2;", "=r,r,r", has_side_effects=False, loc=loc, ip=ip
    )
    return Int32(word)
