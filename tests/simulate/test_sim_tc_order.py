"""Order between tcgen05 operations and everything else (PTX ISA 9.7.16.6): what is demanded, what is not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulate.tensor_core import Bench
from tests.simulate.test_sim_tc_mma import A_AT, B_AT, shape_of
from tunekit.simulate.matrix import descriptor_sm100
from tunekit.simulate.matrix.layout import NONE, SWIZZLE_128B, Place
from tunekit.simulate.units.tcgen05.instruction_descriptor import encode as describe

# %p1: the first thread of warp 0; %p2: warp 1. %r1 D, %r2 A, %r3 the shape, %r4 an mbarrier, %r5 a quarter's address.
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1; bar.sync 0;"
MMA = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p3;"
MMA_TS = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2], %rd2, %r3, %p3;"
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];"
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4], 0; @!%p4 bra WAIT;"
LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r5];"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;"
ST = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r6], {%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37};"
WAIT_ST = "tcgen05.wait::st.sync.aligned;"
BEFORE = "tcgen05.fence::before_thread_sync;"
AFTER = "tcgen05.fence::after_thread_sync;"
BAR = "bar.sync 1;"


def run(text: str, *, seed: int = 0, strict: bool = False, written: bool = True, tensor_a: bool = True) -> Bench:
    """Four warps run `text`; A and B are ones in shared memory, A is ones in tensor memory too."""
    bench = Bench(f"{INIT} {text}", seed=seed, strict=strict)
    bench.allocate()
    shape = shape_of("f16", 128, 16, "bf16", "bf16")
    ones = np.full((128, 16), 0x3F80, np.uint16)
    places = Place(A_AT, 16, 1024, SWIZZLE_128B), Place(B_AT, 16, 1024, SWIZZLE_128B)
    if written:
        bench.matrix(places[0], ones, "bf16")
    bench.matrix(places[1], ones[:16], "bf16")
    if tensor_a:
        bench.write_tensor(slice(None), slice(64, 72), np.full((128, 8), 0x3F803F80, np.uint32))
    lane = np.arange(32)
    bench.set({"%r1": 0, "%r2": 64, "%r3": describe(shape), "%r4": 0x500, "%p1": lane < 0, "%p2": 0, "%p3": 0})
    bench.set({"%rd1": descriptor_sm100.encode(places[0]), "%rd2": descriptor_sm100.encode(places[1])})
    bench.set({f"%r{n}": 0x3F803F80 for n in range(30, 38)})
    for warp in range(4):
        bench.set({"%r5": 32 * warp << 16, "%r6": 32 * warp << 16 | 64}, warp=warp)
    bench.set({"%p1": lane == 0}, warp=0)
    bench.set({"%p5": lane < 0})
    bench.set({"%p2": 1, "%p5": lane == 0}, warp=1)
    bench.run()
    return bench


def kinds(bench: Bench) -> set[str]:
    return {fault.kind.value for fault in bench.cluster.faults.all()}


@pytest.mark.parametrize("seed", range(4))
def test_a_commit_and_a_wait_make_a_product_readable(seed: int) -> None:
    bench = run(MMA + COMMIT + WAIT + AFTER + LD + WAIT_LD, seed=seed, strict=True)
    assert bench.faults == []
    assert bench.get("%r20", 3).view(np.float32).tolist() == [16.0] * 32


def test_a_product_read_without_commit() -> None:
    found = [run(MMA + LD + WAIT_LD, seed=seed) for seed in range(4)]
    assert all(kinds(bench) <= {"data race", "uninitialised read"} and bench.faults for bench in found)


def test_a_commit_that_nobody_waits_for() -> None:
    bench = run(MMA + COMMIT + LD + WAIT_LD)
    assert kinds(bench) & {"data race", "uninitialised read"}


@pytest.mark.parametrize(("strict", "expected"), [(False, set()), (True, {"missing tcgen05 fence"})])
def test_the_fence_after_an_mbarrier_wait(strict: bool, expected: set[str]) -> None:
    """The ISA asks for the fence; CUTLASS's kernels go without, so it is demanded only on request."""
    assert kinds(run(MMA + COMMIT + WAIT + LD + WAIT_LD, strict=strict)) == expected


