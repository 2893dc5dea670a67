"""Instructions that change no result: hints, register counts, dependent grids (PTX ISA 9.7.9 and 9.7.19).

Timing is not modelled, so prefetches and sleeps only pass; what the ISA demands of their operands is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx.module import Immediate, Instruction

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp

WARPGROUP = 4
LEAST_REGISTERS, MOST_REGISTERS = 24, 256
REGISTER_FILE = 65_536
# Registers a thread may have without setmaxnreg (CUDA C++ Programming Guide, "Technical Specifications").
THREAD_REGISTERS = 255
DISCARDED_BYTES = 128


class RegisterPool:
    """The registers of a CTA that setmaxnreg moves among its warps (PTX ISA, setmaxnreg).

    What ptxas gives each thread at the start is not in the PTX: taken is the most that the kernel's directives
    let it have, so a pool that is too small here is too small on the device.
    """

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        directives = cta.cluster.program.kernel.directives
        warps = len(cta.warps)
        ctas = int(directives.get("minnctapersm", "1") or 1)
        share = REGISTER_FILE // (ctas * warps * 32) // 8 * 8
        self.limited = "maxnreg" in directives or "reqntid" in directives or "maxntid" in directives
        start = min(int(directives.get("maxnreg", share)), share, THREAD_REGISTERS + 1)
        self.owned = [start] * warps
        self.free = 0
        self.history: list[list[int]] = [[] for _ in range(warps)]

    def take(self, warp: int, count: int) -> None:
        self.free -= count - self.owned[warp]
        self.owned[warp] = count

    def finish(self) -> None:
        """All warps of a warpgroup must have executed the same setmaxnreg: the same counts, if not in one place.

        CUTLASS's kernels give each warp of a warpgroup a branch of its own (2026-11).
        """
        ops = self._cta.cluster.program.ops
        for first in range(0, len(self.history), WARPGROUP):
            group = [{ops[k].instruction.text: k for k in one} for one in self.history[first : first + WARPGROUP]]
            together = {text: index for one in group for text, index in one.items()}
            for number, executed in enumerate(group, first):
                for text in sorted(set(together) - set(executed)):
                    self._cta.fault(
                        FaultKind.ILLEGAL,
                        f"setmaxnreg not executed by warp {number}, but by another warp of its warpgroup",
                        ops[together[text]].instruction,
                    )


@instruction("setmaxnreg.inc", "setmaxnreg.dec")
def setmaxnreg(i: Instruction, d: Decoder) -> Step:
    if not isinstance(i.operands[0], Immediate):
        raise d.unsupported("a register count that is no constant")
    count = i.operands[0].value
    grow = i.modifiers[0] == "inc"

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        waiting = w.converge(i, lanes)
        if waiting is not None:
            return waiting
        if count % 8 or not LEAST_REGISTERS <= count <= MOST_REGISTERS:
            w.fault(
                FaultKind.ILLEGAL,
                f"setmaxnreg to {count} registers: not a multiple of 8 from {LEAST_REGISTERS} to {MOST_REGISTERS}",
            )
            return None
        pool = w.cta.part(RegisterPool)
        have = pool.owned[w.number]
        pool.history[w.number].append(i.index)
        if not pool.limited:
            return None
        assumed = len(pool.history[w.number]) == 1  # `have` is then only the most that it can be
        if (have > count and not assumed) if grow else (have < count):
            w.fault(FaultKind.ILLEGAL, f"setmaxnreg.{i.modifiers[0]} to {count} registers by a warp that owns {have}")
            return None

        def take() -> None:
            pool.take(w.number, count)
            w.cta.cluster.changes += 1

        if not grow or pool.free >= count - have:
            take()
            return None
        return Wait(
            lambda: (
                f"setmaxnreg.inc to {count}: {32 * (count - have)} registers wanted, {32 * pool.free} free in the CTA"
            ),
            lambda: pool.free >= count - have,
            take,
        )

    return step


@instruction("griddepcontrol")
def griddepcontrol(i: Instruction, d: Decoder) -> Step:
    """One grid is simulated, with all that it depends on complete: nothing to wait for, nobody to launch."""
    if i.modifiers not in (("launch_dependents",), ("wait",)):
        raise d.unsupported("an unknown action")
    return _pass


@instruction("nanosleep")
def nanosleep(i: Instruction, d: Decoder) -> Step:
    d.read(i.operands[0], "u32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        # Ends the warp's turn: others go on while it sleeps.
        return Wait("nanosleep", lambda: True)

    return step


@instruction("prefetch", "prefetchu", "applypriority")
def prefetch(i: Instruction, d: Decoder) -> Step:
    """Hints to the caches, which are not modelled; an address without memory behind it is no fault."""
    d.address(i.operands[0])
    return _pass


@instruction("discard.global", "discard")
def discard(i: Instruction, d: Decoder) -> Step:
    """128 bytes become indeterminate (PTX ISA, discard)."""
    address = d.address(i.operands[0])
    space = "global" if "global" in i.modifiers else "generic"

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        poison = np.full((lanes.count, DISCARDED_BYTES), 0xFF, dtype=np.uint8)
        w.store(space, address.of(w, lanes), poison, lanes, align=DISCARDED_BYTES)
        return None

    return step


@instruction("pmevent")
def pmevent(i: Instruction, d: Decoder) -> Step:
    return _pass


def _pass(w: Warp, lanes: Lanes) -> Wait | None:
    return None
