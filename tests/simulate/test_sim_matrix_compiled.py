"""Compiled sm_90a kernels end to end: products with the descriptors that CuTeDSL wrote, attention, attention broken.

Compiled without a GPU; the launch is what the host code gave to the driver; the result is compared with the oracle.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compiled_cases import Case, compiling, prepare

from kernel_specs.kernels.fmha_sm90_space import DEFAULTS
from tunekit.simulate.run import simulate

pytest.importorskip("cutlass")
torch = pytest.importorskip("torch")

ARCH = "sm_90a"
PRODUCT = f"{Path(__file__).resolve().parents[1] / 'specs' / 'cute_wgmma.py'}:cute_wgmma"
PLAIN = {"a_major": "K", "b_major": "K", "swizzle": "SW128", "a_source": "SMEM"}
FMHA = {**DEFAULTS[0], "pv_n_tile": 64, "kv_tile": 64}


def attention(heads: int, kv_heads: int, axes: dict, **tunables) -> Case:
    static = {"head_dim": 64, "heads": heads, "kv_heads": kv_heads, "dtype": "bfloat16", "normalize": True}
    return Case("fmha", "sm90", static, {**FMHA, **tunables}, axes)


# The majors and swizzles; every type with A from either place (operand: 1 bf16, 2 f16, 3 e4m3, 4 e5m2, 5 s8).
CASES = {
    f"A {a} B {b} {swizzle}": Case(
        PRODUCT, "one_warpgroup", {"operand": 1, "n": 64}, {**PLAIN, "a_major": a, "b_major": b, "swizzle": swizzle}
    )
    for a, b, swizzle in (
        ("K", "MN", "SW128"), ("MN", "K", "SW64"), ("MN", "MN", "SW32"), ("MN", "MN", "INTER"), ("K", "K", "INTER"),
    )
}  # fmt: skip
CASES |= {
    f"operand {operand} from {source}": Case(
        PRODUCT, "one_warpgroup", {"operand": operand, "n": 8}, {**PLAIN, "a_source": source}
    )
    for operand, source in ((2, "RMEM"), (3, "SMEM"), (4, "RMEM"), (5, "SMEM"), (5, "RMEM"))
}
CASES["attention"] = attention(4, 2, {"batch": 1, "t": 5, "s_k": 200}, m_tile=128, smem_p=False)
CASES["attention, P in shared memory"] = attention(1, 1, {"batch": 1, "t": 9, "s_k": 200}, m_tile=64, smem_p=True)
CASES["attention, cluster"] = attention(1, 1, {"batch": 1, "t": 100, "s_k": 130}, m_tile=64, smem_p=False, cluster_m=2)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(name): the directory of a case, compiled when it is first asked for."""
    with compiling(CASES, ARCH, tmp_path_factory.mktemp("hopper")) as go:
        yield go


@pytest.fixture
def simulated(compiled):
    def go(name: str, *, seed: int = 0, change=lambda text: text):
        """(report, what was wrong with the outputs); `change` edits the PTX."""
        case = CASES[name]
        ready = prepare(case, compiled(name), ARCH, seed, change)

        def judge(_seed: int) -> str:
            for key, got in ready.arguments.outputs().items():
                norm = float((got.double() - ready.wanted[key]).norm() / ready.wanted[key].norm())
                if not norm <= (3e-3 if case.spec == "fmha" else 1e-6):
                    return f"{key}: relative norm {norm:.2e}"
            return ""

        buffers = ready.arguments.buffers
        return simulate(ready.launches, ready.module, buffers, seed=seed, jobs=1, judge=judge, time_limit_s=60)

    return go


QUICK = ("A K B MN SW128", "A MN B MN INTER", "operand 3 from SMEM", "operand 5 from RMEM", "attention, cluster")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_compiled_kernel_computes_the_oracles_answer(simulated, name):
    report = simulated(name, seed=3)
    assert report.refusal is None
    assert not report.faults
    assert [(schedule.state, schedule.wrong) for schedule in report.schedules] == [("done", "")]


def without(pattern: str, number: int = 0, instead: str = ""):
    """Takes one match of a pattern out of the PTX, counted from 0."""

    def change(text: str) -> str:
        match = list(re.finditer(pattern, text))[number]
        return text[: match.start()] + instead + text[match.end() :]

    return change


def other_swizzle(text: str) -> str:
    """Descriptors of K that say 64B (2 in bits 62 and 63) of tiles laid out with 128B (1)."""
    return re.sub(r"46116862933053\d+", lambda m: str(int(m[0]) + (1 << 62)), text)


# What is changed in the attention kernel with P in shared memory, and what the simulator must say.
BROKEN = {
    "P not fenced for the async proxy": (without(r"fence\.proxy\.async\.shared::cta;"), "missing proxy fence"),
    "O not fenced for the async proxy": (without(r"fence\.proxy\.async\.shared::cta;", -1), "missing proxy fence"),
    "first wgmma not fenced": (without(r"wgmma\.fence\.sync\.aligned;"), "missing wgmma fence"),
    "later wgmma not fenced": (without(r"wgmma\.fence\.sync\.aligned;", -1), "missing wgmma fence"),
    "scores read in flight": (
        without(r"wgmma\.wait_group\.sync\.aligned\s+0;"),
        "register used before its operation is complete",
    ),
    "a stage released too early": (without(r"wgmma\.wait_group\.sync\.aligned\s+1;"), "data race"),
    "a stage never released": (without(r"mbarrier\.arrive\.shared\.b64[^;]*;"), "deadlock"),
    "a named barrier left out": (without(r"bar\.sync \s*%r\d+, 128;", -1), "data race"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_attention_broken_in_one_place_is_found(simulated, name):
    change, kind = BROKEN[name]
    report = simulated("attention, P in shared memory", change=change)
    assert kind in {fault.kind.value for fault in report.faults}


def test_attention_with_another_swizzle_is_wrong(simulated):
    """No rule is broken, but other elements are multiplied."""
    report = simulated("attention, P in shared memory", change=other_swizzle)
    assert not report.faults
    assert "o: relative norm" in report.schedules[0].wrong
