"""The simulator against this GPU: the same PTX with the same inputs, the same bits afterwards.

First the small kernels of tests/simulate (warp-wide instructions, ldmatrix and stmatrix, mma, wgmma), with whole
numbers as inputs: every sum is exact, so that hardware and simulator must agree to the bit. Then wgmma with normally
distributed ones, within the bounds of `BOUNDS`. Then the compiled sm_90a kernels of this project: products on wgmma
with every major and swizzle, small kernels, and attention.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_api import Gpu, driver_context
from loading import module_of

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.backends.contract import CompileRequest
from tunekit.backends.load import load_artifact
from tunekit.jobs import Limits, Pool, Task
from tunekit.model import Values
from tunekit.simulate.launch.arguments import arguments_of
from tunekit.simulate.launch.capture import capture_object
from tunekit.simulate.numbers import formats
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.run import simulate
from tunekit.spec import load_spec

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parent.parent
SPECS = TESTS / "specs"
ARCH = "sm_90a"
# |GPU - simulator| <= bound * (sum of |a b| + |c|), by the type of A. The simulator rounds once, to nearest. The
# hardware drops low bits of the aligned terms: for f16, bf16 and tf32 below single precision's last place; for fp8
# sm_90 keeps 13 bits behind the point of the largest term (measured by others, e.g. the DeepSeek-V3 report, 3.3.2,
# "about 14 bits").
BOUNDS = {"f16": 2.0**-21, "bf16": 2.0**-21, "tf32": 2.0**-21, "e4m3": 2.0**-10, "e5m2": 2.0**-10}
# Bound for attention's outputs against the simulator's: relative to the largest |o| of the head. P and O are rounded to
# bf16 (2^-9), and ex2.approx differs in the last place, which moves a rounding now and then.
ATTENTION_BOUND = 2.0**-7
# For float32 outputs: approximations of ex2 and lg2, and sums in another order of rounding.
FLOAT_BOUND = 2.0**-17


harness = module_of(TESTS / "simulate" / "conftest.py")
warp, load, mma_tests, wgmma_tests = (
    module_of(TESTS / "simulate" / f"test_sim_matrix_{area}.py") for area in ("warp", "load", "mma", "wgmma")
)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with driver_context(9, "sm_90a kernels run on") as driver:
        yield Gpu(driver)


class Both:
    """Runs a kernel in the simulator and on the GPU. `exact`: all buffers must then agree; else see `on_gpu`."""

    def __init__(self, device: Gpu) -> None:
        self.device = device
        self.exact = True
        self.on_gpu: dict[str, np.ndarray[Any, Any]] = {}

    def __call__(
        self,
        text: str,
        buffers: Mapping[str, np.ndarray[Any, Any]],
        parameters: Sequence[str | bytes],
        *,
        block: tuple[int, int, int] = (32, 1, 1),
        shared: int = 0,
        seed: int = 0,
    ) -> Any:
        ran = harness.run(text, buffers, parameters, block=block, shared=shared, seed=seed)
        assert not ran.faults
        self.on_gpu = self.device.run(text, buffers, parameters, block, shared)
        if self.exact:
            for name, simulated in ran.buffers.items():
                differ = simulated != self.on_gpu[name]
                assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.size} differ"
        return ran


@pytest.fixture
def run_ptx(gpu: Gpu) -> Both:
    return Both(gpu)


@pytest.fixture
def ptx_kernel() -> Callable[..., str]:
    def text(body: str, parameters: str = "", **more: str) -> str:
        return str(harness.kernel_text(body, parameters, **{**more, "target": ARCH}))

    return text


# The fixtures that build the kernels, and what they draw.
lanewise, matrix, memory, rows = warp.lanewise, load.matrix, load.memory, load.rows
multiply, wgmma = mma_tests.multiply, wgmma_tests.wgmma
LARGEST = {"s8": 100, "u8": 100, "s4": 7, "u4": 7}


def whole_bits(draw: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Small whole numbers as patterns of `kind`: exact in every type."""
    largest = LARGEST.get(kind, 4)
    low = 0 if kind in ("u8", "u4") else -largest
    numbers = draw.integers(low, largest + 1, shape)
    if kind == "f64":
        return numbers.astype(np.float64).view(np.uint64)
    if kind in LARGEST:
        return (numbers & (15 if kind in ("s4", "u4") else 255)).astype(np.uint8)
    return formats.encode(numbers.astype(np.float32), kind)


