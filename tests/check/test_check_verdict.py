"""The verdict on compile times, with a made-up compiler: noise, regressions, failures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tunekit.check.compile_times import check_compile_times
from tunekit.check.targets import reference_target, select
from tunekit.check.verdict import Entry, Rule, Sample, Verdict, judge
from tunekit.errors import UserError
from tunekit.settings import Settings
from tunekit.spec import load_spec
from tunekit.trials import Status

REFERENCE_S = 0.6


def seconds_of(target, **slower):
    """True compile times: the reference, and kernels from 1 to 8 s."""
    if target.variant.spec == "reference":
        return REFERENCE_S
    base = 1.0 + target.variant.tunables["unroll"] - (target.variant.tunables["delay_us"] == 200) * 0.5
    return base * slower.get(f"unroll_{target.variant.tunables['unroll']}", 1.0)


@pytest.fixture
def check(host_scale, tmp_path):
    def run(compile_once, **more):
        more.setdefault("baseline", tmp_path / "baseline.json")
        return check_compile_times(
            host_scale, which="all", compile_once=compile_once, settings=Settings(tmp_path, tmp_path), **more
        )

    return run


@pytest.fixture
def baseline(check, machine, tmp_path):
    report = check(machine(seconds_of, seed=1), update_baseline=True)
    assert report.exit_code == 0
    return tmp_path / "baseline.json"


def test_twenty_runs_of_one_commit_raise_no_alarm(check, baseline, machine):
    """Case 62: noise, bursts and machines of half to three times the speed: 20 runs, no alarm."""
    for seed in range(20):
        speed = (0.5, 1.0, 1.7, 3.0)[seed % 4]
        report = check(machine(seconds_of, seed=100 + seed, speed=speed))
        assert [row.name for row in report.failures] == [] and report.exit_code == 0


def test_a_doubled_compile_time_is_always_seen(check, baseline, machine):
    """Case 62: an injected 2x raises an alarm in each of 20 runs, for that kernel alone."""
    for seed in range(20):
        slower = machine(lambda t: seconds_of(t, unroll_4=2.0), seed=200 + seed, speed=(0.7, 1.0, 2.0)[seed % 3])
        report = check(slower)
        assert {row.verdict for row in report.failures} == {Verdict.REGRESSED}
        assert all("unroll=4" in row.name for row in report.failures) and len(report.failures) == 2
        assert report.exit_code == 1


def test_three_milliseconds_to_six_is_no_regression(check, machine, tmp_path):
    """Case 62: a ratio alone is no alarm: the growth must be worth somebody's time."""

    def tiny(scale):
        return lambda target: 0.003 * scale if target.variant.spec != "reference" else REFERENCE_S

    check(machine(tiny(1.0), seed=1), update_baseline=True)
    report = check(machine(tiny(2.0), seed=2))
    assert report.exit_code == 0
    assert sum(row.ratio > 1.5 for row in report.rows) > len(report.rows) / 2


def test_a_suspect_is_measured_again_before_it_is_accused(check, baseline, machine):
    """A burst over all rounds of one kernel is told from a regression by as many rounds again."""
    seen: dict[str, int] = {}

    def unlucky(target):
        seen[target.name] = seen.get(target.name, 0) + 1
        return seconds_of(target) * (3.0 if "unroll=8" in target.name and seen[target.name] <= 3 else 1.0)

    source = machine(unlucky, noise=0.0, burst=0.0)
    report = check(source)
    assert report.exit_code == 0
    assert sum("unroll=8" in name for name in source.compiled) == 2 * 6
    assert sum("unroll=2" in name for name in source.compiled) == 2 * 3


def test_the_reference_is_compiled_between_the_kernels(check, machine):
    source = machine(seconds_of)
    check(source, rounds=2, baseline=None)
    kernels = [not name.startswith("reference") for name in source.compiled]
    assert kernels == [True, False] * (2 * 12)


def test_new_removed_and_failing_kernels_are_each_reported(check, baseline, machine):
    """Case 62: new passes and is reported; vanished and failing kernels fail the check."""
    document = json.loads(baseline.read_text())
    names = sorted(document["kernels"])
    new = next(name for name in names if "unroll=2" in name)
    entry = document["kernels"].pop(new)
    gone = names[0].replace("unroll=1", "unroll=3")
    document["kernels"][gone] = {**entry, "tunables": {"unroll": 3, "delay_us": 0}}
    baseline.write_text(json.dumps(document))
    source = machine(seconds_of, noise=0.0, burst=0.0)

    def compile_once(target):
        sample = source(target)
        if "unroll=8" in target.name:
            return replace(sample, status=Status.COMPILE_ERROR, reason="tile 48 does not divide 64", phase="mlir")
        return sample

    report = check(compile_once)
    rows = {row.name: row for row in report.rows}
    assert rows[new].verdict is Verdict.NEW and rows[new].reason == "not in the baseline"
    assert rows[gone].verdict is Verdict.VANISHED and "unroll=3 is no longer in the space" in rows[gone].reason
    failing = [row for row in report.rows if row.verdict is Verdict.FAILED]
    assert len(failing) == 2 and all("compile_error in mlir: tile 48" in row.reason for row in failing)
    assert report.exit_code == 1 and len(report.failures) == 3


def test_what_was_not_asked_for_has_not_vanished(host_scale, baseline, machine, tmp_path):
    """A small subset in CI against the whole baseline: the others are unchecked, not gone."""
    report = check_compile_times(
        host_scale,
        only={"unroll": 2},
        baseline=baseline,
        compile_once=machine(seconds_of),
        settings=Settings(tmp_path, tmp_path),
    )
    assert report.exit_code == 0
    verdicts = [row.verdict for row in report.rows]
    assert verdicts.count(Verdict.OK) == 2 and verdicts.count(Verdict.UNCHECKED) == 10


