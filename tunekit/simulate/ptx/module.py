"""A PTX module as values: what the reader returns and the decoder takes (PTX ISA chapters 4 to 6).

Names of registers and labels are unique within a kernel: the reader renames what an inner scope declares
("P1" in the third scope becomes "P1@3"), so that nothing later has to know about scopes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register: %tid.x, %laneid, %cluster_ctarank, %clock64 (PTX ISA chapter 10)."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. `value` is the number itself for "int" (negative as written), the bit pattern for "f32" and "f64"."""

    value: int
    type: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, parameter or function used as a value: its address plus `offset` bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset], offset in bytes."""

    base: Register | Symbol | Immediate
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """[map, {coordinates}] of a tensor copy; coordinates are in elements, innermost first."""

    map: Register | Symbol | Immediate
    coordinates: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, ...}."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """a|b: a value with a predicate beside it, or two predicates."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """!p as an operand."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """_ : a result that nobody wants."""


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """( ... ) of a call."""

    items: tuple[Operand, ...]


Operand: TypeAlias = (
    Register
    | Special
    | Immediate
    | Symbol
    | Address
    | TensorAddress
    | Vector
    | Pair
    | Negated
    | Sink
    | Label
    | Arguments
)


@dataclass(frozen=True, slots=True)
class Guard:
    """@p or @!p before an instruction."""

    register: Register
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    `line` counts the PTX text from 1. `source` is (file, line) of the last .loc before it, where there is line
    info. `index` is its place among the kernel's instructions: the program counter. `used_bytes` is the mask that a
    pragma "used_bytes_mask" before a vector load gives: the compiler reads the others, and nobody wants them.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    text: str
    index: int
    source: tuple[str, int] | None = None
    used_bytes: int | None = None

    @property
    def dotted(self) -> str:
        """The whole name, such as "add.rn.f32x2"."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable or parameter. `size` in bytes is 0 for an extern array without bounds.

    addresses: (byte offset, symbol) of each 8-byte place in `initial` that holds the address of another variable.
    """

    name: str
    space: str
    size: int
    align: int
    initial: bytes | None = None
    extern: bool = False
    addresses: tuple[tuple[int, Symbol], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """An .entry (or .func).

    registers: name to width in bits (1 for predicates). labels: name to the index of the instruction that
    follows. directives: what stands between the parameters and the body ("reqntid": "384, 1, 1").
    results: return parameters of a .func. A function of another module has no instructions and the directive "extern".
    """

    name: str
    parameters: tuple[Variable, ...]
    registers: Mapping[str, int]
    variables: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    directives: Mapping[str, str] = field(default_factory=dict)
    results: tuple[Variable, ...] = ()


@dataclass(frozen=True)
class Module:
    version: str
    target: str
    kernels: Mapping[str, Kernel]
    functions: Mapping[str, Kernel]
    variables: tuple[Variable, ...]
