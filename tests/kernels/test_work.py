"""What the attention kernels declare of their launches, against the kernels' own grids and the problem's cost."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from kernel_specs.kernels import fmha_sm90_pair, fmha_sm90_split_space, fmha_sm90_wide, sm90_schedule
from kernel_specs.kernels.sm90_plan import Plan
from tunekit.arch import parse_arch
from tunekit.model import Values, Variant
from tunekit.space import declared_work, expand
from tunekit.spec import Work, load_spec

SPEC, HOPPER = load_spec("fmha"), parse_arch("sm_90a")
PROBLEMS: list[dict[str, Any]] = [
    {"batch": 32, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 128},
    {"batch": 3, "heads": 6, "kv_heads": 2, "t": 777, "s_k": 999, "head_dim": 64, "mask": "causal"},
    {"batch": 2, "heads": 16, "kv_heads": 16, "t": 8192, "s_k": 8192, "head_dim": 128},
    {"batch": 8, "heads": 128, "kv_heads": 1, "t": 1, "s_k": 1152, "head_dim": 512},
    {"batch": 1, "heads": 128, "kv_heads": 1, "t": 3, "s_k": 640, "head_dim": 512, "kv_shared": True},
]


ONE_GRID: dict[str, Any] = {"sm90_wide": fmha_sm90_wide, "sm90_pair": fmha_sm90_pair}  # not by sm90_schedule


def works(problem: Values) -> list[tuple[Variant, Work]]:
    found = [
        (v, declared_work(SPEC.implementation(v.implementation), HOPPER, problem, v.tunables))
        for v in expand(SPEC, HOPPER, problem).variants
    ]
    return [(variant, work) for variant, work in found if work is not None]


def grid(problem: Values, variant: Variant) -> int:
    """CTAs of the grid by the kernel's own code, on plain numbers."""
    given = {"q": SimpleNamespace(shape=(problem.batch, problem.t, problem.heads, problem.head_dim))}
    static, tunables = SPEC.static(problem), variant.tunables
    if variant.implementation in ONE_GRID:
        return math.prod(int(n) for n in ONE_GRID[variant.implementation].make_kernel(static, tunables)._grid(given))
    if variant.implementation == "sm90_split":
        tunables = tunables.merged(fmha_sm90_split_space.FIXED)
    return math.prod(int(n) for n in sm90_schedule.grid(Plan(static, tunables), given))


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda given: f"d{given['head_dim']}-t{given['t']}")
def test_the_declared_ctas_are_the_kernels_grid(given: dict[str, Any]) -> None:
    problem = SPEC.problem(given)
    found = works(problem)
    assert len(found) > 100
    for variant, work in found:
        assert work.ctas == grid(problem, variant), variant


@pytest.mark.parametrize("given", PROBLEMS, ids=lambda given: f"d{given['head_dim']}-t{given['t']}")
def test_the_ctas_do_the_problems_work_and_no_less(given: dict[str, Any]) -> None:
    problem = SPEC.problem(given)
    cost = SPEC.cost(problem)
    for variant, work in works(problem):
        assert work.ctas * work.flops >= cost.flops * (1 - 1e-9), variant
        assert work.ctas * work.edge_bytes >= 2 * problem.batch * problem.t * problem.heads * 2 * problem.head_dim


def test_whole_tiles_waste_nothing() -> None:
    problem = SPEC.problem(PROBLEMS[2])
    whole = [w for v, w in works(problem) if v.implementation == "sm90" and v.tunables["pv_n_tile"] == 128]
    exact = [w for w in whole if w.ctas * w.flops == SPEC.cost(problem).flops]
    assert len(exact) > 10


def test_what_can_have_no_launch_is_refused_with_the_point() -> None:
    import dataclasses

    from tunekit.errors import SpecError

    problem = SPEC.problem(PROBLEMS[0])
    variant, work = works(problem)[0]
    one = SPEC.implementation(variant.implementation)
    for wrong, words in (
        (None, "it returned NoneType, not a Work"),
        (dataclasses.replace(work, ctas=0), "ctas is 0, not a number from 1"),
        (dataclasses.replace(work, flops=math.inf), "flops is inf"),
        (dataclasses.replace(work, stages=0), "stages is 0"),
    ):
        failing = dataclasses.replace(one, work=lambda v, arch, wrong=wrong: wrong)
        with pytest.raises(SpecError, match=words):
            declared_work(failing, HOPPER, problem, variant.tunables)
    raising = dataclasses.replace(one, work=lambda v, arch: v.made_up)
    with pytest.raises(SpecError, match=r"work fails for .*: AttributeError: no value 'made_up'"):
        declared_work(raising, HOPPER, problem, variant.tunables)
