"""wgmma: every type, major and swizzle on random data against NumPy, and what its rules forbid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tunekit.simulate.matrix import descriptor_sm90, layout
from tunekit.simulate.matrix.layout import NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, Place
from tunekit.simulate.numbers import formats

IMAGE = 65536
ELEMENT = {"bf16": np.uint16, "f16": np.uint16, "tf32": np.uint32, "e4m3": np.uint8, "e5m2": np.uint8}
ELEMENT |= {"s8": np.uint8, "u8": np.uint8}
RESULT = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
LANES = np.arange(32)
GROUP, THREAD = LANES >> 2, LANES % 4


def random_bits(draw, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind in ("s8", "u8"):
        return draw.integers(0, 256, shape, dtype=np.uint8)
    return formats.encode(draw.standard_normal(shape).astype(np.float32), kind)


def random_accumulators(draw, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return (draw.standard_normal(shape) * 4).astype(RESULT[kind])


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind in ("s8", "u8"):
        return bits.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    return formats.decode(bits, kind).astype(np.float64)


def place(swizzle: layout.Swizzle, major: str, rows: int, start: int) -> Place:
    """A tile of `rows` and one atom of K, atoms of 8 rows (or of one chunk width) one after the other."""
    atom = 8 * 16 * swizzle.chunks
    if major == "k":
        return Place(start, 16 * rows, 128, NONE) if not swizzle.bits else Place(start, 0, atom, swizzle)
    if not swizzle.bits:
        return Place(start, 16 * rows, 128, NONE)
    return Place(start, 2 * atom, atom, swizzle)


def put(image: np.ndarray, where: Place, matrix: np.ndarray, major: str) -> None:
    bits = 8 * matrix.dtype.itemsize
    at = layout.addresses(where, matrix.shape[0], matrix.shape[1], bits, major)
    assert np.unique(at).size == at.size
    image.view(matrix.dtype)[at // matrix.dtype.itemsize] = matrix


def accumulator_words(d: np.ndarray) -> np.ndarray:
    """[64, n] to words [registers, 128 threads] by the formulas of 9.7.15.5.1.1."""
    n = d.shape[1]
    thread = np.arange(128)
    row0 = 16 * (thread // 32) + thread % 32 // 4
    out = [d[row0 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (thread % 4) + i % 2] for i in range(n // 2)]
    if d.dtype == np.float16:
        halves = np.stack(out).view(np.uint16).astype(np.uint32)
        return halves[0::2] | halves[1::2] << np.uint32(16)
    return np.stack(out).view(np.uint32)


def a_words(a: np.ndarray) -> np.ndarray:
    """[64, k] to words [4, 128 threads]: A in registers."""
    each = 4 // a.dtype.itemsize
    thread = np.arange(128)
    row0 = 16 * (thread // 32) + thread % 32 // 4
    words = np.zeros((4, 128), dtype=np.uint32)
    for r in range(4):
        for j in range(each):
            column = (thread % 4) * each + j + 4 * each * (r // 2)
            words[r] |= a[row0 + 8 * (r % 2), column].astype(np.uint32) << np.uint32(8 * a.dtype.itemsize * j)
    return words


@dataclass
class Parts:
    """The pieces of the kernel that tests replace."""

    proxy_fence: str = "fence.proxy.async.shared::cta;"
    barrier: str = "bar.sync 0;"
    fence: str = "wgmma.fence.sync.aligned;"
    before: str = ""
    after: str = ""
    commit: str = "wgmma.commit_group.sync.aligned;"
    wait: str = "wgmma.wait_group.sync.aligned 0;"
    times: int = 1


@pytest.fixture
def wgmma(run_ptx, ptx_kernel):
    def go(
        dotted: str, immediates: str, image: np.ndarray, a: Place | np.ndarray, b: Place, c: np.ndarray,
        *, scale_d: int = 1, parts: Parts | None = None, seed: int = 0, threads: int = 128,
    ):  # fmt: skip
        """Runs one wgmma on the shared memory `image`; c: words [registers, 128]. Returns (ran, D's words)."""
        parts = parts or Parts()
        count = len(c)
        acc = "{" + ", ".join(f"%d{n}" for n in range(count)) + "}"
        first = "{%a0, %a1, %a2, %a3}" if isinstance(a, np.ndarray) else "%rd20"
        issue = f"{dotted} {acc}, {first}, %rd21, %p2, {immediates};".replace(", ;", ";")
        body = f"""
        .reg .b32 %d<128>; .reg .b32 %a<4>; .reg .b32 %x<8>;
        mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shl.b32 %r3, %r1, 4; mul.wide.u32 %rd4, %r1, 4;
        ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];
        ld.param.u64 %rd20, [p3]; ld.param.u64 %rd21, [p4];
        shr.u32 %r12, %r2, 4; cvt.u64.u32 %rd22, %r12; add.s64 %rd20, %rd20, %rd22; add.s64 %rd21, %rd21, %rd22;
        COPY: cvt.u64.u32 %rd5, %r3; add.s64 %rd6, %rd1, %rd5; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd6];
        add.s32 %r8, %r2, %r3; st.shared.v4.b32 [%r8], {{%r4, %r5, %r6, %r7}};
        add.s32 %r3, %r3, {16 * threads}; setp.lt.u32 %p1, %r3, {IMAGE}; @%p1 bra COPY;
        {parts.proxy_fence}
        {parts.barrier}
        add.s64 %rd7, %rd2, %rd4; add.s64 %rd8, %rd3, %rd4;
        """
        body += "".join(f"ld.global.b32 %a{n}, [%rd8+{512 * n}];\n" for n in range(4))
        body += "".join(f"ld.global.b32 %d{n}, [%rd7+{512 * n}];\n" for n in range(count))
        body += f"setp.ne.b32 %p2, {scale_d}, 0;\n{parts.before}\n{parts.fence}\n" + issue * parts.times
        body += f"\n{parts.commit}\n{parts.after}\n{parts.wait}\n"
        body += "".join(f"st.global.b32 [%rd7+{512 * n}], %d{n};\n" for n in range(count)) + "ret;"
        ran = run_ptx(
            ptx_kernel(
                body,
                ", ".join(f".param .u64 p{n}" for n in range(5)),
                target="sm_90a",
                variables=".extern .shared .align 1024 .b8 smem[];",
            ),
            {"image": image, "d": c, "a": a_words(a) if isinstance(a, np.ndarray) else np.zeros((4, 128), np.uint32)},
            [
                "image", "d", "a",
                descriptor_sm90.encode(a if isinstance(a, Place) else Place(0, 0, 0, NONE)).to_bytes(8, "little"),
                descriptor_sm90.encode(b).to_bytes(8, "little"),
            ],
            block=(threads, 1, 1), shared=IMAGE, seed=seed,
        )  # fmt: skip
        return ran, ran.buffers["d"]

    return go


SWIZZLES = [NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B]
B_START = 32768


def case(kind: str, n: int, major_a: str, major_b: str, swizzle_a, swizzle_b, btype: str | None = None):
    """(image, place of A, place of B, A, B) with random A [64, k] and B [n, k]."""
    draw = np.random.default_rng(n)
    k = 32 // np.dtype(ELEMENT[kind]).itemsize
    a, b = random_bits(draw, kind, (64, k)), random_bits(draw, btype or kind, (n, k))
    image = draw.integers(0, 256, IMAGE, dtype=np.uint8)
    place_a, place_b = place(swizzle_a, major_a, 64, 0), place(swizzle_b, major_b, n, B_START)
    put(image, place_a, a, major_a)
    put(image, place_b, b, major_b)
    return image, place_a, place_b, a, b


@pytest.mark.parametrize("swizzle", SWIZZLES, ids=lambda s: s.name)
@pytest.mark.parametrize("majors", [("k", "k"), ("mn", "k"), ("k", "mn"), ("mn", "mn")], ids="".join)
def test_majors_and_swizzles(wgmma, swizzle, majors):
    image, place_a, place_b, a, b = case("bf16", 64, *majors, swizzle, swizzle)
    c = random_accumulators(np.random.default_rng(1), "f32", (64, 64))
    flags = ", ".join("1" if major == "mn" else "0" for major in majors)
    ran, words = wgmma(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", f"1, 1, {flags}", image, place_a, place_b,
        accumulator_words(c),
    )  # fmt: skip
    assert not ran.faults
    expected = numbers(a, "bf16") @ numbers(b, "bf16").T + c
    assert np.array_equal(words, accumulator_words(expected.astype(np.float32)))


FORMS = [
    ("m64n8k16", "f32", "f16", "f16"),
    ("m64n256k16", "f32", "f16", "f16"),
    ("m64n24k16", "f16", "f16", "f16"),
    ("m64n128k16", "f16", "f16", "f16"),
    ("m64n256k16", "f32", "bf16", "bf16"),
    ("m64n40k8", "f32", "tf32", "tf32"),
    ("m64n128k8", "f32", "tf32", "tf32"),
    ("m64n64k32", "f32", "e4m3", "e5m2"),
    ("m64n64k32", "f32", "e5m2", "e4m3"),
    ("m64n96k32", "f16", "e4m3", "e4m3"),
    ("m64n48k32", "s32", "s8", "s8"),
    ("m64n64k32", "s32", "u8", "s8"),
    ("m64n32k32", "s32", "s8", "u8"),
]


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("source", ["shared", "registers"])
def test_shapes_and_types(wgmma, form, source):
    shape, dtype, atype, btype = form
    n = int(shape[4:].split("k")[0])
    image, place_a, place_b, a, b = case(atype, n, "k", "k", SWIZZLE_128B, SWIZZLE_64B, btype)
    c = random_accumulators(np.random.default_rng(2), dtype, (64, n))
    immediates = "" if dtype == "s32" else "1, -1"
    if atype in ("f16", "bf16"):
        immediates += ", 0, 0" if source == "shared" else ", 0"
    ran, words = wgmma(
        f"wgmma.mma_async.sync.aligned.{shape}.{dtype}.{atype}.{btype}", immediates, image,
        place_a if source == "shared" else a, place_b, accumulator_words(c),
    )  # fmt: skip
    assert not ran.faults
    sign = 1 if dtype == "s32" else -1
    expected = sign * (numbers(a, atype) @ numbers(b, btype).T) + c
    assert np.array_equal(words, accumulator_words(expected.astype(RESULT[dtype])))


def simple(n: int = 32):
    image, place_a, place_b, a, b = case("bf16", n, "k", "k", SWIZZLE_128B, SWIZZLE_128B)
    product = numbers(a, "bf16") @ numbers(b, "bf16").T
    return image, place_a, place_b, product


BF16 = "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16"
IMMEDIATES = "1, 1, 0, 0"


def test_scale_d_zero_ignores_the_accumulators(wgmma):
    """They may even be undefined: here they hold NaN."""
    image, place_a, place_b, product = simple()
    c = np.full((16, 128), 0x7FFFFFFF, dtype=np.uint32)
    ran, words = wgmma(BF16, IMMEDIATES, image, place_a, place_b, c, scale_d=0)
    assert not ran.faults
    assert np.array_equal(words, accumulator_words(product.astype(np.float32)))


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_accumulates_in_order(wgmma, seed):
    image, place_a, place_b, product = simple()
    ran, words = wgmma(
        BF16, IMMEDIATES, image, place_a, place_b, np.zeros((16, 128), np.uint32), parts=Parts(times=3), seed=seed
    )
    assert not ran.faults
    expected = np.zeros((64, 32), dtype=np.float32)
    for _ in range(3):
        expected = (expected + product).astype(np.float32)
    assert np.array_equal(words, accumulator_words(expected))


def faults_of(wgmma, seeds: int = 1, **replaced):
    image, place_a, place_b, product = simple()
    found = []
    for seed in range(seeds):
        ran, words = wgmma(
            BF16,
            IMMEDIATES,
            image,
            place_a,
            place_b,
            np.zeros((16, 128), np.uint32),
            parts=Parts(**replaced),
            seed=seed,
        )
        found.append((ran, words))
    return found, accumulator_words(product.astype(np.float32))


def test_a_missing_proxy_fence(wgmma):
    (found, *_), _ = faults_of(wgmma, proxy_fence="")
    assert found[0].kinds == {"missing proxy fence"}


def test_a_missing_barrier_is_a_race(wgmma):
    """Other warps' stores are not ordered before the reads; fence or not."""
    (found, *_), _ = faults_of(wgmma, barrier="")
    assert "data race" in found[0].kinds


def test_a_missing_wgmma_fence(wgmma):
    (found, *_), _ = faults_of(wgmma, fence="")
    assert found[0].kinds == {"missing wgmma fence"}
    assert "without a wgmma.fence" in found[0].faults[0].message


def test_a_register_written_after_the_fence(wgmma):
    (found, *_), _ = faults_of(wgmma, fence="wgmma.fence.sync.aligned; add.s32 %d3, %d3, 0;")
    assert found[0].kinds == {"missing wgmma fence"}
    assert "%d3" in found[0].faults[0].message


def test_accumulators_of_another_shape_need_a_fence(wgmma):
    """The first 16 accumulators of an m64n64k16 in flight, as those of an m64n32k16."""
    wide = "{" + ", ".join(f"%d{n}" for n in range(32)) + "}"
    first = f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {wide}, %rd20, %rd20, %p7, {IMMEDIATES};"
    fence = "wgmma.fence.sync.aligned;"
    (found, *_), _ = faults_of(wgmma, before="setp.ne.u32 %p7, %r1, %r1;", fence=f"{fence} {first}")
    assert found[0].kinds == {"missing wgmma fence"}
    (found, *_), _ = faults_of(wgmma, before="setp.ne.u32 %p7, %r1, %r1;", fence=f"{fence} {first} {fence}")
    assert not found[0].faults


def test_a_multiplicand_in_flight(wgmma):
    """An accumulator as part of A before its wait: it has no value yet."""
    chained = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d16, %d17, %d18, %d19}, {%d0, %d1, %d2, %d3}"
    (found, *_), _ = faults_of(
        wgmma,
        before="".join(f"mov.b32 %d{n}, 0;" for n in range(16, 20)),
        after=f"{chained}, %rd21, %p2, 1, 1, 0; wgmma.commit_group.sync.aligned;",
    )
    assert found[0].kinds == {"register used before its operation is complete"}
    assert "%d0" in found[0].faults[0].message


