"""What is static about one variant of the wide Hopper attention kernel: the plan of fmha_sm90.py for one warp group's
half of O, and what is its own: parts, positions in the ring, barriers. Plain arithmetic."""

import cutlass
from cutlass import const_expr

from tunekit.model import Values

from .fmha_sm90_wide_space import slots
from .sm90_plan import WARP_GROUP_THREADS, Plan

HEAD_DIM = 512
OWN_COLUMNS = 256  # of O, a consumer warp group
CONSUMERS = 2
CONSUMER_THREADS = CONSUMERS * WARP_GROUP_THREADS
COMPACT_SPLITS = 4  # at most, for which a compact merge in the cluster is worth its instructions
# Named barriers besides sm90_plan's.
BARRIER_READY = 4  # + warp group: its P is in shared memory
# What the plan of fmha_sm90.py calls a CTA is a column half here.
HALF = {
    "m_tile": 64,
    "pv_n_tile": OWN_COLUMNS,
    "kv_stage": 1,
    "smem_p": True,
    "k_sub": 1,
    "kv_groups": 1,
    "ctas_per_sm": 1,
}


class WidePlan(Plan):
    """One variant. `tunables`: those of fmha_sm90_wide_space.py."""

    def __init__(self, problem: Values, tunables: Values):
        super().__init__(problem, Values({**HALF, **tunables}))
        self.threads = (1 + CONSUMERS) * WARP_GROUP_THREADS
        # All producer threads gather K's parts and V's.
        self.gather_threads = WARP_GROUP_THREADS
        self.fills = self.gather_threads + 1 if problem.gather else 1
        # Gathering takes addresses: with 40 registers it spilled (ptxas of CUDA 12.9, 2026-11-29). All three
        # warp groups' together must be at most 3 * 168, what 384 threads have at launch, or the last one waits forever.
        self.consumer_registers, self.producer_registers = (224, 56) if problem.gather else (240, 24)
        self.prefetch = tunables.prefetch
        # A warp group's softmax beside its own product. Where O is rescaled at every step the registers do
        # not suffice: they spilled, and then each wgmma was waited for (ptxas of CUDA 12.9, 2026-11-30).
        self.overlaps = self.rescale_log2 > 0
        self.part_columns = tunables.part_columns
        self.parts = HEAD_DIM // tunables.part_columns
        self.own_parts = OWN_COLUMNS // tunables.part_columns
        self.slots = slots(Values({**problem, **tunables}))
        # The CTAs of a cluster: splits of the tiles fastest, if they merge there; then neighbouring row blocks.
        self.cluster_splits = tunables.num_splits if tunables.merge == "cluster" else 1
        self.cluster = tunables.cluster_m * self.cluster_splits
        # Where K and V are gathered apart, the registers do not suffice for it.
        self.compact_merge = self.num_splits <= COMPACT_SPLITS and (problem.kv_shared or not problem.gather)
        self.part_bytes = self.kv_tile * self.part_columns * self.element.width // 8


def key_position(plan: WidePlan, step):
    """Ring position of the first K part of a step's tile."""
    if const_expr(plan.kv_shared):
        return step * plan.parts
    return cutlass.max(2 * step - 1, 0) * plan.parts


def value_position(plan: WidePlan, step):
    """Ring position of the first V part of a step's tile; K of the next tile comes before it."""
    if const_expr(plan.kv_shared):
        return step * plan.parts
    return (2 * step + 2) * plan.parts
