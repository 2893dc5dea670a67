"""A consumer warp group of the Hopper attention kernel: both matrix products on wgmma, the online softmax between them.

The steady state of a step: S of this tile is issued before O of the previous one, and the softmax runs beside the
latter. With several row blocks the warp groups take turns at issuing, so that one's softmax runs under another's
products.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .sm90_load import Ring
from .sm90_plan import (
    BARRIER_MEET,
    BARRIER_TURN,
    BARRIER_WARP_GROUP,
    BLOCK_ROWS,
    WARP_GROUP_THREADS,
    Plan,
)
from .sm90_runs import Runs, valid_keys
from .sm90_schedule import Before
from .sm90_softmax import OnlineSoftmax, ScoreMask, round_here
from .sm90_tails import zero_rows


def tiled_mmas(plan: Plan):
    """(S = Q K^T, O = P V), each for one warp group of 64 rows."""
    k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN
    source = warpgroup.OperandSource.SMEM if plan.smem_p else warpgroup.OperandSource.RMEM
    one, element = (1, 1, 1), plan.element
    mma_s = make_trivial_tiled_mma(element, element, k_major, k_major, Float32, one, (BLOCK_ROWS, plan.kv_tile))
    mma_o = make_trivial_tiled_mma(
        element, element, k_major, n_major, Float32, one, (BLOCK_ROWS, plan.pv_n_tile), a_source=source
    )
    return mma_s, mma_o


def matrix_store(mma, element):
    """Tiled stmatrix copy of ``mma``'s accumulator, rounded to ``element``, into row-major shared memory."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), element)
    return cute.make_tiled_copy_C(atom, mma)


def warp_group_barrier(consumer):
    """Barrier of a consumer warp group's own threads."""
    cute.arch.barrier(barrier_id=BARRIER_WARP_GROUP + consumer, number_of_threads=WARP_GROUP_THREADS)


