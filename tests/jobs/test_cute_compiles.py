"""Real CuTeDSL compiles in the pool: what fails, hangs and crashes does so alone, for Hopper and Blackwell."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from tunekit.backends.cutedsl.compiled import chip_number
from tunekit.jobs import Limits, Pool
from tunekit.trials import Status

ARCHES = ("sm_90a", "sm_100a")
SCALE = {"smem_bytes": 4000, "smem_align": 128, "static_bytes": 0, "tmem": 0, "cluster": 1, "threads": 128}


@pytest.fixture
def fixture_result(cute_pool, cute_task):
    def run(fixture, arch, limits=None):
        (result,) = cute_pool.run([cute_task("cute_fixture", "fixture", arch, limits=limits, fixture=fixture)])
        return result

    return run


@pytest.fixture
def scale_result(cute_pool, cute_task):
    def run(implementation, arch, **tunables):
        events = []
        task = cute_task("cute_scale", implementation, arch, **{**SCALE, **tunables})
        (result,) = cute_pool.run([task], on_event=events.append)
        return result, [event.phase for event in events if event.kind == "phase"]

    return run


def test_the_zygote_is_warm_and_alone(cute_pool):
    """Case 10: importing CuTeDSL and compiling a first kernel has started no thread."""
    assert cute_pool.warm_up["threads"] == 1


@pytest.mark.parametrize("arch", ARCHES)
def test_a_good_kernel(scale_result, arch):
    result, phases = scale_result("plain", arch)
    assert result.ok, result.reason
    assert phases == ["trace", "mlir", "ptxas", "export", "link"]
    assert list(result.seconds) == phases
    files = result.value["files"]
    assert set(files) == {"so", "ptx", "cubin"}
    assert all(Path(path).stat().st_size > 500 for path in files.values())
    assert f".target {arch}" in Path(files["ptx"]).read_text()


@pytest.mark.parametrize("arch", ARCHES)
def test_a_quick_trace_and_an_endless_back_end(fixture_result, arch):
    """Case 1 on the real back end: traced quickly, killed at the back end's own limit, in the native call."""
    limits = Limits(trace_s=60, backend_s=1.0)
    result = fixture_result("nested_ifs", arch, limits)
    assert result.status is Status.COMPILE_TIMEOUT
    assert result.phase == "mlir"
    assert "killed in mlir at the backend limit of 1 s" in result.reason


@pytest.mark.parametrize("arch", ARCHES)
def test_an_instant_trace_whose_back_end_is_known_to_be_endless(fixture_result, arch):
    """Case 1, the pattern that is known: a tile that one thread holds whole is refused at the trace."""
    result = fixture_result("whole_tile", arch, Limits(trace_s=20, backend_s=1.0))
    assert result.status is Status.TRACE_ERROR
    assert result.phase == "trace"
    assert "a fragment (128,128) of Float32" in result.reason


@pytest.mark.parametrize("arch", ARCHES)
def test_smem_overflow_never_reaches_the_back_end(fixture_result, arch):
    """Case 12: 240,000 B compile silently upstream; here they are refused at the trace, with both numbers."""
    result = fixture_result("smem_overflow", arch)
    assert result.status is Status.OVER_BUDGET
    assert result.reason == f"smem 240000 B > 232448 B ({arch})"
    assert result.phase == "trace"


def test_smem_at_the_limit_and_one_element_over(scale_result):
    """Case 12: exactly the limit is compiled; four bytes more are refused before the back end."""
    at_limit, _ = scale_result("plain", "sm_90a", smem_bytes=232_448)
    assert at_limit.ok, at_limit.reason
    assert at_limit.value["compiled"]["smem_bytes"] == 232_448
    over, phases = scale_result("plain", "sm_90a", smem_bytes=232_452)
    assert over.status is Status.OVER_BUDGET
    assert over.reason == "smem 232452 B > 232448 B (sm_90a)"
    assert phases == ["trace"]


