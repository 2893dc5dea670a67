"""What torch brings to a served kernel on the GPU: operator, compiled graphs, autocast, layouts, huge tensors."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tunekit
from tunekit.arch import parse_arch
from tunekit.dispatch.checks import LARGEST_SIZE
from tunekit.errors import UserError
from tunekit.space import default_variant
from tunekit.spec import load_spec

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU: torch.cuda is not available", allow_module_level=True)

from tests.gpu.test_dispatch import ARCH, DOUBLE, FMHA, tune  # noqa: E402 - it skips itself where there is no GPU

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
SPEC = load_spec("fmha")
ENOUGH_GIB = 24  # for the huge tensors: two of 4.6 GB, their oracle and what a draw takes meanwhile
INT32_ELEMENTS = 2**31


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    tune(DOUBLE, root, {"n": 1 << 20})
    for flags in ({}, {"normalize": False}, {"dtype": "float16"}):
        tune("fmha", root, {**FMHA, **flags})
    return root


@pytest.fixture(scope="module")
def op(cache):
    return tunekit.torch_op("fmha", database=cache / "tunekit.db", artifacts=cache / "artifacts")


@pytest.fixture
def room():
    """Free memory for huge tensors, given back afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < ENOUGH_GIB:
        pytest.skip(f"{free:.0f} GiB of GPU memory are free, of {ENOUGH_GIB} that this needs")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def draw(seed: int = 0, dtype=torch.bfloat16, **changes):
    """q, k, v of the problem that the cache is tuned for, or of another one."""
    problem = SPEC.problem({**FMHA, **changes})
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(arg.sizes(problem), generator=generator, device="cuda", dtype=dtype)
        for arg in SPEC.arguments(problem)[:3]
    ]


def check(outputs, problem: dict, inputs: dict) -> None:
    """Compare what a call returned with the oracle, by the spec's tolerances."""
    complete = SPEC.problem(problem)
    wanted = SPEC.reference(complete, {**inputs, "scale": complete.head_dim**-0.5})
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for (name, reference), output in zip(wanted.items(), outputs, strict=True):
        error = float((output.double() - reference).norm() / reference.norm())
        print(f"{complete} {name}: relative norm error {error:.2e}")
        assert error <= SPEC.tolerance_of(name).relative_norm


def check_call(outputs, tensors, **flags) -> None:
    q, k, v = tensors
    shape = {"batch": q.shape[0], "t": q.shape[1], "s_k": k.shape[1], "dtype": str(q.dtype).removeprefix("torch.")}
    check(outputs, {**FMHA, **shape, **flags}, {"q": q, "k": k, "v": v})


# ---- the operator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"normalize": False}], ids=["one output", "three outputs"])
def test_torch_finds_nothing_wrong_with_the_operator(op, flags):
    """Schema, aliasing, autograd registration, fake against real, compiled with dynamic sizes; and it is right."""
    tensors = draw()
    torch.library.opcheck(op.op, tuple(tensors), flags)
    check_call(op(*tensors, **flags), tensors, **flags)


def test_one_compiled_graph_serves_every_batch(op):
    """fullgraph=True with a dynamic batch: no break, one graph, right for each size."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: op(q.clone(), k, v, normalize=False), fullgraph=True, dynamic=True, backend=backend
    )
    for batch in (3, 7, 5):
        tensors = draw(batch, batch=batch)
        check_call(compiled(*tensors), tensors, normalize=False)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_compiles_around_the_operator(op, mode):
    """Its own kernels before and after; with reduce-overhead the call is part of a CUDA graph that is replayed."""
    pytest.importorskip("triton")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: op(q * 2, k, v) * 2, fullgraph=True, mode=mode)
    with torch.inference_mode():
        for seed in range(4):
            q, k, v = draw(seed)
            check_call(compiled(q, k, v).clone() / 2, (q * 2, k, v))
    torch._dynamo.reset()


def test_autocast_passes_the_operator_by(op):
    """The outputs keep the inputs' dtype, bit by bit what they are without autocast."""
    tensors = draw()
    plain = op(*tensors)
    with torch.autocast("cuda", dtype=torch.float16):
        cast = op(*tensors)
        assert (tensors[0][0, 0] @ tensors[0][0, 0].t()).dtype is torch.float16
    assert cast.dtype is torch.bfloat16 and torch.equal(cast, plain)


def test_a_parameter_is_served_and_its_gradient_refused(op):
    q, k, v = draw()
    weight = torch.nn.Parameter(q)
    check_call(op.kernel(weight, k, v), (q, k, v))
    with torch.no_grad():
        check_call(op(weight, k, v), (q, k, v))
    with pytest.raises(UserError, match="'q' asks for a gradient, and tunekit::fmha computes forward only"):
        op(weight, k, v)


# ---- layouts: cases 15 and 25 --------------------------------------------------------------------------------------


