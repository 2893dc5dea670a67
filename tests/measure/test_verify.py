"""Verification end to end on the host backend: compiled C kernels in a worker process."""

from __future__ import annotations

import pytest

from tunekit.errors import SpecError
from tunekit.measure import choose
from tunekit.measure.verify import cases
from tunekit.spec import load_spec
from tunekit.trials import Status

ROWS = {"rows": 100}


def test_only_the_right_one_may_win(compiler, shared_worker):
    """Case 44, on the host: of variants that are wrong in one way each, only the right ones survive and win.

    The wrong ones are given better times on purpose.
    """
    expected = {
        "none": (Status.OK, ""),
        "ulp": (Status.OK, ""),
        "half": (Status.WRONG_RESULT, "y: unwritten at [50, 0]; 3200 of 6400 elements, in rows 50-99"),
        "nothing": (Status.WRONG_RESULT, "unwritten at [0, 0]; 6400 of 6400 elements"),
        "nan": (Status.WRONG_RESULT, "y: NaN at [33, 21]; 1 of 6400 elements"),
        "one_element": (Status.WRONG_RESULT, "y: mismatch at [50, 1]: got 100.0"),
        "second_launch": (Status.WRONG_RESULT, "launch 2: y: mismatch at [0, 0]"),
        "odd_rows": (Status.WRONG_RESULT, "[rows=1 seed="),
        "input_write": (Status.WRONG_RESULT, "input x was changed: 1 elements, the first at [0, 0]"),
        "error": (Status.LAUNCH_ERROR, "asked to fail"),
    }
    samples = {}
    for fault, (status, words) in expected.items():
        outcome = shared_worker.verify(compiler.job("host_scale", "host_faulty", ROWS, fault=fault))
        assert outcome.status is status, (fault, outcome.reason)
        assert words in outcome.reason, fault
        if outcome.ok:
            assert outcome.facts["cases"] == 3 + 3, "three seeds, three edges"
            assert outcome.facts["relative_norm"] < 1e-6
            assert set(outcome.seconds) == {"prepare", "run", "check"}
            samples[fault] = [10.0, 10.0]
    assert set(samples) == {"none", "ulp"}
    assert choose(samples, default="none").winner in samples


def test_one_draw_without_edges_sees_less(compiler, shared_worker):
    """What is wrong only for odd sizes passes at an even one where the edges are left out, and the facts say so."""
    odd = compiler.job("host_scale", "host_faulty", ROWS, fault="odd_rows")
    outcome = shared_worker.verify(odd, seeds=1, edges=False)
    assert outcome.ok and outcome.facts["cases"] == 1
    wrong = compiler.job("host_scale", "host_faulty", ROWS, fault="one_element")
    assert shared_worker.verify(wrong, seeds=1, edges=False).status is Status.WRONG_RESULT


def test_one_wrong_of_a_million_that_is_ten_times_faster(compiler, shared_worker):
    """Case 44: one wrong element of 2**20 is found, whatever the speed."""
    outcome = shared_worker.verify(
        compiler.job("host_scale", "host_faulty", {"rows": 1024, "cols": 1024}, fault="one_element"), seeds=1
    )
    assert outcome.status is Status.WRONG_RESULT
    assert "mismatch at [512, 1]" in outcome.reason and "1 of 1048576 elements" in outcome.reason


def test_a_declared_valid_region_may_be_masked(compiler, shared_worker):
    """Case 45: a kernel with masked stores and a declared valid region is accepted; one that leaves more out is not."""
    right = compiler.job("host_measure", "host_ragged", ROWS, skipped=3)
    assert shared_worker.verify(right).status is Status.OK
    outcome = shared_worker.verify(compiler.job("host_measure", "host_ragged", ROWS, skipped=4))
    assert outcome.status is Status.WRONG_RESULT
    assert "unwritten at [0, 60]; 100 of 6100 elements, in cols 60" in outcome.reason


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("past_end", "write outside y: 4 bytes written past its end, the nearest 1 bytes away"),
        ("before_start", "write outside y: 4 bytes written before its start"),
        ("past_tail", "[rows=1 seed="),
        ("input", "input x was changed"),
        ("read_past_end", "NaN at [99, 63]"),
        ("seventh_launch", "mismatch at [0, 0]"),
    ],
)
def test_what_only_guards_and_edges_show(compiler, shared_worker, fault, words):
    """Writes outside an output, reads outside an input that matter, faults at an edge length or after some launches."""
    outcome = shared_worker.verify(compiler.job("host_measure", "host_guard", ROWS, fault=fault))
    assert outcome.status is Status.WRONG_RESULT
    assert words in outcome.reason


def test_two_launches_that_differ_within_tolerance(compiler, shared_worker):
    outcome = shared_worker.verify(compiler.job("host_measure", "host_guard", ROWS, fault="last_bit"))
    assert outcome.status is Status.NOT_DETERMINISTIC
    assert "y: two launches differ in 1 of 6400 elements, at [0, 7]" in outcome.reason


