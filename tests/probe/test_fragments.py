"""The known slow pattern, a fragment that one thread holds whole, is refused at the trace: real traces, no GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunekit.backends.contract import CompileRequest
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Values
from tunekit.spec import load_spec
from tunekit.trials import Status

SPECS = Path(__file__).resolve().parents[1] / "specs"
KERNELS = SPECS / "cute_fragments_kernels.py"
ARCHES = ("sm_90a", "sm_100a")
# What is refused: as the sentence names it, its elements and bytes, and the line that made it.
REFUSED = {
    "whole_tile": ("(128,64) of Float32", 8192, 32768, "tile = cute.make_rmem_tensor"),
    "one_over": ("(1025) of Float32", 1025, 4100, "held = cute.make_rmem_tensor"),
    "narrow": ("(128,16) of BFloat16", 2048, 4096, "held = cute.make_rmem_tensor"),
    "wide": ("(513) of Float64", 513, 4104, "held = cute.make_rmem_tensor"),
    "value": ("(64,32) of Float32", 2048, 8192, "y.store(x.load())"),
    "filled": ("(2048) of Float32", 2048, 8192, "y.store(cute.full"),
    "spread": ("(4,4) of Float32", 1540, 6160, "gaps = cute.make_rmem_tensor"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every fragment traced for both architectures, by (fragment, arch)."""
    (tunable,) = load_spec(str(SPECS / "cute_fragments.py")).implementation("held").tunables
    scratch = tmp_path_factory.mktemp("fragments")
    with Pool(workers=2, limits=Limits(trace_s=20, backend_s=60)) as pool:
        found = pool.run([task(name, arch, scratch, True) for name in tunable.values for arch in ARCHES])
        return {tuple(result.id.split()): result for result in found}


def task(name, arch, scratch, trace_only):
    request = CompileRequest(
        f"{SPECS / 'cute_fragments.py'}:cute_fragments",
        "held",
        arch,
        Values(n=1024),
        Values(fragment=name),
        f"tunekit_{name}",
        str(scratch / f"{name}{arch}"),
        trace_only,
    )
    return compile_task(request, id=f"{name} {arch}")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_whole_tile_in_one_thread_is_refused_in_a_sentence(results, name, arch):
    """With shape, dtype, elements and bytes, the source line, the limit and the way out."""
    shape, elements, held, line = REFUSED[name]
    result = results[name, arch]
    assert result.status is Status.TRACE_ERROR and result.phase == "trace"
    assert f"a fragment {shape} made at {KERNELS}:" in result.reason
    assert f": {elements} elements, {held} B, over the limit of 1024 elements and 4096 B" in result.reason
    assert "255 registers" in result.reason and "partition the tile over the threads" in result.reason
    number = int(re.search(r"\.py:(\d+):", result.reason)[1])
    assert line in KERNELS.read_text().splitlines()[number - 1]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["at_limit", "value_at_limit", "partitioned"])
def test_what_the_back_end_bears_is_accepted(results, name, arch):
    """Exactly at the limit; and a tile that is as large, in global and shared memory, each thread with its row."""
    assert results[name, arch].status is Status.OK, results[name, arch].reason


def test_every_fragment_is_tried(results):
    assert {name for name, _ in results} == {*REFUSED, "at_limit", "value_at_limit", "partitioned"}


def test_at_the_limit_the_back_end_comes_back(tmp_path):
    with Pool(workers=1, limits=Limits(trace_s=20, backend_s=60)) as pool:
        (result,) = pool.run([task("at_limit", "sm_90a", tmp_path, False)])
    assert result.ok, result.reason
