"""An output against its oracle, element by element."""

from __future__ import annotations

import math

import pytest
import torch

from tunekit.oracle.compare import compare
from tunekit.oracle.patterns import bits, poison, poisons
from tunekit.spec import Tolerance

ATTENTION = Tolerance(cosine=0.999997, relative_norm=3e-3)


def judge(out, ref, tolerance=ATTENTION, dims=("rows", "cols"), region=None):
    return compare("o", out, ref, tolerance, poison(out.dtype, 1), dims, region)


def attention_like(rows=2048, columns=512):
    """A float64 reference of 2**20 elements, and what a kernel with bf16 P and bf16 O makes of it."""
    generator = torch.Generator().manual_seed(1)
    keys = 256
    scores = 3 * torch.randn(
        rows, keys, generator=generator, dtype=torch.float64
    )  # peaked in some rows, flat in others
    values = torch.randn(keys, columns, generator=generator, dtype=torch.float64).bfloat16().double()
    p = torch.softmax(scores, dim=1)
    peak = p.max(dim=1, keepdim=True).values
    return (p / peak).bfloat16().double() @ values * peak, p @ values


@pytest.fixture(scope="module")
def rounded():
    approximate, exact = attention_like()
    return approximate.bfloat16(), exact


def test_bf16_rounding_of_a_million_elements_passes(rounded):
    """Case 44: a right kernel, with bf16 P and O, must not fail the element check."""
    out, ref = rounded
    comparison = judge(out, ref)
    assert comparison.wrong is None
    assert 1e-3 < comparison.relative_norm < 3e-3, "this is the rounding floor that the tolerance leaves room for"
    assert comparison.cosine > 0.999997


@pytest.mark.parametrize("fault", ["zero", "half", "negated", "stale"])
def test_one_wrong_element_of_a_million_fails(rounded, fault):
    """Case 44: cosine and norm can't see it; the element check names it."""
    out, ref = rounded[0].clone(), rounded[1]
    place = int((ref[777].abs() - ref.square().mean().sqrt() / 2).abs().argmin())  # of half the RMS: an ordinary one
    old = out[777, place].clone()
    out[777, place] = {"zero": 0.0 * old, "half": old / 2, "negated": -old, "stale": old + old / 8}[fault]
    comparison = judge(out, ref)
    assert comparison.cosine > ATTENTION.cosine and comparison.relative_norm < ATTENTION.relative_norm
    assert comparison.wrong is not None
    assert f"mismatch at [777, {place}]: got " in comparison.wrong
    assert "1 of 1048576 elements, in rows 777, cols" in comparison.wrong


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_one_unit_in_the_last_place_passes_even_with_no_tolerance(dtype):
    """Case 44: right to 1 ulp, also among subnormals."""
    kind = getattr(torch, dtype)
    scale = torch.logspace(-6, 1.5, 512, dtype=torch.float64)
    ref = scale.to(kind).double()
    out = ref.to(kind)
    bits(out).add_(1)
    strict = Tolerance(cosine=0.9, relative_norm=0.0)
    found = compare("o", out, ref, strict, poison(kind, 1), ("n",))
    assert found.wrong is None or "relative norm" in found.wrong, "no element may fail"
    bits(out).add_(2)
    wrong = compare("o", out, ref, strict, poison(kind, 1), ("n",)).wrong
    assert wrong is not None and "mismatch" in wrong, "three units is too far"


def test_a_scaled_output_fails_though_its_cosine_is_one():
    ref = torch.randn(64, 64, dtype=torch.float64)
    comparison = judge((2 * ref).float(), ref, Tolerance(cosine=0.9999, relative_norm=0.05))
    assert comparison.cosine > 0.999999
    assert comparison.wrong is not None


def test_small_errors_everywhere_fail_by_the_norm():
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(256, 256, generator=generator, dtype=torch.float64)
    off = ref + 4e-3 * torch.randn(256, 256, generator=generator, dtype=torch.float64)
    wrong = judge(off.float(), ref).wrong
    assert wrong is not None and "relative norm error 0.00399" in wrong and "> 0.003" in wrong
    loose = Tolerance(cosine=0.999999, relative_norm=1e-2)
    wrong = judge(off.float(), ref, loose).wrong
    assert wrong is not None and "cosine similarity 0.99999" in wrong


def test_unwritten_and_nan_are_told_apart():
    ref = torch.ones(8, 4, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn):
        out = ref.to(dtype, copy=True)
        bits(out)[2:4] = poison(dtype, 1)
        assert "unwritten at [2, 0]; 8 of 32 elements, in rows 2-3" in judge(out, ref).wrong
        out = ref.to(dtype, copy=True)
        out[5, 1] = math.nan
        assert "NaN at [5, 1]; 1 of 32 elements" in judge(out, ref).wrong, dtype


def test_poison_is_nan_in_every_float_dtype():
    for dtype, (integer, patterns) in poisons().items():
        for pattern in patterns:
            value = torch.full((2,), pattern, dtype=integer).view(dtype)
            if dtype.is_floating_point:
                assert torch.isnan(value.double()).all(), dtype