def test_a_copy_after_the_fence_is_let_through(wgmma):
    (found, *_), expected = faults_of(wgmma, fence="wgmma.fence.sync.aligned; mov.b32 %d3, 0;")
    assert not found[0].faults
    assert np.array_equal(found[1], expected)


def test_an_accumulator_read_before_its_wait(wgmma):
    (found, *_), _ = faults_of(wgmma, after="add.f32 %x1, %d5, %d5;")
    assert found[0].kinds == {"register used before its operation is complete"}
    assert "%d5" in found[0].faults[0].message


def test_no_wait_at_all(wgmma):
    found, expected = faults_of(wgmma, seeds=6, wait="")
    assert all("register used before its operation is complete" in ran.kinds for ran, _ in found)
    assert any(not np.array_equal(words, expected) for _, words in found), "some schedule shows the old values"


def test_no_commit_leaves_the_wait_empty(wgmma):
    (found, *_), _ = faults_of(wgmma, commit="")
    assert "register used before its operation is complete" in found[0].kinds


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_of_a_pending_accumulator_gets_the_result(wgmma, seed):
    """A mov that the compiler placed before the wait; its copy is used after it."""
    image, place_a, place_b, product = simple()
    parts = Parts(
        after="mov.b32 %x1, %d5;", wait="wgmma.wait_group.sync.aligned 0; mov.b32 %d5, 0; xor.b32 %d5, %x1, 0;"
    )
    ran, words = wgmma(
        BF16, IMMEDIATES, image, place_a, place_b, np.zeros((16, 128), np.uint32), parts=parts, seed=seed
    )
    assert not ran.faults
    assert np.array_equal(words, accumulator_words(product.astype(np.float32)))


