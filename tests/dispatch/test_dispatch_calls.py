"""Calls: one normal form, problems from tensors, and refusals that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tunekit.dispatch.calls import CallForm
from tunekit.dispatch.checks import check
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.spec import load_spec

SPECS = Path(__file__).parent.parent / "specs"


@pytest.fixture
def scale() -> CallForm:
    return CallForm(load_spec(f"{SPECS / 'host_scale.py'}:host_scale"))


@pytest.fixture
def moments() -> CallForm:
    return CallForm(load_spec(str(SPECS / "host_moments.py")))


def problem(form: CallForm, *args, **keywords) -> Values:
    slots, given = form.arrange(args, keywords)
    return check(form.spec, slots, given).problem


def test_every_way_to_write_a_call_has_one_form(scale, moments):
    """Case 21: by position, keyword and shuffled keywords: the same form, and so the same key."""
    x, y = torch.ones(4, 16), torch.empty(4, 16)
    forms = [
        scale.arrange((x, y, 0.5), {}),
        scale.arrange((x,), {"y": y, "scale": 0.5}),
        scale.arrange((), {"scale": 0.5, "y": y, "x": x}),
        scale.arrange((), {"x": x, "y": y, "scale": 0.5}),
    ]
    assert all(form == forms[0] for form in forms)
    flags = [
        moments.arrange((x,), {"centred": True, "scale": 1.0}),
        moments.arrange((), {"scale": 1.0, "centred": True, "x": x}),
    ]
    assert flags[0] == flags[1]
    assert flags[0][:2] != moments.arrange((x,), {"scale": 1.0})[:2]


def test_positions_skip_the_arguments_that_a_flag_leaves_out(moments):
    x, y, mean = torch.ones(4, 16), torch.empty(4, 16), torch.empty(4)
    assert moments.arrange((x, y, 3.0), {})[0] == (x, y, None, 3.0)
    assert moments.arrange((x, y, mean, 3.0), {"centred": True})[0] == (x, y, mean, 3.0)


def test_the_problem_comes_from_shapes_dtypes_keywords_and_defaults(scale, moments):
    assert problem(scale, torch.ones(5, 128)) == Values(rows=5, cols=128, dtype="float32")
    assert problem(moments, torch.ones(5, 8), centred=True) == Values(rows=5, cols=8, centred=True)
    assert problem(moments, torch.ones(5, 8)).centred is False


@pytest.mark.parametrize(
    ("args", "keywords", "words"),
    [
        ((torch.ones(4, 16), torch.ones(5, 16)), {}, ["'y' dim 0 (rows) is 5", "rows is 4 by 'x' dim 0"]),
        ((torch.ones(4, 16),), {"rows": 6}, ["'x' dim 0 (rows) is 4", "rows is 6 by the keyword rows"]),
        ((torch.ones(4, 16, 2),), {}, ["'x' has 3 dims (4, 16, 2)", "[rows, cols]"]),
        ((torch.ones(4, 17),), {}, ["cols", "17 is not allowed", "16, 32"]),
        ((torch.ones(0, 16),), {}, ["rows", "0 is below the minimum 1"]),
        ((torch.ones(4, 16).half(),), {}, ["float16 is not allowed"]),
        ((torch.ones(4, 16), torch.ones(4, 16).double()), {}, ["'y' (dtype) is float64", "float32 by 'x'"]),
        ((), {}, ["needs its input 'x'"]),
        ((torch.ones(4, 16), None, 1.0, 2.0), {}, ["takes 3 arguments (x, y, scale), not 4"]),
        ((torch.ones(4, 16),), {"z": 1}, ["no argument 'z'", "x, y, scale, rows, cols, dtype"]),
        ((torch.ones(4, 16),), {"x": torch.ones(4, 16)}, ["'x' twice"]),
        (([1.0, 2.0],), {}, ["'x' is list, not a torch.Tensor"]),
        ((torch.ones(4, 16),), {"scale": "big"}, ["'scale' is str", "float or int"]),
        ((torch.ones(4, 16),), {"scale": torch.tensor(1.0)}, ["'scale' is Tensor"]),
        ((torch.ones(4, 16),), {"scale": True}, ["'scale' is bool"]),
        ((torch.ones(4, 16), torch.ones(4, 16, device="meta")), {}, ["'y' is a torch.strided tensor on meta"]),
        ((torch.ones(4, 16).to_sparse(),), {}, ["'x' is a torch.sparse_coo tensor on cpu"]),
    ],
)  # fmt: skip
def test_a_wrong_call_names_argument_axis_and_sizes(scale, args, keywords, words):
    with pytest.raises(UserError) as caught:
        problem(scale, *args, **keywords)
    for word in words:
        assert word in str(caught.value)


def test_an_argument_that_the_flags_leave_out_is_refused(moments):
    with pytest.raises(UserError, match=r"takes no 'mean' for rows=4 cols=16 centred=False"):
        problem(moments, torch.ones(4, 16), mean=torch.ones(4))


BASE = torch.randn(4096)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (BASE[: 64 * 64].view(64, 64).t(), ["not contiguous", "(1, 64)", "x.contiguous()"]),
        (BASE[: 4 * 128].view(4, 128)[:, :64], ["not contiguous", "(128, 1)"]),
        (BASE[: 4 * 128].view(4, 128)[:, ::2], ["not contiguous", "(128, 2)"]),
        (BASE[:64].expand(4, 64), ["not contiguous", "(0, 1)"]),
        (BASE[1 : 4 * 64 + 1].view(4, 64), ["starts 4 bytes past a 16-byte boundary", "offset 1", "x.clone()"]),
    ],
    ids=["transposed", "padded", "inner stride 2", "expanded", "misaligned"],
)
def test_a_layout_that_no_artifact_takes_is_refused(scale, x, words):
    """Cases 15 and 25: strides and alignment come from the tensor itself; what doesn't fit is refused."""
    with pytest.raises(UserError) as caught:
        problem(scale, x)
    for word in words:
        assert word in str(caught.value)


def test_an_offset_that_keeps_the_alignment_is_served(scale):
    assert problem(scale, BASE[4 : 4 * 64 + 4].view(4, 64)).rows == 4
