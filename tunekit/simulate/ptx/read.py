"""PTX text to a `Module`: the module level and the heads of kernels and functions (PTX ISA chapters 4, 5, 7, 11).

Knows the grammar, no instruction: operands are read by their form alone. What the text may hold and the reader
does not take (textures, vector registers, debug sections' contents) is either skipped where it cannot change
what the code computes, or refused with its line.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunekit.simulate.ptx.body import BodyReader, location
from tunekit.simulate.ptx.declare import SPACES, declared, parameters
from tunekit.simulate.ptx.module import Kernel, Module, Operand, Symbol, Variable
from tunekit.simulate.ptx.tokens import PtxSyntaxError, Tokens

_LINKAGE = frozenset({".visible", ".weak", ".extern", ".common"})

__all__ = ["PtxSyntaxError", "read_module"]


def read_module(text: str, name: str = "<ptx>") -> Module:
    """The module that a PTX text declares; `name` stands for the text in errors.

    A branch-target list is put in place: the second operand of brx.idx is the Vector of its Labels. Raises
    PtxSyntaxError with the line for anything that cannot be read.
    """
    return _ModuleReader(Tokens(text, name)).read()


class _ModuleReader:
    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._version = self._target = ""
        self._kernels: dict[str, Kernel] = {}
        self._functions: dict[str, Kernel] = {}
        self._variables: dict[str, Variable] = {}
        self._names: dict[str, Operand] = {}
        self._files = _files(tokens.words)

    def read(self) -> Module:
        tokens = self._tokens
        while tokens.word:
            word = tokens.word
            if word == ".version":
                tokens.take()
                self._version = tokens.take()
            elif word == ".target":
                tokens.take()
                self._target = self._listed()
            elif word == ".address_size":
                tokens.take()
                if tokens.take() != "64":
                    raise tokens.error("only 64-bit addresses are read", tokens.position - 1)
            elif word == ".file":
                self._skip_file()
            elif word == ".loc":
                location(tokens, self._files)
            elif word == ".section":
                tokens.take()
                tokens.take()
                tokens.skip_group("{", "}")
            elif word in (".pragma", ".alias"):
                tokens.skip_past(";")
            elif word in _LINKAGE or word in SPACES or word in (".entry", ".func"):
                self._declaration()
            elif word == ";":
                tokens.take()
            else:
                raise tokens.error(f"expected a declaration, found '{word}'")
        if not self._version or not self._target:
            raise PtxSyntaxError(tokens.name, 1, "a module begins with .version and .target", "")
        return Module(self._version, self._target, self._kernels, self._functions, tuple(self._variables.values()))

    def _listed(self) -> str:
        tokens = self._tokens
        words = [tokens.take()]
        while tokens.accept(","):
            words.append(tokens.take())
        return ", ".join(words)

    def _skip_file(self) -> None:
        self._tokens.position += 3
        while self._tokens.accept(","):
            self._tokens.take()

    def _declaration(self) -> None:
        tokens = self._tokens
        linkage = set()
        while tokens.word in _LINKAGE:
            linkage.add(tokens.take())
        extern = ".extern" in linkage
        word = tokens.take()
        if word in (".entry", ".func"):
            self._routine(word == ".entry", extern)
        elif word in SPACES:
            for variable in declared(tokens, word[1:], extern=extern):
                known = self._variables.get(variable.name)
                if known is None or known.extern:
                    self._variables[variable.name] = variable
                    self._names[variable.name] = Symbol(variable.name)
            tokens.expect(";")
        else:
            tokens.position -= 1
            raise tokens.error(f"expected .entry, .func or a state space, found '{word}'")

    def _routine(self, entry: bool, extern: bool) -> None:
        tokens = self._tokens
        results = () if entry else parameters(tokens)
        at = tokens.position
        name = tokens.identifier()
        taken = parameters(tokens)
        directives = self._directives()
        known = (self._kernels if entry else self._functions).get(name)
        self._names.setdefault(name, Symbol(name))
        if tokens.accept(";"):
            body = None
            directives["extern"] = ""
        else:
            if known is not None and "extern" not in known.directives:
                raise tokens.error(f"'{name}' has two bodies", at)
            outer = {**self._names, **{item.name: Symbol(item.name) for item in (*taken, *results)}}
            in_registers = {item.name: item.size * 8 or 1 for item in (*taken, *results) if item.space == "reg"}
            body = BodyReader(tokens, outer, self._files).read(in_registers)
        if body is None and known is not None:
            return
        routine = Kernel(
            name,
            taken,
            body.registers if body else {},
            body.variables if body else (),
            body.instructions if body else (),
            body.labels if body else {},
            directives,
            results,
        )
        (self._kernels if entry else self._functions)[name] = routine

    def _directives(self) -> dict[str, str]:
        """What stands between the parameters and the body (PTX ISA 11.2 to 11.4)."""
        tokens = self._tokens
        found: dict[str, str] = {}
        while tokens.word not in ("{", ";"):
            word = tokens.take()
            if not word.startswith("."):
                raise tokens.error(f"expected a directive, '{{' or ';', found '{word}'", tokens.position - 1)
            if word == ".pragma":
                tokens.skip_past(";")
            elif word == ".attribute":
                tokens.skip_group("(", ")")
            else:
                numbers = []
                while tokens.word[:1].isdigit() or tokens.word == ",":
                    numbers.append(tokens.take())
                found[word[1:]] = ", ".join(item for item in numbers if item != ",")
        return found


def _files(words: Sequence[str]) -> dict[int, str]:
    """Number to path of the .file directives; they may stand at the module's end."""
    found = {}
    for place, word in enumerate(words):
        if word == ".file" and words[place + 1].isdigit():
            found[int(words[place + 1])] = words[place + 2].strip('"')
    return found
