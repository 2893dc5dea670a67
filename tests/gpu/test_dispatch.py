"""Dispatch on the GPU: compiled on request once, then served from the store, against the oracles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tunekit
from tunekit import identity
from tunekit.backends import symbol_of
from tunekit.compiling import Compiler, units
from tunekit.dispatch.lookup import present_protocols
from tunekit.environment import environment
from tunekit.errors import UserError
from tunekit.jobs import Limits, Pool
from tunekit.model import Level, Values, Winner
from tunekit.space import default_variants, parse_arch
from tunekit.spec import load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU: torch.cuda is not available", allow_module_level=True)

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent.parent
DOUBLE = f"{ROOT / 'tests' / 'specs' / 'cute_measure.py'}:cute_double"
ARCH = environment(0).arch or "sm_90a"
FMHA = {"batch": 2, "heads": 16, "kv_heads": 2, "t": 5, "s_k": 300, "head_dim": 128}


def tune(reference: str, root: Path, problem: dict, implementation: str = "", **tunables) -> Winner:
    """What a sweep would leave in `root`: a compiled artifact and a winner."""
    spec = load_spec(reference)
    complete = spec.problem(problem)
    of = next(
        v for v in default_variants(spec, parse_arch(ARCH), complete) if v.implementation.startswith(implementation)
    )
    variant = identity.variant(spec.name, spec.version, of.implementation, ARCH, of.tunables.merged(Values(tunables)))
    (unit,) = units(spec, reference, complete, [variant])
    with Pool(workers=1, limits=Limits(60.0, 300.0, 8 * 2**30)) as pool:
        compiler = Compiler(pool, ArtifactStore(root / "artifacts"), None, environment(0))
        ((_, outcome),) = compiler.compile([unit])
    assert outcome.ok, outcome.reason
    protocol = sorted(present_protocols(spec, ARCH, environment(0)))[0]
    winner = Winner(
        variant, complete, spec.bucket(complete), environment(0), protocol, unit.key, symbol_of(unit.key), 10.0, 0.1, 20
    )
    with Store.open(root / "tunekit.db") as store:
        store.put_winner(winner)
    return winner


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    tune(DOUBLE, root, {"n": 1 << 20})
    return root


@pytest.fixture(scope="module")
def attention(cache):
    for normalize in (True, False):
        tune("fmha", cache, {**FMHA, "normalize": normalize})
    return load("fmha", cache)


def load(reference: str, root: Path, **more):
    return tunekit.load(reference, database=root / "tunekit.db", artifacts=root / "artifacts", **more)


def test_a_winner_serves_its_problem_and_its_neighbours(cache):
    """Cases 48 and 52 on the GPU: the problem itself, and sizes that its build was not traced with, each right (`n` has
    exact buckets)."""
    kernel = load(DOUBLE, cache)
    for n, level in ((1 << 20, Level.EXACT), ((1 << 20) - 3, Level.NEAREST), (1000, Level.NEAREST)):
        x = torch.randn(n, device="cuda")
        torch.testing.assert_close(kernel(x), 2 * x)
        assert kernel.choice(x).level is level
    facts = kernel._resolver.devices.facts(0)
    assert (facts.arch, facts.sm_count) == (ARCH, torch.cuda.get_device_properties(0).multi_processor_count)


@pytest.mark.parametrize("normalize", [True, False])
def test_attention_by_position_and_keyword(attention, normalize):
    """Case 21 on the GPU: every way to write the call gives the oracle's outputs."""
    spec = load_spec("fmha")
    problem = spec.problem({**FMHA, "normalize": normalize})
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(arg.sizes(problem), generator=generator, device="cuda", dtype=torch.bfloat16)
        for arg in spec.arguments(problem)[:3]
    )
    wanted = spec.reference(problem, {"q": q, "k": k, "v": v, "scale": 128**-0.5})
    first = attention(q, k, v, normalize=normalize)
    second = attention(v=v, scale=128**-0.5, normalize=normalize, q=q, k=k)
    for outputs in (first, second):
        named = dict(zip(wanted, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
        for name, output in named.items():
            tolerance = spec.tolerance_of(name)
            error = (output.double() - wanted[name]).norm() / wanted[name].norm()
            print(f"normalize={normalize} {name}: relative norm error {error:.2e}")
            assert error <= tolerance.relative_norm
    assert attention.choice(q, k, v, normalize=normalize).level is Level.EXACT


def test_what_the_kernel_can_not_take_is_refused(attention):
    """Cases 15 and 25: a transposed, an offset and a mixed-up tensor are refused before anything is launched."""
    spec = load_spec("fmha")
    problem = spec.problem(FMHA)
    q, k, v = (torch.zeros(arg.sizes(problem), device="cuda", dtype=torch.bfloat16) for arg in spec.signature[:3])
    storage = torch.zeros(k.numel() + 1, device="cuda", dtype=torch.bfloat16)
    for bad, words in [
        (k.transpose(1, 2).contiguous().transpose(1, 2), "'k' is not contiguous"),
        (storage[1:].view(k.shape), "'k' starts 2 bytes past a 16-byte boundary"),
        (k[:, :-1].contiguous(), "s_k"),
        (k.float(), "'k' (dtype) is float32"),
        (k.cpu(), "'k' is on cpu, but 'q' is on cuda:0"),
    ]:
        with pytest.raises(UserError) as caught:
            attention(q, bad, v)
        assert words in str(caught.value)


def test_a_side_stream_is_the_one_that_torch_has_current(cache):
    """The kernel goes to torch's current stream: no result is read before it is there."""
    kernel = load(DOUBLE, cache)
    x = torch.randn(1 << 20, device="cuda")
    kernel(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        z = torch.full_like(x, 3.0)
        y = kernel(z)
        total = y.sum()
    stream.synchronize()
    assert float(total) == 6.0 * x.numel()


def test_a_warm_key_captures_and_replays(cache):
    """Case 53, the warm half: a key that was called before is captured in a CUDA graph and replayed."""
    kernel = load(DOUBLE, cache)
    x, y = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    kernel(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y)
    x.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 10.0).all()


def test_a_cold_key_in_a_capture_is_refused_and_the_capture_goes_on(cache):
    """Case 53, the cold half: nothing is loaded or allocated; what is warm is captured all the same."""
    kernel = load(DOUBLE, cache)
    x, y = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    kernel(x, y)
    cold = torch.randn(1 << 10, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UserError, match="first time while a CUDA graph is being captured"):
            kernel(cold)
        kernel(x, y)
    x.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 4.0).all()


def test_what_is_bound_can_be_captured_at_once(cache):
    """`bind` loads the kernel: its first launch may be in a capture, and it is the compiled function itself."""
    bound = load(DOUBLE, cache).bind({"n": 1 << 20})
    x, y = torch.full((1 << 20,), 3.0, device="cuda"), torch.empty(1 << 20, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(x, y)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 6.0).all() and type(bound).__module__.startswith("tvm_ffi")


@pytest.mark.skipif(ARCH != "sm_90a", reason="sm90_split needs a Hopper GPU")
def test_outputs_and_scratch_memory_of_a_captured_call_are_the_graphs(cache):
    """Split keys merged by a second kernel: scratch memory and output come from the graph's own pool at each replay."""
    problem = {"batch": 2, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 128}
    tune("fmha", cache, problem, "sm90_split", num_splits=4, merge="kernel")
    kernel = load("fmha", cache)
    q = torch.randn(2, 1, 128, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1152, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert kernel.choice(q, k, v).variant.implementation == "sm90_split"
    wanted = kernel(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kernel(q, k, v)
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del junk
    for _ in range(3):
        o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, wanted)


def test_results_are_freed_in_stream_order(cache):
    """An output that is dropped at once is reused by the next call, never while the kernel still writes it."""
    kernel = load(DOUBLE, cache)
    x = torch.randn(1 << 20, device="cuda")
    kernel(x)
    before = torch.cuda.memory_allocated()
    for _ in range(2000):
        kernel(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    torch.testing.assert_close(kernel(x), 2 * x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own(cache):
    """Case 22: the call goes where its tensors lie, whatever device is current; one artifact serves both."""
    kernel = load(DOUBLE, cache)
    for current in (0, 1):
        with torch.cuda.device(current):
            for index in (1, 0, 1):
                x = torch.randn(1 << 20, device=f"cuda:{index}")
                y = kernel(x)
                assert y.device == x.device and torch.cuda.current_device() == current
                torch.testing.assert_close(y, 2 * x)
                assert kernel._resolver.devices.facts(index).index == index
                bound = kernel.bind({"n": 1 << 20}, device=index)
                z = torch.empty_like(x)
                bound(x, z)
                torch.testing.assert_close(z, 2 * x)
    assert kernel.stats()["problems"] == 2 and kernel.stats()["loaded"] <= 1


def test_two_variants_in_one_process(cache, tmp_path):
    """Case 58: two variants of one kernel, called A, B, A, B: symbols don't clash."""
    tune(DOUBLE, tmp_path, {"n": 1 << 20}, smem_bytes=1024)
    first, second = load(DOUBLE, cache), load(DOUBLE, tmp_path)
    x = torch.randn(1 << 20, device="cuda")
    for kernel in (first, second, first, second):
        torch.testing.assert_close(kernel(x), 2 * x)
    assert first.choice(x).symbol != second.choice(x).symbol


def test_a_fresh_process_serves_without_a_compiler(cache):
    """Case 56: its first GPU action is a dispatch from the store, and cutlass is never imported."""
    code = (
        "import json, sys, torch, tunekit; kernel = tunekit.load(sys.argv[1]); "
        "y = kernel(torch.ones(1 << 20, device='cuda')); "
        "print(json.dumps({'sum': float(y.sum()), 'stats': kernel.stats(), "
        "'heavy': [n for n in ('cutlass', 'optuna', 'rich') if n in sys.modules]}))"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    env = {**os.environ, "TUNEKIT_CACHE": str(cache), "TUNEKIT_DB": "", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code, DOUBLE], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["sum"] == 2.0 * (1 << 20) and result["heavy"] == []
    assert result["stats"]["exact"] == result["stats"]["loaded"] == 1 and result["stats"]["compiled"] == 0
