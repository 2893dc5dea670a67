"""Unclean tails: 0 * NaN is NaN, so the rows of V behind a sequence's end must not meet P's zeros."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from .sm90_consumer import VECTOR_ELEMENTS
from .sm90_plan import WARP_GROUP_THREADS, Plan
from .sm90_runs import Runs


@cute.jit
def valid_keys(plan: Plan, runs: Runs, step):
    """How many keys of a step's tile its sequence has, if fewer than the tile's. Gathered tiles have zeros where
    nothing is listed: all are valid."""
    valid = runs.keys - (runs.first.end - 1 - step) * plan.kv_tile
    if const_expr(plan.two_sources):
        valid2 = plan.kv_tile
        if const_expr(not plan.gather):
            valid2 = runs.keys2 - (runs.second.end - 1 - (step - runs.first_steps)) * plan.kv_tile
        valid = valid if step < runs.first_steps else valid2
    return valid


@cute.jit
def zero_rows(plan: Plan, part, valid, lane):
    """Zero the keys at or past ``valid`` of a part (keys, columns) of a tile, in 16-byte vectors, a warp group."""
    zeros = cute.make_rmem_tensor(VECTOR_ELEMENTS, plan.element)
    zeros.fill(0.0)
    vectors = cute.size(part, mode=[1]) // VECTOR_ELEMENTS  # of a key
    for i in cutlass.range(valid * vectors + lane, plan.kv_tile * vectors, WARP_GROUP_THREADS, unroll=1):
        target = cute.local_tile(part, (1, VECTOR_ELEMENTS), (i // vectors, i % vectors))
        cute.autovec_copy(zeros, cute.make_tensor(target.iterator, cute.make_layout(VECTOR_ELEMENTS)))
