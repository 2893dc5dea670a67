"""Compiled sm_90a kernels end to end: products with the descriptors that CuTeDSL wrote, attention, attention broken.

Compiled without a GPU; the launch is what the host code gave to the driver; the result is compared with the oracle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tunekit.arch import parse_arch
from tunekit.backends import CompileRequest
from tunekit.jobs import Limits, Pool, Task
from tunekit.model import Values
from tunekit.simulate.launch.arguments import arguments_of
from tunekit.simulate.launch.capture import capture_object
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.run import simulate
from tunekit.spec import load_spec

pytest.importorskip("cutlass")
torch = pytest.importorskip("torch")

ARCH = "sm_90a"
PRODUCT = f"{Path(__file__).resolve().parents[1] / 'specs' / 'cute_wgmma.py'}:cute_wgmma"
PLAIN = {"a_major": "K", "b_major": "K", "swizzle": "SW128", "a_source": "SMEM"}
FMHA = {"pv_n_tile": 64, "kv_tile": 64, "kv_stage": 2, "k_sub": 1, "kv_groups": 1, "cluster_m": 1, "ctas_per_sm": 1}


@dataclass(frozen=True)
class Case:
    spec: str
    implementation: str
    static: dict
    tunables: dict
    axes: dict = field(default_factory=dict)


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
    root = tmp_path_factory.mktemp("hopper")
    places: dict[str, Path] = {}
    with Pool(workers=1, warm=("cutedsl",), limits=Limits(60, 120, 8 * 2**30)) as pool:

        def go(name: str) -> Path:
            if name not in places:
                case, place = CASES[name], root / str(len(places))
                place.mkdir()
                static, tunables = Values(case.static), Values(case.tunables)
                request = CompileRequest(
                    case.spec, case.implementation, ARCH, static, tunables, "tunekit_it", str(place)
                )
                (result,) = pool.run([Task(id=name, payload=request.to_payload())])
                assert result.value is not None and result.status == "ok", f"{result.id}: {result.reason}"
                places[name] = place
            return places[name]

        yield go


@pytest.fixture
def simulated(compiled):
    def go(name: str, *, seed: int = 0, change=lambda text: text):
        """(report, what was wrong with the outputs); `change` edits the PTX."""
        case, place = CASES[name], compiled(name)
        spec = load_spec(case.spec)
        problem = spec.problem({**case.static, **case.axes})
        arguments = arguments_of(spec, problem, seed=seed)
        given = (
            {**arguments.drawn, "scale": case.static["head_dim"] ** -0.5} if case.spec == "fmha" else arguments.drawn
        )
        wanted = spec.reference(problem, given)
        module = read_module(change((place / "kernel.ptx").read_text()))
        launches = capture_object(place / "kernel.o", "tunekit_it", arguments.call, parse_arch(ARCH), module)

        def judge(_seed: int) -> str:
            for key, got in arguments.outputs().items():
                norm = float((got.double() - wanted[key]).norm() / wanted[key].norm())
                if not norm <= (3e-3 if case.spec == "fmha" else 1e-6):
                    return f"{key}: relative norm {norm:.2e}"
            return ""

        return simulate(launches, module, arguments.buffers, seed=seed, jobs=1, judge=judge, time_limit_s=60)

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
