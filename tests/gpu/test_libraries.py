"""The libraries that `fmha` plugs in, on the GPU: right where their rules let them, and racing with our own kernels.

Each problem is verified as a sweep does it, in the measuring process: the spec's own draws, NaN past every length,
two launches, the edges of each size. A variant that its library refuses to launch is printed; a wrong one fails.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tunekit
from tunekit.arch import parse_arch
from tunekit.compiling import Compiler, compile_limits, units
from tunekit.environment import environment
from tunekit.jobs import Pool
from tunekit.measure import MeasuringWorker, RunJob
from tunekit.model import Level, Values, Variant
from tunekit.settings import Settings
from tunekit.space import default_variants, expand
from tunekit.spec import load_spec
from tunekit.spec.inputs import draw
from tunekit.spec.packages import absence
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.sweep import SweepOptions, sweep
from tunekit.trials import Stage, Status

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SPEC = load_spec("fmha")
ARCH = parse_arch(environment().arch or "sm_90a")
LIBRARIES = [i.name for i in SPEC.implementations if i.is_library and i.unsupported(ARCH) is None]
TRIED = 1
"""Variants besides the default that are drawn for each problem; flash-attn-4 compiles each for seconds."""

GQA = {"heads": 16, "kv_heads": 4, "batch": 2, "head_dim": 128}
MHA = {"heads": 8, "kv_heads": 8, "batch": 2, "head_dim": 128}
MQA = {"heads": 128, "kv_heads": 1, "batch": 8, "head_dim": 128}
WINDOW = {"mask": "window", "window_left": 127, "window_right": 0}
CAUSAL = {"mask": "causal", "t": 512, "s_k": 512}
PROBLEMS: dict[str, dict[str, Any]] = {
    "decode": {**MQA, "t": 1, "s_k": 1152},
    "decode 64": {**MQA, "t": 1, "s_k": 640, "head_dim": 64},
    "decode 256": {**MQA, "t": 1, "s_k": 8192, "head_dim": 256},
    "decode 512": {**MQA, "t": 1, "s_k": 1152, "head_dim": 512, "kv_shared": True},
    "several tokens": {**GQA, "t": 4, "s_k": 1000},
    "prefill": {**MHA, "t": 512, "s_k": 777},
    "prefill 64": {**MHA, "t": 512, "s_k": 512, "head_dim": 64, "dtype": "float16"},
    "prefill 256": {**MHA, "t": 300, "s_k": 512, "head_dim": 256},
    "causal": {**MHA, **CAUSAL},
    "causal, grouped": {**GQA, **CAUSAL, "head_dim": 64},
    "causal, more queries than keys": {**MHA, "mask": "causal", "t": 300, "s_k": 100},
    "causal, top left": {**MHA, **CAUSAL, "mask": "causal_top_left"},
    "window": {**GQA, **WINDOW, "t": 300, "s_k": 700},
    "lse": {**GQA, "t": 300, "s_k": 700, "return_lse": True},
    "sink": {**GQA, **WINDOW, "t": 300, "s_k": 700, "has_sink": True},
    "narrow V": {**GQA, "t": 64, "s_k": 700, "head_dim_v": 64},
    "shared": {**GQA, "t": 64, "s_k": 700, "kv_shared": True, "head_dim_v": 64},
    "packed": {**GQA, **CAUSAL, "varlen": True, "return_lse": True},
    "paged": {**GQA, "t": 4, "s_k": 640, "page": 64, "has_lengths": True, "batch": 4},
    "paged, large": {**GQA, "t": 1, "s_k": 2048, "page": 256, "has_lengths": True, "batch": 4},
    "paged and packed": {**GQA, **CAUSAL, "varlen": True, "page": 64, "has_lengths": True, "batch": 4},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module")
def compiler(cache: Path) -> Iterator[Compiler]:
    settings = Settings(database=cache / "tunekit.db", artifacts=cache / "artifacts")
    with Pool(workers=1, warm=("library",), limits=compile_limits(SPEC, settings)) as pool:
        yield Compiler(pool, ArtifactStore(settings.artifacts), None, environment())


@pytest.fixture(scope="module")
def worker() -> Iterator[MeasuringWorker]:
    with MeasuringWorker(0) as measuring:
        yield measuring


def installed(implementation: str) -> None:
    absent = absence(SPEC.implementation(implementation))
    if absent:
        pytest.skip(absent)


def tried(implementation: str, problem: Values) -> list[Variant]:
    """The default of a library for a problem, first, and some of its other variants; none where it offers none."""
    found = list(expand(SPEC, ARCH, problem, implementation).variants)
    first = [v for v in default_variants(SPEC, ARCH, problem) if v.implementation == implementation]
    others = [v for v in found if v not in first]
    return first + random.Random(str(problem)).sample(others, min(TRIED, len(others)))


@pytest.mark.parametrize("implementation", LIBRARIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_library_agrees_with_the_oracle(
    name: str, implementation: str, compiler: Compiler, worker: MeasuringWorker
) -> None:
    installed(implementation)
    problem = SPEC.problem(PROBLEMS[name])
    variants = tried(implementation, problem)
    if not variants:
        pytest.skip(expand(SPEC, ARCH, problem, implementation).blame())
    statuses: dict[str, str] = {}
    for unit, compiled in compiler.compile(units(SPEC, "fmha", problem, variants)):
        assert compiled.ok, compiled.reason
        artifact = compiler.artifacts.get(unit.key)
        assert artifact is not None
        job = RunJob("fmha", problem, unit.variant, str(compiler.artifacts.path(artifact)), artifact.symbol)
        outcome = worker.verify(job, seeds=1)
        statuses[unit.variant.id] = str(outcome.status)
        print(f"\n{name}: {unit.variant}: {outcome.status} {outcome.reason[:300]} {outcome.facts}")
    refused = {id for id, status in statuses.items() if status == Status.LAUNCH_ERROR}
    assert {status for id, status in statuses.items() if id not in refused} <= {"ok"}, statuses
    assert variants[0].id not in refused, "the library's default can't be launched"


@pytest.mark.parametrize(
    "given",
    [{**MQA, "t": 1, "s_k": 1152}, {"heads": 16, "kv_heads": 16, "batch": 2, "t": 2048, "s_k": 2048, "head_dim": 128}],
    ids=["decode", "prefill"],
)
def test_a_sweep_races_them_with_our_kernels(given: dict[str, Any], cache: Path) -> None:
    """Own default, each library's variants: all are measured, the fastest wins and is served with the right result."""
    problem = SPEC.problem(given)
    own = default_variants(SPEC, ARCH, problem)[0]
    wanted = [own, *(v for name in LIBRARIES for v in tried(name, problem) if not absence(SPEC.implementation(name)))]
    settings = Settings(database=cache / "race.db", artifacts=cache / "artifacts")
    options = SweepOptions(
        arch=ARCH.name, variants=tuple(dict.fromkeys(v.id for v in wanted)), verify="gpu", cases="problem"
    )
    report = sweep("fmha", [given], options, settings, lambda event: None)
    (rows,) = [one.rows for one in report.problems]
    (winner,) = [one.winner for one in report.problems]
    for row in sorted(rows, key=lambda row: row.median_us or 1e9):
        print(f"\n{row.median_us or 0:10.2f} us  {row.status:<14} {row.variant} {row.reason[:200]}")
    assert winner is not None
    print(f"\nwinner: {winner.variant} {winner.library} {winner.median_us:.2f} us, {winner.margin}")
    measured = {row.variant.implementation for row in rows if row.median_us}
    assert own.implementation in measured and len(measured) > 1
    with Store.open(settings.database) as store:
        finals = [
            t
            for t in store.trials(stage=Stage.MEASURE, problem=problem)
            if t.protocol.startswith("final") and t.outcome.ok
        ]
    medians = {t.variant.id: sorted(t.outcome.samples_us)[len(t.outcome.samples_us) // 2] for t in finals}
    assert winner.median_us <= 1.02 * min(medians.values()) or winner.tied
    kernel = tunekit.load("fmha", database=settings.database, artifacts=settings.artifacts, strict=True)
    inputs = draw(SPEC, problem, 7, torch.device("cuda"))
    choice = kernel.choice(**inputs)
    assert choice.level is Level.EXACT and choice.variant == winner.variant
    o = kernel(**inputs).double()
    expected = SPEC.reference(problem, {**inputs, "scale": problem.head_dim**-0.5})["o"]
    assert float((o - expected).norm() / expected.norm()) <= 3e-3


@pytest.mark.parametrize("implementation", LIBRARIES)
def test_a_served_library_can_be_captured(implementation: str, cache: Path) -> None:
    """After its first call, a graph holds the calls of a library as those of a kernel."""
    installed(implementation)
    given = {**MHA, "t": 256, "s_k": 256}
    options = SweepOptions(
        arch=ARCH.name,
        implementation=implementation,
        verify="gpu",
        cases="problem",
        variants=(tried(implementation, SPEC.problem(given))[0].id,),
    )
    settings = Settings(database=cache / f"{implementation}.db", artifacts=cache / "artifacts")
    report = sweep("fmha", [given], options, settings, lambda event: None)
    winner = report.problems[0].winner
    assert winner is not None, report.problems[0].why_no_winner
    assert "cuda_graph" in winner.protocol
    kernel = tunekit.load("fmha", database=settings.database, artifacts=settings.artifacts, strict=True)
    inputs = draw(SPEC, SPEC.problem(given), 0, torch.device("cuda"))
    o = torch.empty_like(inputs["q"])
    kernel(**inputs, o=o)
    wanted = o.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(**inputs, o=o)
    o.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, wanted)
