"""Fused multi-head attention forward for Hopper (sm_90a), in CuTeDSL.

One CTA computes ``m_tile`` query rows times ``pv_n_tile`` output columns of one KV head. A producer warp group moves
tiles with TMA; each of the ``m_tile / 64`` consumer warp groups owns 64 rows and runs the two matrix products on wgmma
with an online softmax between them. Consumer warp groups share the K and V rings and nothing else, so each one's part
of shared memory (Q, P, O) is private to it. With ``kv_groups`` = 2 two warp groups own the same 64 rows, each with
every other KV tile, and merge their results at the end.

Row packing. The unit of work in M is a *row block*: 64 rows = ``heads_per_block`` neighbouring query heads of one KV
head times ``64 / heads_per_block`` neighbouring query positions, heads fastest. ``heads_per_block`` is the greatest
common divisor of 64 and the number of query heads per KV head, so that decode with many query heads over one KV head
fills the tensor core at one query position, and plain multi-head attention is the case of one head a block. Any
ratio works; an odd ratio packs nothing and wastes rows at short T.

Ragged ends. TMA fills reads past the end with zeros and drops writes past the end, so query rows past T need no
predicate. Keys past s_k are set to -inf in the first tile visited, which is the last tile of the sequence.

Tensors (elements): q, o [batch, T, heads, head_dim]; k, v [batch, s_k, kv_heads, head_dim], all bf16; lse, row_max
[batch, heads, T] float32. The softmax is over ``scale * q.k`` with ``scale > 0``.
"""

import math
from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

LOG2_E = math.log2(math.e)
BLOCK_ROWS = 64  # rows of one wgmma, and of one consumer warp group
WARP_GROUP_THREADS = 128
# setmaxnreg per (consumer warp groups, CTAs on one SM): (consumer, producer).
REGISTERS = {(1, 1): (248, 24), (1, 2): (232, 24), (2, 1): (240, 24), (3, 1): (160, 32)}
# Named barriers; 0 is the CTA's own.
BARRIER_WARP_GROUP = 1  # + consumer warp group: its 128 threads
BARRIER_TURN = 4  # + consumer warp group: its turn to issue wgmma


def make_fake_args(*, head_dim, heads, kv_heads, normalize, **_ignored):
    """Arguments that ``cute.compile`` needs to trace an instance made from the same scalars (stream included).

    batch, T, s_k and the batch and position strides are dynamic; the strides are multiples of 8 elements, as TMA asks.
    """
    batch, q_len, kv_len = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()

    def operand(length, n_heads):
        shape = (batch, length, n_heads, head_dim)
        stride = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), head_dim, 1)
        return cute.runtime.make_fake_tensor(BFloat16, shape, stride, assumed_align=16)

    def statistic():
        stride = (cute.sym_int64(), cute.sym_int64(), 1)
        return cute.runtime.make_fake_tensor(Float32, (batch, heads, q_len), stride, assumed_align=4)

    tensors = [operand(q_len, heads), operand(kv_len, kv_heads), operand(kv_len, kv_heads), operand(q_len, heads)]
    if not normalize:
        tensors += [statistic(), statistic()]
    return (*tensors, Float32(1.0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))


def make_fmha(*, normalize, **scalars):
    """The kernel object for ``cute.compile``: the two flavours differ in their run-time arguments."""
    return (FmhaSm90 if normalize else FmhaPartialSm90)(normalize=normalize, **scalars)


