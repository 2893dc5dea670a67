"""Dispatch from fresh processes: what they import, what they compile, what they may not write."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534
PR_CAPBSET_DROP = 24
IGNORING_FILE_MODES = (1, 2, 3)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER


def obey_file_modes() -> None:
    libc = ctypes.CDLL(None)
    for capability in IGNORING_FILE_MODES:
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError("can't drop a capability")


def interpreter(*arguments: object, env: dict[str, str], bound: bool) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; `bound` takes from root the right to ignore file modes."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=obey_file_modes if bound and os.geteuid() == 0 else None,
    )


SERVE = """
import json, sys
import tunekit
kernel = tunekit.load(sys.argv[1])
before = sorted(sys.modules)
import torch
x = torch.ones(int(sys.argv[2]), 64)
y = kernel(x)
unwanted = ("cutlass", "optuna", "rich", "click", "sqlite_utils", "psutil", "filelock")
heavy = [name for name in unwanted if name in sys.modules]
early = [name for name in ("torch", "tvm_ffi", "cutlass") if name in before]
print(json.dumps({"y": y[0, :2].tolist(), "stats": kernel.stats(), "heavy": heavy, "early": early}))
"""

IMPORTED = """
import dataclasses, json, sys
import torch, tunekit
tunekit.load(sys.argv[1])(torch.ones(64, 64))
ours = {name: vars(module) for name, module in sys.modules.items() if name.startswith("tunekit.")}
classes = [(name, one) for name, things in ours.items() for one in things.values() if isinstance(one, type)]
made = [str(one) for name, one in classes if dataclasses.is_dataclass(one) and one.__module__ == name]
print(json.dumps({"modules": sorted(ours), "dataclasses": sorted(made)}))
"""
WITHOUT = {
    *("backends.contract", "backends.host", "backends.library", "child", "compiling", "jobs", "measure.statistics"),
    *("dispatch.background", "dispatch.bundled", "dispatch.on_request", "dispatch.ranks", "progress", "trials"),
    *("store.bundle", "store.connection", "store.database", "store.lines", "store.rows_of_trials"),
}
"""What a process that serves from its store has no use for."""
MOST_DATACLASSES = 23
"""Each takes 0.5 to 1 ms of the first result: what is small and only serves is a NamedTuple, which takes 0.1."""

BEST = """
import json, sys
import tunekit
choice = tunekit.best(sys.argv[1], rows=48)
unwanted = ("torch", "cutlass", "cuda", "tvm_ffi", "numpy", "sqlite_utils", "optuna", "rich", "click")
heavy = [name for name in unwanted if name in sys.modules]
print(json.dumps({"level": choice.level, "why": choice.why, "artifact": choice.artifact, "heavy": heavy}))
"""


def fresh(code: str, *arguments: object, tuned, bound: bool = False, **environ: str) -> dict:
    """Run `code` in a new interpreter that sees one cache: its last line as JSON, and its stderr."""
    env = {**os.environ, "TUNEKIT_CACHE": str(tuned.root), "PYTHONPATH": str(ROOT), **environ}
    done = interpreter("-c", code, *arguments, env=env, bound=bound)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def test_importing_tunekit_imports_nothing_heavy():
    code = "import sys, tunekit; print([n for n in sys.modules if n.startswith('tunekit')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "['tunekit']"


def test_public_names():
    code = "import tunekit as t; print(set(t.__all__) <= set(dir(t)), t.load, t.best, t.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("True <function load") and "<function best" in done.stdout


def test_serving_imports_no_compiler(tuned):
    """A serving process loads through tvm_ffi: no cutlass, optuna or rich; `load` itself imports no torch."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    done = fresh(SERVE, tuned.reference, 64, tuned=tuned)
    assert done["heavy"] == [] and done["early"] == []
    assert done["y"] == [0.5, 0.5 + 1 / 64]
    assert done["stats"]["exact"] == done["stats"]["loaded"] == 1


def test_serving_imports_little_of_tunekit_itself(tuned):
    """Imports were the largest part of what a fresh process took from `import torch` to its first result."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    fresh(IMPORTED, tuned.reference, tuned=tuned)  # the first one compiles the native half of dispatch
    done = fresh(IMPORTED, tuned.reference, tuned=tuned)
    assert WITHOUT & {name.removeprefix("tunekit.") for name in done["modules"]} == set()
    assert len(done["dataclasses"]) <= MOST_DATACLASSES, done["dataclasses"]


def test_best_imports_neither_torch_nor_compiler(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    done = fresh(BEST, tuned.reference, tuned=tuned)
    assert done["heavy"] == []
    assert done["level"] == "bucket" and "10 us" in done["why"] and done["artifact"]


def test_two_fresh_processes_compile_once(tuned):
    """Case 19: the second of two fresh processes compiles nothing (counted)."""
    code = SERVE.replace("load(sys.argv[1])", "load(sys.argv[1], compile='allow')")
    first = fresh(code, tuned.reference, 8, tuned=tuned)
    second = fresh(code, tuned.reference, 8, tuned=tuned, PYTHONHASHSEED="7")
    assert (first["stats"]["compiled"], second["stats"]["compiled"]) == (1, 0)
    assert (first["stats"]["loaded"], second["stats"]["loaded"]) == (1, 1)
    assert first["y"] == second["y"]


@pytest.mark.slow
def test_dispatch_from_a_cache_that_cannot_be_written(tuned):
    """Case 31: a complete cache with mode 0555, another owner and no HOME: dispatch and best work."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    for path in [*tuned.root.rglob("*"), tuned.root]:
        path.chmod(0o555 if path.is_dir() or path.suffix == ".so" else 0o444)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
    before = {path: path.stat().st_mtime_ns for path in tuned.root.rglob("*")}
    environ = {"HOME": "/nowhere", "XDG_CACHE_HOME": ""}
    done = fresh(SERVE, tuned.reference, 64, tuned=tuned, bound=True, **environ)
    assert done["stats"]["exact"] == 1 and done["y"] == [0.5, 0.5 + 1 / 64]
    assert "Traceback" not in done["stderr"]
    assert fresh(BEST, tuned.reference, tuned=tuned, bound=True, **environ)["level"] == "bucket"
    assert {path: path.stat().st_mtime_ns for path in tuned.root.rglob("*")} == before


def test_nothing_is_loaded_from_a_cache_that_anybody_may_write(tuned):
    """Case 32 in dispatch: what lies there would run; it is refused with one line, and nothing else serves."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    tuned.artifacts.chmod(0o777)
    code = SERVE.replace("y = kernel(x)", "y = x\ntry:\n    kernel(x)\nexcept tunekit.errors.NoKernelError: pass")
    done = fresh(code, tuned.reference, 64, tuned=tuned)
    assert (done["stats"]["loaded"], done["stats"]["error"]) == (0, 1)
    assert done["stderr"].count("is writable by everybody") == 1
