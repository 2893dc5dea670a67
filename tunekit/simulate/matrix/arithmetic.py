"""What a tensor core computes: D = A B + C, rounded once.

Products are exact in float64, and so is nearly every sum of the few terms of one instruction; the result is then
rounded to nearest even into the accumulator's type. The hardware aligns the terms and drops low bits before it adds
them, to a width that the ISA leaves open (9.7.15.5, "Precision and rounding": at least single precision for f16 and
bf16 operands, less for fp8 on sm_90), so results agree with it to the last bit only where no rounding takes place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.numbers import formats

# Storage of one element of a multiplicand: bits in a register or in shared memory.
ELEMENT_BITS = {
    **dict.fromkeys(("s4", "u4"), 4),
    **dict.fromkeys(("s8", "u8", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"), 8),
    **dict.fromkeys(("f16", "bf16"), 16),
    "tf32": 32,
    "f64": 64,
}
UNSIGNED: dict[int, type[Any]] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
INTEGERS = ("s4", "u4", "s8", "u8")
ACCUMULATORS: dict[str, type[Any]] = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "s32": np.int32}


def values(bits: NDArray[Any], kind: str) -> NDArray[np.float64]:
    """The numbers that bit patterns of PTX type `kind` stand for, exactly.

    Patterns are unsigned integers of ELEMENT_BITS (uint8 for 4 bits). e2m1 lies in bits 2 to 5 of its byte, e3m2 and
    e2m3 in the low six (9.7.14.5.14); tf32 ignores the low 13 bits of a float32.
    """
    if kind == "s8":
        return bits.view(np.int8).astype(np.float64)
    if kind == "s4":
        return ((bits.astype(np.int8) ^ 8) - 8).astype(np.float64)
    if kind in INTEGERS:
        return bits.astype(np.float64)
    if kind == "f64":
        return bits.view(np.float64)
    if kind == "e2m1":
        bits = bits >> 2
    return formats.decode(bits, kind).astype(np.float64)


def multiply_add(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    c: NDArray[Any] | None,
    kind: str,
    *,
    satfinite: bool = False,
) -> NDArray[Any]:
    """a [m, k] times b [n, k] transposed, plus c [m, n] (None: zero), as the accumulator type `kind`.

    s32 wraps, or with satfinite clamps.
    """
    product = a @ b.T
    if c is not None:
        product += c
    if kind != "s32":
        return product.astype(ACCUMULATORS[kind])
    if satfinite:
        return np.clip(product, -(2.0**31), 2.0**31 - 1).astype(np.int32)
    return product.astype(np.int64).astype(np.int32)
