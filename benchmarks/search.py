"""Search strategies on recorded spaces, beside Kernel Tuner's: best found over optimum, by evaluations.

    python benchmarks/search.py run SPACE.t4.json.gz ... --strategy auto random --seeds 100 --out results.jsonl
    python benchmarks/search.py run SPACE.t4.json.gz ... --strategy kernel_tuner:hybrid_vndx --out results.jsonl
    python benchmarks/search.py table results.jsonl
    python benchmarks/search.py plot results.jsonl docs/search

An evaluation is a configuration that is compiled; one that fails costs one too.
Each seed is one run to the largest budget, read at each. `kernel_tuner:NAME`
drives the `tune` function of that strategy of Kernel Tuner (an optional package,
`pip install kernel_tuner`) in its simulation mode, with a run for each budget,
since some of its strategies plan by it. Rows are written as they come, and what
is in the file already is not run again. `plot` needs matplotlib.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from tunekit.search import Budget, Told, make_strategy
from tunekit.search.encoding import Space
from tunekit.search.replay import replay
from tunekit.store import t4

BUDGETS = (20, 50, 100, 200, 400)
PREFIX = "kernel_tuner:"


class Recorded:
    """One recorded space: its name, candidates, outcomes and optimum."""

    def __init__(self, path: Path) -> None:
        self.name = path.name.split(".")[0]
        self.evaluations = [each for each in t4.read_t4(path) if each.invalidity != "constraints"]
        kernel, _, device = self.name.rpartition("-")
        variants = [t4.variant_of(each, kernel, device) for each in self.evaluations]
        self.space = Space(variants)
        self.told = {v.id: Told(v, each.time_us) for v, each in zip(variants, self.evaluations, strict=True)}
        self.optimum_us = min(each.time_us for each in self.evaluations if each.time_us is not None)


def ours(recorded: Recorded, strategy: str, seed: int, batch: int) -> list[float | None]:
    """The best over the optimum after each budget, by one of tunekit's strategies."""
    budget = Budget(evaluations=BUDGETS[-1])
    made = make_strategy(strategy, recorded.space, budget, seed)
    best = replay(made, recorded.told, BUDGETS[-1], batch).best_us
    at = [best[min(count, len(best)) - 1] for count in BUDGETS]
    return [None if us is None else us / recorded.optimum_us for us in at]


class KernelTuner:
    """Kernel Tuner's strategies on a recorded space, through its simulation mode."""

    def __init__(self, recorded: Recorded, directory: Path) -> None:
        import kernel_tuner

        self._tune = kernel_tuner.tune_kernel
        self._recorded = recorded
        kernel, _, device = recorded.name.rpartition("-")
        cache = t4.cache_of(recorded.evaluations, kernel, device)
        self._params, self._names = cache["tune_params"], cache["tune_params_keys"]
        self._kernel, self._known = kernel, {tuple(each.configuration.values()) for each in recorded.evaluations}
        self._file = directory / f"{recorded.name}.json"
        self._file.write_text(json.dumps(cache))

    def run(self, strategy: str, seed: int) -> list[float | None]:
        return [self._best(strategy, seed, budget) for budget in BUDGETS]

    def _best(self, strategy: str, seed: int, budget: int) -> float | None:
        import numpy

        random.seed(seed)
        numpy.random.seed(seed)

        def is_recorded(point: dict[str, object]) -> bool:
            return tuple(point[name] for name in self._names) in self._known

        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet, contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results, _ = self._tune(
                self._kernel, "", lambda: 1, [], self._params, restrictions=is_recorded, lang="CUDA",
                strategy=strategy, strategy_options={"max_fevals": budget}, cache=str(self._file),
                simulation_mode=True, verbose=False, quiet=True,
            )  # fmt: skip
        times = [each["time"] for each in results if isinstance(each.get("time"), (int, float))]
        if not times:
            return None
        return 1e3 * min(times) / self._recorded.optimum_us


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(arguments: argparse.Namespace) -> None:
    there = {(row["space"], row["strategy"], row["seed"]) for row in read(arguments.out)}
    with tempfile.TemporaryDirectory() as directory, arguments.out.open("a") as out:
        for path in arguments.spaces:
            recorded = Recorded(path)
            tuner = None
            for strategy in arguments.strategy:
                name = strategy if arguments.batch == 1 or PREFIX in strategy else f"{strategy}/{arguments.batch}"
                wanted = [s for s in range(arguments.seeds) if (recorded.name, name, s) not in there]
                start = time.perf_counter()
                for seed in wanted:
                    if strategy.startswith(PREFIX):
                        tuner = tuner or KernelTuner(recorded, Path(directory))
                        found = tuner.run(strategy.removeprefix(PREFIX), seed)
                    else:
                        found = ours(recorded, strategy, seed, arguments.batch)
                    row = {"space": recorded.name, "strategy": name, "seed": seed, "ratio": found}
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                seconds = (time.perf_counter() - start) / max(1, len(wanted))
                print(f"{recorded.name} {name}: {len(wanted)} seeds, {seconds:.2f} s each", file=sys.stderr)


def medians(rows: list[dict[str, object]]) -> Iterator[tuple[str, str, int, list[float]]]:
    """Space, strategy, seeds, and the median at each budget; nothing that runs counts as infinitely slow."""
    grouped: dict[tuple[str, str], list[list[float | None]]] = collections.defaultdict(list)
    for row in rows:
        grouped[str(row["space"]), str(row["strategy"])].append(row["ratio"])  # type: ignore[arg-type]
    for (space, strategy), ratios in sorted(grouped.items()):
        columns = [[float("inf") if r is None else r for r in column] for column in zip(*ratios, strict=True)]
        yield space, strategy, len(ratios), [statistics.median(column) for column in columns]


def table(arguments: argparse.Namespace) -> None:
    print("| space | strategy | seeds | " + " | ".join(map(str, BUDGETS)) + " |")
    print("|---|---|---:|" + "---:|" * len(BUDGETS))
    for space, strategy, seeds, values in medians(read(arguments.results)):
        print(f"| {space} | {strategy} | {seeds} | " + " | ".join(f"{value:.4f}" for value in values) + " |")


def plot(arguments: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tunekit"  # the same results give the same file
    from matplotlib import pyplot

    grouped = collections.defaultdict(list)
    for space, strategy, _, values in medians(read(arguments.results)):
        grouped[space].append((strategy, values))
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for space, curves in grouped.items():
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for strategy, values in sorted(curves, key=lambda each: each[1][2]):
            own = PREFIX not in strategy
            axes.plot(BUDGETS, [v - 1 for v in values], "-" if own else "--", lw=2.5 if strategy == "auto" else 1,
                      marker="o", ms=3, label=strategy.replace(PREFIX, "KT "))  # fmt: skip
        axes.set(xscale="log", yscale="symlog", xlabel="evaluations", ylabel="median best / optimum - 1", title=space)
        axes.set_yscale("symlog", linthresh=0.001 if "dedispersion" in space else 0.01)
        axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(arguments.directory / f"{space}.svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("spaces", type=Path, nargs="+")
    one.add_argument("--strategy", nargs="+", default=["auto", "random"])
    one.add_argument("--seeds", type=int, default=100)
    one.add_argument("--batch", type=int, default=1, help="proposals asked for at once (a sweep asks for 8)")
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(do=run)
    two = commands.add_parser("table")
    two.add_argument("results", type=Path)
    two.set_defaults(do=table)
    three = commands.add_parser("plot")
    three.add_argument("results", type=Path)
    three.add_argument("directory", type=Path)
    three.set_defaults(do=plot)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
