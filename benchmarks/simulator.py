"""What an instruction costs in the simulator, and how many a second a softmax's mix runs at, on one core.

    python benchmarks/simulator.py [--repetitions 20000]

Prints microseconds for each instruction with all 32 lanes of a warp active: the step alone, and as the warp's loop
runs it (with the guard, the check for undefined registers and the program counter). Then a softmax row's mix.
Times are this process's own (CPU time), the best of several.
"""

from __future__ import annotations

import argparse
import os
import time
import timeit
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.machine.cluster import Cluster
from tunekit.simulate.machine.lanes import FULL, Lanes
from tunekit.simulate.machine.program import Program
from tunekit.simulate.ptx.read import read_module

INSTRUCTIONS = (
    "fma.rn.f32 %r3, %r1, %r2, %r4;",
    "fma.rn.ftz.f32 %r3, %r1, %r2, %r4;",
    "fma.rn.f32x2 %rd3, %rd1, %rd2, %rd4;",
    "fma.rn.ftz.f32x2 %rd3, %rd1, %rd2, %rd4;",
    "add.rn.f32x2 %rd3, %rd1, %rd2;",
    "mul.rn.f32x2 %rd3, %rd1, %rd2;",
    "add.rm.ftz.f32 %r3, %r1, %r2;",
    "add.f32 %r3, %r1, %r2;",
    "mul.f32 %r3, %r1, %r2;",
    "max.f32 %r3, %r1, %r2;",
    "max.f32 %r3, %r1, %r2, %r4;",
    "ex2.approx.ftz.f32 %r3, %r1;",
    "cvt.rn.bf16x2.f32 %r3, %r1, %r2;",
    "cvt.rn.f16x2.f32 %r3, %r1, %r2;",
    "cvt.rn.satfinite.e4m3x2.f32 %rs3, %r1, %r2;",
    "cvt.u64.u32 %rd3, %r1;",
    "selp.f32 %r3, %r1, %r2, %p1;",
    "mov.b64 %rd3, {%r1, %r2};",
    "mov.b64 {%r3, %r5}, %rd1;",
    "mov.b32 %r3, %r1;",
    "setp.lt.s32 %p2, %r1, %r2;",
    "setp.neu.f32 %p2, %r1, %r2;",
    "add.s32 %r3, %r1, %r2;",
    "mad.lo.s32 %r3, %r1, %r2, %r4;",
    "shl.b32 %r3, %r1, 4;",
    "and.b32 %r3, %r1, 31;",
    "lop3.b32 %r3, %r1, %r2, %r4, 0xF8;",
    "prmt.b32 %r3, %r1, %r2, 0x5410;",
)
# For 64 scores of a row: scale and subtract, exponentiate, sum, narrow, and the maximum of the next block.
MIX = (
    ("fma.rn.f32x2 %rd3, %rd1, %rd2, %rd4;", 32),
    ("mov.b64 {%r5, %r6}, %rd3;", 32),
    ("ex2.approx.ftz.f32 %r7, %r5;", 64),
    ("mov.b64 %rd5, {%r7, %r6};", 32),
    ("add.rn.f32x2 %rd6, %rd6, %rd5;", 32),
    ("cvt.rn.bf16x2.f32 %r8, %r7, %r6;", 32),
    ("max.f32 %r9, %r9, %r1;", 64),
    ("selp.f32 %r10, %r1, %r2, %p1;", 16),
    ("setp.lt.s32 %p2, %r11, %r12;", 16),
)
START = """
mov.u32 %r11, %tid.x; add.s32 %r12, %r11, 3; cvt.rn.f32.u32 %r1, %r11; mul.f32 %r1, %r1, 0fBD800000;
mov.b32 %r2, 0f3E4CCCCD; mov.b32 %r4, 0f3DCCCCCD; mov.b32 %r5, %r1; mov.b32 %r6, %r2; mov.b32 %r9, %r1;
mov.b64 %rd1, {%r1, %r4}; mov.b64 %rd2, {%r2, %r2}; mov.b64 %rd4, {%r4, %r2}; mov.b64 %rd6, %rd1;
setp.lt.s32 %p1, %r11, 40; mov.u16 %rs1, 0;
"""


def program(body: str) -> Program:
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel()
{{
.reg .pred %p<8>;
.reg .b16 %rs<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
{START}
{body}
ret;
}}
"""
    module = read_module(text)
    return Program.of(module, module.kernels["kernel"], 0)


def cluster(made: Program) -> Cluster:
    launch = Launch("kernel", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, {}, ())
    return Cluster(made, launch, 0, [], seed=0)


def step_microseconds(text: str, repetitions: int) -> float:
    """The step of `text` alone."""
    made = program(text)
    ran = cluster(made)
    ran.run()
    warp = ran.ctas[0].warps[0]
    step, lanes = made.ops[-2].step, Lanes.of(FULL)
    with np.errstate(all="ignore"):
        return (
            min(timeit.repeat(lambda: step(warp, lanes), number=repetitions, repeat=5, timer=time.process_time))
            / repetitions
            * 1e6
        )


def loop_seconds(body: str) -> tuple[float, int]:
    """A whole run, and how many instructions it executed."""
    made = program(body)
    best: Any = None
    for _ in range(3):
        ran = cluster(made)
        seconds = timeit.timeit(ran.run, number=1, timer=time.process_time)
        best = seconds if best is None else min(best, seconds)
    return best, len(made.ops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20000)
    chosen = parser.parse_args()
    print(f"{'step':>8} {'in loop':>8}  microseconds, 32 lanes")
    for text in INSTRUCTIONS:
        alone = step_microseconds(text, chosen.repetitions)
        seconds, count = loop_seconds("\n".join([text] * 2000))
        print(f"{alone:8.2f} {seconds / count * 1e6:8.2f}  {text}")
    body = "\n".join("\n".join([text] * times) for text, times in MIX)
    seconds, count = loop_seconds("\n".join([body] * 8))
    print(f"softmax mix: {count / seconds:,.0f} instructions a second ({count} in {seconds:.3f} s)")


if __name__ == "__main__":
    main()
