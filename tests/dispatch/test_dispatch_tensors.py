"""What kinds of tensors a served kernel takes: each is served rightly, against the oracle, or refused in a sentence."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tunekit
from tests.dispatch.conftest import HOST_SCALE, SPECS
from tunekit.dispatch.calls import CallForm
from tunekit.dispatch.checks import ALIGNMENT_BYTES, LARGEST_SIZE, check
from tunekit.dispatch.kinds import refusal
from tunekit.errors import UserError
from tunekit.spec import load_spec

ROOT = Path(__file__).resolve().parents[2]
ROWS, COLS = 64, 64
BASE = torch.randn(4 * ROWS * COLS)


class Labelled(torch.Tensor):
    """A subclass that has memory of its own."""


class Wrapper(torch.Tensor):
    """A subclass that stands for another tensor, as DTensor does: it has a shape, and no memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"nothing may be computed with this: {function}")


def freed() -> torch.Tensor:
    tensor = torch.ones(ROWS, COLS)
    tensor.untyped_storage().resize_(0)
    return tensor


LAYOUTS = {
    "plain": (lambda: BASE[: ROWS * COLS].view(ROWS, COLS), None),
    "an offset that keeps the alignment": (lambda: BASE[4 : ROWS * COLS + 4].view(ROWS, COLS), None),
    "rows of a larger tensor": (lambda: BASE.view(4 * ROWS, COLS)[ROWS : 2 * ROWS], None),
    "strides of a dim of one": (lambda: BASE.as_strided((1, COLS), (3, 1)), None),
    "transposed": (lambda: BASE[: ROWS * COLS].view(COLS, ROWS).t(), "'x' is not contiguous"),
    "padded": (lambda: BASE.view(2 * ROWS, 2 * COLS)[:ROWS, :COLS], "'x' is not contiguous"),
    "inner stride 2": (lambda: BASE.view(2 * ROWS, 2 * COLS)[:ROWS, ::2], "'x' is not contiguous"),
    "expanded": (lambda: BASE[:COLS].expand(ROWS, COLS), "'x' is not contiguous"),
    "misaligned": (lambda: BASE[1 : ROWS * COLS + 1].view(ROWS, COLS), "'x' starts 4 bytes past a 16-byte boundary"),
    "float64": (lambda: torch.randn(ROWS, COLS).double(), "dtype is float64 by 'x'"),
}


def serve_or_refuse(kernel, x: torch.Tensor, words: str | None) -> None:
    """One call: its result is the oracle's, or it is refused in these words and nothing is written."""
    y = torch.full(x.shape, 7.0)
    if words is None:
        spec = load_spec(HOST_SCALE)
        wanted = spec.reference(spec.problem({"rows": x.shape[0]}), {"x": x})["y"]
        assert kernel(x, y) is y
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kernel(x), y, rtol=0, atol=0)
    else:
        with pytest.raises(UserError) as caught:
            kernel(x, y)
        assert words in str(caught.value)
        assert (y == 7.0).all()


