"""Asynchronous work in flight: copies, tensor-core instructions, and what they signal when they are done.

Work in one queue runs in order; queues and unordered work have no order among each other. When it runs is the
schedule's choice: a kernel that reads a result too early really reads the old bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tunekit.simulate.schedule import Schedule


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

    def step(self, schedule: Schedule) -> bool:
        """Runs one piece of work, chosen by the schedule among those that may run; False if there is none."""
        choices: list[Hashable] = [key for key, queue in self._queues.items() if queue]
        ready = len(choices) + len(self._loose)
        if not ready:
            return False
        pick = schedule.pick(ready)
        if pick < len(choices):
            queue = self._queues[choices[pick]]
            work = queue.popleft()
            if not queue:
                del self._queues[choices[pick]]
        else:
            work = self._loose.pop(pick - len(choices))
        work.action()
        return True
