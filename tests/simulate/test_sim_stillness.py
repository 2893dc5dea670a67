"""Livelock: what spins for ever, and what only takes long, waits for another cluster, or counts."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tunekit.simulate.launch.arguments import Buffers, Wanted
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.report import Report
from tunekit.simulate.run import simulate

OUT = ".param .u64 out"
LONG = "mov.u32 %r2, 0; L: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4000; @%p2 bra L;"
# CTA `first` sets a flag after a long while, which the other one waits for
FLAG = """mov.u32 %r1, %ctaid.x; ld.param.u64 %rd1, [out]; setp.ne.u32 %p1, %r1, {first}; @%p1 bra W;
    {long} st.release.gpu.global.u32 [%rd1], 1; exit;
    W: ld.acquire.gpu.global.u32 %r3, [%rd1]; setp.eq.u32 %p3, %r3, 0; @%p3 bra W; exit;"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("tunekit.simulate.machine.cluster.STILL_INSTRUCTIONS", 500)
    monkeypatch.setattr("tunekit.simulate.machine.stillness.LONGEST", 20_000)


def report_of(text: str, jobs: int) -> Report:
    buffers = Buffers([Wanted("out", "uint32", (4,), data=np.zeros(4, np.uint32), output=True)])
    parameters = (struct.pack("<Q", buffers.buffers[0].address),)
    launch = Launch("kernel", (2, 1, 1), (32, 1, 1), (1, 1, 1), 0, {}, parameters)
    return simulate(launch, read_module(text), buffers, jobs=jobs)


@pytest.mark.parametrize("threads", [32, 96])
def test_registers_alone_may_be_at_work_for_long(run_ptx, ptx_kernel, threads):
    assert run_ptx(ptx_kernel(f"{LONG} exit;"), block=(threads, 1, 1)).faults == ()


@pytest.mark.parametrize("loop", ["bra L;", "add.u32 %r1, %r1, 1; and.b32 %r1, %r1, 3; bra L;"])
def test_a_loop_that_comes_back_to_itself(run_ptx, ptx_kernel, loop):
    body = f"mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @!%p1 exit; L: {loop}"
    ran = run_ptx(ptx_kernel(body), block=(64, 1, 1))
    assert ran.kinds == {"livelock"} and ran.results[0].instructions < 10_000


def test_a_loop_that_counts_is_given_up_in_the_end(run_ptx, ptx_kernel):
    ran = run_ptx(ptx_kernel("mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; bra L;"))
    assert ran.kinds == {"livelock"} and ran.results[0].instructions > 20_000


def test_a_cta_that_waits_for_one_that_works_in_another_process(ptx_kernel):
    assert report_of(ptx_kernel(FLAG.format(first=0, long=LONG), OUT), 2).ok


def test_ctas_that_wait_for_each_other_in_vain(ptx_kernel):
    report = report_of(ptx_kernel(FLAG.format(first=2, long=LONG), OUT), 2)
    assert {fault.kind.value for fault in report.faults} == {"livelock"}


def test_a_cta_that_waits_for_one_that_has_not_started(ptx_kernel):
    text = ptx_kernel(FLAG.format(first=1, long=LONG), OUT)
    (fault,) = report_of(text, 1).faults
    assert "1 clusters have not started: if it waits for one, run more at once (--jobs)" in fault.message
    assert report_of(text, 2).ok
