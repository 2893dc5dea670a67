"""The final's schedule with simulated finalists: order, throttling, retakes, heat."""

from __future__ import annotations

import math

import pytest

from tunekit.errors import UserError
from tunekit.measure.final import even_rounds, heat, order, race, rejections, samples
from tunekit.measure.gpu_state import REASONS, GpuMonitor, GpuState, reasons

GOOD = GpuState(1980, 400.0, 55)
CAPPED = GpuState(1500, 700.0, 70, ("sw_power_cap",))
HOT = GpuState(900, 300.0, 90, ("hw_thermal_slowdown",))


class Simulated:
    """A finalist with a scripted answer; `log` is shared, to see the order."""

    def __init__(self, id, log, answer=lambda n: (10.0, GOOD)):
        self.id, self._log, self._answer, self._taken = id, log, answer, 0

    def take(self):
        self._log.append(self.id)
        self._taken += 1
        return self._answer(self._taken)


def no_pause(seconds):
    assert seconds > 0


@pytest.mark.parametrize("rounds", [0, -2, 1, 3, 2.0, "4", True, None, 1000])
def test_rounds_are_even_and_positive(rounds):
    """Case 42: a number or a clear error."""
    with pytest.raises(UserError, match="rounds"):
        even_rounds(rounds)


def test_rounds_alternate():
    """Every finalist is as often early as late, so drift meets all alike, and the neighbours change."""
    log = []
    race([Simulated(id, log) for id in "abcd"], 8)
    rounds = ["".join(log[i : i + 4]) for i in range(0, 32, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert all(forwards == backwards[::-1] for forwards, backwards in zip(rounds[::2], rounds[1::2], strict=True))
    assert len(set(rounds)) > 4
    assert order(5, 6) == order(5, 7)[::-1] == order(5, 6), "the same in every final"


def test_a_dropped_finalist_is_timed_no_more_and_a_decided_final_ends():
    """Racing: what is clearly slower leaves at the first look; with nobody left to tell apart, all leave."""
    asked = []

    def decide(samples):
        asked.append({id: len(taken) for id, taken in samples.items()})
        return ["a", "b"] if len(asked) == 1 else []

    log = []
    windows = race([Simulated(id, log) for id in "abc"], 100, decide)
    assert asked == [{"a": 10, "b": 10, "c": 10}, {"a": 14, "b": 14, "c": 10}]
    assert {id: len(taken) for id, taken in samples(windows).items()} == {"a": 14, "b": 14, "c": 10}
    assert len(log) == 10 * 3 + 1 + 4 * 2, "one untimed window after deciding"


def test_the_time_of_a_final_is_bounded():
    now = iter(range(1000))
    windows = race([Simulated("a", [])], 100, max_s=5, clock=lambda: next(now))
    assert len(windows) == 6, "six seconds, at the end of a pair of rounds"


def test_a_throttled_window_is_taken_again():
    log = []
    hot_once = Simulated("b", log, lambda n: (20.0, HOT) if n == 2 else (10.0, GOOD))
    windows = race([Simulated("a", log), hot_once], 2, pause=no_pause)
    rejected = [window for window in windows if window.rejected]
    assert [(w.id, w.round, w.rejected) for w in rejected] == [("b", 1, "throttled: hw_thermal_slowdown")]
    assert [w.us for w in windows if w.id == "b" and not w.rejected] == [10.0, 10.0]
    assert dict(rejected[0].values())["throttle"] == "hw_thermal_slowdown", "kept, with its state"


def test_the_power_cap_is_a_sustained_state_not_a_disturbance():
    """A large GEMM runs at the board's power limit: its slower clock is its own cost."""
    windows = race([Simulated("a", [], lambda n: (10.0, CAPPED))], 2, pause=no_pause)
    assert [w.rejected for w in windows] == ["", ""]
    assert dict(windows[0].values()) == {
        "round": 0, "kept": True, "us": 10.0, "sm_mhz": 1500, "power_w": 700.0, "temperature_c": 70,
        "throttle": "sw_power_cap",
    }  # fmt: skip


def test_retakes_are_bounded_and_a_round_counts_for_all_or_none():
    log = []
    always_hot_from_3 = Simulated("b", log, lambda n: (9.0, HOT) if n > 2 else (10.0, GOOD))
    windows = race([Simulated("a", log), always_hot_from_3], 4, max_retakes=3, pause=no_pause)
    assert order(2, 2) == [1, 0]
    kept = [(w.id, w.round) for w in windows if not w.rejected]
    assert sorted(kept) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [w.rejected for w in windows if w.id == "a" and w.round == 3] == ["round incomplete"]
    assert sum(w.id == "b" for w in windows) == 2 + 4 + 4
    words = rejections(windows)
    assert "throttled: hw_thermal_slowdown (8 of" in words and "round incomplete" in words


@pytest.mark.parametrize("us", [0.0, -0.4, math.nan, math.inf])
def test_a_window_without_a_time_is_taken_again_and_never_kept(us):
    """Case 41: a flush that took longer than flush and kernel together gives no sample."""
    windows = race([Simulated("a", [], lambda n: (us if n == 1 else 3.0, GOOD))], 2, pause=no_pause)
    assert [w.us for w in windows if not w.rejected] == [3.0, 3.0]
    (bad,) = [w for w in windows if w.rejected]
    assert "no time" in bad.rejected
    assert "us" not in bad.values()


@pytest.mark.parametrize("us", [0.0, math.nan])
def test_who_gives_no_time_any_more_leaves_and_spoils_no_round_of_the_others(us):
    log = []
    mute = Simulated("mute", log, lambda n: (us if n > 2 else 5.0, GOOD))
    windows = race([Simulated("a", log), mute, Simulated("b", log)], 12, max_retakes=3, pause=no_pause)
    found = samples(windows)
    assert set(found) == {"a", "b"} and len(found["a"]) == len(found["b"]) == 11
    assert sum(w.id == "mute" for w in windows) == 2 + 4, "it is asked no more"
    assert "no time" in rejections([w for w in windows if w.id == "mute"])
    alone = race([Simulated("mute", [], lambda n: (us, GOOD))], 12, max_retakes=3, pause=no_pause)
    assert len(alone) == 4 and samples(alone) == {}


def test_heating_goes_on_until_the_clock_has_settled():
    clocks = iter([600, 900, 1500, 1900, 1980, 1985, 1980, 1975, 1980, 1980] + [1980] * 100)
    now = iter(x / 10 for x in range(1000))
    log = []
    spent = heat([Simulated("a", log, lambda n: (1.0, GpuState(next(clocks))))], clock=lambda: next(now))
    assert len(log) == 9, "five readings within 1 %: 1980 1985 1980 1975 1980"
    assert spent == pytest.approx(0.9)


def test_heating_is_bounded_and_needs_no_clock():
    swinging = Simulated("a", [], lambda n: (1.0, GpuState(1000 + 500 * (n % 2))))
    now = iter(x / 10 for x in range(1000))
    assert heat([swinging], max_s=2.0, clock=lambda: next(now)) == pytest.approx(2.0)
    now = iter(x / 10 for x in range(1000))
    assert heat([Simulated("a", [], lambda n: (1.0, GpuState()))], clock=lambda: next(now)) == pytest.approx(0.3)
    assert heat([]) == 0.0


def test_reasons_have_names():
    assert reasons(0) == ()
    assert reasons(0x4 | 0x40) == ("sw_power_cap", "hw_thermal_slowdown")
    assert reasons(0x10000) == ("reason_0x10000",)
    nvml = pytest.importorskip("pynvml")
    for name, bit in (("SwPowerCap", "sw_power_cap"), ("HwThermalSlowdown", "hw_thermal_slowdown"),
                      ("HwPowerBrakeSlowdown", "hw_power_brake"), ("HwSlowdown", "hw_slowdown"),
                      ("SwThermalSlowdown", "sw_thermal_slowdown"), ("GpuIdle", "gpu_idle")):  # fmt: skip
        assert REASONS[getattr(nvml, f"nvmlClocksEventReason{name}")] == bit


def test_a_reading_joins_what_was_left_just_after():
    joined = GpuState(1980, throttle=("sw_power_cap",)).joined(GpuState(400, throttle=("gpu_idle", "hw_slowdown")))
    assert joined.sm_mhz == 1980
    assert joined.throttle == ("sw_power_cap", "hw_slowdown")
    assert joined.disturbed == ("hw_slowdown",)


def test_without_a_gpu_the_monitor_reads_nothing():
    with GpuMonitor(None) as monitor:
        assert monitor.read() == GpuState()
        assert monitor.uuid() is None