def test_infinite_references_must_be_met_exactly():
    """The LSE of a fully masked row is -inf, and says nothing about the rest."""
    ref = torch.tensor([[4.2, -math.inf, math.inf]], dtype=torch.float64)
    right = judge(ref.float(), ref)
    assert right.wrong is None
    assert right.cosine > 0.999999 and right.max_abs < 1e-6, "infinite elements are in no figure"
    for column, value, words in (
        (0, math.inf, "o[0, 0] is inf, reference 4.2; 1 of 3 elements, in cols 0"),
        (0, -math.inf, "o[0, 0] is -inf, reference 4.2"),
        (1, math.inf, "o[0, 1] is inf, reference -inf"),
        (1, -1e30, "o[0, 1] is -1e+30, reference -inf"),
        (2, 5.0, "o[0, 2] is 5, reference inf"),
    ):
        out = ref.float()
        out[0, column] = value
        assert judge(out, ref).wrong.startswith(words)
        assert judge(out, ref, Tolerance(cosine=0.01, relative_norm=1e9, relative=1e9)).wrong.startswith(words)


def test_nan_is_wrong_whatever_the_reference_says():
    ref = torch.tensor([[1.0, math.nan]], dtype=torch.float64)
    assert "NaN at [0, 1]; 1 of 2 elements" in judge(ref.float(), ref).wrong
    assert "at [0, 1]: got 3, want nan" in judge(torch.tensor([[1.0, 3.0]]), ref).wrong


def test_relative_bounds_each_element_by_its_own_size():
    """The LSE within 1e-4: relative to elements over 1, absolute to those below."""
    ref = torch.tensor([[100.0, -8.0, 0.01, -math.inf]], dtype=torch.float64)
    lse = Tolerance(cosine=0.999, relative_norm=1e-2, relative=1e-4)
    for column, error in ((0, 9e-3), (1, 7e-4), (2, 9e-5)):
        out = ref.clone()
        out[0, column] += error
        found = judge(out, ref, lse)
        assert found.wrong is None
        assert found.relative == pytest.approx(error / max(1.0, abs(float(ref[0, column]))))
        out[0, column] += 0.3 * error
        assert f"mismatch at [0, {column}]: got" in judge(out, ref, lse).wrong
        assert "allowed 0.0001); 1 of 4 elements" in judge(out, ref, lse).wrong
        assert judge(out, ref, Tolerance(cosine=0.999, relative_norm=1e-2)).wrong is None


def test_integers_are_compared_exactly():
    ref = torch.arange(12).reshape(3, 4)
    exact = Tolerance()
    assert judge(ref.int(), ref, exact).wrong is None
    out = ref.int()
    out[1, 2] += 1
    assert "mismatch at [1, 2]: got 7, want 6" in judge(out, ref, exact).wrong
    assert judge(out, ref, Tolerance(max_abs=1)).wrong is None
    out[1, 2] = poison(torch.int32, 1)
    assert "unwritten at [1, 2]" in judge(out, ref, exact).wrong
    ref[1, 2] = poison(torch.int32, 1)
    assert judge(out, ref, exact).wrong is None, "the pattern may be the right answer"


def test_max_abs_narrows_what_an_element_may_be_off():
    ref = 100 * torch.ones(4, 4, dtype=torch.float64)
    out = ref.float()
    out[0, 0] += 0.5
    loose = Tolerance(cosine=0.999, relative_norm=1e-2)
    assert judge(out, ref, loose).wrong is None
    assert "off by 0.5, allowed 0.1" in judge(out, ref, Tolerance(cosine=0.999, relative_norm=1e-2, max_abs=0.1)).wrong


def test_outside_the_region_anything_goes():
    ref = torch.ones(4, 6, dtype=torch.float64)
    out = ref.float()
    bits(out)[:, 4:] = poison(torch.float32, 1)
    region = (slice(1, 4), slice(0, 4))
    out[0] = math.nan
    assert judge(out, ref, region=region).wrong is None
    out[2, 3] = 9.0
    assert "mismatch at [2, 3]" in judge(out, ref, region=region).wrong, "indices are those of the whole output"


def test_a_zero_reference_wants_zeros():
    ref = torch.zeros(4, 4, dtype=torch.float64)
    assert judge(torch.zeros(4, 4), ref).wrong is None
    assert judge(torch.full((4, 4), 1e-20), ref).wrong is not None


def test_dims_without_names_and_one_dim():
    ref = torch.ones(3, 5, 7, dtype=torch.float64)
    out = ref.float()
    out[1, 2:4, 6] = 0
    assert "2 of 105 elements, in batch 1, dim 1 2-3, cols 6" in judge(out, ref, dims=("batch", 5, "cols")).wrong
    assert (
        "mismatch at [2]"
        in compare(
            "lse", torch.tensor([1.0, 1.0, 3.0]), torch.ones(3, dtype=torch.float64), ATTENTION, 0, ("heads",)
        ).wrong
    )
