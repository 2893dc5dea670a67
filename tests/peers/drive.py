"""Run one case of a peer in a process of its own: ``python drive.py flash_attention fa4_d64 --directory DIR``.

Prints one JSON line: what was compiled, what the simulator found, and how far each
output is from its oracle.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer")
    parser.add_argument("case")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--clusters", type=int, default=2, help="clusters that the GPU holds at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from no_gpu import no_gpu

    peer = importlib.import_module(options.peer)
    case = peer.CASES[options.case]
    options.directory.mkdir(parents=True, exist_ok=True)
    made = []

    def call(compiled, values):
        made.append(compiled)
        print(compiled, [getattr(v, "shape", v) for v in values], file=sys.stderr)

    with no_gpu(case.arch, options.directory, options.case, clusters=options.clusters, call=call):
        outputs = peer.run(case, options.seed)
    print(json.dumps({"kernels": [{"name": c.name, "seconds": c.seconds} for c in made]}))


if __name__ == "__main__":
    main()
