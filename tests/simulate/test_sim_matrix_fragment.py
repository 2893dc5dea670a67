"""Register fragments: the formulas of the ISA's sections, one by one, against the transposes."""

from __future__ import annotations

import numpy as np
import pytest

from tunekit.simulate.matrix import fragment

LANES = np.arange(32)
GROUP, THREAD = LANES >> 2, LANES % 4


def a_place(bits: int, k: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of a_i for a 16-row A: PTX ISA 9.7.14.5, the section of each shape, as its formulas read."""
    if bits == 16 and k == 16:
        row = GROUP if i in (0, 1, 4, 5) else GROUP + 8
        return row, THREAD * 2 + (i & 1) + (8 if i >= 4 else 0)
    if bits == 16 and k == 8:
        return (GROUP if i < 2 else GROUP + 8), THREAD * 2 + (i & 1)
    if bits == 32 and k == 4:
        return (GROUP if i == 0 else GROUP + 8), THREAD
    if bits == 32 and k == 8:
        return (GROUP if i in (0, 2) else GROUP + 8), (THREAD if i in (0, 1) else THREAD + 4)
    if bits == 8 and k == 16:
        return (GROUP if i < 4 else GROUP + 8), THREAD * 4 + (i & 3)
    if bits == 8 and k == 32:
        row = GROUP if i < 4 or 8 <= i < 12 else GROUP + 8
        return row, THREAD * 4 + (i & 3) + (16 if i >= 8 else 0)
    if bits == 64 and k == 16:
        return (GROUP if i % 2 == 0 else GROUP + 8), (i * 2 + THREAD if i % 2 == 0 else i * 2 - 2 + THREAD)
    raise AssertionError


def b_place(bits: int, k: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    if bits == 16:
        return THREAD * 2 + (i & 1) + (8 if i >= 2 else 0), GROUP
    if bits == 32:
        return (THREAD if i == 0 else THREAD + 4), GROUP
    if bits == 8:
        return THREAD * 4 + (i & 3) + (16 if i >= 4 else 0), GROUP
    return THREAD + i * 4, GROUP


SHAPES = [(16, 16), (16, 8), (32, 4), (32, 8), (8, 16), (8, 32), (64, 16)]


@pytest.mark.parametrize(("bits", "k"), SHAPES)
def test_multiplicands_lie_where_the_isa_says(bits, k):
    each = max(1, 32 // bits)
    a = np.arange(16 * k).reshape(16, k)
    registers = np.empty((16 * k // 32 // each, 32, each), dtype=int)
    for i in range(registers.shape[0] * each):
        registers[i // each, :, i % each] = a[a_place(bits, k, i)]
    assert np.array_equal(fragment.a_matrix(registers, 16), a)
    b = np.arange(k * 8).reshape(k, 8)
    registers = np.empty((k * 8 // 32 // each, 32, each), dtype=int)
    for i in range(registers.shape[0] * each):
        registers[i // each, :, i % each] = b[b_place(bits, k, i)]
    assert np.array_equal(fragment.b_matrix(registers), b.T)


@pytest.mark.parametrize("n", [8, 24, 256])
def test_accumulators_lie_where_the_isa_says(n):
    """wgmma 9.7.15.5.1.1.1: row 8 * ((i // 2) % 2) + g, column 8 * (i // 4) + 2 t + i % 2 of a warp's 16 rows."""
    d = np.arange(16 * n).reshape(16, n)
    i = np.arange(n // 2)
    row = 8 * ((i // 2) % 2)[:, None] + GROUP
    column = (8 * (i // 4) + i % 2)[:, None] + 2 * THREAD
    assert np.array_equal(fragment.c_registers(d), d[row, column])
    assert np.array_equal(fragment.c_matrix(fragment.c_registers(d), 16), d)
    packed = fragment.c_registers_packed(d)
    assert np.array_equal(packed.transpose(0, 2, 1).reshape(-1, 32), d[row, column])
    assert np.array_equal(fragment.c_matrix_packed(packed, 16), d)


def test_a_block_of_eight_rows():
    a = np.arange(8 * 16).reshape(8, 16)
    registers = np.stack([a[GROUP, THREAD * 4 + j] for j in range(4)], axis=-1)[None]
    assert np.array_equal(fragment.a_matrix(registers, 8), a)
    d = np.arange(64).reshape(8, 8)
    assert np.array_equal(fragment.c_matrix(np.stack([d[GROUP, THREAD * 2 + j] for j in range(2)]), 8), d)
