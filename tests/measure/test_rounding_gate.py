"""The accuracy gate: an output's error against that of the oracle whose intermediate results are rounded."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tunekit.errors import SpecError
from tunekit.measure.device import Device
from tunekit.measure.verify import Case, Oracle
from tunekit.oracle.compare import compare
from tunekit.oracle.judge import Figures, judge
from tunekit.oracle.patterns import poison
from tunekit.oracle.reference import Expected
from tunekit.spec import Tolerance, load_spec
from tunekit.spec.inputs import draw
from tunekit.trials import Status

# Nothing but the gate: every other bound is far away.
GATE = Tolerance(cosine=0.9, relative_norm=10.0, rounding=1.25)


def compared(out, ref, rounded, tolerance=GATE):
    return compare("o", out, ref, tolerance, poison(out.dtype, 1), ("rows", "cols"), rounded=rounded)


def attention(rows=256, keys=512, columns=64, seed=0):
    """(q, k, v) in bf16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, 64), (keys, 64), (keys, columns))
    return [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]


def rounding_like_a_kernel(q, k, v, tile):
    """Attention in KV tiles: P rounded relative to the maximum so far, O to bf16. One tile: the rounded oracle."""
    top = torch.full((len(q), 1), -torch.inf, dtype=torch.float64)
    total, out = torch.zeros_like(top), torch.zeros(len(q), v.shape[1], dtype=torch.float64)
    for begin in range(0, len(k), tile):
        scores = q @ k[begin : begin + tile].T / 8
        higher = torch.maximum(top, scores.amax(1, keepdim=True))
        p, scale = torch.exp(scores - higher), torch.exp(top - higher)
        total, out = (
            total * scale + p.sum(1, keepdim=True),
            out * scale + p.bfloat16().double() @ v[begin : begin + tile],
        )
        top = higher
    return (out / total).bfloat16()


@pytest.fixture(scope="module")
def case():
    """(reference, rounded oracle, a right kernel's output): float64, bf16, bf16."""
    q, k, v = attention()
    exact = torch.softmax(q @ k.T / 8, 1) @ v
    return exact, rounding_like_a_kernel(q, k, v, len(k)), rounding_like_a_kernel(q, k, v, 64)


def test_a_right_kernel_passes_near_one(case):
    """It rounds in other places than the oracle, to the same error."""
    exact, rounded, out = case
    assert not torch.equal(out, rounded)
    found = compared(out, exact, rounded)
    assert found.wrong is None
    assert 0.95 < found.rounding < 1.05
    assert 1e-3 < found.relative_norm < 3e-3


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.24, True), (1.26, False), (2.0, False)])
def test_the_factor_is_what_decides(case, factor, passes):
    """Either side of 1.25, and to the word: a looser or a tighter gate fails here."""
    exact, rounded, _ = case
    error = rounded.double() - exact
    found = compared(exact + factor * error, exact, rounded)
    assert found.rounding == pytest.approx(factor, rel=1e-6)
    assert (found.wrong is None) is passes
    if not passes:
        own = float(error.norm() / exact.norm())
        assert found.wrong == (
            f"o: relative norm error {factor * own:.3g} is {factor:.3g} times the rounded oracle's own {own:.3g} "
            "(allowed 1.25 times)"
        )


@pytest.mark.parametrize("scale", [2.0, 1.01, 1.003, 0.997, 0.5])
def test_a_scaled_output_fails_by_the_gate_alone(case, scale):
    """Its cosine is that of the right one; 1.003 is within a relative norm of 4e-3 too."""
    exact, rounded, out = case
    scaled = (scale * out.double()).float()
    found = compared(scaled, exact, rounded)
    assert found.cosine > 0.999997
    assert "times the rounded oracle's own" in found.wrong
    assert compared(scaled, exact, rounded, dataclasses.replace(GATE, rounding=None)).wrong is None


def test_p_that_is_truncated_fails_within_the_norm(case):
    """A systematic error of half a unit in P: below 3e-3 in all, and twice what rounding costs."""
    exact, rounded, out = case
    biased = out.double() * (1 - 2**-9)
    found = compared(biased, exact, rounded, Tolerance(cosine=0.999997, relative_norm=3.5e-3, rounding=1.25))
    assert found.relative_norm < 3.5e-3
    assert "times the rounded oracle's own" in found.wrong


def test_few_elements_may_differ_by_chance_and_no_more():
    """64 outputs: a right kernel's ratio has a standard deviation of a tenth, and the words say what is allowed."""
    wrongs = []
    for seed in range(40):
        q, k, v = attention(rows=1, keys=1152, seed=seed)
        exact = torch.softmax(q @ k.T / 8, 1) @ v
        rounded, out = (rounding_like_a_kernel(q, k, v, tile) for tile in (len(k), 64))
        wrongs.append(compared(out, exact, rounded).wrong)
        worse = compared(exact + 2 * (rounded.double() - exact), exact, rounded).wrong
        assert re.search(r"is 2 times the rounded oracle's own .* \(allowed 1.25 times, 1\.[3-9]\d for so few", worse)
    assert wrongs == [None] * 40


