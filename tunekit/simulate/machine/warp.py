"""A warp: 32 lanes, their registers, and the fragments that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.access import WarpMemory
from tunekit.simulate.machine.decode import Op, Wait
from tunekit.simulate.machine.fragments import Fragment, Meeting
from tunekit.simulate.machine.lanes import FULL, Lanes
from tunekit.simulate.machine.program import Program
from tunekit.simulate.machine.specials import fill_specials
from tunekit.simulate.ptx.module import Instruction

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta

P = TypeVar("P")
_ALL_TRUE = np.ones(32, dtype=np.bool_).tobytes()


class Warp(WarpMemory):
    """One warp. `number` counts within its CTA; `current` is the fragment that executes now.

    still counts its instructions since it was last seen to change memory or barriers, or to find them changed.
    pending maps a slot to why its
    value is not there yet (a tcgen05.ld before its wait, the accumulators of a wgmma).
    """

    def __init__(self, cta: Cta, number: int, live: int, program: Program) -> None:
        super().__init__(program.decoder)
        self.cta = cta
        self.number = number
        self.program = program
        self.ops = program.ops
        self.live = live
        self.fragments: list[Fragment] = [Fragment(0, Lanes.of(live))]
        self.current = self.fragments[0]
        self.instruction: Instruction = program.ops[0].instruction
        self.pending: dict[int, str] = {}
        self.executed = 0
        self.still = 0
        order = cta.cluster.order
        self.agent = order.agent(
            f"cta {cta.rank} warp {number}" if cta.cluster.size > 1 else f"warp {number}", "generic"
        )
        self.known = order.knowledge()
        self.known.room(self.agent.index + 1)
        self.known.rows[0, self.agent.index] = self.agent.epoch
        self._parts: dict[type, Any] = {}
        fill_specials(self, program)

    # For units

    def part(self, kind: type[P]) -> P:
        """This warp's instance of a unit's state, made on first use as kind(warp)."""
        part = self._parts.get(kind)
        if part is None:
            part = self._parts[kind] = kind(self)  # type: ignore[call-arg]
        return cast(P, part)

    # Control flow

    def jump(self, target: int) -> None:
        self.current.pc = target

    def branch(self, i: Instruction, taken: Lanes, target: int) -> None:
        """Sends the `taken` lanes of the current fragment to `target`, the others to the next instruction."""
        fragment = self.current
        if taken.bits == fragment.lanes.bits:
            fragment.pc = target
        elif not taken.bits:
            fragment.pc = i.index + 1
        else:
            rest = Lanes.of(fragment.lanes.bits & ~taken.bits)
            self.split(i, [(target, taken), (i.index + 1, rest)])

    def split(self, i: Instruction, parts: list[tuple[int, Lanes]]) -> None:
        """Splits the current fragment into parts (pc, lanes) that meet again at i's post-dominator."""
        fragment = self.current
        meet = self.program.reconvergence[i.index]
        meetings = fragment.meetings
        if meet is not None and not (meetings and meetings[-1].pc == meet):
            meetings = (*meetings, Meeting(meet, fragment.lanes.bits, outer=meetings))
        self.fragments.remove(fragment)
        for pc, lanes in parts:
            self.fragments.append(Fragment(pc, lanes, meetings, returns=fragment.returns))

    def exit(self, lanes: Lanes) -> None:
        """Ends `lanes`; the rest of the current fragment goes on."""
        fragment = self.current
        self.live &= ~lanes.bits
        for meeting in fragment.meetings:
            meeting.expected &= ~lanes.bits
        rest = fragment.lanes.bits & ~lanes.bits
        if rest:
            fragment.lanes = Lanes.of(rest)
            fragment.pc += 1
        else:
            self.fragments.remove(fragment)
        for meeting in reversed(fragment.meetings):
            self._close(meeting)

    def _meet(self, fragment: Fragment) -> None:
        meeting = fragment.meetings[-1]
        if meeting.given_up:
            meeting.expected &= ~fragment.lanes.bits
            fragment.meetings = meeting.outer
            return
        meeting.arrived |= fragment.lanes.bits
        self.fragments.remove(fragment)
        self._close(meeting, fragment.returns)

    def give_up_meetings(self) -> bool:
        """Lets lanes that wait for others to reconverge go on without them; whether there were any."""
        found = False
        for fragment in list(self.fragments):
            for meeting in fragment.meetings:
                if meeting.arrived:
                    found = meeting.given_up = True
                    lanes = Lanes.of(meeting.arrived & self.live)
                    meeting.expected &= ~meeting.arrived
                    meeting.arrived = 0
                    if lanes.bits:
                        self.fragments.append(Fragment(meeting.pc, lanes, meeting.outer, returns=fragment.returns))
        return found

    def _close(self, meeting: Meeting, returns: tuple[int, ...] = ()) -> None:
        """Lets the lanes of a meeting go on when all that are expected have come."""
        if meeting.arrived and meeting.arrived & meeting.expected == meeting.expected:
            lanes = Lanes.of(meeting.arrived & self.live)
            meeting.arrived = meeting.expected = 0
            if lanes.bits:
                self.fragments.append(Fragment(meeting.pc, lanes, meeting.outer, returns=returns))

    def converge(self, i: Instruction, lanes: Lanes, members: int | None = None) -> Wait | None:
        """What an instruction with .sync or .aligned needs first: all its live members at this instruction.

        members: the membermask; None for .aligned (every live lane). Returns the Wait to hand back, or None when
        the current fragment holds them all.
        """
        need = (FULL if members is None else members) & self.live
        fragment = self.current
        if lanes.bits & need == need:
            return None
        if fragment.lanes.bits & need == need:
            raise self.stop(
                FaultKind.DIVERGENCE,
                f"{i.dotted} executed by lanes {lanes.bits:#010x} of the {need:#010x} that must execute it together: "
                "its guard differs among them",
            )

        def here() -> list[Fragment]:
            return [f for f in self.fragments if f.pc == i.index and (f is fragment or f.wait is not None)]

        def gathered() -> bool:
            bits = 0
            for other in here():
                bits |= other.lanes.bits
            return bits & need == (FULL if members is None else members) & self.live

        def merge() -> None:
            for other in here():
                if other is not fragment:
                    self.absorb(other)

        def text() -> str:
            return (
                f"{i.dotted} (PTX line {i.line}), which lanes {need:#010x} must execute together: here are "
                f"{fragment.lanes.bits:#010x}"
            )

        if gathered():
            merge()
            return Wait(text, lambda: True, again=True)
        return Wait(text, gathered, merge, again=True)

    def absorb(self, other: Fragment) -> None:
        """Makes the lanes of a fragment at the same instruction part of the current one."""
        fragment = self.current
        fragment.lanes = Lanes.of(fragment.lanes.bits | other.lanes.bits)
        self.fragments.remove(other)
        for meeting in reversed(other.meetings):
            if meeting not in fragment.meetings:
                meeting.expected &= ~other.lanes.bits
                self._close(meeting)

    # Running

    def ready(self) -> list[Fragment]:
        return [fragment for fragment in self.fragments if fragment.ready]

    def run(self, fragment: Fragment, budget: int) -> None:
        """Executes up to `budget` instructions of a fragment that is ready."""
        self.current = fragment
        if fragment.wait is not None:
            waited, fragment.wait = fragment.wait, None
            self.instruction = self.ops[fragment.pc].instruction
            if waited.resume is not None:
                waited.resume()
            if not waited.again:
                fragment.pc += 1
        ops, defined, pred = self.ops, self.defined, self.pred
        done = 0
        while done < budget:
            pc = fragment.pc
            if fragment.meetings and fragment.meetings[-1].pc == pc:
                self._meet(fragment)
                break
            op = ops[pc]
            lanes = fragment.lanes
            done += 1
            self.instruction = op.instruction
            if op.guard >= 0:
                if defined[op.guard] & lanes.bits != lanes.bits:
                    self._undefined(op, op.guard, lanes)
                mask = ~pred[op.guard] if op.negated else pred[op.guard]
                if mask.tobytes() != _ALL_TRUE:
                    lanes = Lanes.of(Lanes.of_mask(mask).bits & lanes.bits)
                if not lanes.bits and not op.control:
                    fragment.pc = pc + 1
                    continue
            bits = lanes.bits
            if op.moves:
                self._move(op, bits)
            else:
                for slot in op.reads:
                    if defined[slot] & bits != bits:
                        self._undefined(op, slot, lanes)
                if self.pending:
                    self._early(op, lanes)
            wait = op.step(self, lanes)
            if not op.moves:
                for slot in op.writes:
                    defined[slot] |= bits
            if wait is not None:
                fragment.wait = wait
                break
            if op.control:
                if self.current is not fragment or fragment not in self.fragments:
                    break
            else:
                fragment.pc = pc + 1
        self.executed += done

    def _move(self, op: Op, bits: int) -> None:
        """A copy passes on which lanes are defined, and what is still pending."""
        have = bits
        for slot in op.reads:
            have &= self.defined[slot]
        for slot in op.writes:
            self.defined[slot] = (self.defined[slot] & ~bits) | have
        if self.pending:
            reasons = [self.pending[slot] for slot in op.reads if slot in self.pending]
            for slot in op.writes:
                if reasons:
                    self.pending[slot] = reasons[0]
                else:
                    self.pending.pop(slot, None)

    def _undefined(self, op: Op, slot: int, lanes: Lanes) -> None:
        missing = Lanes.of(lanes.bits & ~self.defined[slot])
        name = self.program.decoder.names.get(slot, "a register")
        self.fault(FaultKind.UNDEFINED_REGISTER, f"reads {name}, which nothing has written in these lanes", missing)
        self.defined[slot] |= lanes.bits

    def _early(self, op: Op, lanes: Lanes) -> None:
        for slot in (*op.reads, *op.writes):
            reason = self.pending.get(slot)
            if reason is not None:
                arrive = getattr(reason, "arrive", None)
                if arrive is not None:
                    arrive()
                    if not self.cta.cluster.strict:
                        continue
                name = self.program.decoder.names.get(slot, "a register")
                self.fault(FaultKind.EARLY_REGISTER, f"{op.instruction.dotted} touches {name} {reason}", lanes)
                self.pending.pop(slot, None)
