"""Tensor maps from bits to bytes moved: compared with what CuTeDSL's host code writes, and with plain loops."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import module_of

from tunekit.simulate.tma import box as boxes
from tunekit.simulate.tma.descriptor import Writer, decode, encode
from tunekit.simulate.tma.fields import replaced
from tunekit.simulate.tma.rules import misplaced, off_coordinates, problems
from tunekit.simulate.tma.swizzle import PATTERNS, Swizzle, swizzled
from tunekit.simulate.tma.tensor_map import Element, Im2col, NotModelled, TensorMap, TensorMapError

SPECS = Path(__file__).resolve().parent.parent / "specs"
# The tables of PTX ISA 5.5.7: which 16-byte chunk of a 128-byte line lies at each place of it, line by line.
ISA_TABLES = {
    Swizzle.NONE: ["01234567"],
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        *("01234567", "10325476", "23016745", "32107654"),
        *("45670123", "54761032", "67452301", "76543210"),
    ],
    Swizzle.B128_ATOM_32B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_32B_FLIP_8B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_64B: ["01234567", "45670123"],
}
SPANS = {Swizzle.NONE: 1 << 20, Swizzle.B32: 32, Swizzle.B64: 64}


@pytest.fixture(scope="module")
def cutedsl() -> ModuleType:
    pytest.importorskip("cutlass")
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    return module_of(SPECS / "cutedsl_tensor_maps.py")


# ---- decode ------------------------------------------------------------------------------------------------------


def fields(element: str, sizes: str, strides: str, box: str, swizzle: int = 0) -> TensorMap:
    numbers = ([int(n) for n in text.split()] for text in (sizes, strides, box))
    s, t, b = (tuple(n) for n in numbers)
    return TensorMap(0x7F1234567000, Element[element], s, t, b, (1,) * len(s), Swizzle(swizzle), 0, 128)


# (type, sizes, strides in elements, box, swizzle, multicast, store) -> what the descriptor says
WRITTEN = [
    (("bf16", (640, 300, 7), (768, 230400), (64, 64, 1), 3), fields("BF16", "640 300 7", "1536 460800", "64 64 1", 3)),
    (("bf16", (640, 300, 7), (768, 230400), (64, 32, 5), 3), fields("BF16", "640 300 7", "1536 460800", "64 32 5", 3)),
    (("bf16", (641, 299), (648,), (8, 256), 0), fields("BF16", "641 299", "1296", "8 256")),
    (("f16", (640, 300), (640,), (32, 8), 2), fields("F16", "640 300", "1280", "32 8", 2)),
    (("f16", (640, 300), (640,), (16, 8), 1), fields("F16", "640 300", "1280", "16 8", 1)),
    (("f16", (640, 300), (640,), (256, 8), 0), fields("F16", "640 300", "1280", "256 8")),
    (("u8", (1000,), (), (256,), 0), fields("U8", "1000", "", "256")),
    (("u16", (512, 7), (512,), (64, 7), 3), fields("U16", "512 7", "1024", "64 7", 3)),
    (("e4m3", (4096, 4096), (4096,), (128, 64), 3, 2), fields("U8", "4096 4096", "4096", "128 32", 3)),
    (("e4m3", (4096, 4096), (4096,), (128, 64), 3, 4), fields("U8", "4096 4096", "4096", "128 16", 3)),
    (("f32", (33, 12, 3), (36, 432), (8, 4, 2), 1), fields("F32", "33 12 3", "144 1728", "8 4 2", 1)),
    (
        ("f32", (33, 12, 3, 4, 5), (36, 432, 1440, 7200), (8, 4, 2, 3, 2), 1),
        fields("F32", "33 12 3 4 5", "144 1728 5760 28800", "8 4 2 3 2", 1),
    ),
    (("f32", (64, 64), (64,), (32, 16), 3, 1, True), fields("F32", "64 64", "256", "32 16", 3)),
    (("tf32", (64, 64), (64,), (32, 16), 4), fields("TF32", "64 64", "256", "32 16", 4)),
    (("f64", (100, 64), (100,), (16, 16), 3), fields("F64", "100 64", "800", "16 16", 3)),
    (("e2m1", (1024, 64), (1024,), (256, 32), 3), fields("B4X16", "1024 64", "512", "256 32", 3)),
    (("e3m2", (1024, 64), (1024,), (128, 32), 3), fields("B6X16_P32", "1024 64", "768", "128 32", 3)),
    (
        ("bf16", (128, 1 << 20, 3), (1 << 19, 1 << 38), (64, 256, 1), 3, 1, True),
        fields("BF16", f"128 {1 << 20} 3", f"{1 << 20} {1 << 39}", "64 256 1", 3),
    ),
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_cutedsl_writes_decodes_to_what_it_was_given(cutedsl: ModuleType, arch: str) -> None:
    for arguments, expected in WRITTEN:
        data = cutedsl.written(cutedsl.Case(*arguments), arch)
        assert decode(data) == expected, arguments
        assert encode(expected, Writer.CUTEDSL)[:64] == data[:64], arguments
        assert data[64:] == b"\xee" * 64, "CuTeDSL writes the first half only"
        assert problems(expected) == [], arguments


def test_a_descriptor_of_cutedsl_481_kept_here() -> None:
    words = "7f1234567000 6000246542 3138000007080 f6180 12b0000027f 400000006 3f00000000000002 107"
    data = b"".join(int(word, 16).to_bytes(8, "little") for word in words.split())
    expected = fields("BF16", "640 300 7 5 3", "1536 460800 3225600 16128000", "64 8 2 1 1", 3)
    assert decode(data) == expected
    assert encode(expected, Writer.CUTEDSL) == data + bytes(64)


def driver_rows() -> list[dict[str, Any]]:
    """What cuTensorMapEncode* of CUDA 13.0 made of parameters on an H200: words 0 to 9, or none where it refused."""
    lines = (Path(__file__).parent / "tensor_maps_h200.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def of_driver(row: dict[str, Any]) -> TensorMap:
    """The tensor map that the driver was asked for."""
    im2col, box = None, row.get("box")
    if box is None:
        rank = len(row["sizes"])
        rest = [0] * (rank - 3)  # the mode that knows W alone
        lower, upper = row.get("lower") or [row["lower_w"], *rest], row.get("upper") or [row["upper_w"], *rest]
        im2col = Im2col(tuple(lower), tuple(upper), row["pixels"])
        box = [row["channels"]] + [1] * (rank - 1)
    return TensorMap(
        row["address"],
        next(element for element in Element if element.driver == row["dtype"]),
        tuple(row["sizes"]),
        tuple(row["strides"]),
        tuple(box),
        tuple(row["element"]),
        Swizzle(row["swizzle"]),
        (0, 16, 32)[row["interleave"]],
        (0, 64, 128, 256)[row["l2"]],
        bool(row["fill"]),
        im2col,
    )


def test_what_the_driver_wrote_decodes_to_what_it_was_given() -> None:
    accepted = [row for row in driver_rows() if "words" in row]
    assert len(accepted) > 200
    for row in accepted:
        expected = of_driver(row)
        data = b"".join(int(word, 16).to_bytes(8, "little") for word in row["words"].split()).ljust(128, b"\0")
        assert decode(data) == expected, row
        assert encode(expected) == data, row
        if row["api"] == "tiled":
            assert problems(expected) == [], row


def test_what_the_driver_refuses_has_a_named_problem() -> None:
    refused = [row for row in driver_rows() if "words" not in row]
    assert len(refused) > 50
    for row in refused:
        assert problems(of_driver(row)), row


@st.composite
def tensor_maps(draw: st.DrawFn) -> TensorMap:
    rank = draw(st.integers(1, 5))

    def drawn(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    im2col = None
    box = drawn(1, 256, rank)
    if rank >= 3 and draw(st.booleans()):
        half = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}[rank]
        im2col = Im2col(drawn(-half, half - 1, rank - 2), drawn(-half, half - 1, rank - 2), draw(st.integers(1, 1024)))
        box = (box[0],) + (1,) * (rank - 1)
    return TensorMap(
        draw(st.integers(1, (1 << 53) - 1)) * 16,
        draw(st.sampled_from(Element)),
        drawn(1, 1 << 32, rank),
        tuple(n * 16 for n in drawn(0, (1 << 36) - 1, rank - 1)),
        box,
        drawn(1, 8, rank),
        draw(st.sampled_from(Swizzle)),
        draw(st.sampled_from([0, 16, 32])),
        draw(st.sampled_from([0, 64, 128, 256])),
        draw(st.booleans()),
        im2col,
    )


@settings(deadline=None)
@given(tensor_maps())
def test_decoding_undoes_encoding(tensor: TensorMap) -> None:
    data = encode(tensor)
    assert len(data) == 128
    assert decode(data) == tensor
    assert decode(encode(tensor, Writer.CUTEDSL)[:64] + b"\xee" * 64) == tensor


def test_replacing_a_field_changes_that_field() -> None:
    """tensormap.replace (PTX ISA 9.7.9.28), each field and ordinal."""
    start = fields("BF16", "640 300 7 5 3", "1536 460800 3225600 16128000", "64 8 2 1 1", 3)
    high = (1 << 40) - 16

    def at(values: tuple[int, ...], ordinal: int, value: int) -> tuple[int, ...]:
        return (*values[:ordinal], value, *values[ordinal + 1 :])

    expected: list[tuple[str, int, int, dict[str, Any]]] = [
        ("global_address", 0x1234567890, 0, {"address": 0x1234567890}),
        ("swizzle_mode", 1, 0, {"swizzle": Swizzle.B32}),
        ("swizzle_atomicity", 3, 0, {"swizzle": Swizzle.B128_ATOM_64B}),
        ("interleave_layout", 2, 0, {"interleave_bytes": 32}),
        ("fill_mode", 1, 0, {"nan_fill": True}),
        ("elemtype", 9, 0, {"element": Element.F64}),
        ("elemtype", 12, 0, {"element": Element.TF32_FTZ}),
        ("elemtype", 15, 0, {"element": Element.B6X16_P32}),
        ("rank", 2, 0, {name: getattr(start, name)[:3] for name in ("sizes", "box", "element_strides")}),
    ]
    expected[-1][3]["strides"] = start.strides[:2]
    for n in range(5):
        expected.append(("global_dim", 1 << 32 - n, n, {"sizes": at(start.sizes, n, 1 << 32 - n)}))
        expected.append(("box_dim", 250 + n, n, {"box": at(start.box, n, 250 + n)}))
        expected.append(("element_stride", 4 + n % 5, n, {"element_strides": at(start.element_strides, n, 4 + n % 5)}))
    for n in range(4):
        expected.append(("global_stride", high, n, {"strides": at(start.strides, n, high)}))
    for field, value, ordinal, change in expected:
        data = replaced(encode(start), field, value & 0xFFFFFFFF if field == "global_dim" else value, ordinal)
        assert decode(data) == dataclasses.replace(start, **change), field


@pytest.mark.parametrize(
    ("field", "value", "ordinal"),
    [("box_dim", 257, 0), ("global_stride", 8, 0), ("swizzle_mode", 4, 0), ("global_dim", 4, 5), ("colour", 1, 0)],
)
def test_what_no_field_can_hold_is_refused(field: str, value: int, ordinal: int) -> None:
    with pytest.raises(TensorMapError, match=f"tensormap.replace of {field}"):
        replaced(encode(GOOD), field, value, ordinal)


GOOD = fields("BF16", "640 300", "1536", "64 128", 3)


@pytest.mark.parametrize(
    ("word", "bit", "says"),
    [
        (0, 60, "unknown bits 0x1000000000000000 are set in word 0"),
        (1, 0, "an im2col one of rank 2"),
        (1, 3, "unknown bits"),
        (1, 6, "rank is 6"),
        (1, 9, "element type"),
        (1, 22, "unknown bits"),
        (6, 48, "unknown bits"),
        (7, 40, "a tiled one with bits"),
        (7, 44, "unknown bits"),
    ],
)
def test_bits_of_unknown_meaning_are_refused(word: int, bit: int, says: str) -> None:
    data = bytearray(encode(GOOD))
    data[8 * word + bit // 8] ^= 1 << bit % 8
    with pytest.raises(TensorMapError, match=says):
        decode(bytes(data))


@pytest.mark.parametrize(
    "data", [bytes(128), b"\xff" * 128, b"\xee" * 128, bytes(20)], ids=["zeros", "ones", "0xee", "short"]
)
def test_what_is_no_tensor_map_is_refused(data: bytes) -> None:
    with pytest.raises(TensorMapError):
        decode(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"address": 0x1008}, "global address 0x1008 is not aligned to 16 bytes"),
        ({"strides": (1544,)}, "stride of dimension 1, 1544 bytes, is not a multiple of 16"),
        ({"strides": (1 << 40,)}, "not below 2\\^40"),
        ({"sizes": (0, 300)}, "size of dimension 0, 0"),
        ({"box": (64, 257)}, "257 long in dimension 1"),
        ({"element_strides": (1, 9)}, "element stride of dimension 1 is 9"),
        ({"box": (60, 128)}, "rows of 120 bytes are no multiple of 16"),
        ({"box": (128, 128)}, "rows of 256 bytes are longer than the 128 bytes"),
        ({"interleave_bytes": 16}, "rank 3 or more"),
        ({"address": 1 << 57}, "not below 2\\^57"),
        ({"box": (256, 256), "element": Element.F64}, "524288 bytes does not fit shared memory, 232448"),
        ({"element": Element.U16, "nan_fill": True}, "can't be NaN in a tensor of u16"),
        ({"element": Element.B6X16_P32, "sizes": (100, 9)}, "no multiple of 128"),
        ({"element": Element.B4X16_P64, "address": 0x1010}, "aligned to 32 bytes"),
    ],
)
def test_each_rule_is_named_when_broken(change: dict[str, object], says: str) -> None:
    assert problems(GOOD) == []
    found = problems(dataclasses.replace(GOOD, **change))
    assert any(re.search(says, sentence) for sentence in found), found


def test_shared_addresses_and_coordinates() -> None:
    assert misplaced(GOOD, 0x1400) is None
    assert "0x1440" in (misplaced(GOOD, 0x1440) or "")
    packed = fields("B4X16", "1024 64", "512", "256 32", 3)
    assert off_coordinates(packed, (32, 5)) is None
    assert off_coordinates(packed, (3, 5))
    assert "first coordinate 2 times the 4 bits" in (off_coordinates(packed, (2, 5)) or "")
    assert off_coordinates(fields("B6X16_P32", "1024 64", "768", "128 32", 3), (64, 0))


@pytest.mark.parametrize(
    ("element", "good", "bad"),
    [
        ("U8", (0, 16, -16, 4096), (1, 8, -1, 17)),
        ("BF16", (0, 8, -8), (1, 4, -4, 9)),
        ("F32", (0, 4, -4), (1, 2, -2, 7)),
        ("S64", (0, 2, -2), (1, -1, 5)),
    ],
)
def test_a_row_starts_at_a_multiple_of_16_bytes(element: str, good: tuple[int, ...], bad: tuple[int, ...]) -> None:
    each = Element[element].bits // 8
    tensor = fields(element, "1024 64", str(1024 * each), f"{64 // each} 32", 0)
    for first in good:
        assert off_coordinates(tensor, (first, 3)) is None
    for first in bad:
        text = off_coordinates(tensor, (first, 0)) or ""
        assert f"first coordinate {first} times the {each} bytes of a {element.lower()} element" in text
        assert text.endswith("is no multiple of 16 bytes")


# ---- swizzle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", list(Swizzle))
def test_swizzles_follow_the_tables_of_the_isa(swizzle: Swizzle) -> None:
    table = ISA_TABLES[swizzle]
    assert PATTERNS[swizzle].period_bytes in (128 * len(table), 16)
    for address in range(0, 4096, 8):
        line, place = divmod(address, 128)
        chunk = int(table[line % len(table)][place // 16])  # the chunk that lies at `place`
        source = line * 128 + chunk * 16 + address % 16
        if swizzle is Swizzle.B128_ATOM_32B_FLIP_8B and line % 2:
            source ^= 8
        assert swizzled(np.array([source], np.int64), swizzle)[0] == address


# ---- boxes -------------------------------------------------------------------------------------------------------


def by_loops(tensor: TensorMap, start: tuple[int, ...]) -> dict[int, int | None]:
    """Byte offset in the unswizzled box -> global byte address, None outside: element by element."""
    bytes_each = tensor.element.bits // 8
    steps = (1, *tensor.element_strides[1:])
    ranges = [range(0, b, e) for b, e in zip(tensor.box, steps, strict=True)]
    moved: dict[int, int | None] = {}
    for place, index in enumerate(itertools.product(*reversed(ranges))):
        at = [c + i for c, i in zip(start, reversed(index), strict=True)]
        inside = all(0 <= a < size for a, size in zip(at, tensor.sizes, strict=True))
        address = tensor.address + at[0] * bytes_each + sum(a * s for a, s in zip(at[1:], tensor.strides, strict=True))
        for byte in range(bytes_each):
            moved[place * bytes_each + byte] = address + byte if inside else None
    return moved


@st.composite
def placed_boxes(draw: st.DrawFn, low: int = 1, high: int = 5) -> tuple[TensorMap, tuple[int, ...], int]:
    """A tensor map of rank low to high, coordinates and a shared address."""
    rank = draw(st.integers(low, high))
    element = draw(st.sampled_from([e for e in Element if e.bits >= 8]))
    swizzle = draw(st.sampled_from(Swizzle))
    each = element.bits // 8
    longest = min(SPANS.get(swizzle, 128), 256 * each)
    row = draw(st.sampled_from([n for n in (16, 32, 48, 64, 128, 256) if n <= longest]))
    box, steps, most = [row // each], [draw(st.integers(1, 8))], 256
    for _ in range(rank - 1):
        box.append(draw(st.integers(1, max(1, min(40, most)))))
        steps.append(draw(st.sampled_from([1, 1, 1, 2, 3])))
        most //= max(box[-1], 1)
    sizes = [draw(st.integers(1, 2 * n + 3)) for n in box]
    strides, step = [], sizes[0] * each
    for size in sizes[1:]:
        step = -(-step // 16) * 16 + draw(st.sampled_from([0, 16]))
        strides.append(step)
        step *= size
    start = tuple(draw(st.integers(-n - 1, size + 1)) for n, size in zip(box, sizes, strict=True))
    nan = element.floating and draw(st.booleans())
    tensor = TensorMap(1 << 20, element, (*sizes,), (*strides,), (*box,), (*steps,), swizzle, nan_fill=nan)
    return tensor, start, 128 * draw(st.integers(0, 40))


@settings(max_examples=150, deadline=None)
@given(placed_boxes())
def test_a_box_moves_the_bytes_that_a_plain_loop_moves(drawn: tuple[TensorMap, tuple[int, ...], int]) -> None:
    tensor, start, shared = drawn
    assert problems(tensor) == []
    expected = by_loops(tensor, start)
    box = boxes.tile(tensor, start)
    assert box.transaction_bytes == tensor.transaction_bytes == len(expected)

    # Bytes in: the last digits of each address, so that every byte of memory differs from its neighbours.
    data = ((box.addresses[:, None] + np.arange(box.inner_bytes)) % 251).astype(np.uint8)
    rounded = data
    if tensor.element.tf32:  # bytes count up, so no word is a NaN; nearest even by comparing distances
        words = data.reshape(-1).view(np.uint32).astype(np.int64)
        down = words >> 13 << 13
        up = (words - down > 4096) | ((words - down == 4096) & (words >> 13 & 1 == 1))
        rounded = (down + 8192 * up).astype(np.uint32).view(np.uint8).reshape(data.shape)
    moved = dict(zip((box.addresses[:, None] + np.arange(box.inner_bytes)).flat, rounded.flat, strict=True))
    image = box.image(data).reshape(-1)
    outside = b"\xf7\x7f" if tensor.nan_fill else bytes(2)  # on an H200, for every type
    for offset, address in expected.items():
        assert image[offset] == (outside[offset % 2] if address is None else moved[address])

    # Bytes out: the same image, cut, goes back where it came from.
    cut = box.cut(image.reshape(len(box.rows), -1))
    assert np.array_equal(cut, rounded)
    assert box.empty == all(address is None for address in expected.values())

    # Where in shared memory: each byte by the ISA's table.
    place = boxes.place(tensor, len(box.rows), shared)
    pieces = boxes.pieces(image.reshape(len(box.rows), -1), place)
    memory = {}
    for address, piece in zip(place.addresses, pieces, strict=True):
        for byte in range(place.piece_bytes):
            memory[int(address) + byte] = int(piece[byte])
    assert len(memory) == len(expected)
    pitch = SPANS.get(tensor.swizzle, 128) if tensor.swizzle else tensor.row_bytes
    assert place.total_bytes == len(box.rows) * pitch
    table = ISA_TABLES[tensor.swizzle]
    for offset in expected:
        row, rest = divmod(offset, tensor.row_bytes)
        line, column = divmod(shared + row * pitch + rest, 128)
        at = line * 128 + table[line % len(table)].index(str(column // 16)) * 16 + column % 16
        if tensor.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B and line % 2:
            at ^= 8
        assert memory[at] == image[offset]
    assert np.array_equal(boxes.packed(tensor, len(box.rows), pieces).reshape(-1), image)


@settings(deadline=None)
@given(placed_boxes(2, 2), st.data())
def test_gather4_takes_four_rows(drawn: tuple[TensorMap, tuple[int, ...], int], data: st.DataObject) -> None:
    tensor, start, _ = drawn
    matrix = dataclasses.replace(tensor, box=(tensor.box[0], 1), element_strides=(1, 1))
    rows = [data.draw(st.integers(-2, tensor.sizes[1] + 1)) for _ in range(4)]
    box = boxes.gather4(matrix, (start[0], *rows))
    assert box.transaction_bytes == 4 * matrix.transaction_bytes
    for number, row in enumerate(rows):
        one = boxes.tile(matrix, (start[0], row))
        assert one.rows[0] == box.rows[number]
        assert one.inside[0] == box.inside[number]
        assert (one.first, one.last) == (box.first, box.last)


def test_gather4_needs_a_matrix_of_single_rows() -> None:
    with pytest.raises(TensorMapError, match="one row high"):
        boxes.gather4(GOOD, (0, 1, 2, 3, 4))
    with pytest.raises(TensorMapError, match="4 coordinates"):
        boxes.gather4(GOOD, (0, 1, 2, 3))
    with pytest.raises(TensorMapError, match="3 coordinates for a tensor map of rank 2"):
        boxes.tile(GOOD, (0, 1, 2))


def test_padded_types_leave_gaps_and_count_the_bytes_of_global_memory() -> None:
    """b4x16_p64 and b6x16_p32 (PTX ISA 5.5.1.1): 16 elements take 16 bytes in shared memory, 8 or 12 in global."""
    for element, each in ((Element.B4X16_P64, 8), (Element.B6X16_P32, 12)):
        tensor = TensorMap(4096, element, (256, 8), (16 * each,), (128, 2), (1, 1), Swizzle.B128)
        assert problems(tensor) == []
        box = boxes.tile(tensor, (128, 1))
        assert box.addresses.tolist() == [4096 + 16 * each + 8 * each, 4096 + 2 * 16 * each + 8 * each]
        assert box.transaction_bytes == 2 * 8 * each
        place = boxes.place(tensor, 2, 1024)
        line_0 = [1024 + 16 * n for n in range(8)]
        line_1 = [1152 + 16 * (n ^ 1) for n in range(8)]
        assert place.addresses.tolist() == line_0 + line_1
        assert (place.piece_bytes, place.total_bytes) == (each, 256)
    with pytest.raises(TensorMapError, match="can't be copied out"):
        boxes.store_place(TensorMap(4096, Element.B4X16_P64, (256, 8), (128,), (128, 2), (1, 1)), 2, 1024)


def test_six_bit_elements_are_packed_by_a_store() -> None:
    """b6p2x16 (PTX ISA 5.5.1.1): the two top bits of each byte are dropped."""
    tensor = TensorMap(4096, Element.B6X16_P32, (128, 1), (96,), (128, 1), (1, 1), Swizzle.NONE)
    place = boxes.store_place(tensor, 1, 0)
    values = np.random.default_rng(0).integers(0, 256, 128).astype(np.uint8)
    data = values.reshape(len(place.addresses), place.piece_bytes)
    packed = int.from_bytes(boxes.packed(tensor, 1, data).tobytes(), "little")
    assert [(packed >> 6 * n) & 63 for n in range(128)] == (values & 63).tolist()


def test_interleaved_layouts_are_refused() -> None:
    tensor = TensorMap(4096, Element.F16, (8, 8, 8), (16, 128), (8, 8, 1), (1, 1, 1), interleave_bytes=16)
    with pytest.raises(NotModelled, match="an interleaved layout"):
        boxes.tile(tensor, (0, 0, 0))