@pytest.fixture
def whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, types in ((mma_tests, mma_tests.TYPES), (wgmma_tests, wgmma_tests.RESULT)):
        monkeypatch.setattr(module, "random_bits", whole_bits)
        monkeypatch.setattr(
            module,
            "random_accumulators",
            lambda draw, kind, shape, types=types: draw.integers(-50, 51, shape).astype(types[kind]),
        )


test_shfl = warp.test_shfl_is_the_book_s
test_half_warps = warp.test_each_half_warp_with_a_mask_of_its_own
test_diverged_masks = warp.test_a_mask_waits_for_diverged_lanes
test_exited_lanes = warp.test_exited_lanes_are_not_waited_for
test_vote = warp.test_vote
test_match = warp.test_match
test_redux = warp.test_redux
test_elect = warp.test_elect_chooses_one_and_the_same
test_ldmatrix = load.test_ldmatrix_8x8
test_stmatrix = load.test_stmatrix_8x8
test_movmatrix = load.test_movmatrix

HOPPER_MMA = [case for case in mma_tests.CASES if "f8f6f4" not in case[-1]]


@pytest.mark.usefixtures("whole_numbers")
@pytest.mark.parametrize("case", HOPPER_MMA, ids=lambda c: "-".join(x for x in c if x))
def test_mma_exactly(multiply: Any, case: tuple[str, ...]) -> None:
    mma_tests.test_every_shape_and_type(multiply, case)


@pytest.mark.parametrize(("modifier", "expected"), [("", -(2**31) + 126), (".satfinite", 2**31 - 1)])
def test_mma_of_integers_that_overflow(multiply: Any, modifier: str, expected: int) -> None:
    mma_tests.test_integers_wrap_or_saturate(multiply, modifier, expected)


@pytest.mark.usefixtures("whole_numbers")
@pytest.mark.parametrize("swizzle", wgmma_tests.SWIZZLES, ids=lambda s: s.name)
@pytest.mark.parametrize("majors", [("k", "k"), ("mn", "k"), ("k", "mn"), ("mn", "mn")], ids="".join)
def test_wgmma_majors_and_swizzles(wgmma: Any, swizzle: Any, majors: tuple[str, str]) -> None:
    wgmma_tests.test_majors_and_swizzles(wgmma, swizzle, majors)


@pytest.mark.usefixtures("whole_numbers")
@pytest.mark.parametrize("form", wgmma_tests.FORMS, ids="-".join)
@pytest.mark.parametrize("source", ["shared", "registers"])
def test_wgmma_shapes_and_types(wgmma: Any, form: tuple[str, ...], source: str) -> None:
    wgmma_tests.test_shapes_and_types(wgmma, form, source)


@pytest.mark.usefixtures("whole_numbers")
@pytest.mark.parametrize("swizzle", wgmma_tests.SWIZZLES[1:], ids=lambda s: s.name)
def test_wgmma_with_a_base_offset(wgmma: Any, swizzle: Any) -> None:
    """A tile whose swizzle pattern starts off its boundary, as the descriptor's base offset says."""
    image, place_a, place_b, a, b = wgmma_tests.case("bf16", 64, "k", "k", swizzle, swizzle)
    moved = dataclasses.replace(place_a, start=place_a.start + 128, base_offset=1)
    image = image.copy()
    wgmma_tests.put(image, moved, a, "k")
    _, words = wgmma(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "1, 1, 0, 0", image, moved, place_b,
        np.zeros((32, 128), np.uint32),
    )  # fmt: skip
    product = wgmma_tests.numbers(a, "bf16") @ wgmma_tests.numbers(b, "bf16").T
    assert np.array_equal(words, wgmma_tests.accumulator_words(product.astype(np.float32)))


def test_wgmma_chain_and_scale_d(wgmma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_tests, "random_bits", whole_bits)
    wgmma_tests.test_a_chain_accumulates_in_order(wgmma, 0)
    wgmma_tests.test_scale_d_zero_ignores_the_accumulators(wgmma)


