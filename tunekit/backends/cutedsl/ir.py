"""Reading MLIR through its Python bindings: walking operations, following constants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_NUMBER = re.compile(r"\d+")


def walk(op: Any) -> Iterator[Any]:
    """`op` and all that it contains, in program order."""
    pending = [op]
    while pending:
        current = pending.pop()
        yield current
        inner = [o.operation for region in current.regions for block in region.blocks for o in block.operations]
        pending.extend(reversed(inner))


WIDENING = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast")


def constant(value: Any) -> int | None:
    """The integer that `value` is, if a constant operation makes it; None otherwise."""
    while not is_block_argument(value) and value.owner.name in WIDENING:
        value = value.owner.operands[0]
    if is_block_argument(value) or value.owner.name not in ("arith.constant", "llvm.mlir.constant"):
        return None
    try:
        return int(value.owner.attributes["value"].value)
    except (AttributeError, ValueError):
        return None


def is_block_argument(value: Any) -> bool:
    return not hasattr(value.owner, "operands")


def attribute(op: Any, name: str) -> Any:
    """The attribute `name` of `op`, or None."""
    return op.attributes.get(name, None)


def attribute_names(op: Any) -> list[str]:
    return [entry if isinstance(entry, str) else entry.name for entry in op.attributes]


def product(numbers: Any) -> int | None:
    """The product of integers; None if there are none or one isn't known."""
    values = list(numbers) if numbers is not None else []
    if not values or None in values:
        return None
    total = 1
    for value in values:
        total *= int(value)
    return total


def bits(dtype: str) -> int:
    """The size of an element type from its name: ``bf16`` 16, ``f8E4M3FN`` 8, ``i1`` 1; 8 where the name tells none."""
    found = _NUMBER.search(dtype)
    return int(found[0]) if found else 8
