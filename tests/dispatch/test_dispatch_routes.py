"""Every way to write a call, natively as in Python: what is returned, what is refused and in which words."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import random
import sys
import threading
from types import SimpleNamespace

import numpy
import pytest
import torch
import tvm_ffi
from torch._subclasses.fake_tensor import FakeTensorMode

import tunekit
from tunekit.dispatch import kernel as module
from tunekit.errors import UserError


@pytest.fixture
def moments(tuned):
    """host_moments, tuned with and without its flag: native, and in Python."""
    tuned.reference = str(tuned.specs / "host_moments.py")
    for centred in (False, True):
        tuned.tune({"rows": 4, "cols": 32, "centred": centred}, block=16)
    return [tunekit.load(tuned.reference, native=native, **tuned.places) for native in (True, False)]


X = torch.randn(4, 32)


class Word(str):
    """A keyword that is no plain string."""


def some_call(chance: random.Random) -> tuple[list, dict]:
    """A call that may be right: positions, then keywords in any order, some of them wrong, repeated or unknown."""
    wrong = chance.random() < 0.3
    centred = chance.choice([False, True, None, *([1, "yes", [True]] * wrong)])
    values = {
        "x": chance.choice([X, *([X.numpy(), None] * wrong)]),
        "y": chance.choice([None, torch.full((4, 32), 7.0), *([torch.full((3, 32), 7.0)] * wrong)]),
        "mean": torch.full((4,), 7.0) if centred or wrong else None,
        "scale": chance.choice([None, 3, 3.0, numpy.float32(3), *([True, "3"] * wrong)]),
        "centred": centred,
        "rows": chance.choice([4, None, *([4.0, 5] * wrong)]),
    }
    positions = ["x", "y", *(["mean"] if centred is True else []), "scale"]
    count = chance.randint(0, len(positions)) if chance.random() < 0.9 else len(positions) + 1
    args = [values[name] for name in positions[:count]] + [None] * (count - len(positions))
    named = [name for name in values if name not in positions[:count]]
    named = chance.sample(named, chance.randint(0, len(named)))
    if count == 0 and "x" not in named and chance.random() < 0.9:
        named.append("x")
    if chance.random() < 0.05:
        named += chance.sample(positions, 1)
    keywords = {name: values[name] for name in named}
    if chance.random() < 0.05:
        keywords["z"] = 1
    if chance.random() < 0.2:  # names that are equal to those that were seen, and others
        keywords = {"".join(name): value for name, value in keywords.items()}
    if chance.random() < 0.1:
        keywords = {Word(name): value for name, value in keywords.items()}
    return args, keywords


def outcome(kernel, args: list, keywords: dict) -> tuple:
    """What a call does: the error with its words; or the values, and which of the arguments they are."""
    args, keywords = (copy.copy(given) for given in (args, keywords))
    outputs = [value for value in (*args, *keywords.values()) if isinstance(value, torch.Tensor) and value is not X]
    for output in outputs:
        output.fill_(7.0)
    try:
        result = kernel(*args, **keywords)
    except Exception as error:
        return type(error), str(error), [output.tolist() for output in outputs]
    several = result if isinstance(result, tuple) else (result,)
    given = [next((n for n, output in enumerate(outputs) if output is one), None) for one in several]
    return type(result), [type(one) for one in several], given, [one.tolist() for one in several]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_written_does_the_same_natively_and_in_python(moments, seed):
    """Each call three times: cold, then from its table, then after others have come between."""
    native, python = moments
    chance = random.Random(seed)
    calls = [some_call(chance) for _ in range(150)]
    outcomes = [[outcome(kernel, *call) for kernel in (python, native, native)] for call in calls]
    for call, outcomes_of_call in zip(calls, outcomes, strict=True):
        again = outcome(native, *call)
        assert outcomes_of_call == [again] * 3, call
    assert native.native and not python.native
    served = sum(not issubclass(outcomes_of_call[0][0], Exception) for outcomes_of_call in outcomes)
    assert served > 40 and native.stats()["calls"] >= 2 * served


def test_a_call_that_was_made_before_is_not_read_in_python_again(moments, monkeypatch):
    kernel, _ = moments
    y, mean, scale, flags = torch.empty(4, 32), torch.empty(4), 3.0, {"centred": False}
    calls = [
        lambda: kernel(X),
        lambda: kernel(X, None, 2.0),
        lambda: kernel(X, y=y),
        lambda: kernel(y=y, x=X),
        lambda: kernel(X, scale=scale),
        lambda: kernel(X, centred=False),
        lambda: kernel(X, y, mean, centred=True),
        lambda: kernel(centred=True, scale=scale, mean=mean, y=y, x=X),
        lambda: kernel(X, rows=4, cols=32),
        lambda: kernel(*(X, y), **flags),
        lambda: kernel(X, None, mean, centred=True),
    ]
    wanted = [call() for call in calls]

    def refused(*args, **keywords):
        raise AssertionError("read in Python")

    monkeypatch.setattr(kernel, "_call", refused, raising=True)
    for call, before in zip(calls, wanted, strict=True):
        torch.testing.assert_close(call(), before)
    assert kernel.stats()["calls"] == len(calls)
    with pytest.raises(AssertionError, match="read in Python"):
        kernel(X, centred=1)  # equal to a flag that was given, and none


def test_an_output_that_is_left_out_is_torch_s_own(moments):
    """Memory of torch's storage, which a `record_stream` reaches; as in Python. A subclass begets plain tensors."""
    for kernel in moments:
        for give in (X, torch.nn.Parameter(X), X.as_subclass(Labelled)):
            for args, keywords in (((), {}), ((None, 2), {}), ((), {"centred": False})):
                for _ in range(3):
                    y = kernel(give, *args, **keywords)
                    assert type(y) is torch.Tensor and not y.requires_grad
                    assert y.untyped_storage().resizable() and y.is_contiguous()
                    torch.testing.assert_close(y, 2.0 * X)


