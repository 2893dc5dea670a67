"""Calls of a module's own functions, resolved before anything runs: each call becomes a copy of the function's body.

A copy has its own registers, labels and local variables ("%r1@f.3" in the third copy), so that lanes that meet, and the
values that they hold, need no stack. The .param variables of call sequences and a function's parameters become
local memory, which is where the ISA lets them live (PTX ISA 5.1.6.2, 7.1).

Left as they are, for the call unit to answer or to refuse when they are reached: calls of functions that the module
only declares (vprintf, __assertfail), recursion, and calls through a pointer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tunekit.simulate.ptx.module import (
    Address,
    Arguments,
    Guard,
    Instruction,
    Kernel,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    TensorAddress,
    Variable,
    Vector,
)

# Beyond this the copies of a call tree are no longer worth having.
MOST_INSTRUCTIONS = 400_000
_ENDS = frozenset({"ret", "exit", "trap", "bra"})


def linked(module: Module, kernel: Kernel) -> Kernel:
    """`kernel` with the bodies of what it calls, ending in an instruction that leaves it."""
    linker = _Linker(module)
    linker.copy(kernel, _Copy("", "", {}, (kernel.name,)))
    linker.close()
    return replace(
        kernel,
        registers=linker.registers,
        variables=tuple(linker.variables.values()),
        instructions=tuple(linker.instructions),
        labels=linker.labels,
    )


@dataclass(frozen=True)
class _Copy:
    """One copy of a body: the suffix of its names, the label behind it, what its parameters stand for."""

    suffix: str
    leave: str
    names: Mapping[str, Operand]
    chain: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    function: Kernel
    results: tuple[Operand, ...]
    arguments: tuple[Operand, ...]


class _Linker:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._copies = 0
        self.registers: dict[str, int] = {}
        self.variables: dict[str, Variable] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}

    def copy(self, body: Kernel, copy: _Copy) -> None:
        names = {**copy.names, **self._declare(body, copy)}
        labels: dict[int, list[str]] = {}
        for name, index in body.labels.items():
            labels.setdefault(index, []).append(name + copy.suffix)
        for i in body.instructions:
            self._place(labels.get(i.index, []))
            renamed = _renamed(i, names, copy.suffix)
            call = self._call(renamed, copy)
            if call is not None:
                self._inline(renamed, call, copy)
            elif i.opcode == "ret" and copy.leave:
                self._emit(replace(renamed, opcode="bra", modifiers=(), operands=(Label(copy.leave),)))
            else:
                self._emit(self._in_local(renamed))
        self._place(labels.get(len(body.instructions), []))

    def close(self) -> None:
        last = self.instructions[-1] if self.instructions else None
        open_end = last is None or last.guard is not None or last.opcode not in _ENDS
        if open_end or len(self.instructions) in self.labels.values():
            line, source = (last.line, last.source) if last else (0, None)
            self._emit(Instruction("ret", (), (), None, line, "the end of the body", 0, source))

    def _place(self, names: list[str]) -> None:
        for name in names:
            self.labels[name] = len(self.instructions)

    def _emit(self, i: Instruction) -> None:
        self.instructions.append(replace(i, index=len(self.instructions)))

    def _declare(self, body: Kernel, copy: _Copy) -> dict[str, Operand]:
        names: dict[str, Operand] = {}
        for name, bits in body.registers.items():
            self.registers[name + copy.suffix] = bits
        for variable in body.variables:
            private = variable.space in ("local", "param")
            unique = variable.name + copy.suffix if private or not copy.suffix else f"{variable.name}@{body.name}"
            space = "local" if private else variable.space
            self.variables[unique] = replace(variable, name=unique, space=space)
            names[variable.name] = Symbol(unique)
        return names

    def _call(self, i: Instruction, copy: _Copy) -> _Call | None:
        """A call to be replaced, with operands that fit; None for everything else."""
        if i.opcode != "call" or len(self.instructions) > MOST_INSTRUCTIONS:
            return None
        operands = list(i.operands)
        results = _taken(operands)
        target = operands.pop(0) if operands else None
        arguments = _taken(operands)
        function = self._module.functions.get(target.name) if isinstance(target, Symbol) else None
        if function is None or "extern" in function.directives or function.name in copy.chain:
            return None
        if len(results) != len(function.results) or len(arguments) != len(function.parameters):
            return None
        return _Call(function, results, arguments)

    def _inline(self, i: Instruction, call: _Call, copy: _Copy) -> None:
        self._copies += 1
        function = call.function
        suffix = f"@{function.name}.{self._copies}"
        leave = f"(behind){suffix}"
        if i.guard is not None:
            guard = Guard(i.guard.register, not i.guard.negated)
            self._emit(replace(i, opcode="bra", modifiers=(), operands=(Label(leave),), guard=guard))
        names: dict[str, Operand] = {}
        for formal, actual in zip(
            (*function.parameters, *function.results), (*call.arguments, *call.results), strict=True
        ):
            if formal.space != "reg":
                names[formal.name] = actual
        for formal, actual in zip(function.parameters, call.arguments, strict=True):
            if formal.space == "reg":
                self.registers[formal.name + suffix] = function.registers[formal.name]
                self._move(i, Register(formal.name + suffix), actual, function.registers[formal.name])
        self.copy(function, _Copy(suffix, leave, names, (*copy.chain, function.name)))
        self._place([leave])
        for formal, actual in zip(function.results, call.results, strict=True):
            if formal.space == "reg":
                self._move(i, actual, Register(formal.name + suffix), function.registers[formal.name], i.guard)

    def _move(self, i: Instruction, to: Operand, source: Operand, bits: int, guard: Guard | None = None) -> None:
        kind = "pred" if bits == 1 else f"b{bits}"
        self._emit(replace(i, opcode="mov", modifiers=(kind,), operands=(to, source), guard=guard))

    def _in_local(self, i: Instruction) -> Instruction:
        """ld.param and st.param of what has become a local variable."""
        if i.opcode not in ("ld", "st"):
            return i
        for operand in i.operands:
            if (
                isinstance(operand, Address)
                and isinstance(operand.base, Symbol)
                and operand.base.name in self.variables
            ):
                modifiers = tuple("local" if m.partition("::")[0] == "param" else m for m in i.modifiers)
                return replace(i, modifiers=modifiers)
        return i


def _taken(operands: list[Operand]) -> tuple[Operand, ...]:
    """The items of a group in parentheses at the front, taken; () where there is none."""
    first = operands[0] if operands else None
    if not isinstance(first, Arguments):
        return ()
    del operands[0]
    return first.items


def _renamed(i: Instruction, names: Mapping[str, Operand], suffix: str) -> Instruction:
    guard = Guard(Register(i.guard.register.name + suffix), i.guard.negated) if i.guard is not None else None
    if not suffix and not names:
        return i
    return replace(i, operands=tuple(_operand(o, names, suffix) for o in i.operands), guard=guard)


def _operand(operand: Operand, names: Mapping[str, Operand], suffix: str) -> Operand:
    match operand:
        case Register(name):
            return Register(name + suffix)
        case Label(name):
            return Label(name + suffix)
        case Symbol(name, offset):
            found = names.get(name)
            if isinstance(found, Symbol):
                return Symbol(found.name, found.offset + offset)
            return operand
        case Address(base, offset):
            place = _operand(base, names, suffix)
            return Address(place, offset)  # type: ignore[arg-type]  # a base stays one of its kinds
        case TensorAddress(base, coordinates):
            place = _operand(base, names, suffix)
            return TensorAddress(place, tuple(_operand(c, names, suffix) for c in coordinates))  # type: ignore[arg-type]
        case Vector(items):
            return Vector(tuple(_operand(item, names, suffix) for item in items))
        case Arguments(items):
            return Arguments(tuple(_operand(item, names, suffix) for item in items))
        case Pair(first, second):
            return Pair(_operand(first, names, suffix), _operand(second, names, suffix))
        case Negated(inner):
            return Negated(_operand(inner, names, suffix))
        case _:
            return operand
