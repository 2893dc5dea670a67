"""Divergence: the fragments that a warp's lanes fall into, and where they meet again.

A fragment is a set of lanes with one program counter. A branch that splits a fragment makes a *meeting* at its
immediate post-dominator: the parts wait there for each other and go on as one. Between the split and the meeting
each part may run whenever the schedule likes, so a part that waits for another one's work does not hang the warp
(independent thread scheduling, PTX ISA chapter 3). Nor does a meeting: nothing promises lanes that they reconverge,
so where the lanes that are still missing only spin or wait, those that have come go on without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tunekit.simulate.machine.decode import Wait
from tunekit.simulate.machine.lanes import Lanes


@dataclass(eq=False)
class Meeting:
    """Lanes that will continue together at `pc`: which are expected, and which have come.

    given_up: the lanes that came had to go on without the others once; whoever comes now does not wait.
    """

    pc: int
    expected: int
    arrived: int = 0
    outer: tuple[Meeting, ...] = ()
    given_up: bool = False


@dataclass(eq=False)
class Fragment:
    """Lanes that run together."""

    pc: int
    lanes: Lanes
    meetings: tuple[Meeting, ...] = ()
    wait: Wait | None = None
    returns: tuple[int, ...] = field(default=())

    @property
    def ready(self) -> bool:
        return self.wait is None or self.wait.ready()
