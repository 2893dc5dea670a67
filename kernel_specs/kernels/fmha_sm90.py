"""Fused multi-head attention forward for Hopper (sm_90a), in CuTeDSL.

One CTA computes ``m_tile`` query rows times ``pv_n_tile`` output columns of one KV head, or a persistent one several
such row blocks in turn. A producer warp group moves tiles with TMA; each of the ``m_tile / 64`` consumer warp groups
owns 64 rows and runs the two matrix products on wgmma with an online softmax between them. Consumer warp groups share
the K and V rings and nothing else, so each one's part of shared memory (Q, P, O) is private to it. With ``kv_groups`` =
2 two warp groups own the same 64 rows, each with every other KV tile, and merge their results at the end.

The parts, in the order of the pipeline:

- sm90_plan.py: what is static about a variant;
- sm90_schedule.py: which row blocks a CTA works on, in what order;
- sm90_runs.py: which KV tiles a CTA visits: one walk over a run of tiles of each KV source;
- sm90_load.py: the producers, a TMA ring each for K and V;
- sm90_gather.py: the same for a source whose rows are listed;
- sm90_consumer.py: the two matrix products, and the walk of a consumer warp group;
- sm90_tails.py: what lies behind a sequence's last key;
- sm90_softmax.py: masks and the online softmax on accumulators;
- sm90_output.py: row sums, sink, statistics, and the store of O;
- sm90_split.py: the same where several CTAs split the tiles of a row block.

Rows of a block are packed as attention/packing.py says: query heads of one KV head fastest, then positions.

Ragged ends. TMA fills reads past a tensor's end with zeros and drops writes past it, so rows past T need no predicate.
Keys that a row does not see get the score -inf, in the tiles that have any. What lies past a sequence's end inside its
tensor may be NaN: such scores are replaced, not added to, and such rows of V are zeroed in shared memory.

Tensors and their shapes are those of kernel_specs/fmha.py. The softmax is over ``scale * q.k`` with ``scale > 0``.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import SmemAllocator

from tunekit.model import Values

from .attention.arguments import by_name
from .attention.sequences import Sequences
from .sm90_consumer import Consumer, close_turns, open_turns, tiled_mmas
from .sm90_gather import PRESENT_BUFFERS, GatherStream
from .sm90_load import Ring, TileStream, fill_ring, load_q, make_pipe, make_ring, state_at, tma_operands
from .sm90_output import Output, await_stores
from .sm90_plan import BARRIER_GATHER, BLOCK_ROWS, WARP_THREADS, WARPS_PER_GROUP, Plan
from .sm90_runs import part_of, runs_of
from .sm90_schedule import Before, grid, own_place, place_in_round, rounds
from .sm90_softmax import ScoreMask
from .sm90_split import ClusterOutput, PartialOutput, make_combine

STAGING_ALIGNMENT = 1024  # bytes; of swizzled tiles


def make_kernel(problem: Values, tunables: Values) -> "FmhaSm90":
    """The kernel object for ``cute.compile``; its arguments are those of attention/arguments.py."""
    return FmhaSm90(Plan(problem, tunables))


class FmhaSm90:
    """One variant of the kernel."""

    def __init__(self, plan: Plan):
        self.plan = plan

    # ---- host side -------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Build the TMA views and launch one CTA per (row blocks, slice), KV head and sequence."""
        plan = self.plan
        given = by_name(plan.problem, arguments)
        stream = given.pop("stream")
        layouts = self._smem_layouts()
        # Tracing a kernel replaces what its dict holds.
        to_combine = [given.get(name) for name in ("workspace", "o", "lse", "row_max", "sink", "scale")]
        starts = given.get("cu_seqlens_q")
        self._kernel(given, tma_operands(plan, given, layouts), layouts, tiled_mmas(plan)).launch(
            grid=grid(plan, given),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=plan.ctas_per_sm,
            preferred_smem_carveout=100,
        )
        if const_expr(plan.merge == "kernel"):
            make_combine(plan).launch(*to_combine, stream, starts)

    def _smem_layouts(self) -> dict:
        """Swizzled shared-memory layouts by name: q, p and o rows by columns, k keys by head_dim, v columns by keys.

        With kv_shared, v is a whole K stage: atoms of 8 keys by 64 columns lie in the same order in both.
        """
        plan = self.plan
        row_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, plan.element)
        column_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, plan.element)
        rows = (0, 1, 2)
        v_columns = plan.head_dim if plan.kv_shared else plan.pv_n_tile
        return {
            "q": cute.tile_to_shape(row_atom, (BLOCK_ROWS, plan.head_dim, plan.row_blocks), rows),
            "k": cute.tile_to_shape(row_atom, (plan.kv_tile, plan.k_columns, plan.k_stage), rows),
            "v": cute.tile_to_shape(column_atom, (v_columns, plan.kv_tile, plan.v_stage), (1, 0, 2)),
            "p": cute.tile_to_shape(row_atom, (BLOCK_ROWS, plan.kv_tile, plan.consumers), rows),
            "o": cute.tile_to_shape(row_atom, (BLOCK_ROWS, plan.pv_n_tile, plan.row_blocks), rows),
        }

    def _shared_storage(self):
        """The CTA's whole dynamic shared memory. O reuses Q, unless the next row block's may be there already: a warp
        group overwrites only its own rows."""
        plan = self.plan

        def tile(elements):
            return cute.struct.Align[cute.struct.MemRange[plan.element, elements], STAGING_ALIGNMENT]

        v_elements = 0 if plan.kv_shared else plan.v_stage * plan.kv_tile * plan.pv_n_tile
        p_elements = plan.consumers * BLOCK_ROWS * plan.kv_tile if plan.smem_p else 0
        o_elements = plan.row_blocks * BLOCK_ROWS * plan.pv_n_tile if plan.persistent else 0

        @cute.struct
        class Storage:
            q: tile(plan.row_blocks * BLOCK_ROWS * plan.head_dim)
            k: tile(plan.k_stage * plan.kv_tile * plan.k_columns)
            v: tile(v_elements)
            p: tile(p_elements)
            o: tile(o_elements)
            present: cute.struct.MemRange[Int32, PRESENT_BUFFERS * plan.kv_tile // 32 if plan.gather else 0]
            q_barriers: cute.struct.MemRange[Int64, 2]
            k_barriers: cute.struct.MemRange[Int64, 2 * plan.k_stage]
            v_barriers: cute.struct.MemRange[Int64, 0 if plan.kv_shared else 2 * plan.v_stage]

        return Storage

    # ---- device side -----------------------------------------------------------------------------------------------

    @cute.kernel
    def _kernel(self, given: dict, tma: dict, layouts: dict, mmas: tuple):
        plan = self.plan
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for name in tma:
                cpasync.prefetch_descriptor(tma[name][0])

        storage = SmemAllocator().allocate(self._shared_storage())
        smem_q = _tensor(storage.q, layouts["q"])
        q_pipe = make_pipe(plan, storage.q_barriers, 1, BLOCK_ROWS * plan.head_dim * plan.row_blocks, 1)
        k_ring = make_ring(plan, storage.k_barriers, _tensor(storage.k, layouts["k"]), plan.k_stage, plan.k_sub)
        place = None if const_expr(plan.persistent) else own_place(plan)
        v_ring = self._v_ring(storage, layouts["v"], k_ring, place)
        cute.arch.mbarrier_init_fence()
        self._synchronize()

        sequences = Sequences(plan.problem, given)
        sides = (given["left"], given["right"]) if const_expr(plan.problem.mask == "window") else (-1, -1)
        work = SimpleNamespace(
            given=given, tma=tma, layouts=layouts, mmas=mmas, storage=storage, smem_q=smem_q, q_pipe=q_pipe,
            k_ring=k_ring, v_ring=v_ring, sequences=sequences, sides=sides,
        )  # fmt: skip
        if const_expr(not plan.persistent):
            work = self._at(work, place)
        if warp_index < WARPS_PER_GROUP:
            if const_expr(plan.merge == "kernel"):
                # The merge kernel's CTAs may start where there is room, and wait there for the end of this grid.
                cute.arch.griddepcontrol_launch_dependents()
            cute.arch.setmaxregister_decrease(self.plan.producer_registers)
            self._each_block(work, self._produce_gathering if plan.gather else self._produce, warp_index)
            if const_expr(plan.merge == "cluster"):
                self._cluster_output(work).accompany()
        else:
            cute.arch.setmaxregister_increase(self.plan.consumer_registers)
            consumer = warp_index // WARPS_PER_GROUP - 1
            open_turns(plan, consumer)
            self._each_block(work, self._consume, consumer)
            close_turns(plan, consumer)
            if const_expr(plan.persistent):
                await_stores()
        if const_expr(plan.cluster_m > 1):
            # The other CTAs may still write this one's rings or arrive on its barriers.
            self._synchronize()

    def _at(self, work, place):
        """The work at a place: with its tiles."""
        plan = self.plan
        runs = runs_of(plan, work.sequences, place.batch, place.cluster_block, work.sides)
        if const_expr(plan.num_splits > 1):
            runs = part_of(runs, place.split, plan.num_splits)
        return SimpleNamespace(**vars(work), place=place, runs=runs)

    @cute.jit
    def _each_block(self, work, role: cutlass.Constexpr, index):
        """Do a role's part, ``role(work, index, before)``, of each of the CTA's row blocks."""
        if const_expr(not self.plan.persistent):
            role(work, index, Before(0, 0))
        else:
            tiles = Int32(0)
            for i in cutlass.range(rounds(self.plan, work.given), unroll=1):
                here = self._at(work, place_in_round(self.plan, work.given, i))
                role(here, index, Before(i, tiles))
                tiles += here.runs.steps

    def _v_ring(self, storage, layout, k_ring: Ring, place) -> Ring:
        """The V ring; with kv_shared K's, seen as this CTA's columns of V. A persistent CTA has all of them."""
        plan = self.plan
        if const_expr(not plan.kv_shared):
            return make_ring(plan, storage.v_barriers, _tensor(storage.v, layout), plan.v_stage)
        whole = _tensor(storage.k, layout)
        column_slice = 0 if const_expr(plan.persistent) else place.column_slice
        columns = cute.local_tile(whole, (plan.pv_n_tile, plan.kv_tile, plan.v_stage), (column_slice, 0, 0))
        return Ring(k_ring.pipe, columns, plan.v_stage, 1, plan.fills)

    @cute.jit
    def _synchronize(self):
        """Barrier over every thread that can reach this CTA's shared memory."""
        if const_expr(self.plan.cluster_m > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _produce(self, work, warp_index, before):
        """The producer warps: one loads Q and streams K, another streams V."""
        if warp_index == 0:
            load_q(self.plan, work.tma["q"], work.smem_q, work.q_pipe, work.sequences, work.place, before.blocks)
            self._stream("k", work, work.k_ring, before.tiles)
        if const_expr(not self.plan.kv_shared):
            if warp_index == 1:
                self._stream("v", work, work.v_ring, before.tiles)

    def _stream(self, operand: str, work, ring: Ring, tiles):
        """Stream an operand's tiles of each source through its ring."""
        names = (operand, f"{operand}2") if self.plan.two_sources else (operand,)
        streams = [TileStream(self.plan, work.tma[name], ring, work.sequences, work.place, name) for name in names]
        fill_ring(ring, streams, work.runs, tiles)

    @cute.jit
    def _produce_gathering(self, work, warp_index, before):
        """The producer warps where the last source is gathered: all of them gather both of K and V, or half each."""
        if warp_index == 0:
            load_q(self.plan, work.tma["q"], work.smem_q, work.q_pipe, work.sequences, work.place)
        first_of_v = self.plan.gather_threads // WARP_THREADS
        if warp_index < first_of_v:
            self._stream_gathered("k", work, work.k_ring, warp_index == 0)
        if const_expr(not self.plan.kv_shared):
            if warp_index >= first_of_v:
                self._stream_gathered("v", work, work.v_ring, warp_index == first_of_v)

    @cute.jit
    def _stream_gathered(self, operand: cutlass.Constexpr[str], work, ring, leads):
        """Stream an operand's tiles: of source 1, if it isn't the gathered one, by the warp that leads."""
        plan, runs = self.plan, work.runs
        dense, gathered = Int32(0), runs.first
        if const_expr(plan.two_sources):
            dense, gathered = runs.first_steps, runs.second
            if leads:
                stream = TileStream(plan, work.tma[operand], ring, work.sequences, work.place, operand)
                stream.fill(state_at(0, ring.stages), runs.first)
            # The others' first wait must not take an earlier phase for its own.
            cute.arch.barrier(barrier_id=BARRIER_GATHER + (operand == "v"), number_of_threads=plan.gather_threads)
        stream = self._gather_stream(operand, work, ring, dense)
        stream.fill(state_at(dense * ring.parts, ring.stages), gathered)

    def _gather_stream(self, operand: str, work, ring: Ring, first_step) -> GatherStream:
        """The gathered source's K or V."""
        plan, given, place = self.plan, work.given, work.place
        _, token = plan.packing.coordinates(place.first_block, place.kv_head)
        rows = given[f"{operand}2" if plan.two_sources else operand][place.batch, None, place.kv_head, None]
        is_k = operand == "k"
        return GatherStream(
            plan,
            given["indices"][place.batch, token, None],
            rows,
            Int32(0) if is_k else place.column_slice * plan.pv_n_tile,
            ring,
            (work.storage.k if is_k else work.storage.v).data_ptr(),
            self._present(work.storage) if is_k else None,
            first_step,
        )

    def _present(self, storage):
        """Which entries of the last tiles exist, for `ScoreMask`."""
        return storage.present.get_tensor(cute.make_layout((self.plan.kv_tile // 32, PRESENT_BUFFERS)))

    @cute.jit
    def _consume(self, work, index, before):
        """A consumer warp group: its rows' walk, and their results."""
        plan, place = self.plan, work.place
        smem_p = _tensor(work.storage.p, work.layouts["p"]) if const_expr(plan.smem_p) else None
        present = self._present(work.storage) if const_expr(plan.gather) else None
        mask = ScoreMask(plan, work.runs, place.first_block + index % plan.row_blocks, work.sides, present)
        consumer = Consumer(
            plan, work.mmas, work.smem_q, smem_p, work.k_ring, work.v_ring, index, mask, work.given["scale"]
        )
        consumer.attend(work.q_pipe, work.runs, before)
        if const_expr(plan.merge == "cluster"):
            scratch = cute.recast_ptr(work.storage.q.data_ptr(), dtype=Float32)
            self._cluster_output(work).write(consumer, scratch, work.runs.queries)
        elif const_expr(plan.kv_groups > 1):
            # K and V are spent: every tile that was loaded was also waited for, by one of the groups.
            consumer.merge_groups(work.storage.k.data_ptr())
            if consumer.group == 0:
                self._write(work, consumer)
        else:
            self._write(work, consumer)

    def _cluster_output(self, work) -> ClusterOutput:
        return ClusterOutput(self.plan, work.given, work.sequences, work.place)

    @cute.jit
    def _write(self, work, consumer):
        """Write a consumer's results."""
        if const_expr(self.plan.merge == "kernel"):
            PartialOutput(self.plan, work.given, work.sequences, work.place).write(consumer, work.runs.queries)
        else:
            self._write_output(work, consumer)

    @cute.jit
    def _write_output(self, work, consumer):
        """Write O and its statistics; O goes through the row block's own part of Q, or a buffer of its own."""
        layout = work.layouts["o"]
        if const_expr(self.plan.persistent):
            smem_o = _tensor(work.storage.o, layout)[None, None, consumer.row_block]
        else:
            staging = cute.recast_ptr(work.smem_q[None, None, consumer.row_block].iterator, layout.inner)
            smem_o = cute.make_tensor(staging, cute.select(layout.outer, mode=[0, 1]))
        output = Output(self.plan, work.given, work.sequences, work.tma["o"], work.place)
        output.write(consumer, smem_o, work.runs.queries)


def _tensor(storage, layout):
    """A swizzled tensor over a part of the shared storage."""
    return storage.get_tensor(layout.outer, swizzle=layout.inner)
