"""What the attention spec draws keeps its promises: lengths, lists, pages, packed rows, and NaN elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.test_attention_oracle import BASE as CALL
from tests.kernels.test_attention_oracle import CASES
from tunekit.dispatch import checks
from tunekit.dispatch.calls import CallForm
from tunekit.model import Values
from tunekit.spec import load_spec
from tunekit.spec.inputs import draw, scalars

SPEC = load_spec("fmha")
CPU = torch.device("cpu")
BASE = {"heads": 4, "kv_heads": 2, "t": 3, "s_k": 200, "head_dim": 64}
SEEDS = range(5)


def drawn(seed: int = 0, **more: Any) -> tuple[Values, dict[str, torch.Tensor]]:
    p = SPEC.problem({**BASE, **more})
    return p, draw(SPEC, p, seed, CPU)


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Which rows hold NaN; those hold nothing else, the others none, and every value is of a normal distribution."""
    rows = tensor.isnan().flatten(-2)
    assert torch.equal(rows.any(-1), rows.all(-1))
    values = tensor[~tensor.isnan()].double()
    bound = 6 / values.numel() ** 0.5
    assert abs(float(values.mean())) < bound and abs(float(values.std()) - 1) < bound
    return rows.any(-1)


def test_the_same_seed_draws_the_same() -> None:
    for more in ({"has_lengths": True}, {"gather": True, "top_k": 9}, {"varlen": True}):
        (_, one), (_, two), (_, other) = (drawn(seed, batch=5, **more) for seed in (1, 1, 2))
        assert all(torch.equal(one[name].nan_to_num(), two[name].nan_to_num()) for name in one)
        assert not all(torch.equal(one[name].nan_to_num(), other[name].nan_to_num()) for name in one)


def test_plain_inputs_are_noise() -> None:
    _, inputs = drawn(batch=2)
    assert set(inputs) == {"q", "k", "v"} and not any(is_nan(x).any() for x in inputs.values())


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("kv_shared", [False, True])
def test_lengths_are_ragged_and_nan_lies_past_them(batch: int, kv_shared: bool) -> None:
    for seed in SEEDS:
        p, inputs = drawn(seed, batch=batch, has_lengths=True, kv_shared=kv_shared)
        lengths = inputs["lengths"].tolist()
        assert all(0 <= length <= p.s_k for length in lengths)
        if batch == 1:
            assert 0 < lengths[0] < p.s_k
        else:
            assert 0 in lengths and p.s_k in lengths
        if batch > 2:
            assert any(0 < length < p.s_k for length in lengths)
        assert ("v" in inputs) is not kv_shared
        past = torch.arange(p.s_k) >= inputs["lengths"].unsqueeze(1)
        for name in {"k", "v"} & set(inputs):
            assert torch.equal(is_nan(inputs[name]), past)


@pytest.mark.parametrize("batch", [1, 2, 3, 9])
def test_both_sources_have_lengths(batch: int) -> None:
    p, inputs = drawn(batch=batch, has_lengths=True, sources=2, s_k2=130)
    first, second = inputs["lengths"].tolist(), inputs["lengths2"].tolist()
    assert torch.equal(is_nan(inputs["k2"]), torch.arange(p.s_k2) >= inputs["lengths2"].unsqueeze(1))
    assert torch.equal(is_nan(inputs["v2"]), is_nan(inputs["k2"]))
    if batch > 1:
        assert (0, 0) in zip(first, second, strict=True)
    if batch > 4:
        assert any(a == 0 < b for a, b in zip(first, second, strict=True))
        assert any(b == 0 < a for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("sources", "rows"), [(1, 200), (2, 130), (2, 5)])
def test_lists_name_distinct_rows_and_nan_lies_where_nobody_looks(sources: int, rows: int) -> None:
    for seed in SEEDS:
        more = {"sources": 2, "s_k2": rows} if sources == 2 else {}
        p, inputs = drawn(seed, batch=2, gather=True, top_k=16, **more)
        lists = inputs["indices"]
        assert lists.dtype is torch.int32 and int(lists.min()) == -1 and int(lists.max()) < rows
        for listed in lists.flatten(0, 1).tolist():
            there = [row for row in listed if row >= 0]
            assert len(set(there)) == len(there)
            assert rows < 16 or there != sorted(there) or len(there) < 2
        assert (lists[0, 0] >= 0).sum() == min(16, rows)
        assert (lists[-1, -1] == -1).all()
        assert (lists[:, :-1] == -1).any() and len(lists.flatten(0, 1).unique(dim=0)) > 3
        source = "2" if sources == 2 else ""
        for b in range(p.batch):
            unlisted = [row not in lists[b].unique().tolist() for row in range(rows)]
            for name in ("k", "v"):
                assert is_nan(inputs[f"{name}{source}"])[b].tolist() == unlisted
        assert sources == 1 or not inputs["k"].isnan().any()


def test_one_token_has_a_full_list() -> None:
    _, inputs = drawn(batch=1, t=1, gather=True, top_k=16)
    assert (inputs["indices"] >= 0).all()


