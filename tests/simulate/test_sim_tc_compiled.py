"""Compiled sm_100a kernels end to end: products with the layouts and descriptors of CuTeDSL, and attention.

Compiled without a GPU; the launch is what the host code gave to the driver; the result is compared with the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tunekit.arch import parse_arch
from tunekit.backends import CompileRequest
from tunekit.jobs import Limits, Pool, Task
from tunekit.model import Values
from tunekit.simulate.launch.arguments import arguments_of
from tunekit.simulate.launch.capture import capture_object
from tunekit.simulate.machine.cluster import Cluster
from tunekit.simulate.machine.program import Program
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.run import simulate
from tunekit.spec import load_spec

pytest.importorskip("cutlass")
torch = pytest.importorskip("torch")

ARCH = "sm_100a"
PRODUCT = f"{Path(__file__).resolve().parents[1] / 'specs' / 'cute_tcgen05.py'}:cute_tcgen05"
FMHA = {"kv_tile": 128, "kv_stage": 2, "smem_p": False}
BF16, F16, E4M3, E5M2, INT8, TF32 = range(1, 7)


@dataclass(frozen=True)
class Case:
    spec: str
    implementation: str
    static: dict
    tunables: dict
    axes: dict = field(default_factory=dict)


def product(operand: int, m: int, n: int, a: str, b: str, swizzle: str, ctas: int = 1) -> Case:
    tunables = {"a_major": a, "b_major": b, "swizzle": swizzle, "ctas": ctas}
    return Case(PRODUCT, "one_tile", {"operand": operand, "m": m, "n": n}, tunables)


def attention(head_dim: int, axes: dict, heads: int = 4, kv_heads: int = 2, normalize: bool = True, **tunables) -> Case:
    static = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "dtype": "bfloat16", "normalize": normalize}
    return Case("fmha", "sm100", static, {**FMHA, "pv_n_tile": head_dim, **tunables}, axes)


CASES = {
    "bf16, K K, 128B": product(BF16, 128, 64, "K", "K", "SW128"),
    "bf16, MN MN, 128B": product(BF16, 128, 64, "MN", "MN", "SW128"),
    "f16, MN K, 64B, M 64": product(F16, 64, 64, "MN", "K", "SW64"),
    "f16, K K, 32B, M 64": product(F16, 64, 32, "K", "K", "SW32"),
    "e4m3, K MN, 32B": product(E4M3, 128, 64, "K", "MN", "SW32"),
    "e5m2, MN MN, none": product(E5M2, 128, 32, "MN", "MN", "INTER"),
    "int8, K K, none": product(INT8, 128, 32, "K", "K", "INTER"),
    "tf32, K K, 64B": product(TF32, 128, 64, "K", "K", "SW64"),
    "tf32, MN MN, 128B of 32B": product(TF32, 128, 64, "MN", "MN", "SW128_32B"),
    "bf16, K MN, 128B, pair, M 256": product(BF16, 256, 256, "K", "MN", "SW128", ctas=2),
    "e4m3, K K, 128B, pair, M 128": product(E4M3, 128, 64, "K", "K", "SW128", ctas=2),
    "attention 64": attention(64, {"batch": 1, "t": 5, "s_k": 300}),
    "attention 128": attention(128, {"batch": 1, "t": 5, "s_k": 300}),
    "attention 128, P in shared memory, parts": attention(
        128, {"batch": 1, "t": 5, "s_k": 200}, heads=8, kv_heads=1, normalize=False,
        pv_n_tile=64, kv_tile=64, smem_p=True,
    ),
}  # fmt: skip
QUICK = ("bf16, MN MN, 128B", "tf32, MN MN, 128B of 32B", "bf16, K MN, 128B, pair, M 256")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(name): the directory of a case, compiled when it is first asked for."""
    root = tmp_path_factory.mktemp("blackwell")
    places: dict[str, Path] = {}
    with Pool(workers=1, warm=("cutedsl",), limits=Limits(60, 120, 8 * 2**30)) as pool:

        def go(name: str) -> Path:
            if name not in places:
                case, place = CASES[name], root / str(len(places))
                place.mkdir()
                request = CompileRequest(
                    case.spec, case.implementation, ARCH, Values(case.static), Values(case.tunables), "tunekit_it",
                    str(place),
                )  # fmt: skip
                (result,) = pool.run([Task(id=name, payload=request.to_payload())])
                assert result.value is not None and result.status == "ok", f"{result.id}: {result.reason}"
                places[name] = place
            return places[name]

        yield go


@pytest.fixture
def prepared(compiled):
    """prepared(name): (launches, module, arguments, what the outputs should be)."""

    def go(name: str, seed: int):
        case, place = CASES[name], compiled(name)
        spec = load_spec(case.spec)
        problem = spec.problem({**case.static, **case.axes})
        arguments = arguments_of(spec, problem, seed=seed)
        given = {**arguments.drawn}
        if case.spec == "fmha":
            given["scale"] = case.static["head_dim"] ** -0.5
        module = read_module((place / "kernel.ptx").read_text())
        launches = capture_object(place / "kernel.o", "tunekit_it", arguments.call, parse_arch(ARCH), module)
        return launches, module, arguments, spec.reference(problem, given)

    return go


def wrong(case: Case, got: dict, wanted: dict) -> str:
    """Bounds: the attention's tolerance of o (cosine 0.999997, relative norm 3e-3); float32 rounding of a product."""
    for key, value in got.items():
        a, b = value.double().flatten(), wanted[key].double().flatten()
        norm, cosine = float((a - b).norm() / b.norm()), float(a @ b / (a.norm() * b.norm()))
        bound = 3e-3 if case.spec == "fmha" else 1e-6
        if not (norm <= bound and cosine >= 0.999997):
            return f"{key}: relative norm {norm:.2e}, cosine {cosine:.7f}"
    return ""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_compiled_kernel_computes_the_oracles_answer(prepared, name):
    launches, module, arguments, wanted = prepared(name, seed=3)
    schedules = 5 if CASES[name].spec == "fmha" else 2
    report = simulate(
        launches,
        module,
        arguments.buffers,
        schedules=schedules,
        jobs=1,
        judge=lambda _: wrong(CASES[name], arguments.outputs(), wanted),
        time_limit_s=120,
    )
    assert report.refusal is None
    assert not report.faults
    assert [(s.state, s.wrong, s.changed) for s in report.schedules] == [("done", "", "")] * schedules


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention 64", "attention 128"])
def test_the_attention_kernel_has_every_fence_that_the_isa_asks_for(prepared, name):
    launches, module, arguments, _ = prepared(name, seed=4)
    (launch,) = launches
    program = Program.of(module, module.kernels[launch.kernel], launch.shared_bytes)
    result = Cluster(program, launch, 0, arguments.buffers.device_memory(), seed=1, strict=True).run()
    assert result.state == "done"
    assert [str(fault) for fault in result.faults.all()] == []
