"""Split KV, executed by the simulator: the two merges alone, and in the Hopper attention kernel."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kernel_specs.kernels.attention import workspace as layout
from tests.kernels.simulated import Run, simulating
from tests.kernels.test_fmha import SPEC, declared, run
from tunekit.arch import ARCHES
from tunekit.compiling import units
from tunekit.jobs import Limits, Pool, compile_task
from tunekit.model import Values, Variant
from tunekit.probe import Probe
from tunekit.simulate.client import Simulator
from tunekit.simulate.job import SimulationJob
from tunekit.space import default_variant, expand, misfit, workspace
from tunekit.spec import load_spec
from tunekit.trials import Status

pytest.importorskip("cutlass")
pytest.importorskip("torch")

ARCH = ARCHES["sm_90a"]
SPECS = Path(__file__).resolve().parent.parent / "specs"
SCHEDULES = 3


def first_alone_is_quick(values: Iterable[Any]) -> list[Any]:
    """Parameters of which all but the first are slow: each compiles a kernel."""
    first, *others = ((v,) if isinstance(v, str) else v for v in values)
    return [pytest.param(*first), *(pytest.param(*v, marks=pytest.mark.slow) for v in others)]


def fitting(problem: Values) -> list[Variant]:
    return [
        v
        for v in expand(SPEC, ARCH, problem, "sm90_split").variants
        if misfit(SPEC.implementation("sm90_split"), ARCH, problem, v.tunables) is None
    ]


def problem(**more: Any) -> Values:
    return SPEC.problem({"batch": 2, "heads": 16, "kv_heads": 1, "t": 1, "s_k": 200, "head_dim": 64, **more})


# ---- the space -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "normalize"), [(64, True), (256, False), (512, True)])
def test_a_cluster_is_declared_or_a_workspace(head_dim: int, normalize: bool) -> None:
    p = problem(head_dim=head_dim, normalize=normalize)
    variants = fitting(p)
    assert {v.tunables.merge for v in variants} == {"cluster", "kernel"}
    for variant in variants:
        t, cluster = variant.tunables, declared(variant, p).cluster
        elements = workspace(SPEC, variant, p)
        if t.merge == "cluster":
            assert (cluster, elements) == (t.num_splits, 0) and t.num_splits <= 16
        else:
            assert (cluster, elements) == (1, t.num_splits * 2 * 16 * (head_dim + 2)) and t.num_splits >= 4


def test_splits_are_no_default() -> None:
    """Whether a problem is decode is known at run time: unsplit variants serve what nobody has tuned."""
    for head_dim in (64, 128, 256, 512):
        chosen = default_variant(SPEC, ARCH, problem(head_dim=head_dim))
        assert chosen is not None and chosen.implementation == "sm90"
        implementation, allowed = SPEC.implementation("sm90_split"), fitting(problem(head_dim=head_dim))
        assert any(Values(tunables) in [v.tunables for v in allowed] for tunables in implementation.defaults)


def test_statistics_follow_the_outputs() -> None:
    rows, splits, columns = 6, 3, 64
    assert layout.statistics_at(rows, splits, columns) == rows * splits * columns
    assert layout.elements(rows, splits, columns) == rows * splits * (columns + 2)


@pytest.mark.slow
def test_traced_footprints_equal_the_declared_ones(tmp_path: Path) -> None:
    """A sample over head dims and merges; the traced cluster is the splits'."""
    found = [(v, p) for d in (64, 256) for p in [problem(head_dim=d)] for v in fitting(p)]
    chosen = random.Random(7).sample(found, 4)
    wanted = [(units(SPEC, "fmha", p, [v])[0], p) for v, p in chosen]
    results = run([unit for unit, _ in wanted], tmp_path, trace_only=True)
    for unit, p in wanted:
        result = results[unit.key]
        assert result.ok and result.value is not None, f"{unit.variant}: {result.reason}"
        assert Probe.of_report(result.value, declared(unit.variant, p)).disagreements() == [], unit.variant


# ---- the merges alone ----------------------------------------------------------------------------------------------


def simulated(spec_name: str, given: Mapping[str, Any], root: Path, schedules: int = SCHEDULES, **tunables: Any) -> Any:
    """The outcome of a test spec's variant."""
    reference = str(SPECS / f"{spec_name}.py")
    spec = load_spec(reference)
    complete = spec.problem(given)
    variants = expand(spec, ARCH, complete).variants
    variant = next(v for v in variants if all(v.tunables[k] == x for k, x in tunables.items()))
    unit = units(spec, reference, complete, [variant])[0]
    with Pool(workers=1, limits=Limits(60.0, 120.0, 8 * 2**30)) as pool:
        (result,) = pool.run([compile_task(unit.request(root, trace_only=False), id=unit.key)])
    assert result.ok and result.value is not None, result.reason
    files = result.value["files"]
    job = SimulationJob(
        reference, complete, variant, files["so"], files["ptx"], unit.symbol, schedules, 0, "all", jobs=1
    )
    with Simulator() as simulator:  # a process of its own: this one may have loaded the CuTeDSL runtime
        return simulator.simulate(job).outcome()


