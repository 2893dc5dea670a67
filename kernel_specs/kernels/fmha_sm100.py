"""Fused multi-head attention, forward, for sm_100a (tcgen05, TMEM, TMA).

    O = softmax(scale * Q K^T) V

One CTA computes one tile of 128 query rows against every key of its (batch, KV head), and owns
`pv_n_tile` of the `head_dim` columns of V and O. Twelve warps share the work:

    warps 0-3    softmax      S (TMEM) -> registers -> P (TMEM or SMEM), row maximum and row sum
    warps 4-7    correction   rescale O in TMEM when a row's maximum grew; the epilogue; TMEM's owner
    warp  8      mma          the one issuer of tcgen05.mma
    warp  9      load         the one issuer of TMA loads
    warps 10-11  idle         setmaxnreg counts in warp groups of four

How a KV tile i travels (-> is a pipeline; its arrivals in parentheses):

    load --K,V full (TMA bytes)--> mma --K,V empty (tcgen05.commit)--> load
    mma --S full (commit)--> softmax --S empty (128 threads)--> mma
    softmax --P full (128 threads)--> mma --P empty (commit)--> softmax
    mma --O full (commit)--> correction --O empty (128 threads)--> mma
    softmax --statistics (two named barriers, 256 threads)--> correction

S and P never share TMEM columns, so no order is needed between the QK product that writes S and the
PV product that reads P beyond what the pipelines say.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.experimental.primitives import nvvm_wrapper as nvvm
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

M_TILE = 128
WARP = 32
TMEM_COLUMNS = 512
# The columns that one tcgen05.ld or .st of a warp moves (32 lanes x 32 columns).
COPY_COLUMNS = 32
# The widest row that a 128-byte swizzle holds, in bf16.
SWIZZLE_COLUMNS = 64
BUFFER_ALIGN_BYTES = 1024


class _FmhaForwardSm100:
    """The kernel of one variant; a subclass adds the entry point with its arguments.

    head_dim    columns of Q and K, and of V and O over all slices: 64, 128, 256 or 512
    heads       query heads; `heads / kv_heads` of them share a KV head and are packed into M
    kv_heads    key and value heads
    pv_n_tile   columns of V and O a CTA owns; `head_dim / pv_n_tile` CTAs repeat QK and softmax
    kv_tile     keys in a tile: N of the QK product, K of the PV product
    kv_stage    tiles of K, and of V, in flight
    smem_p      PV reads P from SMEM (True) or TMEM (False)
    m_tile      query rows of a CTA: 128
    """

    def __init__(
        self,
        *,
        head_dim: int,
        heads: int,
        kv_heads: int,
        pv_n_tile: int,
        kv_tile: int,
        kv_stage: int,
        smem_p: bool,
        m_tile: int = M_TILE,
    ):
        if m_tile != M_TILE:
            raise ValueError(f"m_tile {m_tile} on sm_100a: not yet covered, use {M_TILE}")
        self.head_dim = head_dim
        self.heads = heads
        self.kv_heads = kv_heads
        self.ratio = heads // kv_heads
        self.pv_n_tile = pv_n_tile
        self.slices = head_dim // pv_n_tile
        self.kv_tile = kv_tile
        self.kv_stage = kv_stage
        self.smem_p = smem_p
        self.m_tile = m_tile

        self.qk_tiler = (m_tile, kv_tile, head_dim)
        self.pv_tiler = (m_tile, pv_n_tile, kv_tile)
        self.epi_tile = (m_tile, SWIZZLE_COLUMNS)
        self.epi_tiles = pv_n_tile // SWIZZLE_COLUMNS

        # TMEM: s_stage x S | p_stage x P (bf16, two to a column) | O. Two stages of S let QK(i+1) run
        # under the softmax of tile i; one stage is left where O takes half of TMEM beside wide tiles.
        p_columns = 0 if smem_p else kv_tile // 2
        self.s_stage = 2 if 2 * (kv_tile + p_columns) + pv_n_tile <= TMEM_COLUMNS else 1
        # In SMEM a second stage of P would cost a stage of K and V, and PV(i) starts well before
        # softmax(i+1) has its P to store.
        self.p_stage = 1 if smem_p else self.s_stage
        self.s_column = 0
        self.p_column = self.s_stage * kv_tile
        self.o_column = self.p_column + self.p_stage * p_columns
        columns = self.o_column + pv_n_tile
        self.tmem_columns = max(32, 1 << (columns - 1).bit_length())

        self.softmax_warps = (0, 1, 2, 3)
        self.correction_warps = (4, 5, 6, 7)
        self.mma_warp = 8
        self.load_warp = 9
        self.warps = 12
        self.threads = self.warps * WARP
        self.role_threads = len(self.softmax_warps) * WARP
        # 168 registers a thread at launch (65,536 over 384 threads, rounded down to eights), handed out
        # anew, 504 over the three warp groups. A softmax thread holds a row of S (up to 128 registers)
        # and of bf16 P (up to 64); the MMA thread keeps the descriptors of all k-steps (at head_dim 512
        # it spilt with 144); a correction thread holds one 64-column piece of O.
        self.softmax_registers = 184
        self.correction_registers = 136
        self.issue_registers = 184

        # Barrier 0 is __syncthreads.
        both = 2 * self.role_threads
        self.statistics_full = pipeline.NamedBarrier(barrier_id=1, num_threads=both)
        self.statistics_empty = pipeline.NamedBarrier(barrier_id=2, num_threads=both)
        self.epilogue_barrier = pipeline.NamedBarrier(barrier_id=3, num_threads=self.role_threads)
        self.tmem_barrier = pipeline.NamedBarrier(barrier_id=4, num_threads=both + WARP)

    # ---- host -------------------------------------------------------------------------------

    @cute.jit
    def _launch(self, q, k, v, o, lse, row_max, scale: Float32, stream):
        """Builds layouts and TMA descriptors and launches; lse and row_max are None if normalised."""
        q_view = self._query_view(q)
        o_view = self._query_view(o)
        k_view = cute.make_tensor(k.iterator, cute.select(k.layout, mode=[1, 3, 2, 0]))
        v_view = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[3, 1, 2, 0]))

        cta_group = tcgen05.CtaGroup.ONE
        qk_mma = sm100.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            cta_group,
            self.qk_tiler[:2],
        )
        pv_mma = sm100.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            cta_group,
            self.pv_tiler[:2],
            tcgen05.OperandSource.SMEM if self.smem_p else tcgen05.OperandSource.TMEM,
        )
        q_layout = sm100.make_smem_layout_a(qk_mma, self.qk_tiler, BFloat16, 1)
        k_layout = sm100.make_smem_layout_b(qk_mma, self.qk_tiler, BFloat16, self.kv_stage)
        p_layout = sm100.make_smem_layout_a(pv_mma, self.pv_tiler, BFloat16, self.p_stage)
        v_layout = sm100.make_smem_layout_b(pv_mma, self.pv_tiler, BFloat16, self.kv_stage)
        o_layout = sm100.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, self.epi_tile, self.epi_tiles)

        load = cpasync.CopyBulkTensorTileG2SOp(cta_group)
        one_cta = (1, 1, 1, 1)
        q_tile, k_tile, v_tile = (cute.select(x, mode=[0, 1, 2]) for x in (q_layout, k_layout, v_layout))
        tma_q, q_tma = cute.nvgpu.make_tiled_tma_atom_A(load, q_view, q_tile, self.qk_tiler, qk_mma, one_cta)
        tma_k, k_tma = cute.nvgpu.make_tiled_tma_atom_B(load, k_view, k_tile, self.qk_tiler, qk_mma, one_cta)
        tma_v, v_tma = cute.nvgpu.make_tiled_tma_atom_B(load, v_view, v_tile, self.pv_tiler, pv_mma, one_cta)
        tma_o, o_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            o_view,
            cute.select(o_layout, mode=[0, 1]),
            self.epi_tile,
        )
        self.q_bytes = cute.size_in_bytes(BFloat16, q_tile)
        self.k_bytes = cute.size_in_bytes(BFloat16, k_tile)
        self.v_bytes = cute.size_in_bytes(BFloat16, v_tile)

        p_elements = cute.cosize(p_layout) if self.smem_p else 0

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[Int64, 2]
            k_barriers: cute.struct.MemRange[Int64, 2 * self.kv_stage]
            v_barriers: cute.struct.MemRange[Int64, 2 * self.kv_stage]
            s_barriers: cute.struct.MemRange[Int64, 2 * self.s_stage]
            p_barriers: cute.struct.MemRange[Int64, 2 * self.p_stage]
            o_barriers: cute.struct.MemRange[Int64, 2]
            tmem_base: Int32
            # [0]: the factor for O, and at the end the row's sum; [1]: at the end the row's maximum.
            statistics: cute.struct.MemRange[Float32, 2 * M_TILE]
            # Q, and after the last QK product the O tile on its way out.
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], BUFFER_ALIGN_BYTES]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], BUFFER_ALIGN_BYTES]
            v: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(v_layout)], BUFFER_ALIGN_BYTES]
            p: cute.struct.Align[cute.struct.MemRange[BFloat16, p_elements], BUFFER_ALIGN_BYTES]

        self.shared_storage = SharedStorage

        m_tiles = cute.ceil_div(self.ratio * q.shape[1], self.m_tile)
        self.kernel(
            qk_mma,
            pv_mma,
            tma_q,
            q_tma,
            tma_k,
            k_tma,
            tma_v,
            v_tma,
            tma_o,
            o_tma,
            lse,
            row_max,
            scale * Float32(LOG2_E),
            q_layout,
            k_layout,
            p_layout,
            v_layout,
            o_layout,
        ).launch(
            grid=(m_tiles, self.kv_heads * self.slices, q.shape[0]),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _query_view(self, x):
        """[batch, T, heads, d] as (M, d, kv_heads, batch), where row m is head m % ratio of token m // ratio.

        Heads fastest, so that a decode step (T = 1) of many heads over one KV head still fills the tile.
        """
        batch, tokens, _, d = x.shape
        s_batch, s_token, s_head, s_d = x.stride
        if self.ratio == 1:
            rows, s_rows = tokens, s_token
        else:
            rows, s_rows = (self.ratio, tokens), (s_head, s_token)
        layout = cute.make_layout((rows, d, self.kv_heads, batch), stride=(s_rows, s_d, s_head * self.ratio, s_batch))
        return cute.make_tensor(x.iterator, layout)

    # ---- device: set-up and the choice of role --------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        tma_q: cute.CopyAtom,
        q_tma: cute.Tensor,
        tma_k: cute.CopyAtom,
        k_tma: cute.Tensor,
        tma_v: cute.CopyAtom,
        v_tma: cute.Tensor,
        tma_o: cute.CopyAtom,
        o_tma: cute.Tensor,
        lse,
        row_max,
        scale_log2: Float32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        o_layout: cute.ComposedLayout,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m_block, head_slice, batch = cute.arch.block_idx()
        kv_head = head_slice // self.slices
        pv_slice = head_slice % self.slices
        keys = k_tma.shape[0]
        kv_tiles = cute.ceil_div(keys, self.kv_tile)

        if warp == self.load_warp:
            for atom in (tma_q, tma_k, tma_v, tma_o):
                cpasync.prefetch_descriptor(atom)

        # Partitioning uses the slices; the MMA warp alone changes qk_mma and pv_mma (ACCUMULATE).
        qk_thread = qk_mma.get_slice(0)
        pv_thread = pv_mma.get_slice(0)

        storage = SmemAllocator().allocate(self.shared_storage)
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread, 1)
        role = pipeline.CooperativeGroup(pipeline.Agent.Thread, self.role_threads)
        q_load, q_use = pipeline.PipelineTmaUmma.create(
            num_stages=1,
            producer_group=one,
            consumer_group=one,
            tx_count=self.q_bytes,
            barrier_storage=storage.q_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        k_load, k_use = pipeline.PipelineTmaUmma.create(
            num_stages=self.kv_stage,
            producer_group=one,
            consumer_group=one,
            tx_count=self.k_bytes,
            barrier_storage=storage.k_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        v_load, v_use = pipeline.PipelineTmaUmma.create(
            num_stages=self.kv_stage,
            producer_group=one,
            consumer_group=one,
            tx_count=self.v_bytes,
            barrier_storage=storage.v_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        s_make, s_use = pipeline.PipelineUmmaAsync.create(
            num_stages=self.s_stage,
            producer_group=one,
            consumer_group=role,
            barrier_storage=storage.s_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        p_make, p_use = pipeline.PipelineAsyncUmma.create(
            num_stages=self.p_stage,
            producer_group=role,
            consumer_group=one,
            barrier_storage=storage.p_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        o_make, o_use = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one,
            consumer_group=role,
            barrier_storage=storage.o_barriers.data_ptr(),
            defer_sync=True,
        ).make_participants()
        tmem = TmemAllocator(
            storage.tmem_base.ptr,
            barrier_for_retrieve=self.tmem_barrier,
            allocator_warp_id=self.correction_warps[0],
        )
        pipeline.pipeline_init_arrive()

        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        s_o = storage.q.get_tensor(o_layout.outer, swizzle=o_layout.inner)
        s_p = None
        if const_expr(self.smem_p):
            s_p = storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner)
        statistics = storage.statistics.get_tensor(cute.make_layout((M_TILE, 2)))

        pipeline.pipeline_init_wait()

        if warp < self.correction_warps[0]:
            cute.arch.setmaxregister_increase(self.softmax_registers)
            tmem_ptr = self._tmem_pointer(tmem)
            self._softmax_role(qk_thread, tmem_ptr, s_p, statistics, kv_tiles, keys, scale_log2, s_use, p_make)

        if warp >= self.correction_warps[0] and warp < self.mma_warp:
            cute.arch.setmaxregister_decrease(self.correction_registers)
            tmem.allocate(self.tmem_columns)
            tmem.relinquish_alloc_permit()
            nvvm.tcgen05_fence("before_thread_sync")
            tmem_ptr = self._tmem_pointer(tmem)
            self._correction_role(
                pv_thread,
                tmem_ptr,
                statistics,
                kv_tiles,
                s_o,
                tma_o,
                o_tma,
                (m_block, kv_head, pv_slice, batch),
                lse,
                row_max,
                scale_log2,
                o_use,
                tmem,
            )

        if warp >= self.mma_warp:
            cute.arch.setmaxregister_increase(self.issue_registers)
            if warp == self.load_warp:
                self._load_role(
                    qk_thread,
                    pv_thread,
                    (tma_q, q_tma, s_q),
                    (tma_k, k_tma, s_k),
                    (tma_v, v_tma, s_v),
                    (m_block, kv_head, pv_slice, batch),
                    kv_tiles,
                    q_load,
                    k_load,
                    v_load,
                )
            if warp == self.mma_warp:
                tmem_ptr = self._tmem_pointer(tmem)
                self._mma_role(
                    qk_mma,
                    pv_mma,
                    (qk_thread, pv_thread),
                    tmem_ptr,
                    (s_q, s_k, s_v, s_p),
                    p_layout,
                    kv_tiles,
                    q_use,
                    k_use,
                    v_use,
                    s_make,
                    p_use,
                    o_make,
                )

    @cute.jit
    def _tmem_pointer(self, tmem):
        """Waits until TMEM is allocated; the base of its columns."""
        tmem.wait_for_alloc()
        nvvm.tcgen05_fence("after_thread_sync")
        return tmem.retrieve_ptr(Float32)

    # ---- device: views of TMEM ------------------------------------------------------------------

    def _scores(self, qk_thread, tmem_ptr):
        """S as (128, kv_tile, s_stage) float32."""
        shape = qk_thread.partition_shape_C(self.qk_tiler[:2])
        layout = qk_thread.make_fragment_C(shape).layout
        return cute.make_tensor(
            tmem_ptr + self.s_column,
            cute.append(layout, cute.make_layout(self.s_stage, stride=self.kv_tile)),
        )

    def _output(self, pv_thread, tmem_ptr):
        """O as the accumulator of one PV product: (128, pv_n_tile) float32."""
        shape = pv_thread.partition_shape_C(self.pv_tiler[:2])
        layout = pv_thread.make_fragment_C(shape).layout
        return cute.make_tensor(tmem_ptr + self.o_column, layout)

    def _probabilities(self, pv_thread, tmem_ptr, p_layout):
        """P as the A operand of PV in TMEM: (MMA, MMA_M, MMA_K, p_stage) bf16."""
        fake = cute.make_tensor(tmem_ptr, p_layout.outer)
        fragment = pv_thread.make_fragment_A(fake)[None, None, None, 0]
        bf16_ptr = cute.recast_ptr(tmem_ptr + self.p_column, dtype=fragment.element_type)
        # A stage is kv_tile / 2 columns, that is kv_tile steps of a bf16 pointer.
        return cute.make_tensor(
            bf16_ptr,
            cute.append(fragment.layout, cute.make_layout(self.p_stage, stride=self.kv_tile)),
        )

    # ---- device: the TMA warp -------------------------------------------------------------------

    @cute.jit
    def _load_role(self, qk_thread, pv_thread, q, k, v, block, kv_tiles, q_load, k_load, v_load):
        """Loads Q once and then K and V in the order in which the MMA warp uses them.

        The order is K0, K1, V0, K2, V1, ...: with one stage each it is the only one that can't
        deadlock, since this warp waits for the buffer of the next load and of no later one.
        """
        tma_q, q_tma, s_q = q
        tma_k, k_tma, s_k = k
        tma_v, v_tma, s_v = v
        m_block, kv_head, pv_slice, batch = block

        g_q = cute.flat_divide(q_tma, cute.select(self.qk_tiler, mode=[0, 2]))
        g_k = cute.flat_divide(k_tma, cute.select(self.qk_tiler, mode=[1, 2]))
        g_v = cute.flat_divide(v_tma, cute.select(self.pv_tiler, mode=[1, 2]))
        to_q, from_q = self._tma_partition(tma_q, s_q, qk_thread.partition_A(g_q))
        to_k, from_k = self._tma_partition(tma_k, s_k, qk_thread.partition_B(g_k))
        to_v, from_v = self._tma_partition(tma_v, s_v, pv_thread.partition_B(g_v))
        from_q = from_q[None, m_block, 0, kv_head, batch]
        from_k = from_k[None, None, 0, kv_head, batch]
        from_v = from_v[None, pv_slice, None, kv_head, batch]

        slot = q_load.acquire_and_advance()
        cute.copy(tma_q, from_q, to_q[None, 0], tma_bar_ptr=slot.barrier)
        slot = k_load.acquire_and_advance()
        cute.copy(tma_k, from_k[None, 0], to_k[None, slot.index], tma_bar_ptr=slot.barrier)
        for i in cutlass.range(1, kv_tiles, unroll=1):
            slot = k_load.acquire_and_advance()
            cute.copy(tma_k, from_k[None, i], to_k[None, slot.index], tma_bar_ptr=slot.barrier)
            slot = v_load.acquire_and_advance()
            cute.copy(tma_v, from_v[None, i - 1], to_v[None, slot.index], tma_bar_ptr=slot.barrier)
        slot = v_load.acquire_and_advance()
        cute.copy(tma_v, from_v[None, kv_tiles - 1], to_v[None, slot.index], tma_bar_ptr=slot.barrier)
        # The commits that empty the last buffers arrive in this CTA's shared memory: outlive them.
        k_load.tail()
        v_load.tail()

    def _tma_partition(self, atom, smem, gmem):
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(gmem, 0, 3)
        )

    # ---- device: the MMA warp -------------------------------------------------------------------

    @cute.jit
    def _mma_role(
        self,
        qk_mma,
        pv_mma,
        threads,
        tmem_ptr,
        smem,
        p_layout,
        kv_tiles,
        q_use,
        k_use,
        v_use,
        s_make,
        p_use,
        o_make,
    ):
        """Issues QK0, then QK(i+1) and PV(i) in turn, then the last PV.

        QK runs one tile ahead, so that softmax(i+1) has its scores while PV(i) waits for P(i).
        """
        qk_thread, pv_thread = threads
        s_q, s_k, s_v, s_p = smem
        t_s = self._scores(qk_thread, tmem_ptr)
        t_o = self._output(pv_thread, tmem_ptr)
        f_q = qk_thread.make_fragment_A(s_q)[None, None, None, 0]
        f_k = qk_thread.make_fragment_B(s_k)
        f_v = pv_thread.make_fragment_B(s_v)
        if const_expr(self.smem_p):
            f_p = pv_thread.make_fragment_A(s_p)
        else:
            f_p = self._probabilities(pv_thread, tmem_ptr, p_layout)

        q_use.wait_and_advance()
        qk_mma, k_use, s_make = self._mma_qk(qk_mma, t_s, f_q, f_k, k_use, s_make)
        accumulate = cutlass.Boolean(False)
        for _ in cutlass.range(1, kv_tiles, unroll=1):
            qk_mma, k_use, s_make = self._mma_qk(qk_mma, t_s, f_q, f_k, k_use, s_make)
            pv_mma, v_use, p_use, o_make = self._mma_pv(pv_mma, t_o, f_p, f_v, accumulate, v_use, p_use, o_make)
            accumulate = cutlass.Boolean(True)
        pv_mma, v_use, p_use, o_make = self._mma_pv(pv_mma, t_o, f_p, f_v, accumulate, v_use, p_use, o_make)

    @cute.jit
    def _mma_qk(self, qk_mma, t_s, f_q, f_k, k_use, s_make):
        """S = Q K^T for the next tile, once its K is here and the softmax warps have read S's stage."""
        k_slot = k_use.wait_and_advance()
        s_slot = s_make.acquire_and_advance()
        nvvm.tcgen05_fence("after_thread_sync")
        acc = t_s[None, None, None, s_slot.index]
        for step in cutlass.range_constexpr(cute.size(f_q, mode=[2])):
            qk_mma.set(tcgen05.Field.ACCUMULATE, step != 0)
            cute.gemm(qk_mma, acc, f_q[None, None, step], f_k[None, None, step, k_slot.index], acc)
        s_slot.commit()
        k_slot.release()
        return qk_mma, k_use, s_make

    @cute.jit
    def _mma_pv(self, pv_mma, t_o, f_p, f_v, accumulate, v_use, p_use, o_make):
        """O += P V for the next tile, once V and P are here and O is scaled to P's row maxima."""
        v_slot = v_use.wait_and_advance()
        o_slot = o_make.acquire_and_advance()
        p_slot = p_use.wait_and_advance()
        nvvm.tcgen05_fence("after_thread_sync")
        for step in cutlass.range_constexpr(cute.size(f_v, mode=[2])):
            pv_mma.set(tcgen05.Field.ACCUMULATE, accumulate if step == 0 else True)
            cute.gemm(
                pv_mma,
                t_o,
                f_p[None, None, step, p_slot.index],
                f_v[None, None, step, v_slot.index],
                t_o,
            )
        p_slot.release()
        v_slot.release()
        o_slot.commit()
        return pv_mma, v_use, p_use, o_make

    # ---- device: the softmax warps --------------------------------------------------------------

    @cute.jit
    def _softmax_role(self, qk_thread, tmem_ptr, s_p, statistics, kv_tiles, keys, scale_log2, s_use, p_make):
        """Turns each S into P. Thread t owns row t: no reduction crosses threads."""
        row = cute.arch.thread_idx()[0] % self.role_threads
        t_s = self._scores(qk_thread, tmem_ptr)[(None, None), 0, 0, None]
        c_s = cute.make_identity_tensor((self.m_tile, self.kv_tile))

        load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COPY_COLUMNS)), Float32)
        load = tcgen05.make_tmem_copy(load_atom, t_s[None, None, 0])
        load_thread = load.get_slice(row)
        from_s = load_thread.partition_S(t_s)
        my_s = load_thread.partition_D(c_s)

        if const_expr(self.smem_p):
            store_atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=128)
            store = cute.make_tiled_copy_D(store_atom, load)
            # ((128, 16), 1, K, stage), the operand's tile, as rows by columns.
            to_p = store.get_slice(row).partition_D(
                cute.make_tensor(
                    s_p.iterator,
                    cute.make_layout(
                        (
                            (s_p.shape[0][0], s_p.shape[1]),
                            (s_p.shape[0][1], s_p.shape[2]),
                            s_p.shape[3],
                        ),
                        stride=(
                            (s_p.stride[0][0], s_p.stride[1]),
                            (s_p.stride[0][1], s_p.stride[2]),
                            s_p.stride[3],
                        ),
                    ),
                )
            )
        else:
            # A 32-bit column of P holds the probabilities of keys 2c (low half) and 2c + 1.
            columns = self.kv_tile // 2
            p_row = cute.composition(t_s[None, None, 0].layout, cute.make_layout((self.m_tile, columns)))
            t_p = cute.make_tensor(
                tmem_ptr + self.p_column,
                cute.append(p_row, cute.make_layout(self.p_stage, stride=columns)),
            )
            store_atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(COPY_COLUMNS)), Float32)
            store = tcgen05.make_tmem_copy(store_atom, t_p[None, None, 0])
            to_p = store.get_slice(row).partition_D(t_p)
            my_p = store.get_slice(row).partition_S(cute.make_identity_tensor((self.m_tile, columns)))

        peak = -Float32.inf
        total = Float32(0.0)
        for i in cutlass.range(kv_tiles, unroll=1):
            # S to registers.
            s_slot = s_use.wait_and_advance()
            nvvm.tcgen05_fence("after_thread_sync")
            r_s = cute.make_rmem_tensor(my_s.shape, Float32)
            cute.copy(load, from_s[None, None, None, s_slot.index], r_s)
            cute.arch.fence_view_async_tmem_load()
            nvvm.tcgen05_fence("before_thread_sync")
            s_slot.release()

            if (i + 1) * self.kv_tile > keys:
                self._mask_tail(r_s, my_s, keys - i * self.kv_tile)

            old_peak = peak
            peak = self._row_max(r_s, peak)
            # A row with no key so far (a mask's doing) has peak -inf: subtract 0, not -inf.
            base = peak
            if peak == -Float32.inf:
                base = Float32(0.0)
            minus_base = -base * scale_log2

            # The factor that brings O and the row sum to the new maximum; there is no O at tile 0.
            factor = cute.math.exp2((old_peak - base) * scale_log2, fastmath=True)
            if i > 0:
                if i > 1:
                    self.statistics_empty.arrive_and_wait()
                statistics[row, 0] = factor
                self.statistics_full.arrive()

            tile_total = self._exponentials(r_s, scale_log2, minus_base)
            total = total * factor + tile_total

            # P to where the PV product reads it.
            p_slot = p_make.acquire_and_advance()
            nvvm.tcgen05_fence("after_thread_sync")
            if const_expr(self.smem_p):
                r_p = cute.make_rmem_tensor(r_s.shape, BFloat16)
                r_p.store(r_s.load().to(BFloat16))
                cute.copy(
                    store,
                    store.get_slice(row).retile(r_p),
                    to_p[None, None, None, p_slot.index],
                )
                cute.arch.fence_view_async_shared()
            else:
                r_columns = cute.make_rmem_tensor(my_p.shape, Float32)
                r_p = cute.make_tensor(cute.recast_ptr(r_columns.iterator, dtype=BFloat16), r_s.layout)
                r_p.store(r_s.load().to(BFloat16))
                cute.copy(store, r_columns, to_p[None, None, None, p_slot.index])
                cute.arch.fence_view_async_tmem_store()
                nvvm.tcgen05_fence("before_thread_sync")
            p_slot.commit()

        # The last statistics: what the epilogue and LSE need.
        if kv_tiles > 1:
            self.statistics_empty.arrive_and_wait()
        statistics[row, 0] = total
        statistics[row, 1] = peak
        self.statistics_full.arrive()
        # As in the load warp: outlive the commits that arrive on P's barriers.
        p_make.tail()

    @cute.jit
    def _mask_tail(self, r_s, my_s, keys_left):
        """Sets the scores of columns at or past `keys_left` to -inf."""
        for j in cutlass.range_constexpr(cute.size(r_s)):
            r_s[j] = -Float32.inf if my_s[j][1] >= keys_left else r_s[j]

    @cute.jit
    def _row_max(self, r_s, peak):
        """The maximum of the row's scores and `peak`, in four chains so that they overlap."""
        chains = [peak, r_s[1], r_s[2], r_s[3]]
        chains[0] = cute.arch.fmax(peak, r_s[0])
        for j in cutlass.range_constexpr(4, cute.size(r_s)):
            chains[j % 4] = cute.arch.fmax(chains[j % 4], r_s[j])
        return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))

    @cute.jit
    def _exponentials(self, r_s, scale_log2, minus_base):
        """Replaces each score s by exp2(s * scale_log2 + minus_base); returns the row's sum."""
        sums = [(Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))]
        for j in cutlass.range_constexpr(0, cute.size(r_s), 2):
            low, high = cute.arch.fma_packed_f32x2(
                (r_s[j], r_s[j + 1]), (scale_log2, scale_log2), (minus_base, minus_base)
            )
            r_s[j] = cute.math.exp2(low, fastmath=True)
            r_s[j + 1] = cute.math.exp2(high, fastmath=True)
            chain = j // 2 % 2
            sums[chain] = cute.arch.add_packed_f32x2(sums[chain], (r_s[j], r_s[j + 1]))
        low, high = cute.arch.add_packed_f32x2(sums[0], sums[1])
        return low + high

    # ---- device: the correction warps -----------------------------------------------------------

    @cute.jit
    def _correction_role(
        self,
        pv_thread,
        tmem_ptr,
        statistics,
        kv_tiles,
        s_o,
        tma_o,
        o_tma,
        block,
        lse,
        row_max,
        scale_log2,
        o_use,
        tmem,
    ):
        """Keeps O at the scale of the newest row maxima, then writes it out. Thread t owns row t."""
        row = cute.arch.thread_idx()[0] % self.role_threads
        t_o = self._output(pv_thread, tmem_ptr)

        for _ in cutlass.range(1, kv_tiles, unroll=1):
            self.statistics_full.arrive_and_wait()
            factor = statistics[row, 0]
            self.statistics_empty.arrive()
            # O holds every tile before the one that the factor belongs to.
            o_slot = o_use.wait_and_advance()
            if cute.arch.vote_any_sync(factor != Float32(1.0)):
                self._rescale(t_o, row, factor)
            o_slot.release()

        self.statistics_full.arrive_and_wait()
        row_sum = statistics[row, 0]
        peak = statistics[row, 1]
        o_use.wait_and_advance()
        self._epilogue(t_o, row, row_sum, s_o, tma_o, o_tma, block, tmem, tmem_ptr)
        if const_expr(lse is not None):
            self._write_statistics(row, row_sum, peak, block, lse, row_max, scale_log2)

    @cute.jit
    def _rescale(self, t_o, row, factor):
        """O *= factor, in TMEM. Load and store are tiled over the same tensor, so that a register
        goes back to the cell from which it came."""
        chunk_layout = cute.composition(t_o[(None, None), 0, 0].layout, cute.make_layout((self.m_tile, COPY_COLUMNS)))
        chunk = cute.make_tensor(t_o.iterator, chunk_layout)
        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COPY_COLUMNS)), Float32),
            chunk,
        )
        store = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(COPY_COLUMNS)), Float32),
            chunk,
        )
        shape = load.get_slice(row).partition_D(cute.make_identity_tensor((self.m_tile, COPY_COLUMNS))).shape
        nvvm.tcgen05_fence("after_thread_sync")
        for i in cutlass.range_constexpr(self.pv_n_tile // COPY_COLUMNS):
            chunk = cute.make_tensor(t_o.iterator + i * COPY_COLUMNS, chunk_layout)
            r_o = cute.make_rmem_tensor(shape, Float32)
            cute.copy(load, load.get_slice(row).partition_S(chunk), r_o)
            cute.arch.fence_view_async_tmem_load()
            self._scale_registers(r_o, factor)
            cute.copy(store, r_o, store.get_slice(row).partition_D(chunk))
        cute.arch.fence_view_async_tmem_store()
        nvvm.tcgen05_fence("before_thread_sync")

    @cute.jit
    def _scale_registers(self, r_o, factor):
        for j in cutlass.range_constexpr(0, cute.size(r_o), 2):
            r_o[j], r_o[j + 1] = cute.arch.mul_packed_f32x2((r_o[j], r_o[j + 1]), (factor, factor))

    @cute.jit
    def _epilogue(self, t_o, row, row_sum, s_o, tma_o, o_tma, block, tmem, tmem_ptr):
        """O: TMEM -> registers (here the normalisation) -> bf16 -> SMEM -> TMA store.

        Nothing goes back to TMEM. SMEM is Q's: the commit that filled O's barrier follows every QK
        product. Rows past the last query are clipped by the TMA store.
        """
        m_block, kv_head, pv_slice, batch = block
        tile_layout = cute.composition(t_o[(None, None), 0, 0].layout, cute.make_layout(self.epi_tile))
        tile = cute.make_tensor(t_o.iterator, tile_layout)
        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COPY_COLUMNS)), Float32),
            tile,
        )
        store = cute.make_tiled_copy_D(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=128), load
        )
        shape = load.get_slice(row).partition_D(cute.make_identity_tensor(self.epi_tile)).shape
        to_s = store.get_slice(row).partition_D(s_o)

        nvvm.tcgen05_fence("after_thread_sync")
        for i in cutlass.range_constexpr(self.epi_tiles):
            tile = cute.make_tensor(t_o.iterator + i * SWIZZLE_COLUMNS, tile_layout)
            r_o = cute.make_rmem_tensor(shape, Float32)
            cute.copy(load, load.get_slice(row).partition_S(tile), r_o)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(self.normalize):
                self._scale_registers(r_o, Float32(1.0) / row_sum)
            r_out = cute.make_rmem_tensor(shape, BFloat16)
            r_out.store(r_o.load().to(BFloat16))
            cute.copy(store, store.get_slice(row).retile(r_out), to_s[None, None, None, i])
        cute.arch.fence_view_async_shared()
        nvvm.tcgen05_fence("before_thread_sync")
        self.epilogue_barrier.arrive_and_wait()

        # Every reader of TMEM is done: the softmax warps' last use came before the last PV product.
        nvvm.tcgen05_fence("after_thread_sync")
        tmem.free(tmem_ptr)

        if row < WARP:
            g_o = cute.flat_divide(o_tma, self.epi_tile)
            from_s, to_g = cpasync.tma_partition(
                tma_o, 0, cute.make_layout(1), cute.group_modes(s_o, 0, 2), cute.group_modes(g_o, 0, 2)
            )
            for i in cutlass.range_constexpr(self.epi_tiles):
                column = pv_slice * self.epi_tiles + i
                cute.copy(tma_o, from_s[None, i], to_g[None, m_block, column, kv_head, batch])
            cute.arch.cp_async_bulk_commit_group()
            # Shared memory must live until the TMA has read it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _write_statistics(self, row, row_sum, peak, block, lse, row_max, scale_log2):
        """LSE (natural logarithm) and the raw row maximum; one of the PV slices writes them."""
        m_block, kv_head, pv_slice, batch = block
        m = m_block * self.m_tile + row
        token = m // self.ratio
        head = kv_head * self.ratio + m % self.ratio
        if pv_slice == 0 and token < lse.shape[2]:
            log2_sum = cute.math.log2(row_sum, fastmath=True)
            lse[batch, head, token] = (peak * scale_log2 + log2_sum) * Float32(LN_2)
            row_max[batch, head, token] = peak


