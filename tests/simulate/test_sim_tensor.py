"""Tensor copies in small kernels: bytes moved, mbarriers, groups, and what is found when they are misused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tunekit.simulate.faults import Unsupported
from tunekit.simulate.tma.descriptor import Writer, encode
from tunekit.simulate.tma.swizzle import Swizzle
from tunekit.simulate.tma.tensor_map import Element, TensorMap

Run = Callable[..., Any]
MAP = ".param .align 64 .b8 map[128]"
OUT = ".param .u64 out"
SHARED = ".shared .align 1024 .b8 tile[16384];\n.shared .align 8 .b64 full[2];"
# %r1: address of the tile, %r2: of the first mbarrier, %rd1: of the map
START = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, tile;
mov.u32 %r2, full;
mov.b64 %rd1, map;
cvta.param.u64 %rd1, %rd1;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALISED;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
bar.sync 0;
"""
WAIT = """
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
@!%p1 bra WAIT;
"""
# Every thread copies 4 bytes of the tile at a time to `out`.
DUMP = """
ld.param.u64 %rd2, [out];
mov.u32 %r10, 0;
NEXT:
shl.b32 %r11, %r0, 2;
add.u32 %r12, %r10, %r11;
add.u32 %r13, %r1, %r12;
ld.shared.u32 %r14, [%r13];
cvt.u64.u32 %rd3, %r12;
add.u64 %rd4, %rd2, %rd3;
st.global.u32 [%rd4], %r14;
add.u32 %r10, %r10, 128;
setp.lt.u32 %p2, %r10, BYTES;
@%p2 bra NEXT;
"""


def load_kernel(ptx_kernel: Run, bytes_: int, copy: str, before: str = "", expect: int | None = None) -> str:
    expected = bytes_ if expect is None else expect
    body = f"""{START}{before}
@%p0 bra ISSUED;
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {expected};
{copy}
ISSUED:
{WAIT}{DUMP.replace("BYTES", str(bytes_))}
ret;"""
    return str(ptx_kernel(body, f"{MAP}, {OUT}", variables=SHARED))


def made(tensor: TensorMap, buffer: str = "tensor") -> Callable[[Any], bytes]:
    """The bytes of `tensor`, once it is known where its buffer lies; tensor.address counts from there."""
    return lambda at: encode(dataclasses.replace(tensor, address=tensor.address + at[buffer]), Writer.CUTEDSL)


def of(array: np.ndarray[Any, Any], box: tuple[int, ...], swizzle: int = 0, **fields: Any) -> TensorMap:
    """The map of a whole C-contiguous array; its last axis is dimension 0."""
    elements = {"uint16": Element.BF16, "float32": Element.F32, "uint32": Element.U32, "uint8": Element.U8}
    known = {"element": elements[array.dtype.name], "box": box, "swizzle": Swizzle(swizzle)}
    known |= {"element_strides": (1,) * array.ndim, "strides": tuple(reversed(array.strides[:-1]))}
    return TensorMap(**({"address": 0, "sizes": tuple(reversed(array.shape))} | known | fields))


def drawn(*shape: int, dtype: Any = np.uint16) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(1, 60000, shape).astype(dtype)


def swizzled_128(tile: np.ndarray[Any, Any]) -> bytes:
    """Rows of 128 bytes as they lie in shared memory."""
    rows = np.ascontiguousarray(tile).view(np.uint8).reshape(-1, 8, 16)
    return np.stack([row[[chunk ^ (n % 8) for chunk in range(8)]] for n, row in enumerate(rows)]).tobytes()


LOAD_2D = "cp.async.bulk.tensor.2d.{space}.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{at}}}], [%r2];"