@pytest.mark.parametrize("form", [f for f in wgmma_tests.FORMS if f[1] == "f32"], ids="-".join)
def test_wgmma_of_any_numbers(run_ptx: Both, wgmma: Any, form: tuple[str, ...]) -> None:
    run_ptx.exact = False
    wgmma_tests.test_shapes_and_types(wgmma, form, "shared")
    shape, _, atype, btype = form
    n = int(shape[4:].split("k")[0])
    _, _, _, a, b = wgmma_tests.case(atype, n, "k", "k", wgmma_tests.SWIZZLE_128B, wgmma_tests.SWIZZLE_64B, btype)
    c = wgmma_tests.random_accumulators(np.random.default_rng(2), "f32", (64, n))
    left, right = wgmma_tests.numbers(a, atype), wgmma_tests.numbers(b, btype)
    size = (np.abs(left) @ np.abs(right).T + np.abs(c)).astype(np.float32)
    exact = (c - left @ right.T).astype(np.float32)
    got, wanted, scale = (
        x.view(np.float32) for x in (run_ptx.on_gpu["d"], *map(wgmma_tests.accumulator_words, (exact, size)))
    )
    assert (np.abs(got.astype(np.float64) - wanted) <= max(BOUNDS[atype], BOUNDS[btype]) * scale).all()


# Compiled kernels


