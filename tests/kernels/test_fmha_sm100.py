"""Every flag of the Blackwell attention kernel, executed by the simulator: right results and no fault, under --strict.

The inputs are awkward by themselves (kernel_specs/attention/inputs.py): sequences without keys, ragged ones, NaN in
every row of K and V that no query may see. The slow tests cross the flags with head dims, `smem_p` and `normalize`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_specs.kernels.fmha_sm100_space import BASE
from tests.kernels.simulated import SPEC, Run, quick_but, simulating
from tests.kernels.test_fmha import declared, fitting, run
from tunekit.arch import ARCHES
from tunekit.compiling import units
from tunekit.model import Values, Variant
from tunekit.probe import Probe
from tunekit.space import expand

ARCH, KERNEL = "sm_100a", "sm100"
HEAD_DIMS = (64, 128, 256, 512)
GQA = {"heads": 2, "kv_heads": 1}
MQA = {"heads": 64, "kv_heads": 1, "t": 1}
ODD = {"heads": 6, "kv_heads": 2}  # three heads a KV head: nothing packs into 64 or 128 rows
WINDOW = {"mask": "window", "window_left": 70, "window_right": 3}
TWO = {"sources": 2, "s_k2": 90}
SPILL_BYTES = 16  # a few words saved around a loop cost nothing in it
WIDE = {"m_tile": 64, "kv_tile": 64, "smem_p": True, "pv_n_tile": 512}  # head_dim 512 in one CTA
SPLIT = {"tma_o": False}

# Together they have every flag and every way to cover a tile.
COMBINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two sources of lengths, window, sink, P in tensor memory": (
        {**MQA, **TWO, **WINDOW, "batch": 4, "t": 2, "s_k": 100, "head_dim": 64, "has_lengths": True, "has_sink": True}
        | {"return_lse": True},
        {"pv_n_tile": 64, "kv_tile": 64, "rescale_log2": 8},
    ),
    "packed sequences, causal, two row groups, fp16": (
        {**GQA, "batch": 3, "t": 150, "s_k": 150, "head_dim": 64, "varlen": True, "mask": "causal"}
        | {"dtype": "float16", "return_lse": True},
        {"pv_n_tile": 64, "kv_tile": 64, "row_groups": 2, "s_stage": 1},
    ),
    "a window and a list over shared KV of 512 columns": (
        {**MQA, "batch": 2, "s_k": 150, "s_k2": 200, "sources": 2, "gather": True, "top_k": 100, "head_dim": 512}
        | {"kv_shared": True, "mask": "window", "window_left": 127, "window_right": 0, "has_lengths": True}
        | {"has_sink": True},
        WIDE,
    ),
    "lengths of shared KV": (
        {**GQA, "batch": 2, "t": 1, "s_k": 100, "head_dim": 64, "kv_shared": True, "has_lengths": True},
        {"pv_n_tile": 64, "kv_tile": 64},
    ),
    "pages, a split of the keys, 64 rows": (
        {**ODD, "batch": 2, "t": 20, "s_k": 200, "head_dim": 128, "page": 64, "has_lengths": True, "normalize": False},
        {"m_tile": 64, "kv_tile": 64, "smem_p": True, "pv_n_tile": 128, "num_splits": 2, **SPLIT},
    ),
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with simulating(ARCH, KERNEL, tmp_path_factory.mktemp("sm100")) as run:
        yield run


def check(simulated: Run, problem: dict[str, Any], tunables: dict[str, Any], schedules: int = 1, **more: Any) -> None:
    outcome = simulated(problem, {**BASE, **tunables}, schedules=schedules, strict=True, **more)
    assert outcome.ok, outcome.reason
    assert (outcome.facts.get("spill_bytes") or 0) <= SPILL_BYTES


LONGER = {
    "pages, a split of the keys, 64 rows",
    "packed sequences, causal, two row groups, fp16",
}


@pytest.mark.parametrize("name", quick_but(COMBINED, LONGER))
def test_flags_in_combination(simulated: Run, name: str) -> None:
    check(simulated, *COMBINED[name], schedules=2)


# One flag or two at a time, on shapes that every head dim can afford.
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {**GQA, "t": 5, "s_k": 200},
    "causal": {**GQA, "t": 100, "s_k": 100, "mask": "causal", "return_lse": True},
    "causal with more queries than keys": {**GQA, "t": 100, "s_k": 70, "mask": "causal", "return_lse": True},
    "causal, top-left": {**GQA, "t": 70, "s_k": 150, "mask": "causal_top_left"},
    "window": {**GQA, "t": 70, "s_k": 200, "mask": "window", "window_left": 33, "window_right": 0},
    "lengths": {**GQA, "batch": 4, "t": 3, "s_k": 150, "has_lengths": True, "return_lse": True},
    "two sources": {**GQA, **TWO, "batch": 4, "t": 3, "s_k": 100, "has_lengths": True},
    "list": {**MQA, "t": 2, "s_k": 150, "gather": True, "top_k": 100, "return_lse": True},
    "pages": {**GQA, "batch": 4, "t": 3, "s_k": 256, "page": 128, "has_lengths": True, "mask": "causal"},
    "packed": {**GQA, "batch": 3, "t": 70, "s_k": 150, "varlen": True, "mask": "causal", "return_lse": True},
    "shared KV": {**MQA, "s_k": 150, "kv_shared": True},
    "lengths of shared KV": {**MQA, "batch": 4, "t": 2, "s_k": 150, "kv_shared": True, "has_lengths": True},
    "fp16": {**ODD, "t": 5, "s_k": 150, "dtype": "float16"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "128 rows, P in tensor memory": {"kv_tile": 64, "pv_n_tile": 64},
    "128 rows, P in shared memory": {"kv_tile": 64, "pv_n_tile": 64, "smem_p": True},
    "64 rows": {"kv_tile": 64, "m_tile": 64, "smem_p": True, "pv_n_tile": 128},
}


def stages(problem: dict[str, Any]) -> int:
    """As many as fit beside Q."""
    return 1 if problem["head_dim"] == 512 else 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("flag", "head_dim", "shape"), list(itertools.product(FLAGS, HEAD_DIMS, SHAPES)))
def test_each_flag_at_each_head_dim(simulated: Run, flag: str, head_dim: int, shape: str) -> None:
    if SHAPES[shape]["pv_n_tile"] > head_dim:
        pytest.skip("64 rows need 128 columns of V")
    problem = {**FLAGS[flag], "head_dim": head_dim}
    check(simulated, problem, {**SHAPES[shape], "kv_stage": stages(problem)}, schedules=5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("head_dim", "smem_p", "rescale_log2"), list(itertools.product(HEAD_DIMS, (False, True), (0, 8)))
)
def test_parts_to_merge(simulated: Run, head_dim: int, smem_p: bool, rescale_log2: int) -> None:
    """`normalize` off: O relative to the row's maximum, also where O was rescaled late."""
    problem = {**GQA, "t": 40, "s_k": 200, "head_dim": head_dim, "normalize": False}
    tunables = {"kv_tile": 64, "pv_n_tile": 64, "kv_stage": stages(problem), "smem_p": smem_p}
    check(simulated, problem, {**tunables, "rescale_log2": rescale_log2}, schedules=5)


TILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "K in parts": ({**MQA, "s_k": 200, "head_dim": 512}, {"kv_tile": 64, "kv_stage": 2, "k_sub": 2}),
    "one shared stage": (
        {**MQA, "s_k": 200, "head_dim": 512, "kv_shared": True},
        {"kv_tile": 64, "pv_n_tile": 256, "kv_stage": 1},
    ),
    "two row groups of 128 columns": ({**GQA, "t": 140, "s_k": 300, "head_dim": 128}, {"row_groups": 2, "s_stage": 1}),
    "two row groups, P in shared memory": (
        {**GQA, "t": 140, "s_k": 200, "head_dim": 64, "mask": "causal"},
        {"row_groups": 2, "s_stage": 1, "smem_p": True, "pv_n_tile": 64},
    ),
    "P in the columns of S": (
        {**MQA, "s_k": 300, "head_dim": 256, "head_dim_v": 256},
        {"kv_stage": 1, "pv_n_tile": 256, "s_stage": 2},
    ),
    "one score tile": ({**MQA, "s_k": 300, "head_dim": 256}, {"kv_stage": 1, "pv_n_tile": 256, "s_stage": 1}),
    "O wider than Q": (
        {**GQA, "t": 9, "s_k": 100, "head_dim": 64, "head_dim_v": 256},
        {"pv_n_tile": 256, "kv_tile": 64},
    ),
    "O from registers": ({**GQA, "t": 70, "s_k": 100, "head_dim": 64}, {"pv_n_tile": 64, "tma_o": False}),
    "four stages": ({**GQA, "t": 9, "s_k": 700, "head_dim": 64}, {"pv_n_tile": 64, "kv_tile": 64, "kv_stage": 4}),
    "splits without a tile": (
        {**GQA, "batch": 4, "t": 3, "s_k": 520, "head_dim": 64, "has_lengths": True, "has_sink": True},
        {"pv_n_tile": 64, "kv_tile": 64, "num_splits": 8, **SPLIT},
    ),
    "a list after many tiles": (
        {**MQA, "s_k": 500, "s_k2": 200, "sources": 2, "gather": True, "top_k": 140, "head_dim": 64},
        {"pv_n_tile": 64, "kv_tile": 64},
    ),
    "a split list": (
        {**MQA, "s_k": 300, "gather": True, "top_k": 200, "head_dim": 64},
        {"pv_n_tile": 64, "kv_tile": 64, "num_splits": 2, **SPLIT},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TILES)
def test_each_way_to_cover_a_tile(simulated: Run, name: str) -> None:
    check(simulated, *TILES[name], schedules=5)


