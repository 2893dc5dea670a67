"""The store's figures: 32 concurrent writers, and a lookup beside 100,000 trials.

    python benchmarks/store.py

Prints how many of 640 rows were lost (32 fresh processes that start on an
absent database and write 20 trials each), and the time of `read_winners` in a
fresh process and warm, with 100,000 trials and 200 winners in the database.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tunekit import identity
from tunekit.model import Environment, Footprint, Values, Winner
from tunekit.store import rows_of_trials, writing
from tunekit.store.database import Store
from tunekit.trials import Outcome, Stage, Status, Trial

HERE = Environment(gpu="NVIDIA H200", arch="sm_90a", driver="570.133.20", power_limit_w=700.0, cutlass_dsl="4.8.1")


def trial(number: int) -> Trial:
    """A measured trial with 30 samples."""
    variant = identity.variant("fmha", 1, "wgmma", "sm_90a", Values(kv_stage=number, smem_p=True))
    outcome = Outcome(
        stage=Stage.MEASURE,
        status=Status.OK,
        seconds=Values(measure=0.5),
        footprint=Footprint(smem_bytes=200_000, registers=168),
        samples_us=tuple(50.0 + 0.01 * index for index in range(30)),
    )
    return Trial(variant, Values(head_dim=128, s_k=1152), f"{number:064x}", outcome, HERE, "1/final")


def winner(number: int) -> Winner:
    bucket = Values(head_dim=128, s_k=number)
    chosen = trial(number).variant
    return Winner(chosen, bucket, bucket, HERE, "1/final", f"{number:064x}", "tunekit_x", 50.0, 0.2, 30)


def write(database: Path, process: int, count: int) -> None:
    start = time.perf_counter()
    with Store.open(database) as store:
        for number in range(count):
            store.record(trial(process * count + number))
    print(time.perf_counter() - start)


def writers(directory: Path, processes: int, count: int) -> None:
    database = directory / "writers.db"
    command = [sys.executable, __file__, "--write", str(database), "--count", str(count)]
    start = time.perf_counter()
    children = [
        subprocess.Popen([*command, "--process", str(process)], stdout=subprocess.PIPE, text=True)
        for process in range(processes)
    ]
    own = [float(child.communicate()[0] or "nan") for child in children]
    failed = sum(child.returncode != 0 for child in children)
    seconds = time.perf_counter() - start
    with Store.open(database) as store:
        kept = len({found.compile_key for found in store.trials()})
    wanted = processes * count
    print(
        f"{processes} fresh processes x {count} trials of 30 samples on an absent database:"
        f" {wanted - kept} lost of {wanted}, {failed} failed; {seconds:.1f} s with process start and imports,"
        f" open and write {statistics.median(own):.2f} s a process (slowest {max(own):.2f} s)"
    )


def lookups(directory: Path, trials: int, winners: int, rounds: int) -> None:
    database = directory / "lookups.db"
    with Store.open(database) as store:
        store.execute(lambda db: fill(db, trials))
        for number in range(winners):
            store.put_winner(winner(number))
    code = (
        "import time, sys, pathlib; start = time.perf_counter()\n"
        "from tunekit.store.winners import read_winners; imported = time.perf_counter()\n"
        "found = read_winners(pathlib.Path(sys.argv[1]), 'fmha', 'sm_90a'); first = time.perf_counter()\n"
        "warm = time.perf_counter(); read_winners(pathlib.Path(sys.argv[1]), 'fmha', 'sm_90a')\n"
        "print(len(found), imported - start, first - imported, time.perf_counter() - warm)"
    )
    lines = [
        subprocess.run([sys.executable, "-c", code, str(database)], capture_output=True, text=True, check=True).stdout
        for _ in range(rounds)
    ]
    counts, *columns = zip(*(map(float, line.split()) for line in lines), strict=True)
    print(
        f"read_winners, {int(counts[0])} winners beside {trials:,} trials ({database.stat().st_size / 2**20:.0f} MiB),"
    )
    for name, column in zip(("import", "first call", "second call"), columns, strict=True):
        ordered = sorted(1000 * value for value in column)
        middle = statistics.median(ordered)
        print(f"  {name}: median {middle:.1f} ms ({ordered[0]:.1f} to {ordered[-1]:.1f}, {rounds} rounds)")


def fill(db: object, trials: int) -> None:
    """Insert trials without a transaction each: what is timed is reading beside them."""
    row = rows_of_trials.trial_row(trial(0)) | {"recorded_at": "2026-01-01T00:00:00Z", "problem_key": "x", "uid": ""}
    row["environment"] = writing.environment_id(db, HERE)
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    many = ([f"u{number}" if name == "uid" else value for name, value in row.items()] for number in range(trials))
    db.conn.executemany(f"INSERT INTO trials ({names}) VALUES ({marks})", many)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--winners", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", help="where the databases are made (default: the temp directory)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(given.write, given.process, given.count)
        return
    place = {"cpus": os.cpu_count(), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    print(json.dumps(place))
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        writers(Path(directory), given.processes, given.count)
        lookups(Path(directory), given.trials, given.winners, given.rounds)


if __name__ == "__main__":
    main()
