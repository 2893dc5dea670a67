"""The fmha spec without a GPU: its oracle, its space, and that declared, traced and compiled footprints agree.

What the kernels compute is tested in tests/gpu/test_fmha.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tunekit.arch import ARCHES
from tunekit.compiling import Unit, compile_outcome, units
from tunekit.errors import SpecError
from tunekit.jobs import Limits, Pool, TaskResult, compile_task
from tunekit.model import Footprint, Values, Variant
from tunekit.probe import DISAGREEMENT
from tunekit.space import declared_footprint, default_variant, expand
from tunekit.spec import load_spec
from tunekit.trials import Status

SPEC = load_spec("fmha")
HEAD_DIMS = (64, 128, 256, 512)
HEADS = ((128, 1), (8, 8), (32, 8))
LIMITS = Limits(trace_s=60.0, backend_s=300.0, memory_bytes=4 * 2**30)


def problem(head_dim: int, heads: tuple[int, int] = (128, 1), **more: Any) -> Values:
    given = {"heads": heads[0], "kv_heads": heads[1], "t": 1, "s_k": 1152, "head_dim": head_dim, **more}
    return SPEC.problem(given)


def fitting(arch: str, p: Values) -> list[Variant]:
    """The variants of kernels of our own that are within the architecture's budget by declaration."""
    return [
        v
        for v in expand(SPEC, ARCHES[arch], p).variants
        if not SPEC.implementation(v.implementation).is_library and declared(v, p).misfit(ARCHES[arch]) is None
    ]


def declared(variant: Variant, p: Values) -> Footprint:
    return declared_footprint(SPEC.implementation(variant.implementation), ARCHES[variant.arch], p, variant.tunables)


def run(wanted: list[Unit], root: Path, *, trace_only: bool) -> dict[str, TaskResult]:
    tasks = [compile_task(u.request(root / u.key[:16], trace_only=trace_only), id=u.key) for u in wanted]
    with Pool(limits=LIMITS) as pool:
        return {result.id: result for result in pool.run(tasks)}


@pytest.mark.parametrize("heads", HEADS)
def test_the_oracle_is_attention(heads: tuple[int, int]) -> None:
    """Against torch's own, in float64; the un-normalised outputs give it back by the documented formula."""
    import torch

    p = problem(64, heads, batch=2, t=3, s_k=37)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, heads[0], 64, generator=generator).bfloat16()
    k, v = (torch.randn(2, 37, heads[1], 64, generator=generator).bfloat16() for _ in range(2))
    inputs = {"q": q, "k": k, "v": v, "scale": 0.125}
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), scale=0.125, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(SPEC.reference(p, inputs)["o"], want)
    partial = SPEC.reference(Values({**p, "normalize": False}), inputs)
    weight = torch.exp(partial["lse"] - 0.125 * partial["row_max"]).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(partial["o"] / weight, want)


@pytest.mark.parametrize(
    ("arch", "head_dim", "heads"), list(itertools.product(("sm_90a", "sm_100a"), HEAD_DIMS, HEADS))
)
def test_every_problem_has_a_default_that_fits(arch: str, head_dim: int, heads: tuple[int, int]) -> None:
    p = problem(head_dim, heads)
    chosen, found = default_variant(SPEC, ARCHES[arch], p), fitting(arch, p)
    assert chosen is not None and chosen in found
    for smem_p in (False, True):
        assert any(v.tunables.get("smem_p") is smem_p for v in found), f"no variant with smem_p={smem_p}"


def test_head_dim_512_is_split_along_n() -> None:
    """O of 64 x 512 would take 256 registers a thread: a CTA owns some columns, or warp groups or CTAs share them."""
    variants = fitting("sm_90a", problem(512))
    assert {v.tunables.pv_n_tile for v in variants if "pv_n_tile" in v.tunables} == {64, 128, 256}
    assert {v.implementation for v in variants} == {"sm90", "sm90_split", "sm90_wide", "sm90_pair"}


def test_a_group_of_heads_must_divide() -> None:
    with pytest.raises(SpecError, match="heads_divide"):
        problem(64, (10, 4))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])  # test_fmha_sm*.py compile 64 too
def test_both_flavours_compile_and_export_within_budget(arch: str, head_dim: int, tmp_path: Path) -> None:
    """`smem_p` and `normalize` in opposite pairs; the code uses its architecture's own tensor cores."""
    wanted = []
    for normalize in (True, False):
        p = problem(head_dim, normalize=normalize)
        variant = next(
            v for v in fitting(arch, p) if v.tunables.get("smem_p") is normalize and v.tunables.kv_stage == 2
        )
        wanted.append((units(SPEC, "fmha", p, [variant])[0], p))
    results = run([unit for unit, _ in wanted], tmp_path, trace_only=False)
    instruction = "wgmma.mma_async" if arch == "sm_90a" else "tcgen05.mma"
    for unit, p in wanted:
        outcome = compile_outcome(results[unit.key], declared(unit.variant, p))
        assert outcome.status is Status.OK, outcome.reason
        assert DISAGREEMENT not in outcome.facts
        assert (outcome.footprint.spill_bytes or 0) <= 16
        files = results[unit.key].value["files"]  # type: ignore[index]
        assert instruction in Path(files["ptx"]).read_text()
        assert Path(files["so"]).stat().st_size > 0
