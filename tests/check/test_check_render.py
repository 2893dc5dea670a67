"""The report's forms: each says the same, and each is what its reader parses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tunekit.check.compile_times import CheckReport
from tunekit.check.render import as_github, as_json, as_junit, as_text
from tunekit.check.verdict import Row, Verdict

NASTY = 'ptxas died: "a" < b & c > d\x1b[31m\x00\ud800, 100% of: it\nsecond line\rthird'
HERE = Path(__file__).resolve()


@pytest.fixture
def report() -> CheckReport:
    rows = (
        Row("fmha loop host [h=1] a=1", Verdict.OK, "", 1.25, 2.5, 2.4, 1.04, str(HERE), 7),
        Row("fmha loop host [h=1] a=2", Verdict.REGRESSED, "compiles in 4.00 s", 4.0, 8.0, 4.0, 2.0, str(HERE), 7),
        Row("fmha loop host [h=1] a=3", Verdict.FAILED, NASTY, file=str(HERE), line=9),
        Row("fmha loop host [h=1] a=4", Verdict.NEW, "not in the baseline", 1.0, 2.0),
        Row("fmha loop host [h=1] a=5", Verdict.UNCHECKED, "not asked for", baseline=2.0),
        Row("fmha loop host [h=1] a=6", Verdict.VANISHED, "is no longer in the spec", baseline=2.0),
    )
    return CheckReport(
        rows,
        3,
        {"fmha": 300.0},
        1.5,
        0.5,
        {"reference host": 0.5},
        {"nvidia-cutlass-dsl": "4.8.1"},
        "base.json",
        ("a note",),
    )


def test_text(report):
    lines = as_text(report).splitlines()
    assert lines[0].split() == ["ok", "1.25", "s", "1.04x", "fmha", "loop", "host", "[h=1]", "a=1"]
    assert lines[1].startswith("regressed") and lines[1].endswith("compiles in 4.00 s")
    assert lines[-1] == "3 of 6 kernels failed"


def test_json(report):
    document = json.loads(json.dumps(as_json(report), allow_nan=False))
    assert (document["ok"], document["exit_code"], len(document["rows"])) == (False, 1, 6)
    assert document["rows"][1] == {
        "name": "fmha loop host [h=1] a=2", "verdict": "regressed", "reason": "compiles in 4.00 s",
        "seconds": 4.0, "relative": 8.0, "baseline": 4.0, "ratio": 2.0, "file": str(HERE), "line": 7,
    }  # fmt: skip


def test_junit_is_well_formed_and_counts_agree(report):
    """Parsed back, also with what XML can't hold; the shape is the one that CI systems read."""
    root = ElementTree.fromstring(as_junit(report).encode("utf-8"))
    (suite,) = root
    assert root.tag == "testsuites" and suite.tag == "testsuite"
    cases = list(suite)
    assert {case.tag for case in cases} == {"testcase"}
    for element in (root, suite):
        assert int(element.get("tests")) == len(cases) == 6
        assert int(element.get("failures")) == len(suite.findall("testcase/failure")) == 3
        assert int(element.get("errors")) == 0
    assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped")) == 1
    assert all(case.get("name") and case.get("classname") == "fmha" and float(case.get("time")) >= 0 for case in cases)
    failure = cases[2].find("failure")
    assert failure.get("type") == "failed" and "\n" not in failure.get("message")
    assert "second line" in failure.text and '"a" < b & c > d' in failure.text and "\x1b" not in failure.text


def test_github_annotations(report):
    lines = as_github(report, HERE.parent.parent.parent).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error"] * 3 + ["::notice", "::warning"]
    assert lines[0].startswith("::error file=tests/check/test_check_render.py,line=7,title=compile time%3A regressed::")
    assert "100%25 of: it%0Asecond line%0Dthird" in lines[1]
    assert lines[2].startswith("::error title=compile time%3A vanished::fmha loop host [h=1] a=6: ")


def test_a_report_without_failures_passes(report):
    passing = CheckReport(report.rows[:1], 3, {}, 1.5, 0.5, {}, {})
    assert passing.exit_code == 0 and as_json(passing)["ok"] is True
    assert as_github(passing) == "" and as_text(passing).endswith("1 kernels, none failed")
    assert "<failure" not in as_junit(passing)
