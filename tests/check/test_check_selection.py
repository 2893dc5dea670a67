"""What the check compiles by default: all of a spec that is served, each kernel once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.check.compile_times import check_compile_times
from tunekit.check.targets import select
from tunekit.check.verdict import Sample, Verdict
from tunekit.errors import UserError
from tunekit.model import Environment, Values, Winner
from tunekit.settings import Settings
from tunekit.spec import load_spec
from tunekit.spec.workloads import workloads_beside
from tunekit.trials import Status

SPEC = """
from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tunable

def implementation(name, *constraints):
    return Implementation(
        name=name, requires={"host"}, backend="host", tunables=(Tunable("unroll", (1, 2, 4)),),
        defaults=({"unroll": 1},), constraints=constraints, build=lambda b: "",
    )

served = KernelSpec(
    name="served", version=2,
    axes=(
        Axis("n"),
        Axis("width", values=(1, 2, 3, 4), static=True),
        Axis("fast", kind="flag", static=True, default=False),
    ),
    signature=(TensorArg("y", ("n",), "float32", role="output"),),
    implementations=(
        implementation("plain", Constraint("width", "only up to 3", lambda v: v.width <= 3)),
        implementation("fast", Constraint("fast", "only what is fast", lambda v: v.fast)),
    ),
    reference=lambda problem, inputs: {},
    examples=({"n": 8, "width": 1}, {"n": 9, "width": 1}),
)
"""


@pytest.fixture
def served(tmp_path: Path) -> str:
    """A spec file with workloads beside it: two that are its own, one of another spec."""
    (tmp_path / "served.py").write_text(SPEC)
    workloads = tmp_path / "workloads"
    workloads.mkdir()
    lines = [{"n": 64, "width": 2, "fast": True, "count": 3}, {"n": 65, "width": 2, "fast": True}]
    (workloads / "one.jsonl").write_text("# two\n" + "\n".join(json.dumps(line) for line in lines))
    (workloads / "two.jsonl").write_text('{"n": 64, "width": 4}\n{"n": 1, "width": 1}\n')
    (workloads / "others.jsonl").write_text('{"rows": 64, "width": 2}\n')
    return str(tmp_path / "served.py")


def winner(version: int = 2, unroll: int = 4, width: int = 3, **tunables: int) -> Winner:
    variant = identity.variant("served", version, "plain", "host", Values({"unroll": unroll, **tunables}))
    problem = Values(n=8, width=width, fast=False)
    return Winner(variant, problem, problem, Environment(), "final", "a", "s", 1.0, 0.1, 8, source="shipped")


@pytest.fixture
def ships(monkeypatch):
    """Makes winners that ship."""

    def ship(*winners: Winner) -> None:
        monkeypatch.setattr("tunekit.check.targets.shipped_winners", lambda spec, arch: list(winners))

    ship()
    return ship


def chosen(reference: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for target in select(load_spec(reference), reference, None, None, "default", None).targets:
        kernel = f"width={target.static.width} fast={target.static.fast} {target.variant.tunables}"
        found.setdefault(target.variant.implementation, []).append(kernel)
    return found


def test_every_implementations_default_for_examples_and_workloads(served, ships):
    """Sizes that are not compiled in make no second kernel; what an implementation can't do it isn't asked for."""
    assert chosen(served) == {
        "plain": ["width=1 fast=False unroll=1", "width=2 fast=True unroll=1"],
        "fast": ["width=2 fast=True unroll=1"],
    }
    notes = select(load_spec(served), served, None, None, "default", None).notes
    assert notes == ("served width=4 fast=False on host: no default of the spec fits",)


def test_the_winners_that_ship(served, ships):
    ships(winner(), winner(unroll=1, width=1), winner(version=1), winner(version=1, unroll=2))
    assert chosen(served)["plain"] == [
        "width=1 fast=False unroll=1",
        "width=2 fast=True unroll=1",
        "width=3 fast=False unroll=4",
    ]
    notes = select(load_spec(served), served, None, None, "default", None).notes
    assert "2 winners that ship for host are of another version of served: unused" in notes


def test_a_winner_that_the_spec_lost_fails_the_check(served, ships, machine, tmp_path):
    ships(winner(unroll=8), winner(stages=2), winner(width=4), winner())
    settings = Settings(tmp_path, tmp_path)
    report = check_compile_times(served, compile_once=machine(lambda target: 1.0), settings=settings)
    lost = [row.reason for row in report.rows if row.verdict is Verdict.VANISHED]
    assert [reason.partition("in the spec: ")[2] for reason in lost] == [
        "unroll=8 is no longer in the space",
        "its tunables are now unroll",
        "width: only up to 3",
    ]
    assert all(reason.startswith("ships as a winner") for reason in lost) and report.exit_code == 1


def test_what_is_asked_for_is_all(served, ships):
    """A problem, a tunable or --all: then neither workloads nor winners."""
    ships(winner())
    spec = load_spec(served)
    of_one = select(spec, served, None, [{"n": 8, "width": 2}], "default", None)
    assert [target.static.width for target in of_one.targets] == [2]
    only = select(spec, served, None, None, "default", {"unroll": 2})
    assert [(t.static.width, t.variant.tunables.unroll) for t in only.targets] == [(1, 2)]
    assert len(select(spec, served, None, None, "all", None).targets) == 3


def test_a_malformed_workload_is_said(served, ships, tmp_path):
    (tmp_path / "workloads" / "three.jsonl").write_text('{"n": 0, "width": 1}\n')
    with pytest.raises(UserError, match=r"three\.jsonl:1: served: n: 0 is below the minimum"):
        chosen(served)


def test_one_round_where_nothing_is_compared(served, ships, machine, tmp_path):
    source = machine(lambda target: 1.0)
    report = check_compile_times(served, compile_once=source, settings=Settings(tmp_path, tmp_path))
    assert report.rounds == 1 and report.exit_code == 0
    names = [name for name in source.compiled if name.startswith("served")]
    assert len(names) == len(set(names)) == 3 and len(source.compiled) == 4, "and the reference once"
    baseline = tmp_path / "baseline.json"
    report = check_compile_times(
        served, baseline=baseline, update_baseline=True, compile_once=source, settings=Settings(tmp_path, tmp_path)
    )
    assert report.rounds == 9


@pytest.mark.parametrize(("second", "verdict"), [(1.0, Verdict.OK), (80.0, Verdict.OVER_LIMIT)])
@pytest.mark.parametrize("status", [Status.OK, Status.COMPILE_TIMEOUT])
def test_what_is_over_the_limit_beside_others_is_compiled_again_alone(served, ships, tmp_path, second, verdict, status):
    taken: dict[str, int] = {}

    def compile_once(target):
        taken[target.name] = taken.get(target.name, 0) + 1
        if target.variant.implementation != "fast" or target.variant.spec != "served":
            return Sample(Status.OK, 1.0)
        first = Sample(status, 70.0, "", "mlir")
        return first if taken[target.name] == 1 else Sample(Status.OK, second)

    report = check_compile_times(served, limit_s=60, compile_once=compile_once, settings=Settings(tmp_path, tmp_path))
    verdicts = {row.name.split()[1]: row.verdict for row in report.rows}
    assert verdicts == {"plain": Verdict.OK, "fast": verdict}
    assert sorted(taken.values()) == [1, 1, 1, 2]


def test_side_by_side_for_real(host_scale, tmp_path):
    """Compiled in a pool of two, and the order of the rows is the selection's."""
    settings = dataclasses.replace(Settings(tmp_path / "t.db", tmp_path / "artifacts"), jobs=2)
    report = check_compile_times(host_scale, which="all", settings=settings)
    assert report.rounds == 1 and report.exit_code == 0 and len(report.rows) > 2
    spec = load_spec(host_scale)
    wanted = select(spec, host_scale, None, None, "all", None).targets
    assert [row.name for row in report.rows] == [target.name for target in wanted]


def test_the_attention_family_is_covered():
    """Each implementation on its architecture, and every problem of the workloads that one of them can do."""
    spec = load_spec("fmha")
    selection = select(spec, "fmha", None, None, "default", None)
    made = {(target.variant.implementation, target.variant.arch) for target in selection.targets}
    compiled = [i for i in spec.implementations if i.backend == "cutedsl"]
    assert {name for name, _ in made} == {i.name for i in compiled}
    assert {arch for _, arch in made} == {"sm_90a", "sm_100a"}
    workloads = workloads_beside(spec, "fmha")
    assert len(workloads) >= 3
    static = {(target.variant.arch, target.static) for target in selection.targets}
    for arch in ("sm_90a", "sm_100a"):
        for problem in (problem for workload in workloads.values() for problem in workload):
            told = f"fmha {spec.static(problem)} on {arch}: no default of the spec fits" in selection.notes
            assert ((parse_arch(arch).name, spec.static(problem)) in static) is not told
    assert len(selection.targets) == len({target.name for target in selection.targets})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_attention_family_compiles_within_its_limit():
    report = check_compile_times("fmha")
    assert report.limit_s == {"fmha": 60.0}
    assert [f"{row.name}: {row.reason}" for row in report.failures] == []
