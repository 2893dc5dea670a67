"""The state machines of synchronisation, without a kernel: mbarriers, named barriers, async-groups."""

from __future__ import annotations

import numpy as np
import pytest

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import HAPPENED, Knowledge
from tunekit.simulate.numbers.reduction import combine, supports
from tunekit.simulate.sync.barrier import ClusterBarrier, NamedBarrier
from tunekit.simulate.sync.groups import Groups, Operation, awaited
from tunekit.simulate.sync.mbarrier import COUNT_LIMIT, Mbarrier, Mbarriers, pending_count

FULL = 0xFFFF_FFFF


class Reports(list[tuple[FaultKind, str]]):
    def __call__(self, kind: FaultKind, text: str) -> None:
        self.append((kind, text))

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self)


def known(agent: int, epoch: int) -> Knowledge:
    one = Knowledge(8)
    one.rows[HAPPENED, agent] = epoch
    return one


@pytest.fixture
def reports() -> Reports:
    return Reports()


class TestMbarrier:
    def test_phase_needs_arrivals_and_transactions(self, reports: Reports) -> None:
        one = Mbarrier("mbarrier at shared 0x480", 0x480, 2)
        one.expect_tx(16384, reports)
        one.arrive(1, None, reports)
        one.arrive(1, None, reports)
        assert one.phase == 0
        assert not one.passed(0)
        assert one.passed(1)
        one.complete_tx(16384, None, reports)
        assert one.phase == 1
        assert one.passed(0)
        assert (one.pending, one.transactions) == (2, 0)
        assert not reports

    def test_completion_before_expectation_is_allowed(self, reports: Reports) -> None:
        one = Mbarrier("m", 0, 1)
        one.complete_tx(64, None, reports)
        assert one.transactions == -64
        one.expect_tx(64, reports)
        assert one.phase == 0
        one.arrive(1, None, reports)
        assert one.phase == 1
        assert not reports

    def test_deadlock_line(self, reports: Reports) -> None:
        one = Mbarrier("mbarrier at shared 0x480", 0x480, 128)
        for _ in range(3):
            one.arrive(128, None, reports)
        one.expect_tx(16384, reports)
        one.arrive(127, None, reports)
        assert one.awaited(1) == (
            "mbarrier at shared 0x480 (phase 3, waiting for parity 1): "
            "1 of 128 arrivals and 16384 bytes of transactions outstanding"
        )
        one.complete_tx(16400, None, reports)
        assert "1 of 128 arrivals outstanding, 16 bytes more completed than expected" in one.awaited(1)

    def test_too_many_arrivals(self, reports: Reports) -> None:
        one = Mbarrier("m", 0, 2)
        one.expect_tx(16, reports)
        one.arrive(2, None, reports)
        one.arrive(1, None, reports)
        assert reports == [(FaultKind.MBARRIER, "m (phase 0): 1 arrivals, 0 of 2 pending")]

    def test_transaction_count_has_limits(self, reports: Reports) -> None:
        one = Mbarrier("m", 0, 1)
        one.expect_tx(COUNT_LIMIT, reports)
        assert not reports
        one.expect_tx(1, reports)
        assert reports[0][0] is FaultKind.TRANSACTIONS
        assert str(COUNT_LIMIT + 1) in reports.text

    def test_waiter_learns_only_of_completed_phases(self, reports: Reports) -> None:
        one = Mbarrier("m", 0, 2)
        one.arrive(1, known(1, 5), reports)
        assert one.published is None
        one.arrive(1, known(2, 7), reports)
        assert one.published is not None
        assert list(one.published.rows[HAPPENED, 1:3]) == [5, 7]
        one.arrive(1, known(1, 9), reports)
        assert one.published.rows[HAPPENED, 1] == 5

    def test_many_lanes_may_span_phases(self, reports: Reports) -> None:
        one = Mbarrier("m", 0, 16)
        states = one.arrive_many(32, 1, None, reports)
        assert one.phase == 2
        assert [pending_count(state) for state in states] == [*range(16, 0, -1)] * 2
        assert one.passed_state(states[-1], reports)
        assert not reports
        one.passed_state(states[0], reports)
        assert "a state of phase 0 is tested in phase 2" in reports.text

    def test_drop_lowers_later_phases(self, reports: Reports) -> None:
        one = Mbarrier("m", 0, 3)
        one.drop(1, reports)
        one.arrive(1, None, reports)
        one.arrive(2, None, reports)
        assert (one.phase, one.pending) == (1, 2)

    def test_no_complete_must_not_complete(self, reports: Reports) -> None:
        one = Mbarrier("m", 0, 2)
        one.arrive_without_completing(1, None, reports)
        assert not reports
        one.arrive_without_completing(1, None, reports)
        assert ".noComplete arrival completes the phase" in reports.text


