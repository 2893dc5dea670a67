"""``tunekit bundle``, over the host backend."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

FAILS = f"{Path(__file__).resolve().parents[1] / 'specs' / 'shell_slow.py'}:shell_fail"


@pytest.fixture
def swept(scale, tunekit):
    """A reference to the host spec, with a winner for rows=8."""
    done = tunekit("sweep", scale, "-p", "rows=8", "--budget", "2")
    assert done.status == 0, done.err
    return scale


def test_a_sweep_ends_in_a_bundle(tunekit, swept, tmp_path):
    out = tmp_path / "bundle"
    done = tunekit("bundle", swept, "--out", str(out))
    assert done.status == 0, done.err
    assert done.out.startswith("host_scale on host: 1 kernels for 1 problems, ") and done.out.endswith(f"in {out}\n")
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out).returncode == 0
    assert "Apache License" in (out / "LICENSES" / "tunekit.txt").read_text()


def test_what_is_left_out_is_listed_with_its_command(tunekit, swept, tmp_path):
    """Exit status 1 until it is compiled, by the command given or by --compile."""
    out, wanted = tmp_path / "bundle", tmp_path / "wanted.jsonl"
    wanted.write_text('{"rows": 8}\n{"rows": 8, "cols": 16}\n')
    arguments = ("bundle", swept, "--out", str(out), "--workload", str(wanted))
    done = tunekit(*arguments, "--json")
    assert done.status == 1
    made = json.loads(done.out)
    (left,) = made["left_out"]
    assert (made["kernels"], left["problem"]["cols"]) == (1, 16)
    done = tunekit(*arguments, "--force")
    assert done.status == 1 and left["command"] in done.out and "1 left out; --compile compiles them" in done.out
    words = left["command"].split()
    assert words[:2] == ["tunekit", "compile"]
    assert tunekit(*words[1:]).status == 0
    done = tunekit(*arguments, "--force", "--json")
    assert (done.status, json.loads(done.out)["kernels"]) == (0, 2)


def test_missing_kernels_are_compiled_on_demand(tunekit, scale, tmp_path):
    """Nothing tuned, nothing compiled: the default of the problem asked for, compiled now."""
    arguments = ("bundle", scale, "--out", str(tmp_path / "bundle"), "-p", "rows=8", "cols=16")
    done = tunekit(*arguments)
    assert done.status == 2 and "none of the 1 variants" in done.err and "--compile compiles them" in done.err
    done = tunekit(*arguments, "--compile")
    assert done.status == 0, done.err
    assert "1 kernels for 1 problems" in done.out and "1/1 compile" in done.err


def test_a_kernel_that_does_not_compile_is_left_out_with_its_reason(tunekit, tmp_path):
    done = tunekit("bundle", FAILS, "--out", str(tmp_path / "bundle"), "-p", "rows=64", "--compile")
    assert done.status == 2 and "it does not compile (trace_error: ValueError: tile" in done.err
    assert not (tmp_path / "bundle").exists()


def test_what_is_in_the_way_is_one_clear_line(tunekit, swept, tmp_path):
    for there in ("a file", "a directory", "a bundle"):
        place = tmp_path / there
        place.mkdir()
        out = place / "bundle"
        if there == "a file":
            out.write_text("mine")
        elif there == "a directory":
            out.mkdir()
            (out / "mine").write_text("mine")
        else:
            tunekit("bundle", swept, "--out", str(out))
        done = tunekit("bundle", swept, "--out", str(out))
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert str(out) in done.err
        assert [path.name for path in place.iterdir()] == ["bundle"]


def test_without_winners_it_says_how_to_tune(tunekit, scale, tmp_path):
    done = tunekit("bundle", scale, "--out", str(tmp_path / "bundle"))
    assert done.status == 2 and "no winner of host_scale on host is recorded" in done.err
    assert "tunekit sweep" in done.err
