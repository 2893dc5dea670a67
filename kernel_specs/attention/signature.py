"""The attention problem: its axes, its arguments in call order, and the rules that a problem obeys.

What the words mean is told in kernel_specs/fmha.py. A shape names axes; where a problem's tensors lie differently
(packed sequences, pages), a form of the shape says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tunekit.model import Values
from tunekit.spec import Axis, Constraint, ScalarArg, TensorArg

MASKS = ("none", "causal", "causal_top_left", "window")
HEAD_DIMS = (64, 128, 256, 512)
PAGE_KEYS = 64  # a page holds a multiple of this many keys


def _packed_queries(p: Values) -> int:
    """Half of what would fit besides one whole sequence, so that they are ragged; 1 where nothing is packed."""
    return (p.batch + 1) * p.t // 2 if p.varlen else 1


def _packed_keys(p: Values) -> int:
    return (p.batch + 1) * p.s_k // 2 if packs_keys(p) else 1


def packs_keys(p: Values) -> bool:
    """Whether K and V are packed end to end: of packed sequences those that are in no pages."""
    return bool(p.varlen and p.page == 0)


AXES = (
    Axis("batch", bucket="pow2", default=1, edges=(1, 3)),
    Axis("heads", static=True),
    Axis("kv_heads", static=True),
    Axis("t", bucket="pow2", edges=(1, 5)),
    Axis("s_k", bucket="pow2", edges=(1, 77, 640), default=lambda p: p.page * p.table_pages if p.page else None),
    Axis("head_dim", values=HEAD_DIMS, static=True),
    Axis("head_dim_v", values=HEAD_DIMS, static=True, default=lambda p: p.head_dim),
    Axis("dtype", kind="dtype", values=("bfloat16", "float16"), static=True, default="bfloat16"),
    Axis("normalize", kind="flag", static=True, default=True),
    Axis("return_lse", kind="flag", static=True, default=False),
    Axis("kv_shared", kind="flag", static=True, default=False),
    Axis("mask", kind="name", values=MASKS, static=True, default="none"),
    Axis("window_left", minimum=-1, default=-1),
    Axis("window_right", minimum=-1, default=-1),
    Axis("has_lengths", kind="flag", static=True, default=False),
    Axis("has_sink", kind="flag", static=True, default=False),
    Axis("sources", values=(1, 2), static=True, default=1),
    Axis("s_k2", minimum=0, bucket="pow2", default=0, edges=(1, 130)),
    Axis("gather", kind="flag", static=True, default=False),
    Axis("top_k", minimum=0, bucket="pow2", default=0, edges=(1, 130)),
    Axis("page", minimum=0, static=True, default=0),
    Axis("table_pages", bucket="pow2", default=lambda p: -(-p.s_k // p.page) if p.page else 1),
    Axis("pages", bucket="pow2", default=lambda p: p.batch * p.table_pages if p.page else 1),
    Axis("varlen", kind="flag", static=True, default=False),
    Axis("total_t", bucket="pow2", default=_packed_queries),
    Axis("total_s_k", bucket="pow2", default=_packed_keys),
)


def _varlen(p: Values) -> bool:
    return bool(p.varlen)


def _paged(p: Values) -> bool:
    return bool(p.page > 0)


def _two(p: Values) -> bool:
    return bool(p.sources == 2)


def _own_v(p: Values) -> bool:
    return not p.kv_shared


def _partial(p: Values) -> bool:
    return not p.normalize


def _window(p: Values) -> bool:
    return bool(p.mask == "window")


def _queries(name: str, columns: str, role: Literal["input", "output"]) -> TensorArg:
    packed = ("total_t", "heads", columns)
    return TensorArg(name, ("batch", "t", "heads", columns), "dtype", role=role, forms=((_varlen, packed),))


def _keys(name: str, columns: str, when: Callable[[Values], bool] | None = None) -> TensorArg:
    forms = (
        (_paged, ("pages", "page", "kv_heads", columns)),
        (_varlen, ("total_s_k", "kv_heads", columns)),
    )
    return TensorArg(name, ("batch", "s_k", "kv_heads", columns), "dtype", when=when, forms=forms)


def _statistic(name: str, when: Callable[[Values], bool]) -> TensorArg:
    forms = ((_varlen, ("heads", "total_t")),)
    return TensorArg(name, ("batch", "heads", "t"), "float32", role="output", when=when, forms=forms)


SIGNATURE = (
    _queries("q", "head_dim", "input"),
    _keys("k", "head_dim"),
    _keys("v", "head_dim_v", when=_own_v),
    TensorArg("k2", ("batch", "s_k2", "kv_heads", "head_dim"), "dtype", when=_two),
    TensorArg("v2", ("batch", "s_k2", "kv_heads", "head_dim_v"), "dtype", when=lambda p: _two(p) and _own_v(p)),
    TensorArg("lengths", ("batch",), "int32", when=lambda p: p.has_lengths),
    TensorArg("lengths2", ("batch",), "int32", when=lambda p: p.has_lengths and _two(p) and not p.gather),
    TensorArg("indices", ("batch", "t", "top_k"), "int32", when=lambda p: p.gather),
    TensorArg("page_table", ("batch", "table_pages"), "int32", when=_paged),
    TensorArg("cu_seqlens_q", ("batch + 1",), "int32", when=_varlen),
    TensorArg("cu_seqlens_k", ("batch + 1",), "int32", when=packs_keys),
    TensorArg("sink", ("heads",), "float32", when=lambda p: p.has_sink),
    _queries("o", "head_dim_v", "output"),
    _statistic("lse", lambda p: p.return_lse or _partial(p)),
    _statistic("row_max", _partial),
    ScalarArg("scale", default=lambda p: p.head_dim**-0.5, positive=True),
    ScalarArg("left", default=lambda p: p.window_left, dtype="int32", when=_window),
    ScalarArg("right", default=lambda p: p.window_right, dtype="int32", when=_window),
    ScalarArg("max_t", default=lambda p: p.t, dtype="int32", when=_varlen),
)


def argument_names(p: Values) -> tuple[str, ...]:
    """The names of a problem's arguments, in call order; its static axes are enough."""
    return tuple(argument.name for argument in SIGNATURE if argument.when is None or argument.when(p))


