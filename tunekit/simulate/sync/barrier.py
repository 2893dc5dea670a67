"""Barriers of a CTA and of a cluster (PTX ISA 9.7.13): who has arrived, and what that makes known.

A barrier is used in rounds. Whoever arrives gets the round, and may wait until it is done; then the barrier is
already open for the next round, so a slow waiter never sees arrivals that came after its own round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Knowledge
from tunekit.simulate.machine.lanes import FULL, WARP

Report = Callable[[FaultKind, str], None]
Live = Callable[[int], int]
"""The lanes (bits) of a warp that exist and have not exited."""


class Round:
    """One use of a barrier. `known` is what all that arrived have released into it.

    Waiters ask often, so a round keeps one warp that is missing (`blocker`), and for counted rounds whether some
    warp has arrived without all its lanes (`partial`): only then can an exit complete the round.
    """

    __slots__ = ("arrived", "blocker", "done", "expected", "extra", "known", "partial", "reduces", "voters", "votes")

    def __init__(self) -> None:
        self.arrived: dict[int, int] = {}
        self.blocker: int | None = None
        self.partial = False
        self.expected: int | None = None
        self.extra = 0
        self.done = False
        self.known: Knowledge | None = None
        self.reduces: bool | None = None
        self.votes = 0
        self.voters = 0

    def gather(self, known: Knowledge | None) -> None:
        if known is None:
            return
        if self.known is None:
            self.known = known.copy()
        else:
            self.known.join(known)

    def all_there(self, warps: Sequence[int], live: Live) -> bool:
        """Whether every lane of `warps` that has not exited has arrived."""
        if self.blocker is not None and live(self.blocker) & ~self.arrived.get(self.blocker, 0):
            return False
        self.blocker = next((warp for warp in warps if live(warp) & ~self.arrived.get(warp, 0)), None)
        return self.blocker is None

    def warps_there(self, live: Live) -> int:
        """How many warps have arrived with every lane that has not exited (barrier waits for the whole warp)."""
        return sum(not live(warp) & ~bits for warp, bits in self.arrived.items())


class NamedBarrier:
    """One of a CTA's sixteen. `warps` are the numbers of the CTA's warps."""

    def __init__(self, number: int, warps: Sequence[int], live: Live) -> None:
        self.number = number
        self._warps = warps
        self._live = live
        self._round = Round()

    def arrive(
        self,
        warp: int,
        lanes: int,
        threads: int | None,
        known: Knowledge,
        report: Report,
        *,
        votes: Sequence[bool] | None = None,
        waits: bool = False,
    ) -> Round:
        """The lanes (bits) of a warp arrive; `threads` is the count that the instruction names, None for all.

        A warp whose .arrive is open may add a .sync (`waits`), which counts once more: FlashAttention's first
        warpgroup on Hopper lets itself go first so. A second .arrive is taken for a mistake.

        `votes` are the lanes' predicates of a .red. Returns the round, which is done at once if these were the last.
        """
        now = self._round
        whole = len(self._warps) * WARP
        if threads is not None and (threads <= 0 or threads % WARP or threads > whole):
            report(
                FaultKind.BARRIER,
                f"barrier {self.number} is given {threads} threads: not a multiple of {WARP} from {WARP} to {whole}",
            )
            threads = min(whole, max(WARP, -(-threads // WARP) * WARP))
        self._agree(now, threads, votes is not None, report)
        before = now.arrived.get(warp, 0)
        if before & lanes:
            if not waits:
                report(
                    FaultKind.BARRIER,
                    f"warp {warp} arrives at barrier {self.number} again before the barrier has completed "
                    f"({self._there(now)} of {self._needed(now)} threads there)",
                )
            now.extra += 1
        now.arrived[warp] = before | lanes
        now.gather(known)
        if votes is not None:
            now.votes += sum(votes)
            now.voters += len(votes)
        now.partial |= now.arrived[warp] != FULL
        self._close(now)
        return now

    def settle(self, one: Round) -> bool:
        """Whether the round is done; it may become so by a warp's exit alone."""
        if one.done or (one.expected is not None and not one.partial):
            return one.done
        return self._close(one)

    def _close(self, one: Round) -> bool:
        if self._complete(one):
            one.done = True
            if self._round is one:
                self._round = Round()
        return one.done

    def awaited(self, one: Round) -> str:
        """The line of a deadlock report."""
        there = [warp for warp, bits in one.arrived.items() if not self._live(warp) & ~bits]
        return (
            f"barrier {self.number}: {self._there(one)} of {self._needed(one)} threads have arrived "
            f"(warps {', '.join(map(str, sorted(there))) or 'none'})"
        )

    def _agree(self, now: Round, threads: int | None, reduces: bool, report: Report) -> None:
        whole = len(self._warps) * WARP
        if now.reduces is None:
            now.reduces = reduces
            now.expected = threads
            return
        if (now.expected or whole) != (threads or whole):
            report(
                FaultKind.BARRIER,
                f"barrier {self.number} is used for {threads or whole} threads while {now.expected or whole} "
                f"are expected by those who arrived before (warps {', '.join(map(str, now.arrived))})",
            )
        if now.reduces != reduces:
            report(FaultKind.BARRIER, f"barrier {self.number}: .red is mixed with .sync or .arrive in one round")

    def _complete(self, one: Round) -> bool:
        if one.expected is None:
            return one.all_there(self._warps, self._live)
        return self._there(one) >= one.expected

    def _there(self, one: Round) -> int:
        return (one.warps_there(self._live) + one.extra) * WARP

    def _needed(self, one: Round) -> int:
        return one.expected or sum(WARP for warp in self._warps if self._live(warp))


class ClusterBarrier:
    """barrier.cluster: all threads of the cluster that have not exited. `warps` number the warps of the cluster."""

    def __init__(self, warps: Sequence[int], live: Live) -> None:
        self._warps = warps
        self._live = live
        self._round = Round()

    def arrive(self, warp: int, lanes: int, known: Knowledge | None, report: Report) -> Round:
        """Lanes of a warp arrive; `known` is None for .relaxed. Returns the round to wait for."""
        now = self._round
        if now.arrived.get(warp, 0) & lanes:
            report(FaultKind.BARRIER, f"warp {warp} arrives at the cluster barrier again without having waited")
        now.arrived[warp] = now.arrived.get(warp, 0) | lanes
        now.gather(known)
        self.settle(now)
        return now

    def settle(self, one: Round) -> bool:
        """Whether the round is done; it may become so by a warp's exit alone."""
        if not one.done and one.all_there(self._warps, self._live):
            one.done = True
            if self._round is one:
                self._round = Round()
        return one.done

    def awaited(self, one: Round) -> str:
        """The line of a deadlock report."""
        missing = [warp for warp in self._warps if self._live(warp) & ~one.arrived.get(warp, 0)]
        return f"barrier.cluster: warps {', '.join(map(str, missing))} of the cluster have not arrived"
