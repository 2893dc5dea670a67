"""The report in the forms that people and CI systems read: text, JSON, JUnit XML, GitHub annotations."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from tunekit.check.compile_times import CheckReport
from tunekit.check.verdict import Row, Verdict
from tunekit.model import to_json

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write: most control characters, and lone surrogates."""


def as_text(report: CheckReport) -> str:
    """A line a kernel, failures with their reasons, and a last line that says how it ended."""
    lines = [_text_row(row) for row in report.rows]
    lines += [f"note: {note}" for note in report.notes]
    lines += [
        f"reference compile ({name}): {'failed' if seconds is None else f'{seconds:.2f} s'}"
        for name, seconds in report.reference_s.items()
    ]
    failed, total = len(report.failures), len(report.rows)
    lines.append(f"{failed} of {total} kernels failed" if failed else f"{total} kernels, none failed")
    return "\n".join(lines)


def as_json(report: CheckReport) -> dict[str, Any]:
    """Plain JSON: the report's fields, with `ok` and `exit_code`."""
    fields: dict[str, Any] = to_json(report)
    return {"ok": not report.failures, "exit_code": report.exit_code, **fields}


def as_junit(report: CheckReport) -> str:
    """JUnit XML: a test case a kernel; unchecked ones are skipped."""
    total = sum(row.seconds or 0.0 for row in report.rows)
    counts = {
        "tests": str(len(report.rows)),
        "failures": str(len(report.failures)),
        "errors": "0",
        "time": f"{total:.3f}",
    }
    root = ElementTree.Element("testsuites", counts)
    skipped = str(sum(row.verdict is Verdict.UNCHECKED for row in report.rows))
    suite = ElementTree.SubElement(root, "testsuite", {"name": "tunekit.compile-time", **counts, "skipped": skipped})
    for row in report.rows:
        classname, _, name = _xml(row.name).partition(" ")
        seconds = f"{row.seconds or 0.0:.3f}"
        case = ElementTree.SubElement(suite, "testcase", {"classname": classname, "name": name, "time": seconds})
        reason = _xml(row.reason)
        if row.verdict is Verdict.UNCHECKED:
            ElementTree.SubElement(case, "skipped", {"message": reason})
        elif not row.verdict.passes:
            first = reason.partition("\n")[0]
            failure = ElementTree.SubElement(case, "failure", {"message": first, "type": row.verdict.value})
            failure.text = reason
        elif reason:
            ElementTree.SubElement(case, "system-out").text = reason
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def as_github(report: CheckReport, base: Path | None = None) -> str:
    """GitHub workflow commands: an error a failure, a notice a new kernel, a warning a note.

    Files are given relative to `base` (default: the working directory), as the
    annotations need them.
    """
    root = base or Path.cwd()
    lines = [_annotation("error", row, root) for row in report.failures]
    lines += [_annotation("notice", row, root) for row in report.rows if row.verdict is Verdict.NEW and row.reason]
    lines += [f"::warning title=compile time::{_escaped(note)}" for note in report.notes]
    return "\n".join(lines)


def _text_row(row: Row) -> str:
    figures = [f"{row.seconds:.2f} s" if row.seconds is not None else "", f"{row.ratio:.2f}x" if row.ratio else ""]
    head = f"{row.verdict.value:<10} {figures[0]:>9} {figures[1]:>6}  {row.name}"
    return f"{head}: {row.reason}" if row.reason else head


def _annotation(kind: str, row: Row, root: Path) -> str:
    place = {"title": f"compile time: {row.verdict.value.replace('_', ' ')}"}
    if row.file:
        place = {"file": _relative(row.file, root), "line": str(row.line), **place}
    properties = ",".join(f"{name}={_escaped(value, in_property=True)}" for name, value in place.items())
    return f"::{kind} {properties}::{_escaped(f'{row.name}: {row.reason}')}"


def _relative(file: str, root: Path) -> str:
    relative = os.path.relpath(file, root)
    return file if relative.startswith("..") else Path(relative).as_posix()


def _escaped(text: str, *, in_property: bool = False) -> str:
    """Text as workflow commands want it: a line break would end the command."""
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace(":", "%3A").replace(",", "%2C") if in_property else escaped


def _xml(text: str) -> str:
    return NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