def test_a_removed_implementation_has_vanished_wherever_it_ran(check, baseline, machine):
    """Also where nothing is left for its architecture; a check of other architectures leaves it alone."""
    document = json.loads(baseline.read_text())
    entry = next(iter(document["kernels"].values()))
    document["kernels"]["host_scale old sm_90a"] = {**entry, "implementation": "old", "arch": "sm_90a"}
    baseline.write_text(json.dumps(document))
    report = check(machine(seconds_of))
    (row,) = report.failures
    assert row.verdict is Verdict.VANISHED and "unknown implementation 'old'" in row.reason
    assert check(machine(seconds_of), arches="host").exit_code == 0


@pytest.fixture
def target(host_scale):
    spec = load_spec(host_scale)
    return select(spec, host_scale, None, None, "default", None).targets[0]


RULE = Rule(limit_s=10.0, max_ratio=1.5, floor_s=0.5)
OK = Status.OK


def entry(target, relative):
    v = target.variant
    return {target.name: Entry(v.spec, v.implementation, v.arch, target.static, v.tunables, relative, relative)}


@pytest.mark.parametrize(
    ("seconds", "reference_s", "relative", "verdict"),
    [
        (3.0, 1.0, 2.0, Verdict.OK),  # 1.5x exactly is not over the limit
        (3.1, 1.0, 2.0, Verdict.REGRESSED),
        (6.2, 2.0, 2.0, Verdict.REGRESSED),  # the same on a machine of half the speed
        (6.0, 2.0, 3.0, Verdict.OK),  # twice as slow a machine, the same kernel
        (0.9, 1.0, 0.45, Verdict.OK),  # 2x, but 0.45 s
        (11.0, 5.0, 2.2, Verdict.OVER_LIMIT),
    ],
)
def test_ratio_and_growth_are_both_needed(target, seconds, reference_s, relative, verdict):
    row = judge(target, [Sample(OK, seconds)], [Sample(OK, reference_s)], entry(target, relative), RULE)
    assert row.verdict is verdict


def test_the_reasons_have_both_numbers(target):
    slow = judge(target, [Sample(OK, 4.0)], [Sample(OK, 1.0)], entry(target, 2.0), RULE)
    assert "4.00 s, 2.00x the baseline (limit 1.5x)" in slow.reason and "+2.00 s" in slow.reason
    over = judge(target, [Sample(OK, 12.0)], [Sample(OK, 1.0)], {}, RULE)
    assert over.reason == "compiles in 12.0 s, over the limit of 10 s"
    timed_out = [Sample(Status.COMPILE_TIMEOUT, 10.2, "", "mlir")] * 2
    killed = judge(target, timed_out, [Sample(OK, 1.0)], {}, RULE)
    assert killed.verdict is Verdict.OVER_LIMIT
    assert killed.reason == "killed in mlir after 10.2 s, over the limit of 10 s"
    assert judge(target, [], [], {}, RULE).reason == "was not compiled"


def test_one_timeout_among_good_rounds_is_the_machines(target):
    samples = [Sample(Status.COMPILE_TIMEOUT, 10.0), Sample(OK, 3.0), Sample(OK, 3.1)]
    assert judge(target, samples, [Sample(OK, 1.0)], {}, RULE).verdict is Verdict.OK


def test_a_failing_reference_fails_what_must_be_compared(target):
    failed = [Sample(Status.COMPILE_ERROR, 0.1, "no compiler")]
    assert judge(target, [Sample(OK, 3.0)], failed, entry(target, 3.0), RULE).verdict is Verdict.FAILED
    assert judge(target, [Sample(OK, 3.0)], failed, {}, RULE).verdict is Verdict.OK


def test_what_fails_is_not_compiled_again(check, machine):
    source = machine(seconds_of)

    def compile_once(target):
        sample = source(target)
        bad = {"unroll=8 delay_us=0": Status.COMPILE_ERROR, "unroll=4 delay_us=0": Status.COMPILE_TIMEOUT}
        status = next((status for words, status in bad.items() if words in target.name), OK)
        return replace(sample, status=status)

    check(compile_once, baseline=None, rounds=5)
    tries = {words: sum(words in n for n in source.compiled) // 2 for words in ("unroll=8", "unroll=4", "unroll=2")}
    assert tries == {"unroll=8": 1, "unroll=4": 2, "unroll=2": 5}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"max_ratio": 1.0}, "max_ratio is 1.0"),
        ({"floor_s": -1.0}, "floor_s is -1.0"),
        ({"limit_s": 0.0}, "limit of 0.0 s"),
        ({"only": {"unrol": 2}}, "unknown tunable 'unrol'; did you mean unroll?"),
        ({"only": {"unroll": 3}}, "unroll=3 is not in the space"),
        ({"arches": "sm_99"}, "unknown architecture"),
        ({"arches": "sm_90a"}, "can't run on sm_90a"),
        ({"problems": [{"row": 3}]}, "unknown axis 'row'"),
        ({"update_baseline": True, "baseline": None}, "name the baseline file"),
    ],
)
def test_a_wrong_request_is_one_line(check, machine, more, words):
    more = {"baseline": None, **more}
    with pytest.raises(UserError) as caught:
        check(machine(seconds_of), **more)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_reference_is_by_the_same_backend_and_arch(target):
    reference = reference_target(target)
    assert (reference.backend, reference.variant.arch, reference.variant.spec) == ("host", "host", "reference")
