"""Potentially blocking waits (PTX ISA 9.7.13, mbarrier.try_wait): a warp is suspended, but not for ever.

The hardware ends a suspension after a time of its own choosing. Here it ends when the awaited thing has happened,
or when nothing else in the cluster can go on: then the wait fails once and the kernel may do something else. A wait
that fails a second time with nothing changed in between stays suspended, and a deadlock is seen as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunekit.simulate.machine.decode import Wait

if TYPE_CHECKING:
    from tunekit.simulate.machine.cluster import Cluster
    from tunekit.simulate.machine.warp import Warp


@dataclass(slots=True)
class Suspended(Wait):
    """A wait whose `passed` says whether what it waits for has happened."""

    passed: Callable[[], bool] = bool


class Suspensions:
    """Which waits have failed, and how far the cluster was then: `cluster.part(Suspensions)`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._failed: dict[tuple[int, int, int], int] = {}
        self._tried: dict[tuple[int, int, int], object] = {}

    def failed_here(self, w: Warp) -> bool:
        """Whether the wait at the warp's current instruction has failed and nothing has changed since."""
        return self._failed.get(_key(w)) == self._cluster.changes

    def fail(self, w: Warp) -> None:
        """Remembers that the wait at the warp's current instruction fails now."""
        self._failed[_key(w)] = self._cluster.changes

    def gives_up(self, w: Warp, awaited: object) -> bool:
        """Whether the wait at the warp's current instruction fails at once, rather than being suspended.

        The first one for what is `awaited` mostly does: a kernel that takes no notice of the answer is seen to go on
        too early. What asks again is a loop, and costs less when it is suspended.
        """
        key = _key(w)
        first = self._tried.get(key) != awaited
        self._tried[key] = awaited
        return self._cluster.schedule.times_out(first)

    def wait(
        self, w: Warp, what: Callable[[], str], passed: Callable[[], bool], then: Callable[[bool], None]
    ) -> Suspended:
        """Suspends the current fragment; `then` is called with whether the wait has succeeded."""
        key = _key(w)

        def ready() -> bool:
            return passed() or (self._failed.get(key) != self._cluster.changes and self._still())

        def resume() -> None:
            succeeded = passed()
            if not succeeded:
                self._failed[key] = self._cluster.changes
            then(succeeded)

        return Suspended(what, ready, resume, passed=passed)

    def _still(self) -> bool:
        """Whether no warp can go on and nothing is in flight."""
        if len(self._cluster.engine):
            return False
        for warp in self._cluster.warps:
            for fragment in warp.fragments:
                wait = fragment.wait
                if wait is None or (wait.passed() if isinstance(wait, Suspended) else wait.ready()):
                    return False
        return True


def _key(w: Warp) -> tuple[int, int, int]:
    return id(w), w.current.pc, w.current.lanes.bits