@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_box_is_loaded_swizzled_and_filled_with_zeros(run_ptx: Run, ptx_kernel: Run, space: str, seed: int) -> None:
    tensor = drawn(50, 160)
    text = load_kernel(ptx_kernel, 32 * 128, LOAD_2D.format(space=space, at="128, 30"))
    ran = run_ptx(
        text,
        {"tensor": tensor, "out": np.zeros(32 * 128, np.uint8)},
        [made(of(tensor, (64, 32), 3)), "out"],
        seed=seed,
    )
    assert ran.faults == ()
    padded = np.zeros((96, 192), np.uint16)
    padded[:50, :160] = tensor
    assert ran.buffers["out"].tobytes() == swizzled_128(padded[30:62, 128:192])


def test_five_dimensions_and_negative_coordinates(run_ptx: Run, ptx_kernel: Run) -> None:
    tensor = drawn(3, 4, 5, 6, 16)
    box = (16, 2, 3, 1, 2)
    copy = (
        "cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%r1], [%rd1, {-8, 1, -1, 2, 1}], [%r2], %rd9;"
    )
    size = 16 * 2 * 3 * 2 * 2
    text = load_kernel(ptx_kernel, size, copy, before="mov.b64 %rd9, 0;")
    ran = run_ptx(text, {"tensor": tensor, "out": np.zeros(size, np.uint8)}, [made(of(tensor, box)), "out"])
    assert ran.faults == ()
    padded = np.zeros((3, 4, 6, 6, 24), np.uint16)  # one before, along dimensions 2 and 0
    padded[:, :, 1:, :, 8:] = tensor
    assert ran.buffers["out"].tobytes() == padded[1:3, 2:3, 0:3, 1:3, 0:16].tobytes()


def test_gather4_loads_four_rows(run_ptx: Run, ptx_kernel: Run) -> None:
    tensor = drawn(40, 64)
    copy = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {0, 7, 39, 40, 7}], [%r2];"
    )
    text = load_kernel(ptx_kernel, 512, copy)
    ran = run_ptx(text, {"tensor": tensor, "out": np.zeros(512, np.uint8)}, [made(of(tensor, (64, 1), 3)), "out"])
    assert ran.faults == ()
    rows = np.stack([tensor[7], tensor[39], np.zeros(64, np.uint16), tensor[7]])
    assert ran.buffers["out"].tobytes() == swizzled_128(rows)


def test_a_wrong_transaction_count_is_a_deadlock_that_names_the_bytes(run_ptx: Run, ptx_kernel: Run) -> None:
    tensor = drawn(50, 64)
    for expect, says in ((4112, "16 bytes"), (4080, "16 bytes more")):
        text = load_kernel(ptx_kernel, 4096, LOAD_2D.format(space="shared::cta", at="0, 0"), expect=expect)
        ran = run_ptx(text, {"tensor": tensor, "out": np.zeros(4096, np.uint8)}, [made(of(tensor, (64, 32), 3)), "out"])
        assert "deadlock" in ran.kinds
        assert any(says in fault.message for fault in ran.faults), ran.faults


def test_reading_before_the_barrier_is_a_race(run_ptx: Run, ptx_kernel: Run) -> None:
    tensor = drawn(50, 64)
    text = load_kernel(ptx_kernel, 4096, LOAD_2D.format(space="shared::cta", at="0, 0")).replace(WAIT, "")
    found: set[str] = set()
    for seed in range(4):
        found |= run_ptx(
            text, {"tensor": tensor, "out": np.zeros(4096, np.uint8)}, [made(of(tensor, (64, 32), 3)), "out"], seed=seed
        ).kinds
    assert found & {"data race", "uninitialised read"}


FILL = """
shl.b32 %r20, %r0, 2;
mov.u32 %r21, 0;
FILL:
add.u32 %r22, %r20, %r21;
add.u32 %r23, %r1, %r22;
add.u32 %r24, %r22, 7;
st.shared.u32 [%r23], %r24;
add.u32 %r21, %r21, 128;
setp.lt.u32 %p3, %r21, 4096;
@%p3 bra FILL;
"""
FENCE = "fence.proxy.async.shared::cta;\n"


