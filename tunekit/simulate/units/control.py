"""Control flow: bra, brx.idx, call, ret, exit, trap, brkpt (PTX ISA 9.7.12, "Control Flow Instructions").

Calls of the module's own functions have been replaced by their bodies (ptx/link.py). What is left are the two
functions that the driver provides to device code, and what is refused.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx.module import Arguments, Instruction, Label, Operand, Symbol, Vector

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

# Longest text of a device printf or of an assertion that is read.
TEXT_BYTES = 4096
MOST_NOTES = 200


@instruction("bra", control=True)
def bra(i: Instruction, d: Decoder) -> Step:
    label = i.operands[0]
    if not isinstance(label, Label):
        raise d.unsupported("a branch to what is no label")
    target = d.kernel.labels[label.name]
    uniform = "uni" in i.modifiers

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        running = w.current.lanes
        if uniform and lanes.bits and lanes.bits != running.bits:
            w.fault(
                FaultKind.DIVERGENCE,
                f"bra.uni taken by lanes {lanes.bits:#010x} of the {running.bits:#010x} that execute it together",
            )
        w.branch(i, lanes, target)
        return None

    return step


@instruction("brx.idx", control=True)
def brx(i: Instruction, d: Decoder) -> Step:
    """The second operand is the list of targets itself: the reader puts it there."""
    index, listed = d.read(i.operands[0], "u32"), i.operands[1]
    if not isinstance(listed, Vector):
        raise d.unsupported("a list of targets that is not declared")
    targets = [d.kernel.labels[item.name] for item in listed.items if isinstance(item, Label)]

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        rest = w.current.lanes.bits & ~lanes.bits
        parts: list[tuple[int, Lanes]] = [(i.index + 1, Lanes.of(rest))] if rest else []
        for value in np.unique(w.u32[index][lanes.mask]):
            going = Lanes.of_mask((w.u32[index] == value) & lanes.mask)
            if value >= len(targets):
                raise w.stop(FaultKind.ILLEGAL, f"brx.idx {value} in a list of {len(targets)} targets", going)
            parts.append((targets[int(value)], going))
        if len(parts) == 1:
            w.jump(parts[0][0])
        else:
            w.split(i, parts)
        return None

    return step


@instruction("exit", "ret", control=True)
def leave(i: Instruction, d: Decoder) -> Step:
    """ret of a kernel ends its lanes as exit does; a function's ret has become a branch."""

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        if lanes.bits:
            w.exit(lanes)
        else:
            w.jump(i.index + 1)
        return None

    return step


@instruction("trap")
def trap(i: Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        raise w.stop(FaultKind.TRAP, "trap: the grid is aborted", lanes)

    return step


@instruction("brkpt")
def brkpt(i: Instruction, d: Decoder) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        note(w, f"{w.place(i)}: brkpt")
        return None

    return step


@instruction("call")
def call(i: Instruction, d: Decoder) -> Step:
    operands = list(i.operands)
    results = _items(operands.pop(0)) if isinstance(operands[0], Arguments) else ()
    target = operands.pop(0)
    arguments = _items(operands[0]) if operands and isinstance(operands[0], Arguments) else ()
    if not isinstance(target, Symbol):
        raise d.unsupported("a call through a pointer")
    if target.name == "vprintf":
        return _vprintf(d, results, arguments)
    if target.name == "__assertfail":
        return _assertfail(d, arguments)
    function = d.module.functions.get(target.name)
    if function is not None and "extern" not in function.directives:
        raise d.unsupported(f"{target.name} calls itself, or is called with other arguments than it declares")
    raise d.unsupported(f"the function {target.name} of another module")


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Arguments) else (operand,)


