"""Finals as a sweep records them, and audits: tuned again from empty, every disagreement lies in a tie."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sweep.conftest import Cache, ids, reference
from tunekit.cli import main
from tunekit.errors import UserError
from tunekit.measure import MeasuringWorker
from tunekit.measure.protocol import VERSION
from tunekit.model import Winner
from tunekit.progress import AuditReport, ProblemReport, SweepReport
from tunekit.report import Printer, print_audit
from tunekit.report.sweep_summary import winner_text
from tunekit.spec import load_spec
from tunekit.sweep import SweepOptions, audit, sweep
from tunekit.sweep.audit import agreement, agreements
from tunekit.sweep.measuring import finalists, incumbent_of
from tunekit.sweep.options import choose_target
from tunekit.trials import Stage

SCALE = reference("host_scale", "host_scale")
ROWS = {"rows": 64}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the spec was swept."""
    cache = Cache(tmp_path_factory.mktemp("swept") / "cache")
    cache.run(SCALE, ROWS, variants=ids(SCALE, ROWS, delay_us=(0, 200)))
    return cache.root


@pytest.fixture
def swept(once: Path, cache: Cache) -> Winner:
    """What won in a sweep; the test has a copy of its cache."""
    shutil.copytree(once, cache.root)
    with cache.store() as store:
        (winner,) = store.winners("host_scale", "host")
    return winner


def test_a_winner_records_how_it_was_decided(cache: Cache, swept: Winner) -> None:
    assert swept.outcome in ("winner", "tie", "undecided")
    assert swept.rounds is not None and swept.rounds >= 10
    assert swept.cases == 5, "three draws and the edges"
    assert "signed-rank" in swept.method
    assert (swept.confidence is None) == (swept.outcome == "undecided")
    with cache.store() as store:
        trials = store.trials(spec="host_scale", stage=Stage.MEASURE)
    final = [trial for trial in trials if trial.outcome.facts.get("final") == swept.final]
    assert swept.variant.id in {trial.variant.id for trial in final} and len(final) >= 2
    slow = [trial for trial in final if trial.variant.tunables.delay_us == 200]
    assert all(len(trial.outcome.samples_us) <= swept.rounds for trial in slow)


