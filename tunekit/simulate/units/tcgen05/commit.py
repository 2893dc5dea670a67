"""tcgen05.commit (PTX ISA 9.7.16.12.1): an mbarrier arrival once all earlier mma, cp and shift are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import HAPPENED, TENSOR, TENSOR_BEFORE, Knowledge
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx.module import Instruction
from tunekit.simulate.sync.completion import Signal
from tunekit.simulate.units.tcgen05.pipe import members, submit
from tunekit.simulate.units.tcgen05.state import WarpTensor, group_of

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp


@instruction("tcgen05.commit")
def commit(i: Instruction, d: Decoder) -> Step:
    if "mbarrier::arrive::one" not in i.modifiers:
        raise d.unsupported("a completion mechanism other than .mbarrier::arrive::one")
    group = group_of(i)
    address = d.address(i.operands[0])
    space = "shared::cluster" if "shared::cluster" in i.modifiers else "generic"
    mask = d.read(i.operands[1], "b16") if "multicast::cluster" in i.modifiers else -1

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in lanes.indices:
            ctas = members(w, i, group)
            first = Signal.of(w, space, address.first(w, Lanes.of(1 << int(lane))))
            if first is None:
                continue
            signals = [first] if mask < 0 else _multicast(w, first, int(w.u16[mask][lane]))
            submit(w, i, ctas, _arrival(signals, _tracked(w)))
        return None

    return step


def _arrival(signals: list[Signal], known: Knowledge) -> Callable[[], None]:
    def arrive() -> None:
        for signal in signals:
            signal.arrive(1, known)

    return arrive


def _multicast(w: Warp, signal: Signal, mask: int) -> list[Signal]:
    """The mbarriers at the same offset in the CTAs of the mask, by rank in the cluster."""
    cluster = w.cta.cluster
    if mask >> cluster.size:
        w.fault(FaultKind.OUT_OF_BOUNDS, f"ctaMask {mask:#06x} names CTAs beyond the {cluster.size} of the cluster")
    return [signal.at(cta) for cta in cluster.ctas if mask >> cta.rank & 1]


def _tracked(w: Warp) -> Knowledge:
    """What whoever sees the completion knows: the pipe's work so far and what that relied on.

    It counts as fenced (9.7.16.6.4.2: tcgen05.commit performs tcgen05.fence::before_thread_sync implicitly).
    """
    unit = w.part(WarpTensor)
    known = w.cta.cluster.order.knowledge()
    if unit.relied is not None:
        known.join(unit.relied)
        known.fence(TENSOR_BEFORE, TENSOR)
    pipe = unit.pipe
    known.room(pipe.index + 1)
    known.rows[HAPPENED, pipe.index] = pipe.epoch
    known.rows[TENSOR_BEFORE, pipe.index] = pipe.epoch
    pipe.epoch += 1
    return known