class Labelled(torch.Tensor):
    """A subclass that has memory of its own."""


def test_outputs_of_other_shapes_than_any_input_are_allocated_as_well(tuned):
    """Of one way of writing: its first output was like the input."""
    tuned.reference = f"{tuned.specs / 'host_pages.py'}:host_pages"
    tuned.tune({"cols": 8, "batch": 4, "s": 3}, split=1)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    for _ in range(3):
        for s in (3, 1, 5):
            x = torch.randn(4, s, 8)
            y = kernel(x, scale=2.0)
            torch.testing.assert_close(y, 2.0 * x.sum(1))
            assert y.untyped_storage().resizable()


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_a_call_while_torch_makes_fake_tensors_fails_and_spoils_no_later_one(moments, native):
    kernel = moments[not native]
    for keywords in ({}, {"centred": True}):
        with pytest.raises(UserError, match="'y' has no memory of its own"), FakeTensorMode():
            kernel(X, **keywords)
        for _ in range(2):
            y = kernel(X, **keywords)
            y = y[0] if keywords else y
            assert type(y) is torch.Tensor and y.stride() == (32, 1)
            torch.testing.assert_close(y, 2.0 * (X - X.mean(1, keepdim=True) if keywords else X))
        with pytest.raises(Exception, match="FakeTensor"), FakeTensorMode():
            kernel(X, **keywords)


def test_memory_that_is_not_there_is_torch_s_own_error(moments, monkeypatch):
    def full(like):
        raise torch.OutOfMemoryError("no memory")

    kernel, _ = moments
    monkeypatch.setattr(torch, "empty_like", full)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            kernel(X, centred=False)


