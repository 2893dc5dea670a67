"""Attention forward at head_dim 512 for Hopper (sm_90a), in CuTeDSL: two warp groups share 64 rows by O's columns.

O of 64 rows and 512 columns is 256 registers a thread for one warp group, which is too many, and 128 for two. So each
of the two consumer warp groups owns 256 columns of O and V. What they share is S = Q K^T and its softmax:

- Warp group 0 has the even tiles, warp group 1 the odd ones. The tile's *owner* computes its scores with all of Q,
  takes them through the online softmax, multiplies P, from registers, with its own columns of V, and leaves P and the
  rows' new maxima in shared memory for the other one, the *taker*, which rescales its O and multiplies P with its own.
- Both see all tiles in order, so both hold the same running maxima, and one barrier a tile is enough: it tells that a P
  is ready, and with it, that its owner has done with the P that it had taken before.
- Warp group 0 owns a tile, then takes the next. Warp group 1 starts its own scores first, and takes the tile before
  under its own softmax. So the tensor cores have one's products to do while the other is in its softmax.

The producer warp group streams K and V through one ring of *parts*: ``kv_tile`` keys times ``part_columns`` columns.
With ``kv_shared`` a tile is loaded once: V is a view of K's bytes, columns first. Otherwise K runs a tile ahead of V.
``prefetch``: tiles that are fetched into L2 before their turn, by the row blocks that read them in turns.
``rescale_log2``: as in fmha_sm90_space.py; where O is not rescaled at every step, there are registers to keep a warp
group's softmax under its own product.

The parts of the kernel: sm90_wide_plan.py, what is static; sm90_ring.py, the ring; sm90_wide_load.py, the producer;
sm90_streams.py, what it loads by TMA; sm90_wide_consumer.py, the consumers; sm90_tails.py, what lies behind the last
key. The walk over both sources' tiles, masks, softmax and output are those of fmha_sm90.py, to which a warp group's
half of O is what a CTA's column slice is there.
"""

from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import SmemAllocator

from tunekit.model import Values

from .attention.arguments import by_name
from .attention.sequences import Sequences, extent
from .sm90_gather import PRESENT_BUFFERS
from .sm90_load import load_q, make_pipe
from .sm90_output import Output
from .sm90_plan import BLOCK_ROWS, WARP_GROUP_THREADS, WARPS_PER_GROUP
from .sm90_ring import BARRIERS_PER_SLOT, PartRing
from .sm90_runs import part_of, runs_of
from .sm90_softmax import ScoreMask
from .sm90_split import ClusterOutput, PartialOutput, make_cluster_merge, make_combine
from .sm90_wide_consumer import WideConsumer
from .sm90_wide_load import KeyLoader, tma_operands
from .sm90_wide_plan import CONSUMERS, HEAD_DIM, OWN_COLUMNS, WidePlan

STAGING_ALIGNMENT = 1024  # bytes; of swizzled tiles


def make_kernel(problem: Values, tunables: Values) -> "FmhaSm90Wide":
    """The kernel object for ``cute.compile``; its arguments are those of attention/arguments.py."""
    return FmhaSm90Wide(WidePlan(problem, tunables))


