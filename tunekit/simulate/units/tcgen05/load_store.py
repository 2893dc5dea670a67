"""tcgen05.ld, .st and .wait: between tensor memory and registers (PTX ISA 9.7.16.8).

Both are asynchronous. Here the cells are read and written when the instruction executes, and the history of
accesses tells who might have come too early or too late: the warp itself knows that its loads and stores are over
only from tcgen05.wait on.

An instruction that uses a register of a load waits for it by itself (9.7.16.6.4.5: a true register dependency is
respected). What it computes with has then been read, so the load is over too, and those before it: CUTLASS's kernels
read tensor memory without any tcgen05.wait::ld and free the columns once the values are used. A copy by mov does not
count, since it may vanish in the compiler. In the strict mode such a use is a fault, and only the wait
tells that a load is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import AddressOf, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.tensor_memory import groups
from tunekit.simulate.ptx.module import Immediate, Instruction, Operand
from tunekit.simulate.units.tcgen05.address import QUADRANT, join, show, split
from tunekit.simulate.units.tcgen05.fragments import REGISTERS, Fragment, fragment
from tunekit.simulate.units.tcgen05.state import WarpTensor, tensor

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_WORDS = f"sync aligned {' '.join(REGISTERS)} x1 x2 x4 x8 x16 x32 x64 x128"


class Arriving(str):
    """The mark of a register that a tcgen05.ld has yet to fill: text for reports, and what a use of it tells."""

    __slots__ = ("_epoch", "_warp")
    _warp: Warp
    _epoch: int

    @classmethod
    def mark(cls, w: Warp, slots: tuple[int, ...]) -> None:
        """Marks the registers of the load just issued."""
        unit = w.part(WarpTensor)
        new = cls("before the tcgen05.wait::ld of its tcgen05.ld")
        new._warp, new._epoch = w, unit.loads.epoch
        unit.loads.epoch += 1
        for slot in slots:
            w.pending[slot] = new

    def arrive(self) -> None:
        """The value is there: this load, and the warp's loads before it, are over."""
        Arriving.all_until(self._warp, self._epoch)

    @staticmethod
    def all_until(w: Warp, epoch: int) -> None:
        unit = w.part(WarpTensor)
        unit.complete(unit.loads, epoch)
        over = [slot for slot, mark in w.pending.items() if isinstance(mark, Arriving) and mark._epoch <= epoch]
        for slot in over:
            del w.pending[slot]


def _fragment(i: Instruction, d: Decoder, split_operand: Operand | None) -> Fragment:
    shape = next(m for m in i.modifiers if m in REGISTERS)
    repeat = next(int(m[1:]) for m in i.modifiers if m[0] == "x" and m[1:].isdigit())
    packed = "pack::16b" in i.modifiers or "unpack::16b" in i.modifiers
    offset = 0
    if shape == "16x32bx2":
        if not isinstance(split_operand, Immediate):
            raise d.unsupported("16x32bx2 without an immediate offset of its second half")
        offset = split_operand.value
    return fragment(shape, repeat, packed, offset)


