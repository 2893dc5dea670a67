"""How fast the simulator is: one CTA of the attention kernel, on one core, for Blackwell and for Hopper.

    python benchmarks/simulate.py [--runs 5] [--json FILE]

M tile 128, head_dim 128, s_k 512, bf16: 128 query rows of one KV head. Each run is `tunekit simulate --jobs 1` under
another schedule; compiling (once) is not in the figures, nor are drawing the inputs and the oracle. Prints seconds and
warp instructions a second (median, least, most) and the peak memory of the largest process. Goal: 10 s a CTA, 2 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

PROBLEM = ("heads=128", "kv_heads=1", "t=1", "s_k=512", "head_dim=128")
ARCHES = ("sm_100a", "sm_90a")
GOAL_S, GOAL_BYTES = 10.0, 2 * 10**9


def simulate(arch: str, seed: int) -> dict[str, float]:
    """One run's seconds and instructions. Raises where the simulation finds anything wrong."""
    command = [sys.executable, "-m", "tunekit", "simulate", "fmha", "--arch", arch, "--problem", *PROBLEM]
    command += ["--jobs", "1", "--ctas", "first", "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{arch}, seed {seed}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    (found,) = json.loads(done.stdout)
    (schedule,) = found["report"]["schedules"]
    return {"seconds": schedule["seconds"], "instructions": schedule["instructions"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    figures = {}
    for arch in ARCHES:
        simulate(arch, 0)  # compiles
        runs = [simulate(arch, seed) for seed in range(arguments.runs)]
        seconds = sorted(run["seconds"] for run in runs)
        rates = sorted(run["instructions"] / run["seconds"] for run in runs)
        figures[arch] = {"seconds": seconds, "rates": rates, "instructions": [run["instructions"] for run in runs]}
        print(
            f"{arch}: {statistics.median(seconds):.2f} s a CTA [{seconds[0]:.2f}, {seconds[-1]:.2f}], "
            f"{statistics.median(rates):,.0f} warp instructions a second [{rates[0]:,.0f}, {rates[-1]:,.0f}], "
            f"{len(runs)} runs; goal {GOAL_S:g} s"
        )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"peak memory of a process: {peak / 1e9:.2f} GB (compiling included); goal {GOAL_BYTES / 1e9:g} GB")
    if arguments.json:
        arguments.json.write_text(json.dumps({**figures, "peak_bytes": peak, "load": os.getloadavg()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