class FmhaSm90Wide:
    """One variant of the kernel."""

    def __init__(self, plan: WidePlan):
        self.plan = plan

    # ---- host side -------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Build the TMA views and launch one CTA per row block, split, KV head and sequence."""
        plan = self.plan
        given = by_name(plan.problem, arguments)
        stream = given.pop("stream")
        layouts = self._smem_layouts()
        # Tracing a kernel replaces what its dict holds.
        to_combine = [given.get(name) for name in ("workspace", "o", "lse", "row_max", "sink", "scale")]
        starts = given.get("cu_seqlens_q")
        self._kernel(given, tma_operands(plan, given, layouts), layouts).launch(
            grid=self._grid(given),
            block=(plan.threads, 1, 1),
            cluster=(plan.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )
        if const_expr(plan.merge == "kernel"):
            make_combine(plan).launch(*to_combine, stream, starts)

    def _grid(self, given: dict):
        """(CTAs of the row blocks and splits, KV heads, sequences)."""
        plan = self.plan
        queries, batch = extent(plan.problem, given)
        blocks = cute.round_up(plan.packing.blocks(queries), plan.cluster_m)
        return blocks * plan.num_splits, plan.problem.kv_heads, batch

    def _smem_layouts(self) -> dict:
        """Swizzled shared-memory layouts by name: q [rows, columns, 1]; k [keys, columns, slot] and v [columns, keys,
        slot], two views of the ring; p [rows, keys, owner]; o [rows, columns, warp group]."""
        plan = self.plan
        in_order = (0, 1, 2)
        p_atom = self._atom("K", plan.kv_tile)
        return {
            "q": cute.tile_to_shape(self._atom("K"), (BLOCK_ROWS, HEAD_DIM, 1), in_order),
            "k": cute.tile_to_shape(self._atom("K"), (plan.kv_tile, plan.part_columns, plan.slots), in_order),
            "v": cute.tile_to_shape(self._atom("MN"), (plan.part_columns, plan.kv_tile, plan.slots), (1, 0, 2)),
            "p": cute.tile_to_shape(p_atom, (BLOCK_ROWS, plan.kv_tile, CONSUMERS), in_order),
            "o": cute.tile_to_shape(self._atom("K"), (BLOCK_ROWS, OWN_COLUMNS, CONSUMERS), in_order),
        }

    def _atom(self, major: str, elements: int = 64):
        """The swizzled atom of ``elements`` in a row: 128 bytes at most."""
        width = min(128, elements * self.plan.element.width // 8)
        kind = getattr(warpgroup.SmemLayoutAtomKind, f"{major}_SW{width}")
        return warpgroup.make_smem_layout_atom(kind, self.plan.element)

    def _shared_storage(self):
        """The CTA's whole dynamic shared memory. O reuses Q."""
        plan = self.plan

        def tile(elements):
            return cute.struct.Align[cute.struct.MemRange[plan.element, elements], STAGING_ALIGNMENT]

        @cute.struct
        class Storage:
            q: tile(BLOCK_ROWS * HEAD_DIM)
            ring: tile(plan.slots * plan.kv_tile * plan.part_columns)
            p: tile(CONSUMERS * BLOCK_ROWS * plan.kv_tile)
            maxima: cute.struct.MemRange[Float32, CONSUMERS * BLOCK_ROWS]
            present: cute.struct.MemRange[Int32, PRESENT_BUFFERS * plan.kv_tile // 32 if plan.gather else 0]
            sums: cute.struct.MemRange[Float32, CONSUMERS * 2 * WARP_GROUP_THREADS]
            q_barriers: cute.struct.MemRange[Int64, 2]
            ring_barriers: cute.struct.MemRange[Int64, BARRIERS_PER_SLOT * plan.slots]

        return Storage

    # ---- device side -----------------------------------------------------------------------------------------------

    @cute.kernel
    def _kernel(self, given: dict, tma: dict, layouts: dict):
        plan = self.plan
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for name in tma:
                cpasync.prefetch_descriptor(tma[name][0])

        place = self._place()
        storage = SmemAllocator().allocate(self._shared_storage())
        smem = self._shared_tensors(storage, layouts)
        q_pipe = make_pipe(plan, storage.q_barriers, 1, BLOCK_ROWS * HEAD_DIM, 1)
        ring = PartRing(
            storage.ring_barriers.data_ptr(),
            slots=plan.slots,
            bytes_filled=plan.part_bytes,
            fills=plan.fills,
            sharers=plan.cluster_m,
            first_rank=place.share_rank,
            rank_step=plan.cluster_splits,
        )
        if warp_index == 0:
            with cute.arch.elect_one():
                ring.initialise()
        cute.arch.mbarrier_init_fence()
        sequences = Sequences(plan.problem, given)
        if warp_index == 0:
            # Nobody but this warp has to do with Q's barrier before its load ends, so it need not wait for the others.
            load_q(plan, tma["q"], smem.q, q_pipe, sequences, place)
        self._synchronize()

        sides = (given["left"], given["right"]) if const_expr(plan.problem.mask == "window") else (-1, -1)
        runs = runs_of(plan, sequences, place.batch, place.cluster_block, sides)
        if const_expr(plan.num_splits > 1):
            runs = part_of(runs, place.split, plan.num_splits)
        work = SimpleNamespace(
            given=given, tma=tma, storage=storage, smem=smem, q_pipe=q_pipe, ring=ring, sequences=sequences,
            place=place, sides=sides, runs=runs,
        )  # fmt: skip
        if warp_index < WARPS_PER_GROUP:
            if const_expr(plan.merge == "kernel"):
                # The merge kernel's CTAs may start where there is room, and wait there for the end of this grid.
                cute.arch.griddepcontrol_launch_dependents()
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            KeyLoader(plan, tma, given, smem, ring, sequences, place).run(runs, warp_index)
            if const_expr(plan.merge == "cluster"):
                ClusterOutput(plan, given, sequences, place).accompany()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            if warp_index < 2 * WARPS_PER_GROUP:
                self._consume(work, 0)
            else:
                self._consume(work, 1)
        if const_expr(plan.cluster_m > 1):
            # The other CTAs may still write this one's ring or arrive on its barriers.
            self._synchronize()

    def _place(self) -> SimpleNamespace:
        """Where a CTA works: batch, kv_head, split; its row block and its cluster's first one; its rank among the CTAs
        that share its tiles, the first cluster rank of those; the first cluster rank of those that merge with it."""
        plan = self.plan
        x, kv_head, batch = cute.arch.block_idx()
        if const_expr(plan.merge == "kernel"):
            split = x // plan.cluster_m % plan.num_splits
            block = x // (plan.cluster_m * plan.num_splits) * plan.cluster_m + x % plan.cluster_m
        else:
            split, block = x % plan.num_splits, x // plan.num_splits
        rank = block % plan.cluster_m
        return SimpleNamespace(
            batch=batch,
            kv_head=kv_head,
            split=split,
            first_block=block,
            cluster_block=block - rank,
            rank=rank,
            share_rank=split if const_expr(plan.merge == "cluster") else Int32(0),
            first_rank=rank * plan.cluster_splits,
        )

    def _shared_tensors(self, storage, layouts) -> SimpleNamespace:
        """Views of the shared memory, by name."""
        parts = {"q": storage.q, "k": storage.ring, "v": storage.ring, "p": storage.p, "o": storage.q}
        smem = SimpleNamespace(
            **{name: part.get_tensor(layouts[name].outer, swizzle=layouts[name].inner) for name, part in parts.items()}
        )
        smem.maxima = storage.maxima.get_tensor(cute.make_layout((BLOCK_ROWS, CONSUMERS)))
        smem.slots = storage.ring.data_ptr()
        if const_expr(self.plan.gather):
            smem.present = storage.present.get_tensor(cute.make_layout((self.plan.kv_tile // 32, PRESENT_BUFFERS)))
        smem.sums = storage.sums.get_tensor(cute.make_layout((2, WARP_GROUP_THREADS, CONSUMERS)))
        return smem

    @cute.jit
    def _synchronize(self):
        """Barrier over every thread that can reach this CTA's shared memory."""
        if const_expr(self.plan.cluster_m > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _consume(self, work, index: int):
        """A consumer warp group: its walk, and its columns of O."""
        plan, place = self.plan, work.place
        present = work.smem.present if const_expr(plan.gather) else None
        mask = ScoreMask(plan, work.runs, place.first_block, work.sides, present)
        consumer = WideConsumer(plan, index, work.smem, work.ring, mask, work.runs, work.given["scale"])
        work.q_pipe.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
        consumer.attend()
        consumer.add_sums()
        self._write(work, consumer)

    @cute.jit
    def _write(self, work, consumer):
        """Write a consumer's columns, or what becomes them."""
        plan, queries, index = self.plan, work.runs.queries, consumer.index
        place = SimpleNamespace(**vars(work.place), column_slice=index)
        if const_expr(plan.merge == "cluster"):
            scratch = cute.recast_ptr(work.storage.q.data_ptr(), dtype=Float32)
            own = scratch + index * make_cluster_merge(plan).region_words
            ClusterOutput(plan, work.given, work.sequences, place).write(consumer, own, queries)
        elif const_expr(plan.merge == "kernel"):
            PartialOutput(plan, work.given, work.sequences, place).write(consumer, queries)
        else:
            output = Output(plan, work.given, work.sequences, work.tma["o"], place)
            output.write(consumer, work.smem.o[None, None, index], queries)