def test_an_accumulator_taken_apart_before_its_wait(wgmma):
    """Its halves have no way to get the result. It ended the simulator with an error of its own."""
    (found, *_), _ = faults_of(wgmma, before=".reg .b16 %half<2>;", after="mov.b32 {%half0, %half1}, %d5;")
    assert found[0].kinds == {"register used before its operation is complete"}
    assert "%half" in found[0].faults[0].message


def test_wait_group_one_leaves_the_last_in_flight(wgmma):
    """Two groups; the first's registers may be read after wait_group 1, the second's not."""
    acc = "{" + ", ".join(f"%d{n}" for n in range(16, 32)) + "}"
    second = f"{BF16} {acc}, %rd20, %rd21, %p2, {IMMEDIATES}; wgmma.commit_group.sync.aligned;"
    zero = "".join(f"mov.b32 %d{n}, 0;" for n in range(16, 32))
    for read, clean in (("%d3", True), ("%d19", False)):
        after = f"{second} wgmma.wait_group.sync.aligned 1; add.f32 %x1, {read}, {read};"
        (found, *_), expected = faults_of(wgmma, before=zero, after=after)
        assert found[0].kinds == (set() if clean else {"register used before its operation is complete"})
        assert np.array_equal(found[1], expected)


def test_a_warp_that_never_issues(wgmma):
    (found, *_), _ = faults_of(
        wgmma, fence="wgmma.fence.sync.aligned; setp.ge.u32 %p5, %r1, 96; @%p5 bra SKIP;",
        wait="wgmma.wait_group.sync.aligned 0; SKIP:",
    )  # fmt: skip
    assert "deadlock" in found[0].kinds
    text = next(fault.message for fault in found[0].faults if fault.kind.value == "deadlock")
    assert "which warp 3 of its warpgroup did not issue" in text


