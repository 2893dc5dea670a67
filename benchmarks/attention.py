"""Attention beside its peers on this GPU, in one run: tunekit, flash-attn-4, cuDNN and FA2 through torch SDPA.

    python benchmarks/attention.py [TABLE ...] [--only AXIS=V[,V] ...] [--rounds 12] [--json FILE]
    python benchmarks/attention.py TABLE ... [--only ...] --list > problems.jsonl

``prefill``: b=2, s=8192, head_dim 64/128/256, causal and not. ``decode``: one token, 128 heads over 1. ``wide``: the
same at head_dim 512: separate K and V, one latent (K == V), and the two sources of a DeepSeek-V4-like layer.
``splits``: one launch beside splits of the keys, and beside a launch for each KV tile (attention_splits.py).

Contestants take turns for an even number of rounds, the order reversed every other round (contest.py); a time is
CUDA-graph replay with a cold L2, the flush subtracted; `host` is a call in a plain Python loop, back to back.
"tunekit" is what ``tunekit.load`` serves, "own kernel" the fastest of tunekit's own kernels that a sweep here measured:
``--list`` writes the problems as a workload for `tunekit sweep fmha --workload`. Each one's error against the float64
oracle is told, and whether it is within fmha's tolerance. Results are printed, and written to the JSON file, as they
come.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import attention_peers
import attention_splits
import tunekit
from attention_peers import SPEC
from contest import Contest, Row, Todo, rounds_of, serve
from tunekit.arch import parse_arch
from tunekit.environment import environment
from tunekit.errors import TunekitError, UserError
from tunekit.measure.final import even_rounds
from tunekit.measure.inputs import Arguments
from tunekit.model import Values, to_json
from tunekit.oracle.compare import compare as compare_output
from tunekit.spec.inputs import draw, scalars

BANDWIDTH, TENSOR = 4.25e12, 790e12  # measured on an H200: bytes and FLOPs a second, the floors' roof
BATCHES, KEYS = (1, 8, 32, 128), (640, 1152, 8192)
MQA = {"heads": 128, "kv_heads": 1, "t": 1}
WINDOW = 128
OWN = ("tunekit", "own kernel")
O_DIMS = ("batch", "t", "heads", "head_dim_v")


def prefill() -> Iterator[dict[str, Any]]:
    for head_dim, mask in itertools.product((64, 128, 256), ("none", "causal")):
        heads = 2048 // head_dim
        shape = {"batch": 2, "heads": heads, "kv_heads": heads, "t": 8192, "s_k": 8192}
        yield {**shape, "head_dim": head_dim, "mask": mask}


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
        yield {**shape, **v4, "gather": True, "top_k": s_k - WINDOW, "s_k2": 2 * s_k}


TABLES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "prefill": prefill,
    "decode": decode,
    "wide": wide,
    "splits": attention_splits.problems,
}


# --- one problem --------------------------------------------------------------------------


def compare(todo: Todo, rounds: int, contest: Contest) -> Row:
    """One problem: every contestant's error and times, microseconds."""
    problem = SPEC.problem(todo.given)
    inputs = filled(problem, draw(SPEC, problem, 0, torch.device("cuda")))
    want = SPEC.reference(problem, {**inputs, **scalars(SPEC, problem)})["o"]
    result: Row = {"problem": todo.given}
    if todo.table == "splits":
        calls = attention_splits.contestants(problem, inputs, parse_arch(environment().arch or ""))
    else:
        arguments = Arguments(SPEC, problem, inputs, torch.device("cuda"))
        calls, result["own"] = attention_peers.contestants(problem, arguments)
        result["choice"] = chosen_kernel(todo.given)

    def check(name: str, out: Any) -> Row:
        if out is None:
            return {}
        found = compare_output("o", out.contiguous(), want, SPEC.tolerance_of("o"), -1, O_DIMS, None)
        return {"error": found.relative_norm, "cosine": found.cosine, "wrong": found.wrong}

    rows = contest.rows(calls, check, rounds, todo.without)
    cost = SPEC.cost(problem)
    floor = max(cost.bytes / BANDWIDTH, cost.flops / TENSOR) * 1e6
    for row in rows.values():
        if "median_us" in row:
            row |= {"tflops": cost.flops / row["median_us"] / 1e6, "of_roofline": floor / row["median_us"]}
    if todo.table == "splits":
        for name, ratio in attention_splits.ratios(rows).items():
            rows[name]["ratio"] = ratio
    return result | {"floor_us": floor, "rows": rows}


def chosen_kernel(given: Mapping[str, Any]) -> str:
    """What ``tunekit.load`` serves, or why nothing."""
    try:
        choice = tunekit.best("fmha", **given)
    except TunekitError as error:
        return f"nothing: {error}"
    return f"{choice.variant} ({choice.level})"


