"""The check against a base checkout: its kernels are compiled in the same rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunekit.check.compile_times import check_compile_times
from tunekit.check.verdict import Verdict
from tunekit.errors import UserError
from tunekit.settings import Settings

SPEC = '''
import time
from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tunable

def build(b):
    time.sleep({seconds}[b.tunables.number])
    return """
#include "tunekit_host.h"
TUNEKIT_KERNEL(args, count) {{ return 0; }}
"""

sleepy = KernelSpec(
    name="sleepy", version=1, axes=(Axis("n"),), examples=({{"n": 8}},),
    signature=(TensorArg("y", ("n",), "float32", role="output"),),
    implementations=(Implementation(
        name="host", requires={{"host"}}, backend="host", tunables=(Tunable("number", {numbers}),),
        defaults=({{"number": {numbers}[0]}},), build=build,
    ),),
    reference=lambda problem, inputs: {{}},
)
'''


def checkout(root: Path, seconds: dict[int, float]) -> Path:
    (root / "specs").mkdir(parents=True)
    (root / "specs" / "sleepy.py").write_text(SPEC.format(seconds=seconds, numbers=tuple(seconds)))
    return root


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "tunekit.db", tmp_path / "artifacts")


def test_a_slower_a_new_and_a_vanished_kernel(tmp_path, settings, monkeypatch):
    """Case 62, base and head interleaved: number 1 stays, 2 slows down, 3 is new, 4 is gone."""
    base = checkout(tmp_path / "base", {1: 0.05, 2: 0.05, 4: 0.05})
    head = checkout(tmp_path / "head", {1: 0.05, 2: 1.2, 3: 0.05})
    monkeypatch.chdir(head)
    report = check_compile_times("specs/sleepy.py", base=base, which="all", rounds=1, settings=settings)
    found = {row.name.rpartition("=")[2]: row for row in report.rows}
    verdicts = {number: row.verdict for number, row in found.items()}
    assert verdicts == {"1": Verdict.OK, "2": Verdict.REGRESSED, "3": Verdict.NEW, "4": Verdict.VANISHED}
    assert found["2"].ratio > 1.5 and "number=4 is no longer in the space" in found["4"].reason
    assert report.exit_code == 1


def test_the_same_checkout_raises_no_alarm(tmp_path, settings, monkeypatch):
    head = checkout(tmp_path / "head", {1: 0.05, 2: 0.1})
    monkeypatch.chdir(head)
    report = check_compile_times("specs/sleepy.py", base=head, which="all", rounds=2, settings=settings)
    assert [row.verdict for row in report.rows] == [Verdict.OK, Verdict.OK] and report.exit_code == 0
    assert all(row.ratio > 0 for row in report.rows)


def test_a_spec_that_the_base_lacks_is_new_and_said_so(tmp_path, settings, monkeypatch):
    head = checkout(tmp_path / "head", {1: 0.0})
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(head)
    report = check_compile_times("specs/sleepy.py", base=tmp_path / "base", rounds=1, settings=settings)
    assert report.exit_code == 0 and "are new" in report.notes[0]


def test_what_can_not_be_a_base_is_one_line(tmp_path, settings, monkeypatch):
    head = checkout(tmp_path / "head", {1: 0.0})
    monkeypatch.chdir(head)
    with pytest.raises(UserError, match="no directory"):
        check_compile_times("specs/sleepy.py", base=tmp_path / "nowhere", settings=settings)
    with pytest.raises(UserError, match="not with both"):
        check_compile_times("specs/sleepy.py", base=head, baseline=tmp_path / "b.json", settings=settings)
    monkeypatch.chdir(tmp_path / "head" / "specs")
    with pytest.raises(UserError, match="lies outside"):
        check_compile_times(
            str(checkout(tmp_path / "other", {1: 0.0}) / "specs/sleepy.py"), base=head, settings=settings
        )
