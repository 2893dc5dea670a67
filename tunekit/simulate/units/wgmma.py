"""wgmma: asynchronous matrix multiply-accumulate by a warpgroup (PTX ISA 9.7.15).

Each of the four warps issues the instruction for 16 of the 64 rows: its slice of A, its part of D, all of B. The
operation runs when all four have issued it, at a time of the schedule's choice, in the order of issue. It reads shared
memory through the async proxy. Its registers may not be touched until a wgmma.wait_group covers it; what was touched
before must be fenced from it by a wgmma.fence. A plain mov is let through, as compilers place them freely: its
destination waits for the operation too.

Not modelled: sparse (.sp) and single-bit forms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import Decoder, Op, Step, Wait, after_decoding, instruction
from tunekit.simulate.machine.lanes import FULL, Lanes
from tunekit.simulate.matrix.arithmetic import ELEMENT_BITS
from tunekit.simulate.matrix.layout import Major
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.sync.warpgroup import Form, Issue, Mark, Operation, Tracking, Warpgroups, acquire_completed

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_HALF = ("f16", "bf16")
_FP8 = ("e4m3", "e5m2")
_INT8 = ("s8", "u8")
# N of the integer forms (9.7.15.2): multiples of 8 up to 32, then of 16.
_INTEGER_N = (8, 16, 24, *range(32, 257, 16))


def _form(i: ptx.Instruction, d: Decoder) -> Form:
    modifiers = i.modifiers[3:]
    shape = _SHAPE.fullmatch(modifiers[0])
    dtype, atype, btype = modifiers[-3:]
    options = modifiers[1:-3]
    if shape is None or not set(options) <= {"satfinite"}:
        raise d.unsupported("a form that is not modelled")
    n, k = int(shape[1]), int(shape[2])
    if atype in _HALF:
        legal = atype == btype and dtype in (("f16", "f32") if atype == "f16" else ("f32",))
    elif atype == "tf32":
        legal = btype == "tf32" and dtype == "f32"
    elif atype in _FP8:
        legal = btype in _FP8 and dtype in ("f16", "f32")
    else:
        legal = atype in _INT8 and btype in _INT8 and dtype == "s32" and n in _INTEGER_N
    if not legal or k * ELEMENT_BITS[atype] != 256 or n % 8 or not 8 <= n <= 256:
        raise d.unsupported("a shape and types that are not modelled")
    return Form(n, k, dtype, atype, btype, "satfinite" in options)


def _immediates(i: ptx.Instruction, d: Decoder) -> list[int]:
    found = []
    for operand in i.operands[4:]:
        if not isinstance(operand, ptx.Immediate):
            raise d.unsupported(f"an immediate that is {operand}")
        found.append(operand.value)
    return found


def _operation(i: ptx.Instruction, d: Decoder) -> Operation:
    form = _form(i, d)
    in_registers = isinstance(i.operands[1], ptx.Vector)
    accumulators = tuple(d.own(item, "b32") for item in d.items(i.operands[0]))
    a_registers = tuple(d.own(item, "b32") for item in d.items(i.operands[1])) if in_registers else ()
    if len(accumulators) != form.accumulator_registers or (in_registers and len(a_registers) != 4):
        raise d.unsupported(f"{len(accumulators)} accumulator and {len(a_registers)} A registers")
    immediates = _immediates(i, d)
    scales = immediates[:2] if form.dtype != "s32" else [1, 1]
    transposed = immediates[2:] if form.atype in _HALF else [0] * (1 if in_registers else 2)
    if in_registers:
        transposed = [0, *transposed]
    wanted = 0 if form.dtype == "s32" else 2 + (0 if form.atype not in _HALF else 1 if in_registers else 2)
    if len(immediates) != wanted or not set(scales) <= {1, -1} or not set(transposed) <= {0, 1}:
        raise d.unsupported(f"immediates {immediates}")
    majors: list[Major] = ["mn" if flag else "k" for flag in transposed]
    return Operation(i, form, accumulators, a_registers, (majors[0], majors[1]), (scales[0] < 0, scales[1] < 0))


@instruction("wgmma.mma_async.sync.aligned")
def mma_async(i: ptx.Instruction, d: Decoder) -> Step:
    """d, a or a-desc, b-desc, scale-d, imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b"""
    operation = _operation(i, d)
    a_slot = None if operation.a_registers else d.read(i.operands[1], "b64")
    b_slot = d.read(i.operands[2], "b64")
    scale_slot, negated = d.predicate(i.operands[3])
    take_accumulators = itemgetter(*operation.accumulators)
    count = len(operation.accumulators)

    def uniform(w: Warp, lanes: Lanes, slot: int) -> int:
        given = w.u64[slot][lanes.indices]
        if (given != given[0]).any():
            w.fault(
                FaultKind.DESCRIPTOR,
                f"a matrix descriptor differs among the lanes: {given[0]:#x} in lane {lanes.first}",
            )
        return int(given[0])

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        accumulate = bool(w.pred[scale_slot][lanes.first]) != negated
        group, tracking = w.cta.part(Warpgroups).of(w), w.part(Tracking)
        _check_registers(w, operation, tracking, lanes)
        defined = w.defined
        read: Iterable[int] = operation.a_registers
        if accumulate and take_accumulators(defined).count(FULL) != count:
            read = operation.slots
        for slot in read:
            missing = lanes.bits & ~defined[slot]
            if missing:
                w.fault(
                    FaultKind.UNDEFINED_REGISTER,
                    f"reads {w.program.decoder.names[slot]}, which nothing has written in these lanes",
                    lanes=Lanes.of(missing),
                )
        for slot in operation.accumulators:
            defined[slot] |= lanes.bits
        tracking.issued += 1
        tracking.last = operation
        tracking.number_of[operation] = tracking.issued
        w.pending.update(operation.marks)
        a = None if a_slot is None else uniform(w, lanes, a_slot)
        part = Issue(w, operation, a, uniform(w, lanes, b_slot), accumulate, w.async_access(group.agent))
        group.issue(tracking.issued, part)
        return None

    return step


def _check_registers(w: Warp, operation: Operation, tracking: Tracking, lanes: Lanes) -> None:
    """The conditions of 9.7.15.7.1 on what happened to the registers before."""
    if not tracking.fenced:
        w.fault(FaultKind.MISSING_WGMMA_FENCE, "the first wgmma of this warp, without a wgmma.fence before it")
        tracking.fenced = True
    if tracking.touched and not tracking.touched.isdisjoint(operation.slots):
        touched = tracking.touched & operation.slots
        names = w.program.decoder.names
        shown = ", ".join([*sorted(names[slot] for slot in touched)[:4], *["..."] * (len(touched) > 4)])
        w.fault(
            FaultKind.MISSING_WGMMA_FENCE,
            f"uses {shown}, accessed by other instructions since the last wgmma.fence",
        )
        tracking.touched -= touched
    last = tracking.last
    same_place = last is not None and last.accumulators == operation.accumulators
    chained = same_place and last is not None and last.form.shape == operation.form.shape
    if not w.pending or (chained and not operation.a_registers):
        return
    for slot in operation.a_registers if chained else operation.slots:
        mark = w.pending.get(slot)
        if mark is None:
            continue
        kind = FaultKind.EARLY_REGISTER
        if isinstance(mark, Mark) and mark.slot == slot:
            before = mark.operation
            writes = slot in operation.results, slot in before.results
            if not any(writes):
                continue  # both only read it
            if all(writes):
                if before.form.shape == operation.form.shape or last is None:
                    continue  # accumulators of one shape follow each other in order, others by a fence
                kind = FaultKind.MISSING_WGMMA_FENCE
        w.fault(kind, f"touches {w.program.decoder.names[slot]} {mark}", lanes)
        return


@instruction("wgmma.fence.sync.aligned")
def fence(i: ptx.Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is None:
            w.part(Tracking).fence()
        return wait

    return step


@instruction("wgmma.commit_group.sync.aligned")
def commit_group(i: ptx.Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is None:
            tracking = w.part(Tracking)
            tracking.groups.append(tracking.issued)
        return wait

    return step


@instruction("wgmma.wait_group.sync.aligned")
def wait_group(i: ptx.Instruction, d: Decoder) -> Step:
    """N: at most the last N groups stay in flight."""
    operand = i.operands[0]
    if not isinstance(operand, ptx.Immediate):
        raise d.unsupported(f"a count {operand}")
    allowed = operand.value

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        tracking = w.part(Tracking)
        finished = len(tracking.groups) - allowed
        if finished <= 0:
            return None
        number = tracking.groups[finished - 1]
        del tracking.groups[:finished]
        if not number:
            return None
        group = w.cta.part(Warpgroups).of(w)

        def resume() -> None:
            tracking.complete(number)
            acquire_completed(w, group, number)

        if group.completed >= number:
            resume()
            return None
        return Wait(
            lambda: f"wgmma.wait_group {allowed}: {group.status(number)}", lambda: group.completed >= number, resume
        )

    return step


@instruction("wgmma")
def refused(i: ptx.Instruction, d: Decoder) -> Step:
    raise d.unsupported("not modelled")


@after_decoding
def watch_registers(ops: tuple[Op, ...], d: Decoder) -> tuple[Op, ...]:
    """Lets instructions that access a wgmma's registers say so, for the check of wgmma.fence."""
    watched = {slot for op in ops if op.instruction.opcode == "wgmma" for slot in op.owns}
    if not watched:
        return ops
    return tuple(op if op.moves else _watched(op, watched.intersection((*op.reads, *op.writes))) for op in ops)


def _watched(op: Op, slots: set[int]) -> Op:
    if not slots:
        return op
    step = op.step

    def touch(w: Warp, lanes: Lanes) -> Wait | None:
        w.part(Tracking).touched |= slots
        return step(w, lanes)

    return replace(op, step=touch)
