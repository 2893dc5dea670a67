"""A cluster of CTAs that run together, and the loop that runs them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from tunekit.errors import UserError
from tunekit.simulate.faults import FaultKind, Faults, Stop
from tunekit.simulate.history.order import Access, Order
from tunekit.simulate.history.shadow import Shadow
from tunekit.simulate.machine.claims import Claims
from tunekit.simulate.machine.cta import Cta, place_of
from tunekit.simulate.machine.engine import Engine
from tunekit.simulate.machine.memory import Buffer, GlobalMemory, Memory
from tunekit.simulate.machine.program import Program
from tunekit.simulate.machine.schedule import Schedule
from tunekit.simulate.machine.stillness import RUNS, SPINS, Others, Stillness
from tunekit.simulate.machine.symbols import parameter_offsets

if TYPE_CHECKING:
    from tunekit.simulate.launch.launch import Launch
    from tunekit.simulate.ptx.module import Instruction

P = TypeVar("P")
# Instructions without any change of memory or barriers anywhere after which warps are watched: do they only spin?
STILL_INSTRUCTIONS = 50_000
# The same of one warp, after which its lanes that wait to reconverge go on without the others: those may spin on
# what these have yet to do, such as giving back a lock.
PATIENCE = 1000


_PTX_LINE = re.compile(r"PTX line (\d+)")


class TimeUp(Exception):
    """The time limit of a simulation has passed."""


@dataclass(frozen=True)
class ClusterResult:
    """What one cluster did. state: "done", "stopped" (a fatal fault) or "time limit"."""

    faults: Faults
    instructions: int
    seconds: float
    state: str


class Cluster:
    """The CTAs of one cluster with all that they share.

    number counts clusters in the grid, x fastest. strict demands also what the ISA asks for and kernels that are known
    to be right leave out: tcgen05 fences around the synchronisation of threads, and tcgen05.wait::ld before a loaded
    register is used. lock guards global atomics against other processes that simulate other clusters of the same grid;
    others says what those do.
    """

    launch: Launch
    number: int
    size: int

    def __init__(
        self,
        program: Program,
        launch: Launch,
        number: int,
        buffers: Sequence[Buffer],
        *,
        seed: int = 0,
        lock: AbstractContextManager[Any] | None = None,
        deadline: float | None = None,
        strict: bool = False,
        others: Others | None = None,
    ) -> None:
        self.program = program
        self.launch = launch
        self.number = number
        self.lock: AbstractContextManager[Any] = lock or nullcontext()
        self.deadline = deadline
        self.strict = strict
        self.others = others or Others()
        self.faults = Faults()
        self.order = Order()
        self.engine = Engine()
        self.changes = 0
        self._parts: dict[type, Any] = {}
        x, y, z = launch.cluster
        self.size = x * y * z
        self.parameters = Memory("param", self._parameter_block())
        self.constants = Memory("const", self._constant_block())
        claims = Claims(number, self._name_of, self.report, self.lock)
        self.global_memory = GlobalMemory(buffers, self._shadow, claims)
        self.ctas = [Cta(self, rank, coordinates(launch, number, rank)) for rank in range(self.size)]
        for cta in self.ctas:
            cta.start()
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        self.schedule = Schedule(seed, len(self.warps))
        for warp in self.warps:
            warp.known.room(self.order.capacity)

    def part(self, kind: type[P]) -> P:
        """The cluster's instance of a unit's state, made on first use as kind(cluster)."""
        part = self._parts.get(kind)
        if part is None:
            part = self._parts[kind] = kind(self)  # type: ignore[call-arg]
        return cast(P, part)

    def report(self, kind: FaultKind, message: str, access: Access) -> None:
        """Takes a finding about an access to memory. The PTX lines that it names get their source lines."""
        text = _PTX_LINE.sub(self._with_source, message) if self.program.sources else message
        self.faults.add(kind, f"{access.agent.name}: {text}", place_of(access))

    def _with_source(self, named: re.Match[str]) -> str:
        source = self.program.sources.get(int(named[1]))
        return named[0] if source is None else f"{named[0]}, {source[0]}:{source[1]}"

    def run(self) -> ClusterResult:
        """Runs to the end, to a fatal fault, or to the time limit."""
        start = time.perf_counter()
        state = "done"
        try:
            with np.errstate(all="ignore"):
                self._loop()
                self._finish()
        except Stop:
            state = "stopped"
        except TimeUp:
            state = "time limit"
        return ClusterResult(self.faults, sum(w.executed for w in self.warps), time.perf_counter() - start, state)

    def _loop(self) -> None:
        schedule, engine, warps = self.schedule, self.engine, self.warps
        changes, quiet, turns = self.changes, 0, 0
        stillness, alone = Stillness(), False
        while True:
            turns += 1
            if self.deadline is not None and turns % 64 == 0 and time.perf_counter() > self.deadline:
                raise TimeUp
            runnable = [n for n, warp in enumerate(warps) if warp.fragments and any(f.ready for f in warp.fragments)]
            if len(engine) and (not runnable or schedule.engine_first(len(runnable), engine.speed(schedule))):
                engine.step(schedule)
                self.changes += 1
                continue
            if not runnable:
                if all(cta.done for cta in self.ctas):
                    return
                if sum(warp.give_up_meetings() for warp in warps):
                    continue
                self._deadlock()
            warp = warps[schedule.warp(runnable)]
            ready = warp.ready()
            before = warp.executed
            chosen = ready[schedule.pick(len(ready))]
            ran = chosen.lanes.bits
            warp.run(chosen, schedule.slice())
            if self.changes != changes:
                if quiet > STILL_INSTRUCTIONS:
                    stillness.reset()
                    self.others.say(RUNS)
                changes, quiet = self.changes, 0
                warp.still = 0
            else:
                quiet += warp.executed - before
                warp.still += warp.executed - before
                if warp.still > PATIENCE:
                    warp.still = 0
                    warp.give_up_meetings()
                if quiet > STILL_INSTRUCTIONS:
                    if alone == self.others.run():
                        alone = not alone
                        if alone:  # what was seen before may have changed with the others' last steps
                            stillness.reset()
                    stillness.watch(warp, ran)
                    endless = not len(engine) and stillness.endless([warps[number] for number in runnable])
                    self.others.say(SPINS if endless else RUNS)
                    if endless and alone:
                        self._livelock(quiet)

    def _finish(self) -> None:
        for cta in self.ctas:
            cta.exited = True
        while self.engine.step(self.schedule):
            pass
        for cta in self.ctas:
            cta.finish()

    def _deadlock(self) -> None:
        lines = []
        for warp in self.warps:
            for fragment in warp.fragments:
                i = warp.ops[fragment.pc].instruction
                waits = fragment.wait.describe() if fragment.wait else "nothing"
                where = f"cta {warp.cta.rank} " if self.size > 1 else ""
                lanes = "" if fragment.lanes.all else f" lanes {fragment.lanes.bits:#010x}"
                lines.append(f"{where}warp {warp.number}{lanes} at {_line(i)} waits for {waits}")
        first = next(w for w in self.warps if w.fragments)
        place = first.place(first.ops[first.fragments[0].pc].instruction)
        for cta in self.ctas:
            cta.deadlocked()
        self.faults.add(FaultKind.DEADLOCK, "no warp can go on and nothing is in flight:\n" + "\n".join(lines), place)
        raise Stop("deadlock")

    def _livelock(self, quiet: int) -> None:
        lines = []
        for warp in self.warps:
            for fragment in warp.fragments:
                i = warp.ops[fragment.pc].instruction
                state = f"waits for {fragment.wait.describe()}" if fragment.wait else f"spins near {i.text}"
                lines.append(f"warp {warp.number} at {_line(i)} {state}")
        unstarted = self.others.unstarted()
        if unstarted:
            lines.append(f"{unstarted} clusters have not started: if it waits for one, run more at once (--jobs)")
        first = next(w for w in self.warps if w.fragments)
        place = first.place(first.ops[first.fragments[0].pc].instruction)
        self.faults.add(
            FaultKind.LIVELOCK, f"{quiet} instructions without any change of state:\n" + "\n".join(lines), place
        )
        raise Stop("livelock")

    def _name_of(self, number: int) -> str:
        what = "cta" if self.size == 1 else "the cluster from cta"
        return f"{what} {coordinates(self.launch, number, 0)}"

    def _parameter_block(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        block = np.zeros(max(1, self.program.symbols.parameter_bytes), dtype=np.uint8)
        offsets = parameter_offsets(self.program.kernel)
        for offset, data in zip(offsets, self.launch.parameters, strict=True):
            block[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        return block

    def _constant_block(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        block = np.zeros(max(1, self.program.symbols.const_bytes), dtype=np.uint8)
        kernel, module = self.program.kernel, self.program.module
        for variable in (*module.variables, *kernel.variables):
            if variable.space == "const" and variable.initial:
                start = self.program.symbols.places[variable.name].address % (1 << 56)
                block[start : start + len(variable.initial)] = np.frombuffer(variable.initial, dtype=np.uint8)
                for offset, link in variable.addresses:
                    at, place = start + offset, self.program.symbols.places.get(link.name)
                    if place is None or place.space not in ("const", "global"):
                        raise UserError(f"{variable.name} holds the address of {link.name}, which has no generic one")
                    address = (place.address + link.offset).to_bytes(8, "little")
                    block[at : at + 8] = np.frombuffer(address, dtype=np.uint8)
        return block

    def _shadow(self, buffer: Buffer) -> Shadow:
        return Shadow(
            buffer.data.size,
            self.order.agents,
            lambda cell: f"global {buffer.name}+{cell:#x}",
            self.report,
            initialised=buffer.initialised,
        )


def _line(instruction: Instruction) -> str:
    source = "" if instruction.source is None else f" ({instruction.source[0]}:{instruction.source[1]})"
    return f"PTX line {instruction.line}{source}"


def coordinates(launch: Launch, number: int, rank: int) -> tuple[int, int, int]:
    """The place in the grid of the CTA with `rank` in cluster `number`."""
    cx, cy, cz = launch.cluster
    gx, gy, _ = (g // c for g, c in zip(launch.grid, launch.cluster, strict=True))
    x, y, z = number % gx, number // gx % gy, number // (gx * gy)
    return x * cx + rank % cx, y * cy + rank // cx % cy, z * cz + rank // (cx * cy)