class TestMbarriers:
    @pytest.fixture
    def content(self) -> np.ndarray:
        return np.zeros(4096, dtype=np.uint8)

    def made(self, table: Mbarriers, content: np.ndarray, offset: int, count: int, reports: Reports) -> Mbarrier:
        one = table.init(offset, count, (0, 1), reports)
        assert one is not None
        content[offset : offset + 8] = np.frombuffer(one.signature, dtype=np.uint8)
        return one

    def test_lookup(self, content: np.ndarray, reports: Reports) -> None:
        table = Mbarriers(content)
        one = self.made(table, content, 0x480, 1, reports)
        assert table.get(0x480, reports) is one
        assert not reports

    @pytest.mark.parametrize(
        ("offset", "text"),
        [(0x488, "was never initialised"), (0x484, "not aligned to 8 bytes"), (0x1000, "outside the 4096 bytes")],
    )
    def test_nothing_there(self, content: np.ndarray, reports: Reports, offset: int, text: str) -> None:
        assert Mbarriers(content).get(offset, reports) is None
        assert text in reports.text

    def test_overwritten(self, content: np.ndarray, reports: Reports) -> None:
        table = Mbarriers(content)
        self.made(table, content, 0x480, 1, reports)
        content[0x483] ^= 1
        assert table.get(0x480, reports) is None
        assert "overwritten by a store" in reports.text

    def test_invalidated_then_initialised_again(self, content: np.ndarray, reports: Reports) -> None:
        table = Mbarriers(content)
        self.made(table, content, 0x480, 1, reports)
        table.inval(0x480, reports)
        assert table.get(0x480, reports) is None
        assert "was invalidated" in reports.text
        reports.clear()
        assert table.get(0x480, reports) is not self.made(table, content, 0x480, 1, reports)
        reports.clear()
        self.made(table, content, 0x480, 1, reports)
        assert "is initialised while a valid mbarrier" in reports.text

    @pytest.mark.parametrize("count", [0, COUNT_LIMIT + 1])
    def test_count_range(self, content: np.ndarray, reports: Reports, count: int) -> None:
        Mbarriers(content).init(0x480, count, (0, 1), reports)
        assert f"count of {count}, outside 1..{COUNT_LIMIT}" in reports.text

    def test_leftovers_at_exit(self, content: np.ndarray, reports: Reports) -> None:
        table = Mbarriers(content)
        one = self.made(table, content, 0x480, 1, reports)
        self.made(table, content, 0x488, 1, reports)
        one.expect_tx(4096, reports)
        ((line, wrong),) = table.leftovers()
        assert line.startswith("mbarrier at shared 0x480 (phase 0) at the CTA's exit")
        assert "4096 bytes of transactions" in line
        assert not wrong
        one.complete_tx(5000, None, reports)
        ((line, wrong),) = table.leftovers()
        assert "904 bytes more completed than expected" in line
        assert wrong

    @pytest.mark.parametrize(
        ("expected", "said"), [(4096, "96 bytes of transactions outstanding, and nothing"), (3900, "100 bytes more")]
    )
    def test_a_deadlock_tells_a_wrong_count(
        self, content: np.ndarray, reports: Reports, expected: int, said: str
    ) -> None:
        table = Mbarriers(content)
        one = self.made(table, content, 0x480, 1, reports)
        one.expect_tx(expected, reports)
        one.complete_tx(4000, None, reports)
        assert list(table.stuck()) == [], "the arrival is missing: the bytes may come with it"
        one.arrive(1, None, reports)
        (line,) = table.stuck()
        assert said in line


class Warps(dict[int, int]):
    def __call__(self, warp: int) -> int:
        return self[warp]


