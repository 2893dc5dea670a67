"""Whole grids: several CTAs in several processes, what is merged, what is compared among CTAs and schedules."""

from __future__ import annotations

import gc
import struct

import numpy as np
import pytest

from tunekit.errors import UserError
from tunekit.simulate.grid import Grid
from tunekit.simulate.launch.arguments import Buffers, Wanted
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.machine.cluster import Cluster
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.report import Report
from tunekit.simulate.run import clusters_of, selected, simulate

# Each thread stores (number of its CTA) * 100 + thread at its own place.
NUMBERED = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r4, %r1, %r2, %r3;
    ld.param.u64 %rd1, [out]; mul.wide.u32 %rd2, %r4, 4; add.s64 %rd3, %rd1, %rd2;
    mad.lo.u32 %r5, %r1, 100, %r3; st.global.u32 [%rd3], %r5; exit;"""
OUT = ".param .u64 out"


def launch_of(buffers: Buffers, grid=(6, 1, 1), cluster=(1, 1, 1), threads=32) -> Launch:
    parameters = tuple(struct.pack("<Q", buffer.address) for buffer in buffers.buffers)
    return Launch("kernel", grid, (threads, 1, 1), cluster, 0, {}, parameters)


def outputs(count: int = 6 * 32) -> Buffers:
    return Buffers([Wanted("out", "uint32", (count,))])


def values(buffers: Buffers) -> np.ndarray:
    return buffers.bytes_of(buffers["out"]).view(np.uint32)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_grid_runs_in_one_or_several_processes(ptx_kernel, jobs):
    buffers = outputs()
    report = simulate(launch_of(buffers), read_module(ptx_kernel(NUMBERED, OUT)), buffers, jobs=jobs)
    assert report.ok and not report.partial
    assert values(buffers).tolist() == [cta * 100 + lane for cta in range(6) for lane in range(32)]
    assert report.instructions == 6 * 10 and report.seconds > 0
    assert buffers.written_of(buffers["out"]).all()


def test_a_process_keeps_no_cluster_that_it_has_done_with(ptx_kernel, monkeypatch):
    """Megabytes each, in cycles that the collector would find after hundreds: a grid of thousands took all memory."""
    one = Grid.one

    def counted(self, *arguments):
        held = sum(isinstance(found, Cluster) for found in gc.get_objects())
        said = one(self, *arguments)
        return {**said, "notes": [*said["notes"], f"{held} held"]}

    monkeypatch.setattr(Grid, "one", counted)
    buffers = outputs()
    report = simulate(launch_of(buffers), read_module(ptx_kernel(NUMBERED, OUT)), buffers, jobs=2)
    assert report.ok and set(report.notes) == {"0 held"}


def test_a_part_of_a_grid(ptx_kernel):
    buffers = outputs()
    report = simulate(launch_of(buffers), read_module(ptx_kernel(NUMBERED, OUT)), buffers, ctas="1,4-5")
    assert report.ok and report.partial and report.launches[0].ctas == 3
    written = buffers.written_of(buffers["out"]).reshape(6, -1)
    assert written.all(axis=1).tolist() == written.any(axis=1).tolist() == [False, True, False, False, True, True]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("first", (0,)),
        ("sample", (0, 2, 4, 7)),
        ("0-2,5", (0, 1, 2, 5)),
        (" 3 , 1", (1, 3)),
    ],
)
def test_choosing_ctas(text, chosen):
    assert selected(text, 8) == chosen


@pytest.mark.parametrize("text", ["", "x", "1-", "3-1", "8", "0-8", "-1"])
def test_ctas_that_there_are_not(text):
    with pytest.raises(UserError, match="CTAs"):
        selected(text, 8)
    with pytest.raises(UserError, match="CTAs"):
        clusters_of(Launch("k", (8, 1, 1), (32, 1, 1), (1, 1, 1), 0, {}, ()), text)


def test_the_rest_of_a_cluster_comes_along():
    launch = Launch("k", (4, 4, 2), (32, 1, 1), (2, 1, 2), 0, {}, ())
    assert clusters_of(launch, "first") == (0,)
    assert clusters_of(launch, [1, 2, 16 + 3]) == (0, 1)
    assert clusters_of(launch, "5") == (2,)
    assert clusters_of(launch, "all") == tuple(range(8))


def test_faults_of_many_ctas_are_one_with_their_number(ptx_kernel):
    body = NUMBERED.replace("add.s64 %rd3, %rd1, %rd2;", "add.s64 %rd3, %rd1, %rd2; add.s64 %rd3, %rd3, 2048;")
    buffers = outputs()
    report = simulate(launch_of(buffers), read_module(ptx_kernel(body, OUT)), buffers, jobs=2)
    (fault,) = report.faults
    assert fault.kind.value == "out of bounds" and fault.count == 6 and "bytes after the end of out" in fault.message
    assert not report.ok
    assert Report.from_payload(report.to_payload()) == report


@pytest.mark.parametrize("jobs", [1, 2])
def test_two_ctas_that_write_one_byte(ptx_kernel, jobs):
    body = NUMBERED.replace("mad.lo.u32 %r4, %r1, %r2, %r3", "mov.u32 %r4, %r3")
    buffers = outputs()
    report = simulate(launch_of(buffers, (2, 1, 1)), read_module(ptx_kernel(body, OUT)), buffers, jobs=jobs)
    (fault,) = report.faults
    assert fault.kind.value == "data race" and "has written too, and nothing orders them" in fault.message
    # the values are 0, 1, ... and 100, 101, ...: they differ in their lowest bytes
    assert "32 of 128 bytes" in fault.message


def test_two_ctas_that_write_the_same_value(ptx_kernel):
    """No matter of chance: whoever comes last, the result is the same."""
    body = NUMBERED.replace("mad.lo.u32 %r4, %r1, %r2, %r3", "mov.u32 %r4, %r3").replace(
        "mad.lo.u32 %r5, %r1, 100, %r3", "mov.u32 %r5, 7"
    )
    buffers = outputs()
    report = simulate(launch_of(buffers, (2, 1, 1)), read_module(ptx_kernel(body, OUT)), buffers, jobs=1)
    assert report.faults == ()


def test_ctas_that_take_turns_by_an_atomic(ptx_kernel):
    """A semaphore may order them, which is not followed: what comes behind an atomic is not judged."""
    body = NUMBERED.replace("mad.lo.u32 %r4, %r1, %r2, %r3", "mov.u32 %r4, %r3").replace(
        "st.global.u32 [%rd3]", "atom.global.add.u32 %r6, [%rd1+4096], 1; st.global.u32 [%rd3]"
    )
    buffers = Buffers([Wanted("out", "uint32", (2048,), data=np.zeros(2048, np.uint32), output=True)])
    report = simulate(launch_of(buffers, (2, 1, 1)), read_module(ptx_kernel(body, OUT)), buffers, jobs=2)
    assert report.faults == ()
    assert values(buffers)[1024] == 64


def test_a_reset_between_schedules_and_equal_results(ptx_kernel):
    """Each schedule finds the outputs poisoned and the in-place tensor as drawn."""
    body = """ld.param.u64 %rd1, [inout]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
        ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1; st.global.u32 [%rd1], %r2; exit;"""
    data = np.arange(32, dtype=np.uint32)
    buffers = Buffers([Wanted("inout", "uint32", (32,), data=data, output=True)])
    seen = []
    report = simulate(
        launch_of(buffers, (1, 1, 1)),
        read_module(ptx_kernel(body, ".param .u64 inout")),
        buffers,
        schedules=3,
        seed=7,
        judge=lambda seed: seen.append(seed) or "",
    )
    assert report.ok and seen == [7, 8, 9]
    assert buffers.bytes_of(buffers["inout"]).view(np.uint32).tolist() == list(range(1, 33))


def test_results_that_depend_on_the_schedule_are_told(ptx_kernel):
    """Warps append in the order in which an atomic lets them."""
    body = """ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; setp.ne.u32 %p1, %r2, 0; @%p1 exit;
        shr.u32 %r1, %r1, 5; atom.global.add.u32 %r3, [%rd1], 1; mul.wide.u32 %rd2, %r3, 4; add.s64 %rd1, %rd1, %rd2;
        st.global.u32 [%rd1+4], %r1; exit;"""
    buffers = Buffers([Wanted("out", "uint32", (9,), data=np.zeros(9, np.uint32), output=True)])
    launch = launch_of(buffers, (1, 1, 1), threads=256)
    report = simulate(launch, read_module(ptx_kernel(body, OUT)), buffers, schedules=6)
    assert report.faults == ()
    assert any("bytes differ between two schedules" in schedule.changed for schedule in report.schedules)
    assert not report.ok


def test_an_input_that_is_written(ptx_kernel):
    body = "ld.param.u64 %rd1, [x]; mov.b32 %r1, 7; st.global.u32 [%rd1+4], %r1; exit;"
    buffers = Buffers([Wanted("x", "uint32", (8,), data=np.zeros(8, np.uint32))])
    report = simulate(launch_of(buffers, (1, 1, 1)), read_module(ptx_kernel(body, ".param .u64 x")), buffers)
    assert report.schedules[0].wrong == "input x was changed: 1 bytes, the first at +0x4"


def test_what_the_judge_says_is_in_the_report(ptx_kernel):
    buffers = outputs()
    report = simulate(
        launch_of(buffers), read_module(ptx_kernel(NUMBERED, OUT)), buffers, judge=lambda seed: f"wrong at {seed}"
    )
    assert not report.ok and report.schedules[0].wrong == "wrong at 0" and report.faults == ()


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_instruction_that_is_not_modelled(ptx_kernel, jobs):
    buffers = outputs()
    text = ptx_kernel("tex.1d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [%rd1, {%r5}]; exit;", OUT)
    report = simulate(launch_of(buffers), read_module(text), buffers, jobs=jobs, schedules=3)
    assert report.refusal is not None and report.refusal.instruction == "tex.1d.v4.f32.f32"
    assert text.splitlines()[report.refusal.line - 1].startswith("tex.")
    assert [s.state for s in report.schedules] == ["not modelled"]
    assert not report.ok and Report.from_payload(report.to_payload()) == report


def test_a_time_limit(ptx_kernel):
    body = "mov.b32 %r1, 0; LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 100000000; @%p1 bra LOOP; exit;"
    buffers = outputs()
    report = simulate(launch_of(buffers), read_module(ptx_kernel(body, OUT)), buffers, jobs=1, time_limit_s=0.2)
    assert [s.state for s in report.schedules] == ["time limit"] and not report.ok


def test_global_variables_of_the_module(ptx_kernel):
    """A table of addresses leads to the value; a counter without initialiser begins at zero in every schedule."""
    variables = """.global .align 4 .u32 value = 41; .global .u64 table[2] = {0, value}; .global .u32 counter;"""
    body = """mov.u64 %rd1, table; ld.global.u64 %rd2, [%rd1+8]; ld.u32 %r1, [%rd2]; mov.u64 %rd3, counter;
        ld.global.u32 %r2, [%rd3]; add.u32 %r2, %r2, 1; st.global.u32 [%rd3], %r2; add.u32 %r1, %r1, %r2;
        ld.param.u64 %rd4, [out]; st.global.u32 [%rd4], %r1; exit;"""
    buffers = outputs(1)
    module = read_module(ptx_kernel(body, OUT, variables=variables))
    report = simulate(launch_of(buffers, (1, 1, 1), threads=1), module, buffers, schedules=2)
    assert report.ok, report.faults
    assert values(buffers).tolist() == [42]


# Warp 0 stores a column of tensor memory, warp 4 loads it behind a barrier; no tcgen05 fence stands around the barrier.
UNFENCED = """.shared .align 16 .b32 column; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r3, column;
    setp.eq.u32 %p1, %r2, 0; setp.eq.u32 %p2, %r2, 4; @!%p1 bra MEET;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32; ld.shared.b32 %r4, [%r3];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r1}; tcgen05.wait::st.sync.aligned;
    MEET: bar.sync 0; @!%p2 bra LAST; ld.shared.b32 %r4, [%r3];
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r4]; tcgen05.wait::ld.sync.aligned;
    LAST: bar.sync 0; ld.shared.b32 %r4, [%r3]; @!%p1 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
    END: exit;"""


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(("strict", "found"), [(False, []), (True, ["missing tcgen05 fence"])])
def test_strict_demands_the_fences_of_the_isa(ptx_kernel, jobs, strict, found):
    buffers = Buffers([])
    module = read_module(ptx_kernel(UNFENCED))
    report = simulate(launch_of(buffers, (2, 1, 1), threads=160), module, buffers, jobs=jobs, strict=strict)
    assert sorted({fault.kind.value for fault in report.faults}) == found


@pytest.mark.parametrize("stop", ["", "setp.gt.u32 %p2, %r1, 3; @%p2 trap;"])
def test_the_report_is_the_same_however_many_processes_make_it(ptx_kernel, stop):
    """The first instance of a fault is that of the first CTA, also where that CTA takes longest."""
    body = f"""mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; mov.u32 %r2, 0; @%p1 bra GO;
    L: add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 3000; @%p3 bra L;
    GO: {stop} shl.b32 %r3, %r1, 2; ld.shared.b32 %r4, [%r3+1024]; exit;"""
    text, found = ptx_kernel(body, OUT), []
    for jobs in (1, 2, 5):
        buffers = outputs()
        report = simulate(launch_of(buffers), read_module(text), buffers, jobs=jobs)
        assert report.faults[0].place.cta == (0, 0, 0)
        found.append((report.faults, report.instructions))
    assert found[0] == found[1] == found[2]
