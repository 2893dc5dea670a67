"""The check's report for machines: JUnit XML and GitHub annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from tunekit.check.compile_times import CheckReport

FORBIDDEN = dict.fromkeys([*range(9), 11, 12, *range(14, 32)], "?")  # control characters that XML 1.0 has no form for


def junit_xml(report: CheckReport) -> str:
    """One test case a kernel; a verdict that fails the check is a failure, an unchecked kernel is skipped."""
    suite = ElementTree.Element(
        "testsuite",
        name="tunekit check compile-time",
        tests=str(len(report.rows)),
        failures=str(len(report.failures)),
        errors="0",
        skipped=str(sum(1 for row in report.rows if str(row.verdict) == "unchecked")),
        time=f"{sum(row.seconds or 0.0 for row in report.rows):.3f}",
    )
    for row in report.rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname=row.name.partition(" ")[0], name=row.name, time=f"{row.seconds or 0.0:.3f}"
        )
        if row.file:
            case.set("file", row.file)
            case.set("line", str(row.line))
        message = (row.reason or str(row.verdict)).translate(FORBIDDEN)
        if not row.verdict.passes:
            failure = ElementTree.SubElement(case, "failure", type=str(row.verdict), message=message)
            failure.text = message
        elif str(row.verdict) == "unchecked":
            ElementTree.SubElement(case, "skipped", message=message)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def github_lines(report: CheckReport) -> list[str]:
    """``::error`` for each kernel that fails the check, ``::notice`` for each new one, at the spec's file and line."""
    lines = []
    for row in report.rows:
        if row.verdict.passes and str(row.verdict) != "new":
            continue
        level = "notice" if row.verdict.passes else "error"
        place = f"file={_property(row.file)},line={row.line}," if row.file else ""
        title = _property(f"compile time: {row.verdict}")
        message = _data(f"{row.name}: {row.reason or row.verdict}")
        lines.append(f"::{level} {place}title={title}::{message}")
    return lines


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