class _Base:
    """Everything but the entry point. All scalars are static.

    Required: ``head_dim``, ``heads``, ``kv_heads``; ``m_tile`` rows and ``pv_n_tile`` output columns a CTA; ``kv_tile``
    keys a step; ``kv_stage`` stages of the V ring; ``smem_p``: P goes through shared memory instead of registers;
    ``normalize``: divide by the row sums, or write the statistics.

    Optional: ``k_stage`` stages of the K ring (0: as V's), each holding 1 / ``k_sub`` of a tile's columns;
    ``kv_groups`` consumer warp groups share each row block, taking every ``kv_groups``-th tile; ``cluster_m`` CTAs
    with neighbouring rows share K and V by multicast; ``ctas_per_sm`` CTAs fit one SM's register file.
    """

    def __init__(
        self, *, head_dim, heads, kv_heads, pv_n_tile, kv_tile, kv_stage, smem_p, normalize, m_tile,
        k_stage=0, k_sub=1, kv_groups=1, cluster_m=1, ctas_per_sm=1,
    ):  # fmt: skip
        if heads % kv_heads:
            raise ValueError(f"heads {heads} is not a multiple of kv_heads {kv_heads}")
        if m_tile not in (64, 128, 192):
            raise ValueError(f"m_tile {m_tile} is not 64, 128 or 192")
        if head_dim % pv_n_tile:
            raise ValueError(f"head_dim {head_dim} is not a multiple of pv_n_tile {pv_n_tile}")
        self.head_dim = head_dim
        self.heads = heads
        self.kv_heads = kv_heads
        self.pv_n_tile = pv_n_tile
        self.kv_tile = kv_tile
        self.k_sub = k_sub
        self.k_columns = head_dim // k_sub
        self.k_stage = k_stage or kv_stage * k_sub
        self.v_stage = kv_stage
        self.cluster_m = cluster_m
        self.smem_p = smem_p
        self.normalize = normalize
        self.row_blocks = m_tile // BLOCK_ROWS
        self.kv_groups = kv_groups
        self.consumers = self.row_blocks * kv_groups
        self.threads = WARP_GROUP_THREADS * (1 + self.consumers)
        self.ctas_per_sm = ctas_per_sm
        self.consumer_registers, self.producer_registers = REGISTERS[self.consumers, ctas_per_sm]
        self.slices = head_dim // pv_n_tile
        self.ratio = heads // kv_heads
        self.heads_per_block = math.gcd(self.ratio, BLOCK_ROWS)
        self.positions_per_block = BLOCK_ROWS // self.heads_per_block
        self.head_blocks = self.ratio // self.heads_per_block
        # Warp groups take turns, so that one's softmax runs under another's matrix products.
        self.take_turns = self.row_blocks > 1 and head_dim <= 128
        # Rescaling a wide O costs as much as the softmax, so do it while the tensor cores run the next S. A single warp
        # group loses by it: its PV product then starts later. (H200, 2026-11-29: head_dim 256, m_tile 128, s 8192: 668
        # -> 721 TFLOP/s; decode at head_dim 512, m_tile 64, batch 32, s_k 4096: 96.4 -> 99.6 us.)
        self.rescale_late = pv_n_tile > 128 and self.row_blocks > 1

    # ---- host side -------------------------------------------------------------------------------------------------

    @cute.jit
    def _launch(self, q, k, v, o, lse, row_max, scale, stream):
        """Build the TMA views and launch one CTA per (row blocks, slice), KV head and batch."""
        layout_q, layout_k, layout_v, layout_p, layout_o = self._smem_layouts()
        block = ((self.heads_per_block, self.positions_per_block),)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster_m > 1 else load
        tma_q, view_q = cpasync.make_tiled_tma_atom(
            load, _rows_view(q), cute.select(layout_q, mode=[0, 1]), (*block, self.head_dim)
        )
        tma_k, view_k = cpasync.make_tiled_tma_atom(
            share,
            _select(k, [1, 3, 2, 0]),
            cute.select(layout_k, mode=[0, 1]),
            (self.kv_tile, self.k_columns),
            self.cluster_m,
        )
        tma_v, view_v = cpasync.make_tiled_tma_atom(
            share,
            _select(v, [3, 1, 2, 0]),
            cute.select(layout_v, mode=[0, 1]),
            (self.pv_n_tile, self.kv_tile),
            self.cluster_m,
        )
        tma_o, view_o = cpasync.make_tiled_tma_atom(store, _rows_view(o), layout_o, (*block, self.pv_n_tile))

        batch, q_len = q.shape[0], q.shape[1]
        blocks = self.head_blocks * cute.ceil_div(q_len, self.positions_per_block)
        clusters = cute.ceil_div(blocks, self.row_blocks * self.cluster_m) * self.slices
        grid = (clusters * self.cluster_m, self.kv_heads, batch)
        self._kernel(
            (tma_q, view_q),
            (tma_k, view_k),
            (tma_v, view_v),
            (tma_o, view_o),
            lse,
            row_max,
            scale,
            k.shape[1],
            q_len,
            layout_q,
            layout_k,
            layout_v,
            layout_p,
            layout_o,
            *self._tiled_mmas(),
        ).launch(
            grid=grid,
            block=(self.threads, 1, 1),
            cluster=(self.cluster_m, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    def _smem_layouts(self):
        """Swizzled shared-memory layouts: Q, P and O rows by columns, K keys by head_dim, V columns by keys."""
        row_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        column_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
        rows = (0, 1, 2)
        layout_q = cute.tile_to_shape(row_atom, (BLOCK_ROWS, self.head_dim, self.row_blocks), rows)
        layout_k = cute.tile_to_shape(row_atom, (self.kv_tile, self.k_columns, self.k_stage), rows)
        layout_v = cute.tile_to_shape(column_atom, (self.pv_n_tile, self.kv_tile, self.v_stage), (1, 0, 2))
        layout_p = cute.tile_to_shape(row_atom, (BLOCK_ROWS, self.kv_tile, self.consumers), rows)
        layout_o = cute.tile_to_shape(row_atom, (BLOCK_ROWS, self.pv_n_tile), (0, 1))
        return layout_q, layout_k, layout_v, layout_p, layout_o

    def _tiled_mmas(self):
        """(S = Q K^T, O = P V), each for one warp group of 64 rows."""
        k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource.SMEM if self.smem_p else warpgroup.OperandSource.RMEM
        mma_s = make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (BLOCK_ROWS, self.kv_tile)
        )
        mma_o = make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, n_major, Float32, (1, 1, 1), (BLOCK_ROWS, self.pv_n_tile), a_source=source
        )
        return mma_s, mma_o

    def _shared_storage(self):
        """The CTA's whole dynamic shared memory. O reuses Q: a warp group overwrites only its own rows."""

        def tile(elements):
            return cute.struct.Align[cute.struct.MemRange[BFloat16, elements], 1024]

        p_elements = self.consumers * BLOCK_ROWS * self.kv_tile if self.smem_p else 0

        @cute.struct
        class Storage:
            q: tile(self.row_blocks * BLOCK_ROWS * self.head_dim)
            k: tile(self.k_stage * self.kv_tile * self.k_columns)
            v: tile(self.v_stage * self.kv_tile * self.pv_n_tile)
            p: tile(p_elements)
            q_barriers: cute.struct.MemRange[Int64, 2]
            k_barriers: cute.struct.MemRange[Int64, 2 * self.k_stage]
            v_barriers: cute.struct.MemRange[Int64, 2 * self.v_stage]

        return Storage

    # ---- device side -----------------------------------------------------------------------------------------------

    @cute.kernel
    def _kernel(
        self,
        q_tma: tuple,
        k_tma: tuple,
        v_tma: tuple,
        o_tma: tuple,
        lse,
        row_max,
        scale: Float32,
        kv_len: Int32,
        q_len: Int32,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_p: cute.ComposedLayout,
        layout_o: cute.ComposedLayout,
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (q_tma[0], k_tma[0], v_tma[0], o_tma[0]):
                cpasync.prefetch_descriptor(atom)

        storage = SmemAllocator().allocate(self._shared_storage())
        q_pipe = self._pipeline(storage.q_barriers, 1, BLOCK_ROWS * self.head_dim * self.row_blocks, 1)
        k_pipe = self._pipeline(storage.k_barriers, self.k_stage, self.kv_tile * self.k_columns, self.cluster_m)
        v_pipe = self._pipeline(storage.v_barriers, self.v_stage, self.kv_tile * self.pv_n_tile, self.cluster_m)
        cute.arch.mbarrier_init_fence()
        self._synchronize()

        smem_q = storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        smem_k = storage.k.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        smem_v = storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        smem_p = None
        if const_expr(self.smem_p):
            smem_p = storage.p.get_tensor(layout_p.outer, swizzle=layout_p.inner)

        x, kv_head, batch = cute.arch.block_idx()
        cluster, rank = x // self.cluster_m, x % self.cluster_m
        column_slice = cluster % self.slices
        first_block = ((cluster // self.slices) * self.cluster_m + rank) * self.row_blocks
        tiles = cute.ceil_div(kv_len, self.kv_tile)

        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_index == 0:
                self._load_q(q_tma, smem_q, q_pipe, first_block, kv_head, batch)
                part = 0 if const_expr(self.k_sub == 1) else None
                keys = cute.local_tile(
                    k_tma[1][None, None, kv_head, batch], (self.kv_tile, self.k_columns), (None, part)
                )
                self._load_ring(k_tma[0], keys, smem_k, k_pipe, self.k_stage, self.k_sub, tiles, rank)
            if warp_index == 1:
                values = cute.local_tile(
                    v_tma[1][None, None, kv_head, batch], (self.pv_n_tile, self.kv_tile), (column_slice, None)
                )
                self._load_ring(v_tma[0], values, smem_v, v_pipe, self.v_stage, 1, tiles, rank)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            consumer = warp_index // 4 - 1
            row_block, group = consumer % self.row_blocks, consumer // self.row_blocks
            acc_o, maximum, total = self._attend(
                mma_s, mma_o, smem_q, smem_k, smem_v, smem_p, q_pipe, k_pipe, v_pipe,
                consumer, row_block, group, tiles, kv_len, scale,
            )  # fmt: skip
            if const_expr(self.kv_groups > 1):
                # K and V are spent: every tile that was loaded was also waited for, by one of the groups.
                self._merge_groups(storage.k.data_ptr(), acc_o, maximum, total, group, scale)
            if group == 0:
                block_o = cute.make_tensor(
                    cute.recast_ptr(smem_q[None, None, row_block].iterator, layout_o.inner), layout_o.outer
                )
                self._finish(
                    mma_o, acc_o, maximum, total, block_o, o_tma, lse, row_max, scale, q_len,
                    first_block + row_block, consumer, kv_head, batch, column_slice,
                )  # fmt: skip
        if const_expr(self.cluster_m > 1):
            # The other CTAs may still write this one's rings or arrive on its barriers.
            self._synchronize()

    @cute.jit
    def _synchronize(self):
        """Barrier over every thread that can reach this CTA's shared memory."""
        if const_expr(self.cluster_m > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _pipeline(self, barriers, stages, elements, sharers):
        """A TMA ring that ``sharers`` CTAs fill together; every consumer warp of each of them releases a stage."""
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.row_blocks * 4 * sharers),
            tx_count=elements * BFloat16.width // 8,
            cta_layout_vmnk=cute.make_layout((1, sharers, 1, 1)),
            defer_sync=True,
        )

    def _block_coordinates(self, block, kv_head):
        """(head block, position block) of row block ``block`` in units of whole blocks."""
        return kv_head * self.head_blocks + block % self.head_blocks, block // self.head_blocks

    @cute.jit
    def _load_q(self, q_tma, smem_q, q_pipe, first_block, kv_head, batch):
        """Load every consumer's row block; blocks past the end arrive as zeros."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        q_pipe.producer_acquire(state)
        tiler = ((self.heads_per_block, self.positions_per_block), self.head_dim)
        for row_block in cutlass.range_constexpr(self.row_blocks):
            where = self._block_coordinates(first_block + row_block, kv_head)
            tile = cute.local_tile(q_tma[1][None, None, batch], tiler, (where, 0))
            shared, source = cpasync.tma_partition(
                q_tma[0],
                0,
                cute.make_layout(1),
                cute.group_modes(smem_q[None, None, row_block], 0, 2),
                cute.group_modes(tile, 0, 2),
            )
            cute.copy(q_tma[0], source, shared, tma_bar_ptr=q_pipe.producer_get_barrier(state))

    @cute.jit
    def _load_ring(
        self, tma, tiled, smem, pipe, stages: cutlass.Constexpr[int], parts: cutlass.Constexpr[int], tiles, rank
    ):
        """Stream the tiles of one operand through its ring, ``parts`` stages a tile, last tile of the sequence first.

        In a cluster each CTA fetches its part of a tile and multicasts it to all.
        """
        shared, source = cpasync.tma_partition(
            tma, rank, cute.make_layout(self.cluster_m), cute.group_modes(smem, 0, 2), cute.group_modes(tiled, 0, 2)
        )
        everyone = {"mcast_mask": cutlass.Int16(2**self.cluster_m - 1)} if const_expr(self.cluster_m > 1) else {}
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
        for i in cutlass.range(tiles, unroll=1):
            for part in cutlass.range_constexpr(parts):
                where = (None, tiles - 1 - i) if const_expr(parts == 1) else (None, tiles - 1 - i, part)
                pipe.producer_acquire(state)
                cute.copy(
                    tma,
                    source[where],
                    shared[None, state.index],
                    tma_bar_ptr=pipe.producer_get_barrier(state),
                    **everyone,
                )
                state.advance()

    @cute.jit
    def _attend(
        self, mma_s, mma_o, smem_q, smem_k, smem_v, smem_p, q_pipe, k_pipe, v_pipe,
        consumer, row_block, group, tiles, kv_len, scale,
    ):  # fmt: skip
        """Online softmax over this group's KV tiles: un-normalised O, the rows' raw maxima and their partial sums.

        A thread holds two rows (r, r + 8) of the block; its sums cover its own columns only.
        """
        lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        slice_s, slice_o = mma_s.get_slice(0), mma_o.get_slice(0)
        work = SimpleNamespace(mma_s=mma_s, mma_o=mma_o, consumer=consumer, scale_log2=scale * LOG2_E)
        work.q = slice_s.make_fragment_A(slice_s.partition_A(smem_q))[None, None, None, row_block]
        work.k = slice_s.make_fragment_B(slice_s.partition_B(smem_k))
        work.v = slice_o.make_fragment_B(slice_o.partition_B(smem_v))
        if const_expr(self.smem_p):
            work.p = slice_o.make_fragment_A(slice_o.partition_A(smem_p))[None, None, None, consumer]
            work.store_p = _matrix_store(mma_s).get_slice(lane)
            work.shared_p = work.store_p.partition_D(smem_p[None, None, consumer])
        else:
            work.p = slice_o.make_fragment_A(slice_o.partition_shape_A((BLOCK_ROWS, self.kv_tile)))
        work.columns = mma_s.get_slice(lane).partition_C(cute.make_identity_tensor((BLOCK_ROWS, self.kv_tile)))
        work.acc_o = cute.make_rmem_tensor(mma_o.partition_shape_C((BLOCK_ROWS, self.pv_n_tile)), Float32)
        work.maximum = cute.make_rmem_tensor(2, Float32)
        work.total = cute.make_rmem_tensor(2, Float32)
        work.correction = cute.make_rmem_tensor(2, Float32)
        work.acc_o.fill(0.0)
        work.maximum.fill(-Float32.inf)
        work.total.fill(0.0)

        self._open_turns(consumer)
        q_pipe.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
        if const_expr(self.kv_groups == 1):
            self._walk(work, k_pipe, v_pipe, group, tiles, kv_len)
        else:
            if group < tiles:
                self._walk(work, k_pipe, v_pipe, group, tiles, kv_len)
        self._close_turns(consumer)
        return work.acc_o, work.maximum, work.total

    @cute.jit
    def _walk(self, work, k_pipe, v_pipe, group, tiles, kv_len):
        """Visit every ``kv_groups``-th tile from the ``group``-th on, last tile of the sequence first; at least one."""
        ring_k, ring_v = self._ring_at(group * self.k_sub, self.k_stage), self._ring_at(group, self.v_stage)
        # Only the last tile of the sequence can be ragged; it is group 0's first.
        self._wait_turn(work.consumer)
        acc_s = self._issue_s(work, k_pipe, ring_k)
        self._pass_turn(work.consumer)
        ring_k = self._release_k(k_pipe, ring_k, 0)
        self._mask_tail(acc_s, work.columns, kv_len - (tiles - 1 - group) * self.kv_tile)
        _softmax_step(acc_s, work)
        self._put_p(acc_s, work)

        # Steady state: S of this tile is issued before O of the previous one; the softmax runs beside the latter.
        for _ in cutlass.range((tiles - 1 - group) // self.kv_groups, unroll=1):
            self._wait_turn(work.consumer)
            acc_s = self._issue_s(work, k_pipe, ring_k)
            if const_expr(self.rescale_late):
                _scale_rows(work.acc_o, work.correction)
            v_pipe.consumer_wait(ring_v)
            self._issue_o(work, ring_v.index)
            self._pass_turn(work.consumer)
            ring_k = self._release_k(k_pipe, ring_k, 1)
            _softmax_step(acc_s, work)
            warpgroup.wait_group(0)
            v_pipe.consumer_release(ring_v)
            ring_v = self._advance(ring_v, self.kv_groups)
            self._put_p(acc_s, work)
            if const_expr(not self.rescale_late):
                _scale_rows(work.acc_o, work.correction)

        if const_expr(self.rescale_late):
            _scale_rows(work.acc_o, work.correction)
        v_pipe.consumer_wait(ring_v)
        self._issue_o(work, ring_v.index)
        warpgroup.wait_group(0)
        v_pipe.consumer_release(ring_v)

    def _ring_at(self, position, stages):
        """Consumer state of the ring stage that the ``position``-th load fills."""
        return pipeline.PipelineState(stages, Int32(0), Int32(position % stages), Int32(position // stages % 2))

    @cute.jit
    def _advance(self, ring, steps: cutlass.Constexpr[int]):
        """The ring moved on by ``steps`` stages."""
        for _ in cutlass.range_constexpr(steps):
            ring.advance()
        return ring

    @cute.jit
    def _release_k(self, k_pipe, ring, younger: cutlass.Constexpr[int]):
        """Free a tile's K stages as its wgmma groups end, ``younger`` groups having been issued after them.

        Returns the ring at this group's next tile.
        """
        for part in cutlass.range_constexpr(self.k_sub):
            warpgroup.wait_group(self.k_sub - 1 - part + younger)
            k_pipe.consumer_release(ring)
            ring.advance()
        return self._advance(ring, self.k_sub * (self.kv_groups - 1))

    @cute.jit
    def _merge_groups(self, scratch, acc_o, maximum, total, group, scale):
        """Add group 1's O and sums to group 0's. Threads of equal lane hold the same elements of the row block."""
        lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        elements = cute.size(acc_o)
        shape = (WARP_GROUP_THREADS, elements + 4)
        shared = cute.make_tensor(cute.recast_ptr(scratch, dtype=Float32), cute.make_layout(shape))[lane, None]
        self._meet()
        if group == 1:
            for i in cutlass.range_constexpr(elements):
                shared[i] = acc_o[i]
            for r in cutlass.range_constexpr(2):
                shared[elements + r] = maximum[r]
                shared[elements + 2 + r] = total[r]
        self._meet()
        if group == 0:
            own, other = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                highest = cute.arch.fmax(maximum[r], shared[elements + r])
                own[r] = cute.math.exp2((maximum[r] - highest) * scale * LOG2_E, fastmath=True)
                other[r] = cute.math.exp2((shared[elements + r] - highest) * scale * LOG2_E, fastmath=True)
                maximum[r] = highest
                total[r] = total[r] * own[r] + shared[elements + 2 + r] * other[r]
            for i in cutlass.range_constexpr(elements):
                r = i // 2 % 2
                acc_o[i] = acc_o[i] * own[r] + shared[i] * other[r]

    def _meet(self):
        """Barrier of both groups."""
        cute.arch.barrier(barrier_id=BARRIER_TURN, number_of_threads=self.consumers * WARP_GROUP_THREADS)

    @cute.jit
    def _issue_s(self, work, k_pipe, ring):
        """Start S = Q K^T for one tile, a wgmma group for each K stage of it, and return its accumulator."""
        acc_s = cute.make_rmem_tensor(work.mma_s.partition_shape_C((BLOCK_ROWS, self.kv_tile)), Float32)
        steps = cute.size(work.k, mode=[2])
        stage = ring.clone()
        for part in cutlass.range_constexpr(self.k_sub):
            k_pipe.consumer_wait(stage)
            _issue(work.mma_s, acc_s, work.q, work.k[None, None, None, stage.index], part * steps, clear=part == 0)
            stage.advance()
        return acc_s

    @cute.jit
    def _issue_o(self, work, stage):
        """Start O += P V for one tile; the caller waits."""
        _issue(work.mma_o, work.acc_o, work.p, work.v[None, None, None, stage], 0, clear=False)

    @cute.jit
    def _mask_tail(self, acc_s, columns, valid):
        """Set the scores of keys at or past ``valid`` (within the tile) to -inf; at least one key stays."""
        if valid < self.kv_tile:
            for i in cutlass.range_constexpr(cute.size(acc_s)):
                acc_s[i] = acc_s[i] if columns[i][1] < valid else -Float32.inf

    @cute.jit
    def _put_p(self, acc_s, work):
        """Round P to bf16 as the A operand of the PV product: in registers, or through shared memory."""
        if const_expr(self.smem_p):
            rounded = cute.make_rmem_tensor(acc_s.layout, BFloat16)
            rounded.store(acc_s.load().to(BFloat16))
            cute.copy(work.store_p, work.store_p.retile(rounded), work.shared_p)
            # wgmma reads through the async proxy, and reads rows that other warps of the group wrote.
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BARRIER_WARP_GROUP + work.consumer, number_of_threads=WARP_GROUP_THREADS)
        else:
            # An accumulator's register order is the A operand's register order, 16 columns at a time.
            rounded = cute.make_tensor(work.p.iterator, acc_s.layout)
            rounded.store(acc_s.load().to(BFloat16))

    @cute.jit
    def _finish(
        self, mma_o, acc_o, maximum, total, block_o, o_tma, lse, row_max, scale, q_len,
        block, consumer, kv_head, batch, column_slice,
    ):  # fmt: skip
        """Sum the rows, write the statistics, and send O through shared memory to global memory by TMA."""
        lane = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        head_block, position_block = self._block_coordinates(block, kv_head)
        inverse = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total[r] = cute.arch.warp_reduction_sum(total[r], threads_in_group=4)
            inverse[r] = cute.arch.rcp_approx(total[r])
        if const_expr(self.normalize):
            _scale_rows(acc_o, inverse)
        else:
            if column_slice == 0 and lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    row = (lane // 32) * 16 + (lane % 32) // 4 + 8 * r
                    head = head_block * self.heads_per_block + row % self.heads_per_block
                    position = position_block * self.positions_per_block + row // self.heads_per_block
                    if position < q_len:
                        row_max[batch, head, position] = maximum[r]
                        lse[batch, head, position] = maximum[r] * scale + cute.math.log(total[r])

        rounded = cute.make_rmem_tensor(acc_o.layout, BFloat16)
        rounded.store(acc_o.load().to(BFloat16))
        store = _matrix_store(mma_o).get_slice(lane)
        cute.copy(store, store.retile(rounded), store.partition_D(block_o))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_WARP_GROUP + consumer, number_of_threads=WARP_GROUP_THREADS)
        if cute.arch.make_warp_uniform(lane // 32) == 0:
            tiler = ((self.heads_per_block, self.positions_per_block), self.pv_n_tile)
            tile = cute.local_tile(o_tma[1][None, None, batch], tiler, ((head_block, position_block), column_slice))
            shared, target = cpasync.tma_partition(
                o_tma[0], 0, cute.make_layout(1), cute.group_modes(block_o, 0, 2), cute.group_modes(tile, 0, 2)
            )
            cute.copy(o_tma[0], shared, target)
            cute.arch.cp_async_bulk_commit_group()
            # Shared memory must outlive the copy engine's reads of it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    # ---- turns: the order in which the consumer warp groups issue their matrix products ---------------------------

    @cute.jit
    def _open_turns(self, consumer):
        """Give warp group 0 the first turn."""
        if const_expr(self.take_turns):  # noqa: SIM102 - decided at trace time, the next at run time
            if consumer == self.consumers - 1:
                cute.arch.barrier_arrive(barrier_id=BARRIER_TURN, number_of_threads=2 * WARP_GROUP_THREADS)

    @cute.jit
    def _wait_turn(self, consumer):
        if const_expr(self.take_turns):
            cute.arch.barrier(barrier_id=BARRIER_TURN + consumer, number_of_threads=2 * WARP_GROUP_THREADS)

    @cute.jit
    def _pass_turn(self, consumer):
        if const_expr(self.take_turns):
            following = (consumer + 1) % self.consumers
            cute.arch.barrier_arrive(barrier_id=BARRIER_TURN + following, number_of_threads=2 * WARP_GROUP_THREADS)

    @cute.jit
    def _close_turns(self, consumer):
        """Take the turn that the last warp group passed last, so that no barrier is left half full."""
        if const_expr(self.take_turns):  # noqa: SIM102 - decided at trace time, the next at run time
            if consumer == 0:
                cute.arch.barrier(barrier_id=BARRIER_TURN, number_of_threads=2 * WARP_GROUP_THREADS)


class FmhaSm90(_Base):
    """Normalised attention: writes O only."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """o = softmax(scale * q k^T) v."""
        self._launch(q, k, v, o, None, None, scale, stream)


class FmhaPartialSm90(_Base):
    """Un-normalised attention: writes O * sum, LSE and the raw row maximum, so that partial results can be merged."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        row_max: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """o / exp(lse - row_max * scale) = softmax(scale * q k^T) v; row_max is of q k^T, unscaled; lse is natural."""
        self._launch(q, k, v, o, lse, row_max, scale, stream)


def _select(tensor, modes):
    """The same data with its modes reordered."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


def _rows_view(tensor):
    """[batch, T, heads, d] as ((heads, T), d, batch)."""
    return cute.group_modes(_select(tensor, [2, 1, 3, 0]), 0, 2)


def _matrix_store(mma):
    """Tiled stmatrix copy of ``mma``'s accumulator, rounded to bf16, into row-major shared memory."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16)
    return cute.make_tiled_copy_C(atom, mma)


def _rows_of(acc):
    """An accumulator ((2, 2, N / 8), 1, 1) of one 64-row wgmma as (row r or r + 8, column)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, cute.size(acc) // 4)), stride=(2, (1, 4))))


@cute.jit
def _issue(mma, acc, frag_a, frag_b, first: cutlass.Constexpr[int], clear: cutlass.Constexpr[bool]):
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
def _softmax_step(acc_s, work):
    """Replace raw scores by exp2(scale_log2 * (s - max)); update the rows' max and sum, and O's correction for them."""
    rows = _rows_of(acc_s)
    for r in cutlass.range_constexpr(2):
        highest = _row_maximum(rows, r, work.maximum[r])
        highest = cute.arch.warp_reduction_max(highest, threads_in_group=4)
        work.correction[r] = cute.math.exp2((work.maximum[r] - highest) * work.scale_log2, fastmath=True)
        work.maximum[r] = highest
        exponents = rows[r, None].load() * work.scale_log2 - highest * work.scale_log2
        rows[r, None].store(cute.math.exp2(exponents, fastmath=True))
        work.total[r] = _row_sum(rows, r, work.total[r] * work.correction[r])


@cute.jit
def _row_maximum(rows, r: cutlass.Constexpr[int], start):
    """Maximum of one row's columns and ``start``, in four independent chains."""
    chains = [start, rows[r, 0], rows[r, 1], rows[r, 2]]
    for i in cutlass.range_constexpr(3, cute.size(rows, mode=[1])):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], rows[r, i])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


@cute.jit
def _row_sum(rows, r: cutlass.Constexpr[int], start):
    """Sum of one row's columns and ``start``, in four independent chains."""
    chains = [start + rows[r, 0], rows[r, 1], rows[r, 2], rows[r, 3]]
    for i in cutlass.range_constexpr(4, cute.size(rows, mode=[1])):
        chains[i % 4] = chains[i % 4] + rows[r, i]
    return (chains[0] + chains[1]) + (chains[2] + chains[3])


@cute.jit
def _scale_rows(acc, factor):
    """Multiply both of the thread's rows of an accumulator by their factors."""
    rows = _rows_of(acc)
    for r in cutlass.range_constexpr(2):
        rows[r, None].store(rows[r, None].load() * factor[r])
