"""shfl, vote, match, redux, elect, activemask: small kernels against the ISA's own definitions, lane by lane."""

from __future__ import annotations

import numpy as np
import pytest

from tunekit.simulate.faults import Unsupported

LANES = np.arange(32)


@pytest.fixture
def lanewise(run_ptx, ptx_kernel):
    """lanewise(code, inputs, outputs): %r100.. hold the inputs; the code leaves its results in %r200.. ."""

    def go(code: str, inputs: list[np.ndarray], outputs: int = 1, threads: int = 32):
        count = len(inputs)
        body = "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd9, %r1, 4;\nld.param.u64 %rd1, [p0];\nld.param.u64 %rd2, [p1];\n"
        body += "add.s64 %rd3, %rd1, %rd9;\nadd.s64 %rd4, %rd2, %rd9;\n"
        body += "".join(f"ld.global.b32 %r{100 + n}, [%rd3+{128 * n}];\n" for n in range(count))
        body += "".join(f"mov.b32 %r{200 + n}, 0;\n" for n in range(outputs))
        body += code + "\n"
        body += "".join(f"st.global.b32 [%rd4+{128 * n}], %r{200 + n};\n" for n in range(outputs)) + "ret;"
        given = np.zeros((max(1, count), 32), dtype=np.uint32)
        for n, values in enumerate(inputs):
            given[n] = np.asarray(values).astype(np.int64).astype(np.uint32) if values.dtype.kind != "u" else values
        ran = run_ptx(
            ptx_kernel(body, ".param .u64 p0, .param .u64 p1"),
            {"in": given, "out": np.zeros((outputs, 32), dtype=np.uint32)},
            ["in", "out"],
            block=(threads, 1, 1),
        )
        return ran, ran.buffers["out"]

    return go


def shfl_by_the_book(mode: str, a, b, c):
    """The pseudo-code of PTX ISA 9.7.9.6, one lane at a time."""
    out, found = [], []
    for lane in range(32):
        bval, cval, mask = int(b[lane]) & 31, int(c[lane]) & 31, int(c[lane]) >> 8 & 31
        highest = (lane & mask) | (cval & ~mask & 31)
        lowest = lane & mask
        if mode == "up":
            j = lane - bval
            valid = j >= highest
        elif mode == "down":
            j = lane + bval
            valid = j <= highest
        elif mode == "bfly":
            j = lane ^ bval
            valid = j <= highest
        else:
            j = lowest | (bval & ~mask & 31)
            valid = j <= highest
        out.append(int(a[j if valid else lane]))
        found.append(int(valid))
    return np.array(out, dtype=np.uint32), np.array(found, dtype=np.uint32)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0, 0x1F, 0x181F, 0x1C03, 0x0C07])
def test_shfl_is_the_book_s(lanewise, mode, c):
    draw = np.random.default_rng(c)
    a = draw.integers(0, 2**32, 32, dtype=np.uint32)
    b = draw.integers(0, 40, 32, dtype=np.uint32)
    ran, out = lanewise(
        f"shfl.sync.{mode}.b32 %r200|%p1, %r100, %r101, {c}, 0xffffffff;\nselp.u32 %r201, 1, 0, %p1;", [a, b], 2
    )
    assert not ran.faults
    values, found = shfl_by_the_book(mode, a, b, np.full(32, c))
    assert np.array_equal(out[0], values)
    assert np.array_equal(out[1], found)


def test_each_half_warp_with_a_mask_of_its_own(lanewise):
    mask = np.where(LANES < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)
    ran, out = lanewise(
        "shfl.sync.bfly.b32 %r200, %r100, 1, 0x1f, %r101;\nredux.sync.add.u32 %r201, %r100, %r101;", [LANES, mask], 2
    )
    assert not ran.faults
    assert np.array_equal(out[0], LANES ^ 1)
    assert np.array_equal(out[1], np.where(LANES < 16, 120, 376))


