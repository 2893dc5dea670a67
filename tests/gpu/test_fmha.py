"""The attention kernels against the float64 oracle, executed on the GPU.

Every head_dim, both `normalize`, both `smem_p`, MQA 128 over 1, MHA 8 over 8 and GQA 32
over 8, for every T and s_k of the grid, ragged ones too. Each test prints its worst figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tunekit.arch import parse_arch
from tunekit.backends.load import load_artifact
from tunekit.compiling import Unit, units
from tunekit.environment import environment
from tunekit.jobs import Limits, Pool, Task
from tunekit.model import Values, Variant
from tunekit.space import expand, misfit
from tunekit.spec import load_spec

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu

SPEC = load_spec("fmha")
ARCH = parse_arch(environment().arch or "sm_90a")
HEADS = ((128, 1), (8, 8), (32, 8))
LENGTHS = (1, 4, 32, 128)
KEYS = (128, 256, 384, 512, 1152, 1, 77, 1000)
COSINE, RELATIVE_NORM = 0.999997, 3e-3
CASES = tuple(itertools.product((64, 128, 256, 512), (True, False), (True, False), HEADS))


def problem(head_dim: int, normalize: bool, heads: tuple[int, int], t: int = 1, s_k: int = 1152) -> Values:
    return SPEC.problem(
        {"heads": heads[0], "kv_heads": heads[1], "t": t, "s_k": s_k, "head_dim": head_dim, "normalize": normalize}
    )


def chosen(head_dim: int, normalize: bool, smem_p: bool, heads: tuple[int, int]) -> Variant:
    """The variant with this `smem_p` that has the most stages, as the deepest rings are the hardest to get right."""
    wanted = problem(head_dim, normalize, heads)
    fitting = [
        v
        for v in expand(SPEC, ARCH, wanted).variants
        if v.tunables.get("smem_p") is smem_p
        and misfit(SPEC.implementation(v.implementation), ARCH, wanted, v.tunables) is None
    ]
    return max(fitting, key=lambda v: (v.tunables["kv_stage"], v.tunables["pv_n_tile"]))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Callable[..., Any]]]:
    """Every case's kernel, compiled side by side in isolation and loaded through tvm_ffi."""
    root = tmp_path_factory.mktemp("fmha")
    wanted: dict[Any, Unit] = {}
    for head_dim, normalize, smem_p, heads in CASES:
        variant = chosen(head_dim, normalize, smem_p, heads)
        wanted[head_dim, normalize, smem_p, heads] = units(
            SPEC, "fmha", problem(head_dim, normalize, heads), [variant]
        )[0]
    tasks = []
    for unit in wanted.values():
        (root / unit.key).mkdir()
        tasks.append(Task(id=unit.key, payload=unit.request(root / unit.key).to_payload()))
    limits = Limits(trace_s=60, backend_s=300, memory_bytes=8 * 2**30)
    with Pool(workers=None, warm=("cutedsl",), limits=limits) as pool:
        results = {result.id: result for result in pool.run(tasks)}
    loaded = {}
    for case, unit in wanted.items():
        result = results[unit.key]
        assert result.value is not None and result.status == "ok", f"{unit.variant}: {result.status}: {result.reason}"
        loaded[case] = load_artifact(Path(result.value["files"]["so"]), unit.symbol)
    yield loaded


@pytest.mark.parametrize(("head_dim", "normalize", "smem_p", "heads"), CASES)
def test_every_shape_of_the_grid_matches_the_oracle(
    kernels: dict[Any, Callable[..., Any]], head_dim: int, normalize: bool, smem_p: bool, heads: tuple[int, int]
) -> None:
    kernel = kernels[head_dim, normalize, smem_p, heads]
    worst_cosine, worst_norm, worst_abs, worst_lse = 1.0, 0.0, 0.0, 0.0
    for seed, (t, s_k) in enumerate(itertools.product(LENGTHS, KEYS)):
        p = problem(head_dim, normalize, heads, t, s_k)
        generator = torch.Generator("cuda").manual_seed(seed)
        batch = 2

        def random(*shape: int, generator: Any = generator) -> Any:
            return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

        q = random(batch, t, heads[0], head_dim)
        k, v = (random(batch, s_k, heads[1], head_dim) for _ in range(2))
        o = torch.full_like(q, float("nan"))
        outputs = [o]
        if not normalize:
            outputs += [torch.full((batch, heads[0], t), float("nan"), device="cuda") for _ in range(2)]
        scale = head_dim**-0.5
        kernel(q, k, v, *outputs, scale)
        torch.cuda.synchronize()
        expected = SPEC.reference(p, {"q": q, "k": k, "v": v, "scale": scale})
        got, want = o.double().flatten(), expected["o"].flatten()
        assert torch.isfinite(got).all(), f"t={t} s_k={s_k}: O has unwritten or non-finite elements"
        cosine = float(got @ want / (got.norm() * want.norm()))
        norm = float((got - want).norm() / want.norm())
        worst_cosine, worst_norm = min(worst_cosine, cosine), max(worst_norm, norm)
        worst_abs = max(worst_abs, float((got - want).abs().max()))
        assert cosine >= COSINE and norm <= RELATIVE_NORM, f"t={t} s_k={s_k}: cosine {cosine:.8f}, norm {norm:.2e}"
        if not normalize:
            lse, row_max = (x.double() for x in outputs[1:])
            worst_lse = max(
                worst_lse, float(((lse - expected["lse"]).abs() / expected["lse"].abs().clamp_min(1)).max())
            )
            assert worst_lse <= 1e-4, f"t={t} s_k={s_k}: LSE off by {worst_lse:.2e}"
            assert torch.allclose(row_max, expected["row_max"], rtol=1e-5, atol=1e-4)
            rebuilt = o.double() / torch.exp(lse - row_max * scale).permute(0, 2, 1).unsqueeze(-1)
            plain = SPEC.reference(Values({**p, "normalize": True}), {"q": q, "k": k, "v": v, "scale": scale})["o"]
            assert float((rebuilt - plain).norm() / plain.norm()) <= RELATIVE_NORM
    print(
        f"\nhead_dim={head_dim} normalize={normalize} smem_p={smem_p} heads={heads[0]}/{heads[1]}: "
        f"{len(LENGTHS) * len(KEYS)} shapes, worst cosine {worst_cosine:.7f}, norm {worst_norm:.2e}, "
        f"abs {worst_abs:.2e}, lse {worst_lse:.1e}"
    )
