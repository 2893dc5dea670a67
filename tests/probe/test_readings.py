"""Declared, traced and compiled footprints of real kernels are the same, for every shape that matters."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tunekit.arch import parse_arch
from tunekit.backends.contract import CompileRequest
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Footprint, Values
from tunekit.probe import Probe
from tunekit.space import declared_footprint, expand
from tunekit.spec import load_spec
from tunekit.trials import Status

SPECS = Path(__file__).resolve().parents[1] / "specs"
FIELDS = ("smem_bytes", "tmem_columns", "threads", "cluster")


@pytest.fixture(scope="module")
def pool():
    with Pool(workers=2, limits=Limits(trace_s=60, backend_s=60)) as pool:
        yield pool


@pytest.fixture
def compiled(pool, tmp_path):
    """Compiles requests together; the reports in the order asked for."""
    counter = itertools.count()

    def run(requests):
        tasks = []
        for spec, implementation, arch, static, tunables, trace_only in requests:
            name = f"k{next(counter)}"
            request = CompileRequest(
                str(SPECS / spec), implementation, arch, static, tunables, name, str(tmp_path / name), trace_only
            )
            tasks.append(compile_task(request))
        results = {result.id: result for result in pool.run(tasks)}
        return [results[task.id] for task in tasks]

    return run


SCALE = {"smem_bytes": 4000, "smem_align": 128, "static_bytes": 0, "tmem": 0, "cluster": 1, "threads": 128}
SCALE_POINTS = [
    ("sm_90a", "plain", {}),
    ("sm_90a", "plain", {"cluster": 2, "threads": 256}),
    ("sm_90a", "plain", {"static_bytes": 512}),
    ("sm_90a", "plain", {"static_bytes": 2048, "smem_bytes": 0}),
    ("sm_100a", "plain", {"static_bytes": 2048, "smem_align": 1024, "cluster": 4}),
    ("sm_100a", "with_tmem", {"tmem": 32}),
    ("sm_100a", "with_tmem", {"tmem": 64, "smem_align": 1024}),
    ("sm_100a", "with_tmem", {"tmem": 512, "cluster": 2, "static_bytes": 512}),
    ("sm_103a", "with_tmem", {"tmem": 64}),
    ("sm_120a", "plain", {}),
]


def test_declared_traced_and_compiled_agree(compiled):
    """Shared memory (dynamic, static, aligned), TMEM, threads and clusters, on five architectures."""
    requests = [
        ("cute_small.py:cute_scale", name, arch, Values(n=1024), Values({**SCALE, **changes}), False)
        for arch, name, changes in SCALE_POINTS
    ]
    spec = load_spec(str(SPECS / "cute_small.py:cute_scale"))
    for (_, name, arch, static, tunables, _), result in zip(requests, compiled(requests), strict=True):
        assert result.ok, result.reason
        declared = declared_footprint(spec.implementation(name), parse_arch(arch), static, tunables)
        probe = Probe.of_report(result.value, declared)
        assert probe.agrees, f"{arch} {tunables}: {probe.disagreements()}"
        for reading in probe.readings().values():
            assert None not in [getattr(reading, field) for field in FIELDS]


def test_a_whole_kernel_agrees(compiled):
    """All variants of the row softmax; registers and spills are read too."""
    spec = load_spec(str(SPECS / "cute_softmax.py"))
    arch = parse_arch("sm_90a")
    problem = spec.problem({"rows": 4, "columns": 1024})
    variants = expand(spec, arch, problem).variants[::3]
    requests = [
        ("cute_softmax.py", variant.implementation, arch.name, spec.static(problem), variant.tunables, False)
        for variant in variants
    ]
    for variant, result in zip(variants, compiled(requests), strict=True):
        assert result.ok, result.reason
        declared = declared_footprint(spec.implementation(variant.implementation), arch, problem, variant.tunables)
        probe = Probe.of_report(result.value, declared)
        assert probe.agrees, f"{variant}: {probe.disagreements()}"
        assert probe.compiled.registers > 10
        assert probe.compiled.spill_bytes == 0


def layouts():
    spec = load_spec(str(SPECS / "cute_small.py:cute_layout"))
    return [name for name in spec.implementations[0].tunables[0].values if name != "asked_too_little"]


def test_the_trace_lays_out_shared_memory_as_the_compiler_does(compiled):
    """Partitions, alignments, branches, merged branches, an explicit launch size, several kernels."""
    names = layouts()
    requests = [
        ("cute_small.py:cute_layout", "layout", "sm_100a", Values(n=1024), Values(layout=name), False) for name in names
    ]
    for name, result in zip(names, compiled(requests), strict=True):
        assert result.ok, result.reason
        probe = Probe.of_report(result.value)
        assert probe.agrees, f"{name}: {probe.disagreements()}"
        assert probe.traced.smem_bytes is not None


def test_a_launch_with_too_little_is_refused(compiled):
    """Upstream prints a warning at run time and launches; here it is an error at the trace, with both numbers."""
    values = Values(layout="asked_too_little")
    (result,) = compiled([("cute_small.py:cute_layout", "layout", "sm_90a", Values(n=1024), values, False)])
    assert result.status is Status.TRACE_ERROR
    assert "is launched with smem 5000 B but allocates 6000 B" in result.reason


def test_a_trace_alone(compiled, tmp_path):
    """A kernel that declares nothing is probed without a back end, on a machine without a GPU."""
    values = Values(layout="growing")
    (result,) = compiled([("cute_small.py:cute_layout", "layout", "sm_90a", Values(n=1024), values, True)])
    assert result.ok
    assert result.phase == "trace"
    assert Footprint(**result.value["traced"]).smem_bytes == 2056
    assert Footprint(**result.value["compiled"]) == Footprint()
    assert result.value["files"] == {}
