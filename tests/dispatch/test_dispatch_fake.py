"""Where torch makes no memory: what a call leaves out never reaches a kernel as a null pointer."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tunekit
from tunekit.dispatch import kernel as module
from tunekit.errors import UserError


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["strict", "lenient"])
def fake(request):
    """torch's fake tensors: only made of others, or of tensors with memory too, as torch.export has them."""
    return FakeTensorMode(allow_non_fake_inputs=request.param)


@pytest.fixture
def pages(tuned):
    """host_pages with a kernel that takes scratch memory."""
    tuned.reference = f"{tuned.specs / 'host_pages.py'}:host_pages"
    tuned.tune({"cols": 8, "batch": 4, "s": 3}, split=2)
    return tuned


X = torch.randn(4, 3, 8)


def test_scratch_memory_that_is_fake_is_refused_and_spoils_no_later_call(pages, native, fake):
    kernel = tunekit.load(pages.reference, native=native, **pages.places)
    y = torch.empty(4, 8)
    for warm in (False, True):
        for _ in range(3 * warm):
            torch.testing.assert_close(kernel(X, y, scale=2.0), 2.0 * X.sum(1))
        y.fill_(7.0)
        with pytest.raises((UserError, AssertionError), match=r"'workspace' has no memory|FakeTensor"), fake:
            kernel(X, y, scale=2.0)
        assert (y == 7.0).all()
    torch.testing.assert_close(kernel(X, y, scale=2.0), 2.0 * X.sum(1))


def test_scratch_memory_of_a_bound_function_is_refused_where_it_is_fake(pages, native, fake):
    kernel = tunekit.load(pages.reference, native=native, **pages.places)
    problem = {"cols": 8, "batch": 4, "s": 3}
    with pytest.raises(UserError, match=r"'workspace' has no memory of its own"), fake:
        kernel.bind(problem, device=-1)
    y = torch.empty(4, 8)
    kernel.bind(problem, device=-1)(X, y, 2.0)
    torch.testing.assert_close(y, 2.0 * X.sum(1))


def test_scratch_memory_that_there_is_not_is_torch_s_own_error(pages, native, monkeypatch):
    """Not TVM-FFI's MemoryError: a server waits for torch.OutOfMemoryError, which is a RuntimeError."""
    kernel = tunekit.load(pages.reference, native=native, **pages.places)
    monkeypatch.setattr(module, "workspace", lambda *problem: 2**55)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="allocate"):
            kernel(X, torch.empty(4, 8), scale=2.0)


def test_an_output_of_one_element_is_refused_where_it_is_fake(tuned, native, fake):
    """Such a one is made otherwise than others are."""
    tuned.reference = str(tuned.specs / "host_moments.py")
    tuned.tune({"rows": 1, "cols": 32, "centred": True}, block=16)
    kernel = tunekit.load(tuned.reference, native=native, **tuned.places)
    x, y = torch.randn(1, 32), torch.empty(1, 32)
    for _ in range(2):
        assert kernel(x, y, centred=True)[1].stride() == (1,)
    for _ in range(2):
        with pytest.raises((UserError, AssertionError), match=r"'mean' has no memory|FakeTensor"), fake:
            kernel(x, y, centred=True)
    torch.testing.assert_close(kernel(x, y, centred=True)[1], x.mean(1))
