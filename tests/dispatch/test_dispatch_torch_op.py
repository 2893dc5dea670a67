"""``tunekit.torch_op`` on the CPU: torch's own checks of an operator, and compiled graphs against eager calls."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tunekit
from tests.dispatch.conftest import HOST_SCALE, SPECS, Tuned
from tunekit.errors import NoKernelError, UserError
from tunekit.spec import TensorArg, load_spec

MOMENTS = str(SPECS / "host_moments.py")
ATTENTION = str(SPECS / "host_attention.py")
IN_PLACE = f"{SPECS / 'host_measure.py'}:host_in_place"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Tuned:
    """One cache for the module: a process has one operator of each spec, which serves from where it was loaded."""
    made = Tuned(tmp_path_factory.mktemp("cache"))
    made.tune({"rows": 64}, unroll=4, delay_us=0)
    made.reference = MOMENTS
    for centred in (False, True):
        made.tune({"rows": 4, "cols": 32, "centred": centred}, block=16)
    made.reference = IN_PLACE
    made.tune({"rows": 16})
    return made


@pytest.fixture(scope="module")
def op(cache):
    """The operator of a spec, by reference."""
    return lambda reference: tunekit.torch_op(reference, **cache.places)


@pytest.fixture
def graphs():
    """A backend that counts the graphs it is given, each of which must be whole."""
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    backend.seen = seen
    yield backend
    torch._dynamo.reset()


def attention_inputs(batch: int, tokens: int, heads: int = 8, kv_heads: int = 2):
    generator = torch.Generator().manual_seed(batch)
    return [
        torch.randn(batch, tokens, count, 64, generator=generator).bfloat16() for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize(
    ("reference", "inputs", "axes"),
    [
        (HOST_SCALE, {"x": (60, 64)}, {}),
        (HOST_SCALE, {"x": (60, 64)}, {"scale": 2.0, "rows": 60}),
        (MOMENTS, {"x": (4, 32)}, {"centred": True}),
        (IN_PLACE, {"x": (16, 64), "acc": (16, 64)}, {}),
    ],
    ids=["plain", "number and axis", "two outputs", "in place"],
)
def test_torch_finds_nothing_wrong_with_an_operator(op, reference, inputs, axes):
    """Schema, aliasing, autograd registration, fake against real, and compiled with dynamic sizes."""
    tensors = {name: torch.randn(shape) for name, shape in inputs.items()}
    torch.library.opcheck(op(reference).op, (), {**tensors, **axes})


def test_torch_finds_nothing_wrong_with_attention(op):
    """The attention signature: twelve optional tensors and every axis, served by torch's functions."""
    q, k, v = attention_inputs(3, 20)
    torch.library.opcheck(op(ATTENTION).op, (q, k, v), {"mask": "causal"})
    torch.library.opcheck(op(ATTENTION).op, (q, k), {"kv_shared": True})


def test_the_operator_computes_what_the_kernel_does(op):
    """Every way to write the call, one output and two, against the kernel itself."""
    scale, moments = op(HOST_SCALE), op(MOMENTS)
    x = torch.randn(4, 64)
    for result in (scale(x, None, 3.0), scale(x, scale=3.0), scale(scale=3, x=x)):
        torch.testing.assert_close(result, scale.kernel(x, scale=3.0))
    x = torch.randn(4, 32)
    y, mean = moments(x, None, None, 3.0, centred=True)
    wanted_y, wanted_mean = moments.kernel(x, scale=3.0, centred=True)
    torch.testing.assert_close((y, mean), (wanted_y, wanted_mean))
    torch.testing.assert_close(moments(x, None, 3.0), moments.kernel(x, scale=3.0))


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_compiled_call_is_one_graph_and_right(op, graphs, dynamic):
    """`fullgraph` allows no break; with dynamic sizes one graph serves every batch."""
    moments = op(MOMENTS)

    def step(x, scale):
        y, mean = moments(x * 2, None, None, scale, centred=True)
        return y + mean[:, None]

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=graphs)
    sizes = (4, 7, 33, 5) if dynamic else (4,)
    for rows in sizes:
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x, 3.0), step(x, 3.0))
    assert len(graphs.seen) == 1
    calls = [node for node in graphs.seen[0].graph.nodes if node.target is torch.ops.tunekit.host_moments.default]
    assert len(calls) == 1


