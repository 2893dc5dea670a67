"""Tensor memory: allocation, tcgen05.ld, .st and .wait, .cp and .shift, each with what may go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulate.tensor_core import Bench, padded
from tunekit.simulate.matrix import descriptor_sm100
from tunekit.simulate.matrix.layout import NONE, SWIZZLE_128B, Place, chunk_addresses
from tunekit.simulate.units.tcgen05.fragments import REGISTERS, fragment
from tunekit.simulate.units.tcgen05.state import tensor


def vector(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


def random_words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2**32, shape).astype(np.uint32)


# Loads and stores


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("repeat", [1, 2, 16])
@pytest.mark.parametrize("shape", list(REGISTERS))
def test_what_is_stored_is_loaded(shape: str, repeat: int, packed: bool) -> None:
    split = 64 if shape == "16x32bx2" else 0
    what = fragment(shape, repeat, packed, split)
    count = what.registers
    more = f", {split}" if split else ""
    bench = Bench(
        f"tcgen05.st.sync.aligned.{shape}.x{repeat}{'.unpack::16b' if packed else ''}.b32 "
        f"[%r399]{more}, {vector(count)};"
        "tcgen05.wait::st.sync.aligned;"
        f"tcgen05.ld.sync.aligned.{shape}.x{repeat}{'.pack::16b' if packed else ''}.b32 "
        f"{vector(count, 200)}, [%r399]{more};"
        "tcgen05.wait::ld.sync.aligned;"
    )
    bench.allocate()
    rng = np.random.default_rng(1)
    values = random_words(rng, 4, count, 32)
    for warp in range(4):
        lane = 32 * warp + (16 if shape != "32x32b" else 0)
        bench.set({"%r399": lane << 16 | 100}, warp=warp)
        bench.set({f"%r{n}": values[warp, n] for n in range(count)}, warp=warp)
    bench.run()
    assert bench.faults == []
    for warp in range(4):
        lane = 32 * warp + (16 if shape != "32x32b" else 0)
        found = np.array([bench.get(f"%r{200 + n}", warp) for n in range(count)])
        np.testing.assert_array_equal(found, values[warp])
        for t, n in ((0, 0), (5, count - 1), (31, count // 2)):
            columns = np.atleast_1d(what.columns[t, n]) + 100
            cells = bench.words()[lane + what.lanes[t, n], columns]
            value = int(values[warp, n, t])
            assert cells.tolist() == ([value & 0xFFFF, value >> 16] if packed else [value])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("min.f32", [-3.0, -8.0]),
        ("max.f32", [2.5, 1.0]),
        ("max.abs.f32", [3.0, 8.0]),
        ("min.NaN.f32", [-3.0, np.nan]),
        ("max.abs.NaN.f32", [3.0, np.nan]),
    ],
)
def test_a_load_that_reduces(form: str, expected: list[float]) -> None:
    bench = Bench(
        f"tcgen05.ld.red.sync.aligned.32x32b.x4.{form} {vector(4)}, %r20, [%r30]; tcgen05.wait::ld.sync.aligned;",
        threads=32,
    )
    bench.allocate()
    rows = np.zeros((32, 4), np.float32)
    rows[0], rows[1] = [1.0, -3.0, 2.5, 0.0], [np.nan, -8.0, 1.0, 0.5]
    bench.write_tensor(slice(0, 32), slice(8, 12), rows.view(np.uint32))
    bench.set({"%r30": 8})
    bench.run()
    assert bench.faults == []
    np.testing.assert_array_equal(bench.get("%r20")[:2].view(np.float32), np.array(expected, np.float32))
    np.testing.assert_array_equal(bench.get("%r1").view(np.float32), rows[:, 1])


@pytest.mark.parametrize(("form", "expected"), [("max.u32", 2**32 - 2), ("min.s32", -2), ("max.s32", 7)])
def test_an_integer_load_that_reduces(form: str, expected: int) -> None:
    bench = Bench(
        f"tcgen05.ld.red.sync.aligned.32x32b.x2.{form} {vector(2)}, %r20, [%r30]; tcgen05.wait::ld.sync.aligned;",
        threads=32,
    )
    bench.allocate()
    bench.write_tensor(slice(0, 32), slice(0, 2), np.tile(np.array([7, -2], np.int32).view(np.uint32), (32, 1)))
    bench.set({"%r30": 0})
    bench.run()
    assert bench.faults == []
    assert int(bench.get("%r20")[3]) == expected & 0xFFFFFFFF


def test_a_warp_reaches_its_own_quarter_of_the_lanes() -> None:
    bench = Bench(f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {vector(2)}, [%r9]; tcgen05.wait::ld.sync.aligned;")
    bench.allocate()
    bench.write_tensor(slice(None), slice(0, 2), np.zeros((128, 2), np.uint32))
    bench.set({"%r9": 32 << 16})
    bench.run()
    assert len(bench.faults) == 1 and "tmem access" in bench.faults[0]
    assert "reaches lanes" in bench.faults[0] and bench.cluster.faults.all()[0].count == 3


def test_the_upper_half_of_a_quarter_is_no_start_for_32_lanes() -> None:
    text = f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {vector(1)}, [%r9]; tcgen05.wait::ld.sync.aligned;"
    bench = Bench(text, threads=32)
    bench.allocate()
    bench.write_tensor(slice(None), slice(0, 2), np.zeros((128, 2), np.uint32))
    bench.set({"%r9": 16 << 16})
    bench.run()
    assert "32 lanes from it: warp 0 reaches lanes 0-31 only" in bench.faults[0]


def test_columns_outside_the_allocation() -> None:
    bench = Bench(f"tcgen05.st.sync.aligned.32x32b.x4.b32 [%r9], {vector(4)};", threads=32)
    bench.allocate(64)
    bench.set({"%r9": 62, **{f"%r{n}": 0 for n in range(4)}})
    bench.run()
    assert bench.faults == [
        "tmem access: at 0x0000003e (lane 0, column 62): columns 64-65 of tensor memory, which are not allocated "
        "(allocated: none)"
    ]
    bench = Bench(f"tcgen05.st.sync.aligned.32x32b.x4.b32 [%r9], {vector(4)};", threads=32)
    bench.allocate()
    bench.set({"%r9": 510, **{f"%r{n}": 0 for n in range(4)}})
    bench.run()
    assert "columns 510-513 of tensor memory, which has 512" in bench.faults[0]


def test_what_nothing_has_written() -> None:
    text = f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {vector(2)}, [%r9]; tcgen05.wait::ld.sync.aligned;"
    bench = Bench(text, threads=32)
    bench.allocate()
    bench.write_tensor(slice(0, 32), slice(8, 9), np.zeros((32, 1), np.uint32))
    bench.set({"%r9": 8})
    bench.run()
    assert "uninitialised read" in bench.faults[0]
    assert "tmem lane 0, column 9, which nothing has written (32 of 64 cells)" in bench.faults[0]


@pytest.mark.parametrize(
    ("between", "faults"),
    [
        ("", 1),
        ("mov.b32 %r3, %r1;", 1),
        ("add.s32 %r3, %r1, 1;", 0),
        ("mov.b64 %rd1, {%r1, %r2}; mov.b64 {%r3, %r4}, %rd1; add.s32 %r5, %r4, 1;", 0),
        ("tcgen05.wait::ld.sync.aligned;", 0),
    ],
)
def test_a_register_that_is_used_tells_that_its_load_is_over(between: str, faults: int) -> None:
    """Kernels of CUTLASS have no wait::ld: the values were used before their cells are written again."""
    bench = Bench(
        f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {vector(2, 1)}, [%r9]; {between}"
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%r8}; tcgen05.wait::st.sync.aligned;",
        threads=32,
    )
    bench.allocate()
    bench.write_tensor(slice(0, 32), slice(0, 2), np.zeros((32, 2), np.uint32))
    bench.set({"%r9": 0, "%r10": 1, "%r8": 7})
    bench.run()
    assert len(bench.faults) == faults and all("data race" in fault for fault in bench.faults)


@pytest.mark.parametrize(("wait", "faults"), [("tcgen05.wait::st.sync.aligned;", 0), ("", 1)])
def test_a_load_after_a_store_needs_the_stores_wait(wait: str, faults: int) -> None:
    bench = Bench(
        f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {vector(1)}; {wait}"
        f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {vector(1, 1)}, [%r9]; tcgen05.wait::ld.sync.aligned;",
        threads=32,
    )
    bench.allocate()
    bench.set({"%r9": 0, "%r0": 1})
    bench.run()
    assert len(bench.faults) == faults and all("data race" in fault for fault in bench.faults)


@pytest.mark.parametrize(("wait", "faults"), [("tcgen05.wait::ld.sync.aligned;", 0), ("", 1)])
def test_a_store_after_a_load_needs_the_loads_wait(wait: str, faults: int) -> None:
    bench = Bench(
        f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {vector(1, 1)}, [%r9]; {wait}"
        f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {vector(1)}; tcgen05.wait::st.sync.aligned;",
        threads=32,
    )
    bench.allocate()
    bench.write_tensor(slice(0, 32), slice(0, 1), np.zeros((32, 1), np.uint32))
    bench.set({"%r9": 0, "%r0": 1})
    bench.run()
    assert len(bench.faults) == faults and all("data race" in fault for fault in bench.faults)


# Allocation

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], %r2;"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, %r2;"


def allocating(text: str, values: dict[str, int], threads: int = 32) -> Bench:
    bench = Bench(text, threads=threads)
    bench.set({"%r1": 0x800, "%r2": 64, "%r3": 0, **values})
    bench.run()
    return bench


def test_alloc_writes_the_address_and_dealloc_gives_back() -> None:
    second = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], %r5;"
    give = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, %r5;"
    done = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    bench = allocating(f"{ALLOC} {second} {DEALLOC} {give} {done}", {"%r4": 0x804, "%r5": 32, "%r6": 64})
    assert bench.faults == []
    assert bench.cta.shared.data[0x800:0x808].view(np.uint32).tolist() == [0, 64]


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        (ALLOC, {}, "tmem not freed: columns 0-63"),
        (f"{ALLOC} {DEALLOC} {DEALLOC}", {}, "not the start of an allocation; it was freed at PTX line"),
        (f"{ALLOC} {DEALLOC}", {"%r3": 32}, "0x00000020 (lane 0, column 32) is not the start of an allocation"),
        (f"{ALLOC} {DEALLOC.replace('%r2', '%r7')}", {"%r7": 32}, "frees 32 columns at 0x00000000 (lane 0, column 0), "
         "where 64 were allocated"),
        (ALLOC, {"%r2": 48}, "48 columns: must be a power of 2 from 32 to 512"),
        (ALLOC, {"%r2": 1024}, "1024 columns: must be a power of 2 from 32 to 512"),
        (f"{ALLOC} {DEALLOC} {ALLOC.replace('%r2', '%r7')} {DEALLOC.replace('%r2', '%r7')}", {"%r7": 128},
         "allocations of a CTA must not grow"),
        (f"tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; {ALLOC} {DEALLOC}", {},
         "alloc after this CTA's tcgen05.relinquish_alloc_permit"),
        (f"{ALLOC} {DEALLOC.replace('::1', '::2')}", {}, "cta_group::2 in a kernel that has used cta_group::1"),
    ],
)  # fmt: skip
def test_allocations_gone_wrong(text: str, values: dict[str, int], message: str) -> None:
    faults = allocating(text, values).faults
    assert any(message in fault for fault in faults), faults


def test_alloc_waits_until_there_is_room() -> None:
    """Both warps want all columns: the second gets them when the first has given them back."""
    bench = Bench(f"{ALLOC} {DEALLOC}", threads=64)
    bench.set({"%r2": 512, "%r3": 0})
    for warp in range(2):
        bench.set({"%r1": 0x800 + 8 * warp}, warp=warp)
    bench.run()
    assert bench.faults == []
    assert bench.result is not None and bench.result.state == "done"


def test_an_allocation_that_never_fits_is_a_deadlock() -> None:
    bench = allocating(f"{ALLOC} {ALLOC}", {"%r2": 512})
    assert any("deadlock" in fault and "0 of 512 are free" in fault for fault in bench.faults)


def test_a_pair_allocates_together() -> None:
    text = f"{ALLOC} {DEALLOC}".replace("::1", "::2")
    bench = Bench(text, ctas=2, threads=32)
    bench.set({"%r2": 128, "%r3": 0})
    for cta in range(2):
        bench.set({"%r1": cta << 24 | 0x900}, cta=cta)
    bench.run()
    assert bench.faults == []
    assert [int(cta.shared.data[0x900:0x904].view(np.uint32)[0]) for cta in bench.cluster.ctas] == [0, 0]


def test_a_pair_whose_peer_never_comes() -> None:
    bench = Bench(ALLOC.replace("::1", "::2"), ctas=2, threads=32)
    bench.set({"%r1": 0x900, "%r2": 128})
    bench.only_the_first_issues()
    bench.run()
    assert any("deadlock" in fault and "the peer has not come" in fault for fault in bench.faults)


# Copies and shifts


@pytest.mark.parametrize("swizzle", [NONE, SWIZZLE_128B], ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("shape", "multicast"),
    [
        ("128x256b", ""),
        ("128x128b", ""),
        ("4x256b", ""),
        ("64x128b", ".warpx2::02_13"),
        ("64x128b", ".warpx2::01_23"),
        ("32x128b", ".warpx4"),
    ],
)
def test_copies(shape: str, multicast: str, swizzle: object) -> None:
    rows, width = int(shape.split("x")[0]), 32 if "256b" in shape else 16
    bench = Bench(f"tcgen05.cp.cta_group::1.{shape}{multicast} [%r1], %rd1;", threads=1)
    bench.allocate()
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (rows, width)).astype(np.uint8)
    place = Place(0x4000, 16 * 160, 1024 if swizzle is SWIZZLE_128B else 144, swizzle)  # type: ignore[arg-type]
    bench.write_shared(chunk_addresses(place, rows, width, 8, "k"), data.reshape(rows, width // 16, 16))
    lane = 31 if shape == "4x256b" else 0
    bench.set({"%r1": lane << 16 | 40, "%rd1": descriptor_sm100.encode(place)})
    bench.run()
    assert bench.faults == []
    words, held = bench.words(), tensor(bench.cta).memory.initialised
    expected = data.view(np.uint32)
    copies = {"128x256b": 1, "128x128b": 1, "4x256b": 1, "64x128b": 2, "32x128b": 4}[shape]
    assert held.sum() == copies * rows * width // 4
    for row in range(rows):
        lanes = {
            "": [row + lane if shape != "4x256b" else 32 * row + lane],
            ".warpx4": [row, row + 32, row + 64, row + 96],
            ".warpx2::02_13": [row, row + 64],
            ".warpx2::01_23": [row % 32 + 64 * (row // 32), row % 32 + 64 * (row // 32) + 32],
        }[multicast]
        for one in lanes:
            np.testing.assert_array_equal(words[one, 40 : 40 + width // 4], expected[row])


@pytest.mark.parametrize(("source", "width", "up"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
def test_copies_that_decompress(source: str, width: int, up: int) -> None:
    bench = Bench(f"tcgen05.cp.cta_group::1.128x256b.b8x16.{source} [%r1], %rd1;", threads=1)
    bench.allocate()
    bits = np.random.default_rng(3).integers(0, 1 << width, (128, 32)).astype(np.uint8)
    place = Place(0x4000, 16, 1024, SWIZZLE_128B)
    bench.write_shared(chunk_addresses(place, 128, 32, 8, "k"), padded(bits, width))
    bench.set({"%r1": 0, "%rd1": descriptor_sm100.encode(place)})
    bench.run()
    assert bench.faults == []
    np.testing.assert_array_equal(np.ascontiguousarray(bench.words()[:, :8]).view(np.uint8), bits << up)


def test_a_pair_copies_from_each_ctas_own_memory() -> None:
    bench = Bench("tcgen05.cp.cta_group::2.128x128b [%r1], %rd1;", ctas=2, threads=1)
    bench.allocate()
    rng = np.random.default_rng(4)
    place = Place(0x4000, 2048, 128, NONE)
    data = rng.integers(0, 256, (2, 128, 1, 16)).astype(np.uint8)
    for cta in range(2):
        bench.write_shared(chunk_addresses(place, 128, 16, 8, "k"), data[cta], cta)
    bench.set({"%r1": 8, "%rd1": descriptor_sm100.encode(place)})
    bench.only_the_first_issues()
    bench.run()
    assert bench.faults == []
    for cta in range(2):
        np.testing.assert_array_equal(bench.words(cta)[:, 8:12], data[cta].reshape(128, 16).view(np.uint32))


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        ("128x256b [%r1], %rd1;", {"%r1": 508}, "columns 508-515 of tensor memory, which has 512"),
        ("128x128b [%r1], %rd1;", {"%r1": 32 << 16}, "lanes 32-159 of tensor memory, which has 128"),
        ("128x128b [%r1], %rd1;", {"%rd1": 1 << 46 | 0x3FFF}, "outside shared memory"),
        ("128x128b [%r1], %rd1;", {"%rd1": 0x400}, "descriptor: matrix descriptor: fixed constant"),
    ],
)
def test_copies_gone_wrong(text: str, values: dict[str, int], message: str) -> None:
    bench = Bench(f"tcgen05.cp.cta_group::1.{text}", threads=1)
    bench.allocate()
    bench.set({"%r1": 0, "%rd1": descriptor_sm100.encode(Place(0x4000, 2048, 128, NONE)), **values})
    bench.run()
    assert any(message in fault for fault in bench.faults), bench.faults


def test_rows_shift_down_by_one() -> None:
    bench = Bench("tcgen05.shift.cta_group::1.down [%r1];", threads=1)
    bench.allocate()
    words = random_words(np.random.default_rng(6), 32, 8)
    bench.write_tensor(slice(32, 64), slice(16, 24), words)
    bench.set({"%r1": 32 << 16 | 16})
    bench.run()
    assert bench.faults == []
    np.testing.assert_array_equal(bench.words()[32:63, 16:24], words[1:])
    np.testing.assert_array_equal(bench.words()[63, 16:24], words[31])