@cute.jit
def issue(mma, acc, frag_a, frag_b, first: cutlass.Constexpr[int], clear: cutlass.Constexpr[bool]):
    """Issue acc (+)= A B^T over all of B's k blocks, and A's from ``first`` on, as one committed wgmma group."""
    warpgroup.fence()
    # A fresh atom: its accumulate field is set per use, which one shared across loops can't be.
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not clear)
    for k in cutlass.range_constexpr(cute.size(frag_b, mode=[2])):
        cute.gemm(atom, acc, frag_a[None, None, first + k], frag_b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def open_turns(plan, consumer):
    """Give warp group 0 the first turn."""
    if const_expr(plan.take_turns):
        if consumer == plan.consumers - 1:
            cute.arch.barrier_arrive(barrier_id=BARRIER_TURN, number_of_threads=2 * WARP_GROUP_THREADS)


@cute.jit
def close_turns(plan, consumer):
    """Take the turn that the last warp group passed last, so that no barrier is left half full."""
    if const_expr(plan.take_turns):
        if consumer == 0:
            cute.arch.barrier(barrier_id=BARRIER_TURN, number_of_threads=2 * WARP_GROUP_THREADS)


class Consumer:
    """What one consumer warp group works on.

    `index` of the warp group; `row_block` of the CTA that it owns; `group`: of the warp groups that share the row block
    it takes every kv_groups-th step from the group-th on. `k`, `v`: the rings; with kv_shared they are one, of which
    `v.smem` is the view as V. `acc_o` and `softmax` are its results.
    """

    def __init__(self, plan: Plan, mmas, smem_q, smem_p, k: Ring, v: Ring, index, mask: ScoreMask, scale):
        self.plan = plan
        self.mma_s, self.mma_o = mmas
        self.k_ring, self.v_ring = k, v
        self.index, self.row_block = index, index % plan.row_blocks
        self.group = index // plan.row_blocks if const_expr(plan.kv_groups > 1) else Int32(0)
        self.mask = mask
        self.lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        slice_s, slice_o = self.mma_s.get_slice(0), self.mma_o.get_slice(0)
        self.q = slice_s.make_fragment_A(slice_s.partition_A(smem_q))[None, None, None, self.row_block]
        self.k = slice_s.make_fragment_B(slice_s.partition_B(k.smem))
        self.v = slice_o.make_fragment_B(slice_o.partition_B(v.smem))
        if const_expr(plan.smem_p):
            self.p = slice_o.make_fragment_A(slice_o.partition_A(smem_p))[None, None, None, index]
            self.store_p = matrix_store(self.mma_s, plan.element).get_slice(self.lane)
            self.shared_p = self.store_p.partition_D(smem_p[None, None, index])
        else:
            self.p = slice_o.make_fragment_A(slice_o.partition_shape_A((BLOCK_ROWS, plan.kv_tile)))
        self.acc_o = cute.make_rmem_tensor(self.mma_o.partition_shape_C((BLOCK_ROWS, plan.pv_n_tile)), Float32)
        self.acc_o.fill(0.0)
        self.softmax = OnlineSoftmax(plan, scale)

    # ---- the walk --------------------------------------------------------------------------------------------------

    @cute.jit
    def attend(self, q_pipe, runs: Runs, before: Before):
        """Visit this group's tiles of a walk: `acc_o` is then the un-normalised O, `softmax` has its rows' values.
        Where the rings stand follows from what the CTA has done ``before``."""
        ring_q = _ring_at(before.blocks, 1)
        q_pipe.consumer_wait(ring_q)
        if const_expr(self.plan.kv_groups == 1 and not self.plan.may_idle):
            self._walk(runs, before.tiles, q_pipe, ring_q)
        else:
            if self.group < runs.steps:
                self._walk(runs, before.tiles, q_pipe, ring_q)
            else:
                self._release_q(q_pipe, ring_q)

    @cute.jit
    def _walk(self, runs, tiles, q_pipe, ring_q):
        """The group's steps, of which there is at least one, after those of as many ``tiles``."""
        plan, group = self.plan, self.group
        ring_k = _ring_at((tiles + group) * plan.k_sub, plan.k_stage)
        ring_v = _ring_at(tiles + group, plan.v_stage)
        self._wait_before_turn(ring_k, None)
        self._wait_turn()
        acc_s = self._issue_s(ring_k)
        self._pass_turn()
        ring_k = self._finish_s(ring_k, 0)
        self.mask.apply(acc_s, group)
        self.softmax.step(acc_s)
        self._put_p(acc_s)
        self._clean_v(ring_v, runs, group)

        steps = (runs.steps - 1 - group) // plan.kv_groups
        if const_expr(plan.two_sources or plan.gather or plan.mask.has_left_side):
            for i in cutlass.range(steps, unroll=1):
                ring_k, ring_v = self._step(ring_k, ring_v, runs, group + (i + 1) * plan.kv_groups)
        elif const_expr(plan.mask.by_position):
            # A causal mask cuts the first steps' tiles only.
            cut = cutlass.max(cutlass.min((runs.leading_cut_steps() - 1 - group) // plan.kv_groups, steps), 0)
            for i in cutlass.range(cut, unroll=1):
                ring_k, ring_v = self._step(ring_k, ring_v, runs, group + (i + 1) * plan.kv_groups)
            for _ in cutlass.range(steps - cut, unroll=1):
                ring_k, ring_v = self._step(ring_k, ring_v, runs, None)
        else:
            for _ in cutlass.range(steps, unroll=1):
                ring_k, ring_v = self._step(ring_k, ring_v, runs, None)

        self._release_q(q_pipe, ring_q)
        if const_expr(plan.rescale_late):
            self.softmax.rescale(self.acc_o)
        self._wait_v(ring_v)
        self._issue_o(ring_v)
        warpgroup.wait_group(0)
        self.v_ring.pipe.consumer_release(ring_v)

    @cute.jit
    def _step(self, ring_k, ring_v, runs, cut_step):
        """S, softmax and P of the next tile, O of the one before; ``cut_step``: its step if it may need a mask."""
        self._wait_before_turn(ring_k, ring_v)
        self._wait_turn()
        acc_s = self._issue_s(ring_k)
        if const_expr(self.plan.rescale_late):
            self.softmax.rescale(self.acc_o)
        if const_expr(not self.plan.take_turns):
            self._wait_v(ring_v)
        self._issue_o(ring_v)
        self._pass_turn()
        ring_k = self._finish_s(ring_k, 1)
        if const_expr(cut_step is not None):
            self.mask.apply(acc_s, cut_step)
        self.softmax.step(acc_s)
        warpgroup.wait_group(0)
        self.v_ring.pipe.consumer_release(ring_v)
        ring_v = _advance(ring_v, self.plan.kv_groups)
        self._put_p(acc_s)
        if const_expr(not self.plan.rescale_late):
            self.softmax.rescale(self.acc_o)
        if const_expr(self.plan.two_sources):
            self._clean_v(ring_v, runs, cut_step)
        return ring_k, ring_v

    # ---- parts of a step -------------------------------------------------------------------------------------------

    @cute.jit
    def _release_q(self, q_pipe, ring):
        """Give Q's place to the next row block's: no S of this one is to come."""
        if const_expr(self.plan.persistent):
            q_pipe.consumer_release(ring)

    @cute.jit
    def _issue_s(self, ring):
        """Start S = Q K^T for one tile, a wgmma group for each K stage of it, and return its accumulator."""
        plan = self.plan
        acc_s = cute.make_rmem_tensor(self.mma_s.partition_shape_C((BLOCK_ROWS, plan.kv_tile)), Float32)
        blocks = cute.size(self.k, mode=[2])
        stage = ring.clone()
        for part in cutlass.range_constexpr(plan.k_sub):
            if const_expr(not plan.take_turns):
                self._wait_k(stage)
            issue(self.mma_s, acc_s, self.q, self.k[None, None, None, stage.index], part * blocks, clear=part == 0)
            stage.advance()
        return acc_s

    @cute.jit
    def _finish_s(self, ring, younger: cutlass.Constexpr[int]):
        """Wait for S, ``younger`` wgmma groups having been issued after it, and free K's stages as their groups end.

        Returns the ring at this group's next tile. With kv_shared the stage stays: it is V's.
        """
        for part in cutlass.range_constexpr(self.plan.k_sub):
            warpgroup.wait_group(self.plan.k_sub - 1 - part + younger)
            if const_expr(not self.plan.kv_shared):
                self.k_ring.pipe.consumer_release(ring)
            ring.advance()
        return _advance(ring, self.plan.k_sub * (self.plan.kv_groups - 1))

    @cute.jit
    def _wait_before_turn(self, ring_k, ring_v):
        """Wait for the tiles of a turn's products, K and that of V before it, if any, so that while this warp group has
        its turn nothing but the products takes time: even a wait for a tile that is there is 2 % of a step (stall
        samples of an H200, head_dim 128, 2026-11-30). It waits for one stage of K: where warp groups take turns, K is
        never split (the rule k_sub_wide)."""
        if const_expr(self.plan.take_turns):
            self._wait_k(ring_k)
            if const_expr(ring_v is not None):
                self._wait_v(ring_v)

    @cute.jit
    def _wait_k(self, ring):
        """Wait for a stage of K."""
        self.k_ring.pipe.consumer_wait(ring)
        self._see_gathered()

    @cute.jit
    def _wait_v(self, ring):
        """Wait for a tile of V; with kv_shared S has waited for it."""
        if const_expr(not self.plan.kv_shared):
            self.v_ring.pipe.consumer_wait(ring)
            self._see_gathered()

    def _see_gathered(self):
        """Gathered tiles were written through the generic proxy, and wgmma reads through the async one."""
        if const_expr(self.plan.gather):
            cute.arch.fence_view_async_shared()

    @cute.jit
    def _issue_o(self, ring):
        """Start O += P V for one tile; the caller waits."""
        issue(self.mma_o, self.acc_o, self.p, self.v[None, None, None, ring.index], 0, clear=False)

    @cute.jit
    def _put_p(self, acc_s):
        """Round P as the A operand of the PV product: in registers, or through shared memory."""
        element = self.plan.element
        if const_expr(self.plan.smem_p):
            rounded = cute.make_rmem_tensor(acc_s.layout, element)
            rounded.store(acc_s.load().to(element))
            cute.copy(self.store_p, self.store_p.retile(rounded), self.shared_p)
            # wgmma reads through the async proxy, and reads rows that other warps of the group wrote.
            cute.arch.fence_view_async_shared()
            warp_group_barrier(self.index)
        # An accumulator's register order is the A operand's register order, 16 columns at a time.
        elif const_expr(self.plan.take_turns):
            # Another warp group's products run meanwhile, and rounding each pair as soon as it is there costs more than
            # it hides (H200, 2026-11-30: head_dim 64 and 128, 2 to 10 %).
            rounded = cute.make_tensor(self.p.iterator, acc_s.layout)
            rounded.store(acc_s.load().to(element))
        else:
            round_here(acc_s, self.p)

    # ---- unclean tails: 0 * NaN is NaN, so the rows of V behind a sequence's end must not meet P's zeros -------------

    @cute.jit
    def _clean_v(self, ring, runs, step):
        """If a step's tile reaches past its sequence's end, zero those rows of V. No turn may be held: warp groups that
        read the same stage do it together."""
        if const_expr(self.plan.unclean_tails):
            valid = valid_keys(self.plan, runs, step)
            if valid < self.plan.kv_tile:
                self._zero_rows(ring, valid)

    @cute.jit
    def _zero_rows(self, ring, valid):
        """Zero the keys at or past ``valid`` of a stage of V (columns, keys)."""
        plan = self.plan
        threads = plan.row_blocks * WARP_GROUP_THREADS
        thread = self.row_block * WARP_GROUP_THREADS + self.lane
        if const_expr(plan.kv_shared):
            self._meet_readers()  # the others' S may still read these bytes as K
        self._wait_v(ring)
        stage = self.v_ring.smem[None, None, ring.index]
        keys_first = cute.make_tensor(stage.iterator, cute.select(stage.layout, mode=[1, 0]))
        zero_rows(plan, keys_first, valid, thread, threads)
        cute.arch.fence_view_async_shared()
        self._meet_readers()

    @cute.jit
    def _meet_readers(self):
        """Barrier of the warp groups that read the same stages: all row blocks, of one KV group."""
        if const_expr(self.plan.row_blocks == 1):
            warp_group_barrier(self.index)
        else:
            cute.arch.barrier(barrier_id=BARRIER_MEET, number_of_threads=self.plan.row_blocks * WARP_GROUP_THREADS)

    # ---- the merge of two KV groups --------------------------------------------------------------------------------

    @cute.jit
    def merge_groups(self, scratch):
        """Add KV group 1's O and sums to group 0's, through ``scratch``: shared memory that nobody reads any more.

        Threads of equal lane hold the same elements of the row block.
        """
        acc_o, maximum, total = self.acc_o, self.softmax.maximum, self.softmax.total
        elements = cute.size(acc_o)
        shape = (WARP_GROUP_THREADS, elements + 4)
        shared = cute.make_tensor(cute.recast_ptr(scratch, dtype=Float32), cute.make_layout(shape))[self.lane, None]
        self.meet()
        if self.group == 1:
            for i in cutlass.range_constexpr(elements):
                shared[i] = acc_o[i]
            for r in cutlass.range_constexpr(2):
                shared[elements + r] = maximum[r]
                shared[elements + 2 + r] = total[r]
        self.meet()
        if self.group == 0:
            own, other = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                highest = cute.arch.fmax(maximum[r], shared[elements + r])
                base = self.softmax.base(highest)
                own[r] = self.softmax.weight(maximum[r], base)
                other[r] = self.softmax.weight(shared[elements + r], base)
                maximum[r] = highest
                total[r] = total[r] * own[r] + shared[elements + 2 + r] * other[r]
            for i in cutlass.range_constexpr(elements):
                r = i // 2 % 2
                acc_o[i] = acc_o[i] * own[r] + shared[i] * other[r]

    def meet(self):
        """Barrier of all consumer warp groups."""
        cute.arch.barrier(barrier_id=BARRIER_MEET, number_of_threads=self.plan.consumers * WARP_GROUP_THREADS)

    # ---- turns: the order in which the consumer warp groups issue their matrix products ----------------------------

    @cute.jit
    def _wait_turn(self):
        if const_expr(self.plan.take_turns):
            cute.arch.barrier(barrier_id=BARRIER_TURN + self.index, number_of_threads=2 * WARP_GROUP_THREADS)

    @cute.jit
    def _pass_turn(self):
        if const_expr(self.plan.take_turns):
            following = (self.index + 1) % self.plan.consumers
            cute.arch.barrier_arrive(barrier_id=BARRIER_TURN + following, number_of_threads=2 * WARP_GROUP_THREADS)


def _ring_at(position, stages):
    """Consumer state of the ring stage that the ``position``-th load fills."""
    return pipeline.PipelineState(stages, Int32(0), Int32(position % stages), Int32(position // stages % 2))


@cute.jit
def _advance(ring, steps: cutlass.Constexpr[int]):
    """The ring moved on by ``steps`` stages."""
    for _ in cutlass.range_constexpr(steps):
        ring.advance()
    return ring
