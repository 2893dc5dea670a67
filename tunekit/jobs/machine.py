"""How many workers this process may really run: cores and memory after affinity and cgroups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Peak of a compile's own memory beyond what it shares with the zygote: attention kernels take
# 0.3 to 0.7 GB with nvidia-cutlass-dsl 4.8.1, so a gibibyte holds most (2026-11).
BYTES_PER_WORKER = 2**30
GIB = 2**30
CGROUP_ROOT = "sys/fs/cgroup"


@dataclass(frozen=True)
class Machine:
    """What this process may use: cores (a quota may be a fraction) and bytes of free memory, and what says so."""

    cores: float
    cores_source: str
    memory_bytes: int
    memory_source: str


def worker_count(requested: int | None = None, machine: Machine | None = None) -> tuple[int, str]:
    """The number of workers and the sentence that says why.

    Without a request the smaller of whole cores and free memory at a gibibyte a
    worker, at least 1. A request is granted; the sentence warns if it is too much.
    """
    machine = read_machine() if machine is None else machine
    by_cores = max(1, math.floor(machine.cores))
    by_memory = max(1, machine.memory_bytes // BYTES_PER_WORKER)
    fitting = min(by_cores, by_memory)
    cores = f"{machine.cores:g} cores ({machine.cores_source})"
    memory = f"{machine.memory_bytes / GIB:.1f} GiB of memory free ({machine.memory_source})"
    if requested is not None:
        count = max(1, requested)
        note = f"; more than {cores} and {memory} hold" if count > fitting else ""
        return count, f"{_workers(count)}, as asked for{note}"
    if by_memory < by_cores:
        return fitting, f"{_workers(fitting)}: {memory}, 1 GiB a worker, fewer than the {cores}"
    return fitting, f"{_workers(fitting)}: {cores}, {memory}"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def read_machine(root: Path = Path("/")) -> Machine:
    """This machine as this process may use it; `root` is where /proc and /sys hang."""
    cores, cores_source = float(len(os.sched_getaffinity(0))), "affinity"
    for quota in _cpu_quotas(root):
        if quota < cores:
            cores, cores_source = quota, "cgroup quota"
    memory, memory_source = _available(root), "available"
    for free in _cgroup_memory(root):
        if free < memory:
            memory, memory_source = free, "cgroup limit"
    return Machine(cores, cores_source, memory, memory_source)


def _available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return BYTES_PER_WORKER


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's cgroup for a controller and of its ancestors, version 1 or 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / CGROUP_ROOT / controllers if controllers else root / CGROUP_ROOT
        if controllers and controller not in controllers.split(","):
            continue
        if not controllers and (root / CGROUP_ROOT / "unified").is_dir():
            base = root / CGROUP_ROOT / "unified"
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _cpu_quotas(root: Path) -> Iterator[float]:
    for directory in _cgroups(root, "cpu"):
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        if quota.isdigit():
            yield int(quota) / int(period)
        old = _read(directory / "cpu.cfs_quota_us").strip()
        if old.isdigit():
            yield int(old) / int(_read(directory / "cpu.cfs_period_us") or 100_000)


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Bytes left under every limit: limit - usage, the page cache that can be dropped counted as free."""
    names = (("memory.max", "memory.current", "inactive_file"),)
    old_names = (("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),)
    for directory in _cgroups(root, "memory"):
        for limit_name, usage_name, cache_name in (*names, *old_names):
            limit, usage = _read(directory / limit_name).strip(), _read(directory / usage_name).strip()
            if limit.isdigit() and usage.isdigit():
                yield max(0, int(limit) - int(usage) + _stat(directory / "memory.stat", cache_name))


def _stat(file: Path, name: str) -> int:
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