def test_nothing_is_kept_of_a_call_and_nothing_is_let_go_twice(moments):
    kernel, _ = moments
    x, y, mean, scale = torch.randn(4, 32), torch.empty(4, 32), torch.empty(4), 3.5
    wrong, names = [1], {"".join(("cent", "red")): True, "".join(("sca", "le")): scale}

    def refuse(**keywords):
        with pytest.raises(UserError):
            kernel(x, y, **keywords)

    calls = [
        lambda: kernel(x, y, scale),
        lambda: kernel(x, scale=scale),
        lambda: kernel(x, y, mean, centred=True),
        lambda: kernel(x, y=y, mean=mean, **names),
        lambda: kernel(x, None, None, centred=True),
        lambda: refuse(centred=wrong),
        lambda: refuse(centred=1),
        lambda: refuse(z=wrong),
        lambda: refuse(y=y),
        lambda: refuse(scale="3"),
    ]
    for call in calls:
        call()
    routes = [*kernel.by_count, *(route for routes in kernel.by_names.values() for route in routes)]
    watched = [x, y, mean, scale, wrong, *names, kernel, *(route for route in routes if route is not None)]
    gc.collect()
    before = [sys.getrefcount(one) for one in watched]
    for _ in range(50):
        for call in calls:
            call()
    gc.collect()
    assert [sys.getrefcount(one) for one in watched] == before


def test_many_threads_write_calls_in_many_ways_while_routes_come_and_go(moments, tuned, monkeypatch):
    """`refresh` replaces each table, and past so many ways of writing all routes are forgotten, again and again."""
    kernel, _ = moments
    monkeypatch.setattr(module, "MAX_PLACES", 4)
    errors = []
    done = threading.Event()

    def call(seed):
        chance = random.Random(seed)
        x, y, mean = torch.randn(4, 32), torch.empty(4, 32), torch.empty(4)
        ways = [
            lambda: kernel(x),
            lambda: kernel(x, y=y),
            lambda: kernel(x=x, scale=2),
            lambda: kernel(x, y, centred=False),
            lambda: kernel(x, rows=4),
            lambda: kernel(x, y, mean, centred=True)[0] + mean[:, None] * 2,
        ]
        try:
            while not done.is_set():
                torch.testing.assert_close(chance.choice(ways)(), 2 * x)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        kernel.refresh()
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(kernel._tables) <= 4


def test_a_subclass_s_own_call_is_its_own_and_an_unmade_kernel_is_no_crash(moments):
    kernel, _ = moments

    class Louder(type(kernel)):
        def __call__(self, *args, **keywords):
            return "louder"

    class Same(type(kernel)):
        pass

    assert Louder.__new__(Louder)(X) == "louder"
    for kind in (type(kernel), Same):
        for keywords in ({}, {"centred": True}):
            with pytest.raises(AttributeError):
                kind.__new__(kind)(X, **keywords)


def test_inspect_says_how_a_kernel_is_called(moments):
    """As fault finders and frameworks ask it."""
    for kernel in moments:
        parameters = inspect.signature(kernel).parameters.values()
        assert [parameter.kind.description for parameter in parameters] == ["variadic positional", "variadic keyword"]


