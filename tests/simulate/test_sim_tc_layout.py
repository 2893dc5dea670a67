"""Where tcgen05 finds and puts matrices: pure functions, compared with CuTe's own layouts and the ISA's examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunekit.simulate.matrix import descriptor_sm100
from tunekit.simulate.matrix.descriptor_sm100 import DescriptorError
from tunekit.simulate.matrix.layout import NONE, SWIZZLE_128B, SWIZZLE_128B_BASE_32B, Place
from tunekit.simulate.units.tcgen05 import instruction_descriptor, zero_columns
from tunekit.simulate.units.tcgen05.copy import destinations
from tunekit.simulate.units.tcgen05.data_path import data_path
from tunekit.simulate.units.tcgen05.fragments import fragment
from tunekit.simulate.units.tcgen05.instruction_descriptor import KINDS, Shape

COLUMNS_OF = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}


@pytest.fixture(scope="module")
def cute_layouts() -> dict[str, Any]:
    """What CuTe makes of the copy atoms and accumulators of sm_100: coordinates by name."""
    cutlass = pytest.importorskip("cutlass")
    from cutlass import cute
    from cutlass.cute.nvgpu import tcgen05
    from cutlass.cute.nvgpu.common import OperandMajorMode

    found: dict[str, Any] = {}

    def loads() -> None:
        operations = {
            "32x32b": tcgen05.Ld32x32bOp,
            "16x64b": tcgen05.Ld16x64bOp,
            "16x128b": tcgen05.Ld16x128bOp,
            "16x256b": tcgen05.Ld16x256bOp,
        }
        for name, operation in operations.items():
            for repeat in (1, 4):
                columns = COLUMNS_OF[name] * repeat
                atom = cute.make_copy_atom(
                    operation(getattr(tcgen05.Repetition, f"x{repeat}"), tcgen05.Pack.NONE), cutlass.Float32
                )
                # 16 lanes of each quarter hold 64 rows, as a 64-row accumulator does.
                whole = name == "32x32b"
                shape = (128, columns) if whole else ((16, 4), columns)
                stride = (65536, 1) if whole else ((65536, 32 * 65536), 1)
                pointer = cute.make_ptr(cutlass.Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
                tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
                copy = tcgen05.make_tmem_copy(atom, tensor)
                places = cute.make_identity_tensor((128 if whole else 64, columns))
                cells = []
                for thread in range(32):
                    mine = copy.get_slice(thread).partition_D(places)
                    cells.append([[int(x) for x in mine[v]] for v in range(cute.size(mine))])
                found[f"ld {name} {repeat}"] = np.array(cells)

    def accumulators() -> None:
        for group, m in ((1, 64), (1, 128), (2, 128), (2, 256)):
            both = tcgen05.CtaGroup.ONE if group == 1 else tcgen05.CtaGroup.TWO
            operation = tcgen05.MmaF16BF16Op(
                cutlass.BFloat16,
                cutlass.Float32,
                (m, 64, 16),
                both,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
            tiled = cute.make_tiled_mma(cute.make_mma_atom(operation))
            layout = tiled.make_fragment_C(tiled.partition_shape_C((m, 64))).layout
            rows = m // group
            found[f"c {group} {m}"] = np.array(
                [[int(layout(((row, column), 0, 0))) for column in range(64)] for row in range(rows)]
            )

    def body() -> None:
        loads()
        accumulators()

    @cute.jit
    def trace() -> None:
        body()

    trace()
    return found


@pytest.mark.parametrize("repeat", [1, 4])
@pytest.mark.parametrize("shape", list(COLUMNS_OF))
def test_fragments_are_cutes(cute_layouts: dict[str, Any], shape: str, repeat: int) -> None:
    ours = fragment(shape, repeat)
    theirs = cute_layouts[f"ld {shape} {repeat}"]
    assert ours.registers == theirs.shape[1]
    np.testing.assert_array_equal(ours.lanes, theirs[:, :, 0])
    np.testing.assert_array_equal(ours.columns, theirs[:, :, 1])


@pytest.mark.parametrize(("group", "m"), [(1, 64), (1, 128), (2, 128), (2, 256)])
def test_accumulators_lie_where_cute_puts_them(cute_layouts: dict[str, Any], group: int, m: int) -> None:
    path = data_path(m, group, False)
    theirs = cute_layouts[f"c {group} {m}"]
    width = path.columns(64)
    for part in range(path.parts):
        ours = path.lanes[part][:, None] * 65536 + np.arange(width)
        np.testing.assert_array_equal(ours, theirs[:, part * width : (part + 1) * width])


@pytest.mark.parametrize(("m", "parts"), [(32, 4), (64, 2), (128, 1)])
def test_weight_stationary_accumulators_fill_all_lanes(m: int, parts: int) -> None:
    """CUTLASS's tmem_frg_ws: (m, (n/parts, parts)) : (1, (128, m)) over lanes by columns."""
    path = data_path(m, 1, True)
    assert path.parts == parts
    assert sorted(path.lanes.reshape(-1)) == list(range(128))


