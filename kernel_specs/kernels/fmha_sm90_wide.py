"""Attention forward at head_dim 512 for Hopper (sm_90a), in CuTeDSL: two warp groups share 64 rows by O's columns.

O of 64 rows and 512 columns is 256 registers a thread for one warp group, which is too many, and 128 for two. So each
of the two consumer warp groups owns 256 columns of O and V. What they share is S = Q K^T and its softmax, computed once:

- Warp group 0 has the even KV tiles, warp group 1 the odd ones. The tile's *owner* computes its scores with all of Q,
  takes them through the online softmax, multiplies P, from registers, with its own half of V, and leaves P and the new
  row maxima in shared memory for the other one, the *taker*, which rescales its O and multiplies P with its half.
- Both see all tiles in order, so both hold the same running maxima, and no more than one barrier a tile is needed: it
  tells that a P is ready, and with it, that the owner has done with the P that the taker had left before.
- Warp group 0 owns a tile, then takes the next. Warp group 1 starts its own scores first, and takes the tile before
  under its own softmax. So the tensor cores have one's products to do while the other is in its softmax.

The producer warp group streams K and V through a ring of *parts*: ``kv_tile`` keys times ``part_columns`` columns. With
``kv_shared`` a tile is loaded once: V is a view of K's bytes, columns first. Otherwise K runs a tile ahead of V.

Rows are packed as everywhere (attention/packing.py). Both sources of keys are walked in one online softmax: first the
tiles of source 1, then those of source 2. O and the sums leave through shared memory, over Q.
"""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import SmemAllocator
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from .attention.arguments import by_name, element_type
from .attention.mask import Mask
from .attention.packing import Packing, rows_view
from .attention.sequences import Sequences
from .fmha_sm90_wide_space import slots
from .sm90_ring import BARRIERS_PER_SLOT, Ring

LOG2_E = math.log2(math.e)
BLOCK_ROWS = 64  # of a CTA: one wgmma
HEAD_DIM = 512
OWN_COLUMNS = 256  # of O, a consumer warp group
WARP_GROUP_THREADS = 128
CONSUMER_THREADS = 2 * WARP_GROUP_THREADS
THREADS = 3 * WARP_GROUP_THREADS
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# Named barriers; 0 is the CTA's own.
BARRIER_READY = 1  # + warp group: its P is in shared memory
BARRIER_GROUP = 3  # + warp group: its 128 threads
BARRIER_BOTH = 5  # both warp groups


