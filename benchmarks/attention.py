"""Attention beside its peers on this GPU, in one run: tunekit, flash-attn-4, cuDNN and FA2 through torch SDPA.

    python benchmarks/attention.py [TABLE ...] [--rounds 12] [--json FILE]        TABLE: prefill, decode, wide

``prefill``: b=2, s=8192, head_dim 64/128/256, causal and not. ``decode``: one token, 128 heads over 1. ``wide``: the
same at head_dim 512: separate K and V, one latent (K == V), and the two sources of a DeepSeek-V4-like layer.

Contestants take turns for an even number of rounds, the order reversed every other round; a time is CUDA-graph replay
with a cold L2, the flush subtracted; `host` is a call in a plain Python loop, back to back. "tunekit" is what
``tunekit.load`` serves, "own kernel" the fastest of tunekit's own kernels that a sweep here measured. Each one's error
against the float64 oracle is told, and whether it is within fmha's tolerance. Tune with `tunekit sweep fmha` first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tunekit
from tunekit.backends import symbol_of
from tunekit.backends.load import load_artifact
from tunekit.environment import environment
from tunekit.errors import TunekitError
from tunekit.measure.device import Device
from tunekit.measure.gpu_state import GpuMonitor
from tunekit.measure.inputs import Arguments
from tunekit.measure.statistics import spread
from tunekit.measure.timing import ColdPlan, CudaTimer, calls_per_window
from tunekit.model import Stage, Values, to_json
from tunekit.oracle.compare import compare as compare_output
from tunekit.settings import load_settings
from tunekit.spec import load_spec
from tunekit.spec.inputs import draw, scalars
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store

SPEC = load_spec("fmha")
BANDWIDTH, TENSOR = 4.25e12, 790e12  # measured on an H200: bytes and FLOPs a second, the floors' roof
BATCHES, KEYS = (1, 8, 32, 128), (640, 1152, 8192)
MQA = {"heads": 128, "kv_heads": 1, "t": 1}
WINDOW = 128
Call = Callable[[], Any]


def prefill() -> Iterator[dict[str, Any]]:
    for head_dim, mask in itertools.product((64, 128, 256), ("none", "causal")):
        heads = 2048 // head_dim
        yield {
            "batch": 2,
            "heads": heads,
            "kv_heads": heads,
            "t": 8192,
            "s_k": 8192,
            "head_dim": head_dim,
            "mask": mask,
        }


def decode() -> Iterator[dict[str, Any]]:
    for head_dim, batch, s_k in itertools.product((64, 128, 256), BATCHES, KEYS):
        yield {**MQA, "batch": batch, "s_k": s_k, "head_dim": head_dim}


def wide() -> Iterator[dict[str, Any]]:
    for batch, s_k in itertools.product(BATCHES, KEYS):
        shape = {**MQA, "batch": batch, "head_dim": 512}
        yield {**shape, "s_k": s_k}
        yield {**shape, "s_k": s_k, "kv_shared": True}
        v4 = {
            "kv_shared": True,
            "has_sink": True,
            "has_lengths": True,
            "sources": 2,
            "s_k": WINDOW,
            "s_k2": s_k - WINDOW,
        }
        yield {**shape, **v4}
        yield {**shape, **v4, "gather": True, "top_k": s_k - WINDOW, "s_k2": 4 * s_k}


TABLES = {"prefill": prefill, "decode": decode, "wide": wide}


def own_kernel(problem: Values, arguments: Arguments) -> tuple[str, Call] | None:
    """The fastest of tunekit's own kernels by this database's trials."""
    settings = load_settings()
    with Store.open(settings.database, create=False) as store:
        trials = store.trials(spec="fmha", stage=Stage.MEASURE, problem=problem)
    own = [
        trial
        for trial in trials
        if trial.outcome.ok and SPEC.implementation(trial.variant.implementation).backend == "cutedsl"
    ]
    artifacts = ArtifactStore(settings.artifacts)
    for trial in sorted(own, key=lambda trial: statistics.median(trial.outcome.samples_us)):
        artifact = artifacts.get(trial.compile_key)
        if artifact is not None:
            function = load_artifact(artifacts.path(artifact), symbol_of(trial.compile_key))
            call = Arguments(SPEC, problem, arguments.drawn, torch.device("cuda"), variant=trial.variant).call
            o = call[[a.name for a in SPEC.arguments(problem)].index("o")]
            return str(trial.variant), partial(_run, function, call, o)
    return None


def _run(function: Callable[..., Any], call: tuple[Any, ...], o: Any) -> Any:
    function(*call)
    return o


def contestants(problem: Values, arguments: Arguments) -> dict[str, Call]:
    """name -> a call that returns o as [batch, t, heads, head_dim_v]."""
    given = {name: arguments.guarded[name].tensor for name in arguments.guarded if name not in ("lse", "row_max")}
    flags = {axis.name: problem[axis.name] for axis in SPEC.axes if axis.static and axis.kind != "dtype"}
    flags = {
        name: value for name, value in flags.items() if name not in ("heads", "kv_heads", "head_dim", "head_dim_v")
    }
    kernel = tunekit.load("fmha")
    found: dict[str, Call] = {"tunekit": lambda: kernel(**given, **flags)}
    own = own_kernel(problem, arguments)
    if own is not None:
        found["own kernel"] = own[1]
    if problem.sources == 1 and not problem.gather and not problem.has_lengths and not problem.has_sink:
        q, k = given["q"], given["k"]
        found |= peers(problem, q, k, k[..., : problem.head_dim_v] if problem.kv_shared else given["v"])
    return found


def peers(problem: Values, q: Any, k: Any, v: Any) -> dict[str, Call]:
    """What else computes the same problem, faster or not."""
    found: dict[str, Call] = {}
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    grouped, causal = problem.heads != problem.kv_heads, problem.mask == "causal"
    backends = (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION))
    packed = qt.reshape(problem.batch, problem.kv_heads, -1, problem.head_dim)  # a KV head's heads as rows of one head
    for name, backend in backends:

        def call(backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(qt, kt, vt, enable_gqa=grouped, is_causal=causal).transpose(1, 2)

        def call_packed(backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(packed, kt, vt).reshape(qt.shape).transpose(1, 2)

        if problem.head_dim <= 256:
            found[name] = call
            if grouped and problem.t == 1:
                found[f"{name}, heads packed"] = call_packed
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        pass
    else:
        if problem.head_dim <= 256:
            found["flash-attn-4"] = lambda: _first(flash_attn_func(q, k, v, causal=causal))
    if problem.t == 1 and problem.head_dim > 256:
        scale = problem.head_dim**-0.5

        def unfused() -> Any:
            weights = torch.softmax(scale * (packed @ kt.transpose(-1, -2)), -1, dtype=torch.float32).to(q.dtype)
            return (weights @ vt).reshape(qt.shape).transpose(1, 2)

        found["bmm, softmax, bmm"] = unfused
    return found


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def compare(given: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One problem: every contestant's error and times, microseconds."""
    problem = SPEC.problem(given)
    device = torch.device("cuda")
    inputs = draw(SPEC, problem, 0, device)
    for name, most in (("lengths", problem.s_k), ("lengths2", problem.s_k2)):
        if name in inputs:  # as a server's cache that is full: what the roofline counts
            inputs[name] = torch.full_like(inputs[name], most)
            for x in ("k", "v") if name == "lengths" else ("k2", "v2"):
                if x in inputs:
                    inputs[x] = torch.nan_to_num(inputs[x])
    arguments = Arguments(SPEC, problem, inputs, device)
    want = SPEC.reference(problem, {**inputs, **scalars(SPEC, problem)})["o"]
    timer, monitor = CudaTimer(Device(0), cold=True), GpuMonitor(0)
    windows: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for name, call in contestants(problem, arguments).items():
        # cuBLAS keeps a workspace a stream, which must not come from a graph's memory: time those calls by events.
        method = "events" if "bmm" in name else "cuda_graph"
        try:
            out = call()
            torch.cuda.synchronize()
            comparison = compare_output("o", out.contiguous(), want, SPEC.tolerance_of("o"), -1, (), None)
            host = host_us(call)
            count = calls_per_window(timer.estimate_us(call), ColdPlan(copies=1, flush=True), 5.0)
            window = timer.window([call], count, True, method)
            for _ in range(2):  # heat, and an early sign of a contestant that faults
                window.take(monitor.read)
        except (RuntimeError, AssertionError, NotImplementedError, ValueError, TunekitError) as refusal:
            rows[name] = {"refused": (str(refusal).strip().splitlines() or [type(refusal).__name__])[0][:100]}
            continue
        windows[name] = window
        rows[name] = {"error": comparison.relative_norm, "cosine": comparison.cosine, "wrong": comparison.wrong}
        rows[name] |= {"method": method, "host_us": host}
    samples: dict[str, list[float]] = {name: [] for name in windows}
    for turn in range(rounds):
        for name in list(windows) if turn % 2 == 0 else reversed(windows):
            samples[name].append(windows[name].take(monitor.read)[0])
    cost = SPEC.cost(problem)
    floor = max(cost.bytes / BANDWIDTH, cost.flops / TENSOR) * 1e6
    for name, taken in samples.items():
        median = statistics.median(taken)
        rows[name] |= {"median_us": median, "spread_us": spread(taken), "samples_us": taken}
        rows[name] |= {"tflops": cost.flops / median / 1e6, "of_roofline": floor / median}
    result = {"problem": given, "floor_us": floor, "rows": rows}
    own = own_kernel(problem, arguments)
    choice = tunekit.best("fmha", **given)
    return result | {"choice": f"{choice.variant} ({choice.level})", "own": own[0] if own else "none measured"}


