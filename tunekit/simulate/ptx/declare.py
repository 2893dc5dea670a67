"""Declarations of variables and parameters, with their initialisers (PTX ISA chapter 5)."""

from __future__ import annotations

import struct

from tunekit.simulate.ptx.literals import floating, integer, number
from tunekit.simulate.ptx.module import Symbol, Variable
from tunekit.simulate.ptx.tokens import Tokens, is_identifier, is_number

SPACES = frozenset({".global", ".shared", ".const", ".local", ".param"})
TYPE_BITS = {
    ".pred": 1,
    ".b8": 8, ".u8": 8, ".s8": 8,
    ".b16": 16, ".u16": 16, ".s16": 16, ".f16": 16, ".bf16": 16,
    ".b32": 32, ".u32": 32, ".s32": 32, ".f32": 32, ".f16x2": 32, ".bf16x2": 32, ".tf32": 32,
    ".b64": 64, ".u64": 64, ".s64": 64, ".f64": 64, ".f32x2": 64,
    ".b128": 128,
}  # fmt: skip
_VECTORS = {".v2": 2, ".v4": 4, ".v8": 8}
_FLOATS = {".f16": "<e", ".f32": "<f", ".f64": "<d"}
_POINTER_SPACES = SPACES | {".shared::cta", ".shared::cluster"}


def declared(tokens: Tokens, space: str, *, extern: bool = False) -> list[Variable]:
    """The variables of one declaration, from behind its space to before its ';' (or ',' or ')' of a parameter list).

    Sizes and alignments in bytes; an alignment that is not given is the element's (5.4.5).
    """
    align, elements, kind, pointer = 0, 1, "", False
    while tokens.word.startswith("."):
        word = tokens.take()
        if word == ".align":
            given = integer(tokens)
            align = align if pointer else given  # behind .ptr it is the pointee's
        elif word == ".attribute":
            tokens.skip_group("(", ")")
        elif word == ".ptr":
            pointer = True
        elif word in _VECTORS:
            elements = _VECTORS[word]
        elif word in TYPE_BITS and word != ".pred":
            kind = word
        elif not (pointer and word in _POINTER_SPACES):
            tokens.position -= 1
            raise tokens.error(f"'{word}' in the declaration of a {space} variable")
    if not kind:
        raise tokens.error(f"a {space} variable without a type")
    unit = elements * TYPE_BITS[kind] // 8
    found = [_variable(tokens, space, kind, unit, align or unit, extern)]
    while space != "param" and tokens.accept(","):
        found.append(_variable(tokens, space, kind, unit, align or unit, extern))
    return found


def _variable(tokens: Tokens, space: str, kind: str, unit: int, align: int, extern: bool) -> Variable:
    name = tokens.identifier()
    count, open_ended = 1, False
    while tokens.accept("["):
        if tokens.accept("]"):
            open_ended = True
            continue
        count *= integer(tokens)
        tokens.expect("]")
    initial: bytes | None = None
    addresses: tuple[tuple[int, Symbol], ...] = ()
    if tokens.accept("="):
        data = bytearray()
        links: list[tuple[int, Symbol]] = []
        _initialise(tokens, kind, data, links)
        if open_ended:
            count *= max(1, -(-len(data) // (count * unit)))
        if len(data) > count * unit:
            raise tokens.error(f"{name} has {count * unit} bytes and an initialiser of {len(data)}")
        initial = bytes(data.ljust(count * unit, b"\0"))
        addresses = tuple(links)
    elif open_ended:
        count = 0
    return Variable(name, space, count * unit, align, initial, extern, addresses)


def _initialise(tokens: Tokens, kind: str, data: bytearray, links: list[tuple[int, Symbol]]) -> None:
    if tokens.accept("{"):
        while not tokens.accept("}"):
            _initialise(tokens, kind, data, links)
            if tokens.word != "}":
                tokens.expect(",")
        return
    size = TYPE_BITS[kind] // 8
    word = tokens.word
    generic = word == "generic" and tokens.words[tokens.position + 1] == "("
    if generic or is_identifier(word):
        if size != 8:
            raise tokens.error(f"the address of a variable takes 8 bytes, {kind} has {size}")
        if generic:
            tokens.take()
            tokens.take()
        name = tokens.identifier()
        if generic:
            tokens.expect(")")
        offset = integer(tokens) if tokens.word in ("+", "-") else 0
        links.append((len(data), Symbol(name, offset)))
        data += bytes(size)
    elif kind in _FLOATS or kind == ".bf16":
        data += _float_bytes(tokens, kind)
    else:
        value = integer(tokens)
        data += (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _float_bytes(tokens: Tokens, kind: str) -> bytes:
    negative = tokens.accept("-")
    if not is_number(tokens.word):
        raise tokens.error(f"expected a number, found '{tokens.word}'")
    value = number(tokens)
    size = TYPE_BITS[kind] // 8
    if value.type == f"f{8 * size}" and not negative:
        return value.value.to_bytes(size, "little")  # the very bits, a NaN's too
    wide = -floating(value) if negative else floating(value)
    if kind == ".bf16":
        return struct.pack("<f", wide)[2:]
    try:
        return struct.pack(_FLOATS[kind], wide)
    except OverflowError:
        raise tokens.error(f"{wide} does not fit {kind}") from None


def parameters(tokens: Tokens) -> tuple[Variable, ...]:
    """A parameter list with its parentheses; without one, (). Space "reg" for a .func's register parameters."""
    if not tokens.accept("("):
        return ()
    found: list[Variable] = []
    while not tokens.accept(")"):
        space = tokens.take()
        if space not in (".param", ".reg"):
            tokens.position -= 1
            raise tokens.error(f"expected .param, found '{space}'")
        found += declared(tokens, space[1:]) if space == ".param" else [_register(tokens)]
        if tokens.word != ")":
            tokens.expect(",")
    return tuple(found)


def _register(tokens: Tokens) -> Variable:
    kind = tokens.take()
    if kind not in TYPE_BITS:
        raise tokens.error(f"'{kind}' is no type of a register", tokens.position - 1)
    size = TYPE_BITS[kind] // 8  # 0 for a predicate
    return Variable(tokens.identifier(), "reg", size, max(size, 1))


def registers(tokens: Tokens) -> list[tuple[str, int, int]]:
    """Names, widths in bits and elements of a .reg declaration, from behind ".reg" to before its ';'.

    A vector (PTX ISA 5.4.2) has two elements or more, each of that width. (PTX ISA 5.1.1, 5.4.6)
    """
    kind = tokens.take()
    elements = _VECTORS.get(kind, 1)
    if elements > 4:
        raise tokens.error(f"a register has no {elements} elements", tokens.position - 1)
    if elements > 1:
        kind = tokens.take()
    if kind not in TYPE_BITS:
        raise tokens.error(f"'{kind}' is no type of a register", tokens.position - 1)
    found = []
    while True:
        name = tokens.identifier()
        if tokens.accept("<"):
            found += [(f"{name}{i}", TYPE_BITS[kind], elements) for i in range(integer(tokens, 4))]
            tokens.expect(">")
        else:
            found.append((name, TYPE_BITS[kind], elements))
        if not tokens.accept(","):
            return found
