"""Start-up times: ``tunekit --help``, and ``best`` against a large database, as a command and as a function.

    python benchmarks/startup.py [--runs 20] [--trials 100000] [--winners 300] [--json FILE]

Each command runs in a fresh interpreter, the commands in turns, after one unmeasured round.
Prints the median wall time, its spread and the median CPU time (the wall time of an idle
machine). Goals: ``--help`` 0.15 s, ``best`` 0.3 s, the function 0.2 s beside a million trials.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tunekit import space
from tunekit.backends import symbol_of
from tunekit.environment import environment
from tunekit.model import Values, Winner
from tunekit.spec import load_spec
from tunekit.store.database import Store
from tunekit.trials import Outcome, Stage, Status, Trial

ROOT = Path(__file__).resolve().parent.parent
SPEC = f"{ROOT / 'tests' / 'specs' / 'host_scale.py'}:host_scale"
GOALS_S = {"tunekit --help": 0.15, "tunekit best": 0.3, "tunekit.best()": 0.2}


def fill(database: Path, trials: int, winners: int) -> None:
    """A database of a long life: `trials` measured trials of the spec, and `winners` winners for other shapes."""
    spec = load_spec(SPEC)
    problem = spec.problem({"rows": 64})
    variant = space.default_variant(spec, space.parse_arch("host"), problem)
    assert variant is not None
    key = space.compile_key(spec, variant, problem)
    here = environment(0)
    with Store.open(database) as store:
        outcome = Outcome(Stage.MEASURE, Status.OK, seconds=Values(run=0.1), samples_us=(10.0, 11.0))
        store.record(Trial(variant, problem, key, outcome, here, "final/2 perf_counter warm random host"))
        for number in range(winners):
            shape = spec.problem({"rows": 64 + number})
            store.put_winner(
                Winner(
                    variant,
                    shape,
                    spec.bucket(shape).merged({"rows": 64 + number}),
                    here,
                    "final/2 perf_counter warm random host",
                    key,
                    symbol_of(key),
                    10.0,
                    0.1,
                    20,
                )
            )
    with sqlite3.connect(database) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(trials)") if row[1] not in ("id", "uid")]
        names = ", ".join(columns)
        connection.execute(
            f"WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < {trials}) "
            f"INSERT INTO trials (uid, {names}) SELECT 'copy ' || i, {names} FROM n, (SELECT * FROM trials LIMIT 1)"
        )


def run(command: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--winners", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    python = [sys.executable, "-m", "tunekit"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "tunekit --help": [*python, "--help"],
        "tunekit best": [*python, "best", SPEC, "--arch", "host", "--problem", "rows=99"],
        "tunekit.best()": [sys.executable, "-c", f"import tunekit; tunekit.best({SPEC!r}, 'host', rows=99)"],
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory)
        fill(cache / "tunekit.db", arguments.trials, arguments.winners)
        (cache / "artifacts").mkdir(mode=0o700)  # where what the first round reads of the sources is remembered
        environ = {**os.environ, "TUNEKIT_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
        for number in range(arguments.runs + 1):
            for name, command in commands.items():
                figures = run(command, environ)
                if number:
                    taken[name].append(figures)
        size_mib = (cache / "tunekit.db").stat().st_size / 2**20
    print(f"{arguments.trials} trials, {arguments.winners} winners, {size_mib:.0f} MiB; {arguments.runs} runs each;")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, figures in taken.items():
        wall = sorted(figure[0] for figure in figures)
        cpu = statistics.median(figure[1] for figure in figures)
        goal = f"  (goal {GOALS_S[name]} s)" if name in GOALS_S else ""
        print(f"{name:<16} {statistics.median(wall):.3f} s wall [{wall[0]:.3f}, {wall[-1]:.3f}], {cpu:.3f} s CPU{goal}")
    if arguments.json:
        arguments.json.write_text(json.dumps(taken, indent=1))


if __name__ == "__main__":
    main()