class TestNamedBarrier:
    def test_all_threads(self, reports: Reports) -> None:
        barrier = NamedBarrier(0, range(4), Warps(dict.fromkeys(range(4), FULL)))
        rounds = [barrier.arrive(warp, FULL, None, known(warp, 3), reports) for warp in range(4)]
        assert all(one is rounds[0] and one.done for one in rounds)
        assert rounds[0].known is not None
        assert list(rounds[0].known.rows[HAPPENED, :4]) == [3] * 4
        assert barrier.arrive(0, FULL, None, known(0, 4), reports) is not rounds[0]
        assert not reports

    def test_exited_warps_are_not_awaited(self, reports: Reports) -> None:
        live = Warps(dict.fromkeys(range(3), FULL))
        barrier = NamedBarrier(0, range(3), live)
        one = barrier.arrive(0, FULL, None, known(0, 1), reports)
        barrier.arrive(1, FULL, None, known(1, 1), reports)
        assert not barrier.settle(one)
        assert barrier.awaited(one) == "barrier 0: 64 of 96 threads have arrived (warps 0, 1)"
        live[2] = 0
        assert barrier.settle(one)

    def test_counted(self, reports: Reports) -> None:
        barrier = NamedBarrier(1, range(8), Warps(dict.fromkeys(range(8), FULL)))
        one = barrier.arrive(5, FULL, 64, known(5, 1), reports)
        assert not one.done
        barrier.arrive(2, FULL, 64, known(2, 1), reports)
        assert one.done
        assert not reports

    def test_divergent_threads_arrive_apart(self, reports: Reports) -> None:
        barrier = NamedBarrier(1, range(2), Warps(dict.fromkeys(range(2), FULL)))
        one = barrier.arrive(0, 0xFFFF, 64, known(0, 1), reports)
        barrier.arrive(1, FULL, 64, known(1, 1), reports)
        assert not one.done
        barrier.arrive(0, 0xFFFF_0000, 64, known(0, 1), reports)
        assert one.done
        assert not reports

    @pytest.mark.parametrize("threads", [0, 33, 96])
    def test_bad_counts(self, reports: Reports, threads: int) -> None:
        barrier = NamedBarrier(1, range(2), Warps(dict.fromkeys(range(2), FULL)))
        barrier.arrive(0, FULL, threads, known(0, 1), reports)
        assert reports[0] == (
            FaultKind.BARRIER,
            f"barrier 1 is given {threads} threads: not a multiple of 32 from 32 to 64",
        )

    def test_counts_that_disagree(self, reports: Reports) -> None:
        barrier = NamedBarrier(1, range(4), Warps(dict.fromkeys(range(4), FULL)))
        barrier.arrive(0, FULL, 64, known(0, 1), reports)
        barrier.arrive(1, FULL, 128, known(1, 1), reports)
        assert "used for 128 threads while 64 are expected" in reports.text

    def test_one_warp_twice(self, reports: Reports) -> None:
        barrier = NamedBarrier(1, range(4), Warps(dict.fromkeys(range(4), FULL)))
        barrier.arrive(0, FULL, 64, known(0, 1), reports)
        one = barrier.arrive(0, FULL, 64, known(0, 1), reports)
        assert one.done
        assert "warp 0 arrives at barrier 1 again" in reports.text

    def test_votes(self, reports: Reports) -> None:
        barrier = NamedBarrier(1, range(2), Warps(dict.fromkeys(range(2), FULL)))
        barrier.arrive(0, FULL, None, known(0, 1), reports, votes=[True] * 30 + [False] * 2)
        one = barrier.arrive(1, FULL, None, known(0, 1), reports, votes=[True] * 32)
        assert (one.votes, one.voters) == (62, 64)

    def test_red_and_sync_do_not_mix(self, reports: Reports) -> None:
        barrier = NamedBarrier(1, range(2), Warps(dict.fromkeys(range(2), FULL)))
        barrier.arrive(0, FULL, None, known(0, 1), reports, votes=[True] * 32)
        barrier.arrive(1, FULL, None, known(0, 1), reports)
        assert ".red is mixed" in reports.text


class TestClusterBarrier:
    def test_round(self, reports: Reports) -> None:
        live = Warps(dict.fromkeys(range(3), FULL))
        barrier = ClusterBarrier(range(3), live)
        one = barrier.arrive(0, FULL, known(0, 2), reports)
        assert barrier.arrive(1, FULL, None, reports) is one
        assert barrier.awaited(one) == "barrier.cluster: warps 2 of the cluster have not arrived"
        live[2] = 0
        assert barrier.settle(one)
        assert not reports

    def test_twice_without_wait(self, reports: Reports) -> None:
        barrier = ClusterBarrier(range(2), Warps(dict.fromkeys(range(2), FULL)))
        barrier.arrive(0, FULL, None, reports)
        barrier.arrive(0, FULL, None, reports)
        assert "again without having waited" in reports.text


