"""The zero-column mask of tcgen05.mma.ws (PTX ISA 9.7.16.4.3): columns of B that count as 0, and a column shift."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.matrix.descriptor_sm100 import DescriptorError


def _field(descriptor: int, low: int, bits: int) -> int:
    return (descriptor >> low) & ((1 << bits) - 1)


@lru_cache(maxsize=256)
def decode(descriptor: int, m: int, n: int, max_shift: int) -> tuple[NDArray[np.bool_], int]:
    """(zero, shift): zero[n] tells the columns of the product that are multiplied by 0; column c reads B's c + shift.

    The N columns fall into 128/m sub-masks. In each, runs of zeroed and used columns alternate; "first span" tells
    whether the first is a zeroed one, "start count" how many columns of it are skipped.

    The ISA's table calls skip span the count of *used* columns; its examples 2 to 4 have it the other way round, and
    CUTLASS fills it as the count of columns to skip (the padding of a convolution). Here too: skip spans are zeroed.
    """
    if _field(descriptor, 36, 3) or _field(descriptor, 62, 2):
        raise DescriptorError("zero-column mask", "bits 36-38 and 62-63 must be 0")
    shift = _field(descriptor, 56, 6)
    most = min(16 if m == 32 else 32, max_shift)
    if shift > most:
        raise DescriptorError("column shift", f"{shift} is more than {most} (M = {m}, maximum shift {max_shift})")
    zero = np.zeros(n, dtype=np.bool_)
    if _field(descriptor, 39, 1):
        skipped, used = _field(descriptor, 40, 8) + 1, _field(descriptor, 48, 8) + 1
        parts = 128 // m
        width = n // parts
        for part in range(parts):
            first_is_zero = bool(_field(descriptor, 32 + part, 1))
            start = min(_field(descriptor, 8 * part, 8), (skipped if first_is_zero else used) - 1)
            position = (np.arange(width) + start) % (skipped + used)
            zero[part * width : (part + 1) * width] = (position < skipped) if first_is_zero else (position >= used)
    zero.flags.writeable = False
    return zero, shift
