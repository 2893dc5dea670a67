"""ldmatrix, stmatrix, movmatrix: small kernels against the ISA's figures, computed lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

BYTES = 4096
LANES = np.arange(32)


@pytest.fixture
def matrix(run_ptx, ptx_kernel):
    """matrix(code, memory, rows): shared memory holds `memory`, %r10 the lane's row address, %r20.. are registers."""

    def go(code: str, memory: np.ndarray, rows: np.ndarray, registers: np.ndarray | None = None, outputs: int = 4):
        body = """
        mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; ld.param.u64 %rd3, [p2];
        mov.u32 %r2, smem; mul.wide.u32 %rd4, %r1, 4; shl.b32 %r3, %r1, 4;
        COPY: cvt.u64.u32 %rd5, %r3; add.s64 %rd6, %rd1, %rd5; ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd6];
        add.s32 %r8, %r2, %r3; st.shared.v4.b32 [%r8], {%r4, %r5, %r6, %r7};
        add.s32 %r3, %r3, 512; setp.lt.u32 %p1, %r3, 4096; @%p1 bra COPY;
        bar.sync 0;
        add.s64 %rd7, %rd2, %rd4; ld.global.b32 %r9, [%rd7]; add.s32 %r10, %r9, %r2; cvt.u64.u32 %rd10, %r10;
        cvta.shared.u64 %rd10, %rd10;
        """
        body += "".join(f"ld.global.b32 %r{20 + n}, [%rd7+{128 * (n + 1)}];\n" for n in range(4))
        body += code + "\nbar.sync 0;\nadd.s64 %rd8, %rd3, %rd4;\n"
        body += "".join(f"st.global.b32 [%rd8+{128 * n}], %r{20 + n};\n" for n in range(outputs))
        body += "".join(
            f"ld.shared.b32 %r30, [%r11+{128 * n}];\nst.global.b32 [%rd8+{128 * (4 + n)}], %r30;\n"
            for n in range(BYTES // 128)
        ).join(["shl.b32 %r11, %r1, 2; add.s32 %r11, %r11, %r2;\n", "ret;"])
        given = np.zeros((5, 32), dtype=np.uint32)
        given[0] = rows
        if registers is not None:
            given[1:] = registers
        ran = run_ptx(
            ptx_kernel(
                body,
                ".param .u64 p0, .param .u64 p1, .param .u64 p2",
                variables=".extern .shared .align 1024 .b8 smem[];",
            ),
            {"memory": memory, "given": given, "out": np.zeros((4 + BYTES // 128, 32), dtype=np.uint32)},
            ["memory", "given", "out"],
            shared=BYTES,
        )
        out = ran.buffers["out"]
        return ran, out[:4], out[4:].reshape(-1).view(np.uint8)

    return go


@pytest.fixture
def memory():
    return np.random.default_rng(5).integers(0, 256, BYTES, dtype=np.uint8)


@pytest.fixture
def rows():
    return (np.random.default_rng(6).permutation(BYTES // 16)[:32] * 16).astype(np.uint32)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("address", ["%r10", "%rd10"], ids=["shared", "generic"])
def test_ldmatrix_8x8(matrix, memory, rows, count, trans, address):
    registers = ", ".join(f"%r{20 + n}" for n in range(count))
    space = ".shared" if address == "%r10" else ""
    code = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}{space}.b16 {{{registers}}}, [{address}];"
    ran, out, _ = matrix(code, memory, rows)
    assert not ran.faults
    halves = memory.view(np.uint16)
    for n in range(count):
        m = np.array([halves[rows[8 * n + r] // 2 :][:8] for r in range(8)])
        m = m.T if trans else m
        for lane in LANES:
            low, high = m[lane // 4, 2 * (lane % 4)], m[lane // 4, 2 * (lane % 4) + 1]
            assert out[n, lane] == int(low) | int(high) << 16


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_8x8(matrix, memory, rows, count, trans):
    values = np.random.default_rng(8).integers(0, 2**32, (4, 32), dtype=np.uint32)
    registers = ", ".join(f"%r{20 + n}" for n in range(count))
    code = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 [%r10], {{{registers}}};"
    ran, _, after = matrix(code, memory, rows, values)
    assert not ran.faults
    expected = memory.copy().view(np.uint16)
    for n in range(count):
        m = np.zeros((8, 8), dtype=np.uint16)
        for lane in LANES:
            m[lane // 4, 2 * (lane % 4)] = values[n, lane] & 0xFFFF
            m[lane // 4, 2 * (lane % 4) + 1] = values[n, lane] >> 16
        m = m.T if trans else m
        for r in range(8):
            expected[rows[8 * n + r] // 2 :][:8] = m[r]
    assert np.array_equal(after, expected.view(np.uint8))


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_16x16_bytes(matrix, memory, rows, count):
    """As CUTLASS's SM100_U8x8_LDSM_T reads it: lane 4 r + c, byte b, register j: row 4 c + b, column r + 8 j."""
    registers = ", ".join(f"%r{20 + n}" for n in range(2 * count))
    ran, out, _ = matrix(
        f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {{{registers}}}, [%r10];", memory, rows
    )
    assert not ran.faults
    for n in range(count):
        m = np.array([memory[rows[16 * n + r] :][:16] for r in range(16)])
        for j in range(2):
            octets = out[2 * n + j].copy().view(np.uint8).reshape(32, 4)
            for lane in LANES:
                assert octets[lane].tolist() == m[4 * (lane % 4) : 4 * (lane % 4) + 4, lane // 4 + 8 * j].tolist()


@pytest.mark.parametrize("source", ["b4x16_p64", "b6x16_p32"])
@pytest.mark.parametrize("shape", ["m8n16.x4", "m16n16.x2.trans"])
def test_ldmatrix_with_decompression(matrix, memory, rows, source, shape):
    ran, out, _ = matrix(
        f"ldmatrix.sync.aligned.{shape}.shared.b8x16.{source} {{%r20, %r21, %r22, %r23}}, [%r10];", memory, rows
    )
    assert not ran.faults
    bits = 4 if source.startswith("b4") else 6
    for n in range(4):
        octets = out[n].copy().view(np.uint8).reshape(32, 4)
        for lane in LANES:
            for b in range(4):
                if shape.startswith("m8"):
                    row, column = rows[8 * n + lane // 4], 4 * (lane % 4) + b
                else:
                    row, column = rows[16 * (n // 2) + 4 * (lane % 4) + b], lane // 4 + 8 * (n % 2)
                packed = int.from_bytes(memory[row : row + 16].tobytes(), "little")
                element = packed >> bits * int(column) & ((1 << bits) - 1)
                assert octets[lane, b] == (element << 2 if bits == 4 else element)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_16x8_bytes(matrix, memory, rows, count):
    """As CUTLASS's SM100_U8x4_STSM_T writes it: the fragment is an accumulator's, memory holds the transpose."""
    values = np.random.default_rng(9).integers(0, 2**32, (4, 32), dtype=np.uint32)
    registers = ", ".join(f"%r{20 + n}" for n in range(count))
    ran, _, after = matrix(
        f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r10], {{{registers}}};", memory, rows, values
    )
    assert not ran.faults
    expected = memory.copy()
    for n in range(count):
        octets = values[n].copy().view(np.uint8).reshape(32, 4)
        for lane in LANES:
            for b in range(4):
                m, k = lane // 4 + 8 * (b // 2), 2 * (lane % 4) + b % 2
                expected[rows[8 * n + k] + m] = octets[lane, b]
    assert np.array_equal(after, expected)


def test_movmatrix(matrix, memory, rows):
    values = np.random.default_rng(10).integers(0, 2**32, (4, 32), dtype=np.uint32)
    ran, out, _ = matrix("movmatrix.sync.aligned.m8n8.trans.b16 %r21, %r20;", memory, rows, values)
    assert not ran.faults
    assert np.array_equal(out[1].view(np.uint16).reshape(8, 8), values[0].view(np.uint16).reshape(8, 8).T)


def test_a_misaligned_row_is_a_fault(matrix, memory, rows):
    rows[3] += 8
    ran, _, _ = matrix("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r10];", memory, rows)
    assert ran.kinds == {"misaligned address"}
    assert ran.faults[0].lanes == (3,)


def test_a_row_outside_shared_memory_is_a_fault(matrix, memory, rows):
    rows[9] = BYTES
    ran, _, _ = matrix("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r20, %r21}, [%r10];", memory, rows)
    assert ran.kinds == {"out of bounds"}
    assert ran.faults[0].lanes == (9,)
