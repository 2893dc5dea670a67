"""Problems from flags and workload files; whatever is wrong is one line and exit status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunekit.cli import problems
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.spec import load_spec


@pytest.fixture
def spec(scale):
    return load_spec(scale)


@pytest.mark.parametrize(
    "words",
    [
        ["--problem", "rows=8", "cols=128"],
        ["--problem", "rows=8", "--problem", "cols=128"],
        ["--problem", "rows=8,cols=128"],
        ["--problem", "rows=8 cols=128"],
        ["-p", "rows=8", "cols=128", "dtype=float32"],
        ["--problem=rows=8", "-p", "cols=128"],
    ],
    ids=" ".join,
)
def test_every_way_to_write_one_problem(tunekit, scale, words):
    done = tunekit("list", scale, "--json", *words)
    assert done.status == 0
    (listed,) = json.loads(done.out)
    assert listed["problem"] == {"rows": 8, "cols": 128, "dtype": "float32"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["row=8"], "unknown axis 'row'; did you mean rows?"),
        (["rows=eight"], "rows=eight is not an integer"),
        (["rows=8", "cols=65"], "cols: 65 is not allowed (allowed: 16, 32, 64, 128, 1024)"),
        (["rows=0"], "rows: 0 is below the minimum 1"),
        (["cols=64"], "the problem needs rows"),
        (["rows=8", "rows=9"], "gives rows twice: 8 and 9"),
        (["rows"], "takes name=value, not 'rows'"),
        (["rows="], "takes name=value, not 'rows='"),
    ],
)
def test_a_bad_problem_is_one_line(tunekit, scale, words, said):
    done = tunekit("list", scale, "--problem", *words)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_flags_read_as_words_and_digits(spec, monkeypatch):
    from dataclasses import replace

    from tunekit.spec import Axis

    flagged = replace(spec, axes=(*spec.axes, Axis("fast", kind="flag", default=False)))
    for text, value in (("true", True), ("1", True), ("yes", True), ("False", False), ("0", False)):
        assert problems.problem(flagged, [f"rows=8 fast={text}"])["fast"] is value
    with pytest.raises(UserError, match="fast=maybe is no flag"):
        problems.problem(flagged, ["rows=8 fast=maybe"])


def test_names_negative_sizes_and_what_follows(tunekit):
    """A name is one of its axis's words; what follows from the rest need not be given, but may be."""
    path = f"{Path(__file__).parents[1] / 'specs' / 'host_pages.py'}:host_pages"
    short = tunekit("explain", path, "--problem", "cols=8", "page=8,table_pages=3", "reduce=window", "left=-1")
    assert (short.status, short.err) == (0, "")
    line = short.out.splitlines()[0]
    assert line == "host_pages on host: s=24 cols=8 reduce=window page=8"
    assert tunekit("explain", path, "--problem", line.partition(": ")[2]).out == short.out
    for words, said in (
        (["cols=8", "s=4", "reduce=mean"], "reduce: mean is not allowed (allowed: sum, last, window)"),
        (["cols=8", "s=4", "left=-2"], "left: -2 is below the minimum -1"),
        (["cols=8", "page=8"], "the problem needs s or table_pages"),
        (["cols=8", "page=8", "s=10"], "whole_pages: s must be the table's pages"),
        (["s=4", "cols=8", "total=0"], "total: 0 is below the minimum 1"),
    ):
        done = tunekit("list", path, "--problem", *words)
        assert (done.status, done.out) == (2, "") and said in done.err and done.err.count("\n") == 1


def test_without_a_problem_the_examples_are_meant(spec):
    assert [p["rows"] for p in problems.problems(spec, (), None)] == [8, 7]


@pytest.mark.parametrize(
    "text",
    [
        '{"rows": 8, "count": 2}\n\n{"rows": 9, "cols": 128, "count": 5}\n{"rows": 8}\n',
        '[{"rows": 8, "count": 2},\n {"rows": 9, "cols": 128, "count": 5}, {"rows": 8}]',
        '# two problems\n{"rows": 8, "count": 2}\n  # the second:\n{"rows": 9, "cols": 128, "count": 5}\n',
    ],
    ids=["lines", "list", "comments"],
)
def test_a_workload_is_its_distinct_problems_most_frequent_first(spec, tmp_path, text):
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    assert problems.problems(spec, (), path) == (
        Values(rows=9, cols=128, dtype="float32"),
        Values(rows=8, cols=64, dtype="float32"),
    )


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('{"rows": 8}\n{"rows": }\n', 2, "not JSON"),
        ('# 8 rows:\n\n{"rows": 8} # 8\n', 3, "not JSON"),
        ('[{"rows": 8},\n{"rows": }]', 2, "not JSON"),
        ('{"rows": 8}\n[1, 2]\n', 2, "no object"),
        ('[{"rows": 8},\n\n3]', 3, "no object"),
        ('{"rows": 8}\n{"rwos": 8}\n', 2, "did you mean rows"),
        ('[{"rows": 8},\n{"rows": "8"}]', 2, "'8' is str, not int"),
        ('{"rows": 8, "count": 0}', 1, "count is 0"),
        ('{"rows": 8, "count": true}', 1, "count is True"),
        ('{"rows": NaN}', 1, "NaN is no size"),
        ('{"rows": [8]}', 1, "rows is [8]"),
        ('{"rows": 8.5}', 1, "float, not int"),
        ('{"rows": 8, "cols": 7}', 1, "7 is not allowed"),
        ('{"rows": 8}\n{"rows": 8, "rows": 9}', 2, "gives rows twice"),
        ('{"rows": 8}\n{"rows": ' + "9" * 5000 + "}", 2, "4300 digits"),
        ('{"rows": 8}\n' + "[" * 100_000, 2, "nested too deeply"),
        ("[" * 100_000, 1, "nested too deeply"),
    ],
)
def test_a_malformed_workload_names_file_and_line(tunekit, scale, tmp_path, monkeypatch, text, line, said):
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    done = tunekit("best", scale, "--workload", str(path))
    assert (done.status, done.out) == (2, "")
    assert f"{path}:{line}: " in done.err and said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(("content", "said"), [(b"", "holds no problem"), (b"\xff\xfe\x00", "not UTF-8")])
def test_a_workload_that_holds_nothing(spec, tmp_path, content, said):
    path = tmp_path / "w.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        problems.problems(spec, (), path)


def test_a_byte_order_mark_is_no_part_of_a_workload(spec, tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"rows": 8}\n')
    assert [values.rows for values in problems.problems(spec, (), path)] == [8]


def test_a_bare_name_is_a_file_here_or_a_workload_that_ships(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no file lama-gqa: .*did you mean llama-gqa\? \(known: dsv4-flash, dsv4-pro"):
        problems.problems(spec, (), Path("lama-gqa"))
    with pytest.raises(UserError, match=r"workloads/llama-gqa\.jsonl:3: .*unknown axis 'batch'"):
        problems.problems(spec, (), Path("llama-gqa"))
    Path("llama-gqa").write_text('{"rows": 8}')
    assert [values.rows for values in problems.problems(spec, (), Path("llama-gqa"))] == [8]


def test_an_absent_workload_and_both_ways_at_once(spec, tmp_path):
    with pytest.raises(UserError, match="can't read the workload: No such file"):
        problems.problems(spec, (), tmp_path / "none")
    with pytest.raises(UserError, match="not both"):
        problems.problems(spec, ("rows=8",), tmp_path / "none")
