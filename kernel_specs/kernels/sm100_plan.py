"""What a variant of the Blackwell attention kernel is, before anything runs: tiles, stages, columns, warps, registers.

The arithmetic that a search needs too (tensor memory, shared memory) is in fmha_sm100_space.py.
"""

from dataclasses import dataclass
from functools import cached_property

from tunekit.model import Values

from . import fmha_sm100_space as space
from .attention.arguments import element_type
from .attention.mask import Mask
from .attention.packing import Packing

WARP = 32
GROUP = 128  # threads of a warp group: one for each lane of tensor memory
SWIZZLE_COLUMNS = 64  # 16-bit elements of a row that a 128-byte swizzle holds
LANE = 1 << 16  # a lane of tensor memory, as a step of a float32 pointer; a column is a step of 1
MMA_N = 256  # the most columns of a product
HALF_LANES = 16  # lanes of an accumulator of 64 rows in each warp's 32; its other half lies in the others


class Fixed:
    """Whose attributes don't change while a kernel runs: loops and branches of the trace need not carry it along."""

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


@dataclass(frozen=True)
class Plan(Fixed):
    """One variant. `problem`: the static axes; `tunables`: the knobs; `pair`: whether two CTAs multiply as one."""

    problem: Values
    tunables: Values
    pair: bool = False

    @cached_property
    def values(self) -> Values:
        """Problem and tunables together, as the space's arithmetic takes them."""
        return Values({**self.problem, **self.tunables})

    # ---- the problem ----------------------------------------------------------------------------

    @property
    def element(self):
        """The type of Q, K, V, P and O."""
        return element_type(self.problem)

    @property
    def head_dim(self) -> int:
        """Columns of Q and K."""
        return self.problem.head_dim

    @cached_property
    def mask(self) -> Mask:
        """Which keys of source 1 a query sees."""
        return Mask(self.problem.mask, self.kv_tile)

    @property
    def dense(self) -> bool:
        """Whether source 1 is read in whole tiles: not if it is the gathered one."""
        return not (self.problem.gather and self.problem.sources == 1)

    @property
    def gathered(self) -> str:
        """The suffix of the gathered source's arguments: "" for k and v, "2" for k2 and v2."""
        return "2" if self.problem.sources == 2 else ""

    @property
    def gathered_arguments(self) -> tuple[str, ...]:
        """The arguments that are read through lists."""
        if not self.problem.gather:
            return ()
        return tuple(name + self.gathered for name in (("k",) if self.kv_shared else ("k", "v")))

    @property
    def ragged(self) -> bool:
        """Whether rows past a source's last key may hold anything at all (TMA fills those past a tensor with 0)."""
        return bool(self.problem.has_lengths or self.problem.varlen)

    @property
    def partial(self) -> bool:
        """Whether CTAs leave partial results in the workspace for a merge."""
        return self.splits > 1

    # ---- tiles ----------------------------------------------------------------------------------

    @property
    def m_tile(self) -> int:
        """Query rows of a softmax group."""
        return self.tunables.m_tile

    @property
    def ctas(self) -> int:
        """CTAs whose rows, and whose halves of K's keys and V's columns, are one product's."""
        return 2 if self.pair else 1

    @property
    def mma_m(self) -> int:
        """M of both products."""
        return self.ctas * self.m_tile

    @property
    def groups(self) -> int:
        """Softmax groups of a CTA, each with its own rows, scores and output, over the same keys."""
        return self.tunables.row_groups

    @property
    def halves(self) -> int:
        """Lanes that share a row, each with a half of its columns: 2 at 64 rows a CTA."""
        return space.halves(self.values)

    @property
    def kv_tile(self) -> int:
        """Keys of a tile: N of the QK product, K of the PV product."""
        return self.tunables.kv_tile

    @property
    def pv_n_tile(self) -> int:
        """Columns of V and O that a CTA owns."""
        return self.tunables.pv_n_tile

    @property
    def own_keys(self) -> int:
        """Keys of a tile of K that a CTA holds: those of the pair are the tile."""
        return self.kv_tile // self.ctas

    @property
    def own_columns(self) -> int:
        """Columns of V that a CTA holds: those of the pair are `pv_n_tile`."""
        return self.pv_n_tile // self.ctas

    @property
    def s_products(self) -> int:
        """Products that cover the keys of a tile, side by side."""
        return 1 if self.pair else self.halves

    @property
    def o_products(self) -> int:
        """Products that cover the columns of O, side by side: one has at most 256 columns."""
        return self.pv_n_tile // MMA_N if self.pair else self.halves

    @property
    def slices(self) -> int:
        """CTAs that share the columns of O, each with its own QK product and softmax."""
        return self.problem.head_dim_v // self.pv_n_tile

    @property
    def splits(self) -> int:
        """CTAs that share the keys."""
        return self.tunables.num_splits

    @cached_property
    def packing(self) -> Packing:
        """How query heads and positions share the rows of a group."""
        return Packing(self.m_tile, self.problem.heads // self.problem.kv_heads)

    @property
    def positions(self) -> int:
        """Query positions that a group owns: one with a list for each token, so that its rows share the list."""
        return 1 if self.problem.gather else self.packing.positions

    @property
    def rows(self) -> int:
        """Rows that a group owns: the first ones of its tile."""
        return self.packing.heads * self.positions

    @property
    def o_tile(self) -> tuple[int, int]:
        """The rows that a group owns as (heads, positions): a box of O."""
        return self.packing.heads, self.positions

    @property
    def tma_o(self) -> bool:
        """Whether O leaves through shared memory by TMA."""
        return self.tunables.tma_o

    @property
    def mma_k(self) -> int:
        """K of one tcgen05.mma of 16-bit operands."""
        return 16

    @property
    def k_sub(self) -> int:
        """Ring stages that a tile of K takes, each some of its columns."""
        return self.tunables.k_sub

    @property
    def k_columns(self) -> int:
        """Columns of K in a stage of its ring."""
        return self.head_dim // self.k_sub

    @property
    def kv_stage(self) -> int:
        """Stages of K's ring, and of V's."""
        return self.tunables.kv_stage

    @property
    def s_stage(self) -> int:
        """Score tiles of a group in flight."""
        return self.tunables.s_stage

    @property
    def smem_p(self) -> bool:
        """Whether the PV product reads P from shared memory."""
        return self.tunables.smem_p

    @property
    def kv_shared(self) -> bool:
        """Whether V is the first columns of K's tile, in one ring: not in a pair, of which each CTA multiplies by half
        of K's keys, but by all keys of V."""
        return self.problem.kv_shared and not self.pair

    @property
    def look_ahead(self) -> bool:
        """Whether QK(i + 1) is issued before PV(i): not where both would need the one buffer."""
        return not (self.kv_shared and self.kv_stage == 1)

    @property
    def qk_tiler(self) -> tuple[int, int, int]:
        """M, N, K of a QK product of one stage."""
        return self.mma_m, self.kv_tile, self.k_columns

    @property
    def pv_tiler(self) -> tuple[int, int, int]:
        """M, N, K of a PV product."""
        return self.mma_m, self.pv_n_tile, self.kv_tile

    @property
    def s_columns(self) -> int:
        """Columns of scores that a softmax thread holds."""
        return self.kv_tile // self.halves

    @property
    def o_columns(self) -> int:
        """Columns of output that a correction thread holds."""
        return self.pv_n_tile // self.halves

    @property
    def q_elements(self) -> int:
        """Shared memory of a group's Q, which is that of its O at the end."""
        return self.m_tile * max(self.head_dim, self.pv_n_tile)

    # ---- tensor memory --------------------------------------------------------------------------

    @cached_property
    def tmem(self) -> space.Columns:
        """Where scores, probabilities and outputs lie, in columns."""
        return space.columns(self.values)

    @property
    def tmem_columns(self) -> int:
        """The columns that are allocated."""
        return space.tmem_columns(self.values)

    @property
    def p_stage(self) -> int:
        """Probability tiles of a group in flight."""
        return self.tmem.p_stage

    # ---- warps ----------------------------------------------------------------------------------

    @property
    def softmax_warps(self) -> int:
        """Warps 0 .. are softmax, GROUP threads a group."""
        return 4 * self.groups

    @property
    def correction_warp(self) -> int:
        """The first of the four correction warps."""
        return self.softmax_warps

    @property
    def mma_warp(self) -> int:
        """The one issuer of tcgen05.mma, first of the four issue warps."""
        return self.correction_warp + 4

    @property
    def load_warp(self) -> int:
        """The one issuer of TMA loads."""
        return self.mma_warp + 1

    @property
    def clear_warp(self) -> int:
        """The first of two warps that clear the rows past a source's last key."""
        return self.mma_warp + 2

    @property
    def clear_threads(self) -> int:
        """Threads that clear."""
        return 2 * WARP

    @property
    def gather_warp(self) -> int:
        """The first of four warps that copy listed rows; without a list there are none."""
        return self.mma_warp + 4

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return space.warp_groups(self.values) * GROUP

    @property
    def launch_registers(self) -> int:
        """Registers that every thread has at launch."""
        return 65536 // self.threads // 8 * 8

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """Registers of a softmax, a correction, an issue and a gathering thread."""
        return space.registers(self.values)
