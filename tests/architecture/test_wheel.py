"""The built wheel: its contents, and the package as users get it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(unpacked: Path, *arguments: str, cwd: Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(unpacked), "TUNEKIT_CACHE": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


def test_the_wheel_carries_specs_and_results_as_its_own_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tunekit"}
    for folder in ("kernel_specs", "tuning_db"):
        here = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".jsonl")]
        assert {f"tunekit/{p.relative_to(ROOT).as_posix()}" for p in here} <= names
    assert {
        "tunekit/backends/host/tunekit_host.h",
        "tunekit/simulate/launch/stand_in.c",
    } <= names  # compiled at run time
    assert not any("tests" in name.split("/") for name in names)


def test_the_wheel_serves_its_own_specs(unpacked, tmp_path):
    where = run(unpacked, "-c", "import tunekit; print(tunekit.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(unpacked))
    code = "from tunekit.spec.load import shipped_directory; print(shipped_directory())"
    assert run(unpacked, "-c", code, cwd=tmp_path).stdout.strip() == str(unpacked / "tunekit" / "kernel_specs")
    listed = run(unpacked, "-m", "tunekit", "list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr


@pytest.mark.slow
def test_the_tests_pass_on_the_wheel(unpacked, tmp_path):
    folders = [str(ROOT / "tests" / name) for name in ("spec", "identity", "cli")]
    options = ["-p", "no:cacheprovider", "-m", "not slow and not gpu", "--rootdir", str(ROOT)]
    done = run(unpacked, "-m", "pytest", *options, *folders, cwd=tmp_path, timeout=170)
    assert done.returncode == 0, done.stdout[-3000:]
