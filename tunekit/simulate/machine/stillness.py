"""Livelock: a cluster whose warps spin for ever, told from one that computes for long without touching memory.

A warp whose registers and program counters are what they were before, while nothing in memory has changed, will
come back to them again and again: nothing of its own can end that. A loop that counts its turns never repeats itself
and is given up after `LONGEST` instructions. Work in flight, or another cluster that still runs, may end any loop.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

# Instructions of one warp without any change in its cluster after which it is taken to spin, whatever it counts.
LONGEST = 1_000_000
RUNS, SPINS = 1, 2


@dataclass
class _Mark:
    """What a warp was some turns ago, which of its lanes have run since, and whether it has come back to itself."""

    contents: tuple[bytes, ...]
    executed: int
    limit: int = 1
    turns: int = 0
    ran: int = 0
    caught: bool = False


class Stillness:
    """Watches the warps of a cluster from when nothing has changed for a while."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def reset(self) -> None:
        """Something has changed."""
        self._marks.clear()

    def watch(self, warp: Warp, ran: int) -> None:
        """After a turn of the lanes `ran` of `warp`."""
        now = _contents(warp)
        mark = self._marks.get(id(warp))
        if mark is None:
            self._marks[id(warp)] = _Mark(now, warp.executed)
            return
        mark.ran |= ran
        mark.turns += 1
        back = now == mark.contents and all(f.lanes.bits & ~mark.ran == 0 for f in warp.fragments if f.ready)
        # Brent's search for a cycle: the mark moves on after 1, 2, 4, ... turns.
        if back or mark.turns >= mark.limit:
            limit = mark.limit if back else 2 * mark.limit
            self._marks[id(warp)] = _Mark(now, mark.executed, limit, caught=back)

    def endless(self, warps: Sequence[Warp]) -> bool:
        """Whether each of `warps` spins."""
        for warp in warps:
            mark = self._marks.get(id(warp))
            if mark is None or not (mark.caught or warp.executed - mark.executed > LONGEST):
                return False
        return True


def _contents(warp: Warp) -> tuple[bytes, ...]:
    places = sorted((f.pc, f.lanes.bits, f.wait is None) for f in warp.fragments)
    return (repr(places).encode(), *warp.contents())


class Others:
    """What a cluster's process knows of the other clusters of the grid: who runs now, and how many have yet to.

    states: RUNS, SPINS or 0, a process each, in memory that they share; me: this one's.
    """

    def __init__(self, states: MutableSequence[int] | None = None, me: int = 0, unstarted: Callable[[], int] = int):
        self._states, self._me, self.unstarted = states, me, unstarted

    def say(self, state: int) -> None:
        """Tells the others what this one does: RUNS, SPINS, or 0 for nothing any more."""
        if self._states is not None and self._states[self._me] != state:
            self._states[self._me] = state

    def run(self) -> bool:
        """Whether any other does more than spin."""
        return self._states is not None and any(
            state == RUNS for number, state in enumerate(self._states) if number != self._me
        )
