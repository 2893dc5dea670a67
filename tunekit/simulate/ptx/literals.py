"""Constants of the text: integers, floating-point bit patterns, constant expressions (PTX ISA 4.5)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from tunekit.simulate.ptx.module import Immediate
from tunekit.simulate.ptx.tokens import Tokens, is_number

_BINARY: tuple[Mapping[str, Callable[[int, int], int]], ...] = (
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"<<": lambda a, b: a << b, ">>": lambda a, b: a >> b},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: _quotient(a, b), "%": lambda a, b: a - b * _quotient(a, b)},
)


def _quotient(a: int, b: int) -> int:
    """Division towards zero, as PTX's."""
    whole = abs(a) // abs(b)
    return whole if (a < 0) == (b < 0) else -whole


def literal(word: str) -> Immediate:
    """The value of one number as written. ValueError where it is none."""
    head = word[:2].lower()
    if head == "0f" and len(word) == 10:
        return Immediate(int(word[2:], 16), "f32")
    if head == "0d" and len(word) == 18:
        return Immediate(int(word[2:], 16), "f64")
    digits = word.rstrip("U")
    if head == "0x":
        return Immediate(int(digits, 16))
    if head == "0b":
        return Immediate(int(digits[2:], 2))
    if "." in word or "e" in word or "E" in word:
        return Immediate(int.from_bytes(struct.pack("<d", float(word)), "little"), "f64")
    if len(digits) > 1 and digits[0] == "0":
        return Immediate(int(digits, 8))
    return Immediate(int(digits))


def number(tokens: Tokens) -> Immediate:
    """The number at the reading position, taken."""
    word = tokens.take()
    try:
        return literal(word)
    except ValueError:
        raise tokens.error(f"'{word}' is no number", tokens.position - 1) from None


def integer(tokens: Tokens, level: int = 0) -> int:
    """A constant expression of integers at the reading position."""
    if level == len(_BINARY):
        return _unary(tokens)
    value = integer(tokens, level + 1)
    while tokens.word in _BINARY[level]:
        operator = _BINARY[level][tokens.take()]
        at = tokens.position
        other = integer(tokens, level + 1)
        try:
            value = operator(value, other)
        except (ZeroDivisionError, ValueError):
            raise tokens.error("a constant expression without a value", at) from None
    return value


def _unary(tokens: Tokens) -> int:
    at = tokens.position
    word = tokens.take()
    if word == "(":
        value = integer(tokens)
        tokens.expect(")")
        return value
    if word == "-":
        return -_unary(tokens)
    if word == "+":
        return _unary(tokens)
    if word == "~":
        return ~_unary(tokens)
    if word == "!":
        return int(_unary(tokens) == 0)
    if not is_number(word):
        raise tokens.error(f"expected a number, found '{word}'", at)
    tokens.position = at
    found = number(tokens)
    if found.type != "int":
        raise tokens.error(f"expected an integer, found '{word}'", at)
    return found.value


def floating(value: Immediate) -> float:
    """The number that a literal of any kind stands for."""
    if value.type == "f32":
        return float(struct.unpack("<f", value.value.to_bytes(4, "little"))[0])
    if value.type == "f64":
        return float(struct.unpack("<d", value.value.to_bytes(8, "little"))[0])
    return float(value.value)