def test_a_round_trip_through_tensor_memory_changes_no_bit(tmp_path: Path) -> None:
    """Load and store of the O rescale, tiled over one tensor, on the kernel's own ThreadColumns."""
    from tunekit.jobs import Limits, Pool, compile_task
    from tunekit.simulate.client import Simulator
    from tunekit.simulate.job import SimulationJob
    from tunekit.spec import load_spec

    reference = f"{Path(__file__).with_name('sm100_round_trip.py')}:round_trip"
    spec = load_spec(reference)
    problem = spec.problem({})
    (variant,) = [v for v in expand(spec, ARCHES[ARCH], problem).variants if v.tunables.times == 3]
    unit = units(spec, reference, problem, [variant])[0]
    with Pool(workers=1, warm=("cutedsl",), limits=Limits(60.0, 120.0, 8 * 2**30)) as pool:
        (result,) = pool.run([compile_task(unit.request(tmp_path / "made", trace_only=False), id=unit.key)])
    assert result.ok and result.value is not None, result.reason
    files = result.value["files"]
    job = SimulationJob(reference, problem, variant, files["so"], files["ptx"], unit.symbol, 5, 0, "all", jobs=1)
    with Simulator() as simulator:  # a process of its own: this one may have loaded the CuTeDSL runtime
        simulation = simulator.simulate(job)
    assert simulation.outcome().ok, simulation.outcome().reason
    assert simulation.figures["max_abs_error"] == 0.0
    text = Path(files["ptx"]).read_text()
    assert text.count("tcgen05.ld") == 4 * 2 and text.count("tcgen05.st") == 4 * 2  # 64 columns in two copies each


@pytest.mark.parametrize(
    ("kv_tile", "head_dim", "pv_n_tile", "m_tile"),
    [(64, 512, 512, 64), (128, 64, 64, 128), (64, 128, 128, 64), (128, 256, 256, 128)],
)
def test_a_tile_of_k_is_a_tile_of_v(kv_tile: int, head_dim: int, pv_n_tile: int, m_tile: int) -> None:
    """Key n, column c lies at the same byte for TMA, as K-major B of QK and as MN-major B of PV: so V may be K."""
    import cutlass.cute as cute

    from kernel_specs.kernels import sm100_views as views
    from kernel_specs.kernels.sm100_plan import Plan

    problem = SPEC.static(SPEC.problem({**MQA, "t": 1, "s_k": 128, "head_dim": head_dim, "kv_shared": True}))
    tunables = Values({**BASE, "kv_tile": kv_tile, "pv_n_tile": pv_n_tile, "m_tile": m_tile, "smem_p": m_tile == 64})
    plan = Plan(problem, tunables)
    found: dict[str, list[Any]] = {}

    @cute.jit
    def layouts() -> None:
        products = views.Products(plan)
        for name, layout in (("k", products.k_layout()), ("v", products.v_layout())):
            found[name] = [_flat(cute.select(layout, mode=[i])) for i in range(3)]

    cute.compile(layouts)
    blocks = kv_tile * 64
    for key, column in itertools.product(range(0, kv_tile, 7), range(0, pv_n_tile, 9)):
        by_tma = column // 64 * blocks + key * 64 + column % 64
        rows, columns = kv_tile // plan.halves, pv_n_tile // plan.halves
        assert by_tma == _at(found["k"], (key % rows + column % 16 * rows, key // rows, column // 16))
        assert by_tma == _at(found["v"], (column % columns + key % 16 * columns, column // columns, key // 16))


def _flat(layout: Any) -> tuple[tuple[int, int], ...]:
    """(extent, stride) of each mode, leftmost fastest."""
    import cutlass.cute as cute

    flat = cute.flatten(layout)
    shape, stride = flat.shape, flat.stride
    return tuple(zip(shape, stride, strict=True)) if isinstance(shape, tuple) else ((shape, stride),)


def _at(modes: Any, coordinate: tuple[int, ...]) -> int:
    """The element's place: each coordinate is taken apart over its mode's extents."""
    place = 0
    for mode, index in zip(modes, coordinate, strict=False):
        for extent, stride in mode:
            place += index % extent * stride
            index //= extent
    return place


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flag", FLAGS)
def test_traced_footprints_of_every_flag_are_the_declared_ones(flag: str, tmp_path: Path) -> None:
    """A few variants of each flag, spread over the space; test_all_footprints.py has those of a plain problem."""
    problem = SPEC.problem({**FLAGS[flag], "head_dim": 128})
    variants = [v for v in fitting(ARCH, problem) if v.implementation == KERNEL]
    some: list[Variant] = variants[:: max(1, len(variants) // 6)]
    wanted = units(SPEC, "fmha", problem, some)
    results = run(wanted, tmp_path, trace_only=True)
    for unit in wanted:
        result = results[unit.key]
        assert result.ok and result.value is not None, f"{unit.variant}: {result.reason}"
        assert Probe.of_report(result.value, declared(unit.variant, problem)).disagreements() == [], unit.variant