def test_reading_a_lane_that_takes_no_part_is_a_fault(lanewise):
    ran, _ = lanewise(
        "setp.lt.u32 %p1, %r100, 16;\n@!%p1 bra OUT;\nshfl.sync.bfly.b32 %r200, %r100, 16, 0x1f, 0x0000ffff;\nOUT:",
        [LANES],
    )
    assert ran.kinds == {"divergence"}
    assert "lane 0 reads lane 16" in ran.faults[0].message


def test_lanes_outside_the_mask_are_a_fault(lanewise):
    ran, _ = lanewise("vote.sync.ballot.b32 %r200, 1, 0x0000000f;".replace(", 1,", ", %p1,"), [LANES])
    assert "divergence" in ran.kinds
    assert any("lanes 4, 5, 6" in fault.message for fault in ran.faults)


def test_a_mask_waits_for_diverged_lanes(lanewise):
    """Both sides of a branch vote: the mask joins them, wherever each stands."""
    ran, out = lanewise(
        """setp.lt.u32 %p1, %r100, 10;
        @%p1 bra LOW;
        mul.lo.u32 %r101, %r100, 3;
        bra MEET;
        LOW: mul.lo.u32 %r101, %r100, 5;
        MEET: redux.sync.add.u32 %r200, %r101, 0xffffffff;""",
        [LANES],
    )
    assert not ran.faults
    assert (out[0] == sum(5 * lane if lane < 10 else 3 * lane for lane in range(32))).all()


def test_a_lane_that_never_comes_is_named(lanewise):
    ran, _ = lanewise(
        """setp.eq.u32 %p1, %r100, 7;
        @%p1 bra OUT;
        redux.sync.add.u32 %r200, %r100, 0xffffffff;
        OUT: bar.warp.sync 0xffffffff;""",
        [LANES],
    )
    assert {"deadlock"} <= ran.kinds
    assert any("redux.sync" in fault.message for fault in ran.faults)


def test_exited_lanes_are_not_waited_for(lanewise):
    ran, out = lanewise("setp.gt.u32 %p1, %r100, 23;\n@%p1 ret;\nredux.sync.add.u32 %r200, %r100, 0xffffffff;", [LANES])
    assert not ran.faults
    assert (out[0][:24] == sum(range(24))).all()
    assert (out[0][24:] == 0).all()


@pytest.mark.parametrize("values", [np.zeros(32), np.ones(32), LANES % 3], ids=["none", "all", "some"])
@pytest.mark.parametrize("negated", ["", "!"])
def test_vote(lanewise, values, negated):
    ran, out = lanewise(
        f"""setp.ne.u32 %p1, %r100, 0;
        vote.sync.all.pred %p2, {negated}%p1, 0xffffffff;
        vote.sync.any.pred %p3, {negated}%p1, 0xffffffff;
        vote.sync.uni.pred %p4, {negated}%p1, 0xffffffff;
        vote.sync.ballot.b32 %r203, {negated}%p1, 0xffffffff;
        selp.u32 %r200, 1, 0, %p2; selp.u32 %r201, 1, 0, %p3; selp.u32 %r202, 1, 0, %p4;""",
        [values],
        4,
    )
    assert not ran.faults
    true = (values != 0) != bool(negated)
    expected = [true.all(), true.any(), true.all() or not true.any(), sum(1 << n for n in np.flatnonzero(true))]
    assert [int(row[0]) for row in out] == [int(e) for e in expected]
    assert (out == out[:, :1]).all()


def test_match(lanewise):
    values = LANES % 5
    ran, out = lanewise(
        """match.any.sync.b32 %r200, %r100, 0xffffffff;
        match.all.sync.b32 %r201|%p1, %r100, 0xffffffff;
        match.all.sync.b32 %r202|%p2, 7, 0xffffffff;
        selp.u32 %r203, 1, 0, %p1; selp.u32 %r204, 1, 0, %p2;
        cvt.u64.u32 %rd20, %r100; match.any.sync.b64 %r205, %rd20, 0xffffffff;""",
        [values],
        6,
    )
    assert not ran.faults
    masks = np.array([sum(1 << int(n) for n in np.flatnonzero(values == v)) for v in values], dtype=np.uint32)
    assert np.array_equal(out[0], masks)
    assert np.array_equal(out[5], masks)
    assert [int(row[0]) for row in out[1:5]] == [0, 0xFFFFFFFF, 0, 1]


