"""Simulating a call: its launches in order, under one or several schedules, on the call's own buffers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunekit.errors import UserError
from tunekit.simulate.faults import Faults
from tunekit.simulate.grid import Grid, time_left
from tunekit.simulate.launch.arguments import Buffers, Wanted
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.machine.program import Program
from tunekit.simulate.ptx.module import Module
from tunekit.simulate.report import Launched, Refusal, Report, ScheduleResult

SAMPLE = "sample"

# Said of the results after one schedule's run: what is wrong with them, in words, or "".
Judge = Callable[[int], str]


def simulate(
    launches: Launch | Sequence[Launch],
    module: Module,
    buffers: Buffers,
    *,
    schedules: int = 1,
    seed: int = 0,
    ctas: str | Sequence[int] | None = None,
    jobs: int | None = None,
    time_limit_s: float | None = None,
    strict: bool = False,
    judge: Judge | None = None,
    on_schedule: Callable[[int, int], None] | None = None,
) -> Report:
    """Runs the launches' kernels on `buffers`, which afterwards hold what the last schedule's run left.

    ctas: which CTAs of a single launch, by linear number or as in `selected`; None is all. The rest of a chosen
    CTA's cluster comes along. schedules: how many runs, with seeds `seed`, `seed` + 1, ...; each begins with the
    buffers as they were given. strict: demand the tcgen05 fences and waits too that the ISA asks for and that
    kernels known to be right leave out. judge: called after each complete run, with its seed. on_schedule: called
    before each run, with its place and their number.

    A fault ends nothing by itself; the results of a run that a fatal one stopped are not judged.

    Raises:
        UserError: a selection that the grid does not have, or a kernel that the module lacks.
    """
    every = (launches,) if isinstance(launches, Launch) else tuple(launches)
    if not every:
        raise UserError("the host code launches no kernel")
    if schedules < 1:
        raise UserError(f"{schedules} schedules: at least 1")
    if ctas == SAMPLE and len(every) > 1:
        ctas = None  # a later kernel may need all that an earlier one wrote
    if ctas not in (None, "all") and len(every) > 1:
        raise UserError(f"some CTAs can be chosen of one kernel only; this call launches {len(every)}")
    deadline = None if time_limit_s is None else time.perf_counter() + time_limit_s
    call = _Call(every, module, buffers, jobs or len(os.sched_getaffinity(0)), deadline, strict)
    chosen = [clusters_of(launch, ctas) for launch in every]
    report = _Collected()
    first: _Bytes | None = None
    for place in range(schedules):
        if on_schedule is not None:
            on_schedule(place + 1, schedules)
        call.reset()
        result = call.run(chosen, seed + place, report)
        if result.state == "done":
            wrong = (judge(seed + place) if judge is not None else "") or call.damage()
            changed = "" if first is None else call.difference(first)
            result = ScheduleResult(result.seed, "done", result.instructions, result.seconds, wrong, changed)
            first = first or call.written()
        report.schedules.append(result)
        if result.state in ("not modelled", "time limit"):
            break
    return Report(
        tuple(_launched(launch, numbers) for launch, numbers in zip(every, chosen, strict=True)),
        tuple(report.schedules),
        report.faults.all(),
        tuple(dict.fromkeys(report.faults.notes)),
        report.refusal,
    )


def ranges(text: str) -> tuple[tuple[int, int], ...]:
    """The first and last number of each part of ``0-3,7``; none for the words that `selected` knows.

    Raises:
        UserError: no such form.
    """
    if text in ("all", "first", SAMPLE):
        return ()
    found = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise UserError(f"CTAs are chosen as 0-3,7 or first, sample or all, not '{text}'")
        found.append((int(low), int(high) if dash else int(low)))
    return tuple(found)


def selected(text: str, total: int) -> tuple[int, ...]:
    """The CTAs that ``0-3,7``, ``first``, ``sample`` or ``all`` names, of `total`; numbers are linear, x fastest.

    A sample is four, spread evenly from the first to the last.

    Raises:
        UserError: no such CTA, or no such form.
    """
    if text == "all":
        return tuple(range(total))
    if text == "first":
        return (0,)
    if text == SAMPLE:
        return tuple(sorted({(total - 1) * part // 3 for part in range(4)}))
    found: set[int] = set()
    for first, last in ranges(text):
        if last >= total or first > last:
            raise UserError(f"CTAs {first}-{last}: the grid has {total}, numbered from 0")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def clusters_of(launch: Launch, ctas: str | Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of the clusters that hold the chosen CTAs."""
    total = math.prod(launch.grid)
    numbers = selected("all" if ctas is None else ctas, total) if ctas is None or isinstance(ctas, str) else tuple(ctas)
    if any(not 0 <= number < total for number in numbers):
        raise UserError(f"CTAs {list(numbers)}: the grid has {total}, numbered from 0")
    gx, gy, _ = launch.grid
    cx, cy, cz = launch.cluster
    found = set()
    for number in numbers:
        x, y, z = number % gx, number // gx % gy, number // (gx * gy)
        found.add(x // cx + (gx // cx) * (y // cy + (gy // cy) * (z // cz)))
    return tuple(sorted(found))


@dataclass(frozen=True)
class _Bytes:
    """What one run left: the memory, and which bytes of it the kernels wrote."""

    memory: NDArray[np.uint8]
    written: NDArray[np.bool_]


class _Collected:
    """The report as it grows."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.schedules: list[ScheduleResult] = []
        self.refusal: Refusal | None = None


class _Call:
    """The launches with their programs, and the buffers with what they held at first."""

    def __init__(
        self,
        launches: tuple[Launch, ...],
        module: Module,
        buffers: Buffers,
        jobs: int,
        deadline: float | None,
        strict: bool,
    ) -> None:
        self._buffers, self._jobs, self._deadline = buffers, jobs, deadline
        self._globals = _global_variables(module)
        self._all = (buffers, self._globals) if self._globals is not None else (buffers,)
        self._held = [(held.memory.copy(), held.initialised.copy(), held.written.copy()) for held in self._all]
        addresses = {b.name: b.address for b in self._globals.buffers} if self._globals is not None else {}
        memory = [buffer for held in self._all for buffer in held.device_memory()]
        programs: dict[tuple[str, int], Program] = {}
        self._grids: list[Grid] = []
        for launch in launches:
            if launch.kernel not in module.kernels:
                raise UserError(f"kernel {launch.kernel} is not in the PTX (kernels: {', '.join(module.kernels)})")
            key = (launch.kernel, launch.shared_bytes)
            if key not in programs:
                programs[key] = Program.of(module, module.kernels[launch.kernel], launch.shared_bytes, addresses)
            self._grids.append(Grid(programs[key], launch, memory, deadline, strict))

    def reset(self) -> None:
        """All memory as it was given."""
        for held, (memory, initialised, written) in zip(self._all, self._held, strict=True):
            held.memory[:], held.initialised[:], held.written[:] = memory, initialised, written

    def run(self, chosen: Sequence[tuple[int, ...]], seed: int, report: _Collected) -> ScheduleResult:
        begin = time.perf_counter()
        instructions, state = 0, "done"
        for grid, numbers in zip(self._grids, chosen, strict=True):
            if not time_left(self._deadline):
                state = "time limit"
                break
            result = grid.run(numbers, seed, self._jobs)
            report.faults.merge(result.faults)
            report.refusal = report.refusal or result.refusal
            instructions += result.instructions
            state = result.state
            if state != "done":
                break
        return ScheduleResult(seed, state, instructions, time.perf_counter() - begin)

    def written(self) -> _Bytes:
        return _Bytes(self._buffers.memory.copy(), self._buffers.written.copy())

    def difference(self, first: _Bytes) -> str:
        """Where the outputs differ in any bit from an earlier run's, in words; "" if nowhere."""
        differ = (self._buffers.memory != first.memory) | (self._buffers.written != first.written)
        for buffer in self._buffers.buffers:
            if buffer.scratch:
                continue
            here = np.flatnonzero(differ[buffer.offset : buffer.offset + buffer.size])
            if here.size:
                return f"{buffer.name}: {here.size} bytes differ between two schedules, the first at +{int(here[0]):#x}"
        return ""

    def damage(self) -> str:
        """Which input changed, in words; "" if none."""
        memory, _, _ = self._held[0]
        for buffer in self._buffers.buffers:
            if buffer.output:
                continue
            part = slice(buffer.offset, buffer.offset + buffer.size)
            here = np.flatnonzero(self._buffers.memory[part] != memory[part])
            if here.size:
                return f"input {buffer.name} was changed: {here.size} bytes, the first at +{int(here[0]):#x}"
        return ""


def _global_variables(module: Module) -> Buffers | None:
    """Memory for the module's .global variables, initialised as declared, else with zeros (PTX ISA 5.4.4)."""
    variables = [v for v in module.variables if v.space == "global" and v.size and not v.extern]
    if not variables:
        return None
    data = {v.name: np.frombuffer(v.initial or bytes(v.size), np.uint8) for v in variables}
    held = Buffers([Wanted(v.name, "uint8", (v.size,), data=data[v.name], output=True) for v in variables])
    for variable in variables:
        bytes_ = held.bytes_of(held[variable.name])
        for offset, link in variable.addresses:
            if link.name not in data:
                raise UserError(f"{variable.name} holds the address of {link.name}, which is no .global variable here")
            address = held[link.name].address + link.offset
            bytes_[offset : offset + 8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
    return held


def _launched(launch: Launch, numbers: tuple[int, ...]) -> Launched:
    return Launched(
        launch.kernel,
        launch.grid,
        launch.block,
        launch.cluster,
        launch.shared_bytes,
        len(numbers) * math.prod(launch.cluster),
    )
