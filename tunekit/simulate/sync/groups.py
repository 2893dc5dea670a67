"""Async-groups (PTX ISA 9.7.9, "Async-group mechanism"): what a thread has issued, committed, and may wait for.

Each thread has groups of its own. They are kept for a warp, since its threads mostly issue and commit together:
an operation and a group carry the lanes that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import FENCED_GLOBAL, FENCED_SHARED, HAPPENED, Access
from tunekit.simulate.machine.decode import Decoder, Wait
from tunekit.simulate.ptx.module import Immediate

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp
    from tunekit.simulate.ptx.module import Instruction


class Operation:
    """One asynchronous operation of some lanes of a warp.

    `read` is set once its sources have been read, `done` once its writes are made. Who waits for the reads learns of
    the agent's work up to `read_epoch`, who waits for all of it up to `epoch`. `waited`: somebody has.
    `instruction`: what issued it, where a report may want it.
    """

    __slots__ = ("done", "epoch", "instruction", "lanes", "read", "read_epoch", "waited", "what")

    def __init__(self, lanes: int, what: str, epoch: int = 0, read_epoch: int = 0) -> None:
        self.lanes = lanes
        self.what = what
        self.epoch = epoch
        self.read_epoch = read_epoch
        self.read = False
        self.done = False
        self.waited = False
        self.instruction: Instruction | None = None

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

    def settle(self, waited: Iterable[Operation]) -> None:
        """Drops the oldest groups that are complete and that somebody has waited for.

        A group that nobody has waited for stays, complete or not: only a wait lets a thread rely on it.
        """
        for one in waited:
            one.waited = True
        while self._committed and all(one.done and one.waited for one in self._committed[0][1]):
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

    def unwaited(self) -> list[Operation]:
        """Operations that nobody has waited for, committed or not."""
        committed = [one for _, group in self._committed for one in group]
        return [one for one in (*committed, *(one for _, one in self._open)) if not one.waited]


class WarpGroups(Groups):
    """The groups of one kind of copies of a warp, whose memory accesses are an agent's of their own."""

    def __init__(self, w: Warp, copies: str, proxy: str) -> None:
        super().__init__()
        self._w = w
        self.agent = w.cta.cluster.order.agent(f"{copies} of {w.agent.name}", proxy)

    def wait(self, operations: list[Operation], what: str, *, reads_only: bool = False) -> Wait | None:
        """Waits until the operations are over (reads_only: their sources read); the warp then relies on them."""

        def ready() -> bool:
            return all(one.finished(reads_only) for one in operations)

        def resume() -> None:
            known, index = self._w.known, self.agent.index
            known.room(index + 1)
            last = max((one.read_epoch if reads_only else one.epoch for one in operations), default=0)
            known.rows[HAPPENED, index] = max(last, int(known.rows[HAPPENED, index]))
            self.settle(operations)

        if ready():
            resume()
            return None
        return Wait(lambda: awaited(operations, reads_only, what), ready, resume)


class CopyGroups(WarpGroups):
    """The groups of a warp's cp.async: `w.part(CopyGroups)`. They act through the generic proxy."""

    def __init__(self, w: Warp) -> None:
        super().__init__(w, "cp.async", "generic")

    def begin(self, lanes: int, what: str) -> tuple[Operation, Access]:
        """A new operation, with its access as of now."""
        self.agent.epoch += 1
        happened = self._w.known.rows[HAPPENED].copy()
        access = Access(self.agent, self.agent.epoch, happened, happened, (self._w, self._w.instruction))
        operation = Operation(lanes, what, access.epoch, access.epoch)
        self.issue(operation)
        return operation, access


class BulkGroups(WarpGroups):
    """The groups of a warp's bulk copies: `w.part(BulkGroups)`. They act through the async proxy."""

    def __init__(self, w: Warp) -> None:
        super().__init__(w, "bulk copies", "async")
        w.cta.part(BulkExit).groups.append(self)

    def begin(self, lanes: int, what: str) -> tuple[Operation, Access, Access]:
        """A new operation from shared to global memory, with its read access and its write access as of now.

        Whoever runs the operation reads, sets `.read`, writes, sets `.done`.
        """
        self.agent.epoch += 1
        reading = self._w.async_access(self.agent, FENCED_SHARED)
        self.agent.epoch += 1
        writing = self._w.async_access(self.agent, FENCED_GLOBAL)
        operation = Operation(lanes, what, writing.epoch, reading.epoch)
        operation.instruction = self._w.instruction
        self.issue(operation)
        return operation, reading, writing

    def leave(self) -> None:
        """The CTA has exited: its shared memory, which the copies read, is no longer its own."""
        for one in self.unwaited():
            self._w.fault(
                FaultKind.UNFINISHED,
                f"{one.what} reads the CTA's shared memory, and the CTA exits without having waited for it",
                instruction=one.instruction,
            )


class BulkExit:
    """The bulk groups of a CTA's warps, looked at when it exits: `cta.part(BulkExit)`."""

    def __init__(self, cta: Cta) -> None:
        self.groups: list[BulkGroups] = []

    def finish(self) -> None:
        for groups in self.groups:
            groups.leave()


def pending_groups(i: Instruction, d: Decoder) -> int:
    """The operand of wait_group: how many of the latest groups may still be pending."""
    if not isinstance(i.operands[0], Immediate):
        raise d.unsupported("a number of groups that is no constant")
    return i.operands[0].value


def awaited(operations: Iterable[Operation], reads_only: bool, what: str) -> str:
    """The line of a deadlock report."""
    missing = [one.what for one in operations if not one.finished(reads_only)]
    return f"{what}: {len(missing)} operations outstanding, the first {missing[0]}" if missing else f"{what}: complete"