def run_python(code: str, tuned, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A new process that serves from the same cache."""
    env = {**os.environ, "TUNEKIT_CACHE": str(tuned.root), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
def test_every_layout_is_right_or_refused_in_either_order(tuned, backwards):
    """Case 15, in one process: what came before changes no answer."""
    tuned.tune({"rows": ROWS}, unroll=4, delay_us=0)
    kernel = tunekit.load(HOST_SCALE, **tuned.places)
    names = list(LAYOUTS)[:: -1 if backwards else 1]
    for name in (*names, *names):
        make, words = LAYOUTS[name]
        serve_or_refuse(kernel, make(), words)


@pytest.mark.slow
def test_every_layout_is_right_or_refused_in_another_process(tuned):
    """Case 15, across two processes that share what is stored: the second meets the refused ones first."""
    tuned.tune({"rows": ROWS}, unroll=4, delay_us=0)
    serve_or_refuse(tunekit.load(HOST_SCALE, **tuned.places), *(LAYOUTS["plain"][0](), None))
    code = (
        "import tunekit; from tests.dispatch.test_dispatch_tensors import *\n"
        "kernel = tunekit.load(HOST_SCALE)\n"
        "for name in reversed(LAYOUTS): serve_or_refuse(kernel, LAYOUTS[name][0](), LAYOUTS[name][1])\n"
        "print(kernel.stats()['exact'])"
    )
    done = run_python(code, tuned)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_dtypes_of_one_shape_are_two_problems(tuned, dtype):
    """Case 15, dtype: called one after the other, in both orders, each is computed in its own."""
    spec = load_spec(str(SPECS / "host_attention.py"))
    kernel = tunekit.load(str(SPECS / "host_attention.py"), **tuned.places)
    q, k, v = (torch.randn(2, 24, heads, 64) for heads in (8, 2, 2))
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    for kind in (dtype, other, dtype):
        inputs = {"q": q.to(kind), "k": k.to(kind), "v": v.to(kind)}
        problem = spec.problem(
            {"batch": 2, "heads": 8, "kv_heads": 2, "t": 24, "s_k": 24, "head_dim": 64, "dtype": str(kind)[6:]}
        )
        o = kernel(**inputs)
        wanted = spec.reference(problem, {**inputs, "scale": 64**-0.5})["o"]
        assert o.dtype is kind
        assert (o.double() - wanted).norm() / wanted.norm() <= spec.tolerance_of("o").relative_norm


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nn.Parameter(x),
        lambda x: torch.nn.Buffer(x),
        lambda x: x.clone().requires_grad_(),
        lambda x: x.as_subclass(Labelled),
        lambda x: torch.inference_mode()(x.clone)(),
    ],
    ids=["Parameter", "Buffer", "requires grad", "subclass with memory", "inference tensor"],
)
def test_what_has_memory_is_served_as_what_lies_there(tuned, make):
    """The outputs are plain tensors that no gradient flows through."""
    tuned.tune({"rows": ROWS}, unroll=4, delay_us=0)
    kernel = tunekit.load(HOST_SCALE, **tuned.places)
    x = torch.randn(ROWS, COLS)
    for given in (make(x), x, make(x)):
        y = kernel(given)
        assert type(y) is torch.Tensor and not y.requires_grad
        torch.testing.assert_close(y, kernel(x))


def under(transform, x):
    """What a function sees of `x` under one of torch.func's transforms."""
    seen = []
    transform(lambda t: (seen.append(refusal("x", t)), t.sum())[1])(x)
    return seen[0]


X = torch.randn(ROWS, COLS)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Wrapper(X), "'x' has no memory of its own (a Wrapper stands for tensors that lie elsewhere)"),
        (lambda: FakeTensorMode().from_tensor(X), "'x' has no memory of its own (a FakeTensor stands for"),
        (freed, "'x' has no memory of its own (it is under a torch.func transform, all zeros by symbol, or"),
        (lambda: torch._efficientzerotensor((ROWS, COLS)), "'x' has no memory of its own"),
        (lambda: torch._neg_view(X), "'x' is a negative view, whose memory holds other values; pass x.resolve_neg()"),
        (lambda: torch.randn(4, dtype=torch.complex64).conj(), "'x' is a conjugate view"),
        (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "'x' is quantized (torch.qint8)"),
        (lambda: X.to_sparse(), "'x' is a torch.sparse_coo tensor on cpu"),
        (lambda: X.to_sparse_csr(), "'x' is a torch.sparse_csr tensor on cpu"),
        (lambda: X.to_mkldnn(), "'x' is a torch._mkldnn tensor on cpu"),
        (lambda: X.to("meta"), "'x' is a torch.strided tensor on meta"),
        (lambda: torch.nested.nested_tensor([X, X[:3]]), "'x' is a nested tensor"),
        (lambda: torch.nested.nested_tensor([X, X[:3]], layout=torch.jagged), "'x' is a nested tensor"),
        (lambda: X.numpy(), "'x' is ndarray, not a torch.Tensor"),
        (lambda: [1.0], "'x' is list, not a torch.Tensor"),
    ],
    ids=[
        "wrapper subclass", "FakeTensor", "freed storage", "zero tensor", "negative view", "conjugate view",
        "quantized", "sparse coo", "sparse csr", "mkldnn", "meta", "nested", "jagged", "numpy", "list",
    ],
)  # fmt: skip
def test_what_lies_elsewhere_or_otherwise_is_refused(tuned, make, words):
    """Each names the argument and the way out; a plain tensor after it is served."""
    tuned.tune({"rows": ROWS}, unroll=4, delay_us=0)
    kernel = tunekit.load(HOST_SCALE, **tuned.places)
    with pytest.raises(UserError) as caught:
        kernel(make())
    assert words in str(caught.value)
    assert kernel(X).shape == X.shape