def behind(tensor, elements: int):
    """The same values, so many elements into a storage."""
    storage = tensor.new_zeros(tensor.numel() + elements)
    storage[elements:] = tensor.flatten()
    return storage[elements:].view(tensor.shape)


def wider(tensor):
    """The same values, in rows that are 8 elements further apart."""
    return torch.cat([tensor, tensor.new_zeros(*tensor.shape[:-1], 8)], -1)[..., : tensor.shape[-1]]


LAYOUTS = {
    "plain": (lambda k: k, None),
    "16 bytes into a storage": (lambda k: behind(k, 8), None),
    "transposed": (lambda k: k.transpose(1, 2).contiguous().transpose(1, 2), "'k' is not contiguous"),
    "padded": (wider, "'k' is not contiguous"),
    "inner stride 2": (lambda k: k.repeat_interleave(2, -1)[..., ::2], "'k' is not contiguous"),
    "expanded": (lambda k: k[:, :, :1].expand(k.shape), "'k' is not contiguous"),
    "2 bytes into a storage": (lambda k: behind(k, 1), "'k' starts 2 bytes past a 16-byte boundary"),
    "8 bytes into a storage": (lambda k: behind(k, 4), "'k' starts 8 bytes past a 16-byte boundary"),
    "another dtype": (lambda k: k.half(), "'k' (dtype) is float16"),
    "a negative view": (torch._neg_view, "'k' is a negative view"),
}


def serve_or_refuse(kernel, name: str) -> None:
    q, k, v = draw()
    make, words = LAYOUTS[name]
    if words is None:
        check_call(kernel(q, make(k), v), (q, k, v))
    else:
        with pytest.raises(UserError) as caught:
            kernel(q, make(k), v)
        assert words in str(caught.value)


def load(cache: Path):
    return tunekit.load("fmha", database=cache / "tunekit.db", artifacts=cache / "artifacts")


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
def test_every_layout_is_right_or_refused_in_either_order(cache, backwards):
    """Case 15, in one process. A negative view is told from its base on a cold key alone, so it comes before it."""
    kernel = load(cache)
    serve_or_refuse(kernel, "a negative view")
    names = [name for name in LAYOUTS if name != "a negative view"][:: -1 if backwards else 1]
    for name in (*names, *names):
        serve_or_refuse(kernel, name)


def test_every_layout_is_right_or_refused_in_another_process(cache):
    """Case 15, across two processes that share what is stored: the second meets the refused ones first."""
    serve_or_refuse(load(cache), "plain")
    code = (
        "import sys; from pathlib import Path; from tests.gpu.test_serving_torch import *\n"
        "kernel = load(Path(sys.argv[1]))\n"
        "for name in reversed(LAYOUTS): serve_or_refuse(kernel, name)\n"
    )
    done = run_python(code, str(cache))
    assert done.returncode == 0, done.stderr


def test_two_dtypes_of_one_shape_are_two_kernels(cache):
    """Case 15, dtype: A, B, A, B in one process, each against the oracle."""
    kernel = load(cache)
    for dtype in (torch.bfloat16, torch.float16) * 2:
        tensors = draw(dtype=dtype)
        check_call(kernel(*tensors), tensors)


def test_a_size_that_was_not_tuned_takes_its_own_alignment(cache):
    """Case 25: tuned for head_dim 128 and s_k 300. Rows of 252 bytes are refused, 126 keys are served rightly."""
    kernel = load(cache)
    tensors = draw(s_k=126)
    check_call(kernel(*tensors), tensors)
    q, k, v = draw()
    with pytest.raises(UserError, match=r"head_dim.*126 is not allowed \(allowed: 64, 128, 256, 512\)"):
        kernel(*(tensor[..., :126].contiguous() for tensor in (q, k, v)))
    with pytest.raises(UserError, match="'q' is not contiguous"):
        kernel(*(torch.cat([tensor, tensor], -1)[..., 1:129] for tensor in (q, k, v)))


# ---- more than 2^31 elements ---------------------------------------------------------------------------------------


def huge(problem: dict, root: Path):
    """A kernel tuned for a huge problem, and the sizes of that problem's tensors by name."""
    complete = SPEC.problem(problem)
    if default_variant(SPEC, parse_arch(ARCH), complete) is None:
        pytest.skip(f"no kernel of {ARCH} computes {complete}")
    tune("fmha", root, problem)
    return load(root), {arg.name: arg.sizes(complete) for arg in SPEC.arguments(complete) if hasattr(arg, "sizes")}


def randn(sizes, seed: int):
    return torch.randn(sizes, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=torch.bfloat16)


