"""The native hot path beside the one in Python: the same answers, whatever is given, left out or wrong."""

from __future__ import annotations

import contextlib
import enum
import errno
import gc
import logging
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
import tvm_ffi

import tunekit
from tunekit.dispatch import hot_path as native
from tunekit.dispatch import kernel as module
from tunekit.dispatch import library
from tunekit.errors import UserError
from tunekit.model import Level
from tunekit.store.artifacts import ArtifactStore


@pytest.fixture(params=[True, False], ids=["native", "python"])
def served(request, tuned):
    """A function that loads the spec that was tuned, dispatched natively or in Python."""

    def load(**more):
        kernel = tunekit.load(tuned.reference, native=request.param, **tuned.places, **more)
        kernel.is_native = request.param
        return kernel

    return load


@pytest.fixture
def moments(tuned):
    tuned.reference = str(tuned.specs / "host_moments.py")
    for centred in (False, True):
        tuned.tune({"rows": 4, "cols": 32, "centred": centred}, block=16)
    return tuned


def forbid_learning(kernel, monkeypatch):
    def learn(*args):
        raise AssertionError("a call that was made before must find its entry")

    monkeypatch.setattr(kernel, "_learn", learn)


def test_outputs_given_and_left_out_numbers_given_and_left_out(moments, served, monkeypatch):
    """Every way to fill the arguments, by position and by keyword, twice: the second time from the table."""
    kernel = served()
    x = torch.randn(4, 32)
    y, mean = torch.empty(4, 32), torch.empty(4)
    calls = {
        "allocated": lambda: kernel(x),
        "None": lambda: kernel(x, None),
        "given": lambda: kernel(x, y),
        "a float": lambda: kernel(x, y, 3.0),
        "an int": lambda: kernel(x, None, 3),
        "keywords": lambda: kernel(scale=3, x=x),
        "a flag": lambda: kernel(x, centred=True),
        "two outputs": lambda: kernel(x, y, mean, centred=True),
        "one of two": lambda: kernel(x, None, mean, 3, centred=True),
    }
    wanted = {}
    for name, call in calls.items():
        scale = 3.0 if name in ("a float", "an int", "keywords", "one of two") else 2.0
        row_mean = x.mean(1, keepdim=True) if name in ("a flag", "two outputs", "one of two") else 0.0
        wanted[name] = scale * (x - row_mean)
        call()
    forbid_learning(kernel, monkeypatch)
    for name, call in calls.items():
        result = call()
        several = name in ("a flag", "two outputs", "one of two")
        output = result[0] if several else result
        assert isinstance(result, tuple) is several
        torch.testing.assert_close(output, wanted[name])
        if several:
            torch.testing.assert_close(result[1], x.mean(1))
        if name in ("given", "a float", "two outputs"):
            assert output is y
        if name in ("two outputs", "one of two"):
            assert result[1] is mean
    assert kernel.stats()["calls"] == len(calls) and kernel.calls() == {Level.EXACT: len(calls)}


def test_scratch_memory_and_outputs_are_given_back(tuned, served):
    """What each call allocates is freed: 20,000 calls with 4 KiB of scratch memory and as much output."""
    tuned.reference = f"{tuned.specs / 'host_pages.py'}:host_pages"
    tuned.tune({"cols": 8, "batch": 64, "s": 3}, split=2)
    kernel = served()
    x = torch.randn(64, 3, 8)
    torch.testing.assert_close(kernel(x, scale=2.0), 2.0 * x.sum(1))
    before = psutil.Process().memory_info().rss
    for _ in range(20_000):
        kernel(x, scale=2.0)
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_more_problems_than_a_table_holds(tuned, served, monkeypatch, caplog):
    """A table grows by being replaced; past the limit it is emptied. Every call counts, and every result is right."""
    tuned.tune({"rows": 64}, unroll=2, delay_us=0)
    monkeypatch.setattr(module, "MAX_KEYS", 256)
    caplog.set_level(logging.ERROR, "tunekit")
    kernel = served()
    rows = [*range(1, 400), 7, 300, 7]
    for count in rows:
        x = torch.randn(count, 64)
        torch.testing.assert_close(kernel(x), 0.5 * x + torch.arange(64) / 64)
    kernel(torch.randn(399, 64))
    (table,) = kernel._tables.values()
    assert len(table.items()) <= 256
    again = rows.count(7) - 1 + 2  # the calls that found an entry: 300, 7, and 399 at the end
    assert again - 1 <= kernel.stats()["calls"] <= again


