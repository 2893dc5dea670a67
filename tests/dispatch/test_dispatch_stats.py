"""What a process's kernels did, in numbers; and the watcher that keeps them up to date."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import tunekit
from tunekit.dispatch import stats as module
from tunekit.errors import NoKernelError, UserError

SAMPLE = re.compile(r'^(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (?P<value>[0-9]+)$')


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Kernels of other tests, alive or gone, are not counted."""
    gc.collect()
    monkeypatch.setattr(module, "_living", type(module._living)())
    monkeypatch.setattr(module, "_tallies", [])


@contextmanager
def soon(seconds: float = 20.0):
    """A function that says whether there is time left, and fails when there is none."""
    until = time.monotonic() + seconds

    def waiting() -> bool:
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
        return True

    yield waiting


def totals() -> dict[str, int]:
    """Prometheus' counters, by name and labels."""
    lines = [line.rpartition(" ") for line in tunekit.prometheus().splitlines() if not line.startswith("#")]
    return {name: int(value) for name, _, value in lines if "_total{" in name}


def test_stats_are_by_spec_over_live_kernels(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    first = tunekit.load(tuned.reference, **tuned.places)
    second = tunekit.load(tuned.reference, native=False, **tuned.places)
    for kernel in (first, second):
        for rows in (64, 64, 64, 48):
            kernel(torch.ones(rows, 64))
    found = tunekit.stats()["host_scale"]
    assert (found["kernels"], found["problems"], found["exact"], found["bucket"]) == (2, 4, 2, 2)
    assert found["calls"] == {"exact": 4, "bucket": 0, "nearest": 0, "shipped": 0, "default": 0}
    assert (found["entries"], found["native"], found["error"]) == (4, False, 0)
    del kernel, second
    assert tunekit.stats()["host_scale"]["kernels"] == 1
    assert tunekit.stats()["host_scale"]["native"] == first.native


def test_prometheus_text_says_the_same(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    for _ in range(3):
        kernel(torch.ones(64, 64))
    text = tunekit.prometheus()
    assert text.endswith("\n")
    helped, typed, values = set(), set(), {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[3] in ("counter", "gauge")
            typed.add(line.split()[2])
        else:
            match = SAMPLE.match(line)
            assert match, line
            values[match["name"], match["labels"]] = int(match["value"])
            assert match["name"] in helped & typed
    assert values["tunekit_calls_total", 'spec="host_scale",level="exact"'] == 2
    assert values["tunekit_kernels", 'spec="host_scale"'] == 1
    assert all(name.endswith("_total") for name, _ in values if name.split("_")[1] not in module.GAUGES)


@pytest.mark.parametrize("native", [True, False])
def test_counters_do_not_fall_when_a_kernel_is_gone(tuned, native):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    before: dict[str, int] = {}
    for number in range(1, 2 * module.MOST_ENDED + 4):
        kernel = tunekit.load(tuned.reference, native=native, fallback="bucket", **tuned.places)
        for rows in (64, 64, 64, 48, 48):
            kernel(torch.ones(rows, 64))
        with pytest.raises(NoKernelError):
            kernel(torch.ones(300, 64))
        alive, gone = totals(), weakref.ref(kernel)
        del kernel
        gc.collect()
        assert gone() is None
        assert totals() == alive and all(alive[name] >= value for name, value in before.items())
        before = alive
        assert alive['tunekit_calls_total{spec="host_scale",level="exact"}'] == 2 * number
        assert alive['tunekit_calls_total{spec="host_scale",level="bucket"}'] == number
        assert alive['tunekit_problems_total{spec="host_scale",level="exact"}'] == number
        assert alive['tunekit_error_total{spec="host_scale"}'] == number
    found = tunekit.stats()["host_scale"]
    assert (found["kernels"], found["entries"], found["native"]) == (0, 0, True)
    assert len(module._tallies) <= module.MOST_ENDED + 2, "what is kept of those that are gone is bounded"


def test_counters_do_not_fall_while_kernels_come_and_go(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            kernel = tunekit.load(tuned.reference, **tuned.places)
            for _ in range(4):
                kernel(torch.ones(64, 64))
            del kernel

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    before: dict[str, int] = {}
    until = time.monotonic() + 2
    while time.monotonic() < until:
        now = totals()
        assert all(now[name] >= value for name, value in before.items())
        before = now
    stop.set()
    for thread in threads:
        thread.join(20)
    exact = totals()['tunekit_problems_total{spec="host_scale",level="exact"}']
    assert totals()['tunekit_calls_total{spec="host_scale",level="exact"}'] == 3 * exact > 0


class Loaded:
    """What is counted of a kernel, without one."""

    spec = SimpleNamespace(name="none")


def test_a_background_compile_that_outlives_its_kernel_counts():
    counts, kernel = Counter(loaded=1), Loaded()
    module.live(kernel, counts, SimpleNamespace(by_level=Counter))
    del kernel
    counts["compiled"] += 1
    found = totals()
    assert found['tunekit_compiled_total{spec="none"}'] == found['tunekit_loaded_total{spec="none"}'] == 1


def test_the_living_are_listed_while_others_come():
    stop, kept = threading.Event(), deque(maxlen=1000)

    def come() -> None:
        while not stop.is_set():
            kept.append(Loaded())
            module.live(kept[-1], Counter(), SimpleNamespace(by_level=Counter))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come)
    thread.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            module.living()
    finally:
        stop.set()
        thread.join(20)
        sys.setswitchinterval(before)


def test_labels_are_escaped():
    assert module._labels({"spec": 'a"b\\c\nd'}) == '{spec="a\\"b\\\\c\\nd"}'


def test_a_watcher_takes_up_new_winners_and_ends_with_its_kernel(tuned):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, watch_s=0.05, **tuned.places)
    x = torch.ones(64, 64)
    kernel(x)
    resolved = kernel.stats()["problems"]
    tuned.tune({"rows": 1024}, unroll=2, delay_us=0)
    winner = tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    with soon() as waiting:
        while kernel.choice(x).variant.id != winner.variant.id and waiting():
            kernel(x)
    assert kernel.stats()["problems"] > resolved
    (entry, _), *_ = kernel._tables[1].called()
    assert entry.choice.variant.id == winner.variant.id
    resolved = kernel.stats()["problems"]
    time.sleep(0.3)
    assert kernel.stats()["problems"] == resolved, "nothing changed: nothing is done"
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tunekit-watch"]
    del kernel, entry
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(UserError, match="watch_s is 0; it must be a positive number"):
        tunekit.load(tuned.reference, watch_s=0)


def test_a_watcher_keeps_what_serves_while_the_database_cannot_be_read(tuned):
    winner = tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    kernel = tunekit.load(tuned.reference, watch_s=0.02, **tuned.places)
    x = torch.ones(64, 64)
    kernel(x)
    content = tuned.database.read_bytes()
    tuned.database.write_bytes(b"no database" * 1000)
    time.sleep(0.3)
    assert kernel.choice(x).variant.id == winner.variant.id and kernel.stats()["problems"] == 1
    tuned.database.write_bytes(content)
    time.sleep(0.1)
    assert kernel.choice(x).level == "exact" and kernel.stats()["problems"] == 1


def test_a_watcher_that_may_load_nothing_now_says_so_and_tries_again(tuned, monkeypatch, caplog):
    """As beside a capture whose driver can't be told that this thread keeps to itself."""
    from tunekit.dispatch import watcher

    allowed = threading.Event()

    @contextmanager
    def beside_captures():
        yield allowed.is_set()

    monkeypatch.setattr(watcher, "beside_captures", beside_captures)
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, watch_s=0.05, **tuned.places)
    x = torch.ones(64, 64)
    kernel(x)
    winner = tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    with soon() as waiting:
        while "call refresh() outside CUDA graph captures" not in caplog.text and waiting():
            assert kernel.choice(x).variant.id != winner.variant.id
        allowed.set()
        while kernel.choice(x).variant.id != winner.variant.id and waiting():
            pass
    assert caplog.text.count("call refresh() outside") == 1
