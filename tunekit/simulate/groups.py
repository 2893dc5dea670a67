"""Async-groups (PTX ISA 9.7.9.25.1): what a thread has issued, committed, and may wait for.

Each thread has groups of its own. They are kept for a warp, since its threads mostly issue and commit together:
an operation and a group carry the lanes that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable


class Operation:
    """One asynchronous operation of some lanes of a warp.

    `read` is set once its sources have been read, `done` once its writes are made. `epoch` is its agent's epoch:
    who waits for the operation learns of the agent's work up to it.
    """

    __slots__ = ("done", "epoch", "lanes", "read", "what")

    def __init__(self, lanes: int, what: str, epoch: int = 0) -> None:
        self.lanes = lanes
        self.what = what
        self.epoch = epoch
        self.read = False
        self.done = False

    def finished(self, reads_only: bool) -> bool:
        return self.done or (reads_only and self.read)


class Groups:
    """The open operations and the committed groups of one warp, oldest first."""

    def __init__(self) -> None:
        self._open: list[tuple[int, Operation]] = []
        self._committed: list[tuple[int, tuple[Operation, ...]]] = []

    def issue(self, operation: Operation) -> None:
        """Adds an operation to those that the next commit gathers."""
        self._open.append((operation.lanes, operation))

    def commit(self, lanes: int) -> None:
        """commit_group by `lanes`: a group, possibly empty, of what each of them has issued since its last one."""
        self._committed.append((lanes, tuple(one for members, one in self._open if members & lanes)))
        self._open = [(members & ~lanes, one) for members, one in self._open if members & ~lanes]
        while self._committed and all(one.done for one in self._committed[0][1]):
            del self._committed[0]

    def before(self, lanes: int, pending: int) -> list[Operation]:
        """What wait_group `pending` by `lanes` waits for: each lane's groups but its last `pending` ones."""
        if not pending:
            return [one for members, group in self._committed if members & lanes for one in group if one.lanes & lanes]
        left = {1 << lane: pending for lane in range(32) if lanes >> lane & 1}
        found: list[Operation] = []
        for members, group in reversed(self._committed):
            waited = 0
            for lane in left:
                if members & lane:
                    if left[lane]:
                        left[lane] -= 1
                    else:
                        waited |= lane
            if waited:
                found.extend(one for one in group if one.lanes & waited)
        return found

    def everything(self, lanes: int) -> list[Operation]:
        """What wait_all by `lanes` waits for: committed or not."""
        return self.before(lanes, 0) + [one for members, one in self._open if members & lanes]

    def unfinished(self) -> list[Operation]:
        """Operations that have not completed, whoever waits for them."""
        committed = [one for _, group in self._committed for one in group]
        return [one for one in (*committed, *(one for _, one in self._open)) if not one.done]


def awaited(operations: Iterable[Operation], reads_only: bool, what: str) -> str:
    """The line of a deadlock report."""
    missing = [one.what for one in operations if not one.finished(reads_only)]
    return f"{what}: {len(missing)} operations outstanding, the first {missing[0]}" if missing else f"{what}: complete"
