"""What is static about one variant of the paired Hopper attention kernel: the plan of fmha_sm90.py for a CTA's half of
O, and what is its own: the order of what passes through its rings. Plain arithmetic."""

from cutlass import const_expr

from tunekit.model import Values

from .fmha_sm90_pair_space import CLUSTER, KV_TILE, OWN_COLUMNS, SLOTS
from .sm90_plan import WARP_GROUP_THREADS, WARPS_PER_GROUP, Plan

CTAS = CLUSTER
CONSUMER_THREADS = 2 * WARP_GROUP_THREADS  # of a CTA: those that score, and those that multiply
# What the plan of fmha_sm90.py calls a CTA is a column half here.
HALF = {
    "m_tile": 64,
    "pv_n_tile": OWN_COLUMNS,
    "kv_tile": KV_TILE,
    "kv_stage": 1,
    "smem_p": False,
    "k_sub": 1,
    "cluster_m": 1,
    "kv_groups": 1,
    "ctas_per_sm": 1,
}


class PairPlan(Plan):
    """One variant. `tunables`: those of fmha_sm90_pair_space.py."""

    def __init__(self, problem: Values, tunables: Values):
        super().__init__(problem, Values({**HALF, **tunables}))
        self.threads = 3 * WARP_GROUP_THREADS
        # Together at most 3 * 168, what 384 threads have at launch, or the last warp group waits forever.
        self.consumer_registers, self.producer_registers = 240, 24
        self.prefetch = tunables.prefetch
        self.key_slots, self.value_slots = tunables.key_slots, SLOTS - tunables.key_slots
        self.part_bytes = KV_TILE * OWN_COLUMNS * self.element.width // 8
        self.cluster = CTAS
        # Warps that let go of a slot of values: of one latent the own tile's own columns are read by both warp groups.
        self.value_releases = WARPS_PER_GROUP * (2 if problem.kv_shared else 1)


# ---- the rings: each begins with a half of Q; then come, for each pair of tiles --------------------------------------
#
# keys:    K of the own tile, both halves; or of one latent, the columns of the own tile that are not the own ones
# values:  the own columns of V of the pair's first tile and of its second; or of one latent, of the own tile, then of
#          the other CTA's
#
# A part of a tile that does not exist leaves its position unused. Who waits for a slot waits for every phase of it, or
# knows that the phases between are over: a barrier tells only odd from even. So the two kinds of parts, which different
# warp groups wait for, have rings of their own. The multiplying warp group never waits for Q, which is first among the
# values: with two slots or more, it has had a P of its own CTA, and so Q was there, before it waits for that slot.


def key_position(plan: PairPlan, pair):
    """Position among the keys of a pair's first part."""
    return 1 + pair * (1 if const_expr(plan.kv_shared) else 2)


def value_position(plan: PairPlan, pair, owner: int, rank):
    """Position among the values of the tile of a pair that CTA ``owner`` scores."""
    first = 1 + 2 * pair
    if const_expr(not plan.kv_shared):
        return first + owner
    return first + (rank if const_expr(owner == 0) else 1 - rank)
