"""The attention oracle against torch's own attention in float64, for every flag; and the same with P and O rounded."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tunekit.model import Values
from tunekit.spec import load_spec
from tunekit.spec.inputs import draw, scalars

SPEC = load_spec("fmha")
ORACLE = importlib.import_module("tunekit_specs.attention.oracle")
CPU = torch.device("cpu")
BASE = {"batch": 4, "heads": 8, "kv_heads": 2, "t": 5, "s_k": 70, "head_dim": 64}
TWO = {"sources": 2, "s_k2": 33}
WINDOW = {"mask": "window", "window_left": 6, "window_right": 0}
DSV4 = {"kv_heads": 1, "head_dim": 512, "kv_shared": True, "has_sink": True}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one KV head": {"heads": 6, "kv_heads": 1},
    "no groups": {"heads": 3, "kv_heads": 3},
    "float16": {"dtype": "float16"},
    "narrow V": {"head_dim": 128, "head_dim_v": 64},
    "shared V": {"kv_shared": True},
    "shared narrow V": {"kv_shared": True, "head_dim": 128, "head_dim_v": 64},
    "LSE": {"return_lse": True},
    "causal": {"mask": "causal"},
    "causal, more queries than keys": {"mask": "causal", "t": 9, "s_k": 4, "return_lse": True},
    "causal from the top left": {"mask": "causal_top_left"},
    "window": {"mask": "window", "window_left": 6, "window_right": 2},
    "window to the left": {"mask": "window", "window_left": 3},
    "window to the right": {"mask": "window", "window_right": 3},
    "window of one": {"mask": "window", "window_left": 0, "window_right": 0},
    "window past the start": {"mask": "window", "window_left": 2, "window_right": 0, "t": 9, "s_k": 4},
    "lengths": {"has_lengths": True, "return_lse": True},
    "lengths, causal": {"has_lengths": True, "mask": "causal"},
    "lengths, window": {"has_lengths": True, **WINDOW},
    "sink": {"has_sink": True, "return_lse": True},
    "sink, empty rows": {"has_sink": True, "has_lengths": True, "mask": "causal", "return_lse": True},
    "two sources": {**TWO, "return_lse": True},
    "two sources, window": {**TWO, **WINDOW},
    "two sources, lengths": {**TWO, "has_lengths": True, "return_lse": True},
    "gather": {"gather": True, "top_k": 16, "return_lse": True},
    "gather, fewer rows than entries": {"gather": True, "top_k": 100},
    "gather the second": {**TWO, "gather": True, "top_k": 16},
    "like DSV4": {**DSV4, **TWO, **WINDOW, "has_lengths": True, "gather": True, "top_k": 16, "return_lse": True},
    "pages": {"page": 64, "has_lengths": True, "return_lse": True},
    "pages, causal, sink": {"page": 64, "has_lengths": True, "mask": "causal", "has_sink": True, "s_k": 200},
    "a small pool": {"page": 64, "has_lengths": True, "s_k": 200, "pages": 7},
    "packed": {"varlen": True, "return_lse": True},
    "packed, causal": {"varlen": True, "mask": "causal", "t": 16, "s_k": 16},
    "packed, window, shared V": {"varlen": True, **WINDOW, "kv_shared": True},
    "packed, pages": {"varlen": True, "page": 64, "has_lengths": True, "mask": "causal", "return_lse": True},
}


def case(name: str, **more: Any) -> tuple[Values, dict[str, Any]]:
    """A problem and its inputs."""
    p = SPEC.problem({**BASE, **CASES[name], **more})
    return p, {**draw(SPEC, p, 3, CPU), **scalars(SPEC, p)}


def visible(p: Values, queries: int, keys: int) -> torch.Tensor:
    """[queries, keys]: which pairs of source 1 see each other."""
    i, j = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    diagonal = i + keys - queries
    if p.mask == "causal":
        return j <= diagonal
    if p.mask == "causal_top_left":
        return j <= i
    left_ok = (j >= diagonal - p.window_left) | (p.window_left == -1)
    right_ok = (j <= diagonal + p.window_right) | (p.window_right == -1)
    return left_ok & right_ok


def one_sequence(p: Values, inputs: dict[str, Any], b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [queries, heads, head_dim_v], lse [heads, queries]) of sequence `b` by torch's attention.

    All keys side by side in one tensor, whether a query sees one in a mask, a sink as a key of zeros with its logit.
    """
    q = inputs["q"][inputs["cu_seqlens_q"][b] : inputs["cu_seqlens_q"][b + 1]] if p.varlen else inputs["q"][b]
    heads = ("k",) if p.kv_shared else ("k", "v")
    if p.page:
        n = int(inputs["lengths"][b])
        places = [(int(inputs["page_table"][b, j // p.page]), j % p.page) for j in range(n)]
        kv = [torch.stack([inputs[x][place] for place in places]) if n else inputs[x][0, :0] for x in heads]
    elif p.varlen:
        kv = [inputs[x][inputs["cu_seqlens_k"][b] : inputs["cu_seqlens_k"][b + 1]] for x in heads]
    else:
        kv = [inputs[x][b, : inputs["lengths"][b] if p.has_lengths else None] for x in heads]
    seen = visible(p, len(q), len(kv[0]))
    if p.sources == 2:
        second = [inputs[f"{x}2"][b, : inputs["lengths2"][b] if "lengths2" in inputs else None] for x in heads]
        seen = torch.cat([seen, torch.ones(len(q), len(second[0]), dtype=torch.bool)], dim=1)
        kv = [torch.cat(pair) for pair in zip(kv, second, strict=True)]
    if p.gather:
        rows = p.s_k2 if p.sources == 2 else p.s_k
        seen[:, -rows:] = False
        for i, listed in enumerate(inputs["indices"][b]):
            seen[i, len(kv[0]) - rows + listed[listed >= 0].long()] = True
        for x in kv:
            x[~seen.any(0)] = 0  # NaN, where nobody looks
    k, v = kv[0], kv[-1][..., : p.head_dim_v]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = p.heads // p.kv_heads
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    scores = (inputs["scale"] * q @ k.mT).masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    bias = torch.zeros(p.heads, *seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    if p.has_sink:
        k, v = (torch.cat([x, x.new_zeros(p.heads, 1, x.shape[-1])], dim=1) for x in (k, v))
        bias = torch.cat([bias, inputs["sink"].double().view(-1, 1, 1).expand(-1, len(seen), 1)], dim=2)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=inputs["scale"])
    return o.masked_fill(lse.isneginf().unsqueeze(-1), 0.0).transpose(0, 1), lse


def expected(p: Values, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    sequences = [one_sequence(p, inputs, b) for b in range(p.batch)]
    join = (lambda parts, dim: torch.cat(parts, dim)) if p.varlen else (lambda parts, _: torch.stack(parts))
    return {"o": join([o for o, _ in sequences], 0), "lse": join([lse for _, lse in sequences], 1)}


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_is_torchs_attention(name: str) -> None:
    p, inputs = case(name)
    got, want = SPEC.reference(p, inputs), expected(p, inputs)
    outputs = {a.name: a for a in SPEC.arguments(p) if getattr(a, "role", "") == "output"}
    assert set(got) == set(outputs)
    for output, tensor in got.items():
        assert tuple(tensor.shape) == outputs[output].sizes(p) and tensor.dtype is torch.float64
        assert not tensor.isnan().any()
        torch.testing.assert_close(tensor, want[output])


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].get("has_sink")])
def test_unnormalised_outputs_give_the_attention_back(name: str) -> None:
    """By the documented formula; the LSE is that of the normalised output."""
    p, inputs = case(name)
    partial = SPEC.reference(Values({**p, "normalize": False, "return_lse": False}), inputs)
    whole = SPEC.reference(Values({**p, "return_lse": True}), inputs)
    torch.testing.assert_close(partial["lse"], whole["lse"])
    empty = partial["row_max"].isneginf()
    assert torch.equal(empty, partial["lse"].isneginf())
    weight = torch.exp(partial["lse"] - partial["row_max"] * inputs["scale"]).masked_fill(empty, 1.0)
    torch.testing.assert_close(partial["o"] / weight.transpose(-1, -2).unsqueeze(-1), whole["o"])


def test_row_max_is_the_largest_raw_score() -> None:
    p, inputs = case("plain", normalize=False)
    k = inputs["k"].double().repeat_interleave(4, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", inputs["q"].double(), k)
    torch.testing.assert_close(SPEC.reference(p, inputs)["row_max"], scores.amax(-1))


def test_parts_merge_into_the_whole() -> None:
    """Two ranges of keys, merged by their statistics, are the attention to both."""
    p, inputs = case("plain", normalize=False)
    parts = [
        SPEC.reference(p, {**inputs, **{name: inputs[name][:, keys] for name in ("k", "v")}})
        for keys in (slice(0, 20), slice(20, None))
    ]
    row_max = torch.maximum(*(part["row_max"] for part in parts))
    weights = [torch.exp(inputs["scale"] * (part["row_max"] - row_max)) for part in parts]
    sums = [torch.exp(part["lse"] - inputs["scale"] * part["row_max"]) for part in parts]
    row_sum = sum(weight * own for weight, own in zip(weights, sums, strict=True))
    o = sum(w.transpose(1, 2).unsqueeze(-1) * part["o"] for w, part in zip(weights, parts, strict=True))
    whole = SPEC.reference(Values({**p, "normalize": True}), inputs)["o"]
    torch.testing.assert_close(o / row_sum.transpose(1, 2).unsqueeze(-1), whole)


def test_a_row_without_keys_is_zero_whatever_the_sink() -> None:
    p, inputs = case("sink, empty rows")
    got = SPEC.reference(p, inputs)
    empty = got["lse"].isneginf()
    assert empty.any() and not empty.all()
    assert not got["o"].transpose(1, 2)[empty].any()
    p, inputs = case("lengths", normalize=False, return_lse=False)
    got = SPEC.reference(p, inputs)
    assert torch.equal(got["row_max"].isneginf(), got["lse"].isneginf()) and got["lse"].isneginf().any()


def test_a_sink_weighs_the_output_by_the_documented_formula() -> None:
    p, inputs = case("sink")
    got = SPEC.reference(p, inputs)
    without = SPEC.reference(Values({**p, "has_sink": False}), inputs)
    torch.testing.assert_close(got["lse"], without["lse"])
    weight = torch.exp(got["lse"]) / (torch.exp(got["lse"]) + torch.exp(inputs["sink"].double()).unsqueeze(-1))
    torch.testing.assert_close(got["o"], without["o"] * weight.transpose(1, 2).unsqueeze(-1))


@pytest.mark.parametrize("name", CASES)
def test_the_size_of_a_chunk_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, inputs = case(name)
    whole = SPEC.reference(p, inputs)
    monkeypatch.setattr(ORACLE, "CHUNK_ELEMENTS", 300)
    for output, tensor in SPEC.reference(p, inputs).items():
        torch.testing.assert_close(tensor, whole[output])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("normalize", [True, False])
def test_rounding_p_and_o_costs_what_the_gate_allows(dtype: str, normalize: bool) -> None:
    p, inputs = case("plain", dtype=dtype, normalize=normalize, s_k=500, t=16)
    exact, got = SPEC.reference(p, inputs), ORACLE.rounded(p, inputs)
    o, want = got["o"].flatten(), exact["o"].flatten()
    assert float(o @ want / (o.norm() * want.norm())) >= 0.999997
    error = float((o - want).norm() / want.norm())
    assert (1e-3 if dtype == "bfloat16" else 1e-4) < error < (3e-3 if dtype == "bfloat16" else 1e-3)
    assert torch.equal(got["o"], got["o"].to(inputs["q"].dtype).double())
    only_o = float((exact["o"].to(inputs["q"].dtype).double() - exact["o"]).norm() / exact["o"].norm())
    assert error > 1.1 * only_o  # P is rounded too
    for name in set(got) - {"o"}:
        torch.testing.assert_close(got[name], exact[name])


@pytest.mark.parametrize("name", CASES)
def test_the_rounded_oracle_covers_every_flag(name: str) -> None:
    p, inputs = case(name)
    exact, got = SPEC.reference(p, inputs), ORACLE.rounded(p, inputs)
    assert got.keys() == exact.keys()
    # With one key a row P is 1 and O a row of V: nothing to round.
    assert name == "window of one" or not torch.equal(got["o"], exact["o"])
    assert float((got["o"] - exact["o"]).norm()) <= 4e-3 * float(exact["o"].norm())
