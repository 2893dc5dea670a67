"""torch's attention as an implementation of fmha: right on the CPU, where it can run there; else refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import tunekit
from tunekit.arch import parse_arch
from tunekit.backends.load import make
from tunekit.measure.device import Device
from tunekit.measure.verify import Verifier
from tunekit.model import Level, Values
from tunekit.space import broken, expand
from tunekit.spec import Build, load_spec
from tunekit.trials import Status

REFERENCE = f"{Path(__file__).resolve().parents[1] / 'specs' / 'host_attention.py'}:host_attention"
SPEC = load_spec(REFERENCE)
SDPA = SPEC.implementation("torch_sdpa")
HOST = parse_arch("host")
MHA, GQA, MQA = ({"heads": heads, "kv_heads": kv_heads} for heads, kv_heads in ((3, 3), (4, 2), (4, 1)))
SMALL = {"batch": 2, "t": 5, "s_k": 37, "head_dim": 64}
TOP_LEFT = {"mask": "causal_top_left"}


@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {**MHA, **SMALL},
        {**GQA, **SMALL},
        {**MQA, **SMALL, "t": 1},
        {**GQA, **SMALL, "dtype": "float16", "head_dim_v": 128},
        {**GQA, **SMALL, "kv_shared": True, "head_dim": 128, "head_dim_v": 64},
        {**GQA, **SMALL, "mask": "causal", "t": 37},
        {**MQA, **SMALL, "mask": "causal", "t": 1},
        {**MHA, **SMALL, **TOP_LEFT},
        {**MQA, **SMALL, **TOP_LEFT, "s_k": 3},
    ],
    ids=str,
)
def test_it_computes_what_the_oracle_does(backend: str, pack: bool, given: dict[str, Any]) -> None:
    """Each problem, and those at the edges that the constraints allow, by the spec's own tolerance."""
    problem, tunables = SPEC.problem(given), Values(backend=backend, pack=pack)
    refused = broken(SDPA, problem, tunables)
    if refused is not None:
        assert refused.name == "pack_rows"
        return
    (variant,) = [v for v in expand(SPEC, HOST, problem).variants if v.tunables == tunables]
    function = make(SDPA, Build(HOST, SPEC.static(problem), tunables))
    verifier = Verifier(Device(None))
    outcome = verifier.verify(REFERENCE, SPEC, variant, problem, function, 2, True, lambda phase, doing: None)
    assert outcome.status is Status.OK, outcome.reason


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
@pytest.mark.parametrize(("pack", "kv_shared"), list(itertools.product((False, True), repeat=2)))
def test_the_gpu_backends_are_called_by_their_schemas(backend: str, pack: bool, kv_shared: bool) -> None:
    """On tensors without data: arguments, shapes and layouts are those that torch's operators take."""
    heads = MHA if backend == "efficient" and not pack else GQA
    problem = SPEC.problem({**SMALL, **heads, "kv_shared": kv_shared})
    tunables = Values(backend=backend, pack=pack)
    assert broken(SDPA, problem, tunables) is None
    function = make(SDPA, Build(HOST, SPEC.static(problem), tunables))
    arguments = {
        a.name: torch.empty(a.sizes(problem), dtype=torch.bfloat16, device="meta")
        for a in SPEC.arguments(problem)
        if a.name != "scale"
    }
    function(*arguments.values(), 0.125)


@pytest.mark.parametrize(
    ("given", "tunables", "rule"),
    [
        ({"normalize": False}, {}, "no_merge"),
        ({"return_lse": True}, {}, "no_lse"),
        ({"has_sink": True}, {}, "no_sink"),
        ({"has_lengths": True}, {}, "no_lengths"),
        ({"mask": "window", "window_left": 7}, {}, "no_window"),
        ({"sources": 2, "s_k2": 16}, {}, "no_sources"),
        ({"gather": True, "top_k": 16}, {}, "no_gather"),
        ({"has_lengths": True, "page": 64}, {}, "no_lengths"),
        ({"varlen": True}, {}, "no_varlen"),
        ({"mask": "causal"}, {}, "square_causal"),
        ({"mask": "causal_top_left"}, {"backend": "cudnn"}, "square_top_left"),
        ({"mask": "causal", "t": 37}, {"pack": True}, "pack_rows"),
        ({"heads": 2}, {"pack": True}, "pack_rows"),
        ({}, {"backend": "efficient"}, "grouped_heads"),
        ({"head_dim": 512}, {"backend": "flash"}, "head_dims"),
        ({"head_dim_v": 128}, {"backend": "flash"}, "head_dims"),
        ({"t": 8192, "s_k": 8192, "batch": 16}, {"backend": "math"}, "scores_fit"),
    ],
    ids=str,
)
def test_what_it_does_not_offer_is_refused_by_name(given: dict[str, Any], tunables: dict[str, Any], rule: str) -> None:
    problem = SPEC.problem({**SMALL, **GQA, **given})
    found = broken(SDPA, problem, Values({"backend": "auto", "pack": False, **tunables}))
    assert found is not None and found.name == rule


def test_untuned_attention_is_served_by_it(tmp_path: Path) -> None:
    kernel = tunekit.load(REFERENCE, database=tmp_path / "tunekit.db", artifacts=tmp_path / "artifacts")
    q, k, v = (torch.randn(2, n, heads, 64).bfloat16() for n, heads in ((5, 4), (37, 2), (37, 2)))
    o = kernel(q, k, v)
    wanted = SPEC.reference(SPEC.problem({**SMALL, **GQA}), {"q": q, "k": k, "v": v, "scale": 0.125})["o"]
    assert float((o.double() - wanted).norm() / wanted.norm()) < 3e-3
    choice = kernel.choice(q, k, v)
    assert choice.level is Level.DEFAULT and choice.variant.tunables == Values(backend="auto", pack=True)
