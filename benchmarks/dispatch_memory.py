"""Memory of a serving process over many dispatches of many distinct problems, on the CPU.

    python benchmarks/dispatch_memory.py [--problems 100000] [--dispatches 1000000] [--python]

Each problem is called once, in order; then one is called again and again. Prints this process's resident memory along
the way; it must be flat over the second half of each. Exit status 1: it grew there by more than 10 MiB.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SPEC = '''
from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable

SOURCE = """
#include "tunekit_host.h"
TUNEKIT_KERNEL(args, count) {
    if (count != 2) return fail("expects x, y");
    *(float *)data_arg(args, 1) = 2 * *(const float *)data_arg(args, 0);
    return 0;
}
"""

SPECS = [
    KernelSpec(
        name="first_element",
        version=1,
        axes=(Axis("n"),),
        signature=(TensorArg("x", ("n",), "float32"), TensorArg("y", ("n",), "float32", role="output")),
        implementations=(
            Implementation(
                name="only",
                requires={"host"},
                backend="host",
                tunables=(Tunable("block", (8,)),),
                build=lambda b: SOURCE,
                defaults=({"block": 8},),
            ),
        ),
        reference=lambda problem, inputs: {"y": 2 * inputs["x"].double()},
        examples=({"n": 8},),
    )
]
'''
MOST_GROWTH_MIB = 10.0
STEPS = 10


def resident_mib() -> float:
    """This process's resident memory."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmRSS")


def main(arguments: list[str] | None = None) -> int:
    """Run both halves; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=100_000, help="distinct problems, each called once")
    parser.add_argument("--dispatches", type=int, default=1_000_000, help="calls of one problem")
    parser.add_argument("--python", action="store_true", help="dispatch in Python, not natively")
    options = parser.parse_args(arguments)

    import torch

    import tunekit

    with tempfile.TemporaryDirectory() as directory:
        spec = Path(directory) / "first_element.py"
        spec.write_text(SPEC)
        kernel = tunekit.load(
            spec,
            database=Path(directory) / "none.db",
            artifacts=Path(directory) / "artifacts",
            compile="allow",
            native=not options.python,
        )
        x, y = torch.ones(options.problems), torch.zeros(options.problems)
        kernel(x[:1], y[:1])

        def problems(first: int, last: int) -> None:
            for n in range(first, last):
                kernel(x[:n], y[:n])

        def dispatches(first: int, last: int) -> None:
            a, b = x[:8], y[:8]
            for _ in range(first, last):
                kernel(a, b)

        halves = [
            over(f"{options.problems} distinct problems", problems, options.problems),
            over(f"{options.dispatches} dispatches of one", dispatches, options.dispatches),
        ]
        print(f"{kernel.entries} entries kept; native: {kernel.native}; {kernel.stats()}")
        return 0 if all(growth <= MOST_GROWTH_MIB for growth in halves) else 1


def over(what: str, do: Callable[[int, int], None], count: int) -> float:
    """Do `count` things in steps, printing the memory after each; the growth over the second half, in MiB."""
    marks = [resident_mib()]
    seconds = 0.0
    for step in range(STEPS):
        began = time.perf_counter()
        do(1 + count * step // STEPS, 1 + count * (step + 1) // STEPS)
        seconds += time.perf_counter() - began
        marks.append(resident_mib())
    growth = marks[-1] - marks[STEPS // 2]
    print(f"{what}: MiB after each tenth: {' '.join(f'{mark:.1f}' for mark in marks)}")
    print(f"  second half: {growth:+.1f} MiB; {seconds / count * 1e6:.2f} us each")
    return growth


if __name__ == "__main__":
    sys.exit(main())