PLAIN = {"k_sub": 1, "kv_groups": 1, "cluster_m": 1, "ctas_per_sm": 1}
ATTENTION = {
    # name: static axes, tunables, other axes
    "gqa": (
        {"head_dim": 128, "heads": 2, "kv_heads": 1, "normalize": True},
        {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 128, "kv_stage": 2, "smem_p": False, **PLAIN},
        {"batch": 2, "t": 70, "s_k": 333},
    ),
    "mha, P in shared memory": (
        {"head_dim": 64, "heads": 4, "kv_heads": 4, "normalize": True},
        {"m_tile": 64, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, "smem_p": True, **PLAIN},
        {"batch": 1, "t": 33, "s_k": 200},
    ),
    "three row blocks": (
        {"head_dim": 64, "heads": 8, "kv_heads": 2, "normalize": True},
        {"m_tile": 192, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 3, "smem_p": False, **PLAIN},
        {"batch": 1, "t": 70, "s_k": 333},
    ),
    "two kv groups": (
        {"head_dim": 128, "heads": 4, "kv_heads": 1, "normalize": True},
        {"m_tile": 64, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, "smem_p": False, **PLAIN, "kv_groups": 2},
        {"batch": 1, "t": 20, "s_k": 400},
    ),
    "k in parts": (
        {"head_dim": 256, "heads": 2, "kv_heads": 1, "normalize": True},
        {"m_tile": 64, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 1, "smem_p": False, **PLAIN, "k_sub": 2},
        {"batch": 1, "t": 40, "s_k": 100},
    ),
    "cluster of two": (
        {"head_dim": 64, "heads": 2, "kv_heads": 2, "normalize": True},
        {"m_tile": 64, "pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, "smem_p": False, **PLAIN, "cluster_m": 2},
        {"batch": 1, "t": 100, "s_k": 333},
    ),
    "partial": (
        {"head_dim": 128, "heads": 2, "kv_heads": 1, "normalize": False},
        {"m_tile": 128, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 2, "smem_p": False, **PLAIN},
        {"batch": 1, "t": 70, "s_k": 200},
    ),
    "wide": (
        {"head_dim": 512, "heads": 2, "kv_heads": 1, "normalize": True},
        {"m_tile": 64, "pv_n_tile": 256, "kv_tile": 64, "kv_stage": 1, "smem_p": False, **PLAIN},
        {"batch": 1, "t": 40, "s_k": 130},
    ),
}  # fmt: skip
WGMMA_PLAIN = {"a_major": "K", "b_major": "K", "swizzle": "SW128", "a_source": "SMEM"}
PRODUCTS = {
    **{
        f"bf16 A {a} B {b} {swizzle}": (1, 64, {"a_major": a, "b_major": b, "swizzle": swizzle})
        for a in ("K", "MN")
        for b in ("K", "MN")
        for swizzle in ("SW128", "SW64", "SW32", "INTER")
    },
    **{
        f"{name} n {n} A from {source}": (operand, n, {"a_source": source})
        for operand, name in enumerate(("bf16", "f16", "e4m3", "e5m2", "s8"), start=1)
        for n in (8, 256)
        for source in ("SMEM", "RMEM")
    },
}
DOCUMENTED = re.compile(r"<!-- file: my_add.py -->\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel of a spec, with the problem it is tried on."""

    spec: str
    implementation: str
    static: Mapping[str, Any]
    tunables: Mapping[str, Any]
    axes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


KERNELS: dict[str, Compiled] = {
    f"sum, block {_block}": Compiled("my_add.py", "simt", {}, {"block": _block, "unroll": _unroll}, {"n": 3000})
    for _block, _unroll in ((256, 4), (128, 1))
}
for _name, (_static, _tunables, _axes) in ATTENTION.items():
    KERNELS[f"attention, {_name}"] = Compiled("fmha", "sm90", {**_static, "dtype": "bfloat16"}, _tunables, _axes)
for _name, (_operand, _n, _tunables) in PRODUCTS.items():
    KERNELS[f"product, {_name}"] = Compiled(
        f"{SPECS / 'cute_wgmma.py'}:cute_wgmma_whole",
        "one_warpgroup",
        {"operand": _operand, "n": _n},
        {**WGMMA_PLAIN, **_tunables},
    )
for _threads, _vector in ((128, 4), (256, 1)):
    KERNELS[f"softmax, {_threads} threads"] = Compiled(
        f"{SPECS / 'cute_softmax.py'}:cute_softmax",
        "one_row_a_cta",
        {"columns": 1024},
        {"threads": _threads, "vector": _vector},
        {"rows": 5},
    )
# What must agree to the bit: only additions, multiplications and products whose sums are exact.
EXACT = ("product", "sum")


def spec_of(kernel: Compiled, place: Path) -> str:
    return str(place.parent / kernel.spec) if kernel.spec == "my_add.py" else kernel.spec


@pytest.fixture(scope="module")
def compiled(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each kernel was compiled to, side by side in isolation; my_add.py of the docs lies one level up."""
    root = tmp_path_factory.mktemp("hopper")
    documented = DOCUMENTED.search((TESTS.parent / "docs" / "specs.md").read_text())
    assert documented is not None
    (root / "my_add.py").write_text(documented[1])
    places, tasks = {}, []
    for number, (name, kernel) in enumerate(KERNELS.items()):
        places[name] = root / str(number)
        places[name].mkdir()
        reference = spec_of(kernel, places[name])
        spec = load_spec(reference)
        static = spec.static(spec.problem({**kernel.static, **kernel.axes}))
        request = CompileRequest(
            reference,
            kernel.implementation,
            ARCH,
            static,
            Values(kernel.tunables),
            f"tunekit_{number}",
            str(places[name]),
        )
        tasks.append(Task(id=name, payload=request.to_payload()))
    limits = Limits(trace_s=60, backend_s=300, memory_bytes=8 * 2**30)
    with Pool(workers=None, warm=("cutedsl",), limits=limits) as pool:
        for result in pool.run(tasks):
            assert result.value is not None and result.status == "ok", f"{result.id}: {result.status}: {result.reason}"
    return places


@pytest.mark.parametrize("name", KERNELS)
def test_a_compiled_kernel_does_in_the_simulator_what_it_does_here(compiled: dict[str, Path], name: str) -> None:
    torch = pytest.importorskip("torch")
    kernel, place = KERNELS[name], compiled[name]
    spec = load_spec(spec_of(kernel, place))
    problem = spec.problem({**kernel.static, **kernel.axes})
    symbol = f"tunekit_{list(KERNELS).index(name)}"
    variant = identity.variant(spec.name, spec.version, kernel.implementation, ARCH, Values(kernel.tunables))
    arguments = arguments_of(spec, problem, 1, variant)
    module = read_module((place / "kernel.ptx").read_text())
    launches = capture_object(place / "kernel.o", symbol, arguments.call, parse_arch(ARCH), module)
    report = simulate(launches, module, arguments.buffers)
    assert not report.faults and report.refusal is None
    assert [schedule.state for schedule in report.schedules] == ["done"]
    simulated = {key: value.clone() for key, value in arguments.outputs().items()}
    tensors = {
        **{key: value.cuda() for key, value in arguments.inputs().items()},
        **{key: torch.full_like(value, -1.0).cuda() for key, value in (simulated | arguments.scratch()).items()},
    }
    call = [tensors[a.name] if hasattr(a, "name") else a for a in arguments.call]
    load_artifact(place / "kernel.so", symbol)(*call)
    torch.cuda.synchronize()
    for key, ours in simulated.items():
        theirs = tensors[key].cpu()
        if name.startswith(EXACT):
            assert torch.equal(theirs, ours), f"{key}: {int((theirs != ours).sum())} of {ours.numel()} differ"
            continue
        difference = float((theirs.double() - ours.double()).abs().max())
        largest = float(ours.double().abs().max())
        bound = (ATTENTION_BOUND if ours.dtype is torch.bfloat16 else FLOAT_BOUND) * largest
        print(f"{name}: {key} differs by {difference:.3e} at most, largest {largest:.3e}, bound {bound:.3e}")
        assert difference <= bound, key