RULES = (
    Constraint("heads_divide", "heads must be a multiple of kv_heads", lambda p: p.heads % p.kv_heads == 0),
    Constraint(
        "sink_final",
        "a sink is the last word on a row's sum, so it needs normalize: the parts of a merge must leave it out",
        lambda p: p.normalize or not p.has_sink,
    ),
    Constraint(
        "shared_v",
        "with kv_shared V is K's first head_dim_v columns, so head_dim_v must be at most head_dim",
        lambda p: not p.kv_shared or p.head_dim_v <= p.head_dim,
    ),
    Constraint(
        "window_sides",
        "window_left and window_right are the sides of mask=window; with another mask they stay -1",
        lambda p: _window(p) or p.window_left == p.window_right == -1,
    ),
    Constraint(
        "second_source",
        "sources=2 has a second source of s_k2 > 0 keys, sources=1 none (s_k2=0)",
        lambda p: _two(p) == (p.s_k2 > 0),
    ),
    Constraint(
        "gather_list",
        "gather lists top_k > 0 entries a query, and without it top_k is 0",
        lambda p: bool(p.gather) == (p.top_k > 0),
    ),
    Constraint(
        "gather_positions",
        "a gathered source has neither positions nor a length, only its list: if it is the one source, mask=none and "
        "no lengths",
        lambda p: not p.gather or _two(p) or (p.mask == "none" and not p.has_lengths),
    ),
    Constraint(
        "layouts",
        "pages and packed sequences are for one source that is not gathered",
        lambda p: not (_paged(p) or p.varlen) or not (_two(p) or p.gather),
    ),
    Constraint(
        "paged_lengths",
        "a page's end is no sequence's end: page > 0 needs has_lengths",
        lambda p: p.has_lengths or not _paged(p),
    ),
    Constraint(
        "packed_lengths",
        "cu_seqlens_k has the lengths of packed keys: varlen without pages takes no has_lengths",
        lambda p: not (packs_keys(p) and p.has_lengths),
    ),
    Constraint("page_size", f"page is 0 or a multiple of {PAGE_KEYS} keys", lambda p: p.page % PAGE_KEYS == 0),
    Constraint(
        "table_covers",
        "table_pages * page must be at least s_k, or the table has no entry for the last keys",
        lambda p: not _paged(p) or p.table_pages * p.page >= p.s_k,
    ),
    Constraint(
        "packed_rows",
        "no packed sequence is longer than t queries and s_k keys: total_t <= batch * t and total_s_k <= batch * s_k",
        lambda p: (
            (not p.varlen or p.total_t <= p.batch * p.t) and (not packs_keys(p) or p.total_s_k <= p.batch * p.s_k)
        ),
    ),
    Constraint(
        "unused",
        "table_pages and pages are 1 without pages, total_t and total_s_k 1 where nothing is packed",
        lambda p: (
            (_paged(p) or p.table_pages == p.pages == 1)
            and (p.varlen or p.total_t == 1)
            and (packs_keys(p) or p.total_s_k == 1)
        ),
    ),
)
