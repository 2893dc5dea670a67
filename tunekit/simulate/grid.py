"""One launch: its clusters simulated in parallel, in processes forked from this one.

Clusters share global memory alone. It lies in shared mappings, so that a process needs nothing but a cluster's
number, and gives back nothing but what it found. Clusters start in the order of their numbers, as many at once as
there are processes: one that waits for a later one (a barrier of the whole grid) waits in vain.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import mmap
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from tunekit.errors import TunekitError
from tunekit.model import to_json
from tunekit.simulate.faults import Faults, Unsupported
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.machine.cluster import Cluster
from tunekit.simulate.machine.memory import Buffer
from tunekit.simulate.machine.program import Program
from tunekit.simulate.machine.stillness import RUNS, Others
from tunekit.simulate.report import Refusal, fault_from

# Decorrelates the schedules of a grid's clusters under one seed.
SEED_STEP = 1_000_003


class ProcessDied(TunekitError):
    """A process that simulated CTAs is gone: killed, as when memory runs out."""


@dataclass
class GridResult:
    """What became of a launch. `clusters` were simulated to their end or to a fault; state as in ScheduleResult."""

    faults: Faults = field(default_factory=Faults)
    instructions: int = 0
    clusters: int = 0
    state: str = "done"
    refusal: Refusal | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Adds what one cluster's simulation said."""
        if "error" in message:
            raise TunekitError(f"the simulator failed in cluster {message['cluster']}: {message['error']}")
        for payload in message["faults"]:
            fault = fault_from(payload)
            self.faults.add(fault.kind, fault.message, fault.place, fault.lanes, fault.count)
        self.faults.notes += message["notes"]
        self.instructions += message["instructions"]
        self.clusters += 1
        if message["refusal"] and self.refusal is None:
            self.refusal = Refusal.from_payload(message["refusal"])
        if self.state == "done":
            self.state = message["state"]


@dataclass(frozen=True)
class Grid:
    """A launch ready to run. deadline: on time.perf_counter's clock. strict: see Cluster."""

    program: Program
    launch: Launch
    buffers: Sequence[Buffer]
    deadline: float | None = None
    strict: bool = False

    @property
    def clusters(self) -> int:
        return math.prod(self.launch.grid) // math.prod(self.launch.cluster)

    def run(self, numbers: Sequence[int], seed: int, jobs: int) -> GridResult:
        """Simulates the clusters `numbers`, up to `jobs` at a time; stops early after a fatal fault or a refusal."""
        owned = dataclasses.replace(self, buffers=[_owned(buffer) for buffer in self.buffers])
        result = GridResult()
        if min(jobs, len(numbers)) <= 1:
            left = list(reversed(numbers))
            others = Others(unstarted=lambda: len(left))
            while left:
                result.take(owned.one(left.pop(), seed, nullcontext(), others))
                if result.state != "done":
                    break
        else:
            _Workers(owned, numbers, seed, min(jobs, len(numbers))).collect(result)
        return result

    def one(self, number: int, seed: int, lock: Any, others: Others) -> dict[str, Any]:
        """One cluster's simulation as plain JSON."""
        said: dict[str, Any] = {"cluster": number, "faults": [], "notes": [], "instructions": 0, "refusal": None}
        cluster = None
        try:
            cluster = Cluster(
                self.program,
                self.launch,
                number,
                self.buffers,
                seed=seed + SEED_STEP * number,
                lock=lock,
                deadline=self.deadline,
                others=others,
                strict=self.strict,
            )
            said["state"] = cluster.run().state
        except Unsupported as refused:
            i = refused.instruction
            said["refusal"] = to_json(Refusal(i.dotted, refused.why, i.line, i.text, i.source))
            said["state"] = "not modelled"
        except Exception as error:
            # A process's edge: a fault of a unit must say in which cluster and at which instruction it showed.
            said["error"] = f"{type(error).__name__}: {error}{_at(cluster)}\n{traceback.format_exc()}"
        if cluster is not None:
            said["faults"] = to_json(cluster.faults.all())
            said["notes"] = list(cluster.faults.notes)
            said["instructions"] = sum(warp.executed for warp in cluster.warps)
        return said


def _at(cluster: Cluster | None) -> str:
    if cluster is None:
        return ""
    running = {warp.instruction.line: warp.instruction.text for warp in cluster.warps}
    return f" (PTX lines at work: {', '.join(f'{line}: {text}' for line, text in sorted(running.items()))})"


def _owned(buffer: Buffer) -> Buffer:
    """With who wrote each byte, in memory that forked processes share: it begins as zeros and costs what is touched."""
    shared = mmap.mmap(-1, max(1, 4 * buffer.data.size))
    return dataclasses.replace(buffer, owner=np.frombuffer(shared, np.int32)[: buffer.data.size])


class _Workers:
    """Processes that take the next cluster's number from a shared counter until none is left."""

    def __init__(self, grid: Grid, numbers: Sequence[int], seed: int, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._next = context.Value("l", 0)
        self._stop = context.Value("b", 0)
        # Reentrant: an atomic holds it while it writes, and writing looks up who else wrote.
        self._lock = context.RLock()
        self._grid, self._numbers, self._seed = grid, numbers, seed
        self._ends: dict[Connection, Any] = {}
        self._states = context.RawArray("b", [RUNS] * count)
        for me in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=self._work, args=(theirs, me), daemon=True)
            process.start()
            theirs.close()
            self._ends[ours] = process

    def _work(self, out: Connection, me: int) -> None:
        others = Others(self._states, me, lambda: max(0, len(self._numbers) - self._next.value))
        gc.freeze()  # what the parent made stays, and need not be looked through below
        while not self._stop.value:
            with self._next.get_lock():
                place = self._next.value
                self._next.value = place + 1
            if place >= len(self._numbers):
                break
            others.say(RUNS)
            said = self._grid.one(self._numbers[place], self._seed, self._lock, others)
            if said.get("state") != "done":
                self._stop.value = 1
            out.send_bytes(json.dumps(said, allow_nan=False).encode())
            gc.collect()  # a finished cluster is a cycle of megabytes, of too few objects for the collector to hurry
        others.say(0)
        out.close()
        os._exit(0)  # what the parent registered to run at its exit is not this process's

    def collect(self, result: GridResult) -> None:
        """Takes the messages in the clusters' order, up to the first that did not end well, as one process would have
        made them; the processes are gone afterwards.
        """
        said: list[dict[str, Any]] = []
        try:
            open_ = set(self._ends)
            while open_:
                for end in wait(list(open_)):
                    if not isinstance(end, Connection):
                        continue
                    try:
                        said.append(json.loads(end.recv_bytes()))
                    except EOFError:
                        open_.remove(end)
                        self._buried(end)
        finally:
            for end, process in self._ends.items():
                process.kill()
                process.join()
                end.close()
        for message in sorted(said, key=lambda one: int(one["cluster"])):
            result.take(message)
            if result.state != "done":
                break

    def _buried(self, end: Connection) -> None:
        process = self._ends[end]
        process.join()
        if process.exitcode:
            code = process.exitcode
            how = f"signal {-code}, {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise ProcessDied(f"a process that simulates CTAs died ({how})")


def time_left(deadline: float | None) -> bool:
    return deadline is None or time.perf_counter() < deadline
