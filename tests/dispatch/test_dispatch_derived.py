"""Dispatch of a spec whose axes are mostly derived: names, tensors of several forms, a workspace."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tunekit
from tunekit.dispatch.calls import CallForm
from tunekit.dispatch.checks import check
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.spec import Axis, Implementation, KernelSpec, ScalarArg, TensorArg, Tunable, load_spec

PAGES = f"{Path(__file__).parents[1] / 'specs' / 'host_pages.py'}:host_pages"
TABLE = torch.tensor([[0, 2, 4], [1, 3, 5]], dtype=torch.int32)
STARTS = torch.tensor([0, 9, 12], dtype=torch.int32)


@pytest.fixture(scope="module")
def form() -> CallForm:
    return CallForm(load_spec(PAGES))


def problem(form: CallForm, *args, **keywords) -> Values:
    slots, given = form.arrange(args, keywords)
    return check(form.spec, slots, given).problem


def test_the_form_of_a_tensor_follows_the_flags(form):
    plain = problem(form, torch.ones(2, 16, 8))
    assert (plain.batch, plain.s, plain.cols, plain.total, plain.pages) == (2, 16, 8, 32, 1)
    packed = problem(form, torch.ones(12, 8), starts=STARTS, packed=True, s=9)
    assert (packed.batch, packed.s, packed.total) == (2, 9, 12)
    by_position = problem(form, torch.ones(12, 8), STARTS, torch.empty(2, 4), packed=True, s=9)
    assert by_position == Values({**packed, "cols_out": 4}), "y shows what would otherwise follow from cols"


def test_what_tensors_show_comes_before_what_would_follow(form):
    """A paged call states s by the shape of its table; a pool may hold more pages than the tables need."""
    paged = problem(form, torch.ones(9, 8, 4), TABLE, page=8)
    assert (paged.batch, paged.table_pages, paged.s, paged.pages, paged.total) == (2, 3, 24, 9, 48)
    assert problem(form, torch.ones(9, 8, 4), table=TABLE, page=8, s=24) == paged


@pytest.mark.parametrize(
    ("args", "keywords", "words"),
    [
        ((torch.ones(12, 8),), {"s": 9}, ["'x' has 2 dims (12, 8), not the 3 of [batch, s, cols]", "[total, cols]"]),
        ((torch.ones(2, 16, 8),), {"packed": True}, ["not the 2 of [total, cols]", "[batch, s, cols]"]),
        ((torch.ones(2, 16, 8),), {"page": 8}, ["'x' dim 1 (page) is 16, but page is 8 by the keyword page"]),
        ((torch.ones(6, 8, 8),), {"page": 8}, ["the problem needs s or table_pages"]),
        ((torch.ones(6, 8, 8),), {"page": 8, "s": 24}, ["needs its input 'table' for", "table_pages=3"]),
        ((torch.ones(6, 8, 8), TABLE), {"page": 8, "s": 16}, ["whole_pages"]),
        ((torch.ones(2, 16, 8),), {"table": TABLE}, ["takes no 'table' for", "page=0"]),
        ((torch.ones(2, 16, 8), None, None, 1), {"page": "8"}, ["page", "'8' is str, not int"]),
        ((torch.ones(2, 16, 8), None, None, 1), {"page": [8]}, ["page", "[8] is list, not int"]),
        ((torch.ones(12, 8), STARTS), {"packed": True}, ["the problem needs s"]),
        ((torch.ones(12, 8), STARTS[:2].clone()), {"packed": True, "s": 12, "batch": 2},
         ["'starts' dim 0 (batch + 1) is 2, but batch is 2 by the keyword batch"]),
        ((torch.ones(2, 16, 8),), {"reduce": "mean"}, ["reduce", "mean is not allowed (allowed: sum, last, window)"]),
        ((torch.ones(2, 16, 8),), {"keep": 3}, ["takes no 'keep' for"]),
        ((torch.ones(2, 16, 8),), {"page": [8]}, ["page", "[8] is list, not int"]),
        ((torch.ones(2, 16, 8), None, None, None), {}, ["takes 3 arguments (x, y, scale), not 4"]),
        ((torch.ones(2, 16, 8), None, None, None, None), {"reduce": "window"}, ["(x, y, keep, scale), not 5"]),
    ],
)  # fmt: skip
def test_a_wrong_call_says_which_form_was_meant(form, args, keywords, words):
    with pytest.raises(UserError) as caught:
        problem(form, *args, **keywords)
    for word in words:
        assert word in str(caught.value)


def wide_form(count: int) -> CallForm:
    """The form of a spec of `count` tensors, each but the first there under a flag of its own, and a number."""
    names = [f"a{number}" for number in range(1, count)]
    return CallForm(
        KernelSpec(
            name="wide",
            version=1,
            axes=(Axis("n"), *(Axis(f"has_{name}", kind="flag", static=True, default=False) for name in names)),
            signature=(
                TensorArg("y", ("n",), "float32", role="output"),
                *(TensorArg(name, ("n",), "float32", when=lambda p, name=name: p[f"has_{name}"]) for name in names),
                ScalarArg("scale", default=lambda p: 1.0),
            ),
            implementations=(
                Implementation(
                    name="i",
                    requires={"host"},
                    backend="host",
                    tunables=(Tunable("tile", (1,)),),
                    build=lambda b: "",
                    defaults=({"tile": 1},),
                ),
            ),
            reference=lambda p, i: {},
        )
    )


WIDE = wide_form(16)
VALUES = {name: torch.zeros(4) for name in WIDE.names[:-1]} | {"scale": 2.0}


@settings(max_examples=60, deadline=None)
@given(chosen=st.sets(st.integers(1, 15)), by_position=st.integers(0, 17), data=st.data())
def test_seventeen_arguments_however_they_are_written(chosen, by_position, data):
    """By position among those that exist, the rest by keyword in any order: one normal form, and it checks."""
    flags = {f"has_a{number}": True for number in sorted(chosen)}
    existing = ["y", *(f"a{number}" for number in sorted(chosen)), "scale"]
    keywords = {name: VALUES[name] for name in existing[by_position:]} | flags
    shuffled = dict(data.draw(st.permutations(list(keywords.items()))))
    positional = tuple(VALUES[name] for name in existing[:by_position])
    place, values = WIDE.read(positional, shuffled)
    given, order = WIDE.meaning(place)
    slots, present = order.slots(values), order.present
    assert [name for name, value in zip(WIDE.names, slots, strict=True) if value is not None] == existing
    assert all(value is None or value is VALUES[name] for name, value in zip(WIDE.names, slots, strict=True))
    assert present.tensors == tuple(slot for slot, value in enumerate(slots[:-1]) if value is not None)
    assert [name for name, _, _ in given] == sorted(flags, key=lambda name: int(name[5:]))
    assert len(check(WIDE.spec, slots, given).arguments) == len(existing)


LAYOUTS = (
    {"cols": 8, "batch": 2, "s": 16},
    {"cols": 8, "batch": 2, "s": 9, "packed": True, "total": 12},
    {"cols": 8, "batch": 2, "page": 8, "table_pages": 3, "reduce": "window", "left": 9},
)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["plain", "packed", "paged"])
def test_a_call_of_every_layout_with_and_without_a_workspace(tuned, layout, split):
    tuned.reference = PAGES
    tuned.tune(layout, split=split)
    kernel = tunekit.load(PAGES, **tuned.places)
    spec, wanted = tuned.spec, tuned.spec.problem(layout)
    x = torch.randn(spec.signature[0].sizes(wanted))
    inputs = {"table": TABLE} if wanted.page else {"starts": STARTS} if wanted.packed else {}
    flags = {name: layout[name] for name in ("page", "packed", "reduce", "left") if name in layout}
    flags |= {"s": 9} if wanted.packed else {}
    expected = spec.reference(wanted, {"x": x, "scale": 0.5, **inputs})["y"]
    mine = torch.empty(2, 8)
    numbers = (9, 0.5) if wanted.reduce == "window" else (0.5,)
    for y in (
        kernel(x, **inputs, **flags),
        kernel(x, *inputs.values(), mine, *numbers, **flags),
        kernel(x, mine, y=None, **inputs, **flags) if not inputs else kernel(y=mine, x=x, **flags, **inputs),
    ):
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert y is mine and kernel.choice(x, **inputs, **flags).variant.tunables.split == split
    assert kernel.stats()["exact"] == 1


def test_threads_share_no_workspace(tuned, monkeypatch):
    """Each call allocates its own, on the current stream: calls that run at once don't meet in it."""
    tuned.reference = PAGES
    problem_of_all = {"cols": 8, "batch": 64, "s": 300}
    tuned.tune(problem_of_all, split=2)
    kernel = tunekit.load(PAGES, **tuned.places)
    inputs = [torch.randn(64, 300, 8) for _ in range(4)]
    wanted = [kernel(x) for x in inputs]
    errors = []

    def call(number):
        for _ in range(200):
            if not torch.equal(kernel(inputs[number]), wanted[number]):
                errors.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and kernel.stats()["calls"] >= 4 * 200 - 4


def test_an_argument_that_the_flags_leave_out_is_refused_after_a_good_call_too(tuned):
    """The key of a call holds all that was passed, also what its flags have no place for."""
    tuned.reference = PAGES
    tuned.tune({"cols": 8, "batch": 2, "s": 16}, split=1)
    kernel = tunekit.load(PAGES, **tuned.places)
    x = torch.randn(2, 16, 8)
    kernel(x=x, scale=1.0)
    with pytest.raises(UserError, match="takes no 'table'"):
        kernel(x=x, scale=1.0, table=TABLE)
    with pytest.raises(UserError, match="takes no 'keep'"):
        kernel(x=x, scale=1.0, keep=1)
    with pytest.raises(UserError, match="got 'scale' twice"):
        kernel(x, None, 1.0, scale=1.0)
    assert torch.equal(kernel(x, None, None, scale=1.0), kernel(x=x, scale=1.0, table=None))
