"""The simulator's core: history of memory, order between agents, lanes, schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import (
    FENCED_SHARED,
    HAPPENED,
    TENSOR,
    TENSOR_BEFORE,
    Access,
    Agent,
    Knowledge,
    Order,
)
from tunekit.simulate.history.shadow import Shadow
from tunekit.simulate.machine.engine import Engine
from tunekit.simulate.machine.lanes import FULL, Lanes, bits_of
from tunekit.simulate.machine.memory import Buffer, GlobalMemory, Memory
from tunekit.simulate.machine.schedule import Schedule


class World:
    """A few agents around one shadowed memory of 64 bytes."""

    def __init__(self, *proxies: str) -> None:
        self.order = Order()
        self.agents = [self.order.agent(f"agent {n}", proxy) for n, proxy in enumerate(proxies)]
        self.known = [self.order.knowledge() for _ in proxies]
        for agent, known in zip(self.agents, self.known, strict=True):
            known.rows[HAPPENED, agent.index] = agent.epoch
        self.found: list[tuple[FaultKind, str]] = []
        self.shadow = Shadow(64, self.order.agents, hex, lambda kind, text, access: self.found.append((kind, text)))

    def access(self, number: int, *, strong: bool = False) -> Access:
        agent, known = self.agents[number], self.known[number]
        row = known.rows[HAPPENED]
        return Access(agent, agent.epoch, row, row, (None, None), strong=strong)

    def through_async(self, issuer: int, agent: Agent) -> Access:
        known = self.order.through_async_proxy(self.known[issuer], FENCED_SHARED)
        happened = self.known[issuer].rows[HAPPENED].copy()
        return Access(agent, agent.epoch, known, happened, (None, None), FaultKind.MISSING_PROXY_FENCE)

    def release(self, number: int, target: Knowledge) -> None:
        target.join(self.known[number])
        self.agents[number].epoch += 1
        self.known[number].rows[HAPPENED, number] = self.agents[number].epoch

    @property
    def kinds(self) -> list[FaultKind]:
        return [kind for kind, _ in self.found]


CELLS = np.arange(8, dtype=np.int64)


def test_a_read_of_what_nobody_wrote_is_named_once_for_the_access() -> None:
    world = World("generic")
    world.shadow.write(CELLS[:4], world.access(0))
    world.shadow.read(CELLS, world.access(0))
    assert world.kinds == [FaultKind.UNINITIALISED]
    assert "0x4" in world.found[0][1]
    assert "4 of 8" in world.found[0][1]


def test_own_work_is_always_in_order() -> None:
    world = World("generic")
    for _ in range(3):
        world.shadow.write(CELLS, world.access(0))
        world.shadow.read(CELLS, world.access(0))
    assert not world.found


@pytest.mark.parametrize("ordered", [True, False])
def test_read_after_another_agents_write_needs_an_order(ordered: bool) -> None:
    world = World("generic", "generic")
    world.shadow.write(CELLS, world.access(0))
    barrier = world.order.knowledge()
    world.release(0, barrier)
    if ordered:
        world.known[1].acquire(barrier)
    world.shadow.read(CELLS, world.access(1))
    assert world.kinds == ([] if ordered else [FaultKind.RACE])


@pytest.mark.parametrize("ordered", [True, False])
def test_write_after_another_agents_read_needs_an_order(ordered: bool) -> None:
    world = World("generic", "generic", "generic")
    world.shadow.write(CELLS, world.access(0))
    barrier = world.order.knowledge()
    world.release(0, barrier)
    world.known[1].acquire(barrier)
    world.known[2].acquire(barrier)
    world.shadow.read(CELLS, world.access(1))
    free = world.order.knowledge()
    world.release(1, free)
    if ordered:
        world.known[2].acquire(free)
    world.shadow.write(CELLS, world.access(2))
    assert world.kinds == ([] if ordered else [FaultKind.RACE])
    if not ordered:
        assert "agent 1 may still be reading" in world.found[0][1]


@pytest.mark.parametrize("strong", [True, False])
def test_a_strong_write_races_with_other_reads_that_are_not_strong(strong: bool) -> None:
    """Also where a third agent's strong read of the same bytes stands beside them."""
    world = World("generic", "generic", "generic", "generic")
    world.shadow.write(CELLS, world.access(0))
    barrier = world.order.knowledge()
    world.release(0, barrier)
    for reader in (1, 2, 3):
        world.known[reader].acquire(barrier)
    world.shadow.read(CELLS, world.access(1, strong=strong))
    world.shadow.read(CELLS, world.access(2, strong=True))
    world.shadow.write(CELLS, world.access(3, strong=True))
    assert world.kinds == ([] if strong else [FaultKind.RACE])


