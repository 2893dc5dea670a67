"""The tensor core's pipe: tcgen05.mma, .cp and .shift in flight, in order of issue (PTX ISA 9.7.16.6).

The ISA promises order within pairs of them only (9.7.16.6.2): mma to mma of the same shape and accumulator, cp to
mma, shift to mma, shift to cp.4x256b, mma to shift. The hardware has one pipe and runs them all as issued, and
kernels that are known to be right count on it: an mma may overwrite what the one before it, of another shape, reads.
So here too all operations of a CTA, or of a CTA pair, go through one queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.ptx.module import Instruction
from tunekit.simulate.units.tcgen05.state import check_group, pair

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp


def members(w: Warp, i: Instruction, group: int) -> tuple[Cta, ...]:
    """The CTAs that an operation of this cta_group works on, the even one first."""
    check_group(w, i, group)
    if group == 1:
        return (w.cta,)
    ctas = pair(w)
    if len(ctas) < 2:
        raise w.stop(FaultKind.ILLEGAL, "cta_group::2 in a CTA that has no peer: the cluster has an odd size")
    for cta in ctas:
        if cta.done and cta is not w.cta:
            w.fault(FaultKind.ILLEGAL, f"cta_group::2 after the peer, cta {cta.rank} of the cluster, has exited")
    return ctas


def submit(w: Warp, i: Instruction, ctas: tuple[Cta, ...], action: Callable[[], None]) -> None:
    """Sends an operation on these CTAs down the pipe."""
    first = ctas[0].rank & ~1 if len(ctas) > 1 else ctas[0].rank
    w.cta.cluster.engine.submit(action, ("tcgen05", first), f"{i.dotted} at PTX line {i.line}")