def test_a_kernel_that_fails_fails_the_call(tuned, served):
    tuned.reference = f"{tuned.specs / 'host_scale.py'}:host_faulty"
    tuned.tune({"rows": 8}, fault="error")
    kernel = served()
    x = torch.randn(8, 64)
    for _ in range(3):
        with pytest.raises(Exception, match="asked to fail"):
            kernel(x)


def test_what_is_no_plain_tensor_never_reaches_a_kernel(tuned, served):
    """Refused after good calls of the same shape, too: the hot path must not take it for one of those."""
    tuned.tune({"rows": 64}, unroll=2, delay_us=0)
    kernel = served()
    x = torch.randn(64, 64)
    kernel(x)
    storage = torch.randn(64 * 64 + 1)
    for bad, words in (
        (x.t(), "not contiguous"),
        (torch.randn(64, 128)[:, :64], "not contiguous"),
        (torch.randn(64, 128)[:, ::2], "not contiguous"),
        (torch.randn(1, 64).expand(64, 64), "not contiguous"),
        (storage[1:].view(64, 64), "starts 4 bytes past"),
        (x.double(), "float64"),
        (x.view(64, 64, 1), "3 dims"),
        (x.numpy(), "ndarray"),
        ([x], "list"),
        ("x", "str"),
        (None, "needs its input"),
        (True, "bool"),
    ):
        for _ in range(2):
            with pytest.raises(UserError, match=words):
                kernel(bad)
    with pytest.raises(UserError, match="'scale' is bool"):
        kernel(x, None, True)
    with pytest.raises(UserError, match="'scale' is str"):
        kernel(x, None, "0.5")
    with pytest.raises(UserError, match="'scale' is Tensor"):
        kernel(x, None, torch.tensor(0.5))
    assert kernel(storage[4 : 4 + 64 * 63].view(63, 64)).shape == (63, 64)  # an offset that is aligned


