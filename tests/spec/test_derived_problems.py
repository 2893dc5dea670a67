"""Problems that are completed from a few given values, and taken apart into them again."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tunekit.errors import SpecError
from tunekit.model import Values, to_json
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tunable, load_spec

PAGES = f"{Path(__file__).parents[1] / 'specs' / 'host_pages.py'}:host_pages"


def spec_of(*axes: Axis, **fields) -> KernelSpec:
    return KernelSpec(
        name="toy",
        version=1,
        axes=axes,
        signature=fields.pop("signature", (TensorArg("y", (1,), "float32", role="output"),)),
        implementations=fields.pop(
            "implementations",
            (
                Implementation(
                    name="i",
                    requires=(),
                    tunables=(Tunable("tile", (1,)),),
                    build=lambda b: "",
                    defaults=({"tile": 1},),
                ),
            ),
        ),
        reference=lambda p, i: {},
        **fields,
    )


@pytest.fixture(scope="module")
def pages() -> KernelSpec:
    return load_spec(PAGES)


def test_defaults_are_filled_in_whatever_order_their_needs_allow():
    spec = spec_of(
        Axis("total", default=lambda p: p.batch * p["padded"]),
        Axis("padded", default=lambda p: -(-p.n // p.unit) * p.unit),
        Axis("batch", default=lambda p: p.n),
        Axis("unit", default=8),
        Axis("n"),
    )
    problem = spec.problem({"n": 3})
    assert problem == Values(total=24, padded=8, batch=3, unit=8, n=3)
    assert list(problem) == ["total", "padded", "batch", "unit", "n"], "in the axes' order"
    assert spec.derived(problem) == {"total", "padded", "batch"}
    given = spec.problem({"n": 3, "batch": 1, "total": 9})
    assert (given.batch, given.padded, given.total) == (1, 8, 9), "what is given stays"
    assert spec.derived(given) == {"padded"}


def test_the_text_of_a_problem_leaves_out_what_its_defaults_give(pages):
    """And it reads back as the same problem; equality, JSON and pickles know nothing of it."""
    problem = pages.problem({"cols": 8, "page": 8, "table_pages": 3, "left": -1})
    assert str(problem) == "s=24 cols=8 page=8"
    assert pages.problem({"s": 24, "page": 8, "cols": 8}) == problem == Values(dict(problem))
    assert to_json(problem) == to_json(Values(dict(problem)))
    assert str(pickle.loads(pickle.dumps(problem))) == str(problem)
    assert str(problem.merged({})) == str(Values(dict(problem))) != str(problem)
    assert str(pages.problem({"batch": 2, "s": 24, "cols": 8, "page": 8})) == "batch=2 s=24 cols=8 page=8"
    spec = spec_of(Axis("n", default=3))
    assert str(spec.problem({})) == "n=3", "not all of it"
    with pytest.raises(SpecError, match="n=5: odd: n is even"):
        spec_of(
            Axis("n"), Axis("m", default=1), constraints=(Constraint("odd", "n is even", lambda p: p.n % 2 == 0),)
        ).problem({"n": 5})


def test_each_of_two_axes_follows_from_the_other(pages):
    by_table = pages.problem({"cols": 8, "page": 8, "table_pages": 3})
    by_rows = pages.problem({"cols": 8, "page": 8, "s": 24})
    assert by_table == by_rows and (by_table.s, by_table.table_pages) == (24, 3)
    assert pages.derived(by_table) == {"cols_out", "table_pages", "pages", "total"}


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"cols": 8, "page": 8}, None, "the problem needs s or table_pages (axes: batch, s"),
        ({"cols": 8}, None, "the problem needs s (axes"),
        ({"s": 3}, None, "the problem needs cols (axes"),
        ({"s": 3, "cols": 5}, "cols", "5 is not allowed (allowed: 4, 8)"),
        ({"s": 0, "cols": 8}, "s", "0 is below the minimum 1"),
        ({"s": 3, "cols": 8, "left": -2}, "left", "-2 is below the minimum -1"),
        ({"s": 3, "cols": 8, "reduce": "mean"}, "reduce", "mean is not allowed (allowed: sum, last, window)"),
        ({"s": 3, "cols": 8, "reduce": True}, "reduce", "True is bool, not str"),
        ({"s": 3, "cols": 8, "reduced": "sum"}, None, "did you mean reduce"),
    ],
)
def test_what_is_missing_or_not_allowed_is_named(pages, given, field, words):
    with pytest.raises(SpecError) as caught:
        pages.problem(given)
    assert caught.value.field == field and words in caught.value.message


@pytest.mark.parametrize(
    ("default", "words"),
    [
        (lambda p: p.n / 0, "its default fails for n=3: ZeroDivisionError"),
        (lambda p: p.m, "its default fails for n=3: AttributeError: no axis 'm' (axes: n, derived)"),
        (lambda p: p["m"], "KeyError: 'm'"),
        (lambda p: p.n * 1.0, "by default, for n=3: 3.0 is float, not int"),
        (lambda p: -p.n, "by default, for n=3: -3 is below the minimum 1"),
        (lambda p: exit(), "SystemExit"),
    ],
)
def test_a_default_that_fails_is_the_specs_fault(default, words):
    with pytest.raises(SpecError) as caught:
        spec_of(Axis("n"), Axis("derived", default=default)).problem({"n": 3})
    assert caught.value.field == "derived" and words in caught.value.message


def test_a_default_may_decline():
    """None from a function: nothing follows for this problem."""
    spec = spec_of(Axis("n"), Axis("m", default=lambda p: p.n // 2 if p.n > 1 else None))
    assert spec.problem({"n": 8}).m == 4
    with pytest.raises(SpecError, match="the problem needs m"):
        spec.problem({"n": 1})
    assert spec.problem({"n": 1, "m": 7}).m == 7


def test_circles_of_three_are_named_and_broken_anywhere():
    spec = spec_of(Axis("a", default=lambda p: p.c), Axis("b", default=lambda p: p.a), Axis("c", default=lambda p: p.b))
    for name in "abc":
        problem = spec.problem({name: 5})
        assert problem == Values(a=5, b=5, c=5)
        assert spec.derived(problem) == {"b", "c"}, "of a circle, the first counts as given"
    with pytest.raises(SpecError, match="the problem needs a or c or b"):
        spec.problem({})


def test_a_changed_problem_is_made_from_what_was_given(pages):
    paged = pages.problem({"cols": 8, "batch": 2, "page": 8, "s": 24, "reduce": "window", "left": 9})
    longer = pages.varied(paged, {"s": 40})
    assert (longer.table_pages, longer.pages, longer.total, longer.left) == (5, 10, 80, 9)
    assert pages.varied(paged, {"table_pages": 5}) == longer, "along either of two that follow from each other"
    pool = pages.problem({**paged, "pages": 11})
    assert pages.varied(pool, {"batch": 1}).pages == 11, "what was given stays"
    with pytest.raises(SpecError, match="enough_pages"):
        pages.varied(pool, {"s": 80})
    packed = pages.problem({"cols": 8, "batch": 3, "s": 9, "packed": True, "total": 20})
    with pytest.raises(SpecError, match="all_rows"):
        pages.varied(packed, {"batch": 1})


def test_buckets_hold_what_follows_from_them(pages):
    paged = pages.problem({"cols": 8, "batch": 3, "page": 8, "s": 40, "reduce": "window", "left": 9})
    bucket = pages.bucket(paged)
    assert (bucket.batch, bucket.s, bucket.table_pages, bucket.pages, bucket.total) == (4, 64, 8, 32, 256)
    assert (bucket.left, pages.bucket(bucket)) == (16, bucket)
    assert pages.bucket(pages.varied(paged, {"s": 56})) == bucket
    unlimited = pages.problem({"cols": 8, "s": 3})
    assert pages.bucket(unlimited).left == -1, "what is no size has a bucket of its own"
    assert Axis("n", minimum=0, bucket="pow2").bucketed(0) == 0
    packed = pages.problem({"cols": 8, "batch": 3, "s": 9, "packed": True, "total": 20})
    assert pages.bucket(packed).total == 20, "given, and of an exact axis"


def test_a_bucket_that_is_no_problem_keeps_what_was_derived():
    spec = spec_of(
        Axis("n", bucket="pow2"), Axis("m", minimum=0, bucket="pow2", default=lambda p: 48 - p.n if p.n <= 48 else None)
    )
    assert spec.bucket(spec.problem({"n": 33})) == Values(n=64, m=16)


def test_a_problem_of_plain_axes_is_as_it_was():
    spec = spec_of(Axis("n", bucket="pow2"), Axis("m", default=4))
    problem = spec.problem({"n": 5})
    assert spec.derived(problem) == frozenset() and spec.bucket(problem) == Values(n=8, m=4)
    assert spec.varied(problem, {"n": 6}) == Values(n=6, m=4)
