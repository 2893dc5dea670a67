"""mbarrier instructions (PTX ISA 9.7.13). The object itself is in tunekit.simulate.sync.mbarrier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import Access, Knowledge
from tunekit.simulate.history.patterns import Patterns
from tunekit.simulate.machine.decode import AddressOf, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.completion import CtaMbarriers, Signal, completed, locate
from tunekit.simulate.sync.groups import CopyGroups
from tunekit.simulate.sync.mbarrier import Mbarrier, Report, pending_count
from tunekit.simulate.sync.suspension import Suspensions

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp

_SPACES = ("shared", "shared::cta", "shared::cluster")


def _space(i: ptx.Instruction) -> str:
    return next((word for word in i.modifiers if word in _SPACES), "generic")


def _semantics(i: ptx.Instruction, default: str) -> str:
    return "relaxed" if "relaxed" in i.modifiers else default


def _report(w: Warp) -> Report:
    return lambda kind, text: w.fault(kind, text)


def _groups(lanes: Lanes, *values: NDArray[np.int64]) -> Iterator[tuple[tuple[int, ...], Lanes]]:
    """The active lanes by equal operands; mostly there is one group."""
    if all((value == value[0]).all() for value in values):
        yield tuple(int(value[0]) for value in values), lanes
        return
    rows = np.stack(values, axis=1)
    for row in np.unique(rows, axis=0):
        same = (rows == row).all(axis=1)
        yield tuple(int(n) for n in row), Lanes.of(int(np.bitwise_or.reduce(np.left_shift(1, lanes.indices[same]))))


def _counts(w: Warp, slot: int, lanes: Lanes) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = w.u32[slot][lanes.indices].astype(np.int64)
    return counts


def _own(w: Warp, cta: Cta, does: str) -> bool:
    """Whether the object is in the CTA's own memory, as init, inval and the waits demand; if not, a fault."""
    if cta is not w.cta:
        w.fault(FaultKind.MBARRIER, f"{does} an mbarrier of cta {cta.rank}: only a CTA's own are allowed")
    return cta is w.cta