def host_us(call: Call, calls: int = 40) -> float:
    """Microseconds a call in a loop that waits once, at its end: the host's or the kernel's, whichever is longer."""
    best = math.inf
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    return best


def show(result: dict[str, Any]) -> None:
    print(f"\n{Values(result['problem'])}  floor {result['floor_us']:.1f} us")
    print(f"  tunekit: {result['choice']}\n  own kernel: {result['own']}")
    for name, row in result["rows"].items():
        if "refused" in row:
            print(f"  {name:20} {row['refused']}")
            continue
        print(
            f"  {name:20} {row['median_us']:9.2f} us +- {row['spread_us']:5.2f}  host {row['host_us']:6.1f} us"
            f"  {row['tflops']:6.1f} TFLOP/s  {100 * row['of_roofline']:5.1f} % of the roof  error {row['error']:.1e}"
            + (f" ({row['wrong']})" if row["wrong"] else "")
            + ("" if row["method"] == "cuda_graph" else f" ({row['method']})")
        )


def summary(results: list[dict[str, Any]]) -> Iterator[str]:
    """How tunekit stands to the best peer, over the problems that have one."""
    for mine in ("tunekit", "own kernel"):
        ratios = []
        for result in results:
            times = {name: row["median_us"] for name, row in result["rows"].items() if "median_us" in row}
            others = [t for name, t in times.items() if name not in ("tunekit", "own kernel")]
            if mine in times and others:
                ratios.append(min(others) / times[mine])
        if ratios:
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
            worst = min(ratios)
            yield f"{mine} beside the best peer: {mean:.2f}x (geometric mean of {len(ratios)}), worst {worst:.2f}x"


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def measured(problems: list[dict[str, Any]], rounds: int) -> Iterator[dict[str, Any]]:
    """The results, from a process that measures one problem after another: a contestant that faults on the GPU takes
    its problem along, and the next one begins in a new process."""
    left = list(problems)
    while left:
        command = [sys.executable, __file__, "--rounds", str(rounds), "--these", json.dumps(left)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stderr is not None
            for line in child.stdout:
                if line.startswith("{"):
                    left.pop(0)
                    yield json.loads(line)
            words = child.stderr.read().strip().splitlines()
        if child.returncode and left:
            print(f"\n{Values(left.pop(0))}\n  failed: {(words or ['no message'])[-1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention beside its peers.")
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--these", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py needs an NVIDIA GPU")
    if options.these is not None:
        warnings.filterwarnings("ignore")  # SDPA tells at length why a backend declines
        for given in json.loads(options.these):
            print(json.dumps(compare(given, options.rounds)), flush=True)
        return
    here = environment()
    names = ("torch", "flash-attn-4", "nvidia-cutlass-dsl")
    print(f"{here.gpu}, driver {here.driver}, " + ", ".join(f"{name} {version(name)}" for name in names), flush=True)
    results: dict[str, list[dict[str, Any]]] = {}
    for table in options.tables or TABLES:
        results[table] = []
        for result in measured(list(TABLES[table]()), options.rounds):
            results[table].append(result)
            show(result)
        print("\n" + "\n".join(f"{table}: {line}" for line in summary(results[table])), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"environment": to_json(here), "results": results}, indent=1))


if __name__ == "__main__":
    main()