def test_calls_go_on_from_many_threads_while_tables_grow(tuned, served, caplog):
    tuned.tune({"rows": 64}, unroll=2, delay_us=0)
    caplog.set_level(logging.ERROR, "tunekit")
    kernel = served()
    errors = []

    def call(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(300):
            x = torch.randn(int(torch.randint(1, 200, (1,), generator=generator)), 64)
            if not torch.allclose(kernel(x), 0.5 * x + torch.arange(64) / 64):
                errors.append(len(x))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and kernel.stats()["loaded"] <= 1


def test_arguments_are_not_kept_alive(tuned, served):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    x, y = torch.randn(8, 64), torch.empty(8, 64)
    kernel(x, y)
    kernel(x, y)
    gone = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_bind_is_the_kernel_itself(tuned, served):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    bound = kernel.bind({"rows": 8}, device=-1)
    x, y = torch.randn(8, 64), torch.empty(8, 64)
    bound(x, y, 2.0)
    torch.testing.assert_close(y, 2.0 * x + torch.arange(64) / 64)
    assert type(bound).__module__.startswith("tvm_ffi")
    with pytest.raises(UserError, match="rows"):
        kernel.bind({}, device=-1)


def test_refresh_takes_new_winners_and_no_call_finds_a_cold_key(tuned, served, monkeypatch):
    tuned.tune({"rows": 64}, unroll=2, delay_us=0)
    kernel = served()
    x = torch.randn(64, 64)
    kernel(x)
    kernel(x=x)
    tuned.tune({"rows": 64}, unroll=8, delay_us=0)
    assert kernel.choice(x).variant.tunables.unroll == 2
    kernel.refresh()
    assert kernel.choice(x).variant.tunables.unroll == 8
    forbid_learning(kernel, monkeypatch)
    torch.testing.assert_close(kernel(x), kernel(x=x))
    assert {entry.choice.variant.tunables.unroll for _, entry in kernel._tables[1].items()} == {8}


def test_a_cold_key_is_refused_while_a_graph_is_captured(tuned, served, monkeypatch):
    """Case 53: no load, no allocation, no lookup; what was called or bound before goes on."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    x = torch.randn(8, 64)
    kernel.bind({"rows": 8}, device=-1)
    monkeypatch.setattr(module, "capturing", lambda: True)
    assert kernel(x).shape == (8, 64)
    with pytest.raises(UserError, match=r"rows=9 .*first time while a CUDA graph is being captured.*bind"):
        kernel(torch.randn(9, 64))
    for cold in (lambda: kernel.bind({"rows": 9}, device=-1), lambda: kernel.choice(torch.randn(9, 64))):
        with pytest.raises(UserError, match=r"rows=9 .*first time while a CUDA graph is being captured"):
            cold()
    with pytest.raises(UserError, match="refresh"):
        kernel.refresh()
    assert kernel.stats()["problems"] == 1


def test_without_a_c_compiler_calls_are_dispatched_in_python(tuned, monkeypatch, caplog):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr("tunekit.backends.host.COMPILERS", ("no-such-compiler",))
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x = torch.randn(8, 64)
    with caplog.at_level(logging.WARNING, "tunekit"):
        torch.testing.assert_close(kernel(x), 0.5 * x + torch.arange(64) / 64)
        kernel(x)
    assert [record.getMessage() for record in caplog.records] == [
        "calls are dispatched in Python, at some microseconds each: "
        "no C compiler found (tried no-such-compiler): install gcc"
    ]
    assert kernel.stats()["calls"] == 1


def test_the_native_half_is_compiled_once_and_kept(tuned, monkeypatch):
    store = ArtifactStore(tuned.artifacts)
    native.publish(store, native.native_parts()[0])
    assert store.get(native.native_parts()[0].key) is not None
    monkeypatch.setattr("tunekit.backends.host.COMPILERS", ())
    native.publish(store, native.native_parts()[0])
    monkeypatch.setattr(native, "_loaded", {})
    assert native.hot_path(store) is not None


def test_a_store_that_can_not_be_written_still_has_a_native_half(tmp_path, monkeypatch):
    """Case 31: it is compiled for this process alone."""
    monkeypatch.setattr(native, "_loaded", {})
    (tmp_path / "file").write_text("")
    assert native.hot_path(ArtifactStore(tmp_path / "file" / "artifacts")) is not None


def test_a_native_kernel_is_a_kernel_and_is_collected(tuned):
    """caller.c's class holds the tables' functions, which hold what they close over: no cycle outlives its kernel."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = tunekit.load(tuned.reference, **tuned.places)
    assert isinstance(kernel, module.Kernel) and type(kernel).__mro__[1].__name__ == "Caller"
    assert repr(kernel) == "<tunekit kernel host_scale version 1>"
    x = torch.randn(8, 64)
    kernel(x)
    kernel.myself = kernel
    gone = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert gone() is None


def test_without_pythons_headers_a_call_goes_through_python(tuned, monkeypatch, tmp_path):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    hot, caller = native.native_parts()
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "native_parts", lambda: (hot, caller._replace(headers=tmp_path)))
    kernel = tunekit.load(tuned.reference, **tuned.places)
    x, y = torch.randn(8, 64), torch.empty(8, 64)
    assert type(kernel) is module.Kernel
    assert kernel(x, y) is y and kernel(x, y) is y
    assert kernel.stats()["calls"] == 1


def test_ctrl_c_while_an_entry_is_added_leaves_the_table_whole(tuned, served, monkeypatch):
    """More keys than it holds, each noted natively and nowhere else."""
    tuned.tune({"rows": 64}, unroll=2, delay_us=0)
    kernel = served()
    kernel(torch.randn(64, 64))
    hot = native.hot_path(ArtifactStore(tuned.artifacts))

    def put(*arguments):
        place = hot_put(*arguments)
        if place >= 0:
            raise KeyboardInterrupt
        return place

    hot_put = hot.put
    monkeypatch.setattr(hot, "put", put)
    for rows in range(1, 200):
        with contextlib.suppress(KeyboardInterrupt):
            kernel(torch.randn(rows, 64))
    monkeypatch.undo()
    for rows in range(1, 200):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(kernel(x), 0.5 * x + torch.arange(64) / 64)