@pytest.mark.parametrize("foreign", [lambda t: t.numpy(), tvm_ffi.from_dlpack], ids=["numpy", "tvm_ffi"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_tensors_of_other_libraries_are_refused_cold_and_warm(moments, warm, foreign):
    """As inputs and as outputs: TVM-FFI would take them, but not on torch's stream."""
    for kernel in moments:
        x, y = torch.randn(4, 32), torch.full((4, 32), 7.0)
        for _ in range(2 * warm):
            kernel(x, y)
            kernel(x, y=y)
        y.fill_(7.0)
        for name, args, keywords in (
            ("x", (foreign(x), y), {}),
            ("y", (x, foreign(y)), {}),
            ("y", (x,), {"y": foreign(y)}),
            ("x", (foreign(x),), {}),
        ):
            words = rf"'{name}' is .*, not a torch.Tensor; pass torch.from_dlpack\({name}"
            with pytest.raises(UserError, match=words):
                kernel(*args, **keywords)
        assert (y == 7.0).all()


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_kernel_that_is_copied_or_pickled_says_what_to_do_instead(moments, take):
    for kernel in moments:
        with pytest.raises(UserError, match=r"not copied or pickled.*tunekit.load for host_moments"):
            take(kernel)


class Interrupted:
    """Ctrl-C, once, while Python hashes what this is."""

    armed = False

    def __hash__(self):
        if self.armed:
            type(self).armed = False
            raise KeyboardInterrupt
        return super().__hash__()


class InterruptedWord(Interrupted, str):
    pass


class InterruptedSize(Interrupted, int):
    pass


@pytest.mark.parametrize(
    "keywords", [{InterruptedWord("scale"): 2.0}, {"rows": InterruptedSize(4)}], ids=["a name", "an axis"]
)
def test_ctrl_c_while_a_route_is_looked_for_is_not_forgotten(moments, monkeypatch, keywords):
    (given,) = (one for pair in keywords.items() for one in pair if isinstance(one, Interrupted))
    for kernel in moments:
        kernel(X, scale=2.0)
        kernel(X, rows=4)
        with pytest.raises(KeyboardInterrupt):
            monkeypatch.setattr(type(given), "armed", True)
            kernel(X, **keywords)


def test_a_name_whose_hash_takes_the_routes_away_is_no_crash(moments):
    """Of a dict that nothing holds any more Python would read on."""
    kernel, _ = moments
    kernel(X, scale=2.0)
    others, nothing = [], {}

    class Thief(str):
        def __hash__(self):
            kernel._routes.by_names = kernel.by_names = nothing
            others[:] = [b"\xff" * size for size in range(30_000, 50_000, 100)]  # where its keys were
            return super().__hash__()

    names = {Thief("scale"): 2.0}
    for _ in range(4):
        kernel._routes.by_names = kernel.by_names = {(n,): [None] for n in range(1000)}
        torch.testing.assert_close(kernel(X, **names), 2.0 * X)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_an_input_that_the_output_is_like_may_be_none(tuned, native):
    """It exists for some sizes alone, and the way of writing is one."""
    tuned.reference = str(tuned.specs / "host_biased.py")
    for cols in (16, 32):
        tuned.tune({"rows": 4, "cols": cols}, block=8)
    kernel = tunekit.load(tuned.reference, native=native, **tuned.places)
    bias = torch.randn(4)
    for _ in range(3):
        torch.testing.assert_close(kernel(X, bias=bias), X.sum(1) + bias)
        torch.testing.assert_close(kernel(X[:, :16].contiguous(), bias=None), X[:, :16].sum(1))
        for wrong in ([1.0], "bias", 3.0):
            with pytest.raises(UserError, match="'bias' is"):
                kernel(X, bias=wrong)
    assert kernel.stats()["calls"] == 4


def test_calls_of_too_many_arguments_are_not_kept(moments):
    for kernel in moments:
        for count in range(5, 50):
            with pytest.raises(UserError, match=f"takes 3 arguments .*, not {count}"):
                kernel(*range(count))
        assert all(way[0] < 5 for way in kernel._form._writings)


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_what_explains_an_error_knows_where_it_was_raised(moments, monkeypatch, native):
    """As in Python: what was raised first is its cause, with its traceback."""

    def failing(*values):
        raise RuntimeError("first")

    def explain(place, values, error):
        raise UserError("second") from error

    kernel = moments[not native]
    monkeypatch.setattr(kernel, "_explain", explain)
    table = SimpleNamespace(function=failing, finish=None, native=(failing, None, torch.empty_like, torch.Tensor))
    kernel._routes.lay(1, table)
    with pytest.raises(UserError, match="second") as caught:
        kernel(X)
    cause = caught.value.__cause__
    assert str(cause) == "first" and cause.__traceback__ is not None
