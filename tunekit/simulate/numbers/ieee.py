"""Single-precision arithmetic as PTX rounds it (PTX ISA 9.7.3): rn, rz, rm, rp, .ftz, .sat, and fused.

It makes the canonical NaN only and is exact to the last bit: results are formed in double precision
and rounded once, with the error of the double-precision sum where that could have hidden a tie.
.ftz flushes a result that is below the smallest normal number when it is rounded as if the exponent had no lower
bound, as an H200 does in mul, fma, mad, div, rcp and cvt, in every rounding mode.
Kernels take arrays (inputs, then `out`, which may be an input) of any shape that is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tunekit.simulate.numbers.formats import CANONICAL_NAN, Array

Kernel = Callable[..., None]

ROUNDINGS = ("rn", "rz", "rm", "rp")

_EXPONENT = np.array(0x7F800000, np.uint32)
_LARGE_EXPONENT = np.array(0x7F000000, np.uint32)
_SIGN = np.array(0x80000000, np.uint32)
_LOW_28 = np.array(0x0FFFFFFF, np.int64)
_LOW_29 = np.array(0x1FFFFFFF, np.int64)
_HALF = np.array(0x10000000, np.int64)
_SMALLEST_NORMAL = np.array(2.0**-126)
_TOWARDS = {"rz": np.float32(0), "rm": np.float32(-np.inf), "rp": np.float32(np.inf)}


def settle(out: Array) -> None:
    """Makes every NaN of a float32 array the canonical one, in place."""
    flags = np.isnan(out)
    if 1 in flags.tobytes():
        out.view(np.uint32)[flags] = CANONICAL_NAN


def flush(x: Array) -> None:
    """Makes subnormal float32 values zeros of their sign, in place (.ftz)."""
    bits = x.view(np.uint32)
    exponents = np.bitwise_and(bits, _EXPONENT)
    normal = np.count_nonzero(exponents)
    # Zeros are common and need nothing; a subnormal is what has no exponent and is not zero.
    if normal != exponents.size and normal != np.count_nonzero(x):
        bits[exponents == 0] &= _SIGN


def flushed(x: Array) -> Array:
    copy = x.copy()
    flush(copy)
    return copy


def saturate(x: Array) -> Array:
    """.sat: into [0, 1], NaN to +0."""
    return np.asarray(np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)))


def is_flushed(exact: Array, rounding: str, precision: int, smallest: float) -> Array:
    """Which results .ftz flushes, for a format of `precision` bits (found on an H200).

    That is what stays below the smallest normal number when rounded to `precision` bits with an unbounded exponent,
    although the delivered result, with one bit fewer there, may round up to that number.
    For roundings towards zero this asks too little, but then the delivered result is subnormal too.
    """
    magnitude = np.abs(exact)
    if rounding == "rn":
        # Halfway between the last two values: a tie goes to the smallest normal number, whose last bit is even.
        return np.asarray(magnitude < smallest * (1 - 2.0 ** (-precision - 1)))
    return np.asarray(magnitude <= smallest * (1 - 2.0**-precision))


def flush_result(result: Array, exact: Callable[[], Array], rounding: str) -> None:
    """.ftz of float32 results, in place, as is_flushed says; `exact` gives what they were rounded from."""
    # Few results come near: that is seen from the exponents of 0 and 1, which share the other bits.
    large = np.count_nonzero(np.bitwise_and(result.view(np.uint32), _LARGE_EXPONENT))
    if large == result.size or large == np.count_nonzero(result):
        return
    tiny = is_flushed(exact(), rounding, 24, 2.0**-126) & (np.abs(result) == _SMALLEST_NORMAL)
    result.view(np.uint32)[tiny] &= _SIGN
    flush(result)


def finish(x: Array, out: Array, ftz: bool, sat: bool = False) -> None:
    """Flushes, saturates and stores a fresh float32 result."""
    if ftz:
        flush(x)
    if sat:
        x = saturate(x)
    out[...] = x
    if not sat:
        settle(out)


def directed(nearest: Array, above: Array, rounding: str) -> Array:
    """float32 results in a directed mode, from the nearest ones and the sign of (exact - nearest)."""
    if rounding == "rz":
        move = ((nearest > 0) & (above < 0)) | ((nearest < 0) & (above > 0))
    else:
        move = above < 0 if rounding == "rm" else above > 0
    if 1 not in move.tobytes():
        return nearest
    return np.where(move, np.nextafter(nearest, _TOWARDS[rounding]), nearest)


def _error_of_sum(x: Array, y: Array, s: Array) -> Array:
    """What s = x + y in float64 lost, exactly (Knuth's two-sum)."""
    part = s - x
    return np.asarray((x - (s - part)) + (y - part))


def sticky_sum(x: Array, y: Array, s: Array) -> Array:
    """s = x + y in float64, with the last bit odd where the sum is inexact.

    Rounded to a format of at most 51 bits it gives what the exact sum gives, in every mode (rounding to odd).
    """
    error = _error_of_sum(x, y, s)
    even = (s.view(np.int64) & 1) == 0
    inexact = (error != 0) & np.isfinite(s) & even
    if not inexact.any():
        return s
    return np.where(inexact, np.nextafter(s, np.copysign(np.inf, error)), s)


def sum_to_f32(x: Array, y: Array, rounding: str) -> Array:
    """x + y (float64, their exact sum) as float32 in a directed mode."""
    s = x + y
    error = _error_of_sum(x, y, s)
    nearest = s.astype(np.float32)
    above = s - nearest.astype(np.float64)
    if np.count_nonzero(error):
        above = np.where(above == 0, error, above)
    result = directed(nearest, above, rounding)
    if rounding == "rm" and np.count_nonzero(s) != s.size:
        # IEEE 754: an exact zero of two different signs is -0 when rounding down.
        zero = (result == 0) & (s == 0) & (np.signbit(x) | np.signbit(y))
        result = np.where(zero, np.float32(-0.0), result)
    return result


def _nearest_of_sum(s: Array, error: Array) -> Array:
    """A float64 that rounds to float32 as s + error does.

    That is s itself, except where s lies halfway between two values and the error says on which side.
    """
    if not np.count_nonzero(error):
        return s
    bits = s.view(np.int64)
    scaled = s * 2.0**150
    small = (np.abs(s) < _SMALLEST_NORMAL) & (np.abs(scaled) % 2 == 1)
    halfway = np.where(np.abs(s) < _SMALLEST_NORMAL, small, (bits & 0x1FFFFFFF) == 0x10000000) & (error != 0)
    if halfway.any():
        s = np.where(halfway, np.nextafter(s, np.copysign(np.inf, error)), s)
    return s


@cache
def add_f32(subtract: bool, rounding: str, ftz: bool, sat: bool = False) -> Kernel:
    operation: Any = np.subtract if subtract else np.add
    if rounding == "rn" and not ftz and not sat:

        def plain(a: Array, b: Array, out: Array) -> None:
            operation(a, b, out)
            settle(out)

        return plain

    def kernel(a: Array, b: Array, out: Array) -> None:
        if ftz:
            a, b = flushed(a), flushed(b)
        if rounding == "rn":
            result = operation(a, b)
        else:
            right = b.astype(np.float64)
            result = sum_to_f32(a.astype(np.float64), -right if subtract else right, rounding)
        finish(result, out, ftz, sat)

    return kernel


@cache
def mul_f32(rounding: str, ftz: bool, sat: bool = False) -> Kernel:
    if rounding == "rn" and not ftz and not sat:

        def plain(a: Array, b: Array, out: Array) -> None:
            np.multiply(a, b, out)
            settle(out)

        return plain

    def kernel(a: Array, b: Array, out: Array) -> None:
        if ftz:
            a, b = flushed(a), flushed(b)
        result = a * b
        if rounding != "rn":
            result = directed(result, np.multiply(a, b, dtype=np.float64) - result, rounding)
        if ftz:
            flush_result(result, lambda: np.multiply(a, b, dtype=np.float64), rounding)
        finish(result, out, False, sat)

    return kernel


class _Scratch:
    """Buffers for the fused multiply-add of one shape: allocating them anew would cost as much as the arithmetic."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.single = np.empty((3, *shape), np.float32)
        self.wide = np.empty((3, *shape))
        self.x, self.y, self.z = self.wide
        self.sum = np.empty(shape)
        self.bits = self.sum.view(np.int64)
        self.low = np.empty(shape, np.int64)
        self.magnitude = np.empty(shape)
        self.flags = np.empty(shape, np.bool_)
        self.size = self.low.size

    def close(self, ftz: bool) -> bool:
        """Whether some sum lies halfway between two float32 values, as far as can be seen from the sum alone.

        The least that those have in common, low 28 bits that are zero, is looked at first: most sums lack it.
        """
        np.bitwise_and(self.bits, _LOW_28, self.low)
        if np.count_nonzero(self.low) == self.size:
            return False
        np.bitwise_and(self.bits, _LOW_29, self.low)
        np.equal(self.low, _HALF, self.flags)
        if 1 in self.flags.tobytes():
            return True
        if ftz:
            return False
        # Subnormal results have their middles elsewhere. Zeros are exact.
        np.abs(self.sum, self.magnitude)
        np.less(self.magnitude, _SMALLEST_NORMAL, self.flags)
        small = np.count_nonzero(self.flags)
        return bool(small and small != self.size - np.count_nonzero(self.magnitude))


_scratch = cache(_Scratch)


@cache
def fma_f32(rounding: str, ftz: bool, sat: bool = False) -> Kernel:
    """a * b + c with one rounding."""

    def kernel(a: Array, b: Array, c: Array, out: Array) -> None:
        k = _scratch(a.shape)
        x, z, s = k.x, k.z, k.sum
        if ftz:
            k.single[0] = a
            k.single[1] = b
            k.single[2] = c
            flush(k.single)
            k.wide[...] = k.single
        else:
            x[...] = a
            k.y[...] = b
            z[...] = c
        np.multiply(x, k.y, x)  # exact: 48 bits
        np.add(x, z, s)
        if rounding != "rn":
            result = sum_to_f32(x, z, rounding)
        else:
            result = _nearest_of_sum(s, _error_of_sum(x, z, s)) if k.close(ftz) else s
        if sat or rounding != "rn":
            result = result.astype(np.float32)
            if ftz:
                flush_result(result, lambda: sticky_sum(x, z, s), rounding)
            finish(result, out, False, sat)
            return
        out[...] = result
        if ftz:
            flush_result(out, lambda: sticky_sum(x, z, s), rounding)
        settle(out)

    return kernel


@cache
def div_f32(rounding: str, ftz: bool) -> Kernel:
    def kernel(a: Array, b: Array, out: Array) -> None:
        if ftz:
            a, b = flushed(a), flushed(b)
        result = a / b
        if rounding != "rn":
            remainder = a - np.multiply(result, b, dtype=np.float64)
            result = directed(result, np.where(np.isfinite(a) & (b != 0), remainder * np.sign(b), 0), rounding)
        if ftz:
            # A quotient of 24-bit numbers lies on a bound of is_flushed or 2^-49 of itself off: float64 tells.
            flush_result(result, lambda: np.divide(a, b, dtype=np.float64), rounding)
        finish(result, out, False)

    return kernel


@cache
def sqrt_f32(rounding: str, ftz: bool) -> Kernel:
    def kernel(a: Array, out: Array) -> None:
        if ftz:
            a = flushed(a)
        result = np.sqrt(a)
        if rounding != "rn":
            exact = np.multiply(result, result, dtype=np.float64)
            result = directed(result, np.where(np.isfinite(a), a - exact, 0), rounding)
        finish(result, out, ftz)

    return kernel
