"""The number of workers follows what this process may really use, and says so."""

from __future__ import annotations

import os

from tunekit.jobs import Machine, worker_count
from tunekit.jobs.machine import read_machine

GIB = 2**30


def test_memory_bounds_the_workers():
    """Case 9: with 3 GB of memory and 64 cores the number of workers follows memory, and a line says so."""
    count, why = worker_count(machine=Machine(64, "affinity", 3 * GIB, "available"))
    assert count == 3
    assert why == "3 workers: 3.0 GiB of memory free (available), 1 GiB a worker, fewer than the 64 cores (affinity)"


def test_cores_bound_the_workers():
    count, why = worker_count(machine=Machine(2.5, "cgroup quota", 64 * GIB, "available"))
    assert count == 2
    assert why == "2 workers: 2.5 cores (cgroup quota), 64.0 GiB of memory free (available)"


def test_there_is_always_one_worker():
    assert worker_count(machine=Machine(0.5, "cgroup quota", 100, "cgroup limit"))[0] == 1


def test_a_request_is_granted_with_a_warning():
    count, why = worker_count(8, Machine(2, "affinity", 64 * GIB, "available"))
    assert count == 8
    assert "8 workers, as asked for; more than 2 cores" in why
    assert worker_count(2, Machine(2, "affinity", 64 * GIB, "available"))[1] == "2 workers, as asked for"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cgroup_v2(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kube/pod\n",
            "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n",
            "sys/fs/cgroup/kube/pod/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/kube/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kube/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/kube/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/kube/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/kube/pod/memory.max": "max\n",
            "sys/fs/cgroup/kube/pod/memory.current": "5\n",
        },
    )
    machine = read_machine(root)
    assert (machine.cores, machine.cores_source) == (0.5, "cgroup quota")
    assert (machine.memory_bytes, machine.memory_source) == (3 * GIB, "cgroup limit")


def test_cgroup_v1(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
            "proc/meminfo": f"MemAvailable: {60 * 2**20} kB\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "75000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB}\n",
        },
    )
    machine = read_machine(root)
    assert machine.cores == 0.75
    assert (machine.memory_bytes, machine.memory_source) == (GIB, "cgroup limit")


def test_affinity_counts():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert read_machine().cores <= 1
    finally:
        os.sched_setaffinity(0, before)
