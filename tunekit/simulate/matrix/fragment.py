"""How a matrix is spread over the registers of a warp (PTX ISA 9.7.14.5 for mma, 9.7.15.5.1.1 for wgmma).

One rule covers every shape and element size. Lanes form 8 groups g of 4 threads t; a register holds E elements.
A [m, k]: registers step first through the m/8 blocks of rows, then through blocks of 4E columns. B [k, n]: blocks of
4E rows k, column g. C and D [m, n]: 8 columns a block, two of them a thread, one register each or both in one.

Functions take and return arrays with one row a register: [registers, 32 lanes], and matrices [rows, columns]. They
only move elements, so any dtype will do. B is returned transposed, [n, k].
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item", bound=np.generic)

GROUPS, THREADS = 8, 4


def a_matrix(elements: NDArray[Item], m: int) -> NDArray[Item]:
    """[registers, 32, E] to [m, k]; m is 8 or 16."""
    blocks, each = m // GROUPS, elements.shape[-1]
    parts = elements.reshape(-1, blocks, GROUPS, THREADS, each)
    return parts.transpose(1, 2, 0, 3, 4).reshape(m, -1)


def b_matrix(elements: NDArray[Item]) -> NDArray[Item]:
    """[registers, 32, E] to [8, k], the transpose of B."""
    parts = elements.reshape(-1, GROUPS, THREADS, elements.shape[-1])
    return parts.transpose(1, 0, 2, 3).reshape(GROUPS, -1)


def c_matrix(registers: NDArray[Item], m: int) -> NDArray[Item]:
    """An accumulator with one element a register, [registers, 32], to [m, n]; n follows from the registers."""
    blocks = m // GROUPS
    parts = registers.reshape(-1, blocks, 2, GROUPS, THREADS)
    return parts.transpose(1, 3, 0, 4, 2).reshape(m, -1)


def c_registers(matrix: NDArray[Item]) -> NDArray[Item]:
    """The inverse of c_matrix."""
    m, n = matrix.shape
    parts = matrix.reshape(m // GROUPS, GROUPS, n // GROUPS, THREADS, 2)
    return parts.transpose(2, 0, 4, 1, 3).reshape(-1, GROUPS * THREADS)


def c_matrix_packed(elements: NDArray[Item], m: int) -> NDArray[Item]:
    """An accumulator with two elements a register, [registers, 32, 2], to [m, n]."""
    parts = elements.reshape(-1, m // GROUPS, GROUPS, THREADS, 2)
    return parts.transpose(1, 2, 0, 3, 4).reshape(m, -1)


def c_registers_packed(matrix: NDArray[Item]) -> NDArray[Item]:
    """The inverse of c_matrix_packed: [registers, 32, 2]."""
    m, n = matrix.shape
    parts = matrix.reshape(m // GROUPS, GROUPS, n // GROUPS, THREADS, 2)
    return parts.transpose(2, 0, 1, 3, 4).reshape(-1, GROUPS * THREADS, 2)
