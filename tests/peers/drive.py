"""Run one case of a peer in a process of its own: ``python drive.py flash_attention fa4_d64 --directory DIR``.

Prints one JSON line: what was compiled and launched, what the simulator found, and how far
each output is from its oracle.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handover import write
from no_gpu import Compiled, no_gpu

SIMULATED = Path(__file__).with_name("simulated.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("case")
    parser.add_argument("--directory", type=Path, required=True, help="where compiled kernels are kept")
    parser.add_argument("--room", type=int, default=2, help="clusters that the GPU holds at once")
    parser.add_argument("--ctas", help="which of the grid, as `tunekit simulate --ctas` takes them")
    parser.add_argument("--schedules", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    peer = importlib.import_module(options.peer)
    case = peer.CASES[options.case]
    kernels: list[dict[str, Any]] = []

    def call(compiled: Compiled, values: Sequence[Any]) -> None:
        facts: dict[str, Any] = {"name": compiled.name, "compile_s": round(compiled.seconds, 2)}
        kernels.append(facts)
        if options.compile_only:
            return
        directory = options.directory / f"{compiled.name}.arguments"
        copy_back = write(values, case.outputs, directory)
        job = {name: getattr(options, name) for name in ("ctas", "schedules", "seed", "jobs")}
        job |= {name: str(getattr(compiled, name)) for name in ("object", "ptx", "symbol")}
        job |= {"arguments": str(directory), "arch": case.arch}
        done = subprocess.run([sys.executable, str(SIMULATED), json.dumps(job)], stdout=subprocess.PIPE, check=True)
        facts["report"] = json.loads(done.stdout)
        copy_back()

    options.directory.mkdir(parents=True, exist_ok=True)
    with no_gpu(case.arch, options.directory, options.case, room=options.room, call=call):
        outputs = peer.run(case, options.seed)
    print(json.dumps({"kernels": kernels, "outputs": {name: difference(*rest) for name, *rest in outputs}}))


def difference(result: Any, oracle: Any, limit: float) -> dict[str, float]:
    """How far a result is from its oracle, and may be. Elements never written (NaN) are counted and left out."""
    written = ~result.isnan()
    error = (result - oracle)[written]
    return {
        "missing": int((~written).sum()),
        "of": result.numel(),
        "limit": limit,
        "largest": float(error.abs().max()) if error.numel() else 0.0,
        "relative_norm": float(error.norm() / oracle[written].norm()) if error.numel() else 0.0,
    }


if __name__ == "__main__":
    main()
