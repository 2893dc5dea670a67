"""Unclean tails: 0 * NaN is NaN, so the rows of V behind a sequence's end must not meet P's zeros."""

import cutlass
import cutlass.cute as cute

from .sm90_plan import VECTOR_ELEMENTS, Plan


@cute.jit
def zero_rows(plan: Plan, part, valid, thread, threads: cutlass.Constexpr[int]):
    """Zero the keys at or past ``valid`` of a part (keys, columns) of a tile, in 16-byte vectors, by so many
    ``threads``."""
    zeros = cute.make_rmem_tensor(VECTOR_ELEMENTS, plan.element)
    zeros.fill(0.0)
    vectors = cute.size(part, mode=[1]) // VECTOR_ELEMENTS  # of a key
    for i in cutlass.range(valid * vectors + thread, plan.kv_tile * vectors, threads, unroll=1):
        target = cute.local_tile(part, (1, VECTOR_ELEMENTS), (i // vectors, i % vectors))
        cute.autovec_copy(zeros, cute.make_tensor(target.iterator, cute.make_layout(VECTOR_ELEMENTS)))
