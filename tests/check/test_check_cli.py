"""``tunekit check compile-time`` from the command line: exit statuses and the machine-readable forms."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def check(specs):
    def run(spec: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "tunekit",
            "check",
            "compile-time",
            "--spec",
            f"{specs / 'host_scale.py'}:{spec}",
        ]
        return subprocess.run(
            [*command, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
        )

    return run


def test_a_good_kernel_passes_in_every_form(check, tmp_path):
    """Exit 0; one JSON value on stdout; JUnit XML that parses; the baseline written."""
    baseline, junit = tmp_path / "baseline.json", tmp_path / "junit.xml"
    done = check(
        "host_build", "--problem", "rows=8", "--rounds", 1, "--baseline", baseline, "--update-baseline",
        "--junit", junit, "--json", "--github",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] is True and [row["verdict"] for row in document["rows"]] == ["ok"]
    assert ElementTree.parse(junit).getroot().find("testsuite/testcase") is not None
    assert len(json.loads(baseline.read_text())["kernels"]) == 1


def test_a_failing_kernel_exits_with_1_and_an_annotation(check):
    done = check("host_build", "--problem", "rows=8", "--tunables", "build=raises", "--rounds", 1, "--github")
    assert done.returncode == 1
    assert "tile 48 does not divide 64" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("::error")]
    assert line.startswith("::error file=tests/specs/host_scale.py,line=")


def test_a_spec_is_named_as_for_the_other_commands(specs):
    command = [sys.executable, "-m", "tunekit", "check", "compile-time", f"{specs / 'host_scale.py'}:host_scale"]
    done = subprocess.run(
        [*command, "--limit-s", "30", "--json"], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["rounds"] == 1 and document["limit_s"] == {"host_scale": 30.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "nowhere.json"], "no baseline nowhere.json"),
        (["--rounds", "0"], "rounds is 0"),
        (["--arch", "sm_1"], "unknown architecture"),
        (["--tunables", "unrol=1"], "unknown tunable 'unrol'"),
    ],
)
def test_a_wrong_request_exits_with_2_and_one_line(check, arguments, words):
    done = check("host_scale", *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