def test_ctrl_c_in_a_call_stays_ctrl_c(tuned, served, monkeypatch):
    """It is explained by nothing, whatever the arguments were."""
    kernel = served()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    for by in ((interrupted, None, torch.empty_like), (torch.sum, 0, interrupted)):
        table = SimpleNamespace(function=interrupted, finish=interrupted, native=(*by, torch.Tensor))
        kernel._routes.lay(1, table)
        for wrong in (torch.ones(3), "no tensor"):
            with pytest.raises(KeyboardInterrupt):
                kernel(wrong)


class Three(enum.IntEnum):
    THREE = 3


@pytest.mark.parametrize("given", [3, 3.0, Three.THREE, numpy.float32(3), numpy.float64(3), numpy.int64(3)], ids=repr)
@pytest.mark.parametrize("before", [3, 3.0, Three.THREE, numpy.int64(3), None], ids=repr)
def test_a_number_is_a_number_whatever_came_before(tuned, served, monkeypatch, before, given):
    """A kernel that takes a float gets one; which calls share an entry natively is TVM-FFI's choice."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    seen = []
    kernel = served()
    function = lambda x, y, scale: seen.append((type(scale), scale))  # noqa: E731
    serve_by(tuned, monkeypatch, tvm_ffi.convert(function) if kernel.is_native else function)
    x = torch.randn(8, 64)
    kernel(x, None, before)
    kernel(x, None, given)
    kernel(x, None, given)
    assert all(issubclass(kind, (float, numpy.floating)) for kind, _ in seen)
    assert [value for _, value in seen[1:]] == [3.0, 3.0]


def serve_by(tuned, monkeypatch, function):
    """Serve the one artifact that is there by `function`."""
    (key,) = [key for key in ArtifactStore(tuned.artifacts).keys() if "-" not in key]  # noqa: SIM118 (a method)
    monkeypatch.setitem(library._loaded, key, function)


@pytest.mark.parametrize("scale", [10**400, -(10**400), True, numpy.bool_(True), "3", 3j, torch.tensor(3.0)], ids=repr)
def test_what_is_no_number_of_that_size_is_refused_warm_and_cold(tuned, served, scale):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    x = torch.randn(8, 64)
    for _ in range(2):
        with pytest.raises(UserError, match="'scale' is"):
            kernel(x, None, scale)
        kernel(x, None, 3)


@pytest.mark.parametrize(
    "scale",
    [
        *(0, -1, 10**40, 0.0, -0.5, 1e-40, 1e39, float("nan"), float("inf"), float("-inf")),
        *(numpy.float32(0), numpy.float16(0), numpy.int64(0)),
    ],
    ids=repr,
)
def test_a_number_that_must_be_positive_is_refused_otherwise_warm_and_cold(tuned, served, scale):
    tuned.reference = f"{tuned.specs / 'host_scale.py'}:host_positive"
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    x = torch.ones(8, 64)
    kept = []
    for _ in range(2):
        with pytest.raises(UserError, match=r"host_positive's 'scale' is .*; it must be above 0"):
            kernel(x, None, scale)
        with pytest.raises(UserError, match="must be above 0"):
            kernel(x, None, 0.0)  # a refused number has left no way in for another
        for right in (type(scale)(1), 2.0, 3, 2.0**-126):
            torch.testing.assert_close(kernel(x, scale=right), float(right) * x + torch.arange(64) / 64)
        kept.append(tunekit.stats()["host_positive"]["entries"])
    assert kept[0] == kept[1]


def test_a_default_that_must_be_positive_and_is_not_is_refused(tuned, served, tmp_path):
    source, right = (tuned.specs / "host_scale.py").read_text(), "lambda p: 0.5, positive=True"
    assert right in source
    (tmp_path / "host_zero.py").write_text(source.replace(right, right.replace("0.5", "0.0")))
    tuned.reference = f"{tmp_path / 'host_zero.py'}:host_positive"
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    with pytest.raises(UserError, match=r"the default of 'scale' is 0.0 for .*rows=8.*; it must be above 0"):
        kernel(torch.ones(8, 64))
    torch.testing.assert_close(kernel(torch.ones(8, 64), scale=1.0), 1.0 + (torch.arange(64) / 64).expand(8, 64))


def test_where_any_number_is_right_its_sign_is_free(tuned, served):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    x = torch.ones(8, 64)
    for scale in (2.0, -2.0, 0.0, 0, -3, 3):
        torch.testing.assert_close(kernel(x, None, scale), scale * x + torch.arange(64) / 64)


def test_an_int_of_more_than_64_bits_is_a_float_where_one_is_wanted(tuned, served):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    x = torch.ones(8, 64)
    for scale in (10**30, 3, 10**30):
        torch.testing.assert_close(kernel(x, None, scale), float(scale) * x + torch.arange(64) / 64)


@pytest.mark.parametrize("centred", [[1], {}, numpy.ones(1), 1, 1.0, numpy.bool_(True), torch.tensor(True)], ids=repr)
def test_a_flag_that_is_no_bool_is_refused_by_name_warm_and_cold(moments, served, centred):
    kernel = served()
    x = torch.randn(4, 32)
    for _ in range(2):
        with pytest.raises(UserError, match="centred"):
            kernel(x, centred=centred)
        kernel(x, centred=True)


def test_any_word_is_an_argument_that_a_kernel_lacks(tuned, served):
    kernel = served()
    for word in ("self", "args", "keywords", "place"):
        with pytest.raises(UserError, match=f"no argument '{word}'"):
            kernel(torch.randn(8, 64), **{word: 1})


def test_a_fork_while_another_thread_learns(tuned, served):
    """The child serves what is new to it, though its copies of the locks were held by a thread that it lacks."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    kernel = served()
    kernel(torch.ones(8, 64))
    with kernel._lock, native._loading:
        child = forked(lambda: os._exit(0 if kernel(torch.ones(9, 64))[0, 0] == 0.5 else 1))
    assert child == 0