@pytest.mark.parametrize(
    ("steps", "strict", "expected"),
    [
        (ST + WAIT_ST + BEFORE + BAR + AFTER + MMA_TS, True, set()),
        (ST + WAIT_ST + BAR + MMA_TS, False, set()),
        (ST + WAIT_ST + BAR + AFTER + MMA_TS, True, {"missing tcgen05 fence"}),
        (ST + WAIT_ST + BEFORE + BAR + MMA_TS, True, {"missing tcgen05 fence"}),
        (ST + BEFORE + BAR + AFTER + MMA_TS, False, {"data race"}),
        (ST + WAIT_ST + MMA_TS, False, {"data race"}),
    ],
)
def test_a_stored_operand(steps: str, strict: bool, expected: set[str]) -> None:
    """tcgen05.st to tcgen05.mma of another thread: the wait, the fence before, the barrier, the fence after."""
    bench = run(steps + COMMIT + WAIT.replace("WAIT", "DONE"), strict=strict, tensor_a=False)
    assert kinds(bench) - {"uninitialised read"} == expected


@pytest.mark.parametrize(
    ("steps", "strict", "expected"),
    [
        (LD + WAIT_LD + BEFORE + BAR + AFTER + MMA, True, set()),
        (LD + WAIT_LD + BAR + MMA, False, set()),
        (LD + WAIT_LD + BAR + AFTER + MMA, True, {"missing tcgen05 fence"}),
        (LD + BAR + MMA + WAIT_LD, False, {"data race"}),
    ],
)
def test_a_product_that_overwrites_what_is_being_read(steps: str, strict: bool, expected: set[str]) -> None:
    again = WAIT.replace("WAIT", "AGAIN").replace("0; @", "1; @")
    bench = run(MMA + COMMIT + WAIT + AFTER + steps + COMMIT + again, strict=strict)
    assert kinds(bench) == expected


def test_products_of_one_pipe_go_in_order() -> None:
    """A second product accumulates on the first without any wait between them."""
    accumulate = MMA.replace("%p3", "!%p3")
    bench = run(MMA + accumulate + accumulate + COMMIT + WAIT + AFTER + LD + WAIT_LD, strict=True)
    assert bench.faults == []
    assert bench.get("%r20")[0].view(np.float32) == 48.0


def test_a_copy_comes_before_the_product_that_reads_it() -> None:
    copy = "@%p1 tcgen05.cp.cta_group::1.128x256b [%r2], %rd1;"
    bench = run(copy + MMA_TS + COMMIT + WAIT + AFTER + LD + WAIT_LD, strict=True, tensor_a=False)
    assert bench.faults == []
    assert bench.get("%r20", 2).view(np.float32).tolist() == [16.0] * 32


@pytest.mark.parametrize(("fence", "expected"), [(BEFORE, set()), ("", {"data race"})])
def test_a_copy_by_another_thread_comes_before_the_product(fence: str, expected: set[str]) -> None:
    """Pipelined instructions of different threads (9.7.16.6.4.3): fences and a barrier, but nothing is waited for."""
    copy = "@%p5 tcgen05.cp.cta_group::1.128x256b [%r2], %rd1;"
    for seed in range(3):
        bench = run(copy + fence + BAR + AFTER + MMA_TS + COMMIT + WAIT, tensor_a=False, seed=seed, strict=bool(fence))
        assert kinds(bench) == expected


def test_a_load_does_not_follow_a_copy_that_was_only_issued() -> None:
    copy = "@%p5 tcgen05.cp.cta_group::1.128x256b [%r2], %rd1;"
    load = LD.replace("[%r5]", "[%r6]")
    assert kinds(run(copy + BEFORE + BAR + AFTER + load + WAIT_LD)) & {"data race"}


