"""Attention forward at head_dim 512 for Hopper (sm_90a), in CuTeDSL: two CTAs share 64 rows by O's columns.

O of 64 rows and 512 columns is 256 registers a thread for one warp group, 128 for two. fmha_sm90_wide.py has both in
one CTA; here each of a cluster's two CTAs has one, and half of the scores to compute:

- Of each pair of tiles, CTA 0 *owns* the first and CTA 1 the second. The owner's *scoring* warp group computes
  S = Q K^T of the whole tile and takes it through a softmax of its own, with Q in registers.
- It hands P to the *multiplying* warp groups of both CTAs, with where the rows' exponents start from: whole numbers.
- These take P of all tiles in order, bring P and O to the same start, which multiplies them by powers of two, and add P
  times their own 256 columns of V.

So a row block's keys are shared by two SMs without partial results to merge; the tensor cores have one warp group's
products while the other is in its softmax; and as Q leaves shared memory at once, all of that is for K and V: six parts
of 64 keys by 256 columns, in two rings. With ``kv_shared`` a CTA loads its own tiles whole, and its columns of the
other's.

``key_slots``: of the six parts, those of what only scores need; the others are for V. ``prefetch``: pairs of tiles that
are fetched into L2 before their turn. ``rescale_log2``: as in fmha_sm90_space.py.

The parts of the kernel: sm90_pair_plan.py, what is static and the rings' order; sm90_ring.py, a ring;
sm90_pair_load.py, the producers; sm90_streams.py, what they load; sm90_pair_scores.py and sm90_pair_values.py, the two
warp groups; sm90_pair_messages.py, what they hand over.
"""

from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import SmemAllocator

from tunekit.model import Values

from .attention.arguments import by_name
from .attention.sequences import Sequences, extent
from .fmha_sm90_pair_space import BARRIERS, KV_TILE, OWN_COLUMNS, SLOTS
from .sm90_output import Output
from .sm90_pair_load import PairLoader, tma_operands
from .sm90_pair_messages import END_WORDS, P_WORDS, START_WORDS, Messages
from .sm90_pair_plan import CTAS, PairPlan
from .sm90_pair_scores import ScoreGroup
from .sm90_pair_values import ValueGroup
from .sm90_plan import BLOCK_ROWS, WARP_GROUP_THREADS, WARPS_PER_GROUP
from .sm90_ring import BARRIERS_PER_SLOT, PartRing
from .sm90_runs import runs_of
from .sm90_softmax import ScoreMask

STAGING_ALIGNMENT = 1024  # bytes; of swizzled tiles
VECTOR_ALIGNMENT = 16


def make_kernel(problem: Values, tunables: Values) -> "FmhaSm90Pair":
    """The kernel object for ``cute.compile``; its arguments are those of attention/arguments.py."""
    return FmhaSm90Pair(PairPlan(problem, tunables))