def store_kernel(ptx_kernel: Run, copy: str, fence: str = FENCE) -> str:
    body = f"""{START}{FILL}{fence}bar.sync 0;
@%p0 bra DONE;
{copy}
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
ret;"""
    return str(ptx_kernel(body, f"{MAP}, {OUT}", variables=SHARED))


STORE_2D = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%COL, %ROW}], [%r1];"


def store(at: tuple[int, int], name: str = STORE_2D) -> str:
    return name.replace("%COL", str(at[0])).replace("%ROW", str(at[1]))


def test_a_box_is_stored_unswizzled_and_cut(run_ptx: Run, ptx_kernel: Run) -> None:
    before = drawn(50, 40, dtype=np.uint32)
    text = store_kernel(ptx_kernel, store((16, 30)))
    ran = run_ptx(text, {"tensor": before, "out": np.zeros(4, np.uint8)}, [made(of(before, (32, 32), 3)), "out"])
    assert ran.faults == ()
    shared = np.arange(7, 4103, 4, dtype=np.uint32).tobytes()
    tile = np.frombuffer(swizzled_128(np.frombuffer(shared, np.uint32).reshape(32, 32)), np.uint32).reshape(32, 32)
    after = before.copy()
    after[30:50, 16:40] = tile[:20, :24]
    assert np.array_equal(ran.buffers["tensor"], after)


def test_a_store_without_a_proxy_fence_is_found(run_ptx: Run, ptx_kernel: Run) -> None:
    before = drawn(50, 40, dtype=np.uint32)
    text = store_kernel(ptx_kernel, store((0, 0)), fence="")
    ran = run_ptx(text, {"tensor": before, "out": np.zeros(4, np.uint8)}, [made(of(before, (32, 32), 3)), "out"])
    assert "missing proxy fence" in ran.kinds


@pytest.mark.parametrize("operation", ["add", "min", "max", "inc", "dec", "and", "or", "xor"])
def test_reductions(run_ptx: Run, ptx_kernel: Run, operation: str) -> None:
    before = drawn(50, 40, dtype=np.uint32)
    reduction = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
    text = store_kernel(ptx_kernel, store((8, 0), STORE_2D.replace(STORE_2D.split()[0], reduction)))
    ran = run_ptx(text, {"tensor": before, "out": np.zeros(4, np.uint8)}, [made(of(before, (32, 32))), "out"])
    assert ran.faults == ()
    new, old = np.arange(7, 4103, 4, dtype=np.uint32).reshape(32, 32), before[:32, 8:40]
    expected = {
        "add": lambda: old + new,
        "min": lambda: np.minimum(old, new),
        "max": lambda: np.maximum(old, new),
        "inc": lambda: np.where(old >= new, 0, old + 1),
        "dec": lambda: np.where((old == 0) | (old > new), new, old - 1),
        "and": lambda: old & new,
        "or": lambda: old | new,
        "xor": lambda: old ^ new,
    }[operation]()
    after = before.copy()
    after[:32, 8:40] = expected
    assert np.array_equal(ran.buffers["tensor"], after)


def test_a_float_reduction_adds_floats(run_ptx: Run, ptx_kernel: Run) -> None:
    before = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    text = store_kernel(
        ptx_kernel,
        store((0, 0), "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {%COL, %ROW}], [%r1];"),
    )
    ran = run_ptx(text, {"tensor": before, "out": np.zeros(4, np.uint8)}, [made(of(before, (32, 32))), "out"])
    new = np.arange(7, 4103, 4, dtype=np.uint32).view(np.float32).reshape(32, 32)
    assert np.array_equal(ran.buffers["tensor"], before + new)
    assert ran.faults == ()


def test_a_reduction_that_the_isa_does_not_have_is_refused(run_ptx: Run, ptx_kernel: Run) -> None:
    before = np.zeros((32, 32), np.float32)
    copy = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.min.bulk_group [%rd1, {%COL, %ROW}], [%r1];"
    with pytest.raises(Unsupported, match="min on elements of f32"):
        run_ptx(
            store_kernel(ptx_kernel, store((0, 0), copy)),
            {"tensor": before, "out": np.zeros(4, np.uint8)},
            [made(of(before, (32, 32))), "out"],
        )


