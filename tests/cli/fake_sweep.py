"""A stand-in for the pipeline, so that the shell around it is tested alone.

``python fake_sweep.py MODE ARGS...`` runs ``tunekit ARGS...`` with a sweep that
steps through made-up variants, the way MODE says.
"""

from __future__ import annotations

import sys
import time
import types
from dataclasses import dataclass

from tunekit.identity import variant
from tunekit.model import Environment, Footprint, Values, Winner
from tunekit.progress import ProblemReport, Row, SweepEvent, SweepReport
from tunekit.trials import Outcome, Stage, Status


@dataclass(frozen=True)
class SweepOptions:
    arch: str | None
    implementation: str | None
    jobs: int | None
    budget: str | None
    search: str
    seed: int
    resume: bool
    force: bool
    retry_failed: bool
    verify: str
    cases: str
    device: int
    variants: tuple[str, ...] = ()
    cache: str = "flush"
    margin: float = 0.01
    confidence: float = 0.95
    final_rounds: int = 160
    final_seconds: float = 120.0


def fake(mode: str):
    def sweep(spec_reference, problems, options, settings, on_event):
        count = {"slow": 20, "failures": 200}.get(mode, 4)
        rows = []
        state = "done"
        on_event(SweepEvent("expanded", text=f"{count} variants, none dropped"))
        on_event(SweepEvent("phase", text=f"compiling {count} variants", total=count))
        try:
            for n in range(count):
                v = variant("fake", 1, "fake_host", "host", Values(n=n))
                running = ((str(v), "mlir", 1.0),)
                on_event(SweepEvent("started", v, done=n, total=count, running=running))
                if mode == "slow":
                    time.sleep(0.1)
                failed = mode == "failures" or (mode == "mixed" and n == 2)
                if failed:
                    reason = f"tile {n} does not divide 64\n  at kernel.py:{n}"
                    outcome = Outcome(Stage.COMPILE, Status.COMPILE_ERROR, reason)
                else:
                    outcome = Outcome(Stage.COMPILE, Status.OK, seconds=Values(trace=0.1, mlir=1.4))
                rows.append(
                    Row(
                        v,
                        Footprint(smem_bytes=1024),
                        {Stage.COMPILE: outcome},
                        str(outcome.status),
                        outcome.reason,
                        1.5,
                    )
                )
                on_event(SweepEvent("finished", v, outcome, done=n + 1, total=count))
                if mode == "slow" and n == 4:
                    print("five done", file=sys.stderr, flush=True)
                if outcome.ok and mode != "slow":
                    ran = Outcome(Stage.MEASURE, Status.OK, samples_us=(3.0, 3.5))
                    on_event(SweepEvent("finished", v, ran, done=n + 1, total=count))
        except KeyboardInterrupt:
            state = "interrupted"
        winner, why = None, "no GPU is here"
        if mode == "mixed":
            first = rows[0].variant
            winner = Winner(first, problems[0], problems[0], Environment(), "p", "a", "s", 3.25, 0.1, 50, "x1", 0.031)
        return SweepReport(
            "fake", "host", (ProblemReport(problems[0], f"{count} variants", tuple(rows), winner, why),), state
        )

    module = types.ModuleType("tunekit.sweep")
    module.SweepOptions = SweepOptions
    module.sweep = sweep
    return module


if __name__ == "__main__":
    sys.modules["tunekit.sweep"] = fake(sys.argv[1])
    from tunekit.cli import main

    sys.exit(main(sys.argv[2:]))
