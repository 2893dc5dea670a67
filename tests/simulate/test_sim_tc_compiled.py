"""Compiled sm_100a kernels end to end: products with the layouts and descriptors of CuTeDSL, and attention.

Compiled without a GPU; the launch is what the host code gave to the driver; the result is compared with the oracle.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_cases import Case, compiling, prepare

from kernel_specs.kernels.fmha_sm100_space import BASE
from tunekit.simulate.machine.cluster import Cluster
from tunekit.simulate.machine.program import Program
from tunekit.simulate.run import simulate

pytest.importorskip("cutlass")
torch = pytest.importorskip("torch")

ARCH = "sm_100a"
PRODUCT = f"{Path(__file__).resolve().parents[1] / 'specs' / 'cute_tcgen05.py'}:cute_tcgen05"
BF16, F16, E4M3, E5M2, INT8, TF32 = range(1, 7)


def product(operand: int, m: int, n: int, a: str, b: str, swizzle: str, ctas: int = 1) -> Case:
    tunables = {"a_major": a, "b_major": b, "swizzle": swizzle, "ctas": ctas}
    return Case(PRODUCT, "one_tile", {"operand": operand, "m": m, "n": n}, tunables)


def attention(head_dim: int, axes: dict, heads: int = 4, kv_heads: int = 2, normalize: bool = True, **tunables) -> Case:
    static = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "dtype": "bfloat16", "normalize": normalize}
    return Case("fmha", "sm100", static, {**BASE, "pv_n_tile": head_dim, **tunables}, axes)


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
    with compiling(CASES, ARCH, tmp_path_factory.mktemp("blackwell")) as go:
        yield go


@pytest.fixture
def prepared(compiled):
    """prepared(name, seed)."""
    return lambda name, seed: prepare(CASES[name], compiled(name), ARCH, seed)


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
    ready = prepared(name, seed=3)
    schedules = 5 if CASES[name].spec == "fmha" else 2
    report = simulate(
        ready.launches,
        ready.module,
        ready.arguments.buffers,
        schedules=schedules,
        jobs=1,
        judge=lambda _: wrong(CASES[name], ready.arguments.outputs(), ready.wanted),
        time_limit_s=120,
    )
    assert report.refusal is None
    assert not report.faults
    assert [(s.state, s.wrong, s.changed) for s in report.schedules] == [("done", "", "")] * schedules


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention 64", "attention 128"])
def test_the_attention_kernel_has_every_fence_that_the_isa_asks_for(prepared, name):
    ready = prepared(name, seed=4)
    (launch,) = ready.launches
    program = Program.of(ready.module, ready.module.kernels[launch.kernel], launch.shared_bytes)
    result = Cluster(program, launch, 0, ready.arguments.buffers.device_memory(), seed=1, strict=True).run()
    assert result.state == "done"
    assert [str(fault) for fault in result.faults.all()] == []