COMBINED = {
    "64, over warps and shared memory, sink": {"splits": 64, "has_sink": True, "t": 1},
    "three, odd rows": {"splits": 3},
    "33, two turns of a warp, partial": {"splits": 33, "columns": 512, "normalize": False, "t": 1},
    "one split": {"splits": 1, "columns": 256},
    "8, two rows a CTA": {"splits": 8, "columns": 128, "heads": 6},
}


@pytest.mark.parametrize("name", first_alone_is_quick(COMBINED))
def test_the_merge_kernel_is_the_oracles_merge(name: str, tmp_path: Path) -> None:
    """Some ranges empty, and one row without any key: O = 0 and LSE = -inf, with and without a sink."""
    outcome = simulated("split_merge", COMBINED[name], tmp_path)
    assert outcome.status is Status.OK, outcome.reason


MERGED = [
    (64, 64, 3, True, 30), (64, 64, 3, True, -30), (64, 256, 2, True, 0), (128, 128, 8, True, 30),
    (64, 64, 3, False, 0), (128, 64, 8, False, 30), (64, 256, 2, False, 0), (128, 128, 16, False, 0),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "splits", "compact", "exponent"), first_alone_is_quick(MERGED))
def test_a_cluster_merges_in_shared_memory(
    rows: int, columns: int, splits: int, compact: bool, exponent: int, tmp_path: Path
) -> None:
    """Also an O of 1e30, which is beyond what the float16 of a compact merge holds."""
    given = {"rows": rows, "columns": columns, "splits": splits, "exponent": exponent}
    outcome = simulated("split_cluster", given, tmp_path, compact=compact)
    assert outcome.status is Status.OK, outcome.reason


@pytest.mark.parametrize("compact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_infinity_in_one_column_of_o_leaves_the_others_as_they_are(compact: bool, tmp_path: Path) -> None:
    """A compact merge scales whole rows by their largest element."""
    outcome = simulated("split_cluster", {"infinite": True}, tmp_path, compact=compact)
    assert outcome.status is Status.OK, outcome.reason


@pytest.mark.slow
def test_a_cta_that_exits_before_it_was_read_is_found(tmp_path: Path) -> None:
    """The check of the check: without the last barrier the simulator reports reads of an exited CTA."""
    outcome = simulated("split_cluster", {"splits": 3}, tmp_path, exit_barrier=False)
    assert outcome.status is not Status.OK and "exited" in outcome.reason


# ---- in the attention kernel ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with simulating("sm_90a", "sm90_split", tmp_path_factory.mktemp("split")) as runs:
        yield runs


@dataclasses.dataclass(frozen=True)
class Case:
    problem: Mapping[str, Any]
    tunables: Mapping[str, Any]
    slow: bool = True


SMALL = {"m_tile": 64, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, "kv_groups": 1, "ctas_per_sm": 1}
TWO = {"sources": 2, "s_k2": 200, "has_lengths": True, "mask": "causal", "has_sink": True, "return_lse": True, "t": 3}
SERVED = {"has_lengths": True, "has_sink": True, "return_lse": True, "batch": 3}
LISTED = {"heads": 64, "t": 2, "batch": 1, "sources": 2, "s_k2": 300, "gather": True, "top_k": 150, "return_lse": True}
MERGES = ("cluster", "kernel")


def cases() -> dict[str, Case]:
    found = {}
    for merge in MERGES:
        found |= {
            f"{merge}: more splits than tiles": Case({}, {**SMALL, "num_splits": 8}),
            f"{merge}: partial": Case({"normalize": False}, {**SMALL, "num_splits": 4}),
            f"{merge}: lengths with empty sequences, sink, LSE": Case(SERVED, {**SMALL, "num_splits": 4}, slow=False),
            f"{merge}: two sources, two KV groups": Case(TWO, {**SMALL, "kv_groups": 2, "num_splits": 4}),
            f"{merge}: two row blocks": Case({"heads": 128}, {**SMALL, "m_tile": 128, "num_splits": 4}),
            f"{merge}: slices": Case({"head_dim": 256}, {**SMALL, "num_splits": 4, "kv_stage": 1}),
            f"{merge}: plain heads, packed sequences": Case(
                {"heads": 4, "kv_heads": 4, "t": 70, "varlen": True, "mask": "causal", "return_lse": True},
                {**SMALL, "num_splits": 4},
            ),
            f"{merge}: shared KV, pages": Case(
                {"kv_shared": True, "page": 64, "has_lengths": True}, {**SMALL, "num_splits": 4}, slow=True
            ),
        }
        found[f"{merge}: a listed second source"] = Case(LISTED, {**SMALL, "num_splits": 4})
    found["cluster: three"] = Case({"s_k": 420}, {**SMALL, "num_splits": 3})
    found["cluster: 16"] = Case({"batch": 1, "s_k": 1152}, {**SMALL, "kv_stage": 1, "num_splits": 16})
    found["kernel: 64"] = Case({"batch": 1, "s_k": 700}, {**SMALL, "kv_stage": 1, "num_splits": 64})
    return found


CASES = cases()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if case.slow else n for n, case in CASES.items()]
)
def test_splits_compute_the_oracles_attention(name: str, attention: Run) -> None:
    case = CASES[name]
    merge = name.partition(":")[0]
    outcome = attention(problem(**case.problem), {**case.tunables, "merge": merge}, schedules=SCHEDULES)
    assert outcome.status is Status.OK, outcome.reason