def test_two_reductions_of_one_box_do_not_race(run_ptx: Run, ptx_kernel: Run) -> None:
    before = drawn(32, 32, dtype=np.uint32)
    reduction = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    text = store_kernel(ptx_kernel, store((0, 0), STORE_2D.replace(STORE_2D.split()[0], reduction)))
    text = text.replace("setp.ne.u32 %p0, %r0, 0;", "and.b32 %r5, %r0, 31;\nsetp.ne.u32 %p0, %r5, 0;", 1)
    text = text.replace("@%p0 bra INITIALISED;", "setp.ne.u32 %p6, %r0, 0;\n@%p6 bra INITIALISED;")
    text = text.replace(FILL, FILL.replace("%r0, 2", "%r5, 2").replace("FILL:", "@%p6 bra FILLED;\nFILL:") + "FILLED:")
    text = text.replace("@%p6 bra FILLED;", "setp.ge.u32 %p7, %r0, 32;\n@%p7 bra FILLED;")
    buffers = {"tensor": before, "out": np.zeros(4, np.uint8)}
    ran = run_ptx(text, buffers, [made(of(before, (32, 32))), "out"], block=(64, 1, 1))
    assert ran.faults == ()
    assert np.array_equal(ran.buffers["tensor"], before + 2 * np.arange(7, 4103, 4, dtype=np.uint32).reshape(32, 32))


def test_waiting_for_the_reads_of_a_store_says_nothing_of_its_writes(run_ptx: Run, ptx_kernel: Run) -> None:
    before = np.zeros((32, 32), np.uint32)
    text = store_kernel(ptx_kernel, store((0, 0)))
    late = """cp.async.bulk.wait_group.read 0;
ld.param.u64 %rd2, [out];
ld.param.u64 %rd3, [again];
ld.global.u32 %r30, [%rd3];
st.global.u32 [%rd2], %r30;
st.shared.u32 [%r1], 1;"""
    text = text.replace("cp.async.bulk.wait_group 0;", late).replace(OUT, f"{OUT}, .param .u64 again")
    buffers = {"tensor": before, "out": np.zeros(4, np.uint8)}
    parameters = [made(of(before, (32, 32))), "out", "tensor"]
    seen = set()
    for seed in range(12):
        ran = run_ptx(text, buffers, parameters, seed=seed)
        assert ran.buffers["tensor"][0, 0] == 7
        value = int(ran.buffers["out"].view(np.uint32)[0])
        # The write of the tile never races; the read of the tensor does (found where it comes after the write).
        assert ran.kinds == ({"data race"} if value == 7 else set())
        seen.add(value)
    assert seen == {0, 7}


# ---- clusters ------------------------------------------------------------------------------------------------------

CLUSTER = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, tile;
mov.u32 %r2, full;
mov.u32 %r3, %cluster_ctarank;
mov.b64 %rd1, map;
cvta.param.u64 %rd1, %rd1;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALISED;
mbarrier.init.shared.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
INITIALISED:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@%p0 bra ISSUED;
{issue}
ISSUED:
{wait}
ld.param.u64 %rd5, [out];
mul.wide.u32 %rd6, %r3, 4096;
{dump}
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ret;"""
RANK_DUMP = DUMP.replace("BYTES", "4096").replace("ld.param.u64 %rd2, [out];", "add.u64 %rd2, %rd5, %rd6;")


def test_multicast_writes_each_cta_and_signals_its_barrier(run_ptx: Run, ptx_kernel: Run) -> None:
    tensor = drawn(64, 64)
    issue = """
mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 4096;
setp.ne.u32 %p4, %r3, 0;
mov.u16 %rs1, 3;
@!%p4 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster """
    issue += "[%r1], [%rd1, {0, 8}], [%r2], %rs1;"
    body = CLUSTER.format(issue=issue, wait=WAIT, dump=RANK_DUMP)
    text = ptx_kernel(body, f"{MAP}, {OUT}", variables=SHARED)
    for seed in range(3):
        ran = run_ptx(
            text,
            {"tensor": tensor, "out": np.zeros(8192, np.uint8)},
            [made(of(tensor, (64, 32), 3)), "out"],
            grid=(2, 1, 1),
            cluster=(2, 1, 1),
            seed=seed,
        )
        assert ran.faults == ()
        assert ran.buffers["out"].tobytes() == swizzled_128(tensor[8:40]) * 2


PAIR_ISSUE = """
setp.ne.u32 %p4, %r3, 0;
@!%p4 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 8192;
and.b32 %r30, %r2, 0xFEFFFFFF;
shl.b32 %r31, %r3, 3;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.cta_group::2 """
PAIR_ISSUE += "[%r1], [%rd1, {0, %r31}], [%r30];"
PAIR_WAIT = """
and.b32 %r32, %r2, 0xFEFFFFFF;
WAIT:
@!%p4 mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r32], 0;
@%p4 bra OVER;
@!%p1 bra WAIT;
OVER:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


def test_a_pair_signals_the_leaders_barrier(run_ptx: Run, ptx_kernel: Run) -> None:
    """Both CTAs load into their own memory and signal the even one's mbarrier."""
    tensor = drawn(64, 64)
    setup = "mov.u32 %r3, %cluster_ctarank;\nsetp.ne.u32 %p4, %r3, 0;"
    body = CLUSTER.format(issue=PAIR_ISSUE, wait=PAIR_WAIT, dump=RANK_DUMP).replace(
        "mov.u32 %r3, %cluster_ctarank;", setup
    )
    text = ptx_kernel(body, f"{MAP}, {OUT}", variables=SHARED)
    options = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
    buffers = {"tensor": tensor, "out": np.zeros(8192, np.uint8)}
    ran = run_ptx(text, buffers, [made(of(tensor, (64, 32), 3)), "out"], **options)
    assert ran.faults == ()
    assert ran.buffers["out"].tobytes() == swizzled_128(tensor[:32]) + swizzled_128(tensor[8:40])

    alone = text.replace(".cta_group::2", "")
    ran = run_ptx(alone, buffers, [made(of(tensor, (64, 32), 3)), "out"], **options)
    assert any("only .cta_group::2 allows that" in fault.message for fault in ran.faults)


