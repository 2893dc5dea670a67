"""Warpgroups: wgmma operations issued, in flight and complete, and the registers that they hold (PTX ISA 9.7.15).

Four warps, the first a multiple of four, make a warpgroup. Its n-th operation consists of the n-th wgmma of each of
its warps. It is one agent in the order of memory: its epochs are the numbers of its operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import HAPPENED, Access
from tunekit.simulate.matrix import descriptor_sm90, fragment, layout
from tunekit.simulate.matrix.arithmetic import ACCUMULATORS, ELEMENT_BITS, UNSIGNED, multiply_add, values
from tunekit.simulate.ptx.module import Instruction

if TYPE_CHECKING:
    from tunekit.simulate.machine.cta import Cta
    from tunekit.simulate.machine.warp import Warp

WARPS = 4
ROWS = 16  # of A and D, a warp


@dataclass(frozen=True)
class Form:
    """Shape m64 n k, types of D, A and B."""

    n: int
    k: int
    dtype: str
    atype: str
    btype: str
    satfinite: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def accumulator_registers(self) -> int:
        """A thread's registers of D."""
        return self.n // (4 if self.dtype == "f16" else 2)


class Mark(str):
    """Why a register is pending, as a text that knows its operation and the register that it stands for."""

    operation: Operation
    slot: int


