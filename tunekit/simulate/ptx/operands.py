"""Operands of an instruction (PTX ISA chapter 6)."""

from __future__ import annotations

import re
from typing import Protocol

from tunekit.simulate.ptx.literals import number
from tunekit.simulate.ptx.module import (
    Address,
    Arguments,
    Guard,
    Immediate,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Vector,
)
from tunekit.simulate.ptx.tokens import Tokens, is_identifier, is_number

_AXES = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
# Chapter 10, all of them.
_SPECIALS = frozenset(f"%{name}{axis}" for name in _AXES for axis in ("", ".x", ".y", ".z", ".w")) | {
    "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%is_explicit_cluster",
    "%cluster_ctarank", "%cluster_nctarank", "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge",
    "%lanemask_gt", "%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi",
    "%total_smem_size", "%aggr_smem_size", "%dynamic_smem_size", "%current_graph_exec",
}  # fmt: skip
_SPECIAL_FAMILY = re.compile(r"%(?:pm[0-7](?:_64)?|envreg(?:[12]?\d|3[01])|reserved_smem_offset_\w+)\Z")
_SINK = Sink()
_WARP_SIZE = Immediate(32)


class Names(Protocol):
    """What the operands' names stand for."""

    names: dict[str, Operand]

    def find(self, name: str) -> Operand | None: ...


def special(name: str) -> bool:
    """Whether a name is a special register's."""
    return name in _SPECIALS or _SPECIAL_FAMILY.match(name) is not None


class Operands:
    """Reads operands at the tokens' position; `enter` sets the scope and the place."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._scope: Names | None = None
        self._known: dict[str, Operand] = {}

    def enter(self, scope: Names, position: int) -> None:
        if scope is not self._scope:
            self._scope, self._known = scope, {}
        self._tokens.position = position

    def guard(self) -> Guard | None:
        tokens = self._tokens
        if not tokens.accept("@"):
            return None
        negated = tokens.accept("!")
        found = self._name(tokens.identifier())
        if not isinstance(found, Register):
            raise tokens.error("a guard is a predicate register", tokens.position - 1)
        return Guard(found, negated)

    def all(self) -> tuple[Operand, ...]:
        """All operands, up to the ';' (not taken)."""
        tokens, words = self._tokens, self._tokens.words
        if words[tokens.position] == ";":
            return ()
        found = []
        while True:
            found.append(self._operand())
            word = words[tokens.position]
            if word == ",":
                tokens.position += 1
            elif word == ";":
                return tuple(found)
            else:
                raise tokens.error(f"expected ',' or ';' behind an operand, found '{word}'")

    def _operand(self) -> Operand:
        first = self._one()
        if self._tokens.words[self._tokens.position] == "|":
            self._tokens.position += 1
            return Pair(first, self._one())
        return first

    def _one(self) -> Operand:
        tokens = self._tokens
        position = tokens.position
        word = tokens.words[position]
        known = self._known.get(word)
        if known is not None:
            tokens.position = position + 1
            return self._displaced(known) if tokens.words[position + 1] in ("+", "-") else known
        if is_identifier(word):
            tokens.position = position + 1
            found = self._name(word)
            self._known[word] = found
            return self._displaced(found)
        if is_number(word) or word in ("-", "+", "~"):
            return self._constant()
        if word == "{":
            return Vector(self._group("}"))
        if word == "(":
            return Arguments(self._group(")"))
        if word == "[":
            return self._address()
        if word == "!":
            tokens.position = position + 1
            return Negated(self._one())
        raise tokens.error(f"expected an operand, found '{word}'")

    def _group(self, closing: str) -> tuple[Operand, ...]:
        tokens, words, known = self._tokens, self._tokens.words, self._known
        tokens.position += 1
        found: list[Operand] = []
        if tokens.accept(closing):
            return ()
        while True:
            position = tokens.position
            item = known.get(words[position])
            if item is None or words[position + 1] not in (",", closing):
                item = self._operand()
            else:
                tokens.position = position + 1
            found.append(item)
            if tokens.accept(closing):
                return tuple(found)
            tokens.expect(",")

    def _name(self, word: str) -> Operand:
        if word == "_":
            return _SINK
        found = self._scope.find(word) if self._scope is not None else None
        if found is not None:
            return found
        if special(word):
            return Special(word)
        if word == "WARP_SZ":
            return _WARP_SIZE
        raise self._tokens.error(f"'{word}' is not declared", self._tokens.position - 1)

    def _displaced(self, operand: Operand) -> Operand:
        """A symbol with the byte offset that may follow it."""
        if not isinstance(operand, Symbol) or self._tokens.word not in ("+", "-"):
            return operand
        return Symbol(operand.name, self._offset())

    def _offset(self) -> int:
        """The sum of the signed numbers at the position."""
        tokens = self._tokens
        total = 0
        while tokens.word in ("+", "-"):
            total += self._signed()
        return total

    def _signed(self) -> int:
        tokens = self._tokens
        sign = 1
        while tokens.word in ("+", "-"):
            sign = -sign if tokens.take() == "-" else sign
        found = number(tokens) if is_number(tokens.word) else None
        if found is None or found.type != "int":
            raise tokens.error(f"expected an integer, found '{tokens.word}'")
        return sign * found.value

    def _constant(self) -> Immediate:
        tokens = self._tokens
        sign = ""
        while tokens.word in ("+", "-", "~"):
            sign += tokens.take()
        if not is_number(tokens.word):
            raise tokens.error(f"expected a number, found '{tokens.word}'")
        found = number(tokens)
        value = found.value
        for operator in reversed(sign):
            if found.type != "int":
                top = 1 << (31 if found.type == "f32" else 63)
                value = value ^ top if operator == "-" else value
            else:
                value = -value if operator == "-" else ~value if operator == "~" else value
        return Immediate(value, found.type) if sign else found

    def _address(self) -> Address | TensorAddress:
        tokens = self._tokens
        tokens.position += 1
        word = tokens.word
        base: Operand
        if is_identifier(word):
            tokens.position += 1
            base = self._known.get(word) or self._name(word)
            if isinstance(base, (Register, Symbol)):
                self._known[word] = base
        elif is_number(word):
            base = number(tokens)
        else:
            raise tokens.error(f"expected an address, found '{word}'")
        if not isinstance(base, (Register, Symbol, Immediate)):
            raise tokens.error(f"'{word}' is no base of an address", tokens.position - 1)
        offset = self._offset() if tokens.word in ("+", "-") else 0
        if tokens.accept(","):
            items = self._group("}") if tokens.word == "{" else (self._operand(),)
            tokens.expect("]")
            if offset:
                raise tokens.error("an offset to a tensor map is not read")
            return TensorAddress(base, items)
        tokens.expect("]")
        return Address(base, offset)