def test_a_warpgroup_that_is_not_whole(wgmma):
    image, place_a, place_b, _ = simple()
    ran, _ = wgmma(BF16, IMMEDIATES, image, place_a, place_b, np.zeros((16, 128), np.uint32), threads=64)
    assert "divergence" in ran.kinds
    assert any("four warps" in fault.message for fault in ran.faults)


def test_warps_that_disagree(wgmma):
    (found, *_), _ = faults_of(wgmma, before="setp.ge.u32 %p5, %r1, 64; @%p5 add.s64 %rd21, %rd21, 2;")
    assert found[0].kinds == {"descriptor"}
    assert "warps 0 and 2" in found[0].faults[0].message


def test_a_descriptor_that_leads_outside(wgmma):
    image, place_a, _, _ = simple()
    outside = Place(B_START, 0, 0x3FF0, SWIZZLE_128B)
    ran, _ = wgmma(BF16, IMMEDIATES, image, place_a, outside, np.zeros((16, 128), np.uint32))
    assert ran.kinds == {"out of bounds"}
    assert "stride 16368 B" in ran.faults[0].message


def test_shared_memory_written_too_early(wgmma):
    """A stage overwritten while a wgmma may still read it: a race, whatever the schedule did."""
    found, _ = faults_of(wgmma, seeds=4, after=f"st.shared.b32 [%r2+{B_START}], %r1;")
    assert all("data race" in ran.kinds for ran, _ in found)
    found, _ = faults_of(
        wgmma,
        wait=f"wgmma.wait_group.sync.aligned 0; setp.eq.u32 %p6, %r1, 0; @%p6 st.shared.b32 [%r2+{B_START}], %r1;",
    )
    assert not found[0][0].faults