def test_the_second_half_of_16x32bx2_lies_at_its_offset() -> None:
    halves = fragment("16x32bx2", 2, split=40)
    assert halves.lanes[:16, 0].tolist() == halves.lanes[16:, 0].tolist() == list(range(16))
    assert halves.columns[3].tolist() == [0, 1] and halves.columns[19].tolist() == [40, 41]


def test_packed_registers_hold_two_columns() -> None:
    packed = fragment("16x128b", 1, packed=True)
    assert packed.columns[1].tolist() == [[2, 3], [2, 3]] and packed.lanes[1].tolist() == [0, 8]


@pytest.mark.parametrize(("shape", "repeat"), [("16x256b", 64), ("16x128b", 128), ("32x32b", 3), ("8x32b", 1)])
def test_fragments_that_do_not_exist(shape: str, repeat: int) -> None:
    with pytest.raises(ValueError, match="no"):
        fragment(shape, repeat)


def test_where_copies_go() -> None:
    """The split of CUTLASS's SM100_UTCCP traits, as strides over the destination lanes."""
    assert destinations("32x128b", "warpx4").T[5].tolist() == [5, 37, 69, 101]
    assert destinations("64x128b", "warpx2::02_13").T[40].tolist() == [40, 104]
    assert destinations("64x128b", "warpx2::01_23").T[40].tolist() == [72, 104]
    assert destinations("4x256b", "").tolist() == [[0, 32, 64, 96]]
    assert destinations("128x256b", "").tolist() == [list(range(128))]


# Descriptors


def test_a_matrix_descriptor_goes_both_ways() -> None:
    place = Place(0x4060, 0x100, 0x400, SWIZZLE_128B)
    bits = descriptor_sm100.encode(place)
    assert descriptor_sm100.decode(bits) == place
    # Written out by the fields of table 40 of the ISA.
    assert bits == 0x406 | 0x10 << 16 | 0x40 << 32 | 1 << 46 | 2 << 61


@pytest.mark.parametrize(
    ("bit", "field"),
    [
        (14, "matrix start address"),
        (31, "leading dimension byte offset"),
        (47, "fixed constant"),
        (52, "leading dimension stride mode"),
        (55, "fixed constant"),
        (61, "swizzling mode"),
    ],
)
def test_a_wrong_bit_of_a_matrix_descriptor_is_named(bit: int, field: str) -> None:
    good = descriptor_sm100.encode(Place(0x4000, 16, 1024, SWIZZLE_128B))
    with pytest.raises(DescriptorError) as caught:
        descriptor_sm100.decode(good | 1 << bit)
    assert caught.value.field == field


def test_a_descriptor_of_wgmma_is_refused() -> None:
    """sm_90's descriptor has no 0b001 in bits 46-48: the commonest way to get it wrong."""
    with pytest.raises(DescriptorError, match="0b001"):
        descriptor_sm100.decode(0x400 | 64 << 32 | 1 << 62)


def test_atoms_of_32_bytes_start_at_32_bytes() -> None:
    with pytest.raises(DescriptorError, match="32-byte atom"):
        descriptor_sm100.decode(descriptor_sm100.encode(Place(0x4010, 0, 512, SWIZZLE_128B_BASE_32B)))
    assert descriptor_sm100.decode(descriptor_sm100.encode(Place(0x4010, 16, 128, NONE))).swizzle is NONE


def shape(kind: str, m: int, n: int, a: str, b: str, d: str = "f32", **more: Any) -> Shape:
    fields: dict[str, Any] = {"a_major": "k", "b_major": "k", "negate_a": False, "negate_b": False, **more}
    return Shape(kind=KINDS[kind], m=m, n=n, a_type=a, b_type=b, d_type=d, **fields)