@pytest.mark.parametrize("varlen", [False, True])
def test_pages_are_a_permutation_of_the_pool(varlen: bool) -> None:
    for seed in SEEDS:
        p, inputs = drawn(seed, batch=4, has_lengths=True, page=64, varlen=varlen)
        assert "cu_seqlens_k" not in inputs
        table, lengths = inputs["page_table"], inputs["lengths"].tolist()
        assert sorted(table.flatten().tolist()) == list(range(p.pages))
        assert 0 in lengths and p.s_k in lengths
        nan = is_nan(inputs["k"])
        assert torch.equal(nan, is_nan(inputs["v"]))
        for pages, length in zip(table, lengths, strict=True):
            own = nan[pages.long()].flatten()
            assert not own[:length].any() and own[length:].all()


@pytest.mark.parametrize("pages", [2, 3, 9, 16, 40])
def test_a_pool_of_any_size_shares_no_page_that_is_read(pages: int) -> None:
    _, inputs = drawn(batch=4, has_lengths=True, page=64, pages=pages)
    lengths = inputs["lengths"].tolist()
    used = [row[: -(-n // 64)].tolist() for row, n in zip(inputs["page_table"], lengths, strict=True)]
    flat = [page for row in used for page in row]
    assert len(set(flat)) == len(flat) and any(lengths)
    assert set(inputs["page_table"].flatten().tolist()) <= set(range(pages))
    assert int((~is_nan(inputs["k"])).sum()) == sum(lengths)


@pytest.mark.parametrize(
    ("batch", "t", "total"),
    [
        (1, 7, 7),
        (1, 7, 3),
        (2, 7, 10),
        (3, 7, 14),
        (3, 7, 21),
        (4, 7, 1),
        (9, 7, 35),
        (9, 7, 62),
        (32, 1, 16),
        (3, 5, 2),
    ],
)
def test_packed_sequences_are_ragged_and_add_up(batch: int, t: int, total: int) -> None:
    for seed in SEEDS:
        p, inputs = drawn(seed, batch=batch, t=t, total_t=total, varlen=True)
        assert inputs["q"].shape[0] == total and inputs["k"].shape[0] == p.total_s_k
        for name, most, rows in (("cu_seqlens_q", t, total), ("cu_seqlens_k", p.s_k, p.total_s_k)):
            starts = inputs[name]
            assert starts.shape == (batch + 1,) and starts[0] == 0 and starts[-1] == rows
            lengths = starts.diff().tolist()
            assert min(lengths) >= 0 and max(lengths) <= most
            assert max(lengths) == most or rows < most
            assert 0 in lengths or batch < 3 or rows > (batch - 1) * most
            assert len(set(lengths)) > 1 or batch == 1 or rows == batch * most
        assert not any(is_nan(inputs[name]).any() for name in ("q", "k", "v"))


def test_a_prompt_that_attends_to_itself_has_one_packing() -> None:
    _, inputs = drawn(batch=5, t=200, varlen=True, mask="causal")
    assert torch.equal(inputs["cu_seqlens_q"], inputs["cu_seqlens_k"])


def test_a_sink_is_normal() -> None:
    _, inputs = drawn(batch=1, heads=512, has_sink=True)
    assert inputs["sink"].dtype is torch.float32
    assert abs(float(inputs["sink"].mean())) < 0.3 and abs(float(inputs["sink"].std()) - 1) < 0.2


@pytest.mark.parametrize(
    ("axis", "sizes"),
    [("batch", (1, 2, 3, 8)), ("t", (1, 2, 130)), ("s_k", (1, 63, 64, 65)), ("s_k2", (1, 2)), ("top_k", (1, 2))],
)
@pytest.mark.parametrize(
    "flags",
    [
        {"has_lengths": True, "page": 64, "normalize": False},
        {"has_lengths": True, "page": 64, "varlen": True, "mask": "causal"},
        {"varlen": True, "mask": "window", "window_left": 3, "return_lse": True},
        {"sources": 2, "s_k2": 40, "gather": True, "top_k": 8, "has_lengths": True, "has_sink": True},
        {"sources": 2, "s_k2": 40, "has_lengths": True, "mask": "causal", "return_lse": True},
        {"gather": True, "top_k": 8, "normalize": False},
    ],
    ids=str,
)  # fmt: skip
def test_the_oracle_sees_no_nan_at_any_size(flags: dict[str, Any], axis: str, sizes: tuple[int, ...]) -> None:
    if axis in ("s_k2", "top_k") and axis not in flags:
        return
    for size in sizes:
        p, inputs = drawn(**{"batch": 3, "s_k": 70, **flags, axis: size})
        for name, output in SPEC.reference(p, {**inputs, **scalars(SPEC, p)}).items():
            assert not output.isnan().any(), f"{name} of {p}"


SHAPES = {"batch", "heads", "kv_heads", "head_dim", "dtype", "s_k2", "top_k", "pages"}


@pytest.mark.parametrize("name", CASES)
def test_a_call_by_tensors_and_flags_states_the_problem(name: str) -> None:
    """The sizes come from the shapes: all but t and s_k where the sequences are packed, and a page's keys."""
    p = SPEC.problem({**CALL, **CASES[name]})
    flags = {axis: value for axis, value in CASES[name].items() if axis not in SHAPES}
    if p.varlen:
        flags |= {"t": p.t, "s_k": p.s_k}
    elif p.page:
        flags.pop("s_k", None)
    slots, given = CallForm(SPEC).arrange((), {**draw(SPEC, p, 0, CPU), **flags})
    stated = checks.check(SPEC, slots, given).problem
    if p.page and not p.varlen:
        assert stated.s_k == p.table_pages * p.page
        stated = Values({**stated, "s_k": p.s_k})
    assert stated == p