class FmhaNormalizedSm100(_FmhaForwardSm100):
    """Writes O = softmax(scale * Q K^T) V."""

    normalize = True

    @cute.jit
    def __call__(self, q, k, v, o, scale: Float32, stream):
        """q, o: [batch, T, heads, head_dim] bf16; k, v: [batch, s_k, kv_heads, head_dim] bf16; scale > 0."""
        self._launch(q, k, v, o, None, None, scale, stream)


class FmhaPartialSm100(_FmhaForwardSm100):
    """Writes what a merge needs: O before the division by the row sum, LSE and the raw row maximum.

    With o, lse and row_max as written, o / exp(lse - row_max * scale) is the normalised O.
    """

    normalize = False

    @cute.jit
    def __call__(self, q, k, v, o, lse, row_max, scale: Float32, stream):
        """As FmhaNormalizedSm100's; lse, row_max: [batch, heads, T] float32."""
        self._launch(q, k, v, o, lse, row_max, scale, stream)


def make_kernel(*, normalize: bool, **scalars):
    """The jit-able object of a variant; `scalars` are _FmhaForwardSm100's."""
    return (FmhaNormalizedSm100 if normalize else FmhaPartialSm100)(**scalars)


def make_fake_args(*, head_dim: int, heads: int, kv_heads: int, normalize: bool, **_):
    """The arguments that `cute.compile` takes for a variant: no device, no data.

    Batch, T, s_k and all strides but the innermost are dynamic; strides are multiples of eight
    elements (16 bytes), as TMA wants them. The stream is the one of the TVM-FFI environment.
    """
    batch, tokens, keys = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def bf16(rows, head_count):
        strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
        return make_fake_tensor(BFloat16, (batch, rows, head_count, head_dim), (*strides, 1), assumed_align=16)

    def statistics():
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(Float32, (batch, heads, tokens), strides, assumed_align=4)

    q, o = bf16(tokens, heads), bf16(tokens, heads)
    k, v = bf16(keys, kv_heads), bf16(keys, kv_heads)
    extra = () if normalize else (statistics(), statistics())
    return (q, k, v, o, *extra, Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))
