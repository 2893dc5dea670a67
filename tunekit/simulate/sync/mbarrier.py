"""The mbarrier object (PTX ISA 9.7.13): its counts, its phases, and what a completed phase makes known.

An object lives in eight bytes of shared memory, whose content is opaque. Here the counts are kept beside the
memory and the bytes hold a signature: whoever overwrites them with ordinary stores destroys the object, and the
next operation on it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Knowledge

Report = Callable[[FaultKind, str], None]
"""Takes a fault; execution goes on."""

Epoch = tuple[int, int]
"""(index of the agent, number): a step of that agent."""

COUNT_LIMIT = 2**20 - 1
"""Largest count of arrivals, and largest magnitude of the transaction count ("Contents of the mbarrier object")."""

_PENDING_BITS = 20
_SIGNATURE = 0x6D62_6172_0000_0000


class Mbarrier:
    """One object.

    phase counts completed phases from 0; the current phase has parity `phase & 1`. expected and pending are
    arrivals, transactions is the tx-count in bytes. `published` is what the arrivals and transactions of all
    completed phases released: a waiter that sees a phase completed acquires it, and nothing of the phase that
    is still open (mbarrier.test_wait: the ordering is with arrivals of the completed phase).
    """

    __slots__ = (
        "_gathered",
        "expected",
        "initialised_by",
        "offset",
        "pending",
        "phase",
        "place",
        "published",
        "signature",
        "transactions",
    )

    def __init__(self, place: str, offset: int, count: int, serial: int = 0, by: Epoch = (0, 0)) -> None:
        """A freshly initialised object. `by` is the epoch of its mbarrier.init."""
        self.place = place
        self.offset = offset
        self.expected = count
        self.pending = count
        self.transactions = 0
        self.phase = 0
        self.initialised_by = by
        self.published: Knowledge | None = None
        self._gathered: Knowledge | None = None
        self.signature = (_SIGNATURE | (serial & 0xFFFF_FFFF)).to_bytes(8, "little")

    def arrive(self, count: int, known: Knowledge | None, report: Report) -> int:
        """The arrive-on operation with `count`; returns the state before it."""
        state = self.state()
        if not 1 <= count <= COUNT_LIMIT:
            report(FaultKind.MBARRIER, f"{self.place}: an arrival counts {count}, outside 1..{COUNT_LIMIT}")
            return state
        if count > self.pending:
            report(
                FaultKind.MBARRIER,
                f"{self.place} (phase {self.phase}): {count} arrivals, {self.pending} of {self.expected} pending",
            )
            count = self.pending
        self._gather(known)
        self.pending -= count
        self._settle()
        return state

    def arrive_many(self, lanes: int, count: int, known: Knowledge | None, report: Report) -> list[int]:
        """`lanes` threads of one warp arrive, each with `count`; returns each thread's state."""
        if 0 < count * lanes <= self.pending:
            state = self.state()
            self.arrive(count * lanes, known, report)
            return [state - lane * count for lane in range(lanes)]
        return [self.arrive(count, known, report) for _ in range(lanes)]

    def arrive_without_completing(self, count: int, known: Knowledge | None, report: Report) -> int:
        """arrive.noComplete: undefined if it completes the phase."""
        if count >= self.pending and self.transactions == 0:
            report(FaultKind.MBARRIER, f"{self.place} (phase {self.phase}): a .noComplete arrival completes the phase")
        return self.arrive(count, known, report)

    def expect_arrivals(self, count: int, report: Report) -> None:
        """`count` more arrivals in the current phase (cp.async.mbarrier.arrive without .noinc)."""
        if self.pending + count > COUNT_LIMIT:
            report(FaultKind.MBARRIER, f"{self.place}: {self.pending + count} pending arrivals, over {COUNT_LIMIT}")
        self.pending += count

    def drop(self, count: int, report: Report) -> None:
        """The first half of arrive_drop: later phases expect `count` fewer arrivals."""
        if count > self.expected:
            report(FaultKind.MBARRIER, f"{self.place}: {count} arrivals dropped where {self.expected} are expected")
            count = self.expected
        self.expected -= count

    def expect_tx(self, size: int, report: Report) -> None:
        """The expect-tx operation: `size` more bytes belong to the current phase."""
        self._transact(size, report)

    def complete_tx(self, size: int, known: Knowledge | None, report: Report) -> None:
        """The complete-tx operation: `size` bytes have arrived; their writes are released."""
        self._gather(known)
        self._transact(-size, report)

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is the one just completed, not the current one."""
        return self.phase & 1 != parity & 1

    def passed_state(self, state: int, report: Report) -> bool:
        """Whether the phase that `state` was taken in has completed: it must be the current or the last one."""
        phase = state >> _PENDING_BITS
        if not 0 <= self.phase - phase <= 1:
            report(FaultKind.MBARRIER, f"{self.place}: a state of phase {phase} is tested in phase {self.phase}")
        return self.phase != phase

    def state(self) -> int:
        """The opaque 64-bit state of the current phase."""
        return self.phase << _PENDING_BITS | self.pending

    def outstanding(self) -> str:
        """What the current phase still lacks: "1 of 128 arrivals and 16384 bytes of transactions outstanding"."""
        missing = [f"{self.pending} of {self.expected} arrivals"] if self.pending else []
        if self.transactions > 0:
            missing.append(f"{self.transactions} bytes of transactions")
        text = " and ".join(missing) + " outstanding" if missing else ""
        if self.transactions < 0:
            text += f"{', ' if text else ''}{-self.transactions} bytes more completed than expected"
        return text or "nothing outstanding"

    def awaited(self, parity: int) -> str:
        """The line of a deadlock report."""
        return f"{self.place} (phase {self.phase}, waiting for parity {parity & 1}): {self.outstanding()}"

    def _gather(self, known: Knowledge | None) -> None:
        if known is None:
            return
        if self._gathered is None:
            self._gathered = known.copy()
        else:
            self._gathered.join(known)

    def _transact(self, size: int, report: Report) -> None:
        total = self.transactions + size
        if abs(total) > COUNT_LIMIT:
            report(
                FaultKind.TRANSACTIONS,
                f"{self.place} (phase {self.phase}): transaction count {total}, beyond +-{COUNT_LIMIT} bytes",
            )
            total = max(-COUNT_LIMIT, min(COUNT_LIMIT, total))
        self.transactions = total
        self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            self.published = None if self._gathered is None else self._gathered.copy()


def pending_count(state: int) -> int:
    """mbarrier.pending_count: the arrivals that were pending when the state was taken."""
    return state & COUNT_LIMIT


class Mbarriers:
    """The objects of one CTA's shared memory. `content` is that memory's bytes, `place` names the CTA's memory."""

    def __init__(self, content: NDArray[np.uint8], place: str = "shared") -> None:
        self._content = content
        self._place = place
        self._live: dict[int, Mbarrier] = {}
        self._gone: dict[int, str] = {}
        self._serial = 0

    def init(self, offset: int, count: int, by: Epoch, report: Report) -> Mbarrier | None:
        """mbarrier.init. The caller writes `.signature` to the eight bytes; None if it can't be."""
        if not self._aligned(offset, report):
            return None
        old = self._live.get(offset)
        if old is not None and self._intact(old):
            report(
                FaultKind.MBARRIER, f"{old.place} is initialised while a valid mbarrier (phase {old.phase}) lives there"
            )
        if not 1 <= count <= COUNT_LIMIT:
            report(
                FaultKind.MBARRIER,
                f"{self.name(offset)} is initialised with a count of {count}, outside 1..{COUNT_LIMIT}",
            )
            count = max(1, min(COUNT_LIMIT, count))
        self._serial += 1
        fresh = self._live[offset] = Mbarrier(self.name(offset), offset, count, self._serial, by)
        return fresh

    def inval(self, offset: int, report: Report) -> None:
        """mbarrier.inval: the bytes may serve another purpose."""
        if self.get(offset, report) is not None:
            del self._live[offset]
            self._gone[offset] = "was invalidated"

    def get(self, offset: int, report: Report) -> Mbarrier | None:
        """The valid object at `offset`; None, and a report that says why, if there is none."""
        found = self._live.get(offset)
        if found is not None and self._intact(found):
            return found
        if not self._aligned(offset, report):
            return None
        if found is not None:
            del self._live[offset]
            self._gone[offset] = "was overwritten by a store to its bytes"
        report(FaultKind.MBARRIER, f"{self.name(offset)} {self._gone.get(offset, 'was never initialised')}")
        return None

    def leftovers(self) -> Iterator[tuple[str, bool]]:
        """A line for each object that still counts transactions when its CTA exits, and whether that is an error.

        Bytes that nobody expected are one. Expected bytes that never came are none, where nobody waits for them:
        the last stages of CUTLASS's pipelines are armed, and then the producer exits.
        """
        for one in self._live.values():
            if one.transactions and self._intact(one):
                line = f"{one.place} (phase {one.phase}) at the CTA's exit: {one.outstanding()}"
                yield line, one.transactions < 0

    def stuck(self) -> Iterator[str]:
        """A line for each object that has all its arrivals, and too few bytes or too many; asked when nothing is in
        flight."""
        for one in self._live.values():
            if one.transactions and not one.pending and self._intact(one):
                more = ", and nothing is in flight that brings them" if one.transactions > 0 else ""
                yield f"{one.place} (phase {one.phase}): {one.outstanding()}{more}"

    def name(self, offset: int) -> str:
        return f"mbarrier at {self._place} 0x{offset:x}"

    def _aligned(self, offset: int, report: Report) -> bool:
        if offset % 8:
            report(FaultKind.MBARRIER, f"{self.name(offset)} is not aligned to 8 bytes")
        elif not 0 <= offset <= self._content.size - 8:
            report(
                FaultKind.MBARRIER, f"{self.name(offset)} lies outside the {self._content.size} bytes of shared memory"
            )
        else:
            return True
        return False

    def _intact(self, one: Mbarrier) -> bool:
        return self._content[one.offset : one.offset + 8].tobytes() == one.signature
