"""The attention kernels against the float64 oracle, executed on the GPU.

The grid: every head_dim, both `normalize`, both `smem_p`, MQA 64 and 128 over 1, MHA 8 over 8 and GQA 32 over 8, for
every T and s_k, ragged ones too. The features: every flag of the problem alone and in company, on every head_dim, by
variants drawn from the whole space. Inputs are the spec's own draws (empty sequences, lists without entries, NaN where
nothing may be read), outputs lie poisoned between guard bands, and the spec's tolerances decide. Each test prints its
worst figures.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tunekit.arch import parse_arch
from tunekit.backends.load import load_artifact
from tunekit.compiling import Unit, units
from tunekit.environment import environment
from tunekit.errors import SpecError
from tunekit.jobs import Limits, Pool, Task
from tunekit.model import Values, Variant
from tunekit.space import expand, misfit, serves
from tunekit.spec import load_spec
from tunekit.spec.inputs import draw

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tunekit.measure.inputs import Arguments  # noqa: E402 - imports torch
from tunekit.measure.verify import wrong_outputs  # noqa: E402
from tunekit.oracle.judge import Figures  # noqa: E402
from tunekit.oracle.reference import expected  # noqa: E402

pytestmark = pytest.mark.gpu

SPEC = load_spec("fmha")
ARCH = parse_arch(environment().arch or "sm_90a")
HEAD_DIMS = (64, 128, 256, 512)
HEADS = ((128, 1), (64, 1), (8, 8), (32, 8))
LENGTHS = (1, 4, 32, 128)
KEYS = (128, 256, 384, 512, 640, 1152, 1000, 1, 77)
LONG = 8192
FEATURE_VARIANTS = 2
"""Variants drawn for each feature, head_dim and implementation."""

GQA = {"heads": 32, "kv_heads": 8}
MQA = {"heads": 128, "kv_heads": 1}
FLASH = {"heads": 64, "kv_heads": 1}
MHA = {"heads": 8, "kv_heads": 8}
ODD = {"heads": 6, "kv_heads": 2}
PARTIAL = {"normalize": False}
WINDOW = {"mask": "window", "window_left": 127, "window_right": 0}
TWO = {"sources": 2, "s_k": 128}
PERSISTENT = {"schedule": "persistent"}
CLUSTER = {"merge": "cluster"}
NARROW = (64, 128, 256)


def shapes(**axes: Any) -> tuple[dict[str, int], ...]:
    """Every combination of the axes' values; an axis may have one value."""
    values = [value if isinstance(value, tuple) else (value,) for value in axes.values()]
    return tuple(dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*values))


@dataclass(frozen=True)
class Feature:
    """Flags of a problem, and the shapes that they are tried at."""

    name: str
    flags: dict[str, Any]
    shapes: tuple[dict[str, int], ...] = field(default_factory=lambda: shapes(batch=3, t=(1, 130), s_k=(77, 384, 1000)))
    only: dict[str, Any] = field(default_factory=dict)  # of the variants, those with these tunables
    head_dims: tuple[int, ...] = HEAD_DIMS

    def __str__(self) -> str:
        return self.name