class FmhaSm90Pair:
    """One variant of the kernel."""

    def __init__(self, plan: PairPlan):
        self.plan = plan

    # ---- host side -------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *arguments):
        """Build the TMA views and launch two CTAs per row block, KV head and sequence."""
        plan = self.plan
        given = by_name(plan.problem, arguments)
        stream = given.pop("stream")
        layouts = self._smem_layouts()
        self._kernel(given, tma_operands(plan, given, layouts), layouts).launch(
            grid=self._grid(given),
            block=(plan.threads, 1, 1),
            cluster=(CTAS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    def _grid(self, given: dict):
        """(CTAs of the row blocks, KV heads, sequences)."""
        queries, batch = extent(self.plan.problem, given)
        return self.plan.packing.blocks(queries) * CTAS, self.plan.problem.kv_heads, batch

    def _smem_layouts(self) -> dict:
        """Swizzled shared-memory layouts by name: keys, values [rows, columns, slot]; v [columns, rows, slot], another
        view of values; o [rows, columns, 1]."""
        plan, in_order = self.plan, (0, 1, 2)
        return {
            "keys": cute.tile_to_shape(self._atom("K"), (KV_TILE, OWN_COLUMNS, plan.key_slots), in_order),
            "values": cute.tile_to_shape(self._atom("K"), (KV_TILE, OWN_COLUMNS, plan.value_slots), in_order),
            "v": cute.tile_to_shape(self._atom("MN"), (OWN_COLUMNS, KV_TILE, plan.value_slots), (1, 0, 2)),
            "o": cute.tile_to_shape(self._atom("K"), (BLOCK_ROWS, OWN_COLUMNS, 1), in_order),
        }

    def _atom(self, major: str):
        """The swizzled atom of 128 bytes in a row."""
        kind = getattr(warpgroup.SmemLayoutAtomKind, f"{major}_SW128")
        return warpgroup.make_smem_layout_atom(kind, self.plan.element)

    def _shared_storage(self):
        """The CTA's whole dynamic shared memory. O reuses the values'."""
        plan = self.plan

        def words(count):
            return cute.struct.Align[cute.struct.MemRange[Int32, count], VECTOR_ALIGNMENT]

        def parts(count):
            elements = cute.struct.MemRange[plan.element, count * KV_TILE * OWN_COLUMNS]
            return cute.struct.Align[elements, STAGING_ALIGNMENT]

        @cute.struct
        class Storage:
            keys: parts(plan.key_slots)
            values: parts(plan.value_slots)
            p: words(P_WORDS)
            ends: words(END_WORDS)
            starts: words(START_WORDS)
            barriers: cute.struct.MemRange[Int64, BARRIERS]

        return Storage

    # ---- device side -----------------------------------------------------------------------------------------------

    @cute.kernel
    def _kernel(self, given: dict, tma: dict, layouts: dict):
        plan = self.plan
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for name in tma:
                cpasync.prefetch_descriptor(tma[name][0])

        x, kv_head, batch = cute.arch.block_idx()
        place = SimpleNamespace(batch=batch, kv_head=kv_head, first_block=x // CTAS, column_slice=x % CTAS)
        storage = SmemAllocator().allocate(self._shared_storage())
        of = {"keys": storage.keys, "values": storage.values, "v": storage.values, "o": storage.values}
        smem = SimpleNamespace(
            **{name: of[name].get_tensor(layouts[name].outer, swizzle=layouts[name].inner) for name in of}
        )
        barriers = storage.barriers.data_ptr()
        keys = PartRing(barriers, slots=plan.key_slots, bytes_filled=plan.part_bytes)
        values = PartRing(
            barriers + BARRIERS_PER_SLOT * plan.key_slots,
            slots=plan.value_slots,
            bytes_filled=plan.part_bytes,
            releases=plan.value_releases,
        )
        messages = Messages(
            storage.p.data_ptr(),
            storage.starts.data_ptr(),
            storage.ends.data_ptr(),
            barriers + BARRIERS_PER_SLOT * SLOTS,
            place.column_slice,
            cute.arch.thread_idx()[0] % WARP_GROUP_THREADS,
        )
        if warp_index == 0:
            with cute.arch.elect_one():
                keys.initialise()
                values.initialise()
                messages.initialise()
        cute.arch.mbarrier_init_fence()
        # A cluster's barriers are there once all have arrived here. Loads are for one CTA, and need not wait for it.
        cute.arch.cluster_arrive()
        cute.arch.sync_threads()

        sequences = Sequences(plan.problem, given)
        sides = (given["left"], given["right"]) if const_expr(plan.problem.mask == "window") else (-1, -1)
        runs = runs_of(plan, sequences, place.batch, place.first_block, sides)
        if warp_index < WARPS_PER_GROUP:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp_index == 0:
                PairLoader(plan, tma, smem.keys, keys, sequences, place).load_keys(runs)
            elif warp_index == 1:
                PairLoader(plan, tma, smem.values, values, sequences, place).load_values(runs)
            cute.arch.cluster_wait()
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            cute.arch.cluster_wait()
            rank, scale = place.column_slice, given["scale"]
            if warp_index < 2 * WARPS_PER_GROUP:
                mask = ScoreMask(plan, runs, place.first_block, sides)
                ScoreGroup(plan, rank, smem, keys, values, messages, mask, runs, scale).attend()
            else:
                group = ValueGroup(plan, rank, smem, values, messages, runs, scale)
                group.attend()
                Output(plan, given, sequences, tma["o"], place).write(group, smem.o[None, None, 0], runs.queries)
        # The other CTA may still write to this one's shared memory or arrive on its barriers.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