class FmhaSm90Wide:
    """One CTA: 64 rows of one KV head, and the KV tiles of one split. `problem`: static axes.

    `tunables`: ``kv_tile`` keys a tile; ``part_columns`` columns a part of it; ``cluster_m`` CTAs with neighbouring
    rows share K and V by multicast.
    """

    def __init__(self, problem, tunables):
        self.problem = problem
        self.element = element_type(problem)
        self.kv_tile = tunables.kv_tile
        self.part_columns = tunables.part_columns
        self.slots = slots(tunables)
        self.cluster_m = tunables.cluster_m
        self.parts = HEAD_DIM // self.part_columns
        self.own_parts = OWN_COLUMNS // self.part_columns
        self.packing = Packing(BLOCK_ROWS, problem.heads // problem.kv_heads)
        self.mask = Mask(problem.mask, self.kv_tile)
        self.two = problem.sources == 2
        self.write_lse = problem.return_lse or not problem.normalize
        # Rows past a length may hold anything: 0 * NaN must not reach O. TMA itself fills with zeros past s_k.
        self.ragged_values = problem.has_lengths
        # Whether a row may have seen no key yet after a tile.
        self.sparse = self.mask.by_position or problem.has_lengths or problem.gather

    # ---- host side -------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Build the TMA views and launch one CTA per (row block, KV head, sequence)."""
        tensors = by_name(self.problem, arguments)
        stream = tensors.pop("stream")
        atoms, views = self._copies(tensors)
        blocks = self.packing.blocks(tensors["q"].shape[1])
        grid = (cute.round_up(blocks, self.cluster_m), self.problem.kv_heads, tensors["q"].shape[0])
        self._kernel(atoms, views, tensors).launch(
            grid=grid,
            block=(THREADS, 1, 1),
            cluster=(self.cluster_m, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    def _copies(self, tensors):
        """The TMA atoms and the views that they walk, by tensor."""
        atoms, views = {}, {}
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster_m > 1 else load
        atoms["q"], views["q"] = cpasync.make_tiled_tma_atom(
            load, rows_view(tensors["q"]), self._layout_q(), (self.packing.tile, HEAD_DIM)
        )
        for name in ("k", "v", "k2", "v2"):
            if name in tensors:
                keys = tensors[name]
                atoms[name], views[name] = cpasync.make_tiled_tma_atom(
                    share,
                    cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=[1, 3, 2, 0])),
                    cute.select(self._layout_keys(), mode=[0, 1]),
                    (self.kv_tile, self.part_columns),
                    self.cluster_m,
                )
        atoms["o"], views["o"] = cpasync.make_tiled_tma_atom(
            store, rows_view(tensors["o"]), cute.select(self._layout_o(), mode=[0, 1]), (self.packing.tile, OWN_COLUMNS)
        )
        return atoms, views

    def _atom(self, columns, kind="K"):
        """The swizzled atom of rows (``K``) or columns (``MN``) whose contiguous mode has ``columns`` elements."""
        width = min(128, columns * self.element.width // 8)
        return warpgroup.make_smem_layout_atom(getattr(warpgroup.SmemLayoutAtomKind, f"{kind}_SW{width}"), self.element)

    def _layout_q(self):
        """[rows, head_dim]."""
        return cute.tile_to_shape(self._atom(HEAD_DIM), (BLOCK_ROWS, HEAD_DIM), (0, 1))

    def _layout_keys(self):
        """The ring as loaded and as K: [keys, columns, slots]."""
        shape = (self.kv_tile, self.part_columns, self.slots)
        return cute.tile_to_shape(self._atom(self.part_columns), shape, (0, 1, 2))

    def _layout_values(self):
        """The same bytes as V: [columns, keys, slots]."""
        shape = (self.part_columns, self.kv_tile, self.slots)
        return cute.tile_to_shape(self._atom(self.part_columns, "MN"), shape, (1, 0, 2))

    def _layout_p(self):
        """[rows, keys, owner]."""
        return cute.tile_to_shape(self._atom(self.kv_tile), (BLOCK_ROWS, self.kv_tile, 2), (0, 1, 2))

    def _layout_o(self):
        """[rows, a warp group's columns, warp group]."""
        return cute.tile_to_shape(self._atom(OWN_COLUMNS), (BLOCK_ROWS, OWN_COLUMNS, 2), (0, 1, 2))

    def _tiled_mma(self, columns, b_major=OperandMajorMode.K, a_source=warpgroup.OperandSource.SMEM):
        """64 rows by ``columns`` of one warp group."""
        k_major = OperandMajorMode.K
        return make_trivial_tiled_mma(
            self.element, self.element, k_major, b_major, Float32, (1, 1, 1), (BLOCK_ROWS, columns), a_source=a_source
        )

    def _shared_storage(self):
        """The CTA's whole dynamic shared memory. O reuses Q."""
        element, slots = self.element, self.slots

        def tile(elements):
            return cute.struct.Align[cute.struct.MemRange[element, elements], 1024]

        @cute.struct
        class Storage:
            q: tile(BLOCK_ROWS * HEAD_DIM)
            ring: tile(slots * self.kv_tile * self.part_columns)
            p: tile(2 * BLOCK_ROWS * self.kv_tile)
            maxima: cute.struct.MemRange[Float32, 2 * BLOCK_ROWS]
            sums: cute.struct.MemRange[Float32, 2 * BLOCK_ROWS]
            ring_barriers: cute.struct.MemRange[Int64, BARRIERS_PER_SLOT * slots]
            q_barrier: cute.struct.MemRange[Int64, 1]

        return Storage

    # ---- device side -----------------------------------------------------------------------------------------------

    @cute.kernel
    def _kernel(self, atoms: dict, views: dict, tensors: dict):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for name in atoms:
                cpasync.prefetch_descriptor(atoms[name])
        storage = SmemAllocator().allocate(self._shared_storage())
        ring = Ring(
            storage.ring_barriers.data_ptr(),
            slots=self.slots,
            bytes_filled=self.kv_tile * self.part_columns * self.element.width // 8,
            sharers=self.cluster_m,
        )
        q_barrier = storage.q_barrier.data_ptr()
        self._initialise(ring, q_barrier, warp_index)

        block, kv_head, batch = cute.arch.block_idx()
        place = SimpleNamespace(block=block, kv_head=kv_head, batch=batch)
        place.head_block, place.position_block = self.packing.coordinates(block, kv_head)
        walk = self._walk(tensors, place)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                self._load_q(atoms["q"], views["q"], storage, q_barrier, place)
                self._load_keys(atoms, views, storage, ring, walk, place)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            if warp_index < 8:
                self._consume(0, atoms, views, tensors, storage, ring, q_barrier, walk, place)
            else:
                self._consume(1, atoms, views, tensors, storage, ring, q_barrier, walk, place)
        if const_expr(self.cluster_m > 1):
            # The other CTAs may still write this one's ring or arrive on its barriers.
            self._synchronize()

    @cute.jit
    def _initialise(self, ring, q_barrier, warp_index):
        """Make the barriers, before anyone uses them."""
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_barrier, 1)
                ring.initialise()
        cute.arch.mbarrier_init_fence()
        self._synchronize()

    @cute.jit
    def _synchronize(self):
        """Barrier over every thread that can reach this CTA's shared memory."""
        if const_expr(self.cluster_m > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _walk(self, tensors, place):
        """What the block's tiles are: ``tiles1`` of source 1 from its ``begin``-th on, then those of source 2."""
        sequences = Sequences(self.problem, tensors)
        queries, keys = sequences.queries(place.batch), sequences.keys(place.batch)
        left, right = tensors.get("left"), tensors.get("right")
        first = place.position_block * self.packing.positions
        last = cutlass.min(first + self.packing.positions, queries) - 1
        tiles = self.mask.tiles(first, last, queries, keys, left, right)
        walk = SimpleNamespace(queries=queries, keys=keys, keys2=Int32(0), left=left, right=right)
        walk.begin, walk.full_begin, walk.full_end = Int32(tiles.begin), Int32(tiles.full_begin), Int32(tiles.full_end)
        walk.tiles1 = cutlass.max(Int32(tiles.end) - walk.begin, 0)
        walk.count = walk.tiles1
        if const_expr(self.two):
            walk.keys2 = sequences.keys2(place.batch)
            walk.count = walk.count + cute.ceil_div(walk.keys2, self.kv_tile)
        return walk

    # ---- the order of the loads ------------------------------------------------------------------------------------

    def _key_position(self, tile):
        """Ring position of a tile's first K part."""
        if const_expr(self.problem.kv_shared):
            return tile * self.parts
        return cutlass.max(2 * tile - 1, 0) * self.parts

    def _value_position(self, tile):
        """Ring position of a tile's first V part."""
        if const_expr(self.problem.kv_shared):
            return tile * self.parts
        return (2 * tile + 2) * self.parts

    @cute.jit
    def _load_q(self, atom, view, storage, barrier, place):
        """Load the row block; rows past the end arrive as zeros."""
        layout = self._layout_q()
        smem = storage.q.get_tensor(layout.outer, swizzle=layout.inner)
        tile = cute.local_tile(
            view[None, None, place.batch],
            (self.packing.tile, HEAD_DIM),
            ((place.head_block, place.position_block), 0),
        )
        shared, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tile, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, BLOCK_ROWS * HEAD_DIM * self.element.width // 8)
        cute.copy(atom, source, shared, tma_bar_ptr=barrier)

    @cute.jit
    def _load_keys(self, atoms, views, storage, ring, walk, place):
        """Stream the tiles through the ring: K's, and a tile later V's if they are others."""
        separate = const_expr(not self.problem.kv_shared)
        for tile in cutlass.range(walk.count + (1 if separate else 0), unroll=1):
            if const_expr(separate):
                if tile < walk.count:
                    self._load_tile("k", atoms, views, storage, ring, walk, place, tile, self._key_position(tile))
                if tile > 0:
                    self._load_tile(
                        "v", atoms, views, storage, ring, walk, place, tile - 1, self._value_position(tile - 1)
                    )
            else:
                self._load_tile("k", atoms, views, storage, ring, walk, place, tile, self._key_position(tile))

    @cute.jit
    def _load_tile(self, name, atoms, views, storage, ring, walk, place, tile, position):
        """Load one tile of ``k`` or ``v``, whichever source it lies in."""
        if const_expr(self.two):
            if tile < walk.tiles1:
                self._load_parts(atoms[name], views[name], storage, ring, walk.begin + tile, place, position)
            else:
                other = f"{name}2"
                self._load_parts(atoms[other], views[other], storage, ring, tile - walk.tiles1, place, position)
        else:
            self._load_parts(atoms[name], views[name], storage, ring, walk.begin + tile, place, position)

    @cute.jit
    def _load_parts(self, atom, view, storage, ring, tile, place, position):
        """Load a tile's parts into the ring. In a cluster each CTA fetches its share of the keys for all."""
        layout = self._layout_keys()
        smem = storage.ring.get_tensor(layout.outer, swizzle=layout.inner)
        rank = place.block % self.cluster_m
        everyone = {"mcast_mask": cutlass.Int16(2**self.cluster_m - 1)} if const_expr(self.cluster_m > 1) else {}
        tiled = cute.local_tile(
            view[None, None, place.kv_head, place.batch], (self.kv_tile, self.part_columns), (tile, None)
        )
        shared, source = cpasync.tma_partition(
            atom, rank, cute.make_layout(self.cluster_m), cute.group_modes(smem, 0, 2), cute.group_modes(tiled, 0, 2)
        )
        for part in cutlass.range_constexpr(self.parts):
            ring.wait_empty(position + part)
            ring.expect(position + part)
            cute.copy(
                atom,
                source[None, part],
                shared[None, ring.slot(position + part)],
                tma_bar_ptr=ring.full(position + part),
                **everyone,
            )

    # ---- the consumers ---------------------------------------------------------------------------------------------

    @cute.jit
    def _consume(self, me: cutlass.Constexpr[int], atoms, views, tensors, storage, ring, q_barrier, walk, place):
        """One consumer warp group, from its first tile to its half of O."""
        work = self._start(me, tensors, storage, ring, walk, place)
        cute.arch.mbarrier_wait(q_barrier, 0)
        if const_expr(me == 0):
            for pair in cutlass.range(cute.ceil_div(walk.count, 2), unroll=1):
                tile = 2 * pair
                self._scores(work, tile)
                self._softmax(work, tile)
                self._give(work)
                self._multiply_own(work, tile)
                if tile + 1 < walk.count:
                    self._take(work)
                    self._issue_values(work, work.mma_o_taken, work.p_taken, tile + 1)
                    self._end_values(work, tile + 1)
        else:
            for pair in cutlass.range(walk.count // 2, unroll=1):
                tile = 2 * pair + 1
                self._scores(work, tile)
                self._take(work)
                self._issue_values(work, work.mma_o_taken, work.p_taken, tile - 1)
                self._softmax(work, tile)
                self._end_values(work, tile - 1)
                self._give(work)
                self._multiply_own(work, tile)
            if walk.count % 2 == 1:
                self._take(work)
                self._issue_values(work, work.mma_o_taken, work.p_taken, walk.count - 1)
                self._end_values(work, walk.count - 1)
        self._finish(me, work, atoms["o"], views["o"], tensors, storage, place)

    @cute.jit
    def _start(self, me: cutlass.Constexpr[int], tensors, storage, ring, walk, place):
        """What a consumer works with: fragments, accumulators, and its thread's two rows (r, r + 8) of the block."""
        other = 1 - me
        thread = cute.arch.thread_idx()[0] % WARP_GROUP_THREADS
        work = SimpleNamespace(me=me, other=other, thread=thread, ring=ring, walk=walk)
        work.scale_log2 = tensors["scale"] * LOG2_E
        layout_q, layout_k, layout_v, layout_p = (
            self._layout_q(), self._layout_keys(), self._layout_values(), self._layout_p(),
        )  # fmt: skip
        smem_q = storage.q.get_tensor(layout_q.outer, swizzle=layout_q.inner)
        work.ring_tiles = storage.ring.get_tensor(layout_k.outer, swizzle=layout_k.inner)
        smem_v = storage.ring.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        smem_p = storage.p.get_tensor(layout_p.outer, swizzle=layout_p.inner)

        work.mma_s = self._tiled_mma(self.kv_tile)
        mn_major = OperandMajorMode.MN
        work.mma_o = self._tiled_mma(self.part_columns, mn_major, warpgroup.OperandSource.RMEM)
        work.mma_o_taken = self._tiled_mma(self.part_columns, mn_major)
        slice_s, slice_o, slice_taken = (mma.get_slice(0) for mma in (work.mma_s, work.mma_o, work.mma_o_taken))
        work.q = slice_s.make_fragment_A(slice_s.partition_A(smem_q))
        work.k = slice_s.make_fragment_B(slice_s.partition_B(work.ring_tiles))
        work.v = slice_o.make_fragment_B(slice_o.partition_B(smem_v))
        work.p = slice_o.make_fragment_A(slice_o.partition_shape_A((BLOCK_ROWS, self.kv_tile)))
        work.p_taken = slice_taken.make_fragment_A(slice_taken.partition_A(smem_p))[None, None, None, other]
        work.acc_s = cute.make_rmem_tensor(work.mma_s.partition_shape_C((BLOCK_ROWS, self.kv_tile)), Float32)
        work.acc_o = [
            cute.make_rmem_tensor(work.mma_o.partition_shape_C((BLOCK_ROWS, self.part_columns)), Float32)
            for _ in range(self.own_parts)
        ]
        work.store_p = _matrix_store(work.mma_s, self.element).get_slice(thread)
        work.shared_p = work.store_p.partition_D(smem_p[None, None, me])
        work.columns = work.mma_s.get_slice(thread).partition_C(cute.make_identity_tensor((BLOCK_ROWS, self.kv_tile)))

        rows = [thread // 32 * 16 + thread % 32 // 4 + 8 * r for r in range(2)]
        work.rows = rows
        maxima = storage.maxima.get_tensor(cute.make_layout((BLOCK_ROWS, 2)))
        sums = storage.sums.get_tensor(cute.make_layout((BLOCK_ROWS, 2)))
        work.maxima_given, work.maxima_taken = maxima[None, me], maxima[None, other]
        work.sums_given, work.sums_taken = sums[None, me], sums[None, other]
        if const_expr(self.mask.by_position):
            work.visible = [
                self.mask.visible(
                    self.packing.position(row, place.position_block), walk.queries, walk.keys, walk.left, walk.right
                )
                for row in rows
            ]
        work.maximum, work.total, work.correction = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        work.maximum.fill(-Float32.inf)
        work.total.fill(0.0)
        for acc in work.acc_o:
            acc.fill(0.0)
        return work

    @cute.jit
    def _scores(self, work, tile):
        """S = Q K^T of a tile, a wgmma group a part; K's parts are let go as their groups end."""
        position = self._key_position(tile)
        steps = cute.size(work.k, mode=[2])
        for part in cutlass.range_constexpr(self.parts):
            work.ring.wait_full(position + part)
            keys = work.k[None, None, None, work.ring.slot(position + part)]
            _issue(work.mma_s, work.acc_s, work.q, keys, part * steps, clear=part == 0)
        for part in cutlass.range_constexpr(self.parts):
            if const_expr(not self.problem.kv_shared):
                warpgroup.wait_group(self.parts - 1 - part)
                work.ring.release(position + part)
            elif const_expr(part == self.parts - 1):
                warpgroup.wait_group(0)

    @cute.jit
    def _softmax(self, work, tile):
        """Mask a tile's scores, and replace them by P; update the rows' maxima and sums, and O's correction."""
        self._hide(work, tile)
        rows = _rows_of(work.acc_s)
        for r in cutlass.range_constexpr(2):
            highest = _row_maximum(rows, r, work.maximum[r])
            highest = cute.arch.warp_reduction_max(highest, threads_in_group=4)
            self._raise_maximum(work, r, highest)
            subtracted = self._subtracted(highest) * work.scale_log2
            exponents = rows[r, None].load() * work.scale_log2 - subtracted
            rows[r, None].store(cute.math.exp2(exponents, fastmath=True))
            work.total[r] = _row_sum(rows, r, work.total[r])

    @cute.jit
    def _raise_maximum(self, work, r: cutlass.Constexpr[int], highest):
        """Set a row's maximum and the correction that its sum and its O need; the sum gets it at once."""
        work.correction[r] = cute.math.exp2(
            (work.maximum[r] - self._subtracted(highest)) * work.scale_log2, fastmath=True
        )
        work.maximum[r] = highest
        work.total[r] = work.total[r] * work.correction[r]

    @cute.jit
    def _subtracted(self, highest):
        """What scores are taken relative to: the row's maximum, or 0 where it has seen no key, and is -inf."""
        if const_expr(self.sparse):
            return highest if highest > -Float32.inf else Float32(0.0)
        return highest

    @cute.jit
    def _hide(self, work, tile):
        """Set the scores of keys that a row does not see to -inf."""
        walk, acc_s, columns = work.walk, work.acc_s, work.columns
        first = tile < walk.tiles1
        keys = walk.keys if const_expr(not self.two) else (walk.keys if first else walk.keys2)
        index = tile + walk.begin if const_expr(not self.two) else (tile + walk.begin if first else tile - walk.tiles1)
        base = index * self.kv_tile
        valid = keys - base
        if const_expr(self.mask.by_position):
            visible = work.visible
            partial = valid < self.kv_tile or (first and (index < walk.full_begin or index >= walk.full_end))
            if partial:
                for r in cutlass.range_constexpr(2):
                    seen_from, seen_end = visible[r]
                    low = seen_from - base if first else Int32(0)
                    high = seen_end - base if first else valid
                    for i in cutlass.range_constexpr(cute.size(acc_s)):
                        if const_expr(i // 2 % 2 == r):
                            acc_s[i] = acc_s[i] if columns[i][1] >= low and columns[i][1] < high else -Float32.inf
        else:
            if valid < self.kv_tile:
                for i in cutlass.range_constexpr(cute.size(acc_s)):
                    acc_s[i] = acc_s[i] if columns[i][1] < valid else -Float32.inf

    @cute.jit
    def _give(self, work):
        """Round P to the A operand of the own product, and leave it and the rows' maxima to the other warp group."""
        # An accumulator's register order is the A operand's register order, 16 columns at a time.
        rounded = cute.make_tensor(work.p.iterator, work.acc_s.layout)
        rounded.store(work.acc_s.load().to(self.element))
        cute.copy(work.store_p, work.store_p.retile(rounded), work.shared_p)
        given, maximum, rows = work.maxima_given, work.maximum, work.rows
        if work.thread % 4 == 0:
            for r in cutlass.range_constexpr(2):
                given[rows[r]] = maximum[r]
        # wgmma reads through the async proxy.
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=BARRIER_READY + work.me, number_of_threads=CONSUMER_THREADS)

    @cute.jit
    def _take(self, work):
        """Wait for the other warp group's P, and bring sums and O to its rows' maxima."""
        cute.arch.barrier(barrier_id=BARRIER_READY + work.other, number_of_threads=CONSUMER_THREADS)
        for r in cutlass.range_constexpr(2):
            self._raise_maximum(work, r, work.maxima_taken[work.rows[r]])
        self._rescale(work)

    @cute.jit
    def _rescale(self, work):
        for acc in work.acc_o:
            _scale_rows(acc, work.correction)

    @cute.jit
    def _multiply_own(self, work, tile):
        """O += P V of the own tile."""
        self._rescale(work)
        self._issue_values(work, work.mma_o, work.p, tile)
        self._end_values(work, tile)

    @cute.jit
    def _issue_values(self, work, mma, p, tile):
        """Start O += P V for the own half of a tile's V."""
        position = self._value_position(tile) + work.me * self.own_parts
        for part in cutlass.range_constexpr(self.own_parts):
            work.ring.wait_full(position + part)
        if const_expr(self.ragged_values):
            self._clear_tail(work, tile, position)
        for part in cutlass.range_constexpr(self.own_parts):
            values = work.v[None, None, None, work.ring.slot(position + part)]
            _issue(mma, work.acc_o[part], p, values, 0, clear=False)

    @cute.jit
    def _end_values(self, work, tile):
        """Finish what `_issue_values` started; the own half of V is free then."""
        position = self._value_position(tile) + work.me * self.own_parts
        for part in cutlass.range_constexpr(self.own_parts):
            warpgroup.wait_group(self.own_parts - 1 - part)
            work.ring.release(position + part)

    @cute.jit
    def _clear_tail(self, work, tile, position):
        """Overwrite the own half of V's rows past the sequence's end with zeros; S has been computed from them."""
        walk = work.walk
        keys, index = walk.keys, walk.begin + tile
        if const_expr(self.two):
            keys = walk.keys if tile < walk.tiles1 else walk.keys2
            index = walk.begin + tile if tile < walk.tiles1 else tile - walk.tiles1
        valid = keys - index * self.kv_tile
        parts, thread = work.ring_tiles, work.thread
        ring_slots = [work.ring.slot(position + part) for part in range(self.own_parts)]
        if valid < self.kv_tile:
            for row in cutlass.range(valid, self.kv_tile, unroll=1):
                for part in cutlass.range_constexpr(self.own_parts):
                    for column in cutlass.range_constexpr(0, self.part_columns, WARP_GROUP_THREADS):
                        parts[row, column + thread, ring_slots[part]] = self.element(0.0)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BARRIER_GROUP + work.me, number_of_threads=WARP_GROUP_THREADS)

    @cute.jit
    def _finish(self, me: cutlass.Constexpr[int], work, atom_o, view_o, tensors, storage, place):
        """Sum the rows over both warp groups, write the statistics, and send the own half of O out by TMA."""
        given, total, rows = work.sums_given, work.total, work.rows
        for r in cutlass.range_constexpr(2):
            total[r] = cute.arch.warp_reduction_sum(total[r], threads_in_group=4)
            if work.thread % 4 == 0:
                given[rows[r]] = total[r]
        # All scores have been computed, too: Q is spent.
        cute.arch.barrier(barrier_id=BARRIER_BOTH, number_of_threads=CONSUMER_THREADS)
        for r in cutlass.range_constexpr(2):
            total[r] = total[r] + work.sums_taken[rows[r]]
        if const_expr(self.problem.normalize):
            self._normalize(work, tensors, place)
        if const_expr(self.write_lse and me == 0):
            self._write_statistics(work, tensors, place)

        layout = self._layout_o()
        block = storage.q.get_tensor(layout.outer, swizzle=layout.inner)[None, None, work.me]
        store = _matrix_store(work.mma_o, self.element).get_slice(work.thread)
        for part in cutlass.range_constexpr(self.own_parts):
            rounded = cute.make_rmem_tensor(work.acc_o[part].layout, self.element)
            rounded.store(work.acc_o[part].load().to(self.element))
            staged = cute.local_tile(block, (BLOCK_ROWS, self.part_columns), (0, part))
            cute.copy(store, store.retile(rounded), store.partition_D(staged))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_GROUP + work.me, number_of_threads=WARP_GROUP_THREADS)
        if cute.arch.make_warp_uniform(work.thread // 32) == 0:
            tile = cute.local_tile(
                view_o[None, None, place.batch],
                (self.packing.tile, OWN_COLUMNS),
                ((place.head_block, place.position_block), work.me),
            )
            shared, target = cpasync.tma_partition(
                atom_o, 0, cute.make_layout(1), cute.group_modes(block, 0, 2), cute.group_modes(tile, 0, 2)
            )
            cute.copy(atom_o, shared, target)
            cute.arch.cp_async_bulk_commit_group()
            # Shared memory must outlive the copy engine's reads of it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _normalize(self, work, tensors, place):
        """Divide O by the rows' sums, the sink's share among them; rows that saw no key become 0."""
        inverse = work.correction
        for r in cutlass.range_constexpr(2):
            denominator = work.total[r]
            if const_expr(self.problem.has_sink):
                head = self.packing.head(work.rows[r], place.head_block)
                sink = tensors["sink"][head] * LOG2_E
                denominator = denominator + cute.math.exp2(
                    sink - self._subtracted(work.maximum[r]) * work.scale_log2, fastmath=True
                )
            inverse[r] = cute.arch.rcp_approx(denominator)
            if const_expr(self.sparse):
                inverse[r] = inverse[r] if work.total[r] > 0.0 else Float32(0.0)
        self._rescale(work)

    @cute.jit
    def _write_statistics(self, work, tensors, place):
        """LSE, and the raw maxima of un-normalised rows; natural logarithm, without the sink."""
        lse, row_max = tensors["lse"], tensors.get("row_max")
        for r in cutlass.range_constexpr(2):
            head = self.packing.head(work.rows[r], place.head_block)
            position = self.packing.position(work.rows[r], place.position_block)
            if work.thread % 4 == 0 and position < work.walk.queries:
                lse[place.batch, head, position] = (
                    work.maximum[r] * tensors["scale"] + cute.math.log(work.total[r])
                )
                if const_expr(not self.problem.normalize):
                    row_max[place.batch, head, position] = work.maximum[r]


def _matrix_store(mma, element):
    """Tiled stmatrix copy of ``mma``'s accumulator, rounded to 16 bits, into row-major shared memory."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), element)
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