FEATURES = (
    Feature("lse", {**MQA, "return_lse": True}),
    Feature("sink", {**MQA, "has_sink": True, "return_lse": True}),
    Feature("fp16", {**GQA, "dtype": "float16", "return_lse": True}),
    Feature("shared", {**FLASH, "kv_shared": True}),
    Feature("shared_partial", {**MQA, **PARTIAL, "kv_shared": True}),
    Feature("odd_ratio", {**ODD, "mask": "causal", "return_lse": True}),
    Feature("causal", {**MHA, "mask": "causal"}, shapes(batch=2, t=(1, 77, 500), s_k=(64, 500, 1000))),
    Feature("causal_partial", {**GQA, **PARTIAL, "mask": "causal"}, shapes(batch=2, t=(5, 300), s_k=(128, 300, 700))),
    Feature("causal_top_left", {**GQA, "mask": "causal_top_left"}, shapes(batch=2, t=(1, 200), s_k=(64, 333))),
    Feature("window", {**MQA, **WINDOW, "has_sink": True}, shapes(batch=2, t=(1, 130), s_k=(50, 128, 5000))),
    Feature("window_both", {**MHA, "mask": "window", "window_left": 60, "window_right": 33, "return_lse": True},
            shapes(batch=2, t=(100, 400), s_k=(50, 400, 700))),
    Feature("window_left_open", {**GQA, "mask": "window", "window_right": 5}, shapes(batch=2, t=200, s_k=(64, 450))),
    Feature("lengths", {**MQA, "has_lengths": True, "return_lse": True},
            shapes(batch=(1, 5), t=(1, 9), s_k=(128, 1000))),
    Feature("lengths_causal", {**GQA, **PARTIAL, "mask": "causal", "has_lengths": True},
            shapes(batch=5, t=(1, 150), s_k=(128, 640))),
    Feature("two", {**MQA, **TWO, "return_lse": True}, shapes(batch=2, t=1, s_k2=(64, 1024, 77))),
    Feature("two_v4", {**MQA, **TWO, "kv_shared": True, "has_sink": True, "has_lengths": True},
            shapes(batch=(1, 5), t=1, s_k2=(512, 1024))),
    Feature("two_window", {**FLASH, **TWO, **WINDOW, "has_sink": True, "return_lse": True},
            shapes(batch=2, t=(4, 128), s_k=(128, 300), s_k2=(130, 512))),
    Feature("gather", {**MQA, "gather": True, "return_lse": True}, shapes(batch=3, t=(1, 3), s_k=700, top_k=(64, 500))),
    Feature("gather_v4", {**MQA, **TWO, "gather": True, "kv_shared": True, "has_sink": True, "has_lengths": True},
            shapes(batch=(1, 4), t=(1, 2), s_k2=3000, top_k=(512, 1024))),
    Feature("gather_flash", {**FLASH, **TWO, **WINDOW, "gather": True, "kv_shared": True, "has_sink": True},
            shapes(batch=2, t=(4, 33), s_k=200, s_k2=1500, top_k=512)),
    Feature("paged_64", {**MQA, "page": 64, "has_lengths": True, "return_lse": True},
            shapes(batch=5, t=(1, 7), s_k=(128, 1000))),
    Feature("paged_128", {**GQA, "page": 128, "has_lengths": True, "mask": "causal"},
            shapes(batch=5, t=(1, 200), s_k=(256, 900))),
    Feature("varlen", {**GQA, "varlen": True, "return_lse": True}, shapes(batch=5, t=(64, 333), s_k=(128, 700))),
    Feature("varlen_causal", {**MHA, "varlen": True, "mask": "causal"}, shapes(batch=5, t=300, s_k=300)),
    Feature("varlen_partial", {**MQA, **PARTIAL, "varlen": True, **WINDOW}, shapes(batch=4, t=5, s_k=(128, 700))),
    Feature("varlen_paged", {**GQA, "varlen": True, "page": 64, "has_lengths": True, "mask": "causal"},
            shapes(batch=5, t=150, s_k=400)),
    Feature("persistent", {**MHA, "return_lse": True}, shapes(batch=8, t=500, s_k=(77, 1000)), PERSISTENT, NARROW),
    Feature("persistent_causal", {**GQA, "mask": "causal"}, shapes(batch=5, t=200, s_k=(200, 700)), PERSISTENT, NARROW),
    Feature("cluster", {**MQA, "has_lengths": True, "has_sink": True, "return_lse": True},
            shapes(batch=(1, 5), t=(1, 3), s_k=(128, 1000)), CLUSTER),
    Feature("cluster_partial", {**ODD, **PARTIAL, "mask": "causal"}, only=CLUSTER),
    Feature("cluster_varlen", {**GQA, "varlen": True, "mask": "causal", "return_lse": True},
            shapes(batch=5, t=(64, 333), s_k=(128, 700)), CLUSTER),
    Feature("cluster_v4", {**MQA, **TWO, "gather": True, "kv_shared": True, "has_sink": True, "has_lengths": True},
            shapes(batch=(1, 4), t=1, s_k2=3000, top_k=(64, 1024)), CLUSTER),
)  # fmt: skip


def problem(given: dict[str, Any]) -> Values:
    return SPEC.problem({"t": 1, "s_k": 1152, **given})


def fitting(p: Values) -> list[Variant]:
    """The variants of kernels that a problem may have, within the architecture's budget."""
    return [
        v
        for v in expand(SPEC, ARCH, p).variants
        if SPEC.implementation(v.implementation).backend == "cutedsl"
        and misfit(SPEC.implementation(v.implementation), ARCH, p, v.tunables) is None
    ]