def forked(work):
    """The exit status of a child that does `work` on a thread that never held a lock of this one."""
    pids = []

    def fork():
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                work()
            finally:
                os._exit(9)
        pids.append(pid)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1])


GARBAGE = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && {command} "$2"; shift; done
exit 0
"""


@pytest.mark.parametrize("command", ["echo junk >", "cp /usr/bin/true", "true"], ids=["junk", "program", "nothing"])
def test_a_compiler_that_succeeds_in_making_nothing(tuned, monkeypatch, tmp_path, caplog, command):
    """Calls are dispatched in Python, and what is no shared object is not kept for the next process."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    (tmp_path / "cc").write_text(GARBAGE.replace("{command}", command))
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(native, "_loaded", {})
    kernel = tunekit.load(tuned.reference, **tuned.places)
    assert kernel(torch.ones(8, 64))[0, 0] == 0.5
    assert "calls are dispatched in Python" in caplog.text
    if "cp" not in command:
        assert not [key for key in ArtifactStore(tuned.artifacts).keys() if "-" in key]  # noqa: SIM118 (a method)


def test_a_native_half_that_there_is_nowhere_to_put(tuned, monkeypatch, caplog):
    """As where neither the store nor a temporary directory can be written."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)

    def full(store, part) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(native, "publish", full)
    monkeypatch.setattr(native, "_loaded", {})
    kernel = tunekit.load(tuned.reference, **tuned.places)
    assert kernel(torch.ones(8, 64))[0, 0] == 0.5 and not kernel.native
    assert "calls are dispatched in Python, at some microseconds each: [Errno 28]" in caplog.text


HANGS = """#!/bin/sh
sleep 600 &
echo $! >> {started}
wait
"""


def test_a_compiler_that_hangs_is_killed_with_all_that_it_started(tuned, monkeypatch, tmp_path, caplog):
    """Calls are then dispatched in Python, and a warning says why, once."""
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    (tmp_path / "cc").write_text(HANGS.replace("{started}", str(tmp_path / "started")))
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "LIMIT_S", 1.0)
    began = time.monotonic()
    for _ in range(2):
        kernel = tunekit.load(tuned.reference, **tuned.places)
        assert kernel(torch.ones(8, 64))[0, 0] == 0.5
    assert time.monotonic() - began < 10 and not kernel.native
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "calls are dispatched in Python, at some microseconds each: "
        "hot_path.c does not compile: cc took over 1 s; killed"
    ]
    started = [int(pid) for pid in (tmp_path / "started").read_text().split()]
    assert len(started) == 2, "each part's compiler is tried once"
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in started):
        assert time.monotonic() < deadline, "what the compiler started is killed too"
        time.sleep(0.01)


def test_a_native_half_that_lacks_a_function_is_not_used(tuned, monkeypatch, caplog):
    tuned.tune({"rows": 8}, unroll=2, delay_us=0)
    store = ArtifactStore(tuned.artifacts)
    (other,) = store.keys()
    for part in native.native_parts():
        store.put(part.key, part.name, {"so": store.path(store.get(other))})
    monkeypatch.setattr(native, "_loaded", {})
    kernel = tunekit.load(tuned.reference, **tuned.places)
    assert kernel(torch.ones(8, 64))[0, 0] == 0.5
    assert "calls are dispatched in Python" in caplog.text


@pytest.mark.parametrize("more", [0, 1, 7])
def test_a_kernel_of_more_arguments_than_the_hot_path_takes(tmp_path, more):
    """64 are the most; the last, and scratch memory, come on top of what is given."""
    (tmp_path / "many.py").write_text(MANY.replace("{inputs}", str(62 + more)))
    kernel = tunekit.load(
        tmp_path / "many.py", compile="allow", database=tmp_path / "t.db", artifacts=tmp_path / "artifacts"
    )
    inputs = [torch.full((4,), float(i)) for i in range(62 + more)]
    for _ in range(3):
        torch.testing.assert_close(kernel(*inputs), torch.stack(inputs).sum(0) * 2.0)


MANY = """
from tunekit.spec import Axis, Implementation, KernelSpec, ScalarArg, TensorArg, Tunable

