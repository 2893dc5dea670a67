"""What isolation costs: the same compiles in forked children and in one warm process.

    python benchmarks/isolation.py [--rounds 5] [--json FILE]

Prints, as medians over rounds that alternate the two sides:
  (a) 16 small variants through the zygote with one worker, over the same 16 compiled one after another in one
      warm process (goal: at most 1.25);
  (b) the same 16 with two workers, against one (goal: at least 1.6 times as fast on two cores);
  (c) a sweep whose middle variant hangs natively, with a limit of 5 s, against one without it (goal: about 5 s more),
      and how many processes are left;
  (d) an empty task through the warm zygote: fork, run, result, reap, nothing left (goal: tens of ms at most).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tunekit.backends import backend, entry  # noqa: E402
from tunekit.backends.contract import CompileRequest  # noqa: E402
from tunekit.jobs import Limits, Pool, Task, compile_task, tree  # noqa: E402
from tunekit.model import Values  # noqa: E402

SPECS = ROOT / "tests" / "specs"
ARCH = "sm_100a"
HANG_LIMIT_S = 5.0
MARKER = "TUNEKIT_BENCHMARK"
# A row softmax, a real kernel of the small kind: 0.2 to 0.8 s of compiling each.
VARIANTS = [
    {"columns": 4096, "threads": threads, "vector": vector}
    for threads in (64, 128, 256, 512, 1024)
    for vector in (1, 2, 4)
] + [{"columns": 1024, "threads": 128, "vector": 4}]


def request(tunables: dict[str, int], scratch: str, name: str) -> CompileRequest:
    return CompileRequest(
        spec=str(SPECS / "cute_softmax.py"),
        implementation="one_row_a_cta",
        arch=ARCH,
        static=Values(columns=tunables["columns"]),
        tunables=Values(threads=tunables["threads"], vector=tunables["vector"]),
        symbol=f"tunekit_{name}",
        out_dir=f"{scratch}/{name}",
    )


def tasks(scratch: str) -> list[Task]:
    return [compile_task(request(variant, scratch, f"v{i}")) for i, variant in enumerate(VARIANTS)]


def in_one_process() -> None:
    """The other side: compile all variants here, one after another, and print the seconds."""
    backend("cutedsl").warm()
    with tempfile.TemporaryDirectory() as scratch:
        payloads = [task.payload for task in tasks(scratch)]
        begin, cpu = time.perf_counter(), cpu_s(os.getpid())
        for payload in payloads:
            report = entry.run(payload)
            if report["status"] != "ok":
                raise SystemExit(f"a variant failed: {report['reason']}")
        print(time.perf_counter() - begin, cpu_s(os.getpid()) - cpu)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of the children that it has waited for."""
    return sum(psutil.Process(pid).cpu_times()[:4])


