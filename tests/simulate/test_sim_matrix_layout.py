"""Canonical shared-memory layouts: compared with CuTe's own, evaluated on the CPU, and with the ISA's tables."""

from __future__ import annotations

import numpy as np
import pytest

from tunekit.simulate.matrix import descriptor_sm90, layout
from tunekit.simulate.matrix.layout import NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_128B_BASE_32B, Place

SWIZZLES = {"INTER": NONE, "SW32": SWIZZLE_32B, "SW64": SWIZZLE_64B, "SW128": SWIZZLE_128B}
BITS = {"Float8E4M3FN": 8, "BFloat16": 16, "TFloat32": 32}
ROWS = 64


def cute_layouts() -> list[tuple]:
    """(swizzle, major, bits, k of one instruction, rows, jumps in bytes, {(row, column): byte}), computed by CuTe."""
    cutlass = pytest.importorskip("cutlass")
    from cutlass import cute
    from cutlass.cute.nvgpu import warpgroup

    draw = np.random.default_rng(0)

    def one(type_name: str, swizzle: str, major: str) -> tuple:
        kind = getattr(warpgroup.SmemLayoutAtomKind, f"{major}_{swizzle}")
        atom = warpgroup.make_smem_layout_atom(kind, getattr(cutlass, type_name))
        bits = BITS[type_name]
        rows, columns = (2 * 1024 // bits if major == "MN" else 64), 2 * 1024 // bits
        tile = cute.tile_to_shape(atom, (rows, columns), (0, 1))
        chunk, k = 128 // bits, 256 // bits

        memory = cute.make_composed_layout(tile.inner, 0, cute.make_layout(rows * columns * bits // 8))

        def byte(r: int, c: int) -> int:  # CuTeDSL's swizzle acts on bytes, the layout under it counts elements
            return cute.crd2idx(cute.crd2idx((r, c), tile.outer) * bits // 8, memory)

        width = chunk * SWIZZLES[swizzle].chunks
        jumps = {"mn": byte(8, 0), "k": byte(0, chunk)} if major == "K" else {"mn": byte(width, 0), "k": byte(0, 8)}
        drawn = [(int(draw.integers(rows)), int(draw.integers(columns))) for _ in range(60)]
        cells = {(r, c): byte(r, c) for r, c in drawn + [(0, c // k * k) for _, c in drawn]}
        return swizzle, major, bits, k, rows, jumps, cells

    def everything() -> list[tuple]:
        return [one(t, s, major) for t in BITS for s in SWIZZLES for major in ("K", "MN")]

    found: list[tuple] = []

    @cute.jit
    def evaluate():
        found.extend(everything())

    evaluate()
    return found


def test_canonical_layouts_are_those_of_cute(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    layouts = cute_layouts()
    assert len(layouts) == len(BITS) * len(SWIZZLES) * 2
    for swizzle, major, bits, k, rows, jumps, cells in layouts:
        swap = major == "MN" and swizzle != "INTER"  # there the leading offset is the jump along M or N
        strides = (jumps["mn"], jumps["k"]) if swap else (jumps["k"], jumps["mn"])
        for (r, c), byte in cells.items():
            start = 4096 + cells[0, c // k * k]  # one descriptor for each k step
            place = Place(start, *strides, SWIZZLES[swizzle])
            found = layout.addresses(place, rows, k, bits, "k" if major == "K" else "mn")
            assert found[r, c % k] == 4096 + byte, (swizzle, major, bits, r, c, str(place))


@pytest.mark.parametrize("swizzle", [NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B], ids=lambda s: s.name)
@pytest.mark.parametrize("major", ["k", "mn"])
def test_an_operand_touches_each_byte_once(swizzle, major):
    place = Place(2048, 8192 if major == "mn" and swizzle.bits else 128, 1024, swizzle)
    found = layout.addresses(place, 64, 16, 16, major)
    assert found.shape == (64, 16)
    assert len(np.unique(found)) == 64 * 16
    assert not (found % 2).any()


def test_advancing_along_k_inside_a_swizzled_atom_is_an_addition():
    whole = layout.addresses(Place(1024, 0, 1024, SWIZZLE_128B), 64, 64, 16, "k")
    for step in range(4):
        part = layout.addresses(Place(1024 + 32 * step, 0, 1024, SWIZZLE_128B), 64, 16, 16, "k")
        assert np.array_equal(part, whole[:, 16 * step : 16 * step + 16])


@pytest.mark.parametrize("swizzle", [SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B], ids=lambda s: s.name)
def test_the_base_offset_moves_the_pattern(swizzle):
    """A pattern that starts 128 n bytes past its boundary, said by the base offset, is the aligned one moved."""
    aligned = layout.addresses(Place(4096, 0, 2048, swizzle), 16, 16, 16, "k")
    for n in range(1, swizzle.pattern_bytes // 128):
        moved = layout.addresses(Place(4096 + 128 * n, 0, 2048, swizzle, n), 16, 16, 16, "k")
        assert np.array_equal(moved, aligned + 128 * n)


def test_the_swizzle_with_atoms_of_32_bytes():
    """Chunks travel in pairs: chunk c of row k lies in pair (c // 2) ^ (k % 4) (CUTLASS's Swizzle<2,5,2>)."""
    place = Place(0, 4096, 512, SWIZZLE_128B_BASE_32B)
    found = layout.chunk_addresses(place, 32, 8, 32, "mn")
    for c in range(8):
        for k in range(8):
            expected = (k // 4) * 512 + (k % 4) * 128 + (((c // 2) ^ (k % 4)) * 2 + c % 2) * 16
            assert found[c, k] == expected


def test_a_descriptor_decodes_as_the_table_says():
    descriptor = (0x1A40 >> 4) | (0x400 >> 4) << 16 | (0x800 >> 4) << 32 | 5 << 49 | 2 << 62
    place = descriptor_sm90.decode(descriptor)
    assert place == Place(0x1A40, 0x400, 0x800, SWIZZLE_64B, 5)
    assert descriptor_sm90.encode(place) == descriptor
    assert str(place) == "start 0x1a40, leading 1024 B, stride 2048 B, swizzle 64B, base offset 5"
    for value, swizzle in enumerate((NONE, SWIZZLE_128B, SWIZZLE_64B, SWIZZLE_32B)):
        assert descriptor_sm90.decode(value << 62).swizzle == swizzle


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_elements_are_what_lies_at_their_addresses(major, dtype):
    bits = np.dtype(dtype).itemsize * 8
    rows, k = 128 * 8 // bits, 256 // bits
    place = Place(0, 16384, 1024, SWIZZLE_128B)
    memory = np.random.default_rng(1).integers(0, 256, 65536, dtype=np.uint8)
    chunks = memory[layout.chunk_addresses(place, rows, k, bits, major)[..., None] + np.arange(16)]
    got = layout.elements(chunks, dtype, major)
    at = layout.addresses(place, rows, k, bits, major)
    assert np.array_equal(got, memory.view(dtype)[at // (bits // 8)])


def test_four_bit_elements_share_bytes():
    found = layout.addresses(Place(0, 0, 1024, SWIZZLE_128B), 8, 64, 4, "k")
    assert found[0].tolist() == [c // 2 for c in range(64)]


def test_a_part_of_a_chunk_is_refused():
    with pytest.raises(ValueError, match="12 elements of 16 bits"):
        layout.addresses(Place(0, 0, 1024, SWIZZLE_128B), 8, 12, 16, "k")
