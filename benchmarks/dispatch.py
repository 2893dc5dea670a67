"""What dispatch costs: the time that it adds to a call, beside other tuners' cached hits; and a fresh process's start.

    python benchmarks/dispatch.py [added start] [--rounds 16] [--calls 5000] [--json FILE]

``added``: fmha's q, k, v and o with a kernel that does nothing, on the CPU; with a GPU also the kernel that serves a
small decode problem, in bursts that the GPU's queue holds. The raw compiled function, the ways to call it through
tunekit, a bare dict hit, and the peers that are installed (`pip install triton quack-kernels flashinfer-python`) take
turns; a figure is the median over rounds of what it took above the same call without the tuner, in the same round.
"o allocated, beside empty_like" is above the compiled function and the `torch.empty_like(q)` that a program writes.

``start``: fresh interpreters, in turns: one that only imports torch, one to its first result from the store; with a GPU
also after `tunekit.start_cuda()` before the import, and with the CUDA context made apart. The caches (TUNEKIT_CACHE,
TUNEKIT_DB) are the ones that are set; on the CPU a temporary one is filled.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tunekit
from dispatch_peers import PEERS, peers
from tunekit.environment import environment
from tunekit.model import Values

HERE = Path(__file__).resolve().parent
STUB = str(HERE / "stub_attention.py")
SHAPE = {"batch": 32, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 640, "head_dim": 128}
SMALL = {**SHAPE, "batch": 1}
BURST = 200
"""Calls between synchronisations on the GPU: its queue holds about a thousand launches."""
GOAL_US, MOST_US = 0.3, 0.6

Timed = tuple[Callable[[], Any], Callable[[], Any]]
"""A call as a program writes it, and the one without what is timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="added, start; both by default")
    parser.add_argument("--rounds", type=int, default=16, help="an even number: the order changes every round")
    parser.add_argument("--calls", type=int, default=5000, help="a round's calls of each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tables = options.tables or ["added", "start"]
    here = environment()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, "
    versions += f"apache-tvm-ffi {importlib.metadata.version('apache-tvm-ffi')}"
    print(f"{here.gpu or platform.machine()}, {os.cpu_count()} CPUs, {versions}")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        filled = fill(Path(directory))
        if "added" in tables:
            results["added"] = added(stub_calls(filled), options.rounds, options.calls, "a stub on the CPU")
            if torch.cuda.is_available():
                real = added(
                    gpu_calls(), options.rounds, BURST, f"the kernel of {Values(SMALL)}", torch.cuda.synchronize
                )
                results["added on the GPU"] = real
        if "start" in tables:
            results["start"] = start(filled, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def fill(directory: Path) -> dict[str, Path]:
    """A cache in which the stub is compiled."""
    places = {"database": directory / "tunekit.db", "artifacts": directory / "artifacts"}
    kernel = tunekit.load(STUB, compile="allow", **places)
    kernel(*tensors("cpu"))
    return places


def tensors(device: str, shape: dict[str, int] = SHAPE) -> tuple[torch.Tensor, ...]:
    """q, k, v and o of a decode problem."""
    q = torch.randn(shape["batch"], 1, shape["heads"], shape["head_dim"], device=device).bfloat16()
    k = torch.randn(shape["batch"], shape["s_k"], 1, shape["head_dim"], device=device).bfloat16()
    return q, k, torch.randn_like(k), torch.empty_like(q)


def stub_calls(places: dict[str, Path]) -> dict[str, Timed]:
    native, python = (tunekit.load(STUB, native=which, **places) for which in (True, False))
    calls = ways(native, python, tensors("cpu"), SHAPE, -1)
    q, k, v, o = tensors("cpu")
    table = {(tuple(q.shape), tuple(k.shape)): 1}
    key = next(iter(table))
    calls["a bare dict hit"] = (lambda: table[key], lambda: None)
    for name, pair in peers((q, k, v, o), SHAPE["head_dim"] ** -0.5):
        if isinstance(pair, str):
            print(f"{name} is left out: {pair}")
        else:
            calls[name] = (partial(pair[0], *pair[2]), partial(pair[1], *pair[2]))
    return calls


def gpu_calls() -> dict[str, Timed]:
    native, python = (tunekit.load("fmha", native=which) for which in (True, False))
    return ways(native, python, tensors("cuda", SMALL), SMALL, 0)


def ways(native: Any, python: Any, given: tuple[Any, ...], shape: dict[str, int], device: int) -> dict[str, Timed]:
    """The ways to make a call, each beside the bound function with all that it leaves out."""
    q, k, v, o = given
    scale = q.shape[-1] ** -0.5
    bound = native.bind(shape, device=device)
    raw = lambda: bound(q, k, v, o, scale)  # noqa: E731
    by_name = {"o": o}
    return {
        "bind()": (raw, raw),
        "all by position": (lambda: native(q, k, v, o, scale), raw),
        "scale left out": (lambda: native(q, k, v, o), raw),
        "o by keyword": (lambda: native(q, k, v, o=o), raw),
        "all by keyword": (lambda: native(q=q, k=k, v=v, o=o, scale=scale), raw),
        "o out of a dict": (lambda: native(q, k, v, **by_name), raw),
        "two flags": (lambda: native(q, k, v, o, mask="none", normalize=True), raw),
        "o allocated": (lambda: native(q, k, v), raw),
        "o allocated, beside empty_like": (
            lambda: native(q, k, v),
            lambda: bound(q, k, v, torch.empty_like(q), scale),
        ),
        "in Python, by position": (lambda: python(q, k, v, o, scale), raw),
        "in Python, o allocated": (lambda: python(q, k, v), raw),
    }


def added(
    calls: dict[str, Timed], rounds: int, count: int, what: str, settle: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """name -> the time added to a call, in us: the median over rounds, and half the distance of the quartiles."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    raw: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, (call, plain) in calls.items():
            # The second of two in a row is the quicker one, by up to 0.2 us: each goes first every other round.
            order = 1 if round_ % 2 else -1
            took, without = [once(one, count, settle) for one in (call, plain)[::order]][::order]
            if round_:  # the first warms up
                taken[name].append(took - without)
                raw[name].append(without)
    print(f"\nadded to a call of {what}, us: median, spread; and the call without it")
    rows = {}
    for name in calls:
        low, middle, high = statistics.quantiles(taken[name], n=4)
        rows[name] = {"added_us": middle, "spread_us": (high - low) / 2, "without_us": statistics.median(raw[name])}
        print(f"  {name:30} {middle:8.3f} +- {(high - low) / 2:.3f}   {rows[name]['without_us']:8.3f}")
    ours = rows["all by position"]["added_us"]
    others = [row["added_us"] for name, row in rows.items() if name.split()[0] in PEERS]
    beside = f"; the best of the peers adds {min(others) / ours:.0f} times as much" if others else ""
    print(f"  goal, by position: {GOAL_US}, at most {MOST_US}{beside}")
    return rows


def once(call: Callable[[], Any], count: int, settle: Callable[[], Any]) -> float:
    """Microseconds a call, host time alone."""
    settle()
    gc.disable()
    begin = time.perf_counter_ns()
    for _ in range(count):
        call()
    took = time.perf_counter_ns() - begin
    gc.enable()
    settle()
    return took / count / 1000


START = """
import sys, time
if {ahead!r}:
    import tunekit
    tunekit.start_cuda()
import torch
device, spec, places, shape = {device!r}, {spec!r}, {places!r}, {shape!r}
print(time.monotonic())
if {context!r}:
    torch.zeros(1, device=device)
    torch.cuda.synchronize()
print(time.monotonic())
import pathlib, tunekit
kernel = tunekit.load(spec, **{{name: pathlib.Path(place) for name, place in places.items()}})
q = torch.zeros(shape["batch"], 1, shape["heads"], shape["head_dim"], dtype=torch.bfloat16, device=device)
k = torch.zeros(shape["batch"], shape["s_k"], 1, shape["head_dim"], dtype=torch.bfloat16, device=device)
o = kernel(q, k, k)
if device == "cuda":
    torch.cuda.synchronize()
assert not {{"cutlass", "optuna", "rich", "sqlite_utils"}} & set(sys.modules), "a compiler was imported"
print(time.monotonic())
"""
"""A process that says when torch is imported, a context is made (where that is asked for), and a result is there."""


def start(places: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Seconds in fresh processes: a name -> one figure for each round, after one that is not counted. Printed even if
    interrupted."""
    stub = {"device": "cpu", "spec": STUB, "places": {name: str(place) for name, place in places.items()}}
    kinds = {"a stub on the CPU": stub}
    if torch.cuda.is_available():
        kinds["the kernel on the GPU"] = {"device": "cuda", "spec": "fmha", "places": {}}
    found: dict[str, list[float]] = {}
    try:
        for round_ in range(max(3, rounds // 3) + 1):
            for kind, options in kinds.items():
                taken = one_round(options, backwards=bool(round_ % 2))
                if round_:
                    for name, seconds in taken.items():
                        found.setdefault(f"{kind}, {name}", []).append(seconds)
    finally:
        print("\nfresh processes, ms: median (least, most). Goal, beyond `import torch`: 150")
        for name, times in found.items():
            middle, least, most = (1e3 * f(times) for f in (statistics.median, min, max))
            print(f"  {name}: {middle:.0f} ({least:.0f}, {most:.0f}), {len(times)} times")
    return found


def one_round(options: dict[str, Any], backwards: bool) -> dict[str, float]:
    """Figures of processes that follow each other, in turns forwards and backwards: how long a process takes to the end
    of `import torch`, and from there to its first result: as it is; on a GPU also with `tunekit.start_cuda` before the
    import, and with a context made first. Python may keep its bytecode, as an installation does."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    gpu = options["device"] == "cuda"
    plain = {"ahead": False, "context": False}
    kinds = {"plain": plain}
    if gpu:
        kinds |= {"ahead": {**plain, "ahead": True}, "split": {**plain, "context": True}}
    marks: dict[str, list[float]] = {}
    for kind in reversed(kinds) if backwards else kinds:
        code = START.format(**options, **kinds[kind], shape=SMALL)
        began = time.monotonic()  # the same clock in every process
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
        if done.returncode:
            raise SystemExit(done.stderr)
        marks[kind] = [float(word) - began for word in done.stdout.split()]
    imported, _, result = marks["plain"]
    bare = statistics.mean(marks[kind][0] for kind in kinds if kind != "ahead")
    beyond = "the first result, beyond `import torch` of a process without tunekit"
    figures = {"`import torch`": bare, "the first result after it": result - imported}
    if gpu:
        figures[beyond] = result - bare
        imported, _, result = marks["ahead"]
        figures["`import torch` after tunekit.start_cuda()"] = imported
        figures["the first result after that"] = result - imported
        figures[f"{beyond}, with tunekit.start_cuda()"] = result - bare
        imported, context, result = marks["split"]
        figures["a CUDA context after `import torch`"] = context - imported
        figures["the first result after that context"] = result - context
    return figures


if __name__ == "__main__":
    main()
