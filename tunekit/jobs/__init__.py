"""Isolation: each task in a process of its own, forked warm, limited, and gone afterwards."""

from tunekit.jobs.machine import Machine, read_machine, worker_count
from tunekit.jobs.pool import Pool
from tunekit.jobs.task import Event, Limits, Milestone, Task, TaskResult, compile_task

__all__ = [
    "Event",
    "Limits",
    "Machine",
    "Milestone",
    "Pool",
    "Task",
    "TaskResult",
    "compile_task",
    "read_machine",
    "worker_count",
]