def test_in_place_arguments_and_integer_outputs(compiler, shared_worker):
    assert shared_worker.verify(compiler.job("host_measure", "host_in_place", ROWS, error=0)).status is Status.OK
    outcome = shared_worker.verify(compiler.job("host_measure", "host_in_place", ROWS, error=1))
    assert outcome.status is Status.WRONG_RESULT
    assert "index: mismatch at [99]: got 100, want 99" in outcome.reason


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("host_reference_raises", "no oracle today"),
        ("host_reference_shape", r"y is \(1, 64\); the signature says \(100, 64\)"),
        ("host_reference_nothing", "gives no output y"),
        ("host_inputs_shape", "x is .* the signature says"),
        ("host_inputs_name", r"gives z, which is no input \(inputs: x\)"),
    ],
)
def test_a_wrong_oracle_is_the_specs_fault_not_the_variants(compiler, shared_worker, name, words):
    with pytest.raises(SpecError, match=words):
        shared_worker.verify(compiler.job("host_measure", name, ROWS, fault="none"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("adds_to_it", "y: NaN at [0, 0]"),
        ("past_its_end", "write outside workspace: 4 bytes written past its end, the nearest 1 bytes away"),
        ("leaves_a_part", "y: NaN at [1, 0]"),
    ],
)
def test_a_workspace_holds_nothing_and_is_guarded(compiler, shared_worker, fault, words):
    problem = {"cols": 8, "batch": 2, "page": 8, "table_pages": 3}
    right = shared_worker.verify(compiler.job("host_pages", "host_pages_faulty", problem, split=2, fault="none"))
    assert right.status is Status.OK, right.reason
    outcome = shared_worker.verify(compiler.job("host_pages", "host_pages_faulty", problem, split=2, fault=fault))
    assert outcome.status is Status.WRONG_RESULT
    assert outcome.reason.startswith("launch 1: ") and words in outcome.reason


@pytest.mark.parametrize(
    ("problem", "count"),
    [
        ({"cols": 8, "batch": 2, "s": 16, "cols_out": 4}, 4),
        ({"cols": 8, "batch": 2, "page": 8, "table_pages": 3}, 2),
        ({"cols": 4, "batch": 2, "s": 9, "packed": True, "total": 12}, 0),
        ({"cols": 4, "batch": 2, "s": 9, "packed": True, "reduce": "window", "left": 3}, 4),
    ],
)
def test_every_layout_is_right_at_its_edges(compiler, shared_worker, problem, count):
    """What follows from an edge follows anew; where something was given that does not fit it, the edge is left out."""
    for split in (1, 2):
        outcome = shared_worker.verify(compiler.job("host_pages", "host_pages", problem, split=split), seeds=2)
        assert outcome.status is Status.OK, outcome.reason
        assert outcome.facts["cases"] == 2 + count


def test_what_a_kernel_prints_does_not_reach_the_replies(compiler, shared_worker):
    assert shared_worker.verify(compiler.job("host_measure", "host_guard", ROWS, fault="prints")).status is Status.OK


def test_all_variants_fail(compiler, shared_worker):
    """Case 46, the verifying side: no outcome is ok, so nothing remains to be chosen or stored."""
    jobs = [compiler.job("host_scale", "host_faulty", ROWS, fault=fault) for fault in ("half", "nan", "error")]
    outcomes = [shared_worker.verify(job) for job in jobs]
    assert not any(outcome.ok for outcome in outcomes)
    assert all(outcome.reason for outcome in outcomes)
    assert choose({}).winner is None


def test_a_damaged_artifact_is_that_variants_failure(compiler, shared_worker, tmp_path):
    job = compiler.job("host_scale", "host_scale", ROWS)
    broken = tmp_path / "kernel.so"
    broken.write_bytes(b"\x7fELF not really")
    outcome = shared_worker.verify(type(job)(job.spec, job.problem, job.variant, str(broken), job.symbol))
    assert outcome.status is Status.LAUNCH_ERROR
    assert "can't be loaded" in outcome.reason
    outcome = shared_worker.verify(type(job)(job.spec, job.problem, job.variant, job.so, "tunekit_other"))
    assert outcome.status is Status.LAUNCH_ERROR
    assert "exports no function 'tunekit_other'" in outcome.reason


def test_cases_are_seeds_and_the_edges_of_dynamic_axes(compiler):
    job = compiler.job("host_scale", "host_scale", {"rows": 7})
    spec = load_spec(job.spec)
    found = cases(spec, job.variant, job.problem, 2)
    assert [(case.problem.rows, case.seed) for case in found] == [(7, 0), (7, 1), (1, 2), (64, 2)], (
        "7 is an edge itself"
    )
    assert all(case.problem.cols == 64 for case in found), "static axes stay: the artifact is compiled for them"


def test_an_edge_takes_along_what_follows_from_it(compiler):
    job = compiler.job("host_pages", "host_pages", {"cols": 8, "batch": 2, "page": 8, "table_pages": 4}, split=2)
    spec = load_spec(job.spec)
    found = [
        (p.batch, p.s, p.table_pages, p.pages, p.total)
        for p in (c.problem for c in cases(spec, job.variant, job.problem, 1))
    ]
    assert found == [(2, 32, 4, 8, 64), (1, 32, 4, 4, 32), (3, 32, 4, 12, 96), (2, 24, 3, 6, 48)], (
        "s=1 is no whole page"
    )