def test_keys_beyond_int32_elements_are_read_where_they_lie(room, tmp_path):
    """K and V of 4.6 GB: the last sequence lies past element 2^31 and is right, and so is the first."""
    problem = {"batch": 17, "heads": 16, "kv_heads": 1, "t": 1, "s_k": 2**20, "head_dim": 128}
    kernel, sizes = huge(problem, tmp_path)
    q, k, v = (randn(sizes[name], seed) for seed, name in enumerate("qkv"))
    assert k[:-1].numel() >= INT32_ELEMENTS
    o = kernel(q, k, v)
    for at in (0, 16):
        one = slice(at, at + 1)
        check(o[one], {**problem, "batch": 1}, {"q": q[one], "k": k[one], "v": v[one]})


def test_gathered_keys_beyond_int32_elements(room, tmp_path):
    """The same by cp.async from listed rows, whose addresses the kernel works out by itself."""
    flags = {"gather": True, "top_k": 256}
    problem = {"batch": 17, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 2**20, "head_dim": 128, **flags}
    kernel, sizes = huge(problem, tmp_path)
    q, k, v = (randn(sizes[name], seed) for seed, name in enumerate("qkv"))
    indices = torch.randint(0, 2**20, sizes["indices"], device="cuda", dtype=torch.int32)
    o = kernel(q, k, v, indices=indices, gather=True)
    for at in (0, 16):
        one = slice(at, at + 1)
        inputs = {"q": q[one], "k": k[one], "v": v[one], "indices": indices[one]}
        check(o[one], {**problem, "batch": 1}, inputs)


def test_pages_beyond_int32_elements(room, tmp_path):
    """A pool of pages of 4.3 GB, of which the sequences use the last ones."""
    pages, table_pages = 2**18 + 256, 64
    problem = {"batch": 2, "heads": 16, "kv_heads": 1, "t": 1, "s_k": 4096, "head_dim": 128, "page": 64}
    problem |= {"pages": pages, "table_pages": table_pages, "has_lengths": True}
    kernel, sizes = huge(problem, tmp_path)
    q, k, v = (randn(sizes[name], seed) for seed, name in enumerate("qkv"))
    page_table = (2**18 + torch.randperm(256, device="cuda")[: 2 * table_pages]).view(2, table_pages).int()
    assert int(page_table.min()) * 64 * 128 >= INT32_ELEMENTS
    inputs = {"q": q, "k": k, "v": v, "page_table": page_table}
    inputs["lengths"] = torch.tensor([4096, 4000], device="cuda", dtype=torch.int32)
    o = kernel(**inputs, page=64, has_lengths=True, s_k=4096)
    check(o, problem, inputs)


def test_queries_and_outputs_beyond_int32_elements(room, tmp_path):
    """Q and O of 4.3 GB: the last tokens lie past element 2^31, are read there and written there."""
    tokens = 2**17 + 128
    problem = {"batch": 1, "heads": 128, "kv_heads": 1, "t": tokens, "s_k": 64, "head_dim": 128, "return_lse": True}
    kernel, sizes = huge(problem, tmp_path)
    q, k, v = (randn(sizes[name], seed) for seed, name in enumerate("qkv"))
    o, lse = kernel(q, k, v, return_lse=True)
    for part in (slice(0, 64), slice(tokens - 64, tokens)):
        check((o[:, part], lse[:, :, part]), {**problem, "t": 64}, {"q": q[:, part], "k": k, "v": v})


def test_a_size_beyond_int32_is_refused(room, cache):
    kernel = tunekit.load(DOUBLE, database=cache / "tunekit.db", artifacts=cache / "artifacts")
    x = torch.empty(LARGEST_SIZE + 1, device="cuda")
    with pytest.raises(UserError, match=r"'x' has a dim of 2147483648 .* up to 2147483647 \(int32\): split the call"):
        kernel(x)


# ---- a fault -------------------------------------------------------------------------------------------------------


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False
    )


FAULTY = """
import json, os, sys
from pathlib import Path
import torch, tunekit
from tunekit.dispatch.faults import as_device_fault

root = Path(sys.argv[2])
kernel = tunekit.load(sys.argv[1], database=root / "tunekit.db", artifacts=root / "artifacts")
x = torch.ones(1 << 20, device="cuda")
y = torch.empty_like(x)
said = {}
for who, call in (("late", lambda: (kernel(x, y), torch.cuda.synchronize())), ("launch", lambda: kernel(x, y))):
    try:
        call()
    except Exception as error:
        fault = as_device_fault(error, "cute_double", "double", 0)
        said[who] = [type(error).__name__, str(fault)]
print(json.dumps(said), flush=True)
os._exit(0)  # what clean-up there is fails on a dead context
"""


def test_a_kernel_that_writes_out_of_bounds_is_a_device_fault_in_both_words(tmp_path):
    """What torch says at the next synchronisation and what the next launch says are told as one fatal error."""
    tune(DOUBLE, tmp_path, {"n": 1 << 20}, fault="out_of_bounds")
    done = run_python(FAULTY, DOUBLE, str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    print(said)
    assert set(said) == {"late", "launch"}
    for _, words in said.values():
        assert "cudaErrorIllegalAddress, 700" in words and "restart the process" in words
