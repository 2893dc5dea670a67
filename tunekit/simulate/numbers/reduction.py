"""The arithmetic of atom, red and of asynchronous reductions (PTX ISA 9.7.13: atom, red; 9.7.9: cp.reduce.async.bulk).

Values are numpy arrays of the type's storage; packed types are arrays of their elements, as memory has them.

What the ISA leaves open was found on an H200 (driver 13.0) from tensor reductions, cp.reduce.async.bulk.tensor, over
all pairs of special values: a result that is a NaN is the canonical one, 0x7FFF or 0x7FFFFFFF, whatever NaNs went in;
of one NaN and one number, min and max take the number; -0 is less than +0; of the float32 types, f32_ftz alone
flushes subnormals. Other reductions and atomics are taken to be alike, and f64 to keep a NaN's payload: not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]

STORAGE: dict[str, np.dtype[Any]] = {
    "b8": np.dtype(np.uint8),
    "b16": np.dtype(np.uint16),
    "b32": np.dtype(np.uint32),
    "b64": np.dtype(np.uint64),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    "s32": np.dtype(np.int32),
    "s64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "f16x2": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
"""numpy's type of one element. bf16 is stored as its 16 bits."""

_BITWISE: dict[str, Callable[[Values, Values], Values]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, value: value,
}
_INTEGER: dict[str, Callable[[Values, Values], Values]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda old, value: np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, value: np.where((old == 0) | (old > value), value, old - old.dtype.type(1)),
}


def _smaller(old: Values, value: Values) -> Values:
    """The number where the other is a NaN, and -0 of two zeros if one of them is."""
    return np.where((old == 0) & (value == 0), -(-old - value), np.fmin(old, value))


def _larger(old: Values, value: Values) -> Values:
    """The number where the other is a NaN, and +0 of two zeros if one of them is."""
    return np.where((old == 0) & (value == 0), old + value, np.fmax(old, value))


_FLOATING: dict[str, Callable[[Values, Values], Values]] = {"add": np.add, "min": _smaller, "max": _larger}


def supports(operation: str, type: str) -> bool:
    """Whether `combine` knows the operation on the type."""
    if operation in _BITWISE:
        return (type[0] in "bus" and not type.startswith("bf")) or operation == "exch"
    if type in ("u32", "u64", "s32", "s64"):
        return operation in _INTEGER and (operation not in ("inc", "dec") or type[0] == "u")
    return type in ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64") and operation in _FLOATING


def combine(operation: str, type: str, old: Values, value: Values, *, flush: bool = False) -> Values:
    """What the location holds afterwards: `operation` of what it held and the operand, element by element.

    `flush`: subnormal float32 inputs and results become zeros of their sign (atom.add.f32 in global memory).
    """
    if operation in _BITWISE:
        return _BITWISE[operation](old, value)
    with np.errstate(all="ignore"):
        if type in ("bf16", "bf16x2"):
            return _to_bf16(_FLOATING[operation](_from_bf16(old), _from_bf16(value)))
        if type == "f64":
            return _FLOATING[operation](old, value)
        if type in ("f16", "f16x2"):
            return _canonical(_FLOATING[operation](old, value), np.uint16(0x7FFF))
        if type == "f32":
            if flush:
                old, value = _flushed(old), _flushed(value)
            result = _FLOATING[operation](old, value)
            return _canonical(_flushed(result) if flush else result, np.uint32(0x7FFFFFFF))
        return _INTEGER[operation](old, value)


def _canonical(values: Values, nan: np.uint16 | np.uint32) -> Values:
    """`values`, with the bits `nan` in place of every NaN."""
    exact = np.asarray(values)
    bits: Values = np.where(np.isnan(exact), nan, exact.view(nan.dtype))
    return bits.view(exact.dtype)


def _flushed(values: Values) -> Values:
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def _from_bf16(bits: Values) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: NDArray[np.float32]) -> Values:
    """Nearest even. One float32 operation before it does not round twice: 24 bits are enough for 8 (2p + 2)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)
