"""Clusters (PTX ISA 9.7.9 and 9.7.13): mapa, getctarank, barrier.cluster, and
clusterlaunchcontrol, which here always answers that no work is left to take over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.patterns import Patterns
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.memory import RANK_SHIFT, SHARED_BASE
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.barrier import ClusterBarrier, Round
from tunekit.simulate.sync.completion import Signal, completed, locate

if TYPE_CHECKING:
    from tunekit.simulate.machine.cluster import Cluster
    from tunekit.simulate.machine.warp import Warp

_RANK_BITS = ((1 << 56 - RANK_SHIFT) - 1) << RANK_SHIFT
_RESPONSE_BYTES = 16
_UNDEFINED = 0xDEADBEEF


@instruction("mapa")
def mapa(i: ptx.Instruction, d: Decoder) -> Step:
    """The address of another CTA's copy of a shared address.

    A rank outside the cluster gives an address outside it, which is found when it is used: quack's whole warps map
    addresses that only their first lanes use (0.6.5).
    """
    type_ = i.modifiers[-1]
    out = d.write(i.operands[0], type_)
    address = d.read(i.operands[1], type_)
    target = d.read(i.operands[2], "u32")
    generic = "shared::cluster" not in i.modifiers

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        view = w.u64 if type_ == "u64" else w.u32
        values = view[address][lanes.indices].astype(np.uint64)
        ranks = w.u32[target][lanes.indices].astype(np.uint64)
        if generic and (values >> np.uint64(56) != SHARED_BASE >> 56).any():
            w.fault(FaultKind.OUT_OF_BOUNDS, f"mapa: {int(values[0]):#x} is no address of shared memory", lanes)
        mapped = values & np.uint64(~_RANK_BITS & (1 << 64) - 1) | ranks << np.uint64(RANK_SHIFT)
        view[out][lanes.indices] = mapped
        return None

    return step


@instruction("getctarank")
def getctarank(i: ptx.Instruction, d: Decoder) -> Step:
    """The rank of the CTA that a shared address lies in."""
    type_ = i.modifiers[-1]
    out = d.write(i.operands[0], "u32")
    address = d.read(i.operands[1], type_)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        values = (w.u64 if type_ == "u64" else w.u32)[address][lanes.indices].astype(np.uint64)
        w.u32[out][lanes.indices] = (values & np.uint64(_RANK_BITS)) >> np.uint64(RANK_SHIFT)
        return None

    return step


class ClusterBarriers:
    """The cluster's barrier, and which round each warp's lanes have arrived at: `cluster.part(ClusterBarriers)`."""

    def __init__(self, cluster: Cluster) -> None:
        self._numbers = {id(warp): n for n, warp in enumerate(cluster.warps)}
        self.barrier = ClusterBarrier(range(len(cluster.warps)), lambda n: cluster.warps[n].live)
        self._arrived: dict[int, list[tuple[int, Round]]] = {}

    def arrive(self, w: Warp, lanes: Lanes, semantics: str) -> None:
        number = self._numbers[id(w)]
        rounds = self._arrived.setdefault(number, [])
        bits = lanes.bits
        if any(held & bits for held, _ in rounds):
            w.fault(FaultKind.BARRIER, "barrier.cluster.arrive twice without barrier.cluster.wait in between", lanes)
            return
        known = w.part(Patterns).release(semantics)
        rounds.append((bits, self.barrier.arrive(number, bits, known, lambda kind, text: w.fault(kind, text, lanes))))

    def take(self, w: Warp, lanes: Lanes) -> list[Round]:
        """The rounds that the lanes have arrived at and now wait for."""
        number = self._numbers[id(w)]
        rounds = self._arrived.get(number, [])
        mine = [one for held, one in rounds if held & lanes.bits]
        covered = 0
        for held, _ in rounds:
            covered |= held
        if lanes.bits & ~covered:
            w.fault(FaultKind.BARRIER, "barrier.cluster.wait without barrier.cluster.arrive", lanes)
        self._arrived[number] = [(held & ~lanes.bits, one) for held, one in rounds if held & ~lanes.bits]
        return mine


@instruction("barrier.cluster")
def barrier_cluster(i: ptx.Instruction, d: Decoder) -> Step:
    """arrive releases unless .relaxed; wait acquires."""
    kind = i.modifiers[1]
    aligned = "aligned" in i.modifiers
    relaxed = "relaxed" in i.modifiers
    if kind not in ("arrive", "wait"):
        raise d.unsupported(f".{kind}")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        if aligned:
            wait = w.converge(i, lanes)
            if wait is not None:
                return wait
        barriers = w.cta.cluster.part(ClusterBarriers)
        w.cta.cluster.changes += 1
        if kind == "arrive":
            barriers.arrive(w, lanes, "relaxed" if relaxed else "release")
            return None
        rounds, barrier = barriers.take(w, lanes), barriers.barrier

        def ready() -> bool:
            return all(barrier.settle(one) for one in rounds)

        def resume() -> None:
            for one in rounds:
                w.part(Patterns).acquire("relaxed" if relaxed else "acquire", one.known)

        if ready():
            resume()
            return None
        return Wait(lambda: "; ".join(barrier.awaited(one) for one in rounds if not one.done), ready, resume)

    return step


@instruction("clusterlaunchcontrol.try_cancel")
def try_cancel(i: ptx.Instruction, d: Decoder) -> Step:
    """Asks for a cluster that has not started, and gets none: sixteen zero bytes, counted on the mbarrier."""
    space = "shared::cta" if "shared::cta" in i.modifiers else "generic"
    answer, mbarrier = d.address(i.operands[0]), d.address(i.operands[1])
    everywhere = "multicast::cluster::all" in i.modifiers

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        cluster = w.cta.cluster
        for lane in lanes.indices:
            one = Lanes.of(1 << int(lane))
            place = locate(w, space, int(answer.of(w, one)[0]), "the response")
            signal = Signal.of(w, space, int(mbarrier.of(w, one)[0]))
            if place is None or signal is None:
                continue
            if place[1] % _RESPONSE_BYTES or place[1] + _RESPONSE_BYTES > place[0].shared.data.size:
                w.fault(FaultKind.MISALIGNED, f"the response at shared {place[1]:#x}: 16 bytes, aligned to 16", one)
                continue
            for cta in cluster.ctas if everywhere else [place[0]]:
                there = signal.at(cta)
                agent = there.agent()
                agent.epoch += 1
                access = w.async_access(agent)

                def act(signal: Signal = there, offset: int = place[1]) -> None:
                    data = np.zeros((1, _RESPONSE_BYTES), dtype=np.uint8)
                    signal.cta.shared.write(np.array([offset]), data, access)  # noqa: B023
                    signal.complete_tx(_RESPONSE_BYTES, completed(cluster.order, access))  # noqa: B023

                cluster.engine.submit(act, None, f"{i.dotted} at PTX line {i.line}")
        cluster.changes += 1
        return None

    return step


@instruction("clusterlaunchcontrol.query_cancel")
def query_cancel(i: ptx.Instruction, d: Decoder) -> Step:
    """Reads a response: is_canceled is false, since try_cancel never finds work.

    get_first_ctaid of such a response is undefined, not an error: compilers ask for both and choose afterwards.
    """
    asks = i.modifiers[1]
    response = d.read(i.operands[1], "b128")
    if asks == "is_canceled":
        result = d.write(i.operands[0], "pred")

        def step(w: Warp, lanes: Lanes) -> Wait | None:
            w.pred[result][lanes.indices] = w.u64x2[response][lanes.indices].any(axis=1)
            return None

        return step
    if not asks.startswith("get_first_ctaid"):
        raise d.unsupported(f".{asks}")
    outs = d.writes_vector(i.operands[0], "b32")

    def first(w: Warp, lanes: Lanes) -> Wait | None:
        for out in outs:
            w.u32[out][lanes.indices] = _UNDEFINED
        return None

    return first