@pytest.mark.parametrize(("after", "expected"), [(AFTER, set()), ("", {"data race"})])
def test_relaxed_synchronisation_with_fences(after: str, expected: set[str]) -> None:
    """The canonical patterns of 9.7.16.6.4 use relaxed mbarrier operations: the tcgen05 fences alone make the order."""
    wait = WAIT.replace("try_wait.parity", "try_wait.parity.relaxed.cluster")
    assert kinds(run(MMA + COMMIT + wait + after + LD + WAIT_LD)) == expected


FILL = "st.shared::cta.v4.b32 [%r7], {%r30, %r31, %r32, %r33};"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (FILL + "fence.proxy.async.shared::cta;" + BAR, set()),
        (FILL + BAR, {"missing proxy fence"}),
        (FILL + BAR + "fence.proxy.async.shared::cta;", set()),
    ],
)
def test_operands_written_by_ordinary_stores(steps: str, expected: set[str]) -> None:
    """A proxy fence anywhere on the way from the stores to the product: before the barrier or after it."""
    bench = Bench(f"{INIT} {steps} {MMA} {COMMIT} {WAIT}", threads=256)
    bench.allocate()
    shape = shape_of("f16", 128, 16, "bf16", "bf16")
    place = Place(B_AT, 16, 1024, SWIZZLE_128B)
    bench.matrix(place, np.full((16, 16), 0x3F80, np.uint16), "bf16")
    lane = np.arange(32)
    b = descriptor_sm100.encode(place)
    bench.set({"%r1": 0, "%r3": describe(shape), "%r4": 0x500, "%p1": lane < 0, "%p3": 0, "%rd2": b})
    bench.set({"%rd1": descriptor_sm100.encode(Place(A_AT, 2048, 128, NONE))})
    bench.set({f"%r{n}": 0x3F803F80 for n in range(30, 34)})
    for warp in range(8):
        # 256 threads write the 256 chunks of 16 bytes of A.
        bench.set({"%r7": A_AT + 16 * (32 * warp + lane).astype(np.uint32)}, warp=warp)
    bench.set({"%p1": lane == 0}, warp=0)
    bench.run()
    assert kinds(bench) == expected


def test_an_operand_that_nothing_has_written() -> None:
    bench = run(MMA + COMMIT + WAIT, written=False)
    assert kinds(bench) == {"uninitialised read"}


def test_work_that_is_unfinished_when_the_columns_are_freed() -> None:
    text = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], %r10;" + "{steps}"
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, %r10;"
    for steps, expected in ((MMA + COMMIT + WAIT + free, set()), (MMA + free, {"data race", "tmem access"})):
        bench = Bench(f"{INIT} {text.format(steps=steps)}", threads=32)
        shape = shape_of("f16", 128, 16, "bf16", "bf16")
        places = Place(A_AT, 16, 1024, SWIZZLE_128B), Place(B_AT, 16, 1024, SWIZZLE_128B)
        a = bench.matrix(places[0], np.zeros((128, 16), np.uint16), "bf16")
        b = bench.matrix(places[1], np.zeros((16, 16), np.uint16), "bf16")
        bench.set({"%r1": 0, "%r3": describe(shape), "%r4": 0x500, "%p1": np.arange(32) == 0, "%p3": 0})
        bench.set({"%rd1": a, "%rd2": b, "%r9": 0x600, "%r10": 32, "%r11": 0})
        bench.run()
        assert kinds(bench) <= expected and bool(kinds(bench)) == bool(expected)


def test_a_commit_reaches_the_ctas_of_its_mask() -> None:
    commit = (
        "@%p1 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r4], %rs1;"
    )
    init = "@%p5 mbarrier.init.shared::cta.b64 [%r8], 1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    wait = WAIT.replace("[%r4]", "[%r8]")
    bench = Bench(f"{init} {commit} {wait}", ctas=2, threads=32)
    lane = np.arange(32)
    bench.set({"%r4": 0x500, "%rs1": 3, "%p1": 0, "%p5": lane == 0})
    for cta in range(2):
        bench.set({"%r8": cta << 24 | 0x500}, cta=cta)
    bench.set({"%p1": lane == 0}, cta=0)
    bench.run()
    assert bench.faults == []
    assert bench.result is not None and bench.result.state == "done"
