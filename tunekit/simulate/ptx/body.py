"""The body of a kernel or function: scopes, declarations, labels, instructions (PTX ISA 4.3, 5.1, 6, 7).

Two passes. The first finds the statements and what each scope declares, since a label may be used before it
stands; the second reads the instructions. Braces with inline assembly or a call sequence are scopes, whose
registers, labels and parameters get the scope's number ("P1@3").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tunekit.simulate.ptx.declare import SPACES, declared, registers
from tunekit.simulate.ptx.module import Instruction, Label, Operand, Register, Symbol, Variable, Vector
from tunekit.simulate.ptx.operands import Operands
from tunekit.simulate.ptx.tokens import Tokens, is_identifier

# PTX ISA, pragma strings: which bytes of the load that follows are used, one bit each.
_USED_BYTES = re.compile(r'"used_bytes_mask (0x[0-9a-fA-F]+)"')

# The elements of a vector register (PTX ISA 6.4.2). Their other names, .r .g .b .a, are seen in no compiler's output.
_ELEMENTS = ("x", "y", "z", "w")


@dataclass
class Scope:
    """What a pair of braces declares. `names`: a name of the text to the operand it stands for."""

    parent: Scope | None
    suffix: str
    names: dict[str, Operand] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def find(self, name: str) -> Operand | None:
        """The operand that a name stands for, or None; a list of branch targets is the vector of its labels."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            if name in scope.targets:
                found = [self.find(target) for target in scope.targets[name]]
                return None if None in found else Vector(tuple(item for item in found if item is not None))
            scope = scope.parent
        return None


@dataclass(frozen=True)
class Body:
    registers: dict[str, int]
    variables: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Statement:
    start: int
    scope: Scope
    source: tuple[str, int] | None
    used_bytes: int | None = None


