"""mma.sync: every shape and type on random data against NumPy, with fragments laid out by the ISA's formulas."""

from __future__ import annotations

import numpy as np
import pytest

from tunekit.simulate.faults import Unsupported
from tunekit.simulate.numbers import formats

LANES = np.arange(32)
GROUP, THREAD = LANES >> 2, LANES % 4
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "e3m2": 8, "e2m3": 8, "e2m1": 8}
BITS |= {"s8": 8, "u8": 8, "s4": 4, "u4": 4}

CASES = [
    # shape, D, A, B, C, further modifiers
    ("m16n8k16", "f32", "f16", "f16", "f32", ""),
    ("m16n8k16", "f16", "f16", "f16", "f16", ""),
    ("m16n8k8", "f32", "f16", "f16", "f32", ""),
    ("m16n8k8", "f16", "f16", "f16", "f16", ""),
    ("m16n8k16", "f32", "bf16", "bf16", "f32", ""),
    ("m16n8k8", "f32", "bf16", "bf16", "f32", ""),
    ("m16n8k4", "f32", "tf32", "tf32", "f32", ""),
    ("m16n8k8", "f32", "tf32", "tf32", "f32", ""),
    *[("m16n8k32", "f32", a, b, "f32", "") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")],
    ("m16n8k16", "f32", "e4m3", "e5m2", "f32", ""),
    ("m16n8k32", "f16", "e4m3", "e4m3", "f16", ""),
    ("m16n8k32", "f32", "e2m1", "e3m2", "f32", ".kind::f8f6f4"),
    ("m16n8k32", "f32", "e2m3", "e4m3", "f32", ".kind::f8f6f4"),
    ("m16n8k32", "f32", "e5m2", "e2m1", "f32", ".kind::f8f6f4"),
    ("m8n8k4", "f64", "f64", "f64", "f64", ""),
    ("m16n8k4", "f64", "f64", "f64", "f64", ""),
    ("m16n8k8", "f64", "f64", "f64", "f64", ""),
    ("m16n8k16", "f64", "f64", "f64", "f64", ""),
    *[("m16n8k32", "s32", a, b, "s32", "") for a in ("s8", "u8") for b in ("s8", "u8")],
    ("m16n8k16", "s32", "s8", "u8", "s32", ""),
    ("m8n8k16", "s32", "u8", "s8", "s32", ""),
    ("m16n8k64", "s32", "s4", "u4", "s32", ""),
    ("m16n8k32", "s32", "u4", "s4", "s32", ""),
    ("m8n8k32", "s32", "s4", "s4", "s32", ""),
]  # fmt: skip


def random_bits(draw, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Patterns of finite numbers of moderate size."""
    if kind == "f64":
        return draw.standard_normal(shape).view(np.uint64)
    if kind in ("f16", "bf16", "tf32", "e4m3", "e5m2"):
        bits = formats.encode(draw.standard_normal(shape).astype(np.float32), kind)
        if kind == "tf32":
            bits = bits | draw.integers(0, 1 << 13, shape, dtype=np.uint32)  # low bits that must not count
        return bits
    if kind == "e2m1":
        return (draw.integers(0, 16, shape) << 2).astype(np.uint8)
    return draw.integers(0, 1 << (6 if kind in ("e3m2", "e2m3") else BITS[kind]), shape).astype(np.uint8)


def random_accumulators(draw, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    return (draw.standard_normal(shape) * 100).astype(TYPES[kind])


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f64":
        return bits.view(np.float64)
    if kind in ("s8", "u8", "u4"):
        return bits.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    if kind == "s4":
        return np.where(bits > 7, bits.astype(np.int64) - 16, bits).astype(np.float64)
    return formats.decode(bits >> 2 if kind == "e2m1" else bits, kind).astype(np.float64)


def words_of(elements: np.ndarray, bits: int) -> np.ndarray:
    """[registers, 32, each] patterns to uint32 words [., 32] (two a register for 64 bits)."""
    if bits == 64:
        return (
            np.ascontiguousarray(elements[..., 0]).view(np.uint32).reshape(-1, 32, 2).transpose(0, 2, 1).reshape(-1, 32)
        )
    words = np.zeros(elements.shape[:2], dtype=np.uint32)
    for n in range(elements.shape[2]):
        words |= elements[:, :, n].astype(np.uint32) << np.uint32(bits * n)
    return words


def a_fragment(a: np.ndarray, bits: int) -> np.ndarray:
    m, k = a.shape
    each = max(1, 32 // bits)
    blocks = m // 8
    out = np.zeros((m * k // 32 // each, 32, each), dtype=a.dtype)
    for r in range(out.shape[0]):
        for j in range(each):
            out[r, :, j] = a[GROUP + 8 * (r % blocks), THREAD * each + j + 4 * each * (r // blocks)]
    return words_of(out, bits)


def b_fragment(b: np.ndarray, bits: int) -> np.ndarray:
    each = max(1, 32 // bits)
    out = np.zeros((b.shape[0] // 4 // each, 32, each), dtype=b.dtype)
    for r in range(out.shape[0]):
        for j in range(each):
            out[r, :, j] = b[THREAD * each + j + 4 * each * r, GROUP]
    return words_of(out, bits)


def c_fragment(c: np.ndarray) -> np.ndarray:
    """Words of a float16, float32, int32 or float64 accumulator."""
    blocks = c.shape[0] // 8
    values = np.stack([c[GROUP + 8 * (r // 2), 2 * THREAD + r % 2] for r in range(2 * blocks)])
    if c.dtype == np.float16:
        halves = values.view(np.uint16).astype(np.uint32)
        return halves[0::2] | halves[1::2] << np.uint32(16)
    return words_of(values.view(np.uint64 if c.dtype == np.float64 else np.uint32)[..., None], 8 * c.dtype.itemsize)


TYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "s32": np.int32}


@pytest.fixture
def multiply(run_ptx, ptx_kernel):
    def go(dotted: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, wide: bool, results: int):
        """Registers of A, B and C as uint32 words [., 32]; returns D's words."""
        width = "b64" if wide else "b32"
        step = 2 if wide else 1
        sizes = [len(x) // step for x in (a, b, c)]
        body = f".reg .{width} %v<64>;\nmov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4;\n"
        body += (
            "ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;\n"
        )
        for n in range(sum(sizes)):
            if wide:
                body += f"ld.global.b32 %r2, [%rd1+{256 * n}]; ld.global.b32 %r3, [%rd1+{256 * n + 128}];\n"
                body += f"mov.b64 %v{n}, {{%r2, %r3}};\n"
            else:
                body += f"ld.global.b32 %v{n}, [%rd1+{128 * n}];\n"
        ends = np.cumsum([0, *sizes, results])
        groups = ["{" + ", ".join(f"%v{n}" for n in range(ends[g], ends[g + 1])) + "}" for g in range(4)]
        body += f"{dotted} {groups[3]}, {groups[0]}, {groups[1]}, {groups[2]};\n"
        for n in range(results):
            if wide:
                body += f"mov.b64 {{%r2, %r3}}, %v{ends[3] + n};\n"
                body += f"st.global.b32 [%rd2+{256 * n}], %r2; st.global.b32 [%rd2+{256 * n + 128}], %r3;\n"
            else:
                body += f"st.global.b32 [%rd2+{128 * n}], %v{ends[3] + n};\n"
        ran = run_ptx(
            ptx_kernel(
                body + "ret;",
                ".param .u64 p0, .param .u64 p1",
                target="sm_120a" if "f8f6f4" in dotted else "sm_90a",
            ),
            {"in": np.concatenate([a, b, c]), "out": np.zeros((results * step, 32), dtype=np.uint32)},
            ["in", "out"],
        )
        assert not ran.faults
        return ran.buffers["out"]

    return go


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(x for x in c if x))
def test_every_shape_and_type(multiply, case):
    shape, dtype, atype, btype, ctype, more = case
    m, rest = shape[1:].split("n")
    m, k = int(m), int(rest.split("k")[1])
    draw = np.random.default_rng(k)
    a, b = random_bits(draw, atype, (m, k)), random_bits(draw, btype, (k, 8))
    c = random_accumulators(draw, ctype, (m, 8))
    wide = dtype == "f64"
    results = m * 8 // 32 // (2 if dtype == "f16" else 1)
    words = multiply(
        f"mma.sync.aligned.{shape}.row.col{more}.{dtype}.{atype}.{btype}.{ctype}",
        a_fragment(a, BITS[atype]), b_fragment(b, BITS[btype]), c_fragment(c), wide, results,
    )  # fmt: skip
    expected = numbers(a, atype) @ numbers(b, btype) + c
    assert np.array_equal(words, c_fragment(expected.astype(TYPES[dtype])))


@pytest.mark.parametrize(("modifier", "expected"), [("", -(2**31) + 126), (".satfinite", 2**31 - 1)])
def test_integers_wrap_or_saturate(multiply, modifier, expected):
    a, b = np.zeros((16, 32), dtype=np.uint8), np.zeros((32, 8), dtype=np.uint8)
    a[:, 0], b[0] = 127, 1
    c = np.full((16, 8), 2**31 - 1, dtype=np.int32)
    words = multiply(
        f"mma.sync.aligned.m16n8k32.row.col{modifier}.s32.s8.s8.s32",
        a_fragment(a, 8), b_fragment(b, 8), c_fragment(c), False, 4,
    )  # fmt: skip
    assert (words.view(np.int32) == expected).all()


def test_infinity_times_zero_is_nan(multiply):
    a, b = np.zeros((16, 16), dtype=np.uint16), np.zeros((16, 8), dtype=np.uint16)
    a[0, 0] = 0x7F80
    words = multiply(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        a_fragment(a, 16), b_fragment(b, 16), c_fragment(np.zeros((16, 8), dtype=np.float32)), False, 4,
    )  # fmt: skip
    nan = np.zeros((16, 8), dtype=np.float32)
    nan[0] = np.nan
    assert np.array_equal(np.isnan(words.view(np.float32)), np.isnan(c_fragment(nan).view(np.float32)))


@pytest.mark.parametrize(
    "dotted",
    [
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
        "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc",
    ],
)
def test_other_forms_are_refused_by_name(multiply, dotted):
    four = np.zeros((4, 32), dtype=np.uint32)
    with pytest.raises(Unsupported, match=r"mma\..*PTX line"):
        multiply(dotted, four, four, four, False, 4)
