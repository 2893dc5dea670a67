"""Asynchronous work in flight: copies, tensor-core instructions, and what they signal when they are done.

Work in one queue runs in order; queues and unordered work have no order among each other. When it runs is the
schedule's choice: a kernel that reads a result too early really reads the old bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tunekit.simulate.machine.schedule import Schedule


@dataclass(slots=True)
class Work:
    action: Callable[[], None]
    what: str


class Engine:
    """What is in flight in a cluster."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Work]] = {}
        self._loose: list[Work] = []

    def submit(self, action: Callable[[], None], queue: Hashable | None, what: str) -> None:
        """Puts `action` in flight; `what` names it in reports ("cp.async.bulk.tensor at PTX line 812")."""
        if queue is None:
            self._loose.append(Work(action, what))
        else:
            self._queues.setdefault(queue, deque()).append(Work(action, what))

    def __len__(self) -> int:
        return len(self._loose) + sum(len(queue) for queue in self._queues.values())

    def pending(self) -> list[str]:
        return [work.what for work in self._loose] + [work.what for queue in self._queues.values() for work in queue]

    def speed(self, schedule: Schedule) -> float:
        """That of the fastest work that may run."""
        return max(schedule.speed(work.what) for work in self._ready())

    def _ready(self) -> list[Work]:
        return [queue[0] for queue in self._queues.values()] + self._loose

    def step(self, schedule: Schedule) -> bool:
        """Runs one piece of work, chosen by the schedule among those that may run; False if there is none."""
        ready = self._ready()
        if not ready:
            return False
        pick = schedule.work([work.what for work in ready])
        if pick < len(self._queues):
            key = list(self._queues)[pick]
            queue = self._queues[key]
            queue.popleft()
            if not queue:
                del self._queues[key]
        else:
            self._loose.pop(pick - len(self._queues))
        ready[pick].action()
        return True
