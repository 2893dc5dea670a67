"""What a finalist does around its windows, without a device."""

from __future__ import annotations

from types import SimpleNamespace

from tunekit.measure.bench import Racer
from tunekit.measure.gpu_state import GpuMonitor, GpuState
from tunekit.measure.timing import ColdPlan


def racer(reports, window):
    device = SimpleNamespace(synchronize=lambda: reports.append("synchronize"))
    loaded = SimpleNamespace(id="v", spec=None, job=None)
    clock = SimpleNamespace(added_us=lambda method: 0.1, window=lambda calls, count, flush, method: window)
    report = lambda phase, id, doing: reports.append(phase)  # noqa: E731
    made = Racer(loaded, [], [], ColdPlan(1, False), 5.0, 3, device, GpuMonitor(None), report)
    made.prepare(clock, "perf_counter")
    reports.clear()
    return made


def test_only_the_window_itself_runs_against_the_run_limit():
    """The parent kills a child that stays in phase run for too long: what comes before and after is another phase."""
    reports = []
    window = SimpleNamespace(take=lambda read: (reports.append("window"), (4.0, GpuState()))[1])
    assert racer(reports, window).take() == (4.0, GpuState())
    assert reports == ["synchronize", "run", "window", "check"]