SOURCE = '''
#include "tunekit_host.h"
TUNEKIT_KERNEL(args, count) {
    if (count != {inputs} + 3) return fail("wrong number of arguments");
    float *y = data_arg(args, {inputs}), *scratch = data_arg(args, {inputs} + 2);
    const int64_t size = tensor_arg(args, 0)->shape[0];
    for (int64_t i = 0; i < size; ++i) {
        scratch[0] = 0.0f;
        for (int input = 0; input < {inputs}; ++input) scratch[0] += ((float *)data_arg(args, input))[i];
        y[i] = scratch[0] * (float)scalar_arg(args, {inputs} + 1);
    }
    return 0;
}
'''
SPEC = KernelSpec(
    name="many",
    version=1,
    axes=(Axis("size"),),
    signature=(
        *(TensorArg(f"x{i}", ("size",), "float32") for i in range({inputs})),
        TensorArg("y", ("size",), "float32", role="output"),
        ScalarArg("scale", default=lambda p: 2.0),
    ),
    implementations=(
        Implementation(
            name="sum", requires={"host"}, backend="host", tunables=(Tunable("way", (1,)),),
            workspace=lambda v, arch: 16, build=lambda b: SOURCE, defaults=({"way": 1},),
        ),
    ),
    reference=lambda problem, inputs: {"y": sum(inputs[f"x{i}"].double() for i in range({inputs})) * 2.0},
    examples=({"size": 4},),
)
"""


@pytest.mark.parametrize("more", [0, 1, 7])
def test_a_number_that_must_be_positive_behind_as_many_arguments(tmp_path, more):
    positive = MANY.replace("lambda p: 2.0", "lambda p: 2.0, positive=True")
    assert positive != MANY
    (tmp_path / "many.py").write_text(positive.replace("{inputs}", str(62 + more)))
    kernel = tunekit.load(
        tmp_path / "many.py", compile="allow", database=tmp_path / "t.db", artifacts=tmp_path / "artifacts"
    )
    inputs = [torch.full((4,), float(i)) for i in range(62 + more)]
    for _ in range(2):
        torch.testing.assert_close(kernel(*inputs, scale=3.0), torch.stack(inputs).sum(0) * 3.0)
        with pytest.raises(UserError, match=r"'scale' is 0\.0; it must be above 0"):
            kernel(*inputs, scale=0.0)
