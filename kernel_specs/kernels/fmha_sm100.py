"""Fused multi-head attention, forward, for sm_100a (tcgen05, TMEM, TMA).

    O = softmax(scale * Q K^T) V        over the visible keys of one or two sources

One CTA computes `row_groups` tiles of `m_tile` query rows (attention/packing.py says which heads and positions) against
the keys that some of them see (attention/mask.py), and owns `pv_n_tile` of the columns of V and O. Its warps:

    softmax      4 a row group   S (TMEM) -> registers -> P (TMEM or SMEM), row maxima and sums, LSE
    correction   4               rescale O in TMEM when a row's base moved; the epilogue; TMEM's owner
    mma          1               the one issuer of tcgen05.mma
    load         1               the one issuer of TMA loads
    clear        2               zero the rows of V past a sequence's end
    gather       4, if needed    copy the listed rows of a gathered source

How a KV tile i travels (-> is a ring of buffers or a hand-over; its arrivals in parentheses):

    load --K,V full (TMA bytes)--> mma --K,V empty (tcgen05.commit)--> load
    load --boundary (TMA bytes)--> clear --K,V full (1 thread)--> mma        the tile with a sequence's last key
    gather --K,V full (1 thread)--> mma                                      gathered tiles
    mma --S full (commit)--> softmax --S empty (128 threads)--> mma
    softmax --P full (128 threads)--> mma --P empty (commit)--> softmax
    mma --O full (commit)--> correction --O empty (128 threads)--> mma
    softmax --factors (two named barriers, 256 threads)--> correction

The tiles of both sources are one sequence under one online softmax. With `num_splits` > 1 the CTAs of a row block share
it, leave un-normalised partial results in the workspace, and a second kernel merges them (attention/merge.py).

A pair (fmha_sm100_pair_space.py) is a cluster of two CTAs of 64 rows each, whose products are one, of M = 128. The MMA
warp of the leader, rank 0, issues for both. Each CTA loads Q for its rows, half of a tile's keys of K and half of V's
columns. What the MMA warp waits for arrives at the leader's barriers, from both CTAs (an arrival a CTA or a warp); what
it commits arrives at the barriers of both. Where a tile is to be cleared, each CTA clears its part of V and says so.

Tunables: `m_tile`, `row_groups`, `pv_n_tile` (head_dim_v / pv_n_tile CTAs repeat QK and softmax), `kv_tile` keys in a
tile, `kv_stage` tiles of K, and of V, in flight; `k_sub` stages that a tile of K takes; `s_stage` score tiles in
flight; `smem_p` PV reads P from SMEM or TMEM; `rescale_log2` powers of two that a row's maximum may grow by before
O is rescaled; `tma_o` O leaves through SMEM by TMA, or from registers; `num_splits`; `softmax_registers` a thread.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.experimental.primitives import nvvm_wrapper as nvvm
from cutlass.memory import SmemAllocator, TmemAllocator

from tunekit.model import Values

from . import sm100_rings as rings
from . import sm100_views as views
from .attention.arguments import by_name
from .attention.merge import Combine, partial_outputs, partial_statistics
from .attention.packing import rows_view
from .attention.sequences import Sequences, extent
from .sm100_correction import Correction
from .sm100_load import OWN, Clear, Gather, Load
from .sm100_mma import Mma, Operands
from .sm100_plan import GROUP, SWIZZLE_COLUMNS, WARP, Plan
from .sm100_softmax import Softmax, Statistics
from .sm100_work import find_work, grid

BUFFER_ALIGN_BYTES = 1024
# The tensors that are read or written through pointers; K and V go by TMA, but for a gathered source.
BY_POINTER = (
    *("q", "k", "k2", "lengths", "lengths2", "indices", "page_table", "cu_seqlens_q", "cu_seqlens_k", "sink"),
    *("o", "lse", "row_max", "workspace"),
)


class FmhaForwardSm100:
    """The kernel of one variant."""

    def __init__(self, plan: Plan):
        self.plan = plan
        count = GROUP * 2
        # Barrier 0 is __syncthreads.
        ids = iter(range(1, 16))
        groups = range(self.plan.groups)
        self.tmem_barrier = pipeline.NamedBarrier(next(ids), (self.plan.mma_warp + 1) * WARP)
        self.epilogue_barrier = pipeline.NamedBarrier(next(ids), GROUP)
        self.clear_barrier = pipeline.NamedBarrier(next(ids), self.plan.clear_threads)
        self.gather_barrier = pipeline.NamedBarrier(next(ids), GROUP)
        self.handed_over = pipeline.NamedBarrier(next(ids), GROUP + WARP)
        self.factors_full = tuple(pipeline.NamedBarrier(next(ids), count) for _ in groups)
        self.factors_empty = tuple(pipeline.NamedBarrier(next(ids), count) for _ in groups)
        self.exchanged = pipeline.NamedBarrier(next(ids), GROUP)

    # ---- host -------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """The arguments of the spec's signature, then the workspace of a split variant, then the stream."""
        plan = self.plan
        call = by_name(plan.problem, arguments)
        tensors = {name: call[name] for name in BY_POINTER if name in call}
        if const_expr(plan.gathered_arguments):
            tensors.update({name: call[name] for name in plan.gathered_arguments})
        tma = self._tma_atoms(call)
        stream = call["stream"]
        queries, batch = extent(plan.problem, call)
        left, right = call.get("left", Int32(-1)), call.get("right", Int32(-1))
        self.kernel(tensors, tma, call["scale"], left, right).launch(
            grid=grid(plan, queries, batch),
            block=(plan.threads, 1, 1),
            cluster=(plan.ctas, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        if const_expr(plan.partial):
            Combine(plan.problem.heads, plan.problem.head_dim_v, plan.splits, plan.problem.normalize).launch(
                call["workspace"],
                call["o"],
                call.get("lse"),
                call.get("row_max"),
                call.get("sink"),
                call["scale"],
                stream,
                call.get("cu_seqlens_q"),
            )

    def _tma_atoms(self, call):
        """Argument name -> (copy atom, tensor of coordinates), a box of (rows, 64 columns) each."""
        plan = self.plan
        atoms = {"q": self._tma_load(rows_view(call["q"]), plan.packing.tile, plan.m_tile)}
        sources = ("",) * plan.dense + ("2",) * (plan.problem.sources == 2 and not plan.problem.gather)
        for source in sources:
            for name in ("k",) if plan.kv_shared else ("k", "v"):
                keys = _keys_view(call[("k" if plan.problem.kv_shared else name) + source])
                rows = plan.own_keys if name == "k" else plan.kv_tile
                atoms[name + source] = self._tma_load(keys, rows, rows)
                if name == "v" and plan.pair and plan.ragged:
                    atoms[name + source + OWN] = self._tma_load(keys, rows, rows, alone=True)
        if plan.tma_o:
            atoms["o"] = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                rows_view(call["o"]),
                views.block_layout(plan.rows),
                (plan.o_tile, SWIZZLE_COLUMNS),
            )
        return {name: (found[0], found[1]) for name, found in atoms.items()}

    def _tma_load(self, tensor, tile, rows: int, alone: bool = False):
        """Of a pair's loads, those that are not `alone` report to the leader."""
        ctas = tcgen05.CtaGroup.TWO if self.plan.pair and not alone else tcgen05.CtaGroup.ONE
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(ctas), tensor, views.block_layout(rows), (tile, SWIZZLE_COLUMNS)
        )

    def _storage(self):
        """The layout of shared memory: what space.smem_terms adds up."""
        plan = self.plan
        element, stages = plan.element, plan.groups
        kv_count = 2 * plan.kv_stage
        # The ring that V lies in has a boundary barrier for each source.
        k_count, v_count = (kv_count + 2, 0) if plan.kv_shared else (kv_count, kv_count + 2)
        v_elements = 0 if plan.kv_shared else plan.kv_stage * plan.kv_tile * plan.own_columns
        freed_count, exchange_count = (1, 2 * GROUP) if plan.pair else (0, 0)
        p_elements = stages * plan.p_stage * plan.m_tile * plan.kv_tile if plan.smem_p else 0

        @cute.struct
        class SharedStorage:
            q_barrier: cute.struct.MemRange[Int64, 1]
            k_barriers: cute.struct.MemRange[Int64, k_count]
            v_barriers: cute.struct.MemRange[Int64, v_count]
            s_barriers: cute.struct.MemRange[Int64, 2 * stages * plan.s_stage]
            p_barriers: cute.struct.MemRange[Int64, 2 * stages * plan.p_stage]
            o_barriers: cute.struct.MemRange[Int64, 2 * stages]
            freed_barrier: cute.struct.MemRange[Int64, freed_count]
            tmem_base: Int32
            factors: cute.struct.MemRange[Float32, stages * GROUP]
            exchange: cute.struct.MemRange[Float32, exchange_count]
            # Q, and after the last QK product the O tile on its way out.
            q: cute.struct.Align[cute.struct.MemRange[element, stages * plan.q_elements], BUFFER_ALIGN_BYTES]
            k: cute.struct.Align[
                cute.struct.MemRange[element, plan.kv_stage * plan.own_keys * plan.k_columns], BUFFER_ALIGN_BYTES
            ]
            v: cute.struct.Align[cute.struct.MemRange[element, v_elements], BUFFER_ALIGN_BYTES]
            p: cute.struct.Align[cute.struct.MemRange[element, p_elements], BUFFER_ALIGN_BYTES]

        return SharedStorage

    # ---- device -----------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, tensors, tma, scale: Float32, left: Int32, right: Int32):
        """Sets up barriers and tensor memory, and gives each warp its role."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == plan.load_warp:
            for atom, _ in tma.values():
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self._storage())
        q_full = storage.q_barrier.data_ptr()
        groups, ctas, of_group = plan.groups, plan.ctas, rings.uses_of_groups(plan.pair)
        k_ring = rings.Ring(storage.k_barriers.data_ptr(), plan.kv_stage, fills=ctas, boundaries=2 * plan.kv_shared)
        v_ring = None
        if const_expr(not plan.kv_shared):
            v_ring = rings.Ring(storage.v_barriers.data_ptr(), plan.kv_stage, fills=ctas, boundaries=2)
        s_ring = rings.Ring(storage.s_barriers.data_ptr(), groups * plan.s_stage, uses=of_group)
        p_ring = rings.Ring(storage.p_barriers.data_ptr(), groups * plan.p_stage, fills=of_group)
        o_ring = rings.Ring(storage.o_barriers.data_ptr(), groups, uses=of_group)
        if warp == plan.mma_warp:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_full, ctas)
                for ring in (k_ring, v_ring, s_ring, p_ring, o_ring):
                    if const_expr(ring is not None):
                        ring.initialise()
            cute.arch.mbarrier_init_fence()
        tmem = TmemAllocator(
            storage.tmem_base.ptr,
            barrier_for_retrieve=self.tmem_barrier,
            allocator_warp_id=plan.correction_warp,
            is_two_cta=plan.pair,
            two_cta_tmem_dealloc_mbar_ptr=storage.freed_barrier.data_ptr() if plan.pair else None,
        )
        self._meet()

        sequences = Sequences(plan.problem, tensors)
        work = find_work(plan, sequences, left, right)
        statistics = Statistics(
            storage.factors.get_tensor(cute.make_layout((GROUP, groups))),
            self.factors_full,
            self.factors_empty,
            storage.exchange.get_tensor(cute.make_layout((GROUP, 2))) if plan.pair else None,
            self.exchanged,
        )
        softmax_registers, correction_registers, issue_registers, gather_registers = plan.registers

        if warp < plan.correction_warp:
            _set_registers(softmax_registers, plan)
            tmem_ptr = self._tmem_pointer(tmem)
            softmax = Softmax(plan, self._with_partials(tensors), s_ring, p_ring, self._p_chunks(storage), statistics)
            if const_expr(groups == 1):
                softmax.run(0, work, tmem_ptr, scale, left, right)
            else:
                if warp < WARPS_OF_GROUP:
                    softmax.run(0, work, tmem_ptr, scale, left, right)
                else:
                    softmax.run(1, work, tmem_ptr, scale, left, right)

        if warp >= plan.correction_warp and warp < plan.mma_warp:
            _set_registers(correction_registers, plan)
            tmem.allocate(plan.tmem_columns)
            tmem.relinquish_alloc_permit()
            nvvm.tcgen05_fence("before_thread_sync")
            tmem_ptr = self._tmem_pointer(tmem)
            o_shape = (plan.pv_n_tile, groups, plan.q_elements)
            Correction(
                plan,
                sequences,
                self._with_partials(tensors),
                tma.get("o"),
                views.block_tensor(storage.q, plan.m_tile, *o_shape, box_rows=plan.rows),
                views.chunk_tensor(storage.q, plan.m_tile, *o_shape),
                o_ring,
                statistics,
                self.epilogue_barrier,
            ).run(work, tmem_ptr, tmem)

        if warp >= plan.mma_warp and warp < plan.gather_warp:
            _set_registers(issue_registers, plan)
            if warp == plan.load_warp:
                Load(plan, sequences, tma, self._kv_blocks(storage), q_full, k_ring, v_ring, self.handed_over).run(work)
            if warp == plan.mma_warp:
                all_rings = (k_ring, v_ring, s_ring, p_ring, o_ring)
                tmem_ptr = self._tmem_pointer(tmem)
                if const_expr(plan.pair):
                    if work.rank == rings.LEADER:
                        self._multiply(storage, tmem_ptr, q_full, all_rings, work)
                else:
                    self._multiply(storage, tmem_ptr, q_full, all_rings, work)
            if const_expr(plan.ragged and plan.dense):
                if warp >= plan.clear_warp:
                    name, ring = ("k", k_ring) if plan.kv_shared else ("v", v_ring)
                    chunks = self._kv(storage, views.plain_chunks)[name]
                    Clear(plan, ring, chunks, self.clear_barrier).run(work)

        if const_expr(plan.problem.gather):
            if warp >= plan.gather_warp:
                _set_registers(gather_registers, plan)
                chunks = self._kv(storage, views.chunk_tensor)
                Gather(plan, tensors, k_ring, v_ring, chunks, self.gather_barrier, self.handed_over).run(work)

        if const_expr(plan.pair):
            self._meet()

    def _meet(self):
        """The CTA's threads, and those of its pair: whose barriers are initialised then, or no longer needed."""
        if self.plan.pair:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _tmem_pointer(self, tmem):
        """Waits until TMEM is allocated; the base of its columns."""
        tmem.wait_for_alloc()
        nvvm.tcgen05_fence("after_thread_sync")
        return tmem.retrieve_ptr(Float32)

    def _multiply(self, storage, tmem_ptr, q_full, all_rings, work):
        """The MMA warp's role."""
        products = views.Products(self.plan)
        swizzle = views.swizzle()
        s_q = storage.q.get_tensor(products.q_layout(), swizzle=swizzle)
        s_k = storage.k.get_tensor(products.k_layout(), swizzle=swizzle)
        s_v = (storage.k if self.plan.kv_shared else storage.v).get_tensor(products.v_layout(), swizzle=swizzle)
        if self.plan.smem_p:
            p = products.pv.make_fragment_A(storage.p.get_tensor(products.p_layout(), swizzle=swizzle))
        else:
            p = products.probabilities(tmem_ptr)
        operands = Operands(
            q=products.qk.make_fragment_A(s_q),
            k=products.qk.make_fragment_B(s_k),
            v=products.pv.make_fragment_B(s_v),
            p=p,
            s=products.scores(tmem_ptr),
            o=products.outputs(tmem_ptr),
        )
        Mma(self.plan, operands, q_full, *all_rings).run(work, products.qk, products.pv)

    def _kv_blocks(self, storage):
        """Q, K and V as the load warp writes them."""
        plan = self.plan
        q = views.block_tensor(storage.q, plan.m_tile, plan.head_dim, plan.groups, plan.q_elements)
        return {"q": q, **self._kv(storage, views.block_tensor)}

    def _kv(self, storage, view):
        """K and, if it has its own memory, V, by one of the views."""
        plan = self.plan
        tiles = {"k": (plan.own_keys, plan.k_columns)}
        if not plan.kv_shared:
            tiles["v"] = (plan.kv_tile, plan.own_columns)
        return {
            name: view(getattr(storage, name), rows, columns, plan.kv_stage, rows * columns)
            for name, (rows, columns) in tiles.items()
        }

    def _p_chunks(self, storage):
        plan = self.plan
        if not plan.smem_p:
            return None
        stages = plan.groups * plan.p_stage
        return views.chunk_tensor(storage.p, plan.m_tile, plan.kv_tile, stages, plan.m_tile * plan.kv_tile)

    def _with_partials(self, tensors):
        """The tensors, and the workspace's two parts if there is one."""
        plan = self.plan
        if not plan.partial:
            return tensors
        q = tensors["q"]
        rows = plan.problem.heads * (q.shape[0] if plan.problem.varlen else q.shape[0] * q.shape[1])
        shape = (tensors["workspace"], rows, plan.splits, plan.problem.head_dim_v)
        parts = {"partial_outputs": partial_outputs(*shape), "partial_statistics": partial_statistics(*shape)}
        return {**tensors, **parts}


WARPS_OF_GROUP = GROUP // WARP


def _set_registers(count: int, plan: Plan):
    """Give registers back, or take some of those that others gave back."""
    if count <= plan.launch_registers:
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)


def _keys_view(x):
    """[outer, rows, heads, d], or packed [rows, heads, d], as (rows, d, heads, outer)."""
    if cute.rank(x) == 3:
        modes = cute.append(cute.select(x.layout, mode=[0, 2, 1]), cute.make_layout(1, stride=0))
    else:
        modes = cute.select(x.layout, mode=[1, 3, 2, 0])
    return cute.make_tensor(x.iterator, modes)


def make_kernel(problem: Values, tunables: Values) -> FmhaForwardSm100:
    """The jit-able object of a variant."""
    return FmhaForwardSm100(Plan(problem, tunables))


def make_pair_kernel(problem: Values, tunables: Values) -> FmhaForwardSm100:
    """The same for a pair of CTAs; `tunables`: fmha_sm100_pair_space's, complete."""
    return FmhaForwardSm100(Plan(problem, tunables, pair=True))