class _Cells:
    """The cells of one instruction: index arrays for an address, kept for the last address seen."""

    def __init__(self, what: Fragment) -> None:
        self.fragment = what
        self._columns = what.touched
        breaks = np.flatnonzero(np.diff(self._columns) > 1)
        starts, ends = [0, *(breaks + 1)], [*breaks, self._columns.size - 1]
        self._runs = [(int(self._columns[a]), int(self._columns[b])) for a, b in zip(starts, ends, strict=True)]
        self._rows = np.arange(0, what.height, 16, dtype=np.int64)[:, None]
        self._found: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = {}

    def _trouble(self, w: Warp, lane: int, column: int) -> str | None:
        for first, last in self._runs:
            problem = tensor(w.cta).trouble(lane, self.fragment.height, slice(column + first, column + last + 1))
            if problem is not None:
                return problem
        return None

    def at(
        self, w: Warp, lanes: Lanes, addresses: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
        """(lanes, columns, groups) of the access; None, and a fault, if it is not allowed."""
        address = int(addresses[0])
        if (addresses != address).any():
            w.fault(FaultKind.ILLEGAL, "the lanes of the warp differ in the tensor memory address", lanes)
        lane, column = split(address)
        quarter = w.number % 4
        if not quarter * QUADRANT <= lane <= lane + self.fragment.height - 1 < (quarter + 1) * QUADRANT:
            first = quarter * QUADRANT
            w.fault(
                FaultKind.TMEM_ACCESS,
                f"{show(address)} and the {self.fragment.height} lanes from it: warp {w.number} reaches lanes "
                f"{first}-{first + QUADRANT - 1} only",
            )
            lane = first + lane % 32 if lane % 32 + self.fragment.height <= 32 else first
        problem = self._trouble(w, lane, column)
        if problem is not None:
            w.fault(FaultKind.TMEM_ACCESS, f"at {show(address)}: {problem}")
            return None
        key = join(lane, column)
        found = self._found.get(key)
        if found is None:
            what = self.fragment
            rows = what.lanes + lane
            found = (
                rows[:, :, None] if what.packed else rows,
                what.columns + column,
                groups(self._rows + lane, self._columns + column),
            )
            self._found[key] = found
        return found


@instruction("tcgen05.ld", words=f"{_WORDS} pack::16b b32 red min max abs NaN u32 s32 f32")
def ld(i: Instruction, d: Decoder) -> Step:
    if "red" in i.modifiers:
        return _ld_red(i, d)
    what = _fragment(i, d, i.operands[2] if len(i.operands) > 2 else None)
    out = d.writes_vector(i.operands[0], "b32")
    address = d.address(i.operands[1])
    if len(out) != what.registers:
        raise d.unsupported(f"{len(out)} registers where the shape has {what.registers}")
    return _load(i, _Cells(what), address, out, None)


Reduction: TypeAlias = Callable[[NDArray[np.uint32]], NDArray[np.uint32]]


def _load(
    i: Instruction, cells: _Cells, address: AddressOf, out: tuple[int, ...], reduced: tuple[int, Reduction] | None
) -> Step:
    """Loads to `out`. reduced: a slot too, and what puts each thread's values into one number there."""
    written = out if reduced is None else (*out, reduced[0])

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        values = _loaded(w, lanes, i, cells, address.of(w, lanes).astype(np.uint32))
        if values is not None:
            w.set_words(out, values.T)
            if reduced is not None:
                slot, reduction = reduced
                w.u32[slot][:] = reduction(values)
        Arriving.mark(w, written)
        return None

    return step


def _loaded(
    w: Warp, lanes: Lanes, i: Instruction, cells: _Cells, addresses: NDArray[np.uint32]
) -> NDArray[np.uint32] | None:
    """uint32[32, registers]; None if the access is not allowed."""
    place = cells.at(w, lanes, addresses)
    if place is None:
        return None
    unit = w.part(WarpTensor)
    words = tensor(w.cta).memory.read(*place, unit.access(unit.loads, i))
    if cells.fragment.packed:
        return (words[:, :, 0] & np.uint32(0xFFFF)) | (words[:, :, 1] << np.uint32(16))
    return words


def _ld_red(i: Instruction, d: Decoder) -> Step:
    """tcgen05.ld.red: loads, and reduces what each lane's thread gets to one value (sm_103 and sm_110)."""
    what = _fragment(i, d, i.operands[3] if len(i.operands) > 3 else None)
    if what.packed or what.registers < 2:
        raise d.unsupported("a load with reduction needs .x2 or more and no packing")
    kind = next(m for m in i.modifiers if m in ("f32", "u32", "s32"))
    largest, absolute, keep_nan = "max" in i.modifiers, "abs" in i.modifiers, "NaN" in i.modifiers
    out, reduced = d.writes_vector(i.operands[0], "b32"), d.write(i.operands[1], "b32")
    address = d.address(i.operands[2])
    reduction = functools.partial(reduce, kind=kind, largest=largest, absolute=absolute, keep_nan=keep_nan)
    return _load(i, _Cells(what), address, out, (reduced, reduction))


def reduce(values: NDArray[np.uint32], kind: str, largest: bool, absolute: bool, keep_nan: bool) -> NDArray[np.uint32]:
    """The minimum or maximum of each row, as min and max of that type define it (PTX ISA 9.7.3.12 for f32)."""
    rows = np.ascontiguousarray(values)
    if kind != "f32":
        whole = rows.view(np.int32 if kind == "s32" else np.uint32)
        return np.ascontiguousarray(whole.max(axis=1) if largest else whole.min(axis=1)).view(np.uint32)
    numbers = np.abs(rows.view(np.float32)) if absolute else rows.view(np.float32)
    with np.errstate(invalid="ignore"):
        if keep_nan:
            found = numbers.max(axis=1) if largest else numbers.min(axis=1)
        else:
            found = np.fmax.reduce(numbers, axis=1) if largest else np.fmin.reduce(numbers, axis=1)
    bits = np.ascontiguousarray(found).view(np.uint32).copy()
    bits[np.isnan(found)] = 0x7FFFFFFF
    return bits


@instruction("tcgen05.st", words=f"{_WORDS} unpack::16b b32")
def st(i: Instruction, d: Decoder) -> Step:
    what = _fragment(i, d, i.operands[1] if len(i.operands) > 2 else None)
    address = d.address(i.operands[0])
    source = d.reads_vector(i.operands[-1], "b32")
    if len(source) != what.registers:
        raise d.unsupported(f"{len(source)} registers where the shape has {what.registers}")
    cells = _Cells(what)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        place = cells.at(w, lanes, address.of(w, lanes).astype(np.uint32))
        if place is None:
            return None
        words = w.words(source).T
        if what.packed:
            words = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=2)
        unit = w.part(WarpTensor)
        rows, columns, touched = place
        tensor(w.cta).memory.write(rows, columns, words, touched, unit.access(unit.stores, i))
        return None

    return step


@instruction("tcgen05.wait::ld", "tcgen05.wait::st", words="sync aligned")
def wait_for(i: Instruction, d: Decoder) -> Step:
    loads = "wait::ld" in i.modifiers

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        unit = w.part(WarpTensor)
        if loads:
            Arriving.all_until(w, unit.loads.epoch - 1)
        else:
            unit.complete(unit.stores, unit.stores.epoch)
            unit.stores.epoch += 1
        return None

    return step
