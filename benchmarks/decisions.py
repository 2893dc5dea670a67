"""How good the final's decisions are: finals on simulated GPUs, with noise of known kinds. Needs no GPU.

    python benchmarks/decisions.py                     the table: 1,000 finals a cell
    python benchmarks/decisions.py --trials 100 --only drift

Each final goes through the schedule and the test of a real one: windows, retakes, looks, drops.
``tie of 10``: ten identical variants; all ten must end in one tie. ``2 %``: one of six is 2 % faster
than the rest; it must be named the winner. ``wrong``: of these, another one was named.
``1.5 % lost``: six, the best by 1.5 %; it was neither the winner nor in the tie set.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping

from simulated_gpu import BEYOND, MODELS, Noise, SimulatedGpu
from tunekit.measure.final import DEFAULT_ROUNDS, race, samples
from tunekit.measure.sequential import Judgement, judge

TEN = {f"same-{i}": 20.0 for i in range(10)}
GAP = {"best": 20.0, **{f"other-{i}": 20.4 for i in range(5)}}
NEAR = {"best": 20.0, **{f"other-{i}": 20.3 for i in range(5)}}


def final(times_us: Mapping[str, float], noise: Noise, seed: int, rounds: int = DEFAULT_ROUNDS) -> Judgement:
    """One final on a simulated GPU, as the measuring process would hold it."""
    gpu = SimulatedGpu(times_us, noise, seed)
    windows = race(gpu.finalists, rounds, lambda taken: _left(judge(taken)), pause=lambda seconds: None)
    return judge(samples(windows))


def _left(judgement: Judgement) -> tuple[str, ...]:
    return () if judgement.decided else judgement.racing


def kept(judgement: Judgement) -> list[str]:
    """The finalists that were not found slower."""
    return [id for id, compared in judgement.comparisons.items() if compared.verdict != "slower"]


def quality(noise: Noise, trials: int) -> dict[str, float]:
    """The shares of finals that came out one way or another, and the median of their rounds."""
    ten = [final(TEN, noise, seed) for seed in range(trials)]
    gap = [final(GAP, noise, seed) for seed in range(trials, 2 * trials)]
    near = [final(NEAR, noise, seed) for seed in range(2 * trials, 3 * trials)]
    ends = Counter((judgement.result, judgement.leader == "best") for judgement in gap)
    share = 1 / trials
    return {
        "tie_of_ten": share * sum(j.result == "tie" and len(kept(j)) == len(TEN) for j in ten),
        "tie_rounds": sorted(j.rounds for j in ten)[trials // 2],
        "gap_found": share * ends["winner", True],
        "gap_wrong": share * ends["winner", False],
        "gap_tie": share * sum(j.result == "tie" for j in gap),
        "gap_undecided": share * sum(j.result == "undecided" for j in gap),
        "gap_rounds": sorted(j.rounds for j in gap)[trials // 2],
        "near_lost": share * sum("best" not in kept(j) for j in near),
        "near_found": share * sum(j.result == "winner" and j.leader == "best" for j in near),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        print(f"{arguments.trials} finals a cell, {DEFAULT_ROUNDS} rounds at most")
        heads = ("tie of 10", "rounds", "2 %", "wrong", "undec.", "rounds", "1.5 % lost")
        print(f"{'noise':34}" + "".join(f"{head:>11}" for head in heads))
    for name, noise in {**MODELS, **BEYOND}.items():
        if arguments.only not in name:
            continue
        begin = time.monotonic()
        found = quality(noise, arguments.trials)
        if arguments.json:
            print(json.dumps({"noise": name, **found}), flush=True)
            continue
        cells = [
            *(f"{found['tie_of_ten']:.1%}", f"{found['tie_rounds']}", f"{found['gap_found']:.1%}"),
            *(f"{found['gap_wrong']:.1%}", f"{found['gap_undecided']:.1%}", f"{found['gap_rounds']}"),
            f"{found['near_lost']:.1%}",
        ]
        print(
            f"{name:34}" + "".join(f"{cell:>11}" for cell in cells) + f"   {time.monotonic() - begin:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
