"""The attention problem: its rules, its arguments, its cost, what kernels lack, and the workloads that ship."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from tunekit.cli.problems import problems
from tunekit.errors import SpecError
from tunekit.model import Values
from tunekit.spec import load_spec
from tunekit.spec.load import shipped_directory

SPEC = load_spec("fmha")
BASE = {"batch": 2, "heads": 8, "kv_heads": 2, "t": 5, "s_k": 200, "head_dim": 128}
TWO = {"sources": 2, "s_k2": 33}
LISTED = {"gather": True, "top_k": 16}
PAGED = {"page": 64, "has_lengths": True}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("heads_divide", {"kv_heads": 3}),
    ("sink_final", {"has_sink": True, "normalize": False}),
    ("shared_v", {"kv_shared": True, "head_dim_v": 256}),
    ("window_sides", {"window_left": 3}),
    ("window_sides", {"mask": "causal", "window_right": 0}),
    ("second_source", {"sources": 2}),
    ("second_source", {"s_k2": 33}),
    ("gather_list", {"gather": True}),
    ("gather_list", {"top_k": 16}),
    ("gather_positions", {**LISTED, "mask": "causal"}),
    ("gather_positions", {**LISTED, "has_lengths": True}),
    ("layouts", {**TWO, "varlen": True}),
    ("layouts", {**LISTED, "varlen": True}),
    ("layouts", {**TWO, **PAGED}),
    ("layouts", {**LISTED, "page": 64}),
    ("paged_lengths", {"page": 64}),
    ("packed_lengths", {"varlen": True, "has_lengths": True}),
    ("page_size", {"page": 96, "has_lengths": True}),
    ("table_covers", {**PAGED, "table_pages": 3}),
    ("packed_rows", {"varlen": True, "total_t": 11}),
    ("packed_rows", {"varlen": True, "total_s_k": 401}),
    ("unused", {"pages": 2}),
    ("unused", {"table_pages": 2}),
    ("unused", {"total_t": 10}),
    ("unused", {"total_s_k": 400}),
    ("unused", {**PAGED, "varlen": True, "total_s_k": 400}),
]


def problem(**more: Any) -> Values:
    return SPEC.problem({**BASE, **more})


@pytest.mark.parametrize(("rule", "more"), REFUSED, ids=str)
def test_a_rule_refuses(rule: str, more: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f": {rule}: "):
        problem(**more)


def test_every_rule_is_tried() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.name for rule in SPEC.constraints}


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        ("head_dim", 96),
        ("head_dim_v", 32),
        ("dtype", "float32"),
        ("mask", "diagonal"),
        ("sources", 3),
        ("window_left", -2),
    ],
)
def test_an_axis_refuses(axis: str, value: Any) -> None:
    with pytest.raises(SpecError):
        problem(**{axis: value})


def test_defaults_follow_from_the_other_values() -> None:
    assert problem().head_dim_v == 128
    p = problem(**PAGED)
    assert (p.table_pages, p.pages) == (4, 8)
    assert (problem().table_pages, problem().pages, problem().total_t, problem().total_s_k) == (1, 1, 1, 1)
    p = problem(varlen=True, batch=3)
    assert (p.total_t, p.total_s_k) == (10, 400)
    p = SPEC.problem({**{k: v for k, v in BASE.items() if k != "s_k"}, **PAGED, "table_pages": 5})
    assert p.s_k == 320


PLAIN = ("q", "k", "v", "o", "scale")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, PLAIN),
        ({"kv_shared": True}, ("q", "k", "o", "scale")),
        ({"return_lse": True}, ("q", "k", "v", "o", "lse", "scale")),
        ({"normalize": False}, ("q", "k", "v", "o", "lse", "row_max", "scale")),
        ({"mask": "causal"}, PLAIN),
        ({"mask": "window", "window_left": 3}, (*PLAIN, "left", "right")),
        ({"has_sink": True, "has_lengths": True}, ("q", "k", "v", "lengths", "sink", "o", "scale")),
        ({**TWO, "has_lengths": True}, ("q", "k", "v", "k2", "v2", "lengths", "lengths2", "o", "scale")),
        ({**TWO, **LISTED, "kv_shared": True}, ("q", "k", "k2", "indices", "o", "scale")),
        ({**TWO, **LISTED, "has_lengths": True}, ("q", "k", "v", "k2", "v2", "lengths", "indices", "o", "scale")),
        (LISTED, ("q", "k", "v", "indices", "o", "scale")),
        (PAGED, ("q", "k", "v", "lengths", "page_table", "o", "scale")),
        ({"varlen": True}, ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "o", "scale", "max_t")),
        ({**PAGED, "varlen": True}, ("q", "k", "v", "lengths", "page_table", "cu_seqlens_q", "o", "scale", "max_t")),
    ],
    ids=str,
)
def test_the_arguments_of_a_problem_in_call_order(more: dict[str, Any], names: tuple[str, ...]) -> None:
    assert tuple(arg.name for arg in SPEC.arguments(problem(**more))) == names


def test_shapes_follow_the_layout() -> None:
    def shapes(**more: Any) -> dict[str, tuple[int, ...]]:
        p = problem(head_dim_v=64, normalize=False, **more)
        return {arg.name: arg.sizes(p) for arg in SPEC.arguments(p) if hasattr(arg, "sizes")}

    plain = shapes()
    assert (plain["q"], plain["o"]) == ((2, 5, 8, 128), (2, 5, 8, 64))
    assert (plain["k"], plain["v"]) == ((2, 200, 2, 128), (2, 200, 2, 64))
    assert plain["lse"] == plain["row_max"] == (2, 8, 5)
    packed = shapes(varlen=True, total_t=7, total_s_k=300)
    assert (packed["q"], packed["o"], packed["lse"]) == ((7, 8, 128), (7, 8, 64), (8, 7))
    assert (packed["k"], packed["v"], packed["cu_seqlens_q"]) == ((300, 2, 128), (300, 2, 64), (3,))
    paged = shapes(**PAGED, varlen=True, total_t=7)
    assert (paged["q"], paged["k"], paged["v"]) == ((7, 8, 128), (8, 64, 2, 128), (8, 64, 2, 64))
    assert (paged["page_table"], paged["lengths"]) == ((2, 4), (2,))
    assert shapes(**TWO, **LISTED)["indices"] == (2, 5, 16)


def pairs_and_keys(p: Values, queries: int, keys: int) -> tuple[int, int]:
    """Visible pairs of source 1, and keys that some query sees, counted one by one."""
    pairs, seen = 0, set()
    for i in range(queries):
        for j in range(keys):
            diagonal = i + keys - queries
            sees = {
                "none": True,
                "causal": j <= diagonal,
                "causal_top_left": j <= i,
                "window": (p.window_left < 0 or j >= diagonal - p.window_left)
                and (p.window_right < 0 or j <= diagonal + p.window_right),
            }[p.mask]
            if sees:
                pairs += 1
                seen.add(j)
    return pairs, len(seen)


@pytest.mark.parametrize(("t", "s_k"), [(1, 1), (1, 40), (7, 40), (40, 40), (40, 7)])
@pytest.mark.parametrize("mask", ["none", "causal", "causal_top_left", *itertools.product((-1, 0, 9), repeat=2)])
def test_cost_counts_what_is_seen(mask: Any, t: int, s_k: int) -> None:
    sides = {} if isinstance(mask, str) else {"window_left": mask[0], "window_right": mask[1]}
    p = problem(t=t, s_k=s_k, head_dim_v=64, mask=mask if isinstance(mask, str) else "window", **sides)
    pairs, keys = pairs_and_keys(p, t, s_k)
    cost = SPEC.cost(p)
    assert cost.flops == 2 * 2 * 8 * pairs * (128 + 64)
    assert cost.bytes == 2 * 2 * (8 * t + 2 * keys) * (128 + 64)


def test_cost_of_the_other_flags() -> None:
    def both(**more: Any) -> tuple[float, float]:
        cost = SPEC.cost(problem(t=4, **more))
        return cost.flops, cost.bytes

    flops, moved = both()
    queries, rows = 2 * 2 * 8 * 4 * 256, 2 * 2 * 2 * 200 * 256
    assert (flops, moved) == (2 * 2 * 8 * 4 * 200 * 256, queries + rows)
    assert both(kv_shared=True) == (flops, queries + rows / 2)
    assert both(return_lse=True) == (flops, moved + 4 * 2 * 8 * 4)
    assert both(normalize=False) == (flops, moved + 2 * 4 * 2 * 8 * 4)
    assert both(has_lengths=True) == both(has_sink=True) == (flops, moved)
    assert both(**PAGED) == (flops, moved + 4 * 2 * 4)
    assert both(**TWO) == (flops * 233 / 200, queries + rows * 233 / 200)
    assert both(**LISTED) == (flops * 16 / 200, queries + rows * 4 * 16 / 200 + 4 * 2 * 4 * 16)
    assert both(gather=True, top_k=300) == (flops, moved + 4 * 2 * 4 * 300)
    assert both(**TWO, **LISTED) == (flops * 216 / 200, queries + rows * 233 / 200 + 4 * 2 * 4 * 16)
    # Packed: 2 sequences of 2 and 3 queries, 75 and 76 keys.
    p = problem(varlen=True, total_t=5, total_s_k=151, mask="causal")
    pairs = sum(pairs_and_keys(p, t, keys)[0] for t, keys in ((2, 75), (3, 76)))
    assert SPEC.cost(p).flops == 2 * 8 * pairs * 256
    assert SPEC.cost(p).bytes == 2 * (8 * 5 + 2 * 151) * 256
    assert SPEC.cost(problem(varlen=True, total_t=5, **PAGED)).flops == 2 * 8 * 5 * 200 * 256


WORKLOADS = sorted(path.stem for path in (shipped_directory() / "workloads").glob("*.jsonl"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_holds_valid_problems(name: str) -> None:
    """Each fits its model's shape, and says where that is from."""
    first = (shipped_directory() / "workloads" / f"{name}.jsonl").read_text().splitlines()[0]
    assert first.startswith("# ")
    found = problems(SPEC, (), Path(name))
    assert len(found) >= 20
    for p in found:
        assert SPEC.cost(p).flops > 0
        if name.startswith("dsv4"):
            pro = name == "dsv4-pro"
            assert (p.heads, p.kv_heads, p.head_dim, p.head_dim_v) == (128 if pro else 64, 1, 512, 512)
            assert p.kv_shared and p.has_sink and p.top_k in (0, 1024 if pro else 512)
            assert p.s_k == (128 if p.t == 1 else p.t + 127)
        else:
            assert (p.heads, p.kv_heads, p.head_dim) == (32, 8, 128)