def test_compiled_attention_takes_every_batch_with_one_graph(op, graphs):
    attention = op(ATTENTION)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, mask="causal") * 2, fullgraph=True, dynamic=True, backend=graphs
    )
    for batch, tokens in ((3, 20), (5, 17), (7, 40)):
        q, k, v = attention_inputs(batch, tokens)
        torch.testing.assert_close(compiled(q, k, v), attention.kernel(q, k, v, mask="causal") * 2)
    assert len(graphs.seen) == 1


def test_an_in_place_argument_is_written_in_a_compiled_graph_too(op):
    add = op(IN_PLACE)
    x, first, second = torch.randn(16, 64), torch.zeros(16, 64), torch.zeros(16, 64)
    index = torch.compile(lambda x, acc: add(x, acc) + 1, fullgraph=True, backend="aot_eager")(x, first)
    torch.testing.assert_close(index - 1, add(x, second))
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, x)


@pytest.mark.slow
def test_inductor_compiles_around_the_operator(op):
    """The default compiler: its own kernels before and after, in the layout that the kernel takes."""
    scale = op(HOST_SCALE)

    def step(x):
        return scale(x.sin().t().contiguous() + 1).cos()

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for rows in (30, 50):
        x = torch.randn(64, rows)
        torch.testing.assert_close(compiled(x), step(x))


FMHA_FLAGS = {
    "partial": ({"normalize": False}, ["o", "lse", "row_max"]),
    "lse": ({"return_lse": True}, ["o", "lse"]),
    "shared v": ({"kv_shared": True, "head_dim_v": 64}, ["o"]),
    "lengths": ({"has_lengths": True, "has_sink": True}, ["o"]),
    "window": ({"mask": "window", "window_left": 20}, ["o"]),
    "two sources": ({"sources": 2, "s_k2": 9}, ["o"]),
    "gather": ({"gather": True, "top_k": 16, "normalize": False}, ["o", "lse", "row_max"]),
    "paged": ({"page": 64, "has_lengths": True, "return_lse": True}, ["o", "lse"]),
    "packed": ({"varlen": True, "return_lse": True}, ["o", "lse"]),
    "packed, paged": ({"varlen": True, "page": 64, "has_lengths": True, "normalize": False}, ["o", "lse", "row_max"]),
}


@pytest.mark.parametrize(("flags", "names"), FMHA_FLAGS.values(), ids=list(FMHA_FLAGS))
def test_the_fake_outputs_are_those_of_the_signature(op, flags, names):
    """Every layout of the attention spec, traced with sizes as symbols: shapes and dtypes as the spec has them.

    No kernel here can run most of these: tracing needs none.
    """
    spec = load_spec(ATTENTION)
    problem = spec.problem({"batch": 3, "heads": 8, "kv_heads": 4, "t": 5, "s_k": 130, "head_dim": 128, **flags})
    existing = [arg for arg in spec.arguments(problem) if isinstance(arg, TensorArg)]
    tensors = {
        arg.name: torch.zeros(arg.sizes(problem), dtype=getattr(torch, arg.dtype_of(problem)))
        for arg in existing
        if arg.role != "output"
    }
    given = {name: problem[name] for name in flags}
    if problem.varlen or problem.page:
        given |= {"t": problem.t, "s_k": problem.s_k}
    operator = op(ATTENTION).op
    traced = make_fx(lambda tensors: operator(**tensors, **given), tracing_mode="symbolic")(tensors)
    (call,) = (node for node in traced.graph.nodes if node.target is operator)
    outputs = call.meta["val"]
    wanted = [arg for arg in existing if arg.role == "output"]
    assert [arg.name for arg in wanted] == names
    assert [output.dtype for output in outputs] == [getattr(torch, arg.dtype_of(problem)) for arg in wanted]
    for output, arg in zip(outputs, wanted, strict=True):
        assert any(isinstance(size, torch.SymInt) for size in output.shape)
        assert tuple(int(size) for size in output.shape) == arg.sizes(problem)


def test_tracing_fixes_no_run_time_size(op):
    """Tracing guards on the flags' predicates and that tensors agree, not on the sizes that it saw."""
    q, k, v = attention_inputs(6, 17)
    traced = make_fx(op(ATTENTION).op, tracing_mode="symbolic")(q, k, v)
    symbols = {str(size) for name in "qk" for size in _traced(traced, name).shape[:2]}
    assert len(symbols) == 2 and all(symbol.startswith("s") for symbol in symbols)
    fixed = {str(symbol) for symbol, value in traced.shape_env.replacements.items() if value.is_number}
    assert not fixed & symbols