@pytest.mark.parametrize(
    "form", ["add.u32", "add.s32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32"]
)
def test_redux(lanewise, form):
    values = np.random.default_rng(3).integers(0, 2**32, 32, dtype=np.uint32)
    ran, out = lanewise(f"redux.sync.{form} %r200, %r100, 0xffffffff;", [values])
    assert not ran.faults
    operation, kind = form.split(".")
    typed = [int(v) for v in (values.view(np.int32) if kind == "s32" else values)]
    expected = {
        "add": sum, "min": min, "max": max,
        "and": lambda v: int(np.bitwise_and.reduce(values)),
        "or": lambda v: int(np.bitwise_or.reduce(values)),
        "xor": lambda v: int(np.bitwise_xor.reduce(values)),
    }[operation](typed)  # fmt: skip
    assert (out[0] == expected % 2**32).all()


@pytest.mark.parametrize(
    ("form", "values", "expected"),
    [
        ("min", [3.0, -2.5, 7.0], -2.5),
        ("max", [3.0, -2.5, 7.0], 7.0),
        ("max.abs", [3.0, -12.5, 7.0], 12.5),
        ("min.abs", [-0.0, 3.0, 0.5], 0.0),
        ("max", [-0.0, -0.0, 0.0], 0.0),
        ("min", [-0.0, 0.0, 0.0], -0.0),
        ("max", [np.nan, 1.0, 2.0], 2.0),
        ("max.NaN", [np.nan, 1.0, 2.0], np.nan),
        ("min.abs.NaN", [np.inf, -1.0, 2.0], 1.0),
        ("min", [np.nan, np.nan, np.nan], np.nan),
    ],
)
def test_redux_f32(lanewise, form, values, expected):
    lanes = np.array((values * 11)[:32], dtype=np.float32)
    ran, out = lanewise(f"redux.sync.{form}.f32 %r200, %r100, 0xffffffff;", [lanes.view(np.uint32)])
    assert not ran.faults
    if np.isnan(expected):
        assert (out[0] == 0x7FFFFFFF).all()
    else:
        assert (out[0] == np.float32(expected).view(np.uint32)).all()


def test_elect_chooses_one_and_the_same(lanewise):
    ran, out = lanewise(
        """elect.sync %r200|%p1, 0xffffffff; selp.u32 %r201, 1, 0, %p1;
        setp.gt.u32 %p2, %r100, 4; @!%p2 bra OUT;
        elect.sync _|%p3, 0xffffffe0; selp.u32 %r202, 1, 0, %p3;
        OUT:""",
        [LANES],
        3,
    )
    assert not ran.faults
    assert (out[0] == 0).all()
    assert np.flatnonzero(out[1]).tolist() == [0]
    assert np.flatnonzero(out[2]).tolist() == [5]


def test_activemask(lanewise):
    ran, out = lanewise(
        """activemask.b32 %r200; setp.lt.u32 %p1, %r100, 4; @!%p1 bra OUT; activemask.b32 %r201;
        OUT: mov.b32 %r202, 7; @%p1 activemask.b32 %r202;""",
        [LANES],
        3,
    )
    assert not ran.faults
    assert (out[0] == 0xFFFFFFFF).all()
    assert out[1].tolist() == [15] * 4 + [0] * 28
    assert out[2].tolist() == [15] * 4 + [7] * 28


@pytest.mark.parametrize("code", ["shfl.bfly.b32 %r200, %r100, 1, 0x1f;", "vote.ballot.b32 %r200, %p1;"])
def test_forms_without_sync_are_refused(lanewise, code):
    with pytest.raises(Unsupported, match=r"without \.sync"):
        lanewise(code, [LANES])
