"""From instructions to steps: each instruction is decoded once, into a function over all lanes of a warp.

A unit registers its instructions by name and turns one into a *step*. Operands become *slots*, indexes into the
warp's register views; registers, literals, special registers and addresses of variables all have one, so that a
step never asks what an operand is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import Unsupported
from tunekit.simulate.machine import specials
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.symbols import Symbols
from tunekit.simulate.ptx import module as ptx

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

TYPE_BITS = {
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "b128": 128,
    "pred": 1,
}


@dataclass(slots=True)
class Wait:
    """Why a fragment cannot go on.

    what    text for reports, or a function that makes it when it is wanted
    ready   asked before each slice
    resume  runs once when ready, before the next instruction
    again   execute the same instruction again rather than the next one
    """

    what: str | Callable[[], str]
    ready: Callable[[], bool]
    resume: Callable[[], None] | None = None
    again: bool = False

    def describe(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()


Step = Callable[["Warp", Lanes], "Wait | None"]
Decode = Callable[[ptx.Instruction, "Decoder"], Step]


@dataclass(frozen=True)
class Entry:
    decode: Decode
    control: bool
    moves: bool


_REGISTRY: dict[str, Entry] = {}


def instruction(*names: str, control: bool = False, moves: bool = False) -> Callable[[Decode], Decode]:
    """Registers a decoder for all instructions whose dotted name begins with one of `names` (the longest wins).

    control: the step moves the program counter itself, and is called also when the guard leaves no lane active.
    moves:   a copy: undefined and pending registers may be read, and the mark passes on to what is written.
    """

    def register(decode: Decode) -> Decode:
        for name in names:
            if name in _REGISTRY:
                raise ValueError(f"{name} is registered twice")
            _REGISTRY[name] = Entry(decode, control, moves)
        return decode

    return register


def registered() -> tuple[str, ...]:
    return tuple(sorted(_REGISTRY))


def lookup(i: ptx.Instruction) -> Entry | None:
    parts = (i.opcode, *i.modifiers)
    for length in range(len(parts), 0, -1):
        entry = _REGISTRY.get(".".join(parts[:length]))
        if entry is not None:
            return entry
    return None


@dataclass(slots=True)
class Op:
    """A decoded instruction. guard is -1 where there is none; owns: registers that the step itself looks after."""

    step: Step
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    guard: int
    negated: bool
    control: bool
    moves: bool
    instruction: ptx.Instruction
    owns: tuple[int, ...] = ()


Pass = Callable[[tuple[Op, ...], "Decoder"], tuple[Op, ...]]
_PASSES: list[Pass] = []


def after_decoding(change: Pass) -> Pass:
    """Registers a function from all the ops of a kernel to those that run."""
    _PASSES.append(change)
    return change


@dataclass(frozen=True, slots=True)
class AddressOf:
    """A decoded [base + offset]."""

    slot: int
    offset: int
    wide: bool

    def of(self, w: Warp, lanes: Lanes) -> NDArray[np.int64]:
        """int64[n]: the address of each active lane."""
        if self.wide:
            return w.s64[self.slot][lanes.indices] + self.offset  # type: ignore[no-any-return]
        return (w.u32[self.slot][lanes.indices].astype(np.int64) + self.offset) & 0xFFFFFFFF  # type: ignore[no-any-return]

    def first(self, w: Warp, lanes: Lanes) -> int:
        """The address in the first active lane."""
        view = w.s64 if self.wide else w.u32
        return int(view[self.slot][lanes.first]) + self.offset


class Decoder:
    """Hands out slots for the operands of one kernel, and remembers which an instruction reads and writes."""

    def __init__(self, module: ptx.Module, kernel: ptx.Kernel, symbols: Symbols) -> None:
        self.module = module
        self.kernel = kernel
        self.symbols = symbols
        self.widths: list[int] = []
        self.constants: dict[int, int] = {}
        self.specials: dict[int, str] = {}
        self.symbol_slots: dict[int, tuple[str, int]] = {}
        self.names: dict[int, str] = {}
        self._slots: dict[Any, int] = {}
        self._reads: list[int] = []
        self._writes: list[int] = []
        self._owns: list[int] = []
        self._instruction: ptx.Instruction | None = None
        for name, bits in kernel.registers.items():
            self.names[self._slot(("register", name), bits)] = name

    # What units call

    def read(self, operand: ptx.Operand, type_: str, *, relaxed: bool = False) -> int:
        """The slot to read `operand` from, as a value of PTX type `type_`.

        relaxed: a register wider than the type is allowed (ld, st and cvt); its own width decides the view.
        """
        slot = self._source(operand, type_, relaxed)
        if slot not in self.constants:
            self._reads.append(slot)
        return slot

    def write(self, operand: ptx.Operand, type_: str, *, relaxed: bool = False) -> int:
        """The slot to write `operand` to; `_` gets a slot that nobody reads."""
        bits = TYPE_BITS[type_]
        if isinstance(operand, ptx.Sink):
            return self._slot(("sink", bits), 16 if bits == 8 else bits)
        if not isinstance(operand, ptx.Register):
            raise self.unsupported(f"a destination {operand}")
        slot = self._register(operand, bits, relaxed)
        self._writes.append(slot)
        return slot

    def reads_vector(self, operand: ptx.Operand, type_: str, *, relaxed: bool = False) -> tuple[int, ...]:
        return tuple(self.read(item, type_, relaxed=relaxed) for item in self.items(operand))

    def writes_vector(self, operand: ptx.Operand, type_: str, *, relaxed: bool = False) -> tuple[int, ...]:
        return tuple(self.write(item, type_, relaxed=relaxed) for item in self.items(operand))

    def items(self, operand: ptx.Operand) -> tuple[ptx.Operand, ...]:
        """The items of a vector; a single operand is a vector of one."""
        return operand.items if isinstance(operand, ptx.Vector) else (operand,)

    def predicate(self, operand: ptx.Operand) -> tuple[int, bool]:
        """(slot, negated) of a predicate operand p or !p."""
        if isinstance(operand, ptx.Negated):
            return self.read(operand.operand, "pred"), True
        return self.read(operand, "pred"), False

    def own(self, operand: ptx.Operand, type_: str) -> int:
        """The slot of a register that the step itself checks and defines: the core leaves it alone."""
        if not isinstance(operand, ptx.Register):
            raise self.unsupported(f"an operand {operand} where a register must stand")
        slot = self._register(operand, TYPE_BITS[type_], False)
        self._owns.append(slot)
        return slot

    def sink(self, operand: ptx.Operand) -> bool:
        return isinstance(operand, ptx.Sink)

    def width(self, operand: ptx.Operand) -> int:
        """Bits of a register, or 0 for what has none of its own (a literal)."""
        return self.kernel.registers[operand.name] if isinstance(operand, ptx.Register) else 0

    def address(self, operand: ptx.Operand) -> AddressOf:
        """A memory operand [base + offset]."""
        if not isinstance(operand, ptx.Address):
            raise self.unsupported(f"a memory operand {operand}")
        base = operand.base
        if isinstance(base, ptx.Register):
            bits = self.kernel.registers[base.name]
            slot = self.read(base, "b64" if bits == 64 else "b32")
            return AddressOf(slot, operand.offset, bits == 64)
        return AddressOf(self.read(base, "b64"), operand.offset, True)

    def constant(self, bits: int, width: int) -> int:
        """A slot that holds the same bits in every lane."""
        bits &= (1 << width) - 1
        slot = self._slot(("constant", bits, width), width)
        self.constants[slot] = bits
        return slot

    def unsupported(self, why: str) -> Unsupported:
        if self._instruction is None:
            raise ValueError("nothing is being decoded")
        return Unsupported(self._instruction, why)

    # Decoding

    def decode(self, i: ptx.Instruction) -> Op:
        """The step of `i`; what is not modelled becomes a step that refuses when it is reached."""
        self._instruction, self._reads, self._writes, self._owns = i, [], [], []
        guard, negated = -1, False
        if i.guard is not None:
            guard, negated = self._register(i.guard.register, 1, False), i.guard.negated
        entry = lookup(i)
        if entry is None:
            return self._refused(i, guard, negated, Unsupported(i))
        try:
            step = entry.decode(i, self)
        except Unsupported as refusal:
            return self._refused(i, guard, negated, refusal)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            # A form of the instruction that its unit did not foresee: refused with its text, not with a traceback.
            return self._refused(i, guard, negated, Unsupported(i, f"a form that is not modelled ({error!r})"))
        reads, writes, owns = (tuple(dict.fromkeys(slots)) for slots in (self._reads, self._writes, self._owns))
        return Op(step, reads, writes, guard, negated, entry.control, entry.moves, i, owns)

    def finish(self, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        """The ops of the whole kernel after every registered change."""
        for change in _PASSES:
            ops = change(ops, self)
        return ops

    def _refused(self, i: ptx.Instruction, guard: int, negated: bool, refusal: Unsupported) -> Op:
        def step(w: Warp, lanes: Lanes) -> Wait | None:
            raise refusal

        return Op(step, (), (), guard, negated, False, False, i)

    def _source(self, operand: ptx.Operand, type_: str, relaxed: bool) -> int:
        bits = TYPE_BITS[type_]
        match operand:
            case ptx.Register():
                return self._register(operand, bits, relaxed)
            case ptx.Immediate():
                return self.constant(literal_bits(operand, type_), 16 if bits == 8 else bits)
            case ptx.Special():
                if not specials.known(operand.name):
                    raise self.unsupported(f"the special register {operand.name}")
                width = special_bits(operand.name)
                slot = self._slot(("special", operand.name), width)
                self.specials[slot] = operand.name
                return slot
            case ptx.Symbol():
                place = self.symbols.places.get(operand.name)
                if place is None:
                    raise self.unsupported(f"the address of {operand.name}")
                slot = self._slot(("symbol", operand.name, operand.offset, bits), bits)
                self.symbol_slots[slot] = (place.space, place.address + operand.offset)
                return slot
            case _:
                raise self.unsupported(f"an operand {operand}")

    def _register(self, operand: ptx.Register, bits: int, relaxed: bool) -> int:
        width = self.kernel.registers.get(operand.name)
        if width is None:
            raise self.unsupported(f"an undeclared register {operand.name}")
        if width != bits and not relaxed and not (bits == 8 and width == 16):
            raise self.unsupported(f"register {operand.name} of {width} bits as a {bits}-bit operand")
        return self._slots[("register", operand.name)]

    def _slot(self, key: Any, width: int) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self.widths)
            self.widths.append(16 if width == 8 else width)
        return slot


def literal_bits(literal: ptx.Immediate, type_: str) -> int:
    """The bit pattern of a literal used as a value of `type_`."""
    if type_ == "pred":
        return int(literal.value != 0)
    if type_ == "f32":
        if literal.type == "f64":
            return int(
                np.float64(struct.unpack("<d", literal.value.to_bytes(8, "little"))[0])
                .astype(np.float32)
                .view(np.uint32)
            )
        if literal.type == "int":
            return int(np.float32(literal.value).view(np.uint32))
    if type_ == "f64":
        if literal.type == "f32":
            return int(np.float64(struct.unpack("<f", literal.value.to_bytes(4, "little"))[0]).view(np.uint64))
        if literal.type == "int":
            return int(np.float64(literal.value).view(np.uint64))
    return literal.value


def special_bits(name: str) -> int:
    """Width of a special register (PTX ISA chapter 10)."""
    if name in ("%clock64", "%globaltimer", "%gridid", "%current_graph_exec") or name.startswith("%pm64"):
        return 64
    if name == "%is_explicit_cluster":
        return 1
    return 32