def _traced(graph, name):
    """The fake tensor of an input of a traced graph, by its place."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return inputs["qkv".index(name)].meta["val"]


def test_autocast_passes_the_operator_by(op):
    """Under autocast the outputs keep the inputs' dtype, and nothing is cast on the way in."""
    x = torch.randn(8, 64)
    scale = op(HOST_SCALE)
    plain = scale(x)
    q, k, v = attention_inputs(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = scale(x)
        compiled = torch.compile(lambda x: scale(x), fullgraph=True, backend="aot_eager")(x)
        assert (x @ x.t()).dtype is torch.bfloat16
    assert cast.dtype is compiled.dtype is torch.float32
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.float16):
        assert op(ATTENTION)(q, k, v).dtype is torch.bfloat16


def test_a_gradient_is_refused_and_not_dropped(op):
    """Backward, forward mode and torch.func alike; without grad mode a Parameter is an input like any other."""
    scale = op(HOST_SCALE)
    weight = torch.nn.Parameter(torch.randn(8, 64))
    words = r"'x' asks for a gradient, and tunekit::host_scale computes forward only"
    with pytest.raises(UserError, match=words):
        scale(weight)
    with pytest.raises(UserError, match=words):
        torch.func.jvp(scale, (torch.randn(8, 64),), (torch.randn(8, 64),))
    with pytest.raises(UserError, match=words):
        torch.func.grad(lambda x: scale(x).sum())(torch.randn(8, 64))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="asks for a gradient"):
        torch.compile(lambda x: scale(x), fullgraph=True, backend="aot_eager")(weight)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            output = scale(weight)
        assert not output.requires_grad
        torch.testing.assert_close(output, scale.kernel(weight.detach()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda op, x: op(x, torch.empty_like(x)), "allocates its outputs: leave out 'y'"),
        (lambda op, x: op(x, y=torch.empty_like(x)), "allocates its outputs: leave out 'y'"),
        (lambda op, x: op(x, x=x), "got 'x' twice"),
        (lambda op, x: op(x, None, None, 1.0, 2.0), r"takes 3 arguments \(x, y, scale\), not 5"),
        (lambda op, x: op(x.t()), "'x' is not contiguous"),
        (lambda op, x: op(x, factor=2.0), "has no argument 'factor'"),
    ],
)
def test_a_wrong_call_is_refused_as_the_kernel_would(op, call, words):
    with pytest.raises(UserError, match=words):
        call(op(MOMENTS), torch.randn(4, 32))


def test_what_no_kernel_serves_is_no_kernel_error_through_the_operator(op):
    with pytest.raises(NoKernelError, match="the block must divide cols"):
        op(MOMENTS)(torch.randn(4, 25))


def test_a_mismatch_shows_while_tracing(op):
    """Fake tensors are read as real ones are: the message names the tensors, before anything runs."""
    attention = op(ATTENTION)
    q, k, _ = attention_inputs(3, 20)
    _, _, v = attention_inputs(4, 20)
    with pytest.raises(Exception, match=r"'v' dim 0 \(batch\) is 4, but batch is 3 by 'q' dim 0"):
        torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="eager")(q, k, v)


def test_a_process_has_one_operator_of_a_name(op, cache, tmp_path):
    """Asked for again it is the same; with other options, or from another file, it is refused."""
    first = op(HOST_SCALE)
    assert op(HOST_SCALE) is first and torch.ops.tunekit.host_scale.default is first.op
    with pytest.raises(UserError, match=r"host_scale is registered from .* and a process has one: .* strict=True"):
        tunekit.torch_op(HOST_SCALE, strict=True, **cache.places)
    copy = tmp_path / "copy.py"
    copy.write_text((SPECS / "host_moments.py").read_text())
    op(MOMENTS)
    with pytest.raises(UserError, match=r"can't be had from .*copy\.py"):
        tunekit.torch_op(copy, **cache.places)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("native", [True, False])
def test_jit_trace_takes_the_operator_and_is_refused_by_a_kernel(op, cache, native):
    """A trace would hold the allocation of the kernel's outputs alone."""
    moments, x = op(MOMENTS), torch.randn(4, 32)
    traced = torch.jit.trace(lambda x: moments(x), (x,))
    other = torch.randn(4, 32)
    torch.testing.assert_close(traced(other), moments(other))
    kernel = tunekit.load(MOMENTS, native=native, **cache.places)
    with pytest.raises(UserError, match=r"torch\.jit\.trace would record nothing of host_moments"):
        torch.jit.trace(lambda x: kernel(x), (x,))
    torch.testing.assert_close(kernel(other), moments(other))
    if not native:
        with pytest.raises(UserError, match="would record nothing"):
            torch.jit.trace(lambda x: kernel(x), (x,))
