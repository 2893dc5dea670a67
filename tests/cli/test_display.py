"""The progress display, event by event."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tunekit.identity import variant
from tunekit.model import Footprint, Values
from tunekit.progress import ProblemReport, Row, SweepEvent, SweepReport
from tunekit.report import Printer, Table, group_failures, is_plain, print_sweep
from tunekit.report.failures import reproduce
from tunekit.report.progress_display import LiveScreen, PlainProgress, finished_line
from tunekit.trials import Outcome, Stage, Status


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def point(n: int):
    return variant("toy", 1, "toy_host", "host", Values(n=n, fast=n % 2 == 0))


def failed(n: int, reason: str, stage=Stage.COMPILE, status=Status.COMPILE_ERROR) -> Row:
    outcome = Outcome(stage, status, reason)
    return Row(point(n), Footprint(), {stage: outcome}, str(status), reason)


def shown(screen: LiveScreen) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(screen.render())
    return console.file.getvalue()


def test_a_stuck_variant_is_visible_while_nothing_happens():
    """The seconds of what is running go on between events."""
    clock = Clock()
    screen = LiveScreen(lambda *a, **k: None, clock)
    screen(SweepEvent("phase", text="compile", total=20))
    screen(SweepEvent("phase", done=3, total=20, running=(("toy_host n=4", "mlir", 5.0),)))
    clock.now += 70
    assert "3/20" in shown(screen)
    assert "toy_host n=4 (mlir, 75.0 s)" in shown(screen)
    screen(SweepEvent("phase", total=20))  # a tick that does not know how many are done
    assert "3/20" in shown(screen)


def test_plain_progress_tells_a_minute_of_silence():
    clock = Clock()
    out = io.StringIO()
    progress = PlainProgress(out, clock)
    tick = SweepEvent("phase", done=3, total=20, running=(("toy_host n=4", "mlir", 65.0),))
    progress(tick)
    assert out.getvalue() == ""
    clock.now += 61
    progress(tick)
    progress(tick)
    assert out.getvalue() == "still running: toy_host n=4 (mlir, 65.0 s)\n"


def test_plain_progress_says_how_far_simulating_is_though_nothing_fails():
    """Simulations say nothing of the variants that pass: a log must not fall silent over them."""
    out, clock = io.StringIO(), Clock()
    progress = PlainProgress(out, clock)
    started = SweepEvent("started", point(3), text="simulate", done=2, total=20)
    progress(started)
    assert out.getvalue() == ""
    clock.now += 61
    progress(started)
    assert out.getvalue() == f"still running: simulate, 2 of 20 done, now {point(3).id} {point(3)}\n"


def test_plain_progress_never_tells_of_a_variant_twice():
    """Case 60: a line a variant at most, however many stages it passes or fails."""
    out = io.StringIO()
    progress = PlainProgress(out)
    for stage in Stage:
        progress(SweepEvent("finished", point(1), Outcome(stage, Status.OK, seconds=Values(trace=1.0))))
    progress(SweepEvent("finished", point(1), Outcome(Stage.MEASURE, Status.DEVICE_FAULT, "it broke")))
    assert out.getvalue().count("\n") == 1
    progress(SweepEvent("finished", point(2), Outcome(Stage.VERIFY, Status.WRONG_RESULT, "row 3\nof 5")))
    assert out.getvalue().splitlines()[1].endswith("verify " + f"{point(2).id} {point(2)}: wrong_result: row 3")


def test_what_does_not_fit_as_declared_is_no_line_each():
    """A real space has hundreds; one that only its trace showed is a line."""
    out = io.StringIO()
    progress = PlainProgress(out)
    above = []
    screen = LiveScreen(lambda text, **k: above.append(text))
    outcome = Outcome(Stage.PROBE, Status.OVER_BUDGET, "smem 279552 B > 232448 B (sm_90a)")
    for show in (progress, screen):
        for n in range(3):
            show(SweepEvent("finished", point(n), outcome))
        show(SweepEvent("finished", point(3), outcome, done=1, total=20))
    line = f"1/20 probe {point(3).id} {point(3)}: over_budget: smem 279552 B > 232448 B (sm_90a)"
    assert out.getvalue().splitlines() == above == [line]


def test_failures_group_over_numbers_and_the_variants_own_values():
    """Case 61: the reason's text is the first one's, whole."""
    rows = [failed(n, f"smem {1000 + n} B > 512 B [{point(n).tunables}]\n{n} more") for n in range(200)]
    rows += [failed(300, "something else")]
    first, second = group_failures(rows)
    assert (first.count, second.count) == (200, 1)
    assert first.headline() == f"200 x compile_error: smem 1000 B > 512 B [{point(0).tunables}]"
    assert first.rest() == ["0 more"]


def test_the_command_to_reproduce_fits_the_stage_that_failed():
    problem = Values(rows=8)
    of = {
        Stage.COMPILE: "tunekit compile",
        Stage.SIMULATE: "tunekit simulate",
        Stage.VERIFY: "tunekit sweep",
        Stage.MEASURE: "tunekit sweep",
        Stage.PROBE: "tunekit probe",
    }
    for stage, begins in of.items():
        (group,) = group_failures([failed(1, "why", stage)])
        command = reproduce(group, "./my kernel.py", problem)
        assert command.startswith(f"{begins} './my kernel.py' --arch host --variant {point(1).id}")
        assert command.endswith("--problem rows=8")
        assert ("--ctas sample --line-info" in command) == (stage is Stage.SIMULATE), "as the sweep did, with lines"


def test_tables_leave_out_what_nobody_knows():
    table = Table(("a", "b", "c"), [("1", "", "x"), ("22", "", "")], right=frozenset({"a"}))
    assert table.lines() == [" a  c", " 1  x", "22"]


WIDE = Table(
    ("variant", "pv_n_tile", "smem B", "tunables"),
    [("35f3ebff2a06", "64", "231,424", "kv_tile=128 kv_stage=4"), ("98b2d2af97c8", "128", "83,968", "kv_tile=64")],
    right=frozenset({"pv_n_tile", "smem B"}),
)


def drawn(width: int, monkeypatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    Printer(stream, plain=False).table(WIDE)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 46, 60, 80, 200])
def test_tables_never_break_an_id_or_a_number(width, monkeypatch):
    """However narrow the terminal is: names go over lines, prose at its spaces, the rest stays whole."""
    lines = drawn(width, monkeypatch)
    first = next(line for line in lines if "35f3ebff2a06" in line)
    assert "64" in first.split() and "231,424" in first.split()
    words = {word for line in lines for word in line.split()}
    assert {"35f3ebff2a06", "98b2d2af97c8", "83,968", "kv_tile=128", "kv_stage=4"} <= words
    if WIDE.narrowest() <= width:
        assert max(map(len, lines)) <= width


def test_a_narrow_table_breaks_the_names_of_its_columns(monkeypatch):
    assert WIDE.narrowest() == 39
    assert WIDE.packed(1) == "pv_\nn_\ntile"
    assert any("pv_n_tile" in line for line in drawn(80, monkeypatch))
    assert not any("pv_n_tile" in line for line in drawn(45, monkeypatch))


def test_what_was_stored_is_told_from_what_was_compiled_now():
    done = Outcome(Stage.COMPILE, Status.OK, seconds=Values(trace=2.0))
    stored = Outcome(Stage.COMPILE, Status.OK, seconds=Values(trace=2.0), facts=Values(cached=True))
    assert finished_line(SweepEvent("finished", point(1), done)).endswith(": ok, 2.00 s")
    assert finished_line(SweepEvent("finished", point(1), stored)).endswith(": stored (took 2.00 s)")
    rows = tuple(
        Row(point(n), Footprint(), {Stage.COMPILE: outcome}, "ok", compile_s=2.0)
        for n, outcome in enumerate((done, stored, stored))
    )
    for some, said in ((rows, "3 compiles (2 stored earlier): "), (rows[1:], "2 compiles (all stored earlier): ")):
        stream = io.StringIO()
        print_sweep(SweepReport("toy", "host", (ProblemReport(Values(), "", some),)), "toy", Printer(stream))
        assert said in stream.getvalue()


def test_who_gets_plain_output():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert not is_plain(Terminal(), {"TERM": "xterm"})
    assert not is_plain(Terminal(), {"CI": "false"})
    assert is_plain(Terminal(), {"CI": "true"})
    assert is_plain(Terminal(), {"TERM": "dumb"})
    assert is_plain(io.StringIO(), {"TERM": "xterm"})


def test_a_sweep_states_the_worst_accuracy_of_what_passed():
    """Over all variants and both ways to verify; what failed does not count."""

    def verified(n: int, stage: Stage, status: Status = Status.OK, **figures: float) -> Row:
        outcome = Outcome(stage, status, facts=Values(figures))
        return Row(point(n), Footprint(), {stage: outcome}, str(status))

    rows = (
        verified(1, Stage.VERIFY, cosine=0.9999975, relative_norm=2e-3, max_abs_error=3e-3, rounding_ratio=0.98),
        verified(2, Stage.SIMULATE, cosine=0.999999, relative_norm=2.5e-3, max_abs_error=1e-3, rounding_ratio=1.1),
        verified(3, Stage.VERIFY, Status.WRONG_RESULT, cosine=0.9, relative_norm=1.0, max_abs_error=9.0),
    )
    out = io.StringIO()
    report = SweepReport("toy", "host", (ProblemReport(Values(n=1), "3 of 3 variants", rows),))
    print_sweep(report, "toy", Printer(out))
    assert (
        "their worst figures against the oracle: cosine 0.99999750, relative norm error 2.50e-03, "
        "1.1 times the rounded oracle's, largest error 3.00e-03"
    ) in out.getvalue()