def test_tmem_over_the_limit(scale_result):
    """Case 12: 512 + 32 TMEM columns are refused at the trace, with both numbers."""
    result, phases = scale_result("with_tmem", "sm_100a", tmem=544)
    assert result.status is Status.OVER_BUDGET
    assert result.reason == "tmem 544 columns > 512 columns (sm_100a)"
    assert phases == ["trace"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a", "sm_121a"])
def test_tcgen05_where_there_is_none(scale_result, arch):
    """Case 14: refused before compiling, in a sentence."""
    result, phases = scale_result("with_tmem", arch, tmem=32)
    assert result.status is Status.TRACE_ERROR
    assert result.reason.startswith(f"with_tmem needs tcgen05, which {arch} has not")
    assert phases == ["trace"]


@pytest.mark.parametrize(("arch", "numbers"), [("sm_90a", {90}), ("sm_100a", {100}), ("sm_103a", {103})])
def test_the_artifact_is_for_the_arch_asked_for(scale_result, arch, numbers):
    """Case 14: read from the machine code itself; sm_103a works."""
    tmem = 32 if arch != "sm_90a" else 0
    result, _ = scale_result("with_tmem" if tmem else "plain", arch, tmem=tmem)
    assert result.ok, result.reason
    assert chip_number(Path(result.value["files"]["cubin"]).read_bytes()) in numbers
    assert f".target {arch}" in Path(result.value["files"]["ptx"]).read_text()
    assert result.value["facts"]["cuda_tools"].count(".") == 2


def test_the_environment_does_not_change_the_arch(cute_task, monkeypatch):
    """Case 14: CUTE_DSL_ARCH set, before the zygote starts and after, is not what a compile is for."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Pool(workers=1) as pool:
        for arch in ("sm_100a", "sm_90a"):
            monkeypatch.setenv("CUTE_DSL_ARCH", "sm_120a")
            (result,) = pool.run([cute_task("cute_fixture", "fixture", arch, fixture="good")])
            assert result.ok, result.reason
            assert f".target {arch}" in Path(result.value["files"]["ptx"]).read_text()
    assert result.value["facts"]["cuda_tools"].count(".") == 2


@pytest.mark.parametrize("arch", ARCHES)
def test_garbage_ptx(fixture_result, arch):
    """ptxas's own words come through, with the variant and the toolchain."""
    result = fixture_result("garbage_ptx", arch)
    assert result.status is Status.COMPILE_ERROR
    for words in ("PTX assembly failed", "syntax error", f"fixture=garbage_ptx on {arch}", "nvidia-cutlass-dsl"):
        assert words in result.reason
    assert "\x1b" not in result.reason


@pytest.mark.parametrize("arch", ARCHES)
def test_register_misuse(fixture_result, arch):
    result = fixture_result("register_count", arch)
    assert result.status is Status.TRACE_ERROR
    assert "24 to 256" in result.reason


@pytest.mark.parametrize("arch", ARCHES)
def test_a_native_segfault(fixture_result, arch):
    """Case 6 on the real back end: it overflows a small stack."""
    result = fixture_result("native_segfault", arch)
    assert result.status is Status.COMPILE_CRASHED
    assert result.signal == signal.SIGSEGV
    assert f"fixture=native_segfault on {arch}" in result.reason


def test_a_native_abort(fixture_result):
    """Case 6 on the real back end: LLVM is out of memory, and aborts without a word."""
    result = fixture_result("native_abort", "sm_100a", Limits(trace_s=60, backend_s=60))
    assert result.status in (Status.COMPILE_CRASHED, Status.COMPILE_OUT_OF_MEMORY)
    assert result.signal == signal.SIGABRT
    assert result.phase == "mlir"


def test_the_back_end_s_memory_has_a_limit(fixture_result):
    """Case 7 on the real back end: its memory counts."""
    limits = Limits(trace_s=60, backend_s=60, memory_bytes=350 * 2**20)
    result = fixture_result("hungry", "sm_90a", limits)
    assert result.status is Status.COMPILE_OUT_OF_MEMORY
    assert "> 350 MiB" in result.reason


def test_what_is_no_kernel(fixture_result):
    result = fixture_result("not_a_kernel", "sm_90a")
    assert "build must return (@cute.jit callable, compile arguments), not str" in result.reason


def test_the_rest_goes_on(cute_pool, cute_task):
    """One run with everything that ends badly: the good ones are compiled."""
    fixtures = ["native_segfault", "good", "garbage_ptx", "smem_overflow", "good", "register_count"]
    tasks = [cute_task("cute_fixture", "fixture", "sm_100a", fixture=fixture) for fixture in fixtures]
    results = {result.id: result for result in cute_pool.run(tasks)}
    assert [str(results[task.id].status) for task in tasks] == [
        "compile_crashed",
        "ok",
        "compile_error",
        "over_budget",
        "ok",
        "trace_error",
    ]


def test_two_variants_have_symbols_of_their_own(cute_pool, cute_task):
    """Every artifact exports the name that it was asked for, and nothing else by a common name."""
    tasks = [cute_task("cute_fixture", "fixture", "sm_90a", fixture="good") for _ in range(2)]
    results = list(cute_pool.run(tasks))
    objects = [Path(result.value["files"]["so"]).read_bytes() for result in results]
    symbols = [f"__tvm_ffi_{result.id}".encode() for result in results]
    assert symbols[0] != symbols[1]
    for content, symbol in zip(objects, symbols, strict=True):
        assert symbol in content


def test_an_out_dir_with_odd_characters(cute_pool, cute_task, tmp_path):
    """Paths with spaces and quotes, which CuTeDSL's own options can't take."""
    task = cute_task("cute_fixture", "fixture", "sm_90a", fixture="good")
    odd = tmp_path / "it's a (dir) é"
    task = dataclasses.replace(task, payload={**task.payload, "out_dir": str(odd)})
    (result,) = cute_pool.run([task])
    assert result.ok, result.reason
    assert sorted(path.name for path in odd.iterdir()) == [
        "compiler.log",
        "kernel.cubin",
        "kernel.o",
        "kernel.ptx",
        "kernel.so",
    ]