def test_explain_decides_the_winner_again(cache: Cache, swept: Winner, capsys: pytest.CaptureFixture[str]) -> None:
    """The stored samples come to the recorded decision; changed ones don't, and the exit status says so."""
    command = [
        "explain",
        SCALE,
        "--arch",
        "host",
        "--problem",
        "rows=64",
        "--winner",
        "--db",
        str(cache.settings.database),
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "decided again from" in text and "stored samples: the same" in text
    assert main([*command, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["same"] is True and told["again"]["winner"] == swept.variant.id
    assert set(told["again"]["standings"]) >= {swept.variant.id}
    with cache.store() as store:
        store.put_winner(replace(swept, rounds=12, median_us=1.0))
    assert main(command) == 1
    assert "it comes out otherwise: rounds: recorded 12, now" in capsys.readouterr().out
    with cache.store() as store:
        store.put_winner(replace(swept, final="", outcome="", method="median of paired rounds, margin 1 %"))
    assert main(command) == 0
    assert "can't be decided again: its record is older than the test" in capsys.readouterr().out
    with cache.store() as store:
        trials = store.trials(spec="host_scale", stage=Stage.MEASURE)
        (one,) = [trial for trial in trials if trial.variant.id == swept.variant.id and "final" in trial.outcome.facts]
        facts = one.outcome.facts.merged({"final": "damaged", "final_margin": "wide"})
        store.record(replace(one, outcome=replace(one.outcome, facts=facts)))
        store.put_winner(replace(swept, final="damaged"))
    assert main(command) == 1
    assert "the record of its final is damaged: a finalist's final_margin is 'wide'" in capsys.readouterr().out
    assert main([*command[:5], "rows=4096", *command[6:]]) == 1
    assert "no winner of host_scale is recorded" in capsys.readouterr().out
    assert main([*command, "--variant", "a"]) == 2


@pytest.mark.slow
def test_an_audit_tunes_from_empty_each_time(cache: Cache) -> None:
    """Case 43, the command's side: what the runs say is compared, and kept. How far they agree: test_sequential."""
    options = SweepOptions(arch="host", variants=ids(SCALE, ROWS, delay_us=(0, 200)))
    report = audit(SCALE, [ROWS], options, cache.settings, cache.events.append, 2)
    assert len(report.runs) == 2 and len(report.agreements) == 1
    (found,) = report.agreements
    assert all(winner is not None and winner.variant.tunables.delay_us == 0 for winner in found.winners)
    assert found.verdict in ("agree", "within ties", "undecided", "disagree")
    assert [Path(database).name for database in report.databases] == ["tunekit.audit-1.db", "tunekit.audit-2.db"]
    assert not cache.settings.database.exists(), "the user's own is left alone"
    with pytest.raises(UserError, match="2 at least"):
        audit(SCALE, [ROWS], options, cache.settings, cache.events.append, 1)


def test_an_audit_interrupted_before_its_second_end_compares_nothing(
    swept: Winner, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = SweepReport("s", "host", (ProblemReport(swept.problem, "", (), swept),), "done")
    broken = replace(whole, state="interrupted")
    assert agreements([whole, broken]) == agreements([broken]) == ()
    assert len(agreements([whole, whole, broken])) == 1
    print_audit(AuditReport("s", "host", (whole, broken), ("a.db", "b.db"), ()), Printer(sys.stdout))
    assert "nothing to compare" in capsys.readouterr().out


def test_what_runs_say_together(swept: Winner) -> None:
    a = replace(swept, outcome="winner", tied=(), margin=0.03)
    b = replace(a, variant=replace(swept.variant, id="other"))
    tie = replace(b, outcome="tie", tied=("other", swept.variant.id))
    open_end = replace(tie, outcome="undecided")
    problem = swept.problem
    assert agreement(problem, [a, a]).verdict == "agree"
    assert agreement(problem, [a, tie, tie]).verdict == "within ties" and agreement(problem, [a, tie]).ok
    assert agreement(problem, [a, open_end]).verdict == "undecided"
    parted = agreement(problem, [a, b])
    assert parted.verdict == "disagree" and not parted.ok and "neither run found the two equal" in parted.why
    assert agreement(problem, [a, None]).verdict == "no winner"


def test_a_verdict_says_how_sure_it_is(swept: Winner) -> None:
    given = {"median_us": 12.0, "spread_us": 0.1, "samples": 14, "runner_up": "b", "margin": 0.031}
    sure = replace(swept, outcome="winner", confidence=0.99999, tied=(), **given)
    figures = "12.00 us +- 0.10 us over 14 samples, 3.1 % ahead of b"
    assert winner_text(sure) == f"{figures} (99.9 % sure)"
    tie = replace(sure, outcome="tie", confidence=0.95, tied=(swept.variant.id, *"bcdefg"))
    assert winner_text(tie) == f"{figures} (95 % sure); a tie with b, c, d and 3 more"
    open_end = replace(tie, outcome="undecided", confidence=None, tied=(swept.variant.id, "b"))
    assert winner_text(open_end) == f"{figures}; undecided within its budget: it may be no faster than b"
    assert winner_text(replace(sure, outcome="", confidence=None)) == figures, "of before"


def test_a_winner_of_another_protocol_is_a_seed(cache: Cache, swept: Winner) -> None:
    """Case 20: once the protocol has changed, the old winner is raced first, and is no incumbent: it gets no tie."""
    spec = load_spec(SCALE)
    problem, target = spec.problem(ROWS), choose_target(spec, SweepOptions(arch="host"))
    with cache.store() as store:
        assert incumbent_of(store, spec, problem, target, [])[0] == swept
        older = replace(swept, protocol=swept.protocol.replace(f"/{VERSION} ", f"/{VERSION - 1} "))
        assert incumbent_of(_Kept([older]), spec, problem, target, []) == (None, [swept.variant])
        shipped = replace(swept, source="shipped")
        assert incumbent_of(_Kept([]), spec, problem, target, [shipped]) == (None, [swept.variant])


class _Kept:
    """A store of winners alone."""

    def __init__(self, winners: list[Winner]) -> None:
        self._winners = winners

    def winners(self, spec: str, arch: str) -> list[Winner]:
        return self._winners


def test_more_go_to_the_final_than_can_win_and_the_default_always(swept: Winner) -> None:
    """The search misranks: what it timed within a quarter of its leader goes on, at most ten, and two always do."""
    samples = {f"v{i:02}": (10.0 + 0.1 * i,) for i in range(20)} | {"slow": (90.0,), "none": ()}
    found = finalists(samples, ["slow", None, "v01", "none"])
    assert found == [f"v{i:02}" for i in range(10)] + ["slow"]
    assert finalists({"a": (1.0,), "b": (1.3,)}, []) == ["a"]
    assert finalists({}, ["a"]) == []


def test_a_final_is_held_by_its_rules(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    final = MeasuringWorker.final

    def spy(self, jobs, rounds=0, *, rules=None):
        seen.append(rules)
        return final(self, jobs, rules=rules)

    monkeypatch.setattr(MeasuringWorker, "final", spy)
    options = {"margin": 0.02, "confidence": 0.9, "final_rounds": 20, "final_seconds": 30.0, "cache": "warm"}
    cache.run(SCALE, ROWS, **options)
    (rules,) = seen
    assert (rules.margin, rules.confidence, rules.rounds, rules.seconds, rules.cache) == (0.02, 0.9, 20, 30.0, "warm")
    assert len(rules.protected) == 1, "the default"
    with cache.store() as store:
        (winner,) = store.winners("host_scale", "host")
    assert winner.rounds <= 20 and "margin 2 % or 0.2 us, confidence 90 %" in winner.method
    with pytest.raises(UserError, match="unknown cache"):
        cache.run(SCALE, ROWS, cache="tepid")


@pytest.mark.parametrize("mistake", [{"final_rounds": 3}, {"search": "nonsense"}, {"margin": float("nan")}])
def test_a_refused_audit_leaves_an_earlier_ones_databases(cache: Cache, mistake: dict) -> None:
    earlier = cache.settings.database.with_name(
        f"{cache.settings.database.stem}.audit-1{cache.settings.database.suffix}"
    )
    earlier.parent.mkdir(parents=True, exist_ok=True)
    earlier.write_bytes(b"kept")
    with pytest.raises(UserError):
        audit(SCALE, [ROWS], SweepOptions(**mistake), cache.settings, lambda event: None, 2)
    assert earlier.read_bytes() == b"kept"


def test_a_search_without_its_package_is_refused_before_the_sweep_begins(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'tunekit\[gp\]'"):
        sweep(SCALE, [ROWS], SweepOptions(search="gp", budget="2"), cache.settings, lambda event: None)
    assert not cache.settings.database.exists()