def grid_variant(head_dim: int, normalize: bool, smem_p: bool, heads: tuple[int, int]) -> tuple[Values, Variant]:
    """The variant with this `smem_p` that has the most stages, as the deepest rings are the hardest to get right."""
    p = problem({"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "normalize": normalize})
    found = [v for v in fitting(p) if v.tunables.get("smem_p") is smem_p]
    return p, max(found, key=lambda v: (v.tunables["kv_stage"], v.tunables["pv_n_tile"]))


def feature_variants(feature: Feature, head_dim: int) -> tuple[Values, list[Variant]]:
    """Some variants of each implementation that serve all of a feature's shapes."""
    points = [problem({**feature.flags, "head_dim": head_dim, **shape}) for shape in feature.shapes]
    by_implementation: dict[str, list[Variant]] = {}
    for v in fitting(points[0]):
        wanted = all(v.tunables.get(name) == value for name, value in feature.only.items())
        if wanted and all(serves(SPEC, v, point) is None for point in points):
            by_implementation.setdefault(v.implementation, []).append(v)
    chosen = []
    for name, variants in sorted(by_implementation.items()):
        some = random.Random(f"{feature} {head_dim} {name}")
        chosen += some.sample(variants, min(FEATURE_VARIANTS, len(variants)))
    return points[0], chosen


GRID = tuple(itertools.product(HEAD_DIMS, (True, False), (True, False), HEADS))
FEATURE_CASES = tuple((feature, head_dim) for feature in FEATURES for head_dim in feature.head_dims)


def selected(session: pytest.Session) -> Iterator[tuple[Values, list[Variant]]]:
    """The problems and variants of the tests that this run selected: `-k` then compiles no more than it runs."""
    for item in session.items:
        given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path != Path(__file__):
            continue
        if "feature" in given:
            yield feature_variants(given["feature"], given["head_dim"])
        elif "smem_p" in given:
            p, variant = grid_variant(*(given[name] for name in ("head_dim", "normalize", "smem_p", "heads")))
            yield p, [variant]


@pytest.fixture(scope="module")
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Values, Variant], Any]]:
    """The selected cases' kernels, compiled side by side in isolation and loaded through tvm_ffi."""
    root = tmp_path_factory.mktemp("fmha")
    wanted: dict[str, Unit] = {}
    for p, variants in selected(request.session):
        for unit in units(SPEC, "fmha", p, variants):
            wanted[unit.key] = unit
    tasks = []
    for unit in wanted.values():
        (root / unit.key).mkdir()
        tasks.append(Task(id=unit.key, payload=unit.request(root / unit.key).to_payload()))
    limits = Limits(trace_s=60, backend_s=300, memory_bytes=8 * 2**30)
    with Pool(workers=None, warm=("cutedsl",), limits=limits) as pool:
        results = {result.id: result for result in pool.run(tasks)}

    def kernel(p: Values, variant: Variant) -> Any:
        unit = units(SPEC, "fmha", p, [variant])[0]
        result = results[unit.key]
        assert result.value is not None and result.value["status"] == "ok", (
            f"{variant} {p}: {result.reason or result.value}"
        )
        return load_artifact(Path(result.value["files"]["so"]), unit.symbol)

    yield kernel


def check(kernel: Any, variant: Variant, p: Values, seed: int, figures: Figures) -> None:
    """One call against the oracle, and the same call again: bit for bit the same."""
    device = torch.device("cuda")
    inputs = draw(SPEC, p, seed, device)
    arguments = Arguments(SPEC, p, inputs, device, variant=variant)
    wanted = expected(SPEC, p, inputs).to(device)
    first: dict[str, Any] = {}
    for launch in (1, 2):
        arguments.reset(launch)
        kernel(*arguments.call)
        torch.cuda.synchronize()
        wrong = arguments.damage() or wrong_outputs(SPEC, p, arguments, wanted, launch, figures)
        assert not wrong, f"{variant}\n{p}\nlaunch {launch}: {wrong}"
        for name, tensor in arguments.outputs().items():
            now = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).clone()
            assert launch == 1 or torch.equal(first[name], now), f"{variant}\n{p}: {name} differs between two launches"
            first[name] = now


def tell(figures: Figures, cases: int) -> None:
    print(f" {figures.values(cases)}", end="")


@pytest.mark.parametrize(("head_dim", "normalize", "smem_p", "heads"), GRID)
def test_every_shape_of_the_grid_matches_the_oracle(
    kernels: Callable[[Values, Variant], Any], head_dim: int, normalize: bool, smem_p: bool, heads: tuple[int, int]
) -> None:
    p, variant = grid_variant(head_dim, normalize, smem_p, heads)
    kernel, figures = kernels(p, variant), Figures()
    given = {axis: p[axis] for axis in ("heads", "kv_heads", "head_dim", "normalize")}
    grid = [*itertools.product(LENGTHS, KEYS), (1, LONG), (32, LONG)]
    for seed, (t, s_k) in enumerate(grid):
        check(kernel, variant, problem({**given, "batch": 2, "t": t, "s_k": s_k}), seed, figures)
    tell(figures, len(grid))


@pytest.mark.parametrize(("feature", "head_dim"), FEATURE_CASES, ids=lambda value: str(value))
def test_every_flag_matches_the_oracle(
    kernels: Callable[[Values, Variant], Any], feature: Feature, head_dim: int
) -> None:
    first, variants = feature_variants(feature, head_dim)
    assert variants, f"no variant has {feature} at head_dim {head_dim}"
    figures = Figures()
    for variant in variants:
        kernel = kernels(first, variant)
        for seed, shape in enumerate(feature.shapes):
            check(kernel, variant, problem({**feature.flags, "head_dim": head_dim, **shape}), seed, figures)
    tell(figures, len(variants) * len(feature.shapes))


def test_a_problem_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(SpecError, match="sink_final"):
        problem({**MQA, "head_dim": 64, "has_sink": True, "normalize": False})