def test_a_strong_read_does_not_hide_its_agents_other_read() -> None:
    world = World("generic", "generic", "generic")
    world.shadow.write(CELLS, world.access(0))
    barrier = world.order.knowledge()
    world.release(0, barrier)
    for reader in (1, 2):
        world.known[reader].acquire(barrier)
    world.shadow.read(CELLS, world.access(1))
    world.shadow.read(CELLS, world.access(1, strong=True))
    world.shadow.write(CELLS, world.access(2, strong=True))
    assert world.kinds == [FaultKind.RACE]


def test_a_release_does_not_cover_what_its_agent_does_afterwards() -> None:
    world = World("generic", "generic")
    barrier = world.order.knowledge()
    world.release(0, barrier)
    world.shadow.write(CELLS, world.access(0))
    world.known[1].acquire(barrier)
    world.shadow.read(CELLS, world.access(1))
    assert world.kinds == [FaultKind.RACE]


@pytest.mark.parametrize("fence", ["by the writer", "by the issuer", "none"])
def test_the_async_proxy_sees_generic_writes_only_behind_a_fence(fence: str) -> None:
    """The fence may stand anywhere along the path from the write to the issue."""
    world = World("generic", "generic", "async")
    world.shadow.write(CELLS, world.access(0))
    if fence == "by the writer":
        world.known[0].fence(FENCED_SHARED)
    barrier = world.order.knowledge()
    world.release(0, barrier)
    world.known[1].acquire(barrier)
    if fence == "by the issuer":
        world.known[1].fence(FENCED_SHARED)
    world.shadow.read(CELLS, world.through_async(1, world.agents[2]))
    assert world.kinds == ([FaultKind.MISSING_PROXY_FENCE] if fence == "none" else [])


def test_a_fence_before_the_write_does_not_help() -> None:
    world = World("generic", "async")
    world.known[0].fence(FENCED_SHARED)
    barrier = world.order.knowledge()
    world.release(0, barrier)
    world.shadow.write(CELLS, world.access(0))
    world.shadow.read(CELLS, world.through_async(0, world.agents[1]))
    assert world.kinds == [FaultKind.MISSING_PROXY_FENCE]


def test_strong_accesses_do_not_race_among_themselves() -> None:
    world = World("generic", "generic")
    world.shadow.write(CELLS, world.access(0, strong=True))
    world.shadow.write(CELLS, world.access(1, strong=True))
    assert not world.found
    world.shadow.read(CELLS, world.access(0))
    assert world.kinds == [FaultKind.RACE]


def test_memory_that_is_given_back_forgets() -> None:
    world = World("generic", "generic")
    world.shadow.write(CELLS, world.access(0))
    world.shadow.read(CELLS, world.access(0))
    world.shadow.forget(CELLS)
    world.shadow.write(CELLS, world.access(1))
    assert not world.found


def test_agents_made_later_than_a_knowledge_are_unknown_to_it() -> None:
    world = World("generic")
    old = world.access(0)
    late = [world.order.agent(f"late {n}", "async") for n in range(200)]
    writer = late[-1]
    row = world.order.knowledge().rows[HAPPENED]
    world.shadow.write(CELLS, Access(writer, writer.epoch, row, row, (None, None)))
    world.shadow.read(CELLS, old)
    assert world.kinds == [FaultKind.RACE]


def test_waiting_teaches_everything_but_the_tensor_row() -> None:
    order = Order()
    agent = order.agent("pipe", "tensor")
    source, sink = order.knowledge(), order.knowledge()
    source.rows[:, agent.index] = 7
    sink.acquire(source)
    assert sink.rows[HAPPENED, agent.index] == 7
    assert sink.rows[TENSOR_BEFORE, agent.index] == 7
    assert sink.rows[TENSOR, agent.index] == 0
    sink.fence(TENSOR, TENSOR_BEFORE)
    assert sink.rows[TENSOR, agent.index] == 7


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["read", "write", "sync"]), st.integers(0, 3)), max_size=40)
)
def test_findings_match_a_slow_definition(steps: list[tuple[int, str, int]]) -> None:
    """Three agents, four cells, one lock-like object: races are exactly the conflicting pairs without a path."""
    world = World("generic", "generic", "generic")
    lock = world.order.knowledge()
    events: list[tuple[int, str, int]] = []
    edges: list[tuple[int, int]] = []
    last_of: dict[int, int] = {}
    releases: list[int] = []
    races = 0

    def before(start: int, end: int) -> bool:
        seen, todo = set(), [start]
        while todo:
            here = todo.pop()
            if here == end:
                return True
            todo.extend(b for a, b in edges if a == here and b not in seen and not seen.add(b))  # type: ignore[func-returns-value]
        return False

    for number, (agent, what, cell) in enumerate(steps):
        events.append((agent, what, cell))
        if agent in last_of:
            edges.append((last_of[agent], number))
        last_of[agent] = number
        if what == "sync":
            world.known[agent].acquire(lock)
            world.release(agent, lock)
            edges.extend((earlier, number) for earlier in releases)
            releases.append(number)
            continue
        conflicting = [
            n
            for n, (other, kind, where) in enumerate(events[:-1])
            if kind in ("read", "write") and where == cell and other != agent and "write" in (kind, what)
        ]
        # The history keeps the last write and each agent's last read since; an older unordered access is hidden
        # only behind one that is itself unordered or was reported.
        races += any(not before(n, number) for n in conflicting)
        found = len(world.found)
        one = np.array([cell], dtype=np.int64)
        world.shadow.initialised[cell] = True
        (world.shadow.write if what == "write" else world.shadow.read)(one, world.access(agent))
        if len(world.found) > found:
            assert any(not before(n, number) for n in conflicting), "a false alarm"
    assert bool(races) == bool(world.found)