class BodyReader:
    """Reads one body from its '{' to behind its '}'.

    outer: what the module and the parameter list declare. files: number of a .file directive to its path.
    """

    def __init__(self, tokens: Tokens, outer: Mapping[str, Operand], files: Mapping[int, str]) -> None:
        self._tokens = tokens
        self._files = files
        self._root = Scope(None, "", dict(outer))
        self._scopes = 0
        self._registers: dict[str, int] = {}
        self._variables: list[Variable] = []
        self._labels: dict[str, int] = {}
        self._statements: list[_Statement] = []
        self._source: tuple[str, int] | None = None
        self._last_label = ""
        self._used_bytes: int | None = None

    def read(self, register_parameters: Mapping[str, int]) -> Body:
        for name, bits in register_parameters.items():
            self._registers[name] = bits
            self._root.names[name] = Register(name)
        opening = self._tokens.position
        self._tokens.expect("{")
        self._survey(opening)
        after = self._tokens.position
        instructions = tuple(self._instructions())
        self._tokens.position = after
        return Body(self._registers, tuple(self._variables), instructions, self._labels)

    def _survey(self, opening: int) -> None:
        tokens, words, statements = self._tokens, self._tokens.words, self._statements
        scope = self._root
        while True:
            position = tokens.position
            word = words[position]
            if not word:
                raise tokens.error("'{' is never closed", opening)
            if word[0] == ".":
                self._directive(scope)
            elif word == "{":
                tokens.position += 1
                self._scopes += 1
                scope = Scope(scope, f"@{self._scopes}")
            elif word == "}":
                tokens.position += 1
                if scope.parent is None:
                    return
                scope = scope.parent
            elif word == ";":
                tokens.position += 1
            elif words[position + 1] == ":" and is_identifier(word):
                self._label(scope, word)
            else:
                tokens.skip_past(";")
                statements.append(_Statement(position, scope, self._source, self._used_bytes))
                self._used_bytes = None

    def _label(self, scope: Scope, name: str) -> None:
        unique = name + scope.suffix
        self._declare(scope, name, Label(unique))
        self._labels[unique] = len(self._statements)
        self._last_label = name
        self._tokens.position += 2

    def _declare(self, scope: Scope, name: str, operand: Operand) -> None:
        if name in scope.names and not (scope is self._root and isinstance(scope.names[name], Symbol)):
            raise self._tokens.error(f"'{name}' is declared twice in one scope")
        scope.names[name] = operand

    def _register(self, scope: Scope, name: str, bits: int) -> Register:
        register = Register(name + scope.suffix)
        self._declare(scope, name, register)
        self._registers[register.name] = bits
        return register

    def _directive(self, scope: Scope) -> None:
        tokens = self._tokens
        word = tokens.word
        if word == ".reg":
            tokens.take()
            for name, bits, elements in registers(tokens):
                if elements == 1:
                    self._register(scope, name, bits)
                else:
                    items = [self._register(scope, f"{name}.{part}", bits) for part in _ELEMENTS[:elements]]
                    self._declare(scope, name, Vector(tuple(items)))
            tokens.expect(";")
        elif word in SPACES:
            space = tokens.take()[1:]
            for variable in declared(tokens, space):
                unique = variable.name + scope.suffix
                self._declare(scope, variable.name, Symbol(unique))
                self._variables.append(self._placed(scope, variable, unique))
            tokens.expect(";")
        elif word == ".loc":
            inline = tokens.in_inline_assembly()
            source = location(tokens, self._files)
            # NVVM counts the lines of an assembly text on from the line of the statement that it stands in.
            if not inline:
                self._source = source
        elif word in (".branchtargets", ".calltargets"):
            tokens.take()
            names = [tokens.identifier()]
            while tokens.accept(","):
                names.append(tokens.identifier())
            tokens.expect(";")
            self._labels.pop(self._last_label + scope.suffix, None)
            scope.names.pop(self._last_label, None)
            scope.targets[self._last_label] = tuple(names)
        elif word == ".callprototype":
            tokens.skip_past(";")
            self._labels.pop(self._last_label + scope.suffix, None)
        elif word == ".pragma":
            tokens.take()
            mask = _USED_BYTES.match(tokens.word)
            if mask is not None:
                self._used_bytes = int(mask[1], 16)
            tokens.skip_past(";")
        else:
            raise tokens.error(f"'{word}' inside a body is not read")

    def _placed(self, scope: Scope, variable: Variable, unique: str) -> Variable:
        links = []
        for offset, link in variable.addresses:
            found = scope.find(link.name)
            if not isinstance(found, Symbol):
                raise self._tokens.error(f"'{link.name}' is not declared")
            links.append((offset, Symbol(found.name, link.offset)))
        return replace(variable, name=unique, addresses=tuple(links))

    def _instructions(self) -> list[Instruction]:
        tokens = self._tokens
        operands = Operands(tokens)
        names: dict[str, tuple[str, tuple[str, ...]]] = {}
        found = []
        for index, statement in enumerate(self._statements):
            operands.enter(statement.scope, statement.start)
            guard = operands.guard()
            word = tokens.word
            name = names.get(word)
            if name is None:
                if not word[:1].isalpha():
                    raise tokens.error(f"expected an instruction, found '{word}'")
                opcode, *modifiers = word.split(".")
                name = names[word] = (opcode, tuple(modifiers))
            tokens.position += 1
            taken = operands.all()
            start, end = tokens.starts[statement.start], tokens.starts[tokens.position]
            text = " ".join(tokens.text[start:end].split())
            line = tokens.line(statement.start)
            found.append(
                Instruction(name[0], name[1], taken, guard, line, text, index, statement.source, statement.used_bytes)
            )
        return found


def location(tokens: Tokens, files: Mapping[int, str]) -> tuple[str, int]:
    """(file, line) of a .loc directive, taken; of inlined code the innermost place (PTX ISA 11.5.3)."""
    tokens.expect(".loc")

    def integer() -> int:
        word = tokens.take()
        if not word.isdigit():
            raise tokens.error(f"expected a number, found '{word}'", tokens.position - 1)
        return int(word)

    file, line, _ = integer(), integer(), integer()
    while tokens.accept(","):
        if tokens.take() == "function_name":
            tokens.identifier()
            if tokens.accept("+"):
                integer()
        else:  # inlined_at
            integer(), integer(), integer()
    return files.get(file, f"file {file}"), line
