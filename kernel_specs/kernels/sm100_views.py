"""The same bytes for different eyes: shared memory as TMA writes it and as an MMA reads it, tensor memory by thread.

Every operand tile in shared memory is a row of blocks of 64 columns (128 bytes), each block its rows one after another,
in the 128-byte swizzle. That is what a TMA box of (rows, 64) writes. The K-major operands (Q, K, P) and the MN-major
one (V, whose N is its columns) read the very same bytes, so a tile of K serves as V too; tests check the layouts.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers as sm100

from .sm100_plan import GROUP, HALF_LANES, LANE, MMA_N, SWIZZLE_COLUMNS, Fixed, Plan

# The columns that one tcgen05.ld or .st of a warp moves (32 lanes x 32 columns).
COPY_COLUMNS = 32


def swizzle():
    """The 128-byte swizzle: 16-byte chunks of a row, exchanged by the row's number modulo 8."""
    return cute.make_swizzle(3, 4, 3)


def block_layout(rows: int):
    """(row, column) of a block, for a TMA atom."""
    rows_by_columns = cute.make_layout((rows, SWIZZLE_COLUMNS), stride=(SWIZZLE_COLUMNS, 1))
    return cute.make_composed_layout(swizzle(), 0, rows_by_columns)


def block_tensor(storage, rows: int, columns: int, stages: int, stage_elements: int, box_rows: int | None = None):
    """Shared memory as (row, column in block, block, stage); of each block the first `box_rows` rows, if not all."""
    layout = cute.make_layout(
        (box_rows or rows, SWIZZLE_COLUMNS, columns // SWIZZLE_COLUMNS, stages),
        stride=(SWIZZLE_COLUMNS, 1, rows * SWIZZLE_COLUMNS, stage_elements),
    )
    return storage.get_tensor(layout, swizzle=swizzle())


def chunk_tensor(storage, rows: int, columns: int, stages: int, stage_elements: int):
    """Shared memory as (row, element of a chunk, chunk, stage): a chunk is 8 neighbouring columns, 16 bytes."""
    blocks = columns // SWIZZLE_COLUMNS
    layout = cute.make_layout(
        (rows, 8, (8, blocks), stages),
        stride=(SWIZZLE_COLUMNS, 1, (8, rows * SWIZZLE_COLUMNS), stage_elements),
    )
    return storage.get_tensor(layout, swizzle=swizzle())


def plain_chunks(storage, rows: int, columns: int, stages: int, stage_elements: int):
    """As `chunk_tensor`, the swizzle aside: for whole rows, whose chunks' order does not matter."""
    blocks = columns // SWIZZLE_COLUMNS
    layout = cute.make_layout(
        (rows, 8, (8, blocks), stages),
        stride=(SWIZZLE_COLUMNS, 1, (8, rows * SWIZZLE_COLUMNS), stage_elements),
    )
    return storage.get_tensor(layout)


class Products(Fixed):
    """The two products of a plan as tiled MMAs, and their operands in shared memory."""

    def __init__(self, plan: Plan):
        self.plan = plan
        element = plan.element
        ctas = tcgen05.CtaGroup.TWO if plan.pair else tcgen05.CtaGroup.ONE
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        m, kv_tile, _ = plan.qk_tiler
        p_source = tcgen05.OperandSource.SMEM if plan.smem_p else tcgen05.OperandSource.TMEM
        self.qk = sm100.make_trivial_tiled_mma(
            element, element, k_major, k_major, Float32, ctas, (m, kv_tile // plan.s_products)
        )
        self.pv = sm100.make_trivial_tiled_mma(
            element, element, k_major, mn_major, Float32, ctas, (m, plan.pv_n_tile // plan.o_products), p_source
        )

    def q_layout(self):
        """(MMA, MMA_M, MMA_K, group): all columns of Q, whatever K's stages hold."""
        tile = sm100.make_smem_layout_a(self.qk, (*self.plan.qk_tiler[:2], self.plan.head_dim), self.plan.element, 1)
        return self._staged(tile, cute.make_layout(self.plan.groups, stride=self.plan.q_elements))

    def k_layout(self):
        """(MMA, product, MMA_K, stage)."""
        plan = self.plan
        tile = sm100.make_smem_layout_b(self.qk, plan.qk_tiler, plan.element, 1)
        return self._staged(tile, cute.make_layout(plan.kv_stage, stride=plan.own_keys * plan.k_columns))

    def v_layout(self):
        """(MMA, product, MMA_K, (slice, stage)): a CTA's own columns, which in K's ring are a slice of the stage."""
        plan = self.plan
        tile = sm100.make_smem_layout_b(self.pv, plan.pv_tiler, plan.element, 1)
        slices = plan.slices if plan.kv_shared else 1
        stage = plan.kv_tile * (plan.head_dim if plan.kv_shared else plan.own_columns)
        return self._staged(
            tile, cute.make_layout((slices, plan.kv_stage), stride=(plan.kv_tile * plan.pv_n_tile, stage))
        )

    def p_layout(self):
        """(MMA, MMA_M, MMA_K, stage)."""
        plan = self.plan
        tile = sm100.make_smem_layout_a(self.pv, plan.pv_tiler, plan.element, 1)
        stages = plan.groups * plan.p_stage
        return self._staged(tile, cute.make_layout(stages, stride=plan.m_tile * plan.kv_tile))

    def _staged(self, tile, stages):
        return cute.append(cute.select(tile.outer, mode=[0, 1, 2]), stages)

    def scores(self, tmem_ptr):
        """S as the accumulator of QK: (MMA, product, stage)."""
        plan = self.plan
        layout = self.qk.make_fragment_C(self.qk.partition_shape_C(plan.qk_tiler[:2])).layout
        stages = cute.make_layout(plan.groups * plan.s_stage, stride=plan.s_columns)
        return self._accumulator(tmem_ptr + plan.tmem.s, layout, plan.s_products, stages)

    def outputs(self, tmem_ptr):
        """O as the accumulator of PV: (MMA, product, group)."""
        plan = self.plan
        layout = self.pv.make_fragment_C(self.pv.partition_shape_C(plan.pv_tiler[:2])).layout
        stages = cute.make_layout(plan.groups, stride=plan.o_columns)
        return self._accumulator(tmem_ptr + plan.tmem.o, layout, plan.o_products, stages)

    def _accumulator(self, pointer, layout, count: int, stages):
        """`count` products side by side: in the lanes that M = 64 leaves, or in the next columns of a pair's M = 128,
        which takes half as many columns as its N."""
        products = cute.make_layout(count, stride=MMA_N // 2 if self.plan.pair else HALF_LANES * LANE)
        atom = cute.select(layout, mode=[0])
        return cute.make_tensor(pointer, cute.append(cute.append(atom, products), stages))

    def probabilities(self, tmem_ptr):
        """P in tensor memory as the A operand of PV: (MMA, MMA_M, MMA_K, stage)."""
        plan = self.plan
        tile = sm100.make_smem_layout_a(self.pv, plan.pv_tiler, plan.element, 1)
        fragment = self.pv.make_fragment_A(cute.make_tensor(tmem_ptr, tile.outer))[None, None, None, 0]
        pointer = cute.recast_ptr(tmem_ptr + plan.tmem.p, dtype=fragment.element_type)
        # Two elements to a column: a step of a 16-bit pointer is half a column.
        stages = cute.make_layout(plan.groups * plan.p_stage, stride=2 * plan.tmem.p_stride)
        return cute.make_tensor(pointer, cute.append(fragment.layout, stages))


class ThreadColumns(Fixed):
    """Tensor memory as a thread of a warp group sees it: its lane's 32-bit columns.

    Load and store are tiled over the same tensor, so that a register goes back to the cell from which it came: a load
    and a store of what was loaded change no bit.
    """

    def __init__(self, tmem_ptr, thread):
        self.pointer = tmem_ptr
        self.thread = thread
        load, store = (
            cute.make_copy_atom(op(tcgen05.Repetition(COPY_COLUMNS)), Float32)
            for op in (tcgen05.Ld32x32bOp, tcgen05.St32x32bOp)
        )
        tile = self._tile(0)
        self._load = tcgen05.make_tmem_copy(load, tile)
        self._store = tcgen05.make_tmem_copy(store, tile)
        self._shape = self._load.get_slice(thread).partition_D(cute.make_identity_tensor((GROUP, COPY_COLUMNS))).shape

    def _tile(self, column):
        """The group's lanes x COPY_COLUMNS columns from `column` on."""
        layout = cute.make_layout((GROUP, COPY_COLUMNS), stride=(LANE, 1))
        return cute.make_tensor(self.pointer + column, layout)

    def load(self, column, count: int):
        """The thread's `count` columns from `column` on, as a flat float32 fragment; wait before the use."""
        registers = cute.make_rmem_tensor(count, Float32)
        for i in range(count // COPY_COLUMNS):
            source = self._load.get_slice(self.thread).partition_S(self._tile(column + i * COPY_COLUMNS))
            cute.copy(self._load, source, self._part(registers, i))
        return registers

    def store(self, registers, column):
        """Write a flat 32-bit fragment to the thread's columns from `column` on; fence before others read."""
        for i in range(cute.size(registers) // COPY_COLUMNS):
            target = self._store.get_slice(self.thread).partition_D(self._tile(column + i * COPY_COLUMNS))
            cute.copy(self._store, self._part(registers, i), target)

    def _part(self, registers, i: int):
        return cute.make_tensor(registers.iterator + i * COPY_COLUMNS, cute.make_layout(self._shape))