def test_global_memory_names_the_nearest_buffer() -> None:
    data = np.zeros(64, dtype=np.uint8)
    buffer = Buffer("q", 0x1000, data, np.ones(64, dtype=np.bool_))
    memory = GlobalMemory([buffer], lambda b: None)
    inside = memory.within(np.array([0x0FFF, 0x1000, 0x103C, 0x103D], dtype=np.int64), 4)
    assert inside.tolist() == [False, True, True, False]
    assert memory.where(0x1010) == "global q+0x10"
    assert "1 bytes before q" in memory.where(0x0FFF)
    assert "0 bytes after the end of q" in memory.where(0x1040)


def test_memory_reads_and_writes_what_the_offsets_say() -> None:
    memory = Memory("shared", np.arange(64, dtype=np.uint8))
    read = memory.read(np.array([[0, 8], [60, 4]], dtype=np.int64), 4, None)
    assert read[1, 0].tolist() == [60, 61, 62, 63]
    memory.write(np.array([2], dtype=np.int64), np.full((1, 2), 9, dtype=np.uint8), None)
    assert memory.data[:5].tolist() == [0, 1, 9, 9, 4]


@given(st.integers(0, FULL))
def test_lanes_and_their_bits(bits: int) -> None:
    lanes = Lanes.of(bits)
    assert bits_of(lanes.mask) == bits
    assert lanes.count == bin(bits).count("1")
    assert Lanes.of_mask(lanes.mask) is lanes
    assert lanes.all == (bits == FULL)


def test_a_queue_keeps_its_order_and_a_seed_its_choices() -> None:
    def outcome(seed: int) -> list[str]:
        done: list[str] = []
        engine = Engine()
        for n in range(6):
            engine.submit(lambda n=n: done.append(f"a{n}"), "a", "a")  # type: ignore[misc]
            engine.submit(lambda n=n: done.append(f"b{n}"), "b", "b")  # type: ignore[misc]
            engine.submit(lambda n=n: done.append(f"c{n}"), None, "c")  # type: ignore[misc]
        schedule = Schedule(seed, 1)
        while engine.step(schedule):
            pass
        return done

    runs: list[Any] = [outcome(seed) for seed in range(8)]
    for run in runs:
        for queue in "ab":
            assert [item for item in run if item[0] == queue] == [f"{queue}{n}" for n in range(6)]
    assert outcome(3) == runs[3]
    assert len({tuple(run) for run in runs}) == 8
    assert any([item for item in run if item[0] == "c"] != [f"c{n}" for n in range(6)] for run in runs)


def test_a_read_of_an_output_before_any_write_to_it_is_remembered(run_ptx, ptx_kernel) -> None:
    """Whichever of the two warps comes first, the race is found."""
    body = """ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra READ;
    setp.ne.u32 %p2, %r1, 32; @%p2 exit; st.global.b32 [%rd1], 7; exit; READ: ld.global.b32 %r2, [%rd1]; exit;"""
    for seed in range(6):
        ran = run_ptx(
            ptx_kernel(body, ".param .u64 out"), {"out": np.zeros(4, np.uint32)}, ["out"], block=(64, 1, 1), seed=seed
        )
        assert ran.kinds == {"data race"}


def test_a_deadlock_names_the_source_line_of_every_wait(run_ptx, ptx_kernel):
    body = """
    .loc 1 10 3
    mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra FIRST;
    .loc 1 20 3
    bar.sync 1, 128; ret;
    FIRST:
    .loc 1 30 3
    bar.sync 2, 128; ret;
    """
    ran = run_ptx(ptx_kernel(body), block=(64, 1, 1))
    (message,) = [fault.message for fault in ran.faults if fault.kind is FaultKind.DEADLOCK]
    first, second = message.splitlines()[1:]
    assert first.startswith("warp 0 at PTX line") and "(file 1:30) waits for" in first
    assert second.startswith("warp 1 at PTX line") and "(file 1:20) waits for" in second