def test_the_workloads_cover_what_their_models_do() -> None:
    assert WORKLOADS == ["dsv4-flash", "dsv4-pro", "llama-gqa"]
    for name in WORKLOADS[:2]:
        decode = [p for p in problems(SPEC, (), Path(name)) if p.t == 1]
        for kind in ({"gather": True}, {"gather": False, "sources": 2}, {"sources": 1}):
            of_kind = [p for p in decode if all(p[axis] == value for axis, value in kind.items())]
            assert {p.batch for p in of_kind} == {1, 2, 4, 8, 16, 32, 64, 128}


FEATURES = {
    "float16": {"dtype": "float16"},
    "head_dim_v": {"head_dim_v": 64},
    "lse": {"return_lse": True},
    "kv_shared": {"kv_shared": True},
    "causal": {"mask": "causal"},
    "window": {"mask": "window"},
    "lengths": {"has_lengths": True},
    "sink": {"has_sink": True},
    "sources": TWO,
    "gather": LISTED,
    "paged": PAGED,
    "varlen": {"varlen": True},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kernel_without_a_feature_says_so(feature: str) -> None:
    missing = importlib.import_module("tunekit_specs.attention.missing")
    assert set(missing.FEATURES) == set(FEATURES)
    (rule,) = missing.not_yet("sm90", feature)
    assert rule.name == f"not_yet_{feature}" and rule.why.startswith("the sm90 kernel has no ")
    assert rule.holds(problem()) and not rule.holds(problem(**FEATURES[feature]))