def filled(problem: Values, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with every sequence as long as may be, as a server's cache that is full: what the roofline counts.

    Rows that nobody lists are numbers too, or those who gather before they mask would compute NaN.
    """
    found = {name: torch.nan_to_num(x) if x.is_floating_point() else x for name, x in inputs.items()}
    for name, most in (("lengths", problem.s_k), ("lengths2", problem.s_k2)):
        if name in found:
            found[name] = torch.full_like(found[name], most)
    return found


# --- words --------------------------------------------------------------------------------


def show(result: Row) -> None:
    print(f"\n{Values(result['problem'])}  floor {result['floor_us']:.1f} us")
    if "choice" in result:
        print(f"  tunekit: {result['choice']}\n  own kernel: {result['own']}")
    for name, row in result["rows"].items():
        print(f"  {name:34} {words_of(row)}", flush=True)


def words_of(row: Row) -> str:
    """A contestant's row as a line."""
    if "median_us" not in row:
        return row.get("refused") or f"no time: all {row.get('rejected_windows', 0)} windows were rejected"
    words = f"{row['median_us']:9.2f} us +- {row['spread_us']:5.2f}  host {row['host_us']:6.1f} us"
    if "ratio" in row:
        words += f"  {row['ratio']:5.2f} of one launch"
    words += f"  {row['tflops']:6.1f} TFLOP/s  {100 * row['of_roofline']:5.1f} % of the roof"
    words += f"  error {row['error']:.1e}" if "error" in row else "  not checked"
    if row.get("wrong"):
        words += f" ({row['wrong']})"
    return words if row["method"] == "cuda_graph" else f"{words} ({row['method']})"


def summary(results: Sequence[Row]) -> Iterator[str]:
    """How tunekit stands to the best peer, over the problems that have one. A wrong result of its own is no time."""
    for mine in OWN:
        ratios = []
        for result in results:
            times = {name: row["median_us"] for name, row in result["rows"].items() if "median_us" in row}
            others = [t for name, t in times.items() if name not in OWN]
            if mine in times and others and not result["rows"][mine].get("wrong"):
                ratios.append(min(others) / times[mine])
        if ratios:
            mean, worst = math.exp(statistics.fmean(map(math.log, ratios))), min(ratios)
            yield f"{mine} beside the best peer: {mean:.2f}x (geometric mean of {len(ratios)}), worst {worst:.2f}x"


def split_summary(results: Sequence[Row]) -> Iterator[str]:
    """Of each problem the fastest split and the fastest way of a launch a tile, as parts of one launch's time."""
    for result in results:
        ratios = {name: row["ratio"] for name, row in result["rows"].items() if "ratio" in row}
        split = {name: ratio for name, ratio in ratios.items() if name.startswith(("cluster", "kernel"))}
        tiles = {name: ratio for name, ratio in ratios.items() if name.endswith("merge") and "no merge" not in name}
        best = [f"{min(group, key=group.__getitem__)} {min(group.values()):.2f}" for group in (split, tiles) if group]
        yield f"{Values(result['problem'])}: of one launch's time: {', '.join(best) or 'none measured'}"


# --- the command --------------------------------------------------------------------------


def chosen(tables: Sequence[str], only: Sequence[str]) -> list[Todo]:
    """The problems of the tables whose axes have the values of every ``axis=value[,value]``."""
    wanted = {}
    for text in only:
        name, separator, values = text.partition("=")
        if not separator or name not in {axis.name for axis in SPEC.axes}:
            sys.exit(f"--only takes AXIS=V[,V], with an axis of fmha; not '{text}'")
        wanted[name] = {value.lower() for value in values.split(",")}
    found = [Todo(table, given) for table in tables for given in TABLES[table]()]
    kept = [todo for todo in found if _matches(SPEC.problem(todo.given), wanted)]
    if not kept:
        sys.exit(f"no problem of {', '.join(tables)} has {' '.join(only)}: --list shows them")
    return kept


def _matches(problem: Values, wanted: Mapping[str, set[str]]) -> bool:
    return all(str(problem[name]).lower() in values for name, values in wanted.items())


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def run(todo: Sequence[Todo], rounds: int, path: Path | None) -> None:
    """Measure, print and write what comes, also the problems that failed."""
    here = environment()
    names = ("torch", "flash-attn-4", "nvidia-cutlass-dsl")
    print(f"{here.gpu}, driver {here.driver}, " + ", ".join(f"{name} {version(name)}" for name in names), flush=True)
    splits = [one.given for one in todo if one.table == "splits"]
    if splits:
        for variant, reason in attention_splits.compile_all(splits, parse_arch(here.arch or "")).items():
            print(f"{variant} did not compile: {reason}", flush=True)
    results: dict[str, list[Row]] = {one.table: [] for one in todo}
    failed: dict[str, list[Row]] = {}
    command = [sys.executable, str(Path(__file__).resolve()), "--rounds", str(rounds), "--these"]
    for one, result in rounds_of(command, todo):
        if "failed" in result:
            print(f"\n{Values(one.given)}\n  failed: {result['failed']}", flush=True)
            failed.setdefault(one.table, []).append({"problem": one.given, "reason": result["failed"]})
        else:
            results[one.table].append(result)
            show(result)
        if path:
            write(path, {"environment": to_json(here), "results": results, "failed": failed})
    for table, found in results.items():
        lines = split_summary(found) if table == "splits" else summary(found)
        print("\n" + "\n".join(f"{table}: {line}" for line in lines), flush=True)


def write(path: Path, value: Any) -> None:
    """All at once: a run may be cut at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention beside its peers.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)} [default: all]")
    parser.add_argument("--only", nargs="+", default=[], metavar="AXIS=V[,V]", help="problems with these values alone")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="print the problems as JSON Lines, and measure nothing")
    parser.add_argument("--these", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [table for table in options.tables if table not in TABLES]
    if unknown:
        parser.error(f"no table {', '.join(unknown)} (known: {', '.join(TABLES)})")
    try:
        even_rounds(options.rounds)
    except UserError as error:
        parser.error(str(error))
    todo = chosen(options.tables or list(TABLES), options.only)
    if options.list:
        print("\n".join(json.dumps(one.given) for one in todo))
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/attention.py needs an NVIDIA GPU")
    if options.these is None:
        run(todo, options.rounds, options.json)
        return
    warnings.filterwarnings("ignore")  # SDPA tells at length why a backend declines
    contest: list[Contest] = []

    def one(todo: Todo, say: Callable[[str], None]) -> Row:
        contest[:] = contest or [Contest(say)]
        contest[0].say = say
        return compare(todo, options.rounds, contest[0])

    serve(options.these, one)


if __name__ == "__main__":
    main()
