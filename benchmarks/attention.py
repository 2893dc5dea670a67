"""Attention beside its peers on this GPU, in one run: tunekit's winners, torch SDPA, flash-attn-4.

    python benchmarks/attention.py [--rounds 20] [--json FILE]

Each problem's contestants take turns for an even number of rounds, the order reversed every
other round; each time is CUDA-graph replay with a cold L2, the flush subtracted. Each one's error
against the float64 oracle is told, and whether it is within fmha's tolerance. Tune with
`tunekit sweep fmha` first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tunekit
from tunekit.environment import environment
from tunekit.errors import TunekitError
from tunekit.measure.device import Device
from tunekit.measure.gpu_state import GpuMonitor
from tunekit.measure.statistics import spread
from tunekit.measure.timing import ColdPlan, CudaTimer, calls_per_window
from tunekit.model import Values, to_json
from tunekit.spec import load_spec

PROBLEMS = (
    {"batch": 32, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 128},
    {"batch": 32, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 512},
    {"batch": 2, "heads": 16, "kv_heads": 16, "t": 4096, "s_k": 4096, "head_dim": 128},
)
Call = Callable[[], Any]


def contestants(problem: Values, q: Any, k: Any, v: Any) -> dict[str, tuple[Call, Call]]:
    """name -> (what is timed, what returns o as [batch, t, heads, head_dim])."""
    found: dict[str, tuple[Call, Call]] = {}
    kernel = tunekit.load("fmha")
    o = torch.empty_like(q)
    found["tunekit"] = (lambda: kernel(q, k, v, o), lambda: kernel(q, k, v, o))
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    grouped = problem.heads != problem.kv_heads
    for name, backend in (("sdpa cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa flash", SDPBackend.FLASH_ATTENTION)):

        def call(backend: Any = backend) -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(qt, kt, vt, enable_gqa=grouped)

        found[name] = (call, lambda call=call: call().transpose(1, 2))
    if grouped and problem.t == 1:
        # The heads of a KV head as the rows of one head: the same arithmetic, often faster in SDPA.
        packed = qt.reshape(problem.batch, problem.kv_heads, problem.heads // problem.kv_heads, problem.head_dim)

        def call_packed() -> Any:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
                return scaled_dot_product_attention(packed, kt, vt)

        found["sdpa, heads packed"] = (call_packed, lambda: call_packed().reshape(qt.shape).transpose(1, 2))
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        pass
    else:
        first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
        found["flash-attn-4"] = (lambda: flash_attn_func(q, k, v), lambda: first(flash_attn_func(q, k, v)))
    # What is left where no fused kernel takes the shape: two batched products around a softmax.
    if problem.t * problem.s_k * problem.heads * problem.batch < 2**28:
        scale = problem.head_dim**-0.5

        def unfused() -> Any:
            rows = qt.reshape(problem.batch, problem.kv_heads, -1, problem.head_dim)
            return torch.softmax(scale * (rows @ kt.transpose(-1, -2)), -1, dtype=torch.float32).to(q.dtype) @ vt

        found["bmm + softmax + bmm"] = (unfused, lambda: unfused().reshape(qt.shape).transpose(1, 2))
    return found


def compare(given: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One problem: every contestant's error and times, microseconds."""
    spec = load_spec("fmha")
    problem = spec.problem(given)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(length: int, heads: int) -> Any:
        shape = (problem.batch, length, heads, problem.head_dim)
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    q = random(problem.t, problem.heads)
    k, v = (random(problem.s_k, problem.kv_heads) for _ in range(2))
    want = spec.reference(problem, {"q": q, "k": k, "v": v, "scale": problem.head_dim**-0.5})["o"]
    timer, monitor = CudaTimer(Device(0), cold=True), GpuMonitor(0)
    windows: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for name, (call, result) in contestants(problem, q, k, v).items():
        # cuBLAS keeps a workspace a stream, which must not come from a graph's memory: time those calls by events.
        method = "events" if "bmm" in name else "cuda_graph"
        try:
            error = float((result().double() - want).norm() / want.norm())
            count = calls_per_window(timer.estimate_us(call), ColdPlan(copies=1, flush=True), 5.0)
            window = timer.window([call], count, True, method)
            for _ in range(3):  # heat, and an early sign of a contestant that faults
                window.take(monitor.read)
        except (RuntimeError, AssertionError, NotImplementedError, ValueError, TunekitError) as refusal:
            rows[name] = {"refused": str(refusal).strip().splitlines()[0][:100]}
            continue
        windows[name] = window
        right = error <= spec.tolerance_of("o").relative_norm
        rows[name] = {"error": error, "within_tolerance": right, "method": method}
    samples: dict[str, list[float]] = {name: [] for name in windows}
    for turn in range(rounds):
        for name in list(windows) if turn % 2 == 0 else reversed(windows):
            samples[name].append(windows[name].take(monitor.read)[0])
    cost = spec.cost(problem)
    for name, taken in samples.items():
        median = statistics.median(taken)
        rows[name] |= {
            "median_us": median,
            "spread_us": spread(taken),
            "tflops": cost.flops / median / 1e6,
            "gb_s": cost.bytes / median / 1e3,
        }
    choice = tunekit.best("fmha", **given)
    return {"problem": to_json(problem), "choice": f"{choice.variant} ({choice.level})", "rows": rows}


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def show(result: dict[str, Any]) -> None:
    print(f"\n{Values(result['problem'])}\n  tunekit: {result['choice']}")
    for name, row in result["rows"].items():
        if "refused" in row:
            print(f"  {name:22} {row['refused']}")
            continue
        print(
            f"  {name:22} {row['median_us']:9.2f} us  +- {row['spread_us']:.2f}  {row['tflops']:6.1f} TFLOP/s"
            f"  {row['gb_s']:7.1f} GB/s  error {row['error']:.1e}"
            + ("" if row["within_tolerance"] else " (outside fmha's tolerance)")
            + ("" if row["method"] == "cuda_graph" else f" ({row['method']})")
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py needs an NVIDIA GPU")
    if options.one is not None:
        warnings.filterwarnings("ignore")  # SDPA tells at length why a backend declines
        print(json.dumps(compare(PROBLEMS[options.one], options.rounds)))
        return
    here = environment()
    names = ("torch", "flash-attn-4", "nvidia-cutlass-dsl")
    print(f"{here.gpu}, driver {here.driver}, " + ", ".join(f"{name} {version(name)}" for name in names))
    results = []
    for index, given in enumerate(PROBLEMS):
        # A process a problem: a contestant that faults on the GPU takes only its own problem along.
        command = [sys.executable, __file__, "--one", str(index), "--rounds", str(options.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"\n{Values(given)}\n  failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
            continue
        results.append(json.loads(done.stdout.splitlines()[-1]))
        show(results[-1])
    if options.json:
        options.json.write_text(json.dumps({"environment": to_json(here), "results": results}, indent=1))


if __name__ == "__main__":
    main()
