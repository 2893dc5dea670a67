"""tcgen05.alloc, .dealloc and .relinquish_alloc_permit (PTX ISA 9.7.16.7.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx.module import Instruction
from tunekit.simulate.units.tcgen05.address import join, show, split
from tunekit.simulate.units.tcgen05.state import Allocation, CtaTensor, check_group, group_of, pair, tensor

if TYPE_CHECKING:
    from tunekit.simulate.machine.cluster import Cluster
    from tunekit.simulate.machine.warp import Warp


class PairRequests:
    """Allocations of CTA pairs in progress: by the even CTA's rank, what each CTA of the pair asks for."""

    def __init__(self, cluster: Cluster) -> None:
        self.waiting: dict[int, dict[int, int]] = {}
        self.granted: dict[int, dict[int, int]] = {}


@instruction("tcgen05.alloc")
def alloc(i: Instruction, d: Decoder) -> Step:
    group = group_of(i)
    target, count_slot = d.address(i.operands[0]), d.read(i.operands[1], "u32")
    space = "shared::cta" if "shared::cta" in i.modifiers else "generic"

    def write(w: Warp, lanes: Lanes, column: int) -> None:
        one = Lanes.of(1 << lanes.first)
        address = np.array([target.first(w, lanes)], dtype=np.int64)
        w.store(space, address, np.array([[join(0, column)]], dtype=np.uint32).view(np.uint8), one)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        check_group(w, i, group)
        state = tensor(w.cta)
        count = _same(w, lanes, w.u32[count_slot], "the number of columns")
        if not _sound(w, state, count):
            return None
        if group == 2:
            return _alloc_pair(w, i, count, lambda column: write(w, lanes, column))
        column = state.room(count)
        if column is None:
            return Wait(
                lambda: f"tcgen05.alloc of {count} columns: {state.free_columns} of 512 are free",
                lambda: state.room(count) is not None,
                again=True,
            )
        state.take(Allocation(column, count, group, i))
        write(w, lanes, column)
        return None

    return step


def _sound(w: Warp, state: CtaTensor, count: int) -> bool:
    """Whether an allocation of `count` columns may be asked for; faults are collected."""
    if state.relinquished is not None:
        w.fault(
            FaultKind.TMEM_ALLOCATION,
            f"alloc after this CTA's tcgen05.relinquish_alloc_permit (PTX line {state.relinquished.line})",
        )
    if count & (count - 1) or not 32 <= count <= 512:
        w.fault(FaultKind.TMEM_ALLOCATION, f"{count} columns: must be a power of 2 from 32 to 512")
        return False
    if count > state.last_count:
        w.fault(
            FaultKind.TMEM_ALLOCATION,
            f"{count} columns after an allocation of {state.last_count}: allocations of a CTA must not grow",
        )
    return True


def _alloc_pair(w: Warp, i: Instruction, count: int, write: Any) -> Wait | None:
    """Both CTAs of the pair get the same columns, once a warp of each has come (9.7.16.5)."""
    ctas = pair(w)
    if len(ctas) < 2:
        raise w.stop(FaultKind.ILLEGAL, "cta_group::2 in a CTA that has no peer: the cluster has an odd size")
    requests = w.cta.cluster.part(PairRequests)
    key, rank = ctas[0].rank, w.cta.rank
    asked = requests.waiting.setdefault(key, {})
    asked[rank] = count

    def ready() -> bool:
        if rank in requests.granted.get(key, {}):
            return True
        if len(asked) < 2:
            return False
        if len(set(asked.values())) > 1:
            return True
        return _common_room(ctas, count) is not None

    def resume() -> None:
        granted = requests.granted.setdefault(key, {})
        if rank not in granted:
            if len(set(asked.values())) > 1:
                raise w.stop(FaultKind.TMEM_ALLOCATION, f"the CTAs of the pair ask for different counts: {asked}")
            column = _common_room(ctas, count)
            if column is None:
                raise w.stop(FaultKind.TMEM_ALLOCATION, "the columns were taken in between")
            for cta in ctas:
                granted[cta.rank] = column
                tensor(cta).take(Allocation(column, count, 2, i))
            requests.waiting.pop(key, None)
        write(granted.pop(rank))
        if not granted:
            requests.granted.pop(key, None)

    return Wait(
        lambda: f"tcgen05.alloc of {count} columns: {'the peer has not come' if len(asked) < 2 else 'no room in both'}",
        ready,
        resume,
    )


def _common_room(ctas: tuple[Any, ...], count: int) -> int | None:
    for column in range(0, 512 - count + 1, 32):
        if all(not tensor(cta).holds(column, count) for cta in ctas):
            return column
    return None


@instruction("tcgen05.dealloc")
def dealloc(i: Instruction, d: Decoder) -> Step:
    group = group_of(i)
    address_slot, count_slot = d.read(i.operands[0], "b32"), d.read(i.operands[1], "u32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        check_group(w, i, group)
        state = tensor(w.cta)
        address = _same(w, lanes, w.u32[address_slot], "the address")
        count = _same(w, lanes, w.u32[count_slot], "the number of columns")
        lane, column = split(address)
        allocation = state.allocations.get(column)
        if allocation is None or lane:
            before = state.freed.get(column)
            text = f"; it was freed at PTX line {before.line}" if before is not None and not lane else ""
            w.fault(FaultKind.TMEM_ALLOCATION, f"{show(address)} is not the start of an allocation{text}")
            return None
        if allocation.count != count:
            text = f"frees {count} columns at {show(address)}, where {allocation.count} were allocated"
            w.fault(FaultKind.TMEM_ALLOCATION, text)
        state.give(column, w.access(), i)
        return None

    return step


@instruction("tcgen05.relinquish_alloc_permit")
def relinquish(i: Instruction, d: Decoder) -> Step:
    group = group_of(i)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        check_group(w, i, group)
        tensor(w.cta).relinquished = i
        return None

    return step


def _same(w: Warp, lanes: Lanes, values: Any, what: str) -> int:
    """The one value that all lanes must hold."""
    first = int(values[lanes.first])
    if (values[lanes.indices] != first).any():
        w.fault(FaultKind.ILLEGAL, f"the lanes of the warp differ in {what}", lanes)
    return first