class Operation:
    """A decoded wgmma.mma_async. Slots: accumulators; a_registers, or a_descriptor; b_descriptor."""

    def __init__(
        self,
        i: Instruction,
        form: Form,
        accumulators: tuple[int, ...],
        a_registers: tuple[int, ...],
        majors: tuple[layout.Major, layout.Major],
        negated: tuple[bool, bool],
    ) -> None:
        self.instruction = i
        self.form = form
        self.accumulators = accumulators
        self.a_registers = a_registers
        self.majors = majors
        self.negated = negated
        self.results = frozenset(accumulators)
        self.slots = self.results.union(a_registers)
        self.marks: dict[int, Mark] = {}
        for slots, role in ((a_registers, "part of A"), (accumulators, "an accumulator")):
            for slot in slots:
                mark = Mark(f"before a wgmma.wait_group has covered it: {role} of the wgmma at PTX line {i.line}")
                mark.operation, mark.slot = self, slot
                self.marks[slot] = mark

    def read_accumulator(self, w: Warp) -> NDArray[Any]:
        words = w.words(self.accumulators)
        if self.form.dtype == "f16":
            return fragment.c_matrix_packed(words.view(np.float16).reshape(*words.shape, 2), ROWS)
        return fragment.c_matrix(words.view(ACCUMULATORS[self.form.dtype]), ROWS)

    def write_accumulator(self, w: Warp, matrix: NDArray[Any]) -> None:
        if self.form.dtype == "f16":
            words = np.ascontiguousarray(fragment.c_registers_packed(matrix)).view(np.uint32)[..., 0]
        else:
            words = fragment.c_registers(matrix).view(np.uint32)
        w.set_words(self.accumulators, words)

    def a_from_registers(self, w: Warp) -> NDArray[np.float64]:
        bits = ELEMENT_BITS[self.form.atype]
        words = w.words(self.a_registers)
        elements = words.view(UNSIGNED[bits]).reshape(*words.shape, 32 // bits)
        return values(fragment.a_matrix(elements, ROWS), self.form.atype)


@dataclass(slots=True)
class Issue:
    """One warp's part of an operation. access: what it may rely on in shared memory."""

    warp: Warp
    operation: Operation
    a: int | None
    b: int
    accumulate: bool
    access: Access


class Tracking:
    """A warp's registers and groups.

    touched  registers of wgmma operands that ordinary instructions accessed since the last wgmma.fence
    fenced   whether there was a wgmma.fence at all
    groups   number of the last operation of each committed group that may be in flight
    """

    def __init__(self, w: Warp) -> None:
        self.warp = w
        self.touched: set[int] = set()
        self.fenced = False
        self.groups: list[int] = []
        self.issued = 0
        self.last: Operation | None = None
        self.number_of: dict[Operation, int] = {}

    def fence(self) -> None:
        self.fenced = True
        self.touched.clear()
        self.last = None

    def complete(self, number: int) -> None:
        """Takes the marks off registers of operations up to `number`, copies of them too."""
        pending = self.warp.pending
        done = [
            slot
            for slot, mark in pending.items()
            if isinstance(mark, Mark) and self.number_of[mark.operation] <= number
        ]
        for slot in done:
            del pending[slot]


class Warpgroup:
    """Four warps of a CTA: `completed` operations are done, those in `issues` are on their way."""

    def __init__(self, cta: Cta, number: int) -> None:
        self.cta = cta
        self.number = number
        self.members = range(WARPS * number, WARPS * number + WARPS)
        name = f"wgmma of warps {self.members[0]}-{self.members[-1]}"
        self.agent = cta.cluster.order.agent(f"cta {cta.rank} {name}" if cta.cluster.size > 1 else name, "async")
        self.completed = 0
        self.issues: dict[int, list[Issue]] = {}

    def issue(self, number: int, issue: Issue) -> None:
        """A warp's part of operation `number`; the last of the four sets the operation going."""
        issue.access.epoch = number
        parts = self.issues.setdefault(number, [])
        parts.append(issue)
        if len(parts) == WARPS:
            parts.sort(key=lambda part: part.warp.number)
            self._agree(parts)
            i = parts[0].operation.instruction
            self.cta.cluster.engine.submit(
                lambda: self._run(number, parts),
                (Warpgroup, self.cta.rank, self.number),
                f"{i.dotted} at PTX line {i.line}",
            )

    def status(self, number: int) -> str:
        """What operations up to `number` still wait for."""
        for other in range(self.completed + 1, number + 1):
            parts = self.issues.get(other, [])
            if len(parts) < WARPS:
                line = parts[0].operation.instruction.line if parts else "?"
                return (
                    f"the wgmma at PTX line {line}, which {_names(self._missing(parts))} of its warpgroup did not issue"
                )
        return "wgmma in flight"

    def _missing(self, parts: Sequence[Issue]) -> list[int]:
        have = {part.warp.number for part in parts}
        return [number for number in self.members if number not in have]

    def _agree(self, parts: Sequence[Issue]) -> None:
        first = parts[0]
        for part in parts[1:]:
            if part.operation is not first.operation:
                raise part.warp.stop(
                    FaultKind.DIVERGENCE,
                    f"warps {first.warp.number} and {part.warp.number} of a warpgroup execute different wgmma "
                    f"instructions: PTX lines {first.operation.instruction.line} and {part.operation.instruction.line}",
                )
            if (part.a, part.b, part.accumulate) != (first.a, first.b, first.accumulate):
                part.warp.fault(
                    FaultKind.DESCRIPTOR,
                    f"warps {first.warp.number} and {part.warp.number} of a warpgroup disagree: {_shown(first)} and "
                    f"{_shown(part)}",
                    instruction=part.operation.instruction,
                )

    def _run(self, number: int, parts: Sequence[Issue]) -> None:
        first = parts[0]
        operation, form = first.operation, first.operation.form
        a = self._a(parts)
        b = values(
            self._matrix(first.b, form.n, form.btype, operation.majors[1], _weakest(parts), 0, form.n), form.btype
        )
        if operation.negated[0]:
            a = -a
        if operation.negated[1]:
            b = -b
        c = np.concatenate([operation.read_accumulator(part.warp) for part in parts]) if first.accumulate else None
        result = multiply_add(a, b, c, form.dtype, satfinite=form.satfinite)
        for rank, part in enumerate(parts):
            operation.write_accumulator(part.warp, result[ROWS * rank : ROWS * (rank + 1)])
            self._write_copies(part.warp, operation, number)
        del self.issues[number]
        self.completed = number

    def _a(self, parts: Sequence[Issue]) -> NDArray[np.float64]:
        operation = parts[0].operation
        if parts[0].a is None:
            return np.concatenate([operation.a_from_registers(part.warp) for part in parts])
        kind, major = operation.form.atype, operation.majors[0]
        slices = [
            self._matrix(part.a or 0, WARPS * ROWS, kind, major, part.access, ROWS * rank, ROWS * (rank + 1))
            for rank, part in enumerate(parts)
        ]
        return values(np.concatenate(slices), kind)

    def _matrix(
        self, descriptor: int, rows: int, kind: str, major: layout.Major, access: Access, start: int, stop: int
    ) -> NDArray[Any]:
        """Rows start to stop of an operand of `rows` rows: bit patterns, [rows, k]."""
        bits = ELEMENT_BITS[kind]
        place = descriptor_sm90.decode(descriptor)
        chunks = layout.chunk_addresses(place, rows, 256 // bits, bits, major)
        if major == "mn":
            start, stop = start * bits // 128, stop * bits // 128
        chunks = chunks[start:stop]
        shared = self.cta.shared
        inside = shared.within(chunks, layout.CHUNK_BYTES)
        if inside.all():
            data = shared.read(chunks, layout.CHUNK_BYTES, access)
        else:
            warp, i = access.site
            warp.fault(
                FaultKind.OUT_OF_BOUNDS,
                f"matrix descriptor {descriptor:#018x} ({place}) leads to {shared.where(int(chunks[~inside][0]))}, "
                "outside the CTA's shared memory",
                instruction=i,
            )
            data = np.zeros((*chunks.shape, layout.CHUNK_BYTES), dtype=np.uint8)
            data[inside] = shared.read(chunks[inside], layout.CHUNK_BYTES, access)
        return layout.elements(data, UNSIGNED[bits], major)

    def _write_copies(self, w: Warp, operation: Operation, number: int) -> None:
        """Gives the results to registers that a mov copied from a pending accumulator."""
        for slot in w.pending.keys() - operation.marks.keys():
            mark = w.pending[slot]
            if (
                isinstance(mark, Mark)
                and mark.operation is operation
                and w.part(Tracking).number_of[operation] == number
            ):
                if mark.slot not in operation.results:
                    continue  # A is not written: its copies are what they shall be
                if w.u32[slot] is None:
                    name = w.program.decoder.names[slot]
                    w.fault(
                        FaultKind.EARLY_REGISTER,
                        f"{name} was taken out of an accumulator {mark}",
                        instruction=operation.instruction,
                    )
                    continue
                w.u32[slot][:] = w.u32[mark.slot]


class Warpgroups:
    """The warpgroups of a CTA."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self._groups: dict[int, Warpgroup] = {}

    def of(self, w: Warp) -> Warpgroup:
        number = w.number // WARPS
        group = self._groups.get(number)
        if group is None:
            if WARPS * (number + 1) > len(self.cta.warps):
                raise w.stop(
                    FaultKind.DIVERGENCE,
                    f"wgmma needs four warps, from {WARPS * number} on; the CTA has {len(self.cta.warps)}",
                )
            group = self._groups[number] = Warpgroup(self.cta, number)
        return group

    def finish(self) -> None:
        for group in self._groups.values():
            for parts in group.issues.values():
                have = [part.warp.number for part in parts]
                self.cta.fault(
                    FaultKind.DIVERGENCE,
                    f"issued by {_names(have)} of a warpgroup, but not by {_names(group._missing(parts))}",
                    parts[0].operation.instruction,
                )


def acquire_completed(w: Warp, group: Warpgroup, number: int) -> None:
    """What a warp knows after operations up to `number` are complete: their reads lie before what it does next."""
    w.known.room(group.agent.index + 1)
    row = w.known.rows[HAPPENED]
    row[group.agent.index] = max(int(row[group.agent.index]), number)


def _weakest(parts: Sequence[Issue]) -> Access:
    """What all of the warps may rely on: every one of them reads all of B."""
    access = parts[-1].access
    columns = min(part.access.known.size for part in parts)
    known = np.minimum.reduce([part.access.known[:columns] for part in parts])
    happened = np.minimum.reduce([part.access.happened[:columns] for part in parts])
    return Access(access.agent, access.epoch, known, happened, access.site, access.blame)


def _names(warps: Iterable[int]) -> str:
    numbers = list(warps)
    return ("warp " if len(numbers) == 1 else "warps ") + ", ".join(str(number) for number in numbers)


def _shown(part: Issue) -> str:
    a = "A in registers" if part.a is None else f"A {part.a:#018x}"
    return f"{a}, B {part.b:#018x}, scale-d {int(part.accumulate)}"