def test_each_warp_answers_for_its_own_rows_of_a(wgmma):
    """A's rows of a warp need an order with that warp only: here every warp rewrites its own 16 rows, no barrier."""
    image, place_a, place_b, product = simple()
    own = layout.chunk_addresses(place_a, 64, 16, 16, "k")
    assert own[0:16].max() < own[16:32].min(), "the rows of a warp lie together"
    rewrite = """and.b32 %r20, %r1, 31; shr.u32 %r21, %r1, 5; shl.b32 %r22, %r21, 11; shl.b32 %r23, %r20, 4;
        add.s32 %r24, %r22, %r23; add.s32 %r24, %r24, %r2;
        ld.shared.v4.b32 {%r25, %r26, %r27, %r28}, [%r24]; st.shared.v4.b32 [%r24], {%r25, %r26, %r27, %r28};
        ld.shared.v4.b32 {%r25, %r26, %r27, %r28}, [%r24+512]; st.shared.v4.b32 [%r24+512], {%r25, %r26, %r27, %r28};
        ld.shared.v4.b32 {%r25, %r26, %r27, %r28}, [%r24+1024]; st.shared.v4.b32 [%r24+1024], {%r25, %r26, %r27, %r28};
        ld.shared.v4.b32 {%r25, %r26, %r27, %r28}, [%r24+1536]; st.shared.v4.b32 [%r24+1536], {%r25, %r26, %r27, %r28};
        fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;"""
    ran, words = wgmma(
        BF16, IMMEDIATES, image, place_a, place_b, np.zeros((16, 128), np.uint32), parts=Parts(before=rewrite)
    )
    assert not ran.faults
    assert np.array_equal(words, accumulator_words(product.astype(np.float32)))