WARM = """
import sys, warnings
warnings.simplefilter("ignore")
import tunekit
from tests.dispatch.test_dispatch_tensors import *
kernel = tunekit.load(HOST_SCALE, native=sys.argv[1] == "native")
for _ in range(2): kernel(X)
calls = kernel.stats()["calls"]
kinds = {
    "wrapper": lambda: kernel(Wrapper(X)),
    "fake": lambda: kernel(FakeTensorMode().from_tensor(X)),
    "freed": lambda: kernel(freed()),
    "zeros": lambda: kernel(torch._efficientzerotensor((ROWS, COLS))),
    "functionalized": lambda: torch.func.functionalize(kernel)(X),
    "output": lambda: kernel(X, Wrapper(X)),
}
for name, call in kinds.items():
    try:
        call()
    except UserError as error:
        assert "has no memory of its own" in str(error), error
    else:
        raise SystemExit(f"{name} was served")
assert kernel.stats()["calls"] == calls
print("refused")
"""


@pytest.mark.parametrize("way", ["native", pytest.param("python", marks=pytest.mark.slow)])
def test_what_has_no_memory_is_refused_by_a_warm_key_too(tuned, way):
    """Such a tensor has the shape and dtype of one that was served, and a null pointer: it must not find its entry.

    In a process of its own, which would die of it.
    """
    tuned.tune({"rows": ROWS}, unroll=4, delay_us=0)
    done = run_python(WARM, tuned, way)
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr


def test_no_public_view_is_negative_and_plain():
    """The hot path can't see that a view is negative: those that torch gives out never lie as it wants them."""
    for dtype in (torch.complex64, torch.complex128):
        for shape in ((1,), (8,), (4, 4)):
            for offset in range(4):
                z = torch.zeros(offset + 16, dtype=dtype)[offset:][: torch.Size(shape).numel()].view(shape)
                view = z.conj().imag
                assert view.is_neg()
                assert not view.is_contiguous() or view.data_ptr() % ALIGNMENT_BYTES


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_a_tensor_under_a_transform_is_refused(transform):
    """Their shapes are not those of any memory; the torch op is what traces."""
    x = torch.randn(ROWS, COLS) if transform is not torch.vmap else torch.randn(2, ROWS, COLS)
    assert "'x' has no memory of its own (it is under a torch.func transform" in under(transform, x)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_size_of_zero_names_the_tensor_and_the_axis(tuned, backwards):
    """Nothing to compute is refused, before and after a call that is served."""
    tuned.tune({"rows": ROWS}, unroll=4, delay_us=0)
    kernel = tunekit.load(HOST_SCALE, **tuned.places)
    if backwards:
        kernel(X)
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            kernel(X[:0])
        assert "'x' dim 0 makes rows 0: 0 is below the minimum 1. There is nothing to compute" in str(caught.value)
    assert kernel(X).shape == X.shape


def test_a_size_of_zero_is_taken_where_the_spec_allows_it():
    """An axis whose minimum is 0 takes an empty tensor: it has no memory, and needs none."""
    spec = load_spec(str(SPECS / "host_moments.py"))
    axes = tuple(dataclasses.replace(axis, minimum=0) if axis.name == "rows" else axis for axis in spec.axes)
    lenient = dataclasses.replace(spec, axes=axes)
    slots, given = CallForm(lenient).arrange((torch.empty(0, 32),), {})[:2]
    assert check(lenient, slots, given).problem.rows == 0


def test_more_than_int32_elements_are_no_reason_to_refuse():
    """Strides are 64-bit: only a single size has a limit, and only on a GPU. Nothing is touched here."""
    spec = load_spec("fmha")
    tokens = 2**24 + 128
    q, k = torch.zeros(1, 1, 1, 128).bfloat16(), torch.empty(1, tokens, 1, 128, dtype=torch.bfloat16)
    assert k.numel() > LARGEST_SIZE
    slots, given = CallForm(spec).arrange((q, k, k), {})[:2]
    assert check(spec, slots, given).problem.s_k == tokens