def _vprintf(d: Decoder, results: tuple[Operand, ...], arguments: tuple[Operand, ...]) -> Step:
    """int vprintf(const char *format, const char *values) (CUDA C++ Programming Guide, "Formatted Output")."""
    form, values = (_parameter(d, operand) for operand in arguments)
    result = _parameter(d, results[0]) if results else None

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in lanes.indices:
            one = Lanes.of(1 << int(lane))
            text = _text(w, _pointer(w, form, one), one)
            block = _pointer(w, values, one)
            note(w, f"cta {w.cta.coordinates} warp {w.number} lane {lane}: {_formatted(w, text, block, one)}")
        if result is not None:
            one_each = np.tile(np.frombuffer(struct.pack("<i", 1), np.uint8), (lanes.count, 1))
            w.store("local", np.full(lanes.count, result, dtype=np.int64), one_each, lanes)
        return None

    return step


def _assertfail(d: Decoder, arguments: tuple[Operand, ...]) -> Step:
    """__assertfail(message, file, line, function, character size) (CUDA C++ Programming Guide, "Assertion")."""
    message, file, line, function = (_parameter(d, operand) for operand in arguments[:4])

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        one = Lanes.of(1 << lanes.first)
        number = int.from_bytes(w.load("local", np.array([line]), 4, one).tobytes(), "little")
        texts = [_text(w, _pointer(w, place, one), one) for place in (message, file, function)]
        raise w.stop(FaultKind.ASSERTION, f"{texts[1]}:{number}: {texts[2]}: assertion '{texts[0]}' failed", lanes)

    return step


def _parameter(d: Decoder, operand: Operand) -> int:
    """The place in local memory of a call sequence's .param variable."""
    place = d.symbols.places.get(operand.name) if isinstance(operand, Symbol) else None
    if place is None or place.space != "local" or not isinstance(operand, Symbol):
        raise d.unsupported(f"an argument {operand}")
    return place.address + operand.offset


def _pointer(w: Warp, place: int, lane: Lanes) -> int:
    return int.from_bytes(w.load("local", np.array([place], dtype=np.int64), 8, lane).tobytes(), "little")


def _text(w: Warp, address: int, lane: Lanes) -> str:
    """The zero-terminated text at a generic address."""
    found = bytearray()
    while len(found) < TEXT_BYTES:
        byte = w.load("generic", np.array([address + len(found)], dtype=np.int64), 1, lane).tobytes()
        if byte == b"\0":
            break
        found += byte
    return found.decode(errors="replace")


_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\d*)(?P<precision>\.\d+)?(?P<length>hh|h|ll|l|z|j|t)?(?P<kind>[a-zA-Z%])"
)


def _formatted(w: Warp, form: str, block: int, lane: Lanes) -> str:
    """C's printf over a block of values, each aligned to its size (a double or a pointer 8, an int 4)."""
    at = block

    def take(size: int) -> bytes:
        nonlocal at
        at = -(-at // size) * size
        data = w.load("generic", np.array([at], dtype=np.int64), size, lane).tobytes()
        at += size
        return data

    def value(match: re.Match[str]) -> str:
        kind, long = match["kind"], match["length"] in ("l", "ll", "z", "j", "t")
        layout = f"%{match['flags']}{match['width']}{match['precision'] or ''}"
        if kind == "%":
            return "%"
        if kind in "diu":
            return (layout + "d") % int.from_bytes(take(8 if long else 4), "little", signed=kind != "u")
        if kind in "oxX":
            return (layout + kind) % int.from_bytes(take(8 if long else 4), "little")
        if kind in "aAeEfFgG":
            number: float = struct.unpack("<d", take(8))[0]
            return number.hex() if kind in "aA" else (layout + kind) % number
        if kind == "c":
            return (layout + "c") % take(4)[0]
        if kind == "s":
            return (layout + "s") % _text(w, int.from_bytes(take(8), "little"), lane)
        if kind == "p":
            return f"{int.from_bytes(take(8), 'little'):#x}"
        return match.group()

    return _CONVERSION.sub(value, form)


def note(w: Warp, text: str) -> None:
    """Adds a line to the report, up to a limit."""
    notes = w.cta.cluster.faults.notes
    if len(notes) < MOST_NOTES:
        notes.append(text)
    elif len(notes) == MOST_NOTES:
        notes.append(f"(more than {MOST_NOTES} notes: the rest is left out)")
