"""Double-precision arithmetic as PTX rounds it (PTX ISA 9.7.3), and fractions as float64.

NumPy's own operations round to nearest; everything else goes lane by lane through fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from tunekit.simulate.numbers.formats import Array
from tunekit.simulate.numbers.ieee import Kernel

_QUIET = np.uint64(1 << 51)


def rounded_f64(exact: Fraction, rounding: str) -> float:
    """A fraction other than 0 as a float64."""
    sign = 1 if exact > 0 else -1
    try:
        nearest = float(exact)
    except OverflowError:
        nearest = sign * math.inf
    if rounding == "rn":
        return nearest
    difference = -sign if math.isinf(nearest) else exact - Fraction(nearest)
    down = rounding == "rm" or (rounding == "rz" and sign > 0)
    if difference < 0 and down:
        return math.nextafter(nearest, -math.inf)
    if difference > 0 and not down:
        return math.nextafter(nearest, math.inf)
    return math.copysign(nearest, sign)


@cache
def exact_f64(operation: str, rounding: str) -> Kernel:
    """add, sub, mul, div, fma or sqrt in float64 with any rounding.

    A NaN keeps its sign and payload and becomes quiet. Of several, add, sub, mul and fma pass b on, as found on an
    H200 (a or c of fma without b: not measured).
    """
    native_functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt}
    quick: Any = native_functions.get(operation)
    passes_b = operation in ("add", "sub", "mul", "fma")
    if rounding == "rn" and quick is not None:

        def native(*arrays: Array) -> None:
            quick(*arrays)

        return of_second_nan(native) if passes_b else native

    def lane(values: list[float], usual: float) -> float:
        if not all(map(math.isfinite, values)) or math.isnan(usual):
            return usual
        if operation == "sqrt":
            return _root(values[0], rounding)
        x, y = Fraction(values[0]), Fraction(values[1])
        if operation == "div":
            return usual if not y or not x else rounded_f64(x / y, rounding)
        if operation == "mul":
            return usual if not x or not y else rounded_f64(x * y, rounding)
        if operation == "fma":
            product, addend = x * y, Fraction(values[2])
            signs = {math.copysign(1, values[0]) * math.copysign(1, values[1]), math.copysign(1, values[2])}
        else:
            product, addend = x, y if operation == "add" else -y
            signs = {math.copysign(1, values[0]), math.copysign(1, values[1]) * (1 if operation == "add" else -1)}
        total = product + addend
        if total:
            return rounded_f64(total, rounding)
        if len(signs) == 1:
            return math.copysign(0.0, signs.pop())
        return -0.0 if rounding == "rm" else 0.0

    def kernel(*arrays: Array) -> None:
        *inputs, out = arrays
        usual = quick(*inputs) if quick is not None else inputs[0] * inputs[1] + inputs[2]
        rows = [x.tolist() for x in inputs]
        out[...] = [lane(list(values), value) for *values, value in zip(*rows, np.asarray(usual).tolist(), strict=True)]

    return of_second_nan(kernel) if passes_b else kernel


def quiet_f64(bits: Array) -> Array:
    """Patterns of float64 NaN made quiet: sign and payload stay."""
    return np.asarray(bits | _QUIET)


def of_second_nan(kernel: Kernel) -> Kernel:
    """`kernel` on float64, but where its second operand is NaN the result is that NaN, quiet."""

    def second(a: Array, b: Array, *more: Array) -> None:
        nan = np.isnan(b)
        if 1 not in nan.tobytes():
            kernel(a, b, *more)
            return
        passed = quiet_f64(b.view(np.uint64)[nan])
        kernel(a, b, *more)
        more[-1].view(np.uint64)[nan] = passed

    return second


def _root(value: float, rounding: str) -> float:
    nearest = math.sqrt(value)
    if rounding == "rn" or not value:
        return nearest
    difference = Fraction(value) - Fraction(nearest) ** 2
    if difference < 0 and rounding in ("rm", "rz"):
        return math.nextafter(nearest, 0.0)
    if difference > 0 and rounding == "rp":
        return math.nextafter(nearest, math.inf)
    return nearest
