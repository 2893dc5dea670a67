"""Builders of the values that the store keeps, and children that may be killed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable

from tunekit import identity
from tunekit.model import Environment, Footprint, Values, Winner
from tunekit.trials import KnownBad, Outcome, Stage, Status, Trial

H200 = Environment(
    gpu="NVIDIA H200",
    arch="sm_90a",
    driver="570.133.20",
    power_limit_w=700.0,
    mig="off",
    clocks_policy="default",
    cuda="12.8",
    cutlass_dsl="4.8.1",
    tvm_ffi="0.1.11",
    torch="2.13.0",
    python="3.12.1",
    tunekit="0.1.0",
)
PROTOCOL = "1/final random flush default"


def make_variant(number: int = 0, spec: str = "fmha"):
    return identity.variant(spec, 1, "wgmma", "sm_90a", Values(kv_stage=number, smem_p=True, scale=1.0, layout="nt"))


def make_trial(number: int = 0, *, stage: Stage = Stage.COMPILE, samples=(), status=Status.OK, reason="", **fields):
    outcome = Outcome(
        stage=stage,
        status=status,
        reason=reason,
        seconds=Values(trace=0.25, ptxas=1.0 / 3.0),
        peak_rss_bytes=123_456_789,
        artifact="a" * 64,
        footprint=Footprint(smem_bytes=232_448, registers=168, spill_bytes=0),
        facts=Values(instructions=1234, occupancy=0.1 + 0.2, tma=True),
        samples_us=tuple(samples),
        protocol=fields.get("protocol", PROTOCOL),
        windows=(Values(us=1.5, sm_clock_mhz=1980, kept=True), Values(us=1.7, reason="throttled")) if samples else (),
    )
    whole = {
        "variant": make_variant(number),
        "problem": Values(head_dim=128, normalize=True),
        "compile_key": f"{number:064x}",
        "environment": H200,
        "protocol": PROTOCOL,
        **fields,
    }
    return Trial(outcome=outcome, **whole)


def make_winner(number: int = 0, **fields):
    whole = {
        "variant": make_variant(number),
        "problem": Values(head_dim=128, s_k=1152),
        "bucket": Values(head_dim=128, s_k=2048),
        "environment": H200,
        "protocol": PROTOCOL,
        "artifact": f"{number:064x}",
        "symbol": f"tunekit_{number}",
        "median_us": 100.0 / 3.0,
        "spread_us": 0.2,
        "samples": 40,
        "runner_up": make_variant(number + 1).id,
        "margin": 0.03,
        "confidence": 0.99,
        "tied": ("abc",),
        **fields,
    }
    return Winner(**whole)


def make_bad(number: int = 0, **fields):
    whole = {
        "compile_key": f"{number:064x}",
        "variant": make_variant(number),
        "status": Status.COMPILE_TIMEOUT,
        "reason": "compile_timeout after 5.0 s in ptxas",
        "phase": "ptxas",
        "seconds": 5.0,
        "peak_rss_bytes": 10**9,
        "signal": 9,
        **fields,
    }
    return KnownBad(**whole)


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child; its pid. The child exits 0, or 1 with its traceback on stderr."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def fork_waiting(work: Callable[[], object]) -> tuple[int, Callable[[], object]]:
    """A child that runs `work` once it is told to: its pid, and how to tell it.

    For tests that open a database afterwards: SQLite's locks don't survive a fork.
    """
    reading, writing = os.pipe()

    def waiting() -> None:
        os.read(reading, 1)
        work()

    return fork(waiting), lambda: os.write(writing, b"!")


def wait(pid: int) -> int:
    """The child's exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_all(pids: Iterable[int]) -> list[int]:
    return [wait(pid) for pid in pids]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