def serial_sides(count: int = 1) -> tuple[float, float]:
    """Wall and CPU seconds of the serial side; with more than one at once, the slowest's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, "--in-one-process"]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(count)
    ]
    seconds = [tuple(map(float, process.communicate()[0].split()[-2:])) for process in running]
    return max(wall for wall, _ in seconds), max(cpu for _, cpu in seconds)


def pool_side(pool: Pool, work: Sequence[Task]) -> tuple[float, float]:
    """Wall and CPU seconds of the compiles in a pool."""
    begin, cpu = time.perf_counter(), cpu_s(pool.zygote_pid)
    failed = [result.reason for result in pool.run(work) if not result.ok]
    if failed:
        raise SystemExit(f"a variant failed: {failed[0]}")
    return time.perf_counter() - begin, cpu_s(pool.zygote_pid) - cpu


def hang_s(with_hang: bool) -> tuple[float, int]:
    """Wall time of a five-variant sweep, start and end of the pool included, and processes left."""
    marker = uuid.uuid4().hex
    os.environ[MARKER] = marker
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        builds = ["good", "also_good", "hang" if with_hang else "good", "good", "also_good"]
        work = [compile_task(_host(build, scratch, f"h{i}")) for i, build in enumerate(builds)]
        with Pool(workers=1, warm=(), limits=Limits(trace_s=HANG_LIMIT_S, backend_s=60)) as pool:
            statuses = [str(result.status) for result in pool.run(work)]
    spent = time.perf_counter() - begin
    expected = ["ok", "ok", "compile_timeout" if with_hang else "ok", "ok", "ok"]
    if statuses != expected:
        raise SystemExit(f"expected {expected}, got {statuses}")
    return spent, len(tree.marked(f"{MARKER}={marker}"))


def _host(build: str, scratch: str, name: str) -> CompileRequest:
    return CompileRequest(
        spec=f"{SPECS / 'host_scale.py'}:host_build",
        implementation="unruly",
        arch="host",
        static=Values(cols=64, dtype="float32"),
        tunables=Values(build=build),
        symbol=f"tunekit_{name}",
        out_dir=f"{scratch}/{name}",
    )


def empty_task_ms(pool: Pool) -> list[float]:
    """Wall time of each of 50 empty tasks, one at a time."""
    spent = []
    for index in range(50):
        begin = time.perf_counter()
        list(pool.run([Task(f"empty{index}", {}, entry="empty_task:run")]))
        spent.append(1000 * (time.perf_counter() - begin))
    return spent


def note(walls: list[float], cpus: list[float], seconds: tuple[float, float]) -> None:
    walls.append(seconds[0])
    cpus.append(seconds[1])


def line(what: str, values: Sequence[float], unit: str, goal: str) -> str:
    return f"{what}: {statistics.median(values):.2f}{unit} (min {min(values):.2f}, max {max(values):.2f}; goal {goal})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--in-one-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_one_process:
        in_one_process()
        return
    serial, pair, one, two, serial_cpu, one_cpu, empty, extra = ([] for _ in range(8))
    left = 0
    with Pool(workers=1) as single, Pool(workers=2) as double:
        warm_ups = ", ".join(f"{pool.warm_up['seconds']:.2f} s" for pool in (single, double))
        print(f"{len(VARIANTS)} variants for {ARCH}; {entry.toolchain()}; {os.cpu_count()} cores; warm-up {warm_ups}")
        for index in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as scratch:
                sides = [
                    lambda: note(serial, serial_cpu, serial_sides()),
                    lambda: note(pair, [], serial_sides(2)),
                    lambda: note(one, one_cpu, pool_side(single, tasks(scratch + "/1"))),
                    lambda: note(two, [], pool_side(double, tasks(scratch + "/2"))),
                ]
                for side in sides if index % 2 == 0 else reversed(sides):
                    side()
            empty += empty_task_ms(single)
            seconds = f"one process {serial[-1]:.2f} s, one worker {one[-1]:.2f} s, two {two[-1]:.2f} s"
            print(f"  round {index}: {seconds}", flush=True)
    for _ in range(max(1, arguments.rounds // 2)):
        without, left_without = hang_s(False)
        with_hang, left_with = hang_s(True)
        extra.append(with_hang - without)
        left += left_without + left_with
    ratios = [a / b for a, b in zip(one, serial, strict=True)]
    speed_ups = [a / b for a, b in zip(one, two, strict=True)]
    machine = [2 * a / b for a, b in zip(serial, pair, strict=True)]
    cpu_ratios = [a / b for a, b in zip(one_cpu, serial_cpu, strict=True)]
    per_compile = [1000 * (a - b) / len(VARIANTS) for a, b in zip(one_cpu, serial_cpu, strict=True)]
    print(line("(a) zygote, one worker, over one warm process", ratios, "x", "<= 1.25"))
    print(line("    the same in CPU time, which other load does not touch", cpu_ratios, "x", "<= 1.25"))
    print(line("    isolation's cost a compile, CPU", per_compile, " ms", "tens of ms"))
    print(line("(b) two workers over one, speed-up", speed_ups, "x", ">= 1.6 on two cores"))
    print(line("    two warm processes at once over one, all that the machine gave", machine, "x", "2"))
    print(line(f"(c) a native hang with a limit of {HANG_LIMIT_S:g} s costs", extra, " s", "about 5 s"))
    print(f"    processes left: {left} (goal 0)")
    print(line("(d) an empty task through the warm zygote", empty, " ms", "tens of ms at most"))
    if arguments.json:
        sides_s = {"serial": serial, "pair": pair, "one": one, "two": two, "serial_cpu": serial_cpu, "one_cpu": one_cpu}
        arguments.json.write_text(json.dumps({**sides_s, "hang_extra": extra, "left": left, "empty_ms": empty}))


if __name__ == "__main__":
    main()
