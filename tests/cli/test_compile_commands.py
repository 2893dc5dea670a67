"""probe, compile, check and db over the host backend."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

SPECS = Path(__file__).resolve().parents[1] / "specs"
SLOW = f"{SPECS / 'shell_slow.py'}"
FAIL = f"{SLOW}:shell_fail"


@pytest.fixture
def good(scale, tunekit):
    """The arguments that mean one small variant of the host spec."""
    done = tunekit("list", scale, "-p", "rows=8", "--json")
    return [scale, "-p", "rows=8", "--variant", json.loads(done.out)[0]["variants"][0]["variant"]["id"]]


def test_probe_reads_and_compares(tunekit, good):
    done = tunekit("probe", *good, "--json")
    assert done.status == 0, done.err
    ((reading,),) = [entry["variants"] for entry in json.loads(done.out)]
    assert (reading["status"], reading["disagreements"]) == ("ok", [])


def test_probe_fails_where_a_variant_cant_be_traced(tunekit):
    done = tunekit("probe", FAIL)
    assert done.status == 1
    assert done.out.count("trace_error: ValueError: tile") == 20


def test_probe_says_which_readings_disagree(tunekit, tmp_path):
    """A declared footprint that is wrong is found out by the traced one."""
    pytest.importorskip("cutlass", reason="the disagreement is between a CuTeDSL trace and the declaration")
    text = (SPECS / "cute_small.py").read_text()
    (tmp_path / "cute_small_kernels.py").write_text((SPECS / "cute_small_kernels.py").read_text())
    assert "threads=v.threads" in text
    (tmp_path / "cute_small.py").write_text(text.replace("threads=v.threads", "threads=v.threads + 32"))
    reference = f"{tmp_path / 'cute_small.py'}:cute_scale"
    listed = json.loads(tunekit("list", reference, "--arch", "sm_90a", "--json").out)
    variant = next(v["variant"]["id"] for v in listed[0]["variants"] if v["misfit"] is None)
    done = tunekit("probe", reference, "--arch", "sm_90a", "--variant", variant)
    assert done.status == 1, done.out + done.err
    assert "threads: declared 160, traced 128" in done.out


def test_probe_of_a_misfit_ends_before_tracing(tunekit):
    """Case 12: the declared arithmetic alone says it, with both numbers."""
    done = tunekit("probe", f"{SPECS / 'cute_small.py'}:cute_scale", "--arch", "sm_90a", "--declared")
    assert "over_budget: smem 232452 B > 232448 B (sm_90a)" in done.out


def test_compile_stores_what_best_then_finds(tunekit, good):
    assert tunekit("compile", *good).status == 0
    (found,) = json.loads(tunekit("best", *good[:3], "--json").out)
    assert found["choice"]["level"] == "default"
    default = tunekit("compile", *good[:3], "--default")
    assert default.status == 0, default.err
    (found,) = json.loads(tunekit("best", *good[:3], "--json").out)
    assert found["choice"]["artifact"] is not None


def test_compile_of_what_fails_has_status_1(tunekit):
    done = tunekit("compile", FAIL)
    assert done.status == 1
    assert "20 x trace_error" in done.out


CHECK = ("check", "compile-time", "--rounds", "1", "--floor-s", "5")


def test_check_passes_and_writes_a_baseline(tunekit, scale, tmp_path):
    baseline, junit = tmp_path / "b.json", tmp_path / "j.xml"
    first = tunekit(*CHECK, "--spec", scale, "--baseline", str(baseline), "--update-baseline")
    assert first.status == 0, first.err
    second = tunekit(*CHECK, "--spec", scale, "--baseline", str(baseline), "--junit", str(junit), "--json")
    assert second.status == 0
    report = json.loads(second.out)
    assert {row["verdict"] for row in report["rows"]} == {"ok"}
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == (str(len(report["rows"])), "0")


def test_check_fails_for_a_kernel_that_fails(tunekit, tmp_path):
    junit = tmp_path / "j.xml"
    done = tunekit(*CHECK, "--spec", FAIL, "--junit", str(junit), "--github")
    assert done.status == 1
    assert "failed" in done.out and "does not divide 64" in done.out
    (failure,) = ElementTree.parse(junit).getroot().iter("failure")
    assert "does not divide 64" in failure.get("message")
    (annotation,) = [line for line in done.out.splitlines() if line.startswith("::error ")]
    assert "file=" in annotation and "shell_slow.py" in annotation and "%0A" in annotation


def test_check_fails_over_the_limit_and_for_a_vanished_kernel(tunekit, scale, tmp_path):
    assert tunekit(*CHECK, "--spec", scale, "--limit-s", "0.001").status == 1
    baseline = tmp_path / "b.json"
    assert tunekit(*CHECK, "--spec", scale, "--baseline", str(baseline), "--update-baseline").status == 0
    text = baseline.read_text()
    for old, new in (("unroll=1 ", "unroll=16 "), ('"unroll": 1,', '"unroll": 16,')):
        assert old in text
        text = text.replace(old, new)
    baseline.write_text(text)
    done = tunekit(*CHECK, "--spec", scale, "--baseline", str(baseline), "--json")
    assert done.status == 1
    assert {row["verdict"] for row in json.loads(done.out)["rows"]} == {"new", "vanished"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--spec", "nonesuch"], "unknown spec 'nonesuch'"),
        (["--spec", "SPEC", "--update-baseline"], "name the baseline file"),
        (["--spec", "SPEC", "--baseline", "none.json"], "none.json"),
        (["--spec", "SPEC", "--tunables", "unrol=1"], "unrol"),
        (["--spec", "SPEC", "--limit-s", "-1"], "no positive time"),
        (["--spec", "SPEC", "--rounds", "0"], "rounds"),
    ],
    ids=" ".join,
)
def test_a_mistake_in_the_request_has_status_2(tunekit, scale, flags, said):
    done = tunekit("check", "compile-time", *(scale if word == "SPEC" else word for word in flags))
    assert (done.status, done.out) == (2, "")
    assert said in done.err and done.err.count("\n") == 1


def test_results_move_between_databases(tunekit, good, tmp_path, monkeypatch):
    assert tunekit("compile", *good).status == 0
    assert json.loads(tunekit("db", "info", "--json").out)["trials_by_status"] == {"compile ok": 1}
    exported = tmp_path / "all.jsonl"
    assert json.loads(tunekit("db", "export", str(exported), "--json").out)["records"] == 2  # the sweep, the trial
    assert tunekit("db", "export", "--kind", "trial").out.count("\n") == 1
    other = str(tmp_path / "other.db")
    assert json.loads(tunekit("db", "import", str(exported), "--db", other, "--json").out)["added"] == 2
    assert json.loads(tunekit("db", "import", str(exported), "--db", other, "--json").out)["known"] == 2
    cache = tmp_path / "cache" / "tunekit.db"
    assert json.loads(tunekit("db", "merge", str(cache), "--db", other, "--json").out)["known"] == 2
    assert tunekit("db", "verify").status == 0
    assert tunekit("db", "verify", str(exported)).status == 0
    assert json.loads(tunekit("db", "gc", "--json").out)["removed"] == []


def test_a_rejected_line_is_named_and_has_status_1(tunekit, good, tmp_path):
    tunekit("compile", *good)
    exported = tmp_path / "all.jsonl"
    tunekit("db", "export", str(exported))
    exported.write_text(exported.read_text() + "{nonsense\n")
    done = tunekit("db", "import", str(exported), "--db", str(tmp_path / "other.db"))
    assert done.status == 1
    assert "line 3: " in done.err
    assert tunekit("db", "verify", str(exported)).status == 1


def test_an_artifact_with_a_flipped_byte_is_found(tunekit, good, tmp_path):
    """Case 27, as `db verify` shows it."""
    tunekit("compile", *good)
    artifact = next((tmp_path / "cache" / "artifacts" / "objects").rglob("*.so"))
    artifact.chmod(0o644)
    content = bytearray(artifact.read_bytes())
    content[100] ^= 1
    artifact.write_bytes(content)
    done = tunekit("db", "verify")
    assert done.status == 1
    assert "error: " in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["db", "info"],
        ["db", "export"],
        ["db", "import", "none.jsonl"],
        ["db", "merge", "none.db"],
        ["db", "verify", "no"],
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_one_line(tunekit, arguments):
    done = tunekit(*arguments)
    assert done.status == 2
    assert done.err.count("\n") == 1