def test_where_the_rounded_oracle_is_exact_so_must_the_output_be():
    ref = torch.ones(8, 8, dtype=torch.float64)
    assert compared(ref.bfloat16(), ref, ref.bfloat16()).wrong is None
    off = ref.bfloat16()
    off[1, 1] += 2**-7
    assert "is inf times the rounded oracle's own 0 " in compared(off, ref, ref.bfloat16()).wrong


def test_infinite_elements_are_in_no_norm(case):
    exact, rounded, out = (tensor.clone() for tensor in case)
    before = compared(out, exact, rounded)
    for tensor in (exact, rounded, out):
        tensor[3] = -torch.inf
    after = compared(out, exact, rounded)
    assert after.wrong is None
    assert after.rounding == pytest.approx(before.rounding, abs=0.02)
    out[3, 5] = 0.25
    assert compared(out, exact, rounded).wrong.startswith("o[3, 5] is 0.25, reference -inf; 1 of 16384 elements")


def squares():
    return load_spec("tests/specs/host_measure.py:host_squares")


def test_of_a_part_only_what_was_written_counts():
    """As the simulator judges some CTAs: the rest is neither in the error nor in the rounded oracle's."""
    spec = squares()
    problem = spec.problem({"rows": 4096})
    exact = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    rounded = exact.bfloat16().float()
    out = (exact + 1.3 * (rounded - exact)).float()
    out[2048:] = 7.0
    written = {"y": torch.arange(4096) < 2048}
    figures = Figures()
    wrong = judge(spec, problem, {"y": out}, Expected({"y": exact}, {"y": rounded}), lambda _: -1, figures, written)
    assert "is 1.3 times the rounded oracle's own" in wrong
    assert figures.values(1)["rounding_ratio"] == pytest.approx(1.3, rel=1e-3)


def test_only_the_gate_finds_terms_that_are_truncated(compiler, shared_worker):
    """End to end on the host; the figures are kept with the outcome, the failed one too."""
    rows = {"rows": 1000}
    right = shared_worker.verify(compiler.job("host_measure", "host_squares", rows, fault="none"))
    assert right.status is Status.OK, right.reason
    assert 0.9 < right.facts["rounding_ratio"] < 1.1
    assert 0 < right.facts["max_abs_error"] < 1 and 0 < right.facts["max_relative_error"] < 1e-2
    for fault in ("truncates", "scales"):
        wrong = shared_worker.verify(compiler.job("host_measure", "host_squares", rows, fault=fault))
        assert wrong.status is Status.WRONG_RESULT
        assert "times the rounded oracle's own" in wrong.reason and "(allowed 1.25 times" in wrong.reason
        assert wrong.facts["rounding_ratio"] > 1.25 and wrong.facts["relative_norm"] < 1e-2
    infinite = shared_worker.verify(compiler.job("host_measure", "host_squares", rows, fault="infinite"))
    assert re.search(r"y\[500\] is -inf, reference [\d.]+; 1 of 1000 elements, in rows 500", infinite.reason)
    assert "rounding_ratio" not in infinite.facts


def test_the_rounded_oracle_is_asked_once_a_case_with_the_reference():
    asked = []

    def counted(name, oracle):
        return lambda problem, inputs: asked.append(name) or oracle(problem, inputs)

    spec = squares()
    spec = dataclasses.replace(
        spec, reference=counted("reference", spec.reference), rounded=counted("rounded", spec.rounded)
    )
    problem = spec.problem({"rows": 5})
    oracle, inputs = Oracle(Device(None)), draw(spec, problem, 0, torch.device("cpu"))
    first = oracle.outputs("here", spec, Case(problem, 0), inputs)
    assert oracle.outputs("here", spec, Case(problem, 0), inputs) is first
    assert asked == ["reference", "rounded"]
    assert first.rounded["y"].dtype is torch.float32, "in the output's dtype"
    loose = dataclasses.replace(spec, tolerance=Tolerance())
    assert Oracle(Device(None)).outputs("here", loose, Case(problem, 0), inputs).rounded == {}
    assert asked[2:] == ["reference"], "what nothing is held against isn't computed"


def test_a_rounded_oracle_that_gives_nothing_is_the_specs_fault():
    spec = dataclasses.replace(squares(), rounded=lambda problem, inputs: {})
    problem = spec.problem({"rows": 5})
    with pytest.raises(SpecError, match="gives no output y") as raised:
        Oracle(Device(None)).outputs("here", spec, Case(problem, 0), draw(spec, problem, 0, torch.device("cpu")))
    assert raised.value.field == "rounded"
