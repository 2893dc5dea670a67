"""The baseline file: what is written is what is read; what is no baseline is said in one line."""

from __future__ import annotations

import json

import pytest

from tunekit.check.baseline import Baseline, read_baseline, write_baseline
from tunekit.check.compile_times import check_compile_times
from tunekit.check.verdict import Entry
from tunekit.errors import UserError
from tunekit.model import Values
from tunekit.settings import Settings

ENTRY = Entry("s", "i", "sm_90a", Values(head_dim=128, normalize=True), Values(stage=2, fast=False), 3.125, 1.5)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "baseline.json"
    write_baseline(path, Baseline({"b": ENTRY, "a": ENTRY}, {"nvidia-cutlass-dsl": "4.8.1"}))
    read = read_baseline(path)
    assert read.kernels == {"a": ENTRY, "b": ENTRY} and read.toolchain == {"nvidia-cutlass-dsl": "4.8.1"}
    assert list(json.loads(path.read_text())["kernels"]) == ["a", "b"]
    assert [p.name for p in path.parent.iterdir()] == ["baseline.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "make one with --update-baseline"),
        ("", "is no baseline"),
        ("[]", "found list"),
        ('{"format": 99, "kernels": {}}', "found 99"),
        ('{"format": 1}', "damaged"),
        ('{"format": 1, "kernels": {"a": 3}}', "damaged"),
        ('{"format": 1, "kernels": {"a": {"spec": "s"}}}', "damaged"),
        ('{"format": 1, "kernels": {"a": {"relative": NaN}}}', "NaN is no number"),
        ("[" * 100_000, "is no baseline"),
    ],
)
def test_what_is_no_baseline_is_one_line(tmp_path, content, words):
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        read_baseline(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("relative", [0, -1, True, "fast", None])
def test_a_time_that_is_no_time_is_refused(tmp_path, relative):
    path = tmp_path / "baseline.json"
    write_baseline(path, Baseline({"a": ENTRY}))
    document = json.loads(path.read_text())
    document["kernels"]["a"]["relative"] = relative
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="not a positive number"):
        read_baseline(path)


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write the baseline"):
        write_baseline(tmp_path / "file" / "baseline.json", Baseline())


def test_an_update_keeps_what_it_did_not_measure(host_scale, machine, tmp_path):
    """A run over a part of the kernels, or with failing ones, loses nobody's baseline."""
    path = tmp_path / "baseline.json"
    source, settings = machine(lambda target: 1.0, noise=0.0, burst=0.0), Settings(tmp_path, tmp_path)
    for unroll in (1, 4):
        report = check_compile_times(
            host_scale, only={"unroll": unroll}, baseline=path, update_baseline=True, compile_once=source,
            settings=settings,
        )  # fmt: skip
        assert f"to {path}" in report.notes[-1]
    assert {entry.tunables.unroll for entry in read_baseline(path).kernels.values()} == {1, 4}


def test_another_toolchain_is_noted(host_scale, machine, tmp_path):
    path = tmp_path / "baseline.json"
    write_baseline(path, Baseline({}, {"nvidia-cutlass-dsl": "4.7.0", "apache-tvm-ffi": "0.1.0"}))
    report = check_compile_times(
        host_scale, baseline=path, compile_once=machine(lambda target: 1.0), settings=Settings(tmp_path, tmp_path)
    )
    assert "another toolchain: nvidia-cutlass-dsl 4.7.0" in report.notes[0] and report.exit_code == 0
