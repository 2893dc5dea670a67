"""The MMA warp: both products, for every softmax group."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, const_expr
from cutlass.cute.nvgpu import tcgen05
from cutlass.experimental.primitives import nvvm_wrapper as nvvm

from . import sm100_rings as rings
from .sm100_plan import Fixed, Plan


@dataclass(frozen=True)
class Operands(Fixed):
    """What the products read and write: fragments by (MMA, product, step, stage), accumulators by (MMA, product,
    stage), where products side by side cover a tile of keys or of columns."""

    q: Any
    k: Any
    v: Any
    p: Any
    s: Any
    o: Any


@dataclass(frozen=True)
class Mma(Fixed):
    """Issues S = Q K^T and O += P V. Its rings: K and V full, S empty, P full, O free to be added to."""

    plan: Plan
    operands: Operands
    q_full: Any
    k_ring: rings.Ring
    v_ring: rings.Ring | None
    s_ring: rings.Ring
    p_ring: rings.Ring
    o_ring: rings.Ring

    @cute.jit
    def run(self, work, qk, pv):
        """QK0, then QK(i + 1) and PV(i) in turn, then the last PV; each for every group.

        QK runs one tile ahead, so that softmax(i + 1) has its scores while PV(i) waits for P(i). Where P lies in the
        columns of S, PV(i) is issued first: the tensor core keeps the order of what one thread issues, so S(i + 1)
        can't overwrite P(i).
        """
        plan = self.plan
        k_place, s_place = self.k_ring.user(), self.s_ring.filler()
        p_place, o_place = self.p_ring.user(), self.o_ring.filler()
        v_place = self.k_ring.user() if const_expr(plan.kv_shared) else self.v_ring.user()
        accumulate = Boolean(False)
        if work.tiles > 0:
            cute.arch.mbarrier_wait(self.q_full, 0)
            if const_expr(plan.look_ahead):
                qk, k_place, s_place = self._scores(qk, k_place, s_place)
                for _ in cutlass.range(1, work.tiles, unroll=1):
                    for group in cutlass.range_constexpr(plan.groups):
                        if const_expr(plan.tmem.qk_first):
                            qk, k_place, s_place = self._score(qk, group, k_place, s_place)
                        pv, v_place, p_place, o_place = self._add(
                            pv, work, group, accumulate, v_place, p_place, o_place
                        )
                        if const_expr(not plan.tmem.qk_first):
                            qk, k_place, s_place = self._score(qk, group, k_place, s_place)
                    accumulate = Boolean(True)
                for group in cutlass.range_constexpr(plan.groups):
                    pv, v_place, p_place, o_place = self._add(pv, work, group, accumulate, v_place, p_place, o_place)
            else:
                for _ in cutlass.range(work.tiles, unroll=1):
                    qk, k_place, s_place = self._scores(qk, k_place, s_place)
                    for group in cutlass.range_constexpr(plan.groups):
                        pv, v_place, p_place, o_place = self._add(
                            pv, work, group, accumulate, v_place, p_place, o_place
                        )
                    accumulate = Boolean(True)

    @cute.jit
    def _scores(self, qk, k_place, s_place):
        """S of the next tile for every group."""
        for group in cutlass.range_constexpr(self.plan.groups):
            qk, k_place, s_place = self._score(qk, group, k_place, s_place)
        return qk, k_place, s_place

    @cute.jit
    def _score(self, qk, group: cutlass.Constexpr, k_place, s_place):
        """S = Q K^T of the next tile for a group, once K is here and the softmax group has read S's stage."""
        plan, on = self.plan, self.operands
        self.s_ring.wait_empty(s_place)
        steps = plan.k_columns // plan.mma_k
        for part in cutlass.range_constexpr(plan.k_sub):
            if const_expr(group == 0 or plan.k_sub > 1):
                self.k_ring.wait_full(k_place)
            nvvm.tcgen05_fence("after_thread_sync")
            for step in cutlass.range_constexpr(steps):
                qk.set(tcgen05.Field.ACCUMULATE, part + step != 0)
                for product in cutlass.range_constexpr(plan.s_products):
                    s, q = on.s[None, product, s_place.index], on.q[None, 0, part * steps + step, group]
                    cute.gemm(qk, s, q, on.k[None, product, step, k_place.index], s)
            if const_expr(group == plan.groups - 1 or plan.k_sub > 1):
                if const_expr(not plan.kv_shared):
                    rings.commit(self.k_ring.empty(k_place.index), plan.pair)
                k_place.advance()
        rings.commit(self.s_ring.full(s_place.index), plan.pair)
        s_place.advance()
        return qk, k_place, s_place

    @cute.jit
    def _add(self, pv, work, group: cutlass.Constexpr, accumulate, v_place, p_place, o_place):
        """O += P V of the next tile for a group, once V and P are here and O is scaled to P's row maxima."""
        plan, on = self.plan, self.operands
        if const_expr(group == 0 and not plan.kv_shared):
            self.v_ring.wait_full(v_place)
        self.o_ring.wait_empty(o_place)
        self.p_ring.wait_full(p_place)
        nvvm.tcgen05_fence("after_thread_sync")
        own = work.pv_slice if const_expr(plan.kv_shared) else 0
        for step in cutlass.range_constexpr(plan.kv_tile // plan.mma_k):
            pv.set(tcgen05.Field.ACCUMULATE, accumulate if step == 0 else True)
            for product in cutlass.range_constexpr(plan.o_products):
                o, p = on.o[None, product, group], on.p[None, 0, step, p_place.index]
                cute.gemm(pv, o, p, on.v[None, product, step, (own, v_place.index)], o)
        rings.commit(self.p_ring.empty(p_place.index), plan.pair)
        p_place.advance()
        if const_expr(group == plan.groups - 1):
            ring = self.k_ring if const_expr(plan.kv_shared) else self.v_ring
            rings.commit(ring.empty(v_place.index), plan.pair)
            v_place.advance()
        rings.commit(self.o_ring.full(o_place.index), plan.pair)
        o_place.advance()
        return pv, v_place, p_place, o_place