@instruction("mbarrier.init")
def init(i: ptx.Instruction, d: Decoder) -> Step:
    address, space = d.address(i.operands[0]), _space(i)
    count = d.read(i.operands[1], "b32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for (where, many), _ in _groups(lanes, address.of(w, lanes), _counts(w, count, lanes)):
            place = locate(w, space, where, "an mbarrier")
            if place is None or not _own(w, place[0], "initialises"):
                continue
            cta, offset = place
            patterns = w.part(Patterns)
            one = cta.part(CtaMbarriers).init(offset, many, patterns.initialises(), _report(w))
            if one is not None:
                ordinary = w.access()
                row = ordinary.happened
                access = Access(patterns.initialiser, patterns.initialiser.epoch, row, row, ordinary.site)
                cta.shared.write(np.array([offset]), np.frombuffer(one.signature, dtype=np.uint8)[None], access)
                w.cta.cluster.changes += 1
        return None

    return step


@instruction("mbarrier.inval")
def inval(i: ptx.Instruction, d: Decoder) -> Step:
    address, space = d.address(i.operands[0]), _space(i)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for (where,), _ in _groups(lanes, address.of(w, lanes)):
            signal = Signal.of(w, space, where)
            if signal is not None and _own(w, signal.cta, "invalidates"):
                signal.cta.part(CtaMbarriers).inval(signal.offset, _report(w))
                w.cta.cluster.changes += 1
        return None

    return step


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def transact(i: ptx.Instruction, d: Decoder) -> Step:
    """expect_tx, and complete_tx: the signal of a completed copy without a copy."""
    address, space = d.address(i.operands[0]), _space(i)
    size = d.read(i.operands[1], "b32")
    expects = i.modifiers[0] == "expect_tx"

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for (where, many), group in _groups(lanes, address.of(w, lanes), _counts(w, size, lanes)):
            signal = Signal.of(w, space, where)
            if signal is None:
                continue
            for _ in range(group.count):
                if expects:
                    signal.expect_tx(many)
                else:
                    signal.complete_tx(many, None)
        return None

    return step


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(i: ptx.Instruction, d: Decoder) -> Step:
    """arrive and arrive_drop, also .expect_tx and .noComplete."""
    space, semantics = _space(i), _semantics(i, "release")
    expects, incomplete = "expect_tx" in i.modifiers, "noComplete" in i.modifiers
    drops = i.modifiers[0] == "arrive_drop"
    operands = list(i.operands)
    # The state may be left out as a whole: mbarrier.arrive.shared::cluster.b64 _, [addr] or without "_".
    state = -1
    if not isinstance(operands[0], ptx.Address):
        first = operands.pop(0)
        state = -1 if d.sink(first) else d.write(first, "b64")
    if state >= 0 and space == "shared::cluster":
        raise d.unsupported("a state of a .shared::cluster arrival")
    address = d.address(operands[0])
    argument = d.read(operands[1], "b32") if len(operands) > 1 else d.constant(1, 32)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        known = w.part(Patterns).release(semantics)
        for (where, many), group in _groups(lanes, address.of(w, lanes), _counts(w, argument, lanes)):
            signal = Signal.of(w, space, where)
            one = signal.mbarrier() if signal is not None else None
            if one is None:
                continue
            if state >= 0 and signal is not None and signal.cta is not w.cta:
                w.fault(FaultKind.MBARRIER, f"{one.place} is remote: its arrivals return no state", group)
            states = _arrive(one, group.count, many, known, _report(w), expects, drops, incomplete)
            w.cta.cluster.changes += 1
            if state >= 0:
                w.u64[state][group.indices] = states
        return None

    return step


def _arrive(
    one: Mbarrier,
    lanes: int,
    argument: int,
    known: Knowledge | None,
    report: Report,
    expects: bool,
    drops: bool,
    incomplete: bool,
) -> list[int]:
    """The arrivals of some lanes, each with the same argument: a count, or bytes for .expect_tx."""
    count = 1 if expects else argument
    if not (expects or drops or incomplete):
        return one.arrive_many(lanes, count, known, report)
    states = []
    for _ in range(lanes):
        if expects:
            one.expect_tx(argument, report)
        if drops:
            one.drop(count, report)
        act = one.arrive_without_completing if incomplete else one.arrive
        states.append(act(count, known, report))
    return states


@instruction("mbarrier.test_wait", "mbarrier.try_wait")
def wait(i: ptx.Instruction, d: Decoder) -> Step:
    """test_wait and try_wait, by state or by parity."""
    space, semantics = _space(i), _semantics(i, "acquire")
    polls, by_parity = i.modifiers[0] == "test_wait", "parity" in i.modifiers
    result = d.write(i.operands[0], "pred")
    address = d.address(i.operands[1])
    phase = d.read(i.operands[2], "b32" if by_parity else "b64")
    if len(i.operands) > 3:
        d.read(i.operands[3], "b32")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        phases = (w.u32 if by_parity else w.s64)[phase][lanes.indices].astype(np.int64)
        tests: list[tuple[Mbarrier, int, Callable[[], bool], Lanes]] = []
        w.pred[result][lanes.indices] = True
        for (where, value), group in _groups(lanes, address.of(w, lanes), phases):
            signal = Signal.of(w, space, where)
            one = signal.mbarrier() if signal is not None and _own(w, signal.cta, "waits for") else None
            if one is not None:
                tests.append((one, value, _test(w, one, value, by_parity), group))

        def all_passed() -> bool:
            return all(test() for _, _, test, _ in tests)

        passed = tests[0][2] if len(tests) == 1 else all_passed

        def finish(_succeeded: bool) -> None:
            for one, _, test, group in tests:
                success = test()
                w.pred[result][group.indices] = success
                if success:
                    w.part(Patterns).acquire(semantics, one.published)

        def what() -> str:
            return "; ".join(
                one.awaited(value if by_parity else one.phase) for one, value, test, _ in tests if not test()
            )

        suspensions = w.cta.cluster.part(Suspensions)
        if passed():
            finish(True)
        elif not suspensions.failed_here(w) and (
            polls or suspensions.gives_up(w, [(one, one.phase) for one, *_ in tests])
        ):
            suspensions.fail(w)
            finish(False)
        else:
            return suspensions.wait(w, what, passed, finish)
        return None

    return step


def _test(w: Warp, one: Mbarrier, value: int, by_parity: bool) -> Callable[[], bool]:
    if by_parity:
        parity = value & 1
        return lambda: one.passed(parity)
    one.passed_state(value, _report(w))
    return lambda: one.passed_state(value, _silent)


def _silent(kind: FaultKind, text: str) -> None:
    """A state that was reported once already."""


@instruction("mbarrier.pending_count")
def pending(i: ptx.Instruction, d: Decoder) -> Step:
    out, state = d.write(i.operands[0], "b32"), d.read(i.operands[1], "b64")

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        w.u32[out][lanes.indices] = [pending_count(int(one)) for one in w.u64[state][lanes.indices]]
        return None

    return step


@instruction("cp.async.mbarrier.arrive")
def arrive_after_copies(i: ptx.Instruction, d: Decoder) -> Step:
    """The mbarrier tracks all earlier cp.async of the thread: they arrive when they are done."""
    address: AddressOf = d.address(i.operands[0])
    space = _space(i)
    counted = "noinc" in i.modifiers

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        copies = w.part(CopyGroups)
        cluster = w.cta.cluster
        for (where,), group in _groups(lanes, address.of(w, lanes)):
            signal = Signal.of(w, space, where)
            one = signal.mbarrier() if signal is not None else None
            if signal is None or one is None:
                continue
            if not counted:
                one.expect_arrivals(group.count, _report(w))
            _, access = copies.begin(0, i.text)

            def act(signal: Signal = signal, count: int = group.count, access: Access = access) -> None:
                for _ in range(count):
                    signal.arrive(1, completed(cluster.order, access))

            cluster.engine.submit(act, copies.agent.name, f"{i.dotted} at PTX line {i.line}")
            cluster.changes += 1
        return None

    return step
