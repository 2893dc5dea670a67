"""What a fresh interpreter has imported after a command: the heavy packages stay out of the quick ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tunekit

PACKAGE = Path(tunekit.__file__).resolve().parents[1]
SPECS = Path(__file__).resolve().parents[1] / "specs" / "host_scale.py"
HEAVY = {"torch", "cutlass", "cuda", "tvm_ffi", "numpy", "sqlite_utils", "optuna"}
RUN = """
import json, sys
from tunekit.cli import main
try:
    status = main(sys.argv[1:])
finally:
    sys.stderr.write("\\n" + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
sys.exit(status)
"""


def modules_after(code: str, *arguments: str, cache: Path) -> tuple[set[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "TUNEKIT_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return set(json.loads(done.stderr.splitlines()[-1])), done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "sweep"),
        (["list"], ""),
        (["list", f"{SPECS}:host_scale"], "loop"),
        (["explain", f"{SPECS}:host_scale"], "delay"),
        (["best", f"{SPECS}:host_scale", "--problem", "rows=8"], ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_quick_commands_import_nothing_heavy(arguments, said, tmp_path):
    loaded, out = modules_after(RUN, *arguments, cache=tmp_path)
    assert "tunekit" in loaded
    assert said in out
    assert loaded & HEAVY == set()


def test_help_costs_click_alone(tmp_path):
    loaded, _ = modules_after(RUN, "--help", cache=tmp_path)
    assert "click" in loaded
    assert loaded & {"rich", "platformdirs", "psutil", "sqlite3", "asyncio"} == set()


def test_a_lookup_imports_nothing_slow_that_it_can_do_without(tmp_path):
    """Each of these takes 3 to 25 ms of the 200 that `tunekit.best` may take."""
    best = f"tunekit.best({str(SPECS) + ':host_scale'!r}, 'host', rows=8)"
    slow = "sys.stderr.write(json.dumps([n for n in sys.modules if n in sys.argv[1:]]))"
    names = ("importlib.metadata", "email", "difflib", "shutil", "platformdirs")
    loaded, _ = modules_after(f"import json, sys, tunekit; {best}; {slow}", *names, cache=tmp_path)
    assert loaded == set()


def test_importing_the_package_imports_nothing_else(tmp_path):
    code = 'import sys, json, tunekit; sys.stderr.write(json.dumps(sorted(n for n in sys.modules if "tunekit" in n)))'
    loaded, _ = modules_after(code, cache=tmp_path)
    assert {name for name in loaded if name.startswith("tunekit")} == {"tunekit"}