class TestGroups:
    def test_wait_leaves_the_last_groups(self) -> None:
        groups = Groups()
        operations = [Operation(FULL, f"copy {n}") for n in range(3)]
        for one in operations:
            groups.issue(one)
            groups.commit(FULL)
        assert groups.before(FULL, 0) == operations
        assert groups.before(FULL, 1) == operations[1::-1] or set(groups.before(FULL, 1)) == set(operations[:2])
        assert groups.before(FULL, 2) == operations[:1]
        assert groups.before(FULL, 3) == []

    def test_empty_groups_count(self) -> None:
        groups = Groups()
        one = Operation(FULL, "copy")
        groups.issue(one)
        groups.commit(FULL)
        groups.commit(FULL)
        assert groups.before(FULL, 1) == [one]

    def test_each_thread_has_its_own(self) -> None:
        groups = Groups()
        first, second = Operation(1, "lane 0"), Operation(2, "lane 1")
        groups.issue(first)
        groups.commit(1)
        groups.issue(second)
        assert groups.before(2, 0) == []
        assert groups.everything(2) == [second]
        groups.commit(2)
        groups.commit(2)
        assert groups.before(1, 0) == [first]
        assert groups.before(2, 1) == [second]
        assert groups.before(1, 1) == []

    def test_a_lane_commits_an_operation_once(self) -> None:
        groups = Groups()
        one = Operation(3, "both lanes")
        groups.issue(one)
        groups.commit(1)
        groups.commit(1)
        assert groups.before(1, 1) == [one]
        groups.commit(2)
        assert groups.before(2, 1) == []
        assert groups.before(2, 0) == [one]

    def test_reads_may_be_over_before_writes(self) -> None:
        one = Operation(1, "store")
        assert not one.finished(True)
        one.read = True
        assert one.finished(True)
        assert not one.finished(False)
        assert awaited([one], False, "wait_group 0") == "wait_group 0: 1 operations outstanding, the first store"
        groups = Groups()
        groups.issue(one)
        assert groups.unwaited() == [one]
        groups.settle([one])
        assert groups.unwaited() == []


class TestReduction:
    def test_bf16_rounds_once(self) -> None:
        """Every pair of 4,000 random bf16 values against the sum in float64, rounded to nearest even."""
        bits = np.random.default_rng(1).integers(0, 2**16, (2, 4000), dtype=np.uint16)
        old, value = bits
        with np.errstate(invalid="ignore"):
            exact = (old.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            exact = exact + (value.astype(np.uint32) << 16).view(np.float32)
        got = combine("add", "bf16", old, value)
        number = (got.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        nan = np.isnan(exact)
        assert (got[nan] == 0x7FFF).all()
        finite = np.isfinite(exact) & np.isfinite(number)
        spacing = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(number[finite]), 1e-300))) - 7), 2.0**-133)
        error = np.abs(number[finite] - exact[finite])
        assert (error <= spacing / 2).all()
        tie = error == spacing / 2
        assert (got[finite][tie] & 1 == 0).all()

    def test_min_and_max_prefer_numbers_to_nan(self) -> None:
        nan = np.array([np.nan], np.float16)
        one = np.array([1], np.float16)
        assert combine("min", "f16", nan, one)[0] == 1
        assert combine("max", "f16", one, nan)[0] == 1

    def test_subnormals(self) -> None:
        tiny = np.array([1], np.uint32).view(np.float32)
        zero = np.zeros(1, np.float32)
        assert combine("add", "f32", tiny, zero)[0] == tiny[0]
        assert combine("add", "f32", tiny, zero, flush=True)[0] == 0
        assert np.signbit(combine("add", "f32", -tiny, -zero, flush=True)[0])

    @pytest.mark.parametrize(
        ("operation", "type_", "known"),
        [
            ("add", "u32", True),
            ("and", "b64", True),
            ("inc", "u32", True),
            ("inc", "s32", False),
            ("and", "f32", False),
            ("xor", "bf16", False),
            ("min", "bf16x2", True),
            ("add", "b32", False),
        ],
    )
    def test_supported(self, operation: str, type_: str, known: bool) -> None:
        assert supports(operation, type_) is known