@pytest.mark.parametrize(
    ("what", "group", "ws"),
    [
        (shape("f16", 128, 128, "bf16", "bf16"), 1, False),
        (shape("f16", 64, 24, "f16", "f16", "f16", negate_b=True), 1, False),
        (shape("f16", 256, 256, "bf16", "f16", b_major="mn"), 2, False),
        (shape("tf32", 128, 64, "tf32", "tf32", a_major="mn"), 1, False),
        (shape("f8f6f4", 128, 96, "e4m3", "e2m1"), 2, False),
        (shape("i8", 64, 48, "u8", "s8", "s32", saturate=True), 1, False),
        (shape("f8f6f4", 32, 64, "e5m2", "e5m2", max_shift=16), 1, True),
        (shape("mxf8f6f4", 128, 128, "e4m3", "e3m2", scale_type="ue8m0", scale_a_id=3, scale_b_id=1), 1, False),
        (shape("mxf4", 128, 64, "e2m1", "e2m1", scale_type="ue8m0", scale_a_id=2), 1, False),
        (shape("mxf4nvf4", 256, 128, "e2m1", "e2m1", scale_type="ue4m3"), 2, False),
    ],
)
def test_an_instruction_descriptor_goes_both_ways(what: Shape, group: int, ws: bool) -> None:
    assert instruction_descriptor.decode(instruction_descriptor.encode(what), what.kind, group, ws) == what


def test_the_descriptors_of_a_compiled_kernel() -> None:
    """What CuTeDSL 4.8.1 puts into the PTX of an attention kernel: 128x64x16, bf16, K-major with 128B swizzle."""
    found = instruction_descriptor.decode(135267472, KINDS["f16"], 1, False)
    assert found == shape("f16", 128, 64, "bf16", "bf16")
    assert descriptor_sm100.decode(4611756662049538048) == Place(0, 16, 1024, SWIZZLE_128B)


@pytest.mark.parametrize(
    ("bits", "kind", "field"),
    [
        (0x8200490 | 1 << 2, "f16", "sparsity"),
        (0x8200490 | 1 << 3, "f16", "saturate"),
        (0x8200490 | 1 << 6, "f16", "reserved"),
        (0x8200490 | 1 << 29, "f16", "reserved"),
        (0x8200490 ^ 1 << 4, "f16", "dtype"),
        (0x8200490 | 7 << 7, "f16", "atype"),
        (0x8200490 & ~(63 << 17), "f16", "N"),
        (0x8200490 ^ 1 << 24, "f16", "M"),
        (0x8200490, "tf32", "atype"),
        (1 << 7 | 1 << 10 | 16 << 17 | 1 << 27, "mxf4", "scale matrix type"),
        (1 << 7 | 1 << 10 | 16 << 17 | 1 << 23 | 1 << 27 | 1 << 31, "mxf4", "K dimension"),
        (5 << 7 | 16 << 17 | 1 << 15 | 1 << 23 | 1 << 27, "mxf8f6f4", "transpose A"),
    ],
)
def test_a_wrong_field_of_an_instruction_descriptor_is_named(bits: int, kind: str, field: str) -> None:
    with pytest.raises(DescriptorError, match=field):
        instruction_descriptor.decode(bits, KINDS[kind], 1, False)


def test_the_zero_column_masks_of_the_isa() -> None:
    """The four examples of PTX ISA 9.7.16.4.3 (skip span 2, use span 3)."""

    def mask(m: int, n: int, starts: tuple[int, ...], firsts: tuple[int, ...], on: int = 1, shift: int = 0) -> str:
        bits = on << 39 | 2 << 40 | 3 << 48 | shift << 56
        for part, (start, first) in enumerate(zip(starts, firsts, strict=True)):
            bits |= start << 8 * part | first << 32 + part
        zero, moved = zero_columns.decode(bits, m, n, 32)
        assert moved == shift
        return "".join(str(int(z)) for z in zero)

    assert mask(128, 64, (0,), (0,), on=0) == "0" * 64
    assert mask(128, 64, (0,), (0,)).startswith("0000111" * 2)
    halves = mask(64, 64, (0, 0), (1, 0))
    assert halves[:17] == "11100001110000111" and halves[32:].startswith("0000111" * 2)
    quarters = mask(32, 64, (0, 1, 2, 1), (1, 1, 0, 0), shift=2)
    assert quarters[:14] == "1110000" * 2
    assert quarters[16:29] == "1100001110000"
    assert quarters[32:44] == "001110000111"
    assert quarters[48:61] == "0001110000111"


def test_a_zero_column_shift_has_a_limit() -> None:
    with pytest.raises(DescriptorError, match="column shift"):
        zero_columns.decode(17 << 56, 32, 64, 32)
    with pytest.raises(DescriptorError, match="column shift"):
        zero_columns.decode(9 << 56, 128, 64, 8)
