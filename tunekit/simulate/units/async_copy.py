"""Non-bulk asynchronous copies (PTX ISA 9.7.9): cp.async and its groups.

The copies of a warp complete in order, at a time of the schedule's choosing. They are weak accesses of the generic
proxy by an agent of their own; who waits for them learns of that agent's work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.reach import reach
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.groups import CopyGroups, pending_groups

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp


@instruction("cp.async.ca", "cp.async.cg", words="shared shared::cta global L2::cache_hint L2::64B L2::128B L2::256B")
def cp_async(i: ptx.Instruction, d: Decoder) -> Step:
    """4, 8 or 16 bytes a lane; what src-size leaves out, or ignore-src, becomes zeros."""
    if not any(word.startswith("shared") for word in i.modifiers) or "global" not in i.modifiers:
        raise d.unsupported("anything but global to shared")
    target, source = d.address(i.operands[0]), d.address(i.operands[1])
    size = i.operands[2].value if isinstance(i.operands[2], ptx.Immediate) else 0
    if size not in (4, 8, 16) or (i.modifiers[1] == "cg" and size != 16):
        raise d.unsupported(f"a cp-size of {size}")
    rest = list(i.operands[3:])
    if any(word.endswith("cache_hint") for word in i.modifiers):
        d.read(rest.pop(), "b64")
    ignore = taken = -1
    if rest and d.width(rest[0]) == 1:
        ignore = d.read(rest[0], "pred")
    elif rest:
        taken = d.read(rest[0], "b32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        sizes = np.full(lanes.count, size, dtype=np.int64)
        if taken >= 0:
            sizes = w.u32[taken][lanes.indices].astype(np.int64)
            if (sizes > size).any():
                w.fault(FaultKind.ILLEGAL, f"src-size {int(sizes.max())} is over the cp-size {size}", lanes)
                sizes = np.minimum(sizes, size)
        elif ignore >= 0:
            sizes[w.pred[ignore][lanes.indices]] = 0
        _issue(w, lanes, i, target.of(w, lanes), source.of(w, lanes), size, sizes)
        return None

    return step


def _issue(
    w: Warp,
    lanes: Lanes,
    i: ptx.Instruction,
    targets: np.ndarray[tuple[int], np.dtype[np.int64]],
    sources: np.ndarray[tuple[int], np.dtype[np.int64]],
    size: int,
    sizes: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    groups = w.part(CopyGroups)
    operation, access = groups.begin(lanes.bits, f"{i.dotted} at PTX line {i.line}")
    to = reach(w, "shared", targets, size, lanes)
    parts = []
    for taken in np.unique(sizes):
        which = np.flatnonzero((sizes == taken) & (sources % size == 0)) if taken else np.zeros(0, dtype=np.int64)
        if taken and which.size < np.count_nonzero(sizes == taken):
            w.fault(FaultKind.MISALIGNED, f"a source of {size} bytes that is not aligned to {size}", lanes)
        if which.size:
            some = Lanes.of(int(np.bitwise_or.reduce(np.left_shift(1, lanes.indices[which]))))
            parts.append((int(taken), which, reach(w, "global", sources[which], int(taken), some, align=1)))

    def act() -> None:
        data = np.zeros((lanes.count, size), dtype=np.uint8)
        for taken, which, places in parts:
            for place in places:
                data[which[place.lanes], :taken] = place.region.read(place.offsets, taken, access)
        operation.read = True
        for place in to:
            place.region.write(place.offsets, data[place.lanes], access)
        operation.done = True

    w.cta.cluster.engine.submit(act, groups.agent.name, operation.what)
    w.cta.cluster.changes += 1


@instruction("cp.async.commit_group", words="")
def commit_group(i: ptx.Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        w.part(CopyGroups).commit(lanes.bits)
        return None

    return step


@instruction("cp.async.wait_group", words="")
def wait_group(i: ptx.Instruction, d: Decoder) -> Step:
    pending = pending_groups(i, d)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        groups = w.part(CopyGroups)
        return groups.wait(groups.before(lanes.bits, pending), i.dotted)

    return step


@instruction("cp.async.wait_all", words="")
def wait_all(i: ptx.Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        groups = w.part(CopyGroups)
        return groups.wait(groups.everything(lanes.bits), i.dotted)

    return step
