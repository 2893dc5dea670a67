"""What is static about one variant of the Hopper attention kernel: sizes, rings, roles and which cases exist at all.

Plain arithmetic over the problem and the tunables. Every part of the kernel is given the plan, so that a case that a
problem cannot have (rows without keys, unclean tails, a second source) costs no instruction.
"""

import math

from cutlass import BFloat16, Float16

from tunekit.model import Values

from .attention.mask import Mask
from .attention.packing import Packing

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
BLOCK_ROWS = 64  # rows of one wgmma, and of one consumer warp group
WARP_THREADS = 32
WARPS_PER_GROUP = 4
WARP_GROUP_THREADS = 128
VECTOR_ELEMENTS = 8  # 16 bytes
ELEMENT_TYPES = {"bfloat16": BFloat16, "float16": Float16}
# setmaxnreg per (consumer warp groups, CTAs on one SM): (consumer, producer).
REGISTERS = {(1, 1): (248, 24), (1, 2): (232, 24), (2, 1): (240, 24), (3, 1): (160, 32)}
GATHERING_REGISTERS = {(1, 1): (240, 40), (1, 2): (216, 40), (2, 1): (232, 40)}  # addresses take more
# Columns of K and V that heads side by side may have together: those of 32 MiB at 8192 keys, of an L2 of 50 MB.
ABREAST_COLUMNS = 2048
# Named barriers; 0 is the CTA's own.
BARRIER_WARP_GROUP = 1  # + consumer warp group: its 128 threads
BARRIER_TURN = 4  # + consumer warp group: its turn to issue wgmma
BARRIER_MEET = 7  # all consumer warp groups
BARRIER_GATHER = 8  # + 0 for K, 1 for V: the producer threads that gather it


class Plan:
    """One variant. `problem`: the static axes of kernel_specs/fmha.py; `tunables`: those of fmha_sm90_space.py."""

    def __init__(self, problem: Values, tunables: Values):
        p, t = problem, tunables
        if t.m_tile not in (64, 128, 192):
            raise ValueError(f"m_tile {t.m_tile} is not 64, 128 or 192")
        if p.head_dim_v % t.pv_n_tile:
            raise ValueError(f"head_dim_v {p.head_dim_v} is not a multiple of pv_n_tile {t.pv_n_tile}")
        self.problem, self.tunables = p, t
        self.element = ELEMENT_TYPES[p.dtype]

        # Tiles: m_tile rows by pv_n_tile columns of O a CTA, kv_tile keys a step.
        self.head_dim = p.head_dim
        self.pv_n_tile = t.pv_n_tile
        self.kv_tile = t.kv_tile
        self.slices = p.head_dim_v // t.pv_n_tile
        self.row_blocks = t.m_tile // BLOCK_ROWS
        self.packing = Packing(BLOCK_ROWS, p.heads // p.kv_heads)
        self.mask = Mask(p.mask, t.kv_tile)

        # Rings. A K stage holds 1 / k_sub of a tile's columns; kv_shared: V is a view of K's stages.
        self.kv_shared = p.kv_shared
        self.k_sub = t.k_sub
        self.k_columns = p.head_dim // t.k_sub
        self.k_stage = t.kv_stage * t.k_sub
        self.v_stage = t.kv_stage
        self.cluster_m = t.cluster_m
        self.smem_p = t.smem_p

        # Roles: one producer warp group, then the consumers; kv_groups of them share a row block's tiles.
        self.kv_groups = t.kv_groups
        self.consumers = self.row_blocks * t.kv_groups
        self.threads = WARP_GROUP_THREADS * (1 + self.consumers)
        self.ctas_per_sm = t.ctas_per_sm
        registers = GATHERING_REGISTERS if p.gather else REGISTERS
        self.consumer_registers, self.producer_registers = registers[self.consumers, t.ctas_per_sm]
        # Warp groups take turns, so that one's softmax runs under another's matrix products.
        self.take_turns = self.row_blocks > 1 and p.head_dim <= 128
        # Rescaling a wide O costs as much as the softmax, so do it while the tensor cores run the next S. And where it
        # may be skipped, the branch around it then no longer parts the exponentials from what rounds them: the compiler
        # fills the wait for one with the other. A single warp group loses by it, for its PV product then starts later,
        # and so does an O of 64 columns under a causal mask. (H200, s 8192, 2026-11-29: head_dim 256, m_tile 128, 668
        # -> 721 TFLOP/s; the best by ncu's cycles, 2026-11-30: head_dim 128 2.58 M -> 2.42 M, causal 1.31 M -> 1.25 M,
        # head_dim 64 causal 1.81 M -> 1.87 M. Decode at head_dim 512, m_tile 64, batch 32, s_k 4096: 96.4 -> 99.6 us.)
        self.rescale_late = t.pv_n_tile >= 128 and self.row_blocks > 1
        self.rescale_log2 = t.rescale_log2

        # The last source may be gathered: by half of the producer warp group for each of K and V, or all for both. A
        # ring's stage is full after `fills` arrivals: one of TMA, or those of sm90_gather.
        self.gather = p.gather
        self.gather_threads = WARP_GROUP_THREADS if p.kv_shared else WARP_GROUP_THREADS // 2
        self.fills = self.gather_threads + 1 if p.gather else 1

        # Splits of the KV tiles over CTAs, and how their results meet (sm90_split).
        self.num_splits, self.merge = t.get("num_splits", 1), t.get("merge", "none")
        self.compact_merge = False
        self.cluster = self.num_splits if self.merge == "cluster" else t.cluster_m

        # Cases.
        self.two_sources = p.sources == 2
        # The later a row, the more keys it sees.
        self.longest_last = p.mask in ("causal", "causal_top_left")
        # KV heads whose equally long rows run side by side (sm90_schedule). (Counted in tiles of KV, s 8192 on 132 SMs:
        # the last CTA ends at 1.11 of the mean at head_dim 256 with one head at a time, at 1.002 with four.)
        self.heads_abreast = self._heads_abreast() if self.longest_last else 1
        # One CTA an SM that does row blocks one after the other (sm90_schedule).
        self.persistent = t.get("schedule", "static") == "persistent"
        # A row, or a whole CTA, may see no key: in a tile or at all.
        self.blind_rows = self.mask.by_position or p.has_lengths or p.varlen or p.gather
        # A CTA may have no tile at all.
        self.may_idle = self.blind_rows or self.num_splits > 1
        # What lies behind a sequence's last key is its allocation's, its page's or its neighbour's: perhaps no number.
        # (Behind the tensor's own end TMA reads zeros.)
        self.unclean_tails = p.has_lengths or p.varlen or p.page > 0
        # Blocks may reach past their sequence into another one's rows of O.
        self.ragged_rows = p.varlen
        self.writes_lse = p.return_lse or not p.normalize

    def _heads_abreast(self) -> int:
        """The most KV heads, in whole sections of them, whose K and V together have ABREAST_COLUMNS at most."""
        p = self.problem
        columns = p.head_dim if p.kv_shared else p.head_dim + p.head_dim_v
        fitting = (n for n in range(1, p.kv_heads + 1) if p.kv_heads % n == 0 and n * columns <= ABREAST_COLUMNS)
        return max(fitting, default=1)