def test_multicast_in_pairs_signals_the_barriers_of_one_parity(run_ptx: Run, ptx_kernel: Run) -> None:
    """CTA 0 sends to CTAs 0, 1, 2, 3; the even ones' mbarriers count the bytes of both CTAs of their pair."""
    tensor = drawn(64, 64)
    issue = """
setp.ne.u32 %p4, %r3, 0;
and.b32 %r30, %r3, 1;
setp.eq.u32 %p5, %r30, 0;
@%p5 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 8192;
mov.u16 %rs1, 15;
@!%p4 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"""
    issue += ".cta_group::2 [%r1], [%rd1, {0, 8}], [%r2], %rs1;"
    wait = """
and.b32 %r31, %r3, 1;
setp.eq.u32 %p6, %r31, 1;
WAIT:
@%p6 bra OVER;
mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
@!%p1 bra WAIT;
OVER:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
    text = ptx_kernel(CLUSTER.format(issue=issue, wait=wait, dump=RANK_DUMP), f"{MAP}, {OUT}", variables=SHARED)
    ran = run_ptx(
        text,
        {"tensor": tensor, "out": np.zeros(4 * 4096, np.uint8)},
        [made(of(tensor, (64, 32), 3)), "out"],
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
    )
    assert ran.faults == ()
    assert ran.buffers["out"].tobytes() == swizzled_128(tensor[8:40]) * 4


# ---- misuse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "copy", "kind", "says"),
    [
        ({"box": (60, 32), "swizzle": Swizzle.NONE}, None, "tensor map", "rows of 120 bytes are no multiple of 16"),
        ({"sizes": (64, 51)}, "0, 30", "out of bounds", "inside the tensor but outside every allocation"),
        ({}, "[%r1+64]", "misaligned address", "is not aligned to 128 bytes"),
        ({}, "[%r1+14336]", "out of bounds", "outside the"),
        ({"sizes": (64,), "strides": (), "box": (64,), "element_strides": (1,)}, None, "tensor map", "rank 1"),
    ],
    ids=["rule", "beyond the buffer", "misaligned", "beyond shared memory", "rank"],
)
def test_misuse_is_named(
    run_ptx: Run, ptx_kernel: Run, change: dict[str, Any], copy: str | None, kind: str, says: str
) -> None:
    tensor = drawn(50, 64)
    at = copy if copy and "%" not in copy else "0, 0"
    load = LOAD_2D.format(space="shared::cta", at=at)
    if copy and "%" in copy:
        load = load.replace("[%r1]", copy)
    text = load_kernel(ptx_kernel, 4096, load)
    parameters = [made(of(tensor, (64, 32), 3, **change) if "box" not in change else _with(tensor, change)), "out"]
    ran = run_ptx(text, {"tensor": tensor, "out": np.zeros(4096, np.uint8)}, parameters)
    assert any(fault.kind.value == kind and says in fault.message for fault in ran.faults), ran.faults


def _with(tensor: np.ndarray[Any, Any], change: dict[str, Any]) -> TensorMap:
    return dataclasses.replace(of(tensor, (64, 32), 3), **change)


def test_garbage_is_no_tensor_map(run_ptx: Run, ptx_kernel: Run) -> None:
    text = load_kernel(ptx_kernel, 4096, LOAD_2D.format(space="shared::cta", at="0, 0"))
    ran = run_ptx(text, {"out": np.zeros(4096, np.uint8)}, [b"\xa5" * 128, "out"])
    assert any(fault.kind.value == "tensor map" and "unknown bits" in fault.message for fault in ran.faults)


def test_where_a_tensor_map_may_lie(run_ptx: Run, ptx_kernel: Run) -> None:
    tensor = drawn(50, 64)
    copy = LOAD_2D.format(space="shared::cta", at="0, 0")
    buffers = {"tensor": tensor, "out": np.zeros(4096, np.uint8)}
    in_shared = load_kernel(ptx_kernel, 4096, copy, before="cvt.u64.u32 %rd9, %r1;\ncvta.shared.u64 %rd1, %rd9;")
    found = run_ptx(in_shared, buffers, [made(of(tensor, (64, 32), 3)), "out"]).faults
    assert any("must be in param, const or global space" in fault.message for fault in found)
    off = load_kernel(ptx_kernel, 4096, copy).replace(MAP, ".param .u64 first, .param .align 8 .b8 map[128]")
    found = run_ptx(off, buffers, [bytes(8), made(of(tensor, (64, 32), 3)), "out"]).faults
    assert any("is not aligned to 64 bytes" in fault.message for fault in found)


@pytest.mark.parametrize(
    ("at", "swizzle", "says"),
    [
        ((-4, 0), 3, "to the coordinate -4"),
        ((0, 0), 5, "with a flipping swizzle"),
        ((6, 0), 3, "first coordinate 6 times the 4 bytes of a u32 element is no multiple of 16 bytes"),
    ],
    ids=["negative", "flip", "off 16 bytes"],
)
def test_what_stores_may_not_do(run_ptx: Run, ptx_kernel: Run, at: tuple[int, int], swizzle: int, says: str) -> None:
    before = drawn(50, 40, dtype=np.uint32)
    text = store_kernel(ptx_kernel, store(at))
    ran = run_ptx(text, {"tensor": before, "out": np.zeros(4, np.uint8)}, [made(of(before, (32, 32), swizzle)), "out"])
    assert any(fault.kind.value == "tensor map" and says in fault.message for fault in ran.faults)


REDUCE_2D = STORE_2D.replace("cp.async", "cp.reduce.async").replace(".tile", ".add.tile")
GATHER4 = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
    "[%r1], [%rd1, {4, 0, 1, 2, 3}], [%r2];"
)


@pytest.mark.parametrize("copy", ["load", "outside", "reduction", "gather4"])
def test_a_row_that_starts_off_16_bytes_is_a_fault(run_ptx: Run, ptx_kernel: Run, copy: str) -> None:
    """Also where all of the box is outside the tensor. Such a copy does nothing."""
    tensor = drawn(50, 40, dtype=np.uint32 if copy == "reduction" else np.uint16)
    box = (32, 1) if copy == "gather4" else (32, 32)
    if copy == "reduction":
        text, first = store_kernel(ptx_kernel, store((9, 0), REDUCE_2D)), 9
    elif copy == "gather4":
        text, first = load_kernel(ptx_kernel, 256, GATHER4), 4
    else:
        first = 12 if copy == "load" else 44
        text = load_kernel(ptx_kernel, 2048, LOAD_2D.format(space="shared::cta", at=f"{first}, 0"))
    ran = run_ptx(text, {"tensor": tensor, "out": np.zeros(2048, np.uint8)}, [made(of(tensor, box)), "out"])
    (fault,) = ran.faults
    assert fault.kind.value == "tensor map"
    assert f"the first coordinate {first} times the {tensor.itemsize} bytes" in fault.message
    assert np.array_equal(ran.buffers["tensor"], tensor)


def test_rows_shorter_than_the_swizzles_span_leave_gaps(run_ptx: Run, ptx_kernel: Run) -> None:
    """Rows of 64 bytes lie 128 apart with a swizzle of 128, and the copy counts the bytes without the gaps."""
    tensor = drawn(50, 64)
    body = load_kernel(ptx_kernel, 4096, LOAD_2D.format(space="shared::cta", at="32, 3"), before=FILL, expect=2048)
    text = body.replace("@%p0 bra ISSUED;", f"{FENCE}bar.sync 0;\n@%p0 bra ISSUED;", 1)
    ran = run_ptx(text, {"tensor": tensor, "out": np.zeros(4096, np.uint8)}, [made(of(tensor, (32, 32), 3)), "out"])
    assert ran.faults == ()
    unswizzled = np.frombuffer(swizzled_128(ran.buffers["out"].reshape(32, 128)), np.uint16).reshape(32, 64)
    assert np.array_equal(unswizzled[:, :32], tensor[3:35, 32:])
    filled = np.frombuffer(swizzled_128(np.arange(7, 4103, 4, dtype=np.uint32).reshape(32, 32)), np.uint16)
    assert np.array_equal(unswizzled[:, 32:], filled.reshape(32, 64)[:, 32:])


def test_im2col_is_refused(run_ptx: Run, ptx_kernel: Run) -> None:
    copy = (
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {0, 0, 0}], [%r2], {%rs1};"
    )
    text = load_kernel(ptx_kernel, 4096, copy)
    with pytest.raises(Unsupported, match="im2col"):
        run_ptx(text, {"out": np.zeros(4096, np.uint8)}, [b"\xa5" * 128, "out"])


def test_an_interleaved_map_is_refused_and_is_no_fault(run_ptx: Run, ptx_kernel: Run) -> None:
    """The hardware takes it, so nothing is said about the kernel."""
    tensor = np.zeros((4, 8, 8), np.uint16)
    interleaved = of(tensor, (1, 8, 8), interleave_bytes=16)
    copy = (
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0, 0}], [%r2];"
    )
    text = load_kernel(ptx_kernel, 4096, copy)
    with pytest.raises(Unsupported, match="an interleaved layout"):
        run_ptx(text, {"tensor": tensor, "out": np.zeros(4096, np.uint8)}, [made(interleaved), "out"])


# ---- tensor maps made on the device --------------------------------------------------------------------------------

REPLACE = """
@%p0 bra REPLACED;
ld.param.u64 %rd10, [work];
ld.param.u64 %rd11, [other];
mov.u64 %rd12, 0;
COPY:
add.u64 %rd13, %rd1, %rd12;
ld.b64 %rd14, [%rd13];
add.u64 %rd15, %rd10, %rd12;
st.global.b64 [%rd15], %rd14;
add.u64 %rd12, %rd12, 8;
setp.lt.u64 %p5, %rd12, 128;
@%p5 bra COPY;
tensormap.replace.tile.global_address.global.b1024.b64 [%rd10], %rd11;
tensormap.replace.tile.global_dim.global.b1024.b32 [%rd10], 1, 20;
tensormap.replace.tile.global_stride.global.b1024.b64 [%rd10], 0, 256;
{fence}
mov.u64 %rd1, %rd10;
REPLACED:
"""
TENSORMAP_FENCE = """fence.proxy.tensormap::generic.release.gpu;
fence.proxy.tensormap::generic.acquire.gpu [%rd10], 128;"""


@pytest.mark.parametrize("fence", [TENSORMAP_FENCE, ""], ids=["fenced", "no fence"])
def test_a_map_changed_on_the_device(run_ptx: Run, ptx_kernel: Run, fence: str) -> None:
    tensor, other = drawn(50, 64), drawn(25, 128)
    load = LOAD_2D.format(space="shared::cta", at="0, 0")
    text = load_kernel(ptx_kernel, 4096, load, before=REPLACE.format(fence=fence))
    text = text.replace(OUT, f"{OUT}, .param .u64 work, .param .u64 other")
    ran = run_ptx(
        text,
        {"tensor": tensor, "other": other, "out": np.zeros(4096, np.uint8), "work": np.zeros(128, np.uint8)},
        [made(of(tensor, (64, 32), 3)), "out", "work", "other"],
    )
    if not fence:
        assert "missing proxy fence" in ran.kinds
        return
    assert ran.faults == ()
    rows = np.zeros((32, 64), np.uint16)
    rows[:20] = other[:20, :64]
    assert ran.buffers["out"].tobytes() == swizzled_128(rows)


IN_SHARED = """
ld.param.u64 %rd10, [work];
ld.param.u64 %rd11, [other];
add.u32 %r40, %r1, 8192;
shl.b32 %r41, %r0, 2;
cvt.u64.u32 %rd12, %r41;
add.u64 %rd13, %rd1, %rd12;
ld.b32 %r42, [%rd13];
add.u32 %r43, %r40, %r41;
st.shared.b32 [%r43], %r42;
bar.sync 0;
@!%p0 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r40], %rd11;
@!%p0 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r40], 1, 20;
@!%p0 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r40], 0, 256;
bar.sync 0;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd10], [%r40], 128;
fence.proxy.tensormap::generic.acquire.gpu [%rd10], 128;
mov.u64 %rd1, %rd10;
"""


def test_a_map_changed_in_shared_memory_and_copied_out(run_ptx: Run, ptx_kernel: Run) -> None:
    tensor, other = drawn(50, 64), drawn(25, 128)
    text = load_kernel(ptx_kernel, 4096, LOAD_2D.format(space="shared::cta", at="0, 0"), before=IN_SHARED)
    text = text.replace(OUT, f"{OUT}, .param .u64 work, .param .u64 other")
    ran = run_ptx(
        text,
        {"tensor": tensor, "other": other, "out": np.zeros(4096, np.uint8), "work": np.zeros(128, np.uint8)},
        [made(of(tensor, (64, 32), 3)), "out", "work", "other"],
    )
    assert ran.faults == ()
    rows = np.zeros((32, 64), np.uint16)
    rows[:20] = other[:20, :64]
    assert ran.buffers["out"].tobytes() == swizzled_128(rows)
