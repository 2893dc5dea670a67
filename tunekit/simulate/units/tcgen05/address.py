"""Tensor memory addresses (PTX ISA 9.7.16.1.1): the lane in the upper half, the column in the lower."""

from __future__ import annotations

LANES = 128
COLUMNS = 512
# A warp reaches one quarter of the lanes (9.7.16.8.1).
QUADRANT = 32


def split(address: int) -> tuple[int, int]:
    """(lane, column) of a 32-bit tensor memory address."""
    return (address >> 16) & 0xFFFF, address & 0xFFFF


def join(lane: int, column: int) -> int:
    return (lane << 16) | column


def show(address: int) -> str:
    lane, column = split(address)
    return f"{address & 0xFFFFFFFF:#010x} (lane {lane}, column {column})"
